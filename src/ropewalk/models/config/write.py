"""A model's config with another RoPE, and in the spelling that every program reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.models.config.file import READ_FLAT
from ropewalk.models.config.layers import BASES_OF_LAYERS, COMPRESSED_BASE, FULL
from ropewalk.models.config.model import ModelConfig, decoder_key
from ropewalk.rope import NoRope, RopeMethod, for_all_readers, replace_methods
from ropewalk.rope.config import with_older_keys
from ropewalk.rope.methods.base import MAX_LENGTH

STAND_STILL = (
    *("cohere", "gemma2", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"),
    *("smollm3", "stablelm", "starcoder2"),
)
"""Model types that transformers runs without any rotation from a longrope config whose factors are NO_ROTATION."""
NAMES_LAYERS = "smollm3"
"""The model type whose config lists the layers without RoPE."""
NORMS_HEADS = "qwen3"
"""The model type with an RMSNorm on the queries and keys of each head, and otherwise the layers of a Llama."""
AS_SMOLLM3 = {
    "llama": "",
    "mistral": "",
    "qwen2": "its queries, keys and values have biases and its outputs none",
    "qwen3": "it normalizes queries and keys",
}
"""Model types by why a model of the type is none of SmolLM3 with the same weights; empty if it is one."""


def with_rope(
    config: ModelConfig,
    method: RopeMethod,
    max_position_embeddings: int | None = None,
    others: Mapping[str, RopeMethod] | None = None,
) -> ModelConfig:
    """A model's config, and transformers config, with this RoPE method for the layers that limit the context.

    Args:
        config: config with its transformers config as ``source``.
        method: method for all layers, or for those with full attention if layer types have their own methods.
        max_position_embeddings: the new context in tokens; None to keep it.
        others: methods for other layer types, as in :meth:`ModelConfig.methods_with`.

    Raises:
        RopewalkError: if the config cannot express this method.
    """
    length = max_position_embeddings or config.max_position_embeddings
    if isinstance(method, NoRope) and method.kept is not None:
        config, method = _without_rope_in(config, method.layers or ()), method.kept
    if isinstance(method, NoRope) and method.qk_norm:
        config = _with_norms(config)
    method = _without_rotation(config, method, length)
    others = {kind: _without_rotation(config, other, length) for kind, other in (others or {}).items()}
    bases = config.values.get(BASES_OF_LAYERS) or ()
    several = sorted({base for base in bases if base} - {each.rope_theta for each in config.methods.values()})
    if several and config.methods_with(method, others) != config.methods:
        raise RopewalkError(
            f"{BASES_OF_LAYERS} in the config of {config.source.model_type} contains bases that differ from "
            f"rope_theta: {', '.join(f'{base:g}' for base in several)}; ropewalk can set only one base for all "
            f"layers; in config.json, write the same base into {BASES_OF_LAYERS} and rope_theta"
        )
    before = config.decoder_values
    # A class may have another name for head_dim, or none.
    stated = {**before, "head_dim": before.get("head_dim") or config.head_dim}
    values = replace_methods(stated, config.methods_with(method, others))
    length = max_position_embeddings or values.get(MAX_LENGTH) or length
    values = for_all_readers({**values, MAX_LENGTH: length or 0})
    # They were filled in for these two calls; below, the class's own spelling is restored.
    for key in ("head_dim", MAX_LENGTH):
        del values[key]
    if "head_dim" in before:
        values["head_dim"] = before["head_dim"]
    values[config.source.get_text_config().attribute_map.get(MAX_LENGTH, MAX_LENGTH)] = length
    if before.get("rope_theta") is not None:
        # If the class has a field for rope_theta, the base must be there as well.
        values["rope_theta"] = method.as_written().rope_theta
    if before.get(COMPRESSED_BASE) is not None:
        # There rope_theta is the base of layers with a window alone.
        values[COMPRESSED_BASE] = method.as_written().rope_theta
        values["rope_theta"] = config.methods_with(method, others)["main"].as_written().rope_theta
    if bases and not several:
        # Granite with windows: a layer has the base of this list, with the rest of the RoPE that all layers share.
        values[BASES_OF_LAYERS] = [method.as_written().rope_theta if base else 0 for base in bases]
    attention = values.get("attn_config")
    if isinstance(attention, Mapping) and "rope_theta" in attention:
        # DBRX's attn_config, which transformers ignores and other programs read.
        values["attn_config"] = {**attention, "rope_theta": method.as_written().rope_theta}
    try:
        return config.with_decoder_values(values)
    except (ValueError, KeyError, StrictDataclassError) as error:
        # Phi-3 accepts only longrope, and reads yarn as longrope.
        raise RopewalkError(
            f"the config of {config.source.model_type} cannot express the RoPE method {method.name}: "
            f"{' '.join(str(error).split())}; use the method theta, which every config can express"
        ) from error


def _without_rotation(config: ModelConfig, method: RopeMethod, length: int | None) -> RopeMethod:
    """A method for the config; one that turns nothing has the context for its original length.

    Raises:
        RopewalkError: if it turns nothing, and was not compared with the model type's code.
    """
    if not isinstance(method, NoRope):
        return method
    if config.model_type not in STAND_STILL:
        raise RopewalkError(
            f"layers without RoPE (method 'none') were compared with transformers' code for the model types "
            f"{', '.join(STAND_STILL)}, and not for {config.model_type}; choose a model of one of these types"
        )
    return replace(method, original_max_position_embeddings=length or method.original_max_position_embeddings)


def _without_rope_in(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The config of the same model in which some more layers have no RoPE: as SmolLM3, which lists such layers.

    Raises:
        RopewalkError: if there is no such layer, no layer would keep RoPE, or SmolLM3's code would compute another
            model from these weights.
    """
    count = len(config.layers)
    if layers[-1] >= count:
        raise RopewalkError(
            f"layers without RoPE: {layers[-1]} is no layer of the model, which has {count}, 0 to {count - 1}"
        )
    rotate = [layer.rotates and number not in layers for number, layer in enumerate(config.layers)]
    if not any(rotate):
        raise RopewalkError(
            f"layers without RoPE: {list(layers)} are all layers that have RoPE; leave 'layers' out to drop the RoPE "
            "of every layer"
        )
    values, kind = config.decoder_values, config.model_type
    listed = {"no_rope_layers": [int(rotates) for rotates in rotate]}
    if kind == NAMES_LAYERS:
        return config.with_decoder_values({**values, **listed})
    why = AS_SMOLLM3.get(kind or "", f"its layers are not those of {NAMES_LAYERS}")
    if decoder_key(config.source) is not None:
        why = "it has encoders beside its decoder"
    elif not why and config.shortest_window is not None:
        why = f"its layers have a window of {config.shortest_window} tokens"
    if why:
        raise RopewalkError(
            f"layers {list(layers)} of {kind} cannot lose their RoPE alone: only the config of {NAMES_LAYERS} lists "
            f"layers without RoPE, and {why}; drop the RoPE of all layers, or choose a model of type "
            f"{', '.join(each for each, reason in AS_SMOLLM3.items() if not reason)} or {NAMES_LAYERS}"
        )
    from transformers import SmolLM3Config

    # A null that Mistral computes from other values, SmolLM3 would take as it is.
    kept = {key: value for key, value in values.items() if key != "head_dim" or value is not None}
    other = {
        "model_type": NAMES_LAYERS,
        "architectures": ["SmolLM3ForCausalLM"],
        "layer_types": [FULL] * count,
    }
    made = SmolLM3Config.from_dict({**kept, **listed, **other, "use_sliding_window": False})
    made.dtype = config.source.dtype
    return replace(ModelConfig.of(made), model=config.model)


def _with_norms(config: ModelConfig) -> ModelConfig:
    """The config of the same model with an RMSNorm on the queries and keys of each head: as Qwen3, which has them.

    Raises:
        RopewalkError: if Qwen3's code would compute another model from these weights.
    """
    values, kind = config.decoder_values, config.model_type
    if kind == NORMS_HEADS:
        return config
    why = (
        ""
        if kind in ("llama", "mistral")
        else f"its layers are not those of {NORMS_HEADS} without these norms"
    )
    if decoder_key(config.source) is not None:
        why = "it has encoders beside its decoder"
    elif not why and config.shortest_window is not None:
        why = f"its layers have a window of {config.shortest_window} tokens"
    elif not why and (values.get("attention_bias") or values.get("mlp_bias")):
        why = "its layers have biases"
    if why:
        raise RopewalkError(
            f"qk_norm is not possible for this model of type {kind}: with such norms, transformers has only a Llama or "
            f"Mistral without biases and windows (as {NORMS_HEADS}), and {why}; leave out qk_norm"
        )
    from transformers import Qwen3Config

    other = {"model_type": NORMS_HEADS, "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
    listed = {"layer_types": [FULL] * len(config.layers), "head_dim": config.head_dim}
    made = Qwen3Config.from_dict({**values, **other, **listed})
    made.dtype = config.source.dtype
    return replace(ModelConfig.of(made), model=config.model)


def written_config(config: Any) -> dict[str, Any]:
    """The contents of the ``config.json`` that a transformers config is written to."""
    stated: dict[str, Any] = parse_json(config.to_json_string())
    return with_both_spellings(stated)


def with_both_spellings(stated: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` that states its RoPE in the keys of transformers 4 too, if that changes nothing here.

    Args:
        stated: contents of a ``config.json`` as transformers 5 writes it.
    """
    from transformers import CONFIG_MAPPING

    # Its get() knows nothing of classes that are not imported yet.
    if stated.get("model_type") not in CONFIG_MAPPING:
        return stated
    config_class = CONFIG_MAPPING[stated["model_type"]]
    inner, kind = stated.get("text_config"), stated["model_type"]
    if inner:
        added = {**stated, "text_config": with_older_keys(inner)}
    else:
        added = {**with_older_keys({**stated, "model_type": READ_FLAT.get(kind, kind)}), "model_type": kind}
    if added == stated:
        return stated
    # A class may read the older keys in its own way, and they come first in transformers.
    before, after = _read_again(config_class, stated), _read_again(config_class, added)
    same = _entry_of(before) == _entry_of(after) or _same_methods(before, after)
    # In the order of transformers' own files.
    return dict(sorted(added.items())) if same else stated


def _entry_of(config: Any) -> Any:
    return getattr(config.get_text_config(), "rope_parameters", None)


def _same_methods(before: Any, after: Any) -> bool:
    """Whether two configs with different parameters, such as Phi-3's three keys, mean the same RoPE."""
    try:
        return ModelConfig.of(before).methods == ModelConfig.of(after).methods
    except RopewalkError:
        return False


def _read_again(config_class: Any, stated: Mapping[str, Any]) -> Any:
    """The config that a class reads from the contents of a ``config.json``."""
    # Infinite values, which only time steps of recurrent layers have, are tagged in the file.
    plain = {key: value for key, value in stated.items() if "__float__" not in json.dumps(value)}
    return config_class.from_dict(deepcopy(plain))
