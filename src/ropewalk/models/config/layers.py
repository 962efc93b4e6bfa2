"""What a config states of its layers: the keys, how classes of transformers complete them, and which values are valid.

What a key means can depend on the type of model; those types are named here. :mod:`ropewalk.models.config.model` reads
the result into a :class:`~ropewalk.models.config.model.LayerConfig` for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ropewalk.errors import RopewalkError
from ropewalk.rope.config import OF_LAYERS, head_dim, rotates_a_share
from ropewalk.versions import older_transformers

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SERVED = (FULL, SLIDING, CHUNKED)
"""Layer types of attention that packed rows can pass through."""
INDEXED = "indexed_attention"
"""Layer type whose queries attend to the ``index_topk`` earlier tokens that an indexer chooses for each."""
BLOCKS = "minimax_m3_sparse"
"""Layer type whose queries attend to ``index_topk_blocks`` blocks of ``index_block_size`` earlier tokens, the nearest
ones and those that an indexer chooses for each."""
COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Layer types whose queries attend to a window, and to entries that stand for several earlier tokens each."""
SPARSE = (INDEXED, BLOCKS, *COMPRESSED)
"""Layer types of attention that reaches all earlier tokens, but not with a score for each."""
HYBRID = "hybrid"
"""Layer type with full attention beside a recurrent mixer."""
ATTENDING = (*SERVED, HYBRID, *SPARSE)
"""Layer types that have attention."""
RECURRENT = ("linear_attention", "conv", HYBRID)
"""Layer types whose mixer carries a state from token to token, or reads earlier tokens through a convolution."""
GATED_DELTA, KIMI_DELTA, MAMBA_2 = "gated delta rule", "Kimi delta rule", "Mamba-2"
LIGHTNING, SHORT_CONVOLUTION = "lightning attention", "short convolution"


class Mixer(NamedTuple):
    """The recurrent mixer of a model type: the attribute of a layer, and its recurrence."""

    attribute: str
    recurrence: str


MIXERS = {
    "bailing_hybrid": Mixer("self_attn", KIMI_DELTA),
    "bamba": Mixer("mamba", MAMBA_2),
    "falcon_h1": Mixer("mamba", MAMBA_2),
    "granitemoehybrid": Mixer("mamba", MAMBA_2),
    "kimi_linear": Mixer("self_attn", KIMI_DELTA),
    "lara_mini": Mixer("linear_attn", GATED_DELTA),
    "lfm2": Mixer("conv", SHORT_CONVOLUTION),
    "lfm2_moe": Mixer("conv", SHORT_CONVOLUTION),
    "lfm3": Mixer("conv", SHORT_CONVOLUTION),
    "minimax": Mixer("self_attn", LIGHTNING),
    "nemotron_h": Mixer("mixer", MAMBA_2),
    "olmo_hybrid": Mixer("linear_attn", GATED_DELTA),
    "qwen3_5_moe_text": Mixer("linear_attn", GATED_DELTA),
    "qwen3_5_text": Mixer("linear_attn", GATED_DELTA),
    "qwen3_next": Mixer("linear_attn", GATED_DELTA),
}
"""Model types whose recurrent layers restart at each document."""
INDEXERS = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")
"""Model types whose indexers choose among the tokens that a query of a packed row sees."""
INDEXERS_SINCE = "5.24"
"""The transformers from which on their indexers return what they choose, and pass it on to the attention function."""
WITHOUT_ROPE = ("kimi_linear", "nemotron_h")
"""Model types in which no layer has RoPE, whatever their configs state."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the number of experts that a layer's router chooses from."""
ROTATE_IN_WINDOWS_ALONE = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Model types whose full-attention layers have no RoPE if other layers have a window."""
WITH_SINKS = (
    "flint",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "hy_v4_vl_text",
    "openai_privacy_filter",
)
"""Model types with a learned attention sink in every layer."""
MASK_EVERY_KIND = {
    "afmoe": "sliding_window",
    "cohere2": "sliding_window",
    "cohere2_moe": "sliding_window",
    "gemma2": "sliding_window",
    "gemma3_text": "sliding_window",
    "gpt_oss": "sliding_window",
    "granite_swa": "sliding_window",
    "granitemoe_swa": "sliding_window",
    "kolibri1": "sliding_window",
    "llama4_text": "attention_chunk_size",
    "ministral": "sliding_window",
    "modernbert-decoder": "sliding_window",
    "olmo3": "sliding_window",
    "vaultgemma": "sliding_window",
}
"""Model types for which transformers builds the mask of windows or chunks even if no layer has one, and fails if the
config has no width for it; with the key of that width."""
WINDOWS_IN_THE_MASK = ("phimoe", "qwen2_moe")
"""Model types that mask by a window, but do not pass it to their attention function."""
ASKS_THE_LAYERS_SINCE = {"llama4_text": "5.24"}
"""Those of :data:`MASK_EVERY_KIND` for which a later transformers builds no such mask if no layer needs it, with its
version."""
WIDTHS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""The key that limits how far back layers of a type see."""
ROPE_NAMES = {"deepseek_v4": {SLIDING: "main", **dict.fromkeys(COMPRESSED, "compress")}}
"""Model types whose RoPE parameters by type have keys other than layer types, with the key of each layer type."""
COMPRESSED_BASE = "compress_rope_theta"
"""The base of layers with compressed entries; their model's ``rope_theta`` is that of layers with a window alone."""
READ_OF_EACH_LAYER = ("head_dim", "num_attention_heads", "num_key_value_heads")
"""Values in which layers may differ."""
OTHER_KINDS = ("mlp_layer_types", "layers_block_type")
"""Lists with an entry for each layer that classes do not check against the number of layers."""
LISTS_OF_LAYERS = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers")
"""Lists of the numbers of layers with attention (Bamba, LFM2); classes take any number."""
HEADS_OF_LAYERS = "num_attention_heads_per_layer"
"""A number of query heads for each layer (Laguna)."""
BASES_OF_LAYERS = "layer_rope_theta"
"""A base for each layer, 0 for one without RoPE (Granite with windows); the layers do not use ``rope_theta``."""


SHAPE_KEYS = (
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "num_key_value_heads",
    "head_dim",
)


def shape_values(text: Any) -> dict[str, int]:
    """Dimensions and counts in a transformers config, under the names that are read.

    A value in which layers differ is the one that :func:`layer_values` replaces for some of them.
    """
    # Reading such a value from the config raises an error, but its mapping has it.
    apart = getattr(text, "per_layer_attributes", None) or ()
    stated = text.to_dict() if apart else {}
    found = {key: stated.get(key) if key in apart else getattr(text, key, None) for key in SHAPE_KEYS}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def layer_values(text: Any) -> dict[str, Any]:
    """The values of all keys about layers, as a transformers config class completes them.

    Args:
        text: the config of the language model (``config.get_text_config()``).

    Raises:
        RopewalkError: if layers differ in a value that ropewalk reads once for all of them.
    """
    apart = set(getattr(text, "per_layer_attributes", None) or ())
    unread = sorted(apart - set(READ_OF_EACH_LAYER))
    if unread:
        raise RopewalkError(
            f"the layers of {text.model_type} differ in {', '.join(unread)} ({OF_LAYERS}); ropewalk supports only "
            f"layers that differ in {', '.join(READ_OF_EACH_LAYER)}"
        )
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        # The same order in which transformers selects the mask of all layers.
        kind = FULL
        if getattr(text, "sliding_window", None) is not None:
            kind = SLIDING
        elif getattr(text, "attention_chunk_size", None) is not None:
            kind = CHUNKED
        kinds = [kind] * (getattr(text, "num_hidden_layers", None) or 1)
    layers = {"layer_types": list(kinds), "is_causal": getattr(text, "is_causal", True)}
    off = not getattr(text, "use_sliding_window", True)
    width = getattr(text, "sliding_window", None)
    if off and (width == 0 or (width is None and SLIDING in kinds)):
        # The switch decides, whatever width a file states; Qwen2-MoE's class writes 0 for no window.
        layers["sliding_window"] = None
    if width is not None and "sliding_window" in getattr(text, "attribute_map", {}):
        # RecurrentGemma's file calls it attention_window_size.
        layers["sliding_window"] = width
    if apart:
        layers[OF_LAYERS] = text.to_dict()[OF_LAYERS]
    rotating = getattr(text, "no_rope_layers", None)
    return {**layers, "no_rope_layers": list(rotating)} if rotating else layers


RECURRENT_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
"""Keys for the heads of gated DeltaNet; each key head serves the same number of value heads."""
COUNTS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads"),
    *("head_dim", "v_head_dim", "kv_lora_rank", "decoder_sparse_step"),
    *("linear_conv_kernel_dim", "mamba_d_conv", "conv_L_cache"),
    *(*RECURRENT_HEADS, "linear_key_head_dim", "linear_value_head_dim"),
)
"""Keys whose whole numbers must be at least 1."""
SIZES = (*COUNTS, "intermediate_size", "num_key_value_heads")
"""Keys of numbers that are dimensions, heads or tokens."""
LARGEST_SIZE = 2**31 - 1
"""The largest 32-bit integer: no tensor or token id of any model comes near it."""
MOST_LAYERS = 2**16
"""Far above any model; each layer takes an entry in several lists."""
ABOVE_0 = (
    *("attn_logit_softcapping", "query_pre_attn_scalar", "floor_scale"),
    *("attention_multiplier", "key_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale"),
)
"""Keys of numbers that scores, positions, embeddings or logits are multiplied or divided by."""


def check_layers(config: Mapping[str, Any]) -> None:
    """Raise for an invalid value of a key about layers; the message names the key and, for a list, the layer."""
    # First, because lists are made with an entry for each layer.
    for key, largest in {**dict.fromkeys(SIZES, LARGEST_SIZE), "num_hidden_layers": MOST_LAYERS}.items():
        value = config.get(key)
        if type(value) is int and value > largest:
            # Beyond 64 bits only the number of digits is of interest.
            shown = value if value < 2**64 else f"a number of {len(str(value))} digits"
            raise RopewalkError(f"{key} is {shown} in the config, but must be at most {largest}")
    # Qwen2-MoE's class writes 0 for a window that its switch turns off; a list of layers makes an interval unused.
    least = {
        "num_hidden_layers": 1,
        "sliding_window": 0 if _switched_off(config) else 1,
        "attention_chunk_size": 1,
        "max_window_layers": 0,
        "first_k_dense_replace": 0,
        "qk_nope_head_dim": 0,
        "no_rope_layer_interval": 0 if config.get("no_rope_layers") else 1,
        "full_attention_interval": 0 if config.get("layer_types") else 1,
    }
    stated = config.get("layer_types")
    # A value that is no list is refused below.
    kinds = list(stated) if isinstance(stated, list | tuple) else []
    of_kinds = {key: kind for kind, key in WIDTHS.items()}
    for key, smallest in least.items():
        value = config.get(key)
        # isinstance would accept true, which is an int in Python.
        if value is not None and (type(value) is not int or value < smallest):
            kind = of_kinds.get(key)
            # Without a list of types, those that the config would have with a width in this place.
            named = kinds if stated else _kinds_with(config, key)
            where = f" for layer {list(named).index(kind)}" if kind in named else ""
            raise RopewalkError(
                f"{key} is {value!r} in the config{where}, but must be a whole number of at least {smallest}"
            )
    for key in COUNTS:
        value = config.get(key)
        # Other types than whole numbers are for the class to refuse or to read: a few have a list of layers here.
        if type(value) is int and value < 1:
            raise RopewalkError(f"{key} is {value} in the config, but must be at least 1")
    for key in ABOVE_0:
        value = config.get(key)
        if isinstance(value, int | float) and not value > 0:
            raise RopewalkError(f"{key} is {value} in the config, but must be above 0")
    chosen = config.get("num_experts_per_tok")
    for key in NUMBERS_OF_EXPERTS:
        experts = config.get(key)
        if type(chosen) is int and type(experts) is int and experts > 0 and not 1 <= chosen <= experts:
            raise RopewalkError(
                f"num_experts_per_tok is {chosen} in the config, but must be from 1 to {experts} ({key})"
            )
    switch = config.get("use_sliding_window")
    if switch is not None and not isinstance(switch, bool):
        raise RopewalkError(f"use_sliding_window is {switch!r} in the config, but must be true or false")
    pattern = config.get("sliding_window_pattern")
    # Beside a list of types a pattern is unused, so it may be 0.
    idle = pattern is None or (pattern == 0 and config.get("layer_types"))
    if isinstance(pattern, bool) or not (idle or (pattern and isinstance(pattern, str | int))):
        raise RopewalkError(
            f"sliding_window_pattern is {pattern!r} in the config, but must be a whole number of at least 1, or a "
            "string of the letters L and G"
        )
    check_recurrent_heads(config, kinds)
    _check_heads_of_layers(config)
    _check_list(config, "layer_types", str, "the name of a type")
    _check_list(config, "no_rope_layers", int, "1 for a layer with RoPE and 0 for one without")


def _kinds_with(config: Mapping[str, Any], key: str) -> Sequence[str]:
    """Layer types of a config without a list of them, if it stated a width under this key; empty if unreadable."""
    layers = config.get("num_hidden_layers")
    known = type(layers) is int and layers > 0 and key in WIDTHS.values()
    pattern = config.get("sliding_window_pattern")
    readable = pattern is None or (isinstance(pattern, str | int) and bool(pattern))
    return derived_kinds({**config, key: 1}) if known and readable else ()


def check_recurrent_heads(config: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Raise if the key heads of gated DeltaNet cannot share its value heads evenly.

    Args:
        config: values of the decoder.
        kinds: its layer types, to name the first layer concerned.
    """
    keys, values = (config.get(key) for key in RECURRENT_HEADS)
    if type(keys) is int and type(values) is int and values % keys:
        where = f" for layer {kinds.index('linear_attention')}" if "linear_attention" in kinds else ""
        raise RopewalkError(
            f"linear_num_value_heads is {values} in the config{where}, but must be a multiple of linear_num_key_heads, "
            f"{keys}"
        )


def _check_heads_of_layers(config: Mapping[str, Any]) -> None:
    listed, kv_heads = config.get(HEADS_OF_LAYERS), config.get("num_key_value_heads")
    multiple = kv_heads if type(kv_heads) is int and kv_heads > 0 else 1
    for number, heads in enumerate(listed if isinstance(listed, list | tuple) else ()):
        if type(heads) is not int or heads < 1 or heads % multiple:
            raise RopewalkError(
                f"{HEADS_OF_LAYERS} is {heads!r} in the config for layer {number}, but must be a positive multiple of "
                f"num_key_value_heads, {multiple}"
            )


def _check_list(config: Mapping[str, Any], key: str, kind: type, entry: str) -> None:
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, list | tuple):
        raise RopewalkError(
            f"{key} is {value!r} in the config, but must be a list with an entry for each layer"
        )
    for number, each in enumerate(value):
        if not isinstance(each, kind) or (kind is int and each not in (0, 1)):
            raise RopewalkError(f"{key} is {each!r} in the config for layer {number}, but must be {entry}")


def check_list_lengths(config: Mapping[str, Any]) -> None:
    """Raise for a list without an entry for each layer, or one that names a layer which the model does not have."""
    stated = config.get("num_hidden_layers") or len(config.get("layer_types") or ())
    for key in LISTS_OF_LAYERS:
        named = config.get(key) or ()
        if not isinstance(named, list | tuple):
            raise RopewalkError(f"{key} is {named!r} in the config, but must be a list of layers")
        for number in named:
            # Without a stated count, a class has one of its own.
            if type(number) is not int or number < 0 or 0 < stated <= number:
                there = (
                    f"the model has {stated} layers, 0 to {stated - 1}" if stated else "layers count from 0"
                )
                raise RopewalkError(f"{key} names layer {number!r}, but {there}")
    count = stated or 1
    for key in ("layer_types", "no_rope_layers", HEADS_OF_LAYERS, BASES_OF_LAYERS, *OTHER_KINDS):
        listed = len(config.get(key) or ())
        # 0 stands for a list that the config does not have.
        if listed in (0, count):
            continue
        raise RopewalkError(
            f"{key} lists {listed} layers, but the model has {count} layers, 0 to {count - 1}"
        )


def required_width(model_type: str | None) -> str | None:
    """The key of the width without which the installed transformers runs no model of a type; None if it needs none."""
    since = ASKS_THE_LAYERS_SINCE.get(model_type or "")
    if since is not None and older_transformers(since) is None:
        return None
    return MASK_EVERY_KIND.get(model_type or "")


def dims_of(values: Mapping[str, Any]) -> tuple[int, int]:
    """Dimensions of a head's queries and keys, and of its values; in latent attention head_dim is their rotated part.

    Args:
        values: values of one layer.
    """
    latent = values.get("qk_head_dim")
    if latent is None and values.get("qk_rope_head_dim") is not None and not rotates_a_share(values):
        latent = values["qk_rope_head_dim"] + (values.get("qk_nope_head_dim") or 0)
    key_dim = head_dim({**values, OF_LAYERS: None}) if latent is None else int(latent)
    return key_dim, values.get("v_head_dim") or key_dim


def _switched_off(config: Mapping[str, Any]) -> bool:
    """Whether a window is off: Qwen writes a window together with a switch, and null turns it off too."""
    return "use_sliding_window" in config and not config["use_sliding_window"]


def width_of(config: Mapping[str, Any], kind: str, kinds: Sequence[str]) -> int:
    """Tokens that a query sees in layers of a type that the model has."""
    key = WIDTHS[kind]
    width = config.get(key)
    if width is None:
        off = kind == SLIDING and config.get("use_sliding_window") is False
        full = "" if required_width(config.get("model_type")) else f", or change the layer to {FULL}"
        raise RopewalkError(
            f"layer {list(kinds).index(kind)} is of type {kind} in the config, and "
            f"{'use_sliding_window is false; set it to true' if off else f'{key} is null; set it in tokens'}{full}"
        )
    return int(width)


def derived_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Layer types of a config without a list of them."""
    layers = config.get("num_hidden_layers") or 1
    if config.get("sliding_window") is None or _switched_off(config):
        chunked = config.get("attention_chunk_size") is not None
        return (CHUNKED if chunked else FULL,) * layers
    pattern = config.get("sliding_window_pattern")
    # EXAONE 4 writes the pattern in letters: L for a local layer, G for a global one.
    if isinstance(pattern, str):
        return [SLIDING if pattern[number % len(pattern)] == "L" else FULL for number in range(layers)]
    # A number p, as Gemma 3 states it: each p-th layer, counted from 1, has full attention.
    if pattern:
        return [SLIDING if (number + 1) % pattern else FULL for number in range(layers)]
    # In Qwen's configs the layers before max_window_layers have full attention.
    first = config.get("max_window_layers") if config.get("use_sliding_window") else None
    return [SLIDING if number >= (first or 0) else FULL for number in range(layers)]


def layers_that_rotate(config: Mapping[str, Any], kinds: Sequence[str]) -> Iterable[bool]:
    # Granite 4 states in words whether it has RoPE.
    rope_stated = (
        config.get("position_embedding_type", "rope") == "rope"
        or config.get("model_type") != "granitemoehybrid"
    )
    if config.get("model_type") in WITHOUT_ROPE or not rope_stated:
        return [False] * len(kinds)
    return [
        turned and kind in ATTENDING
        for turned, kind in zip(_attention_that_rotates(config, kinds), kinds, strict=True)
    ]


def _attention_that_rotates(config: Mapping[str, Any], kinds: Sequence[str]) -> Iterable[bool]:
    bases = config.get(BASES_OF_LAYERS)
    if bases:
        return [bool(base) for base in bases]
    stated = config.get("no_rope_layers")
    if stated:
        # Despite the name no_rope_layers, 1 means a layer with RoPE.
        return [bool(rotates) for rotates in stated]
    every = config.get("no_rope_layer_interval")
    if every:
        return [(number + 1) % every != 0 for number in range(len(kinds))]
    windows_alone = (
        config.get("model_type") in ROTATE_IN_WINDOWS_ALONE and config.get("sliding_window") is not None
    )
    # An entry of null means that the layers of this type have no RoPE.
    nested = config.get("rope_parameters") or {}
    return [
        not (windows_alone and kind == FULL) and not (kind in nested and nested[kind] is None)
        for kind in kinds
    ]


def which_layers(numbers: Sequence[int], layers: int) -> str:
    """``every layer``, ``each of layers 3, 7 and 11 (of 36, counted from 0)``."""
    if len(numbers) == layers:
        return "every layer"
    if len(numbers) == 1:
        return f"layer {numbers[0]} (of {layers}, counted from 0)"
    # In a run of consecutive numbers, the number minus its position stays the same.
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    # Patterns such as every sixth layer are common, and easier to read than a list of numbers.
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        which = f"every {_ordinal(steps.pop())} layer, from {numbers[0]} to {numbers[-1]}"
        return f"{which} (of {layers}, counted from 0)"
    if len(runs) > 4:
        return f"each of {len(numbers)} layers (of {layers})"
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"each of layers {', '.join(spans)} (of {layers}, counted from 0)"


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


def rope_name(model_type: str | None, kind: str) -> str:
    """The key that RoPE parameters by type have for a layer type."""
    return ROPE_NAMES.get(model_type or "", {}).get(kind, kind)


def rope_entry(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The RoPE parameters of a layer type in either spelling of the config; empty if it has none."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    if layer_type is None:
        return parameters or config.get("rope_scaling") or {}
    if parameters:
        # A layer type without RoPE is null, or has no entry.
        return parameters.get(layer_type) or {}
    # In the older spelling rope_scaling applies only to the full layers.
    return (config.get("rope_scaling") or {}) if layer_type == "full_attention" else {}
