"""Prepare plain numbers for a figure: checks, reductions, ticks, and the words of text alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style

Floats = NDArray[np.float64]
Ticks = tuple[tuple[float, str], ...]
ENVELOPE_BINS = 600
MOST_LENGTH_TICKS = 11
MOST_TOLD = 12
"""Largest number of points of a series that a text alternative lists."""


def tell(
    name: str,
    x: ArrayLike,
    y: ArrayLike,
    place: Callable[[float], str],
    value: Callable[[float], str] = style.number_text,
) -> str:
    """Say the values of a series for a text alternative, or only the ends and extremes of a long one.

    Args:
        name: name of the series; empty for a single one.
        x, y: ``[n]``; points whose y is NaN are left out.
        place, value: format an x and a y.
    """
    known = [
        (float(a), float(b)) for a, b in zip(np.asarray(x), np.asarray(y), strict=True) if math.isfinite(b)
    ]
    if not known:
        return f"{name}: no value".removeprefix(": ")
    words = [f"{value(b)} at {place(a)}" for a, b in known]
    if len(known) > MOST_TOLD:
        low, high = (known.index(end(known, key=lambda each: each[1])) for end in (min, max))
        ends = (0, len(known) - 1)
        extremes = [f"{name} {words[n]}" for name, n in (("lowest", low), ("highest", high)) if n not in ends]
        words = [f"from {words[0]} to {words[-1]}", *extremes]
    return f"{name}: {', '.join(words)}".removeprefix(": ")


class Envelope(NamedTuple):
    """Lowest, mean and highest value in bins of equal width in ``log2 x``. Empty bins are left out.

    Attributes:
        x: ``[n]``, geometric mean of the first and last x of each bin; exact for a bin with one point.
        low, mean, high: ``[n]``, over the values in each bin.
    """

    x: Floats
    low: Floats
    mean: Floats
    high: Floats


def envelope(x: ArrayLike, values: ArrayLike, bins: int = ENVELOPE_BINS) -> Envelope:
    """Reduce a long series to at most ``bins`` points, keeping every extreme.

    Args:
        x: ``[n]``, positive and increasing.
        values: ``[n]``, finite.
        bins: largest number of points in the result.
    """
    at, value = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    log = np.log2(at)
    # A series with a single x has no width to divide by.
    width = (log[-1] - log[0]) / bins or 1.0
    # The last point falls on the upper edge of the last bin, which belongs to that bin.
    number = np.minimum(((log - log[0]) / width).astype(np.int64), bins - 1)
    # Bins are numbered from 0, so -1 in front makes the first point begin a bin.
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(at)) - 1
    return Envelope(
        np.where(first == last, at[first], np.sqrt(at[first] * at[last])),
        np.minimum.reduceat(value, first),
        # reduceat sums each bin in one pass; a loop over bins would dominate at millions of distances.
        np.add.reduceat(value, first) / (last - first + 1),
        np.maximum.reduceat(value, first),
    )


def check_count(what: str, count: int, most: int = style.MOST_SERIES, things: str = "series") -> None:
    """Raise RopewalkError if there is nothing to draw, or more than a reader can tell apart."""
    if not count:
        raise RopewalkError(f"there is no {what} to draw")
    if count > most:
        raise RopewalkError(f"{what}: a figure shows at most {most} {things}, got {count}")


def check_finite(what: str, *values: ArrayLike) -> None:
    """Raise RopewalkError if a value is NaN or infinite."""
    if not all(np.isfinite(np.asarray(each, dtype=np.float64)).all() for each in values):
        raise RopewalkError(f"{what} has a value that is not finite")


def check_amounts(what: str, values: ArrayLike) -> Floats:
    """Convert values to float64. NaN is allowed.

    Raises:
        RopewalkError: if a value is negative or infinite, or all are NaN.
    """
    value = np.asarray(values, dtype=np.float64)
    if np.isinf(value).any() or (value < 0).any():
        raise RopewalkError(
            f"{what} must be finite and 0 or more, got {value[np.isinf(value) | (value < 0)][0]:g}"
        )
    if not np.isfinite(value).any():
        raise RopewalkError(f"there is no finite {what} to draw")
    return value


def positive(what: str, values: Floats) -> Floats:
    """Select the positive values, the only ones that a logarithmic axis can show; RopewalkError if there are none."""
    found: Floats = values[values > 0]
    if not len(found):
        raise RopewalkError(f"there is no {what} above 0 to draw on a logarithmic axis")
    return found


def alone(values: ArrayLike) -> NDArray[np.bool_]:
    """Which values have no finite neighbour. No line reaches them, so they need a marker."""
    # Padding with NaN makes the first and last value lack a neighbour on the outside.
    gap = np.isnan(np.concatenate([[np.nan], np.asarray(values, dtype=np.float64), [np.nan]]))
    found: NDArray[np.bool_] = ~gap[1:-1] & gap[:-2] & gap[2:]
    return found


def is_spread(low: float, high: float) -> bool:
    """Whether values are positive and spread far enough for a logarithmic axis."""
    return low > 0 and high >= style.LOG_RATIO * low


def folded(name: str) -> str:
    """The name of a row, in lines that leave room for the panel."""
    return fill(name, style.NAME_CHARACTERS, break_on_hyphens=False)


def length_ticks(lengths: Iterable[float]) -> Ticks:
    """Build a tick at each length, labelled in the style of lengths (``128k``)."""
    return tuple((float(each), style.length_text(each)) for each in lengths)


def power_ticks(low: float, high: float, most: int = MOST_LENGTH_TICKS) -> Ticks:
    """Build ticks at powers of two between two lengths, or at both ends if no power of two lies between them."""
    # The tolerance keeps ends that are powers of two despite rounding in log2.
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    powers = range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))
    return length_ticks([2.0**power for power in powers] or [low, high])


def linear_length_ticks(high: int) -> Ticks:
    """Build ticks at multiples of a power of two from 0 to a length."""
    # Steps of an eighth or more give nine ticks at most.
    step = 2 ** max(0, math.ceil(math.log2(high / 8)))
    return length_ticks(range(0, high + 1, step))


def spaced(lengths: Sequence[int], most: int) -> list[float]:
    """Select lengths, starting from the longest, that leave room for ``most`` labels on a logarithmic axis."""
    gap = math.log2(lengths[-1] / lengths[0]) / most
    kept = [float(lengths[-1])]
    for length in reversed(lengths[:-1]):
        # The tolerance keeps lengths at equal ratios despite rounding in log2.
        if math.log2(kept[-1] / length) >= gap * (1 - 1e-9):
            kept.append(float(length))
    return kept[::-1]


def index_ticks(labels: Sequence[str], most: int) -> Ticks:
    """Build at most ``most`` ticks at integers: evenly spaced from the first label, and the last one."""
    last = len(labels) - 1
    places = list(range(0, last + 1, max(1, -(-last // (most - 1)))))
    # The last label replaces the tick before it, with which it could overlap.
    places[-1:] = [last] if last else [0]
    return tuple((float(place), labels[place]) for place in places)


def named(series: Mapping[str, Any], number: int) -> str:
    """Name of a series for the key; empty for a single series, which needs no key."""
    return list(series)[number] if len(series) > 1 else ""
