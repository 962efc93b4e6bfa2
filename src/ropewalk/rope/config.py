"""Convert RoPE methods from and to the keys of a transformers config, both as plain mappings.

There are two spellings. transformers 5 writes ``rope_parameters``, which contains theta: one mapping, or one for each
layer type. transformers 4 writes ``rope_theta`` beside ``rope_scaling``, and ``rope_local_base_freq`` for the sliding
layers of Gemma 3. Both are read, including older names: ``type`` for ``rope_type`` and ``su`` for ``longrope``.

Meaning of the keys, as transformers uses them:

- ``factor`` divides frequencies. For linear, ntk and yarn it is target length over original length. For llama3 it is
  a chosen number (8 for 8192 to 131072 tokens). For longrope it only determines the attention factor.
- The original length of yarn, llama3 and longrope is ``original_max_position_embeddings``, inside the parameters or
  (Phi-3) at the top level, otherwise ``max_position_embeddings``. For dynamic it is always ``max_position_embeddings``.
- If yarn or longrope has no ``factor``, it is ``max_position_embeddings`` over the original length.
- The original length of llama3 and longrope, and of yarn without ``factor``, cannot exceed
  ``max_position_embeddings``, because it is the length before the extension.
- ``finetuned`` in the YaRN authors' checkpoints has no effect; their checkpoints of type yarn are all static.

A key that could change the frequencies and is not supported raises an error with its name; none is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_ntk_dim, check_positive, check_theta, is_number, whole_number
from ropewalk.rope.methods import Default, DynamicNtk, LongRope, NoRope, Yarn
from ropewalk.rope.methods.base import MAX_LENGTH, ORIGINAL, PARTIAL, ConfigEntry, RopeMethod, methods_by_type
from ropewalk.rope.methods.cope import as_cope
from ropewalk.rope.methods.longrope import MSCALES as LONGROPE_MSCALES
from ropewalk.rope.methods.yarn import MSCALES
from ropewalk.rope.theory.scaling import ntk_theta

Spelling = Literal["5.x", "4.x"]
Config = Mapping[str, Any]

ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    ORIGINAL,
)
"""Every top-level config key that affects RoPE; :func:`replace_methods` removes them."""

SECTIONS = "mrope_section"
"""Pairs of dimensions for time, height and width of an image; in text all three are the same position."""
OF_AXES = ("mrope_interleaved", SECTIONS)
KEEP_AXES = (Default.name, Yarn.name)
"""Rope types beside which vLLM reads these keys too (``get_rope`` in vllm/model_executor/layers/rotary_embedding)."""
AXES_TYPE = "mrope"
"""Older rope type of such configs; transformers reads it as default."""
RELATIVE_ATTENTION = "attn_factor"
"""Factor on yarn's published attention factor in older vLLM; transformers ignores it."""
READS_AXES = (
    *(
        "cohere_compass_text",
        "cosmos3_edge_text",
        "glm4v_moe_text",
        "glm4v_text",
        "glm_ocr_text",
        "hy_v4_vl_text",
    ),
    *("paddleocr_vl_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_vl_moe_text", "qwen3_vl_text"),
)
"""Types of text models whose configs have these keys."""
TEMPERATURE = "llama_4_scaling_beta"
"""``β`` of Ministral 3 and Mistral 4: attention multiplies queries by ``1 + β·ln(1 + floor(position / T))``; ``T`` is
``original_max_position_embeddings`` of the same entry. It is not part of the rotation and is kept unchanged."""
READS_TEMPERATURE = ("ministral3", "mistral4")
ROTATES_A_SHARE = ("deepseek_v4", "mistral4")
"""Types that state the rotated part of a head twice: as ``qk_rope_head_dim``, and as a share of ``head_dim``."""
TWO_BASES = ("gemma3_text",)
"""Types with ``rope_local_base_freq`` beside ``rope_theta`` in transformers 4."""
FIXED_NTK = "alpha"
"""``α`` of Hunyuan's configs of type dynamic: the base is ``b·α^(d/(d-2))`` at every length."""
IDLE_BESIDE_FIXED_NTK = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", ORIGINAL)
"""Keys of these configs that transformers does not read."""
READS_FIXED_NTK = ("hunyuan_v1_dense", "hunyuan_v1_moe")
OF_LAYERS = "per_layer_config"
"""Values of single layers by their number, where they differ from the config's own."""


def rotates_a_share(config: Config) -> bool:
    """Whether ``partial_rotary_factor`` is a share of the whole head although there is a ``qk_rope_head_dim``."""
    return config.get("model_type") in ROTATES_A_SHARE


def layer_overrides(config: Config) -> dict[int, Config]:
    """The values of single layers that replace those of the config, by the number of the layer.

    Source: ``per_layer_config`` of transformers 5; its class for Gemma 4 makes it of ``global_head_dim``.
    """
    # JSON has no numbers as keys.
    return {int(number): values for number, values in (config.get(OF_LAYERS) or {}).items()}


def head_dim(config: Config, layer_type: str | None = None) -> int:
    """Dimensions of one attention head: ``head_dim``, otherwise ``hidden_size // num_attention_heads``.

    Multi-head latent attention (DeepSeek-V2 and V3) splits each head and rotates only ``qk_rope_head_dim`` dimensions.

    Args:
        config: as for :func:`methods_from_config`.
        layer_type: the layers that are meant, for a config whose layers differ (Gemma 4); None for all layers.

    Raises:
        RopewalkError: if the config states neither, its hidden size is not a multiple of its number of heads, or layers
            that share a RoPE differ.
    """
    overrides = layer_overrides(config)
    # Without a list of types, every layer has the requested type.
    kinds = config.get("layer_types") or (layer_type,) * (config.get("num_hidden_layers") or 1)
    if any("head_dim" in values for values in overrides.values()):
        meant = [number for number, kind in enumerate(kinds) if layer_type in (None, kind)]
        widths = {
            number: overrides.get(number, {}).get("head_dim", config.get("head_dim")) for number in meant
        }
        other = next((number for number in meant if widths[number] != widths[meant[0]]), None)
        if other is not None:
            raise RopewalkError(
                f"layers that share one RoPE must have the same head_dim, got {widths[meant[0]]} in layer {meant[0]} "
                f"and {widths[other]} in layer {other}; give rope_parameters an entry for each layer type"
            )
        # If no layer has this type, none of the overrides applies to it.
        if meant:
            config = {**config, "head_dim": widths[meant[0]]}
    # Latent attention rotates a separate part of each head, whose width this is; head_dim means another part there.
    latent = whole_number(config, "qk_rope_head_dim")
    if latent and not rotates_a_share(config):
        return latent
    stated = whole_number(config, "head_dim")
    if stated is not None:
        return stated
    hidden, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
    if not hidden or not heads:
        raise RopewalkError(
            "the config must have either head_dim, or both hidden_size and num_attention_heads, got hidden_size "
            f"{hidden} and num_attention_heads {heads}"
        )
    if hidden % heads:
        raise RopewalkError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and the config has no head_dim; "
            "write head_dim into the config"
        )
    return hidden // heads


def method_from_config(config: Config, layer_type: str | None = None) -> RopeMethod:
    """The RoPE method of a config, or of one of its layer types.

    :func:`methods_from_config` returns the methods of all layer types.

    Args:
        config: a ``config.json`` as a mapping, or ``model.config.to_dict()``.
        layer_type: the layer type, such as ``full_attention``; required if layer types have different methods.

    Raises:
        RopewalkError: if the config has no ``rope_theta``, contradicts itself, or contains an unknown rope type or key;
            or if ``layer_type`` is missing or unknown.
    """
    methods = methods_from_config(config)
    if layer_type in methods:
        return methods[layer_type]
    known = ", ".join(sorted(str(name) for name in methods if name is not None))
    if layer_type is None:
        raise RopewalkError(
            f"this config has a RoPE method for each layer type; pass layer_type, one of {known}"
        )
    raise RopewalkError(
        f"this config has no RoPE method for layer type {layer_type!r}; "
        + (f"choose one of {known}" if known else "omit layer_type, because all layers share one method")
    )


def methods_from_config(config: Config) -> dict[str | None, RopeMethod]:
    """The RoPE methods of a config by layer type; the key is None if all layers share one method.

    A layer type whose entry is null has no position embedding and is omitted.

    Args:
        config: a ``config.json`` as a mapping, or ``model.config.to_dict()``, which also contains the defaults of the
            model's configuration class.

    Raises:
        RopewalkError: if the config has no ``rope_theta`` (there is no default), contradicts itself, or contains an
            unknown rope type or key.
    """
    if isinstance(config.get("text_config"), Mapping) and not any(
        config.get(key) for key in ("rope_parameters", "rope_theta")
    ):
        raise RopewalkError(
            "this config contains the language model's config under text_config; pass config['text_config']"
        )
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value and not isinstance(value, Mapping):
            raise RopewalkError(f"{key} must be a mapping, got {value!r}")
    local_theta = config.get("rope_local_base_freq")
    # One entry per layer type; null marks a layer type without RoPE.
    if parameters and (
        any(isinstance(entry, Mapping) for entry in parameters.values())
        or all(entry is None for entry in parameters.values())
    ):
        return _nested_methods(config, _entries_of_layers(parameters))
    if local_theta is None:
        return {None: _plain_method(config)}
    if parameters:
        raise RopewalkError(
            f"rope_local_base_freq {local_theta} gives sliding-window layers a base of their own, but rope_parameters "
            "has one entry for all layers; remove rope_local_base_freq, or give rope_parameters an entry for each "
            "layer type"
        )
    return {
        "full_attention": _method(config, _with_theta(config, scaling or {}), "full_attention"),
        "sliding_attention": _method(config, {"rope_theta": local_theta}, "sliding_attention"),
    }


def _entries_of_layers(parameters: Config) -> dict[str, Config | None]:
    """The entries by layer type, without the length that Laguna repeats beside them, where nothing reads it."""
    entries = {key: entry for key, entry in parameters.items() if entry is None or isinstance(entry, Mapping)}
    for key, value in parameters.items():
        if key not in entries and (
            key != ORIGINAL or all((e or {}).get(key) != value for e in entries.values())
        ):
            raise RopewalkError(
                f"rope_parameters sets {key} {value!r} outside the entries of its layer types, where nothing reads it; "
                f"move {key} into the entry of {' or '.join(entries)}"
            )
    return entries


def _nested_methods(config: Config, parameters: Config) -> dict[str | None, RopeMethod]:
    methods: dict[str | None, RopeMethod] = {}
    for layer_type, entry in parameters.items():
        if entry is not None:
            if entry.get("rope_theta") is None:
                raise RopewalkError(
                    f"rope_parameters[{layer_type!r}] in the config has no rope_theta; write the "
                    "base into this entry"
                )
            methods[layer_type] = _method(config, entry, layer_type)
    scaling, full = config.get("rope_scaling"), methods.get("full_attention")
    if scaling and (
        full is None or full != _method(config, {"rope_theta": full.rope_theta, **scaling}, "full_attention")
    ):
        raise RopewalkError(
            f"rope_scaling {dict(scaling)} contradicts rope_parameters['full_attention'] in the config; remove one of "
            "them"
        )
    # A base at the top level may repeat that of a layer type. If it repeats none, it is unclear which one was meant.
    for key in ("rope_theta", "rope_local_base_freq"):
        stated = config.get(key)
        if stated is not None and all(method.rope_theta != stated for method in methods.values()):
            raise RopewalkError(
                f"{key} is {stated}, but no layer type in rope_parameters has this base; remove {key}, or correct "
                "rope_parameters"
            )
    return methods


def _plain_method(config: Config) -> RopeMethod:
    """One method from either of the two spellings, or from both if they agree."""
    spellings = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    found = {key: _method(config, _with_theta(config, entry)) for key, entry in spellings.items()}
    if not found:
        return _method(config, _with_theta(config, {}))
    # Methods are compared, not keys, because the two spellings write the same method differently.
    if len(set(found.values())) > 1:
        stated = " but ".join(f"{key} says {method}" for key, method in found.items())
        raise RopewalkError(f"the config contradicts itself: {stated}; remove the wrong one")
    return next(iter(found.values()))


def _with_theta(config: Config, entry: Config) -> dict[str, Any]:
    """The entry with the config's single ``rope_theta``, wherever the config states it."""
    stated = {
        key: value["rope_theta"]
        for key, value in (
            ("outside the RoPE parameters", config),
            ("in rope_parameters", config.get("rope_parameters") or {}),
            ("in rope_scaling", config.get("rope_scaling") or {}),
        )
        if value.get("rope_theta") is not None
    }
    if not stated:
        raise RopewalkError(
            "no rope_theta: this checkpoint does not use RoPE, or its config does not state the base; if it uses RoPE, "
            "write rope_theta into config.json, or load the model with transformers and use model.config.to_dict(), "
            "which includes the defaults of the model's class"
        )
    # The same base may stand in several places, as transformers 5 leaves it there; only contradictions are refused.
    theta = next(iter(stated.values()))
    if any(value != theta for value in stated.values()):
        text = ", ".join(f"{value} {place}" for place, value in stated.items())
        raise RopewalkError(f"rope_theta has different values: {text}; remove the wrong one")
    return {**entry, "rope_theta": theta}


def _method(config: Config, entry: Config, layer_type: str | None = None) -> RopeMethod:
    """The method that a flat mapping of RoPE parameters, including ``rope_theta``, describes."""
    method = _method_of_type(config, entry)
    values = {key: value for key, value in entry.items() if value is not None}
    kept = _keys_kept(config)
    sections = values.get(SECTIONS)
    if SECTIONS in kept and sections is not None and not _of_three_axes(sections):
        raise RopewalkError(
            f"{SECTIONS} must be three whole numbers, of time, height and width, got {sections!r}"
        )
    for key in ("rope_type", "type", *kept):
        values.pop(key, None)
    if config.get("model_type") in READS_TEMPERATURE:
        _pop_stated_length(config, values)
    theta = values.pop("rope_theta")
    partial = _partial(config, values.pop(PARTIAL, None))
    dim = head_dim(config, layer_type)
    # Proportional RoPE spaces its frequencies by the fraction itself; the others need only the rotated dimensions,
    # which readers round down.
    if PARTIAL in (method.config_keys or ()):
        values[PARTIAL] = partial
    else:
        dim = _rotated(config, dim, partial)
    # A factor of 1 beside type default changes nothing; any other factor there is an error.
    if method is Default and values.get("factor") == 1:
        del values["factor"]
    alpha: Any = values.get(FIXED_NTK) if config.get("model_type") in READS_FIXED_NTK else None
    fixed = method is DynamicNtk and alpha not in (None, 0)
    known = (FIXED_NTK, *IDLE_BESIDE_FIXED_NTK) if fixed else method.config_keys or ()
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise _unknown_keys(config, entry, method, unknown)
    if fixed:
        # An alpha below 1 is not refused: transformers computes the same base from it.
        check_positive(FIXED_NTK, alpha)
        check_ntk_dim(dim)
        check_theta(theta)
        return Default(dim, ntk_theta(dim, theta, alpha))
    read = method.from_entry(ConfigEntry(method.name, dim, theta, values, config))
    return NoRope.instead_of(as_cope(read))


def _unknown_keys(
    config: Config, entry: Config, method: type[RopeMethod], unknown: list[str]
) -> RopewalkError:
    """The error for keys that the type of an entry does not have."""
    if not (entry.get("rope_type") or entry.get("type")):
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        known = ", ".join(name for name in methods_by_type() if name != Default.name)
        return RopewalkError(
            f"{key} of the config states {', '.join(unknown)} but no rope_type; add rope_type, one of {known}"
        )
    if any(key in OF_AXES for key in unknown):
        return _no_axes(config, f"the keys {', '.join(key for key in unknown if key in OF_AXES)}")
    stated: Any = entry.get(RELATIVE_ATTENTION)
    factor: Any = entry.get("factor")
    if unknown == [RELATIVE_ATTENTION] and method is Yarn and is_number(stated) and is_number(factor):
        published = 0.1 * math.log(max(factor, 1)) + 1
        return RopewalkError(
            f"{RELATIVE_ATTENTION} is {stated} in the config: transformers ignores it, but vLLM multiplies the "
            f"attention factor of {published:.10g} by it; replace it by attention_factor "
            f"{stated * published:.10g} for what vLLM computes, or remove it for what transformers computes"
        )
    known = ", ".join(method.config_keys or ())
    return RopewalkError(f"rope type {method.name!r} has unknown keys {', '.join(unknown)}; it takes {known}")


def _no_axes(config: Config, what: str) -> RopewalkError:
    """The error for positions in time, height and width of images in a family that ropewalk does not support."""
    return RopewalkError(
        f"the config has {what} for positions in images and videos, which ropewalk does not support for the model "
        f"type {config.get('model_type')!r}; `ropewalk models` lists the types that it supports"
    )


def _rotated(config: Config, dim: int, partial: float) -> int:
    """The rotated dimensions of a head; an error names the keys that they follow from."""
    rotated = int(dim * partial)
    if rotated >= 2 and rotated % 2 == 0:
        return rotated
    stated = config.get("rotary_dim")
    key = "qk_rope_head_dim" if config.get("qk_rope_head_dim") else "head_dim"
    computed = config.get(key) is None and not layer_overrides(config)
    source = f"{key} {dim}" + (" (hidden_size / num_attention_heads)" if computed else "")
    source += "" if partial == 1 else f" times partial_rotary_factor {partial:g}"
    raise RopewalkError(
        f"the number of rotated dimensions per head must be even and at least 2, got {rotated} from "
        + (source if stated is None else f"rotary_dim {stated}")
    )


def _method_of_type(config: Config, entry: Config) -> type[RopeMethod]:
    known = methods_by_type()
    # Some configs have both the old and the new key; they may spell one method differently (su and longrope).
    kinds = {entry[key] for key in ("rope_type", "type") if entry.get(key)} or {Default.name}
    if config.get("model_type") in READS_AXES:
        kinds = {Default.name if kind == AXES_TYPE else kind for kind in kinds}
    unknown = [kind for kind in kinds if kind not in known]
    methods = {known[kind] for kind in kinds if kind in known}
    if len(kinds) > 1 and (unknown or len(methods) > 1):
        raise RopewalkError(
            f"the key 'rope_type' is {entry['rope_type']!r}, but the key 'type' is {entry['type']!r}; keep only one key"
        )
    if unknown == [AXES_TYPE]:
        raise _no_axes(config, f"the rope type {AXES_TYPE!r}")
    if unknown:
        raise RopewalkError(f"unknown rope type {unknown[0]!r}; known are {', '.join(known)}")
    return methods.pop()


def _partial(config: Config, inside: float | None) -> float:
    outside = config.get("partial_rotary_factor")
    if inside is not None and outside is not None and inside != outside:
        raise RopewalkError(
            f"partial_rotary_factor is {outside} outside the RoPE parameters of the config, but {inside} "
            "inside; remove the wrong one"
        )
    partial = next((value for value in (inside, outside) if value is not None), 1.0)
    if not is_number(partial) or not 0 < partial <= 1:
        raise RopewalkError(f"partial_rotary_factor must be a number above 0 and at most 1, got {partial!r}")
    return float(partial)


def config_entries(
    methods: RopeMethod | Mapping[str | None, RopeMethod],
    head_dim: int | Mapping[str | None, int],
    *,
    spelling: Spelling = "5.x",
) -> dict[str, Any]:
    """The top-level keys that make a config state these methods.

    Remove the keys of :data:`ROPE_KEYS` that a config already has first, because they may contradict these;
    :func:`replace_methods` does both.

    Args:
        methods: one method, or one for each layer type; the key None means all layers.
        head_dim: dimensions of one head, or of one for each layer type; if ``rotary_dim`` is smaller,
            ``partial_rotary_factor`` is written.
        spelling: ``5.x``: ``rope_parameters``; ``4.x``: ``rope_theta`` and ``rope_scaling`` (default: None).

    Returns:
        JSON values. Longrope also gets ``original_max_position_embeddings`` at the top level, which takes precedence in
            Phi-3's config, and dynamic gets ``max_position_embeddings``, its original length.

    Raises:
        RopewalkError: if a config cannot express the methods: start tokens, or layer types in the 4.x spelling other
            than Gemma 3's (``full_attention``, and ``sliding_attention`` of type default).
    """
    if spelling not in ("5.x", "4.x"):
        raise RopewalkError(f"unknown spelling {spelling!r}; choose one of 5.x, 4.x")
    by_layer: dict[str | None, RopeMethod] = (
        {None: methods} if isinstance(methods, RopeMethod) else dict(methods)
    )
    dims = dict.fromkeys(by_layer, head_dim) if isinstance(head_dim, int) else head_dim
    written = {layer_type: _parameters(method, dims[layer_type]) for layer_type, method in by_layer.items()}
    if not written or (None in written and len(written) > 1):
        raise RopewalkError(
            "methods must have either the single key None (one method for all layers) or one key per layer type, got "
            f"{', '.join(map(str, written)) or 'no keys'}"
        )
    entries = _beside(by_layer)
    if spelling == "5.x":
        return {"rope_parameters": written.get(None, written), **entries}
    if None not in written:
        # The older spelling has room for one method and a bare base for windowed layers, as Gemma 3 used it.
        local = by_layer.get("sliding_attention")
        if set(written) != {"full_attention", "sliding_attention"} or not isinstance(local, Default):
            raise RopewalkError(
                "the config format of transformers 4.x cannot state this combination of RoPE methods: "
                f"{', '.join(f'{method.name} for {key}' for key, method in by_layer.items())}; set spelling='5.x' "
                "(in 4.x, only full_attention can be scaled; sliding_attention can have only a base)"
            )
        entries["rope_local_base_freq"] = local.rope_theta
    scaling = dict(written[None] if None in written else written["full_attention"])
    entries["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        entries["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    entries["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return entries


def replace_methods(
    config: Config, methods: RopeMethod | Mapping[str | None, RopeMethod], *, spelling: Spelling = "5.x"
) -> dict[str, Any]:
    """A copy of the config that states these methods and nothing else about RoPE.

    ``max_position_embeddings`` is unchanged, except for dynamic: the caller decides how many tokens the model now
    reads.
    """
    others = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    kinds = (None,) if isinstance(methods, RopeMethod) else methods
    dims = {layer_type: head_dim(config, layer_type) for layer_type in kinds}
    # Every RoPE key of both spellings is removed first: one that stayed could contradict the new entries.
    written = others | config_entries(methods, dims, spelling=spelling)
    before = config.get("rope_parameters") or {}
    entry = written.get("rope_parameters")
    if entry is not None and None in kinds:
        written["rope_parameters"] = _with_other_keys(config, before, entry)
    elif entry is not None:
        written["rope_parameters"] = {
            kind: _with_other_keys(config, before.get(kind) or {}, each) for kind, each in entry.items()
        }
    return written


def _with_other_keys(config: Config, before: Config, entry: Config) -> dict[str, Any]:
    """A new entry with keys of the old one that the model needs for images or for its attention's temperature.

    Raises:
        RopewalkError: if the new RoPE would change what these keys mean.
    """
    kept = {key: before[key] for key in _keys_kept(config) if key in before}
    kind = entry.get("rope_type", Default.name)
    if SECTIONS in kept and kind not in KEEP_AXES:
        raise RopewalkError(
            f"RoPE of type {kind} would change positions in images: beside it, vLLM ignores {SECTIONS}, which gives "
            f"pairs of dimensions to time, height and width; choose {' or '.join(KEEP_AXES)}, for example "
            "rope: {method: theta}"
        )
    if TEMPERATURE in kept and ORIGINAL in before:
        length = entry.get(ORIGINAL, before[ORIGINAL])
        if length != before[ORIGINAL]:
            raise RopewalkError(
                f"the attention temperature of {TEMPERATURE} {before[TEMPERATURE]} depends on {ORIGINAL}, which "
                f"the new RoPE would change from {before[ORIGINAL]} to {length}; choose a method that keeps "
                f"{before[ORIGINAL]}, such as theta"
            )
        kept[ORIGINAL] = length
    return {**entry, **kept}


def _two_bases(parameters: Config) -> dict[str, Any]:
    """Parameters by layer type in the keys of transformers 4's Gemma 3; empty if these have no place for them."""
    full, local = (parameters.get(kind) for kind in ("full_attention", "sliding_attention"))
    if not full or not local or local.get("rope_type", Default.name) != Default.name:
        return {}
    older = {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    if full.get("rope_type", Default.name) != Default.name:
        older["rope_scaling"] = {key: value for key, value in full.items() if key != "rope_theta"}
    return older


def _keys_kept(config: Config) -> tuple[str, ...]:
    """Keys of the entry that do not affect frequencies in text."""
    if config.get("model_type") in READS_AXES:
        return OF_AXES
    return (TEMPERATURE,) if config.get("model_type") in READS_TEMPERATURE else ()


def _of_three_axes(sections: Any) -> bool:
    # isinstance would accept true, which is an int in Python.
    return (
        isinstance(sections, list | tuple)
        and len(sections) == 3
        and all(type(size) is int and size >= 0 for size in sections)
    )


def _pop_stated_length(config: Config, values: dict[str, Any]) -> None:
    """Remove the length that Ministral 3 repeats inside the entry, where nothing reads it."""
    inside, outside = values.pop(MAX_LENGTH, None), config.get(MAX_LENGTH)
    if inside is not None and outside is not None and inside != outside:
        raise RopewalkError(
            f"{MAX_LENGTH} is {outside} outside the RoPE parameters of the config, but {inside} inside; remove "
            "the wrong one"
        )


def _parameters(method: RopeMethod, head_dim: int) -> dict[str, Any]:
    """One flat mapping of the 5.x spelling, without fields that are None."""
    written = method.as_written()
    entry = {"rope_type": written.name, **written.to_entry()}
    if written.rotary_dim != head_dim:
        entry["partial_rotary_factor"] = _partial_rotary_factor(written.rotary_dim, head_dim)
    return entry


def _beside(by_layer: Mapping[str | None, RopeMethod]) -> dict[str, Any]:
    """Lengths at the top level of a config, which can state only one value of each."""
    entries: dict[str, Any] = {}
    for method in by_layer.values():
        for key, length in method.top_level().items():
            if entries.setdefault(key, length) != length:
                raise RopewalkError(
                    f"a config can state only one {key}, but the layer types need {entries[key]} and {length}"
                )
    return entries


def _partial_rotary_factor(rotary_dim: int, head_dim: int) -> float:
    if rotary_dim > head_dim:
        raise RopewalkError(f"rotary_dim {rotary_dim} is more than head_dim {head_dim}")
    # Readers compute int(head_dim * factor). If rounding would make the plain quotient fall just short, half a
    # dimension is added, which int() removes again.
    quotient = rotary_dim / head_dim
    return quotient if int(head_dim * quotient) == rotary_dim else (rotary_dim + 0.5) / head_dim


def for_all_readers(config: Config) -> dict[str, Any]:
    """A copy of a config whose RoPE all supported programs compute alike, as far as a config can express that.

    Args:
        config: result of :func:`replace_methods` in the 5.x spelling, with its final ``max_position_embeddings``. A
            config with a RoPE for each layer type is returned unchanged.
    """
    entry = config.get("rope_parameters") or {}
    method = methods_by_type().get(str(entry.get("rope_type")))
    if method is None:
        return dict(config)
    stated = method.for_all_readers(entry, config.get("max_position_embeddings", 0))
    if config.get("qk_rope_head_dim"):
        # There, an mscale_all_dim scales the attention's scores as well.
        stated = {key: value for key, value in stated.items() if key in entry or key not in MSCALES}
    return {**config, "rope_parameters": stated}


def with_older_keys(config: Config) -> dict[str, Any]:
    """A copy of a config in the 5.x spelling that states its RoPE in the keys of transformers 4 as well.

    Programs that read the file themselves, or with transformers 4, know only those, and would silently run a default
    base without them. A config with a RoPE for each layer type (Gemma 3's excepted), or with keys that the older
    spelling has no place for, is returned unchanged.
    """
    entry = config.get("rope_parameters") or {}
    if config.get("model_type") in TWO_BASES:
        return {**config, **_two_bases(entry)}
    in_axes = any(key in entry for key in OF_AXES)
    if "rope_theta" not in entry or TEMPERATURE in entry:
        return dict(config)
    if in_axes and config.get("model_type") not in READS_AXES:
        return dict(config)
    scaling = {key: value for key, value in entry.items() if key not in ("rope_theta", PARTIAL)}
    older = {"rope_theta": entry["rope_theta"]}
    if PARTIAL in entry:
        older[PARTIAL] = entry[PARTIAL]
    if scaling.get("rope_type", Default.name) != Default.name or in_axes:
        older["rope_scaling"] = scaling
    if (
        config.get("model_type") == "phi3"
        and scaling.get("rope_type") == LongRope.name
        and LONGROPE_MSCALES[0] not in scaling
    ):
        # transformers 4 takes these three keys alone, mlx-lm wants type. Both compute the published attention factor.
        factors = {key: scaling[key] for key in ("short_factor", "long_factor")}
        older["rope_scaling"] = {"type": scaling["rope_type"], **factors}
    return {**config, **older}
