"""What something with many equal parts takes, from what it takes with a few of them and with one more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any


def extended(values: Sequence[Any], weights: Sequence[int]) -> Any:
    """The sum of numbers by weight, or of each entry of mappings and tuples of numbers."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in values for key in each)
        return {
            key: extended([each.get(key, _nothing(values, key)) for each in values], weights) for key in keys
        }
    if isinstance(first, tuple):
        return tuple(extended(each, weights) for each in zip(*values, strict=True))
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _nothing(values: Sequence[Mapping[Any, Any]], key: Any) -> Any:
    """What stands for an entry that a mapping lacks."""
    found = next(each[key] for each in values if key in each)
    return (0,) * len(found) if isinstance(found, tuple) else 0


def extended_fields(runs: Sequence[Any], weights: Sequence[int]) -> Any:
    """An instance of a dataclass of numbers and tuples of numbers, each extended."""
    values = {
        each.name: extended([getattr(run, each.name) for run in runs], weights) for each in fields(runs[0])
    }
    return type(runs[0])(**values)
