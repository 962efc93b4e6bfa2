"""Checks of method fields and config values; each raises RopewalkError with the field and its value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk.errors import RopewalkError


def is_number(value: Any) -> bool:
    # True and False are integers to Python.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # An integer with more digits than a float has room for.
        return False


def check_positive(field: str, value: float) -> None:
    if not is_number(value) or value <= 0:
        raise RopewalkError(f"{field} must be a finite number above 0, got {value!r}")


def check_factor(value: float) -> None:
    if not is_number(value) or value < 1:
        raise RopewalkError(f"factor must be a finite number, at least 1, got {value!r}")


def check_original_length(value: int) -> None:
    # At least 2, because LongRoPE divides by its logarithm.
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise RopewalkError(
            f"original_max_position_embeddings must be a whole number of tokens, at least 2, got {value!r}"
        )


def check_rotary_dim(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2 or value % 2:
        raise RopewalkError(f"rotary_dim must be an even whole number, at least 2, got {value!r}")


def check_theta(value: float) -> None:
    if not is_number(value) or value <= 1:
        raise RopewalkError(f"rope_theta must be a finite number above 1, got {value!r}")


def check_sequence_length(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise RopewalkError(f"sequence_length must be at least 1 token, got {value}")
    return value


def check_ntk_dim(rotary_dim: int) -> None:
    if rotary_dim < 4:
        raise RopewalkError(
            f"NTK scaling divides by rotary_dim - 2, so rotary_dim must be at least 4, got {rotary_dim}"
        )


def check_critical_pair(rotary_dim: int, pair: int) -> None:
    slowest = rotary_dim // 2 - 1
    if isinstance(pair, bool) or not isinstance(pair, int) or not 1 <= pair <= slowest:
        raise RopewalkError(
            f"critical_pair must be the index of a rotary pair from 1 to {slowest} (rotary_dim {rotary_dim}; the "
            f"fastest pair is 0), got {pair!r}"
        )


def check_factors(field: str, values: Iterable[float], length: int) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise RopewalkError(f"{field} must be a list of numbers, got {values!r}")
    if len(values) != length:
        raise RopewalkError(f"{field} must have rotary_dim / 2 = {length} entries, got {len(values)}")
    for index, value in enumerate(values):
        check_positive(f"{field}[{index}]", value)
    return tuple(values)


def whole_number(config: Mapping[str, Any], key: str) -> int | None:
    """A number of tokens, heads or dimensions in a config; None if the config does not state it."""
    value = config.get(key)
    if value is None:
        return None
    if not is_number(value) or value != int(value) or value < 1:
        raise RopewalkError(f"{key} must be a whole number, at least 1, got {value!r}")
    return int(value)
