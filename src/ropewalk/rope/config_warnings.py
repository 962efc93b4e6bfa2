"""What in a config is suspicious, but no contradiction: sentences for a report, never a reason to refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk.rope.config import Config, methods_from_config
from ropewalk.rope.layers import attention_of_layers
from ropewalk.rope.methods.base import ORIGINAL, RopeMethod
from ropewalk.rope.target import dual_chunk_length

OTHER_LENGTHS = ("model_max_length", "max_sequence_length", "max_seq_len", "seq_length")
"""Where configs also state a context."""


def config_tensions(config: Config) -> list[str]:
    """Plain sentences on what does not fit together well in a config; none for a config without tensions.

    Args:
        config: a ``config.json`` as a mapping, of the decoder where there are several.

    Raises:
        RopewalkError: as :func:`ropewalk.rope.methods_from_config`.
    """
    length = config.get("max_position_embeddings")
    said: list[str] = []
    for layer_type, method in methods_from_config(config).items():
        about = "" if layer_type is None else f"{layer_type}: "
        of_method = _of_method(method, _entry(config, layer_type), config.get(ORIGINAL), length)
        said += [about + sentence for sentence in of_method]
    return said + _of_lengths(config, length) + _of_windows(config, length) + _of_chunks(config, length)


def _of_method(
    method: RopeMethod, entry: Mapping[str, Any], outside: int | None, length: int | None
) -> list[str]:
    stated = entry.get(ORIGINAL)
    return method.config_warnings(entry, outside if stated is None else stated, length)


def _of_lengths(config: Config, length: int | None) -> list[str]:
    return [
        f"{key} is {config[key]}, but max_position_embeddings is {length}, which is what counts here"
        for key in OTHER_LENGTHS
        if isinstance(config.get(key), int) and config[key] != length
    ]


def _of_windows(config: Config, length: int | None) -> list[str]:
    windows = [layer.window for layer in attention_of_layers(config)]
    widest = None if None in windows else max(width for width in windows if width is not None)
    if widest is None or length is None or widest >= length:
        return []
    return [
        f"every layer sees only the last {widest} tokens (sliding_window), fewer than "
        f"max_position_embeddings {length}"
    ]


def _of_chunks(config: Config, length: int | None) -> list[str]:
    trained = dual_chunk_length(config)
    if trained is None or trained == length:
        return []
    return [
        f"dual_chunk_attention_config states an original length of {trained} tokens, and max_position_embeddings is "
        f"{length}: the model is taken as trained for {trained}, since what lies beyond needs dual chunk attention, "
        "which neither transformers nor ropewalk runs"
    ]


def _entry(config: Config, layer_type: str | None) -> Mapping[str, Any]:
    """The RoPE parameters of a layer type in whichever spelling the config has; empty where it has none."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    if layer_type is None:
        return parameters or config.get("rope_scaling") or {}
    if parameters:
        return parameters[layer_type]  # type: ignore[no-any-return]
    # In the older spelling rope_scaling is for the full layers alone.
    return (config.get("rope_scaling") or {}) if layer_type == "full_attention" else {}
