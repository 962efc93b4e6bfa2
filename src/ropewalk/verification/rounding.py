"""How far two computations of one quantity may differ by rounding: measured, not guessed.

A computation repeats itself in another order on other ranks or in another engine. What the order changes is of the
size of the computation's own rounding error, and that can be had from one process: float32 against float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALLOWANCE = 4.0
"""Twice the rounding error, because both sides have it; twice again, because one draw of it tells only its size."""

Values = Mapping[str, Tensor]
"""Quantities by what a user calls them: ``token losses``, ``gradient of lm_head.weight``."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of two sets of quantities.

    Attributes:
        error: norm of the difference over the norm of the expected values; infinite where a value is no number.
        name: of the quantity.
    """

    error: float
    name: str


def largest_difference(found: Values, expected: Values) -> Difference:
    """Over all quantities, in float64 on the CPU."""
    if found.keys() != expected.keys():
        strange = sorted(found.keys() ^ expected.keys())[0]
        return Difference(math.inf, strange)
    return max((Difference(_relative(found[n], e), n) for n, e in expected.items()), key=lambda d: d.error)


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    wide = expected.detach().double().cpu()
    difference = float((found.detach().double().cpu() - wide).norm())
    size = float(wide.norm())
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else difference


def rounding_budget(narrow: Values, wide: Values, dtype: torch.dtype) -> float:
    """What rounding explains in ``dtype``, from one process's own error.

    Args:
        narrow: quantities as computed in float32.
        wide: the same in float64.
        dtype: in which the two sides of the comparison are computed, float32 or float64; an error shrinks with the unit
            of the arithmetic.
    """
    eps = torch.finfo(dtype).eps
    own = largest_difference(narrow, wide).error * eps / torch.finfo(torch.float32).eps
    return ALLOWANCE * own + eps
