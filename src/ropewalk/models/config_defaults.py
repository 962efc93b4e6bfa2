"""What a ``config.json`` leaves out and transformers' config class supplies, under the names that are read."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope import ROPE_KEYS
from ropewalk.rope.layers import CHUNKED, FULL, SLIDING
from ropewalk.rope.methods.base import ORIGINAL

ALIASES = {
    "rotary_pct": "partial_rotary_factor",
    "rope_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
"""What GPT-NeoX (Pythia), the first StableLM and the first Qwen call these keys."""
SHAPE_KEYS = ("hidden_size", "num_attention_heads", "max_position_embeddings")


def completed(decoder: Mapping[str, Any], text: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the decoder's values with what its class adds, what it added)."""
    values = under_known_names(decoder)
    defaults: dict[str, Any] = {}
    _complete_shape(values, defaults, text)
    _complete_window(values, defaults, text)
    _complete_rope(values, defaults, text)
    values |= _layers(text)
    values.setdefault("model_type", text.model_type)
    return values, defaults


def _complete_shape(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    for key in SHAPE_KEYS:
        value = getattr(text, key, None)
        if values.get(key) is None and isinstance(value, int):
            # A class may have another name for it in the file: n_embd.
            if values.get(type(text).attribute_map.get(key, key)) is None:
                defaults[key] = value
            values[key] = value
    kv_heads = getattr(text, "num_key_value_heads", None)
    if values.get("num_key_value_heads") is None and isinstance(kv_heads, int):
        # Says nothing of RoPE, so it is shown and not named among the defaults.
        values["num_key_value_heads"] = kv_heads
    head_dim = getattr(text, "head_dim", None)
    heads = values.get("num_attention_heads")
    derived = heads and values.get("hidden_size") and values["hidden_size"] / heads
    if values.get("head_dim") is None and isinstance(head_dim, int) and head_dim != derived:
        values["head_dim"] = defaults["head_dim"] = head_dim


def _complete_window(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    """A window that the file says is null stays none: Mistral's class would have one."""
    window = getattr(text, "sliding_window", None)
    if "sliding_window" not in values and isinstance(window, int):
        values["sliding_window"] = defaults["sliding_window"] = window
    if values.get("sliding_window") is None:
        return
    switch = getattr(text, "use_sliding_window", None)
    if "use_sliding_window" not in values and isinstance(switch, bool):
        values["use_sliding_window"] = defaults["use_sliding_window"] = switch


def decoder_values(text: Any) -> dict[str, Any]:
    """A transformers config as the mapping that :mod:`ropewalk.rope` reads, with every layer's attention in it.

    Args:
        text: the config of the language model (``config.get_text_config()``).
    """
    return {**text.to_dict(), **_layers(text)}


def _layers(text: Any) -> dict[str, Any]:
    """What the config's class makes of all keys that say something about layers."""
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        # The same order in which transformers chooses the mask of all layers.
        kind = FULL
        if getattr(text, "sliding_window", None) is not None:
            kind = SLIDING
        elif getattr(text, "attention_chunk_size", None) is not None:
            kind = CHUNKED
        kinds = [kind] * (getattr(text, "num_hidden_layers", None) or 1)
    layers = {"layer_types": list(kinds), "is_causal": getattr(text, "is_causal", True)}
    rotating = getattr(text, "no_rope_layers", None)
    return {**layers, "no_rope_layers": list(rotating)} if rotating else layers


def _complete_rope(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    by_layer = _nested(text.rope_parameters)
    if not by_layer:
        _complete_flat(values, defaults, text)
    elif _nested(values.get("rope_parameters")):
        _complete_entries(values, defaults, by_layer)
    elif set(by_layer) == {"full_attention", "sliding_attention"}:
        _complete_two_thetas(values, defaults, by_layer)
    else:
        # The older spelling cannot say these layer types, so only the class knows what its keys meant.
        stated = {value for key in ROPE_KEYS if isinstance(value := values.get(key), int | float)}
        for key in ROPE_KEYS:
            values.pop(key, None)
        values["rope_parameters"] = {kind: dict(entry) for kind, entry in by_layer.items()}
        for kind, entry in by_layer.items():
            if entry.get("rope_theta") not in stated:
                defaults[f"{kind}.rope_theta"] = entry.get("rope_theta")


def _complete_flat(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    parameters = text.rope_parameters
    silent = values.keys().isdisjoint(("rope_scaling", "rope_parameters"))
    if silent and parameters.get("rope_type", "default") != "default":
        apart = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in parameters.items() if key not in apart}
        values["rope_scaling"] = defaults["rope_scaling"] = scaling
    if not states(values, "rope_theta"):
        values["rope_theta"] = defaults["rope_theta"] = parameters.get("rope_theta")
    partial = parameters.get("partial_rotary_factor")
    if not states(values, "partial_rotary_factor") and partial not in (None, 1):
        values["partial_rotary_factor"] = defaults["partial_rotary_factor"] = partial
    original = parameters.get(ORIGINAL)
    # Where no length came before, transformers writes the present one, and that is no default of the class.
    if not states(values, ORIGINAL) and original not in (None, values.get("max_position_embeddings")):
        values[ORIGINAL] = defaults[ORIGINAL] = original


def _complete_entries(
    values: dict[str, Any], defaults: dict[str, Any], by_layer: Mapping[str, Mapping[str, Any]]
) -> None:
    nested = values["rope_parameters"]
    for kind, entry in by_layer.items():
        # Null says that these layers have no position embedding.
        if kind in nested and nested[kind] is None:
            continue
        stated = nested.setdefault(kind, {})
        for key in ("rope_theta", "partial_rotary_factor"):
            if stated.get(key) is None and entry.get(key) is not None:
                stated[key] = defaults[f"{kind}.{key}"] = entry[key]


def _complete_two_thetas(
    values: dict[str, Any], defaults: dict[str, Any], by_layer: Mapping[str, Mapping[str, Any]]
) -> None:
    """Gemma 3's own spelling: ``rope_theta`` and ``rope_scaling`` for full layers, another theta for sliding."""
    theta, local = (by_layer[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention"))
    if values.get("rope_theta") is None:
        values["rope_theta"] = defaults["rope_theta"] = theta
    if values.get("rope_local_base_freq") is None:
        values["rope_local_base_freq"] = local
        # Olmo 3 has one theta for both, which the file may have said.
        if "rope_theta" in defaults or local != theta:
            defaults["rope_local_base_freq"] = local


def under_known_names(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with what the file says under an old name also under the one that is read."""
    values: dict[str, Any] = deepcopy(dict(decoder))
    for alias, key in ALIASES.items():
        said = values.get(alias)
        if said is None:
            continue
        if values.get(key) is not None and values[key] != said:
            raise RopewalkError(f"{alias} is {said!r} but {key} is {values[key]!r}; remove the wrong one")
        if not states(values, key):
            values[key] = said
    return values


def states(values: Mapping[str, Any], key: str) -> bool:
    places = (values, values.get("rope_parameters"), values.get("rope_scaling"))
    return any(isinstance(place, Mapping) and place.get(key) is not None for place in places) or any(
        key in entry and entry[key] is not None for entry in _nested(values.get("rope_parameters")).values()
    )


def _nested(parameters: Any) -> dict[str, Mapping[str, Any]]:
    """The entries of RoPE parameters by layer type; none where they are flat."""
    if not isinstance(parameters, Mapping):
        return {}
    return {key: entry for key, entry in parameters.items() if isinstance(entry, Mapping)}
