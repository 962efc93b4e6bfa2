"""What attention each layer of a decoder has, from its config; and the models that training refuses for it.

transformers states it in many spellings: a list of layer types, a window for all layers, a switch beside the window, a
pattern, a first layer with a window, a list of layers without RoPE. They are read here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope.config import methods_from_config

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SERVED = (FULL, SLIDING)
"""Layer types through which a packed row can pass."""
ROTATE_IN_WINDOWS_ALONE = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Model types whose layers with full attention have no RoPE where other layers have a window."""
SINKS = "has attention sinks, which no engine supports; use a model without them"
WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "openai_privacy_filter")
"""Model types whose attention has a learned sink in every layer."""


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer.

    Attributes:
        kind: as transformers calls it: ``full_attention``, ``sliding_attention``, ``linear_attention`` and so on.
        window: tokens that a query sees, itself included; None where it sees all before it.
        rotates: whether positions turn its queries and keys.
    """

    kind: str
    window: int | None
    rotates: bool


def attention_of_layers(config: Mapping[str, Any]) -> tuple[LayerAttention, ...]:
    """The attention of each layer, first to last.

    Args:
        config: the decoder's config as a mapping. ``layer_types`` wins over everything else that says the same;
            configs from :mod:`ropewalk.models` always have it, as transformers' class decided.

    Raises:
        RopewalkError: for a value that says nothing of layers, such as a window of 0 or of "x" tokens.
    """
    _check_values(config)
    kinds = config.get("layer_types") or _derived_kinds(config)
    windows = {SLIDING: config.get("sliding_window"), CHUNKED: config.get("attention_chunk_size")}
    turned = _layers_that_rotate(config, kinds)
    return tuple(
        LayerAttention(kind, windows.get(kind), rotates) for kind, rotates in zip(kinds, turned, strict=True)
    )


def shortest_window(config: Mapping[str, Any]) -> int | None:
    """The shortest window of a model's layers in tokens, or None where every layer sees all."""
    return min(
        (layer.window for layer in attention_of_layers(config) if layer.window is not None), default=None
    )


def layer_notes(config: Mapping[str, Any]) -> list[str]:
    """A sentence on layers with a window, and one on layers without RoPE, where other layers have none or RoPE."""
    layers = attention_of_layers(config)
    windowed = [number for number, layer in enumerate(layers) if layer.window is not None]
    still = [number for number, layer in enumerate(layers) if layer.kind in SERVED and not layer.rotates]
    notes = []
    if windowed and len(windowed) < len(layers):
        widths = " or ".join(
            f"{width:,}" for width in sorted({layers[number].window or 0 for number in windowed})
        )
        notes.append(
            f"{_which(windowed, len(layers))} sees only the last {widths} tokens (sliding_window), whatever the base"
        )
    if still and len(still) == len(layers):
        notes.append("no layer has RoPE, so no base changes anything")
    elif still:
        notes.append(f"{_which(still, len(layers))} has no RoPE, so a new base leaves it as it is")
    return notes


def packing_refusals(config: Mapping[str, Any]) -> list[str]:
    """Why packed rows cannot pass through a model, predicates whose subject is the model; none where they can."""
    refused = []
    other = sorted({layer.kind for layer in attention_of_layers(config)} - set(SERVED))
    if other:
        refused.append(
            f"has layers of type {', '.join(other)}, through which a packed row would leak; ropewalk serves full "
            "and sliding attention"
        )
    if config.get("model_type") in WITH_SINKS:
        refused.append(SINKS)
    if not config.get("is_causal", True):
        refused.append("attends in both directions; packed rows need a causal decoder")
    return refused


def training_refusals(config: Mapping[str, Any], context: int) -> list[str]:
    """Why ``ropewalk extend`` does not train a model at a context, predicates as above; none where it does.

    Args:
        config: the decoder's config as a mapping.
        context: tokens of the longest stage.
    """
    refused = packing_refusals(config)
    own = [kind for kind in methods_from_config(config) if kind is not None]
    if own:
        refused.append(
            f"has a RoPE of its own for each layer type ({', '.join(own)}); extending such a model is not supported"
        )
    window = shortest_window(config)
    if window is not None and context > window:
        refused.append(
            f"has layers with a sliding window of {window:,} tokens, shorter than the context of {context:,}: no "
            "engine combines a window with a layout; such a model cannot be extended yet"
        )
    if not any(layer.rotates for layer in attention_of_layers(config)):
        refused.append("has no layer with RoPE, so there is nothing to extend")
    dropout = config.get("attention_dropout")
    if dropout:
        refused.append(f"has attention dropout {dropout}, which no engine has; set it to 0 in config.json")
    return refused


def _check_values(config: Mapping[str, Any]) -> None:
    for key in ("num_hidden_layers", "sliding_window", "attention_chunk_size"):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise RopewalkError(f"{key} is {value!r} in the config; it is a whole number from 1 on")
    for key in ("max_window_layers", "no_rope_layer_interval"):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise RopewalkError(f"{key} is {value!r} in the config; it is a whole number")
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, bool) or not (pattern is None or isinstance(pattern, str | int)) or pattern == "":
        raise RopewalkError(
            f"sliding_window_pattern is {pattern!r} in the config; it is a whole number or letters"
        )
    for key, kind in (("layer_types", str), ("no_rope_layers", int)):
        value = config.get(key)
        if value is not None and not (
            isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)
        ):
            raise RopewalkError(
                f"{key} is {value!r} in the config; it is a list with an entry for each layer"
            )


def _derived_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Layer types of a config that has no list of them."""
    layers = config.get("num_hidden_layers") or 1
    # Qwen writes a window that its own switch turns off, and null turns it off too.
    switched_off = "use_sliding_window" in config and not config["use_sliding_window"]
    if config.get("sliding_window") is None or switched_off:
        chunked = config.get("attention_chunk_size") is not None
        return (CHUNKED if chunked else FULL,) * layers
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return [SLIDING if pattern[number % len(pattern)] == "L" else FULL for number in range(layers)]
    if pattern:
        return [SLIDING if (number + 1) % pattern else FULL for number in range(layers)]
    first = config.get("max_window_layers") if config.get("use_sliding_window") else None
    return [SLIDING if number >= (first or 0) else FULL for number in range(layers)]


def _layers_that_rotate(config: Mapping[str, Any], kinds: Sequence[str]) -> Iterable[bool]:
    stated = config.get("no_rope_layers")
    if stated:
        if len(stated) != len(kinds):
            raise RopewalkError(f"no_rope_layers lists {len(stated)} layers, and the model has {len(kinds)}")
        # 1 is a layer with RoPE, whatever the name says.
        return [bool(rotates) for rotates in stated]
    every = config.get("no_rope_layer_interval")
    if every:
        return [(number + 1) % every != 0 for number in range(len(kinds))]
    windows_alone = (
        config.get("model_type") in ROTATE_IN_WINDOWS_ALONE and config.get("sliding_window") is not None
    )
    nested = config.get("rope_parameters") or {}
    return [
        not (windows_alone and kind == FULL) and not (kind in nested and nested[kind] is None)
        for kind in kinds
    ]


def _which(numbers: Sequence[int], layers: int) -> str:
    """``each of 36 layers``, ``each of layers 3, 7 and 11 (of 36, counted from 0)``."""
    if len(numbers) == layers:
        return "every layer"
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        which = f"every {_ordinal(steps.pop())} layer, from {numbers[0]} to {numbers[-1]}"
        return f"{which} (of {layers}, counted from 0)"
    if len(runs) > 4:
        return f"each of {len(numbers)} layers of {layers}"
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"each of layers {', '.join(spans)} (of {layers}, counted from 0)"


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"
