"""The RoPE bases that reach a context length: the exact feasible intervals, and the safe base above them.

A base ``b`` reaches ``L`` tokens if ``B(m) = Σ_i cos(m·b^(-2i/d)) ≥ 0`` for all integers ``0 ≤ m ≤ L``. That set
has gaps: as ``b`` grows, the margin at single distances drops below zero and recovers. Sampling bases misses both
narrow feasible intervals and narrow gaps, so each gap is located by its own distance ``m``, in ``x = ln b``:

1. Distances are processed in doublings, and bases that a shorter distance has ruled out are not examined again.
2. The remaining bases are divided into cells. At the points between cells, ``B(m)`` for all ``m`` is one matrix
   product. Between two points ``B`` lies within ``h²/2·max|d²B/dx²|`` of its chord (``h`` is half the width), so few
   distances can cross zero inside a cell, and a cell in which one stays below zero throughout is ruled out.
3. For the remaining distances a Taylor bound in float64 decides, or the cell is halved, or (if ``B`` is monotone)
   Newton's method finds the end of the gap.

Cost: cells are as narrow as ``1/L``, and each is a product of ``L·d`` terms, so at most ``O(L²·d·ln(ceiling))``
operations; in practice the ruled-out bases save most of them.

Source of the theory: Men et al., "Base of RoPE Bounds Context Length", arXiv:2405.14591. The search for gaps is ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_rotary_dim
from ropewalk.rope.theory.margin import MOST_PAIRS, screen, screen_error

Floats = NDArray[np.float64]

Progress = Callable[[int, int], None]

CEILING = 1e9
"""Largest base that is examined by default."""
SAFE_CEILING = 1e12
"""Largest base in the search for a safe base, where the search starts."""
HIGHEST_CEILING = 1e15
RESOLUTION = 1e-6
"""Smallest relative width of a reported interval: a base written with seven digits can lie in it."""
DIGITS = 9
"""Significant digits of reported bases."""

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 131072
_FIRST_DOUBLING = 1024
_FIRST_STEP, _LARGEST_STEP = math.log(1.05), math.log(1.5)
"""Widths of the ranges of bases, in ``ln b``, that a search for the smallest base examines at a time: small at first,
because it is often close to the start, and then doubled each time."""
_BATCH = 2**20
_TOGETHER = 4096
_MOST_NEWTON_STEPS = 60
_WIDEST_CELL = 0.02
_FINEST = 1e-12
"""Relative width in ``b`` to which gaps are resolved."""


@dataclass(frozen=True)
class FeasibleBases:
    """The bases up to a ceiling that reach a context length.

    Attributes:
        length: tokens.
        rotary_dim: rotated dimensions of a head.
        ceiling: largest base that was examined.
        infimum: low end of the first interval; None if no base up to the ceiling is feasible.
        feasible: intervals ``(low, high)`` of bases in increasing order, each at least ``RESOLUTION`` wide
            (relative), with ends rounded inward to nine digits; every base inside is feasible. The last one may
            end at the ceiling.
        safe_base: from this base to the ceiling every base is feasible; None if the ceiling itself is not.
    """

    length: int
    rotary_dim: int
    ceiling: float
    infimum: float | None
    feasible: tuple[tuple[float, float], ...]
    safe_base: float | None


def feasible_bases(
    length: int,
    rotary_dim: int,
    ceiling: float = CEILING,
    progress: Progress | None = None,
) -> FeasibleBases:
    """All bases from 1 to ``ceiling`` whose similarity margin is at least 0 up to ``length``.

    Args:
        length: tokens, at least 1.
        rotary_dim: even number of rotated dimensions of a head.
        ceiling: largest base to examine, above 1.
        progress: called with the number of distances done and their total.

    Raises:
        RopewalkError: if an argument is out of range; the message gives its value.

    Source: arXiv:2405.14591, equation 7 and table 2. Published lower bounds are single feasible bases; this function
    returns the whole set.
    """
    _check(length, rotary_dim, ceiling)
    remaining = _feasible(length, rotary_dim, 0.0, math.log(ceiling), progress)
    kept = remaining[remaining[:, 1] - remaining[:, 0] >= RESOLUTION]
    # Rounded inward: at an end itself some margin is zero, and rounding would decide its sign.
    intervals = tuple(
        (
            rounded_up(math.exp(low)) if low else 1.0,
            ceiling if high == math.log(ceiling) else _rounded(math.exp(high), ROUND_FLOOR, DIGITS),
        )
        for low, high in kept
    )
    at_ceiling = bool(intervals) and intervals[-1][1] == ceiling
    return FeasibleBases(
        length,
        rotary_dim,
        ceiling,
        intervals[0][0] if intervals else None,
        intervals,
        intervals[-1][0] if at_ceiling else None,
    )


def safe_base(
    length: int, rotary_dim: int, ceiling: float = SAFE_CEILING, progress: Progress | None = None
) -> float | None:
    """The base above which every base up to ``ceiling`` reaches ``length``, without the map below it.

    Searches down from the ceiling and stops at the first gap, so a much larger ceiling costs little.

    Args:
        length, rotary_dim, ceiling: as in :func:`feasible_bases`.
        progress: called for each decade of bases with the number of distances done and their maximum.

    Returns:
        The base, or None if the ceiling itself is not feasible.
    """
    _check(length, rotary_dim, ceiling)
    high = math.log(ceiling)
    # Decade by decade from the top: the safe base is usually found long before the small bases, which cost most.
    decades = math.ceil(high / math.log(10))
    for done in range(decades):
        low = max(high - math.log(10), 0.0)
        remaining = _feasible(
            length, rotary_dim, low, high, _shifted(progress, done * length, decades * length)
        )
        # A gap at the top of this decade: all decades above it are feasible.
        if not len(remaining) or remaining[-1, 1] != high:
            return rounded_up(math.exp(high)) if done else None
        if remaining[-1, 0] != low:
            return rounded_up(math.exp(remaining[-1, 0]))
        high = low
    return 1.0


def smallest_base(
    length: int,
    rotary_dim: int,
    at_least: float = 1.0,
    ceiling: float = HIGHEST_CEILING,
    progress: Progress | None = None,
) -> float | None:
    """The infimum of the feasible bases, without the map above it.

    A base that does not reach half the length does not reach the length, so each doubling starts where the previous one
    ended and stops at the first feasible base.

    Args:
        length, rotary_dim, ceiling: as in :func:`feasible_bases`.
        at_least: a known lower bound of the infimum, where the search starts.
        progress: called with the number of distances done and their total.

    Returns:
        ``feasible_bases(length, rotary_dim, ceiling).infimum``, or None if no base up to the ceiling is feasible.
    """
    _check(length, rotary_dim, ceiling)
    lengths = [length]
    # A base that fails at half the length fails at the whole, so each shorter length narrows down the next search.
    while at_least <= 1 and lengths[0] > _FIRST_DOUBLING:
        lengths.insert(0, lengths[0] // 2)
    found: float | None = at_least
    for each in lengths:
        # The result for half the length was rounded up by less than this, so start slightly below it.
        low = max(math.log(found or 1.0) - 10.0 ** (1 - DIGITS), 0.0)
        found, step = None, _FIRST_STEP
        while found is None and low < math.log(ceiling):
            high = min(low + step, math.log(ceiling))
            remaining = _feasible(each, rotary_dim, low, high, None)
            kept = remaining[remaining[:, 1] - remaining[:, 0] >= RESOLUTION]
            if len(kept):
                found = rounded_up(math.exp(kept[0, 0])) if kept[0, 0] else 1.0
            # The end of the step may cut an interval; the next step overlaps to examine it as a whole.
            low = high - 2 * RESOLUTION if high < math.log(ceiling) else high
            step = min(2 * step, _LARGEST_STEP)
        if found is None:
            return None
        if progress is not None:
            progress(each, length)
    return found


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(before + done, total)


def rounded_up(base: float, digits: int = DIGITS) -> float:
    """The smallest number with this many significant digits that is not below the base."""
    return _rounded(base, ROUND_CEILING, digits)


def _rounded(base: float, rounding: str, digits: int) -> float:
    # Decimal is exact where scaling a float would round once more, perhaps the other way.
    exact = Decimal(base)
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() + 1 - digits), rounding))


def _check(length: int, rotary_dim: int, ceiling: float) -> None:
    check_rotary_dim(rotary_dim)
    if rotary_dim > 2 * MOST_PAIRS:
        raise RopewalkError(f"a head may have at most {2 * MOST_PAIRS} rotated dimensions, got {rotary_dim}")
    if length < 1:
        raise RopewalkError(f"length must be at least 1 token, got {length}")
    if not 1 < ceiling <= HIGHEST_CEILING:
        raise RopewalkError(f"the ceiling must be above 1 and at most {HIGHEST_CEILING:g}, got {ceiling}")


def _feasible(length: int, rotary_dim: int, low: float, high: float, progress: Progress | None) -> Floats:
    """Bases from ``e^low`` to ``e^high`` that no distance rules out: increasing intervals ``[k, 2]`` of ``ln b``."""
    exponents = 2 * np.arange(rotary_dim // 2) / rotary_dim
    remaining = np.array([[low, high]])
    for first, count in _blocks(length):
        if progress is not None:
            progress(first - 1, length)
        remaining = _without(remaining, _holes(remaining, first, count, exponents))
    if progress is not None:
        progress(length, length)
    return remaining


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """``(first distance, count)`` in doublings, because a gap's width is inversely proportional to the distance."""
    first = 1
    while first <= length:
        count = min(max(first, _FIRST_BLOCK), _LARGEST_BLOCK, length + 1 - first)
        yield first, count
        first += count


def _holes(remaining: Floats, first: int, count: int, exponents: Floats) -> Floats:
    """Intervals ``[gaps, 2]`` within the remaining ones where some distance of the block has a negative margin."""
    points, starts = _grid(remaining, first + count, exponents)
    whole, doubtful = [np.empty((0, 2))], [np.empty((3, 0))]
    size = max(2, _BATCH // count)
    parts = [slice(at, at + size + 1) for at in range(0, len(points) - 1, size)]

    def look(part: slice) -> tuple[Floats, Floats]:
        return _look(points[part], ~starts[part][1:], first, count, exponents)

    workers = min(_threads(), len(parts))
    if workers > 1:
        # Large array operations release the GIL, so threads share the work.
        with ThreadPoolExecutor(workers) as threads:
            looked = list(threads.map(look, parts))
    else:
        looked = [look(part) for part in parts]
    for ruled_out, candidates in looked:
        whole.append(ruled_out)
        doubtful.append(candidates)
    open_ = np.concatenate(doubtful, axis=1)
    # In pieces, because _negative makes arrays of candidates times pairs.
    pieces = np.array_split(open_, open_.shape[1] // _TOGETHER + 1, axis=1)
    return np.concatenate([*whole, *(_negative(piece[0], piece[1], piece[2], exponents) for piece in pieces)])


def _threads() -> int:
    """Number of threads that the user has set for torch; without torch, one a core."""
    try:
        import torch
    except ModuleNotFoundError:
        return os.cpu_count() or 1
    return torch.get_num_threads()


def _grid(remaining: Floats, longest: int, exponents: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Points ``[points]`` whose cells cover the remaining intervals, and flags for points that start a new interval."""
    points: list[float] = []
    starts: list[bool] = []
    squares, doubled = exponents**2, -2 * exponents
    for low, high in remaining:
        # A gap narrower than a cell is examined together with its neighbours, which saves one point.
        joined = bool(points) and low - points[-1] < _cell_width(points[-1], longest, squares, doubled)
        if not joined:
            points.append(low)
            starts.append(True)
        while points[-1] < high:
            step = points[-1] + _cell_width(points[-1], longest, squares, doubled)
            points.append(min(step, high))
            starts.append(False)
    return np.array(points), np.array(starts, dtype=bool)


def _cell_width(x: float, longest: int, squares: Floats, doubled: Floats) -> float:
    """A cell width at which few distances remain undecided; it affects only speed.

    B is about ``n·(1 - ln m/ln b)`` plus a spread from the random phases of the fast pairs. Between two points it may
    deviate from its chord until it reaches a few spreads below that.
    """
    pairs = len(squares)
    share = min((math.log(longest) + 0.577) / max(x, 1e-9), 1.0)
    reach = pairs * (1 - share) - 2.7 * math.sqrt(pairs * share / 2)
    bend = min(max(reach, pairs / 64), pairs / 3)
    square = float(np.add.reduce(squares * np.exp(doubled * x)))
    # With one pair the base has no effect, so a cell may have any width.
    return min(2 * math.sqrt(2 * bend / square) / longest, _WIDEST_CELL) if square else _WIDEST_CELL


def _look(
    points: Floats, real: NDArray[np.bool_], first: int, count: int, exponents: Floats
) -> tuple[Floats, Floats]:
    """Classify the cells between some points by B(m) at the points.

    Args:
        points: ``[cells + 1]``, increasing.
        real: ``[cells]``, False if a cell lies between two separate intervals.

    Returns:
        The cells ``[k, 2]`` that a single distance rules out as a whole, and the undecided candidates in the others:
        ``[3, candidates]`` with distance, centre and half width.
    """
    values = screen(np.exp(-points[:, None] * exponents), first, count)
    low, half = points[:-1], np.diff(points) / 2
    # Between two points a function lies within bend of its chord; all pairs rotate fastest at the low end.
    rates = exponents * np.exp(-exponents * low[:, None])
    square, linear = (rates**2).sum(1), (exponents * rates).sum(1)

    def bend(cell: Any, m: Any) -> Any:
        return 0.5 * half[cell] ** 2 * (m * m * square[cell] + m * linear[cell])

    # Twice the error of one value: once in the mean of the two values and once in their difference.
    slack = 2 * screen_error(len(exponents))
    limit = np.where(real, bend(slice(None), float(first + count)) + slack, -np.inf)
    lower = np.minimum(values[:-1], values[1:])
    cell, place = np.divmod(np.flatnonzero(lower < limit[:, None]), count)
    m = (first + place).astype(np.float64)
    at_low, at_high = (values[cell + end, place] for end in (0, 1))
    middle, rise, off = (at_low + at_high) / 2, np.abs(at_high - at_low) / 2, bend(cell, m)
    # The chord plus or minus a parabola of height off has an interior extremum where it is steeper than the chord.
    beyond = np.where(rise < 2 * off, off + rise**2 / (4 * np.maximum(off, 1e-300)), rise)
    dead = np.zeros(len(half), dtype=bool)
    dead[cell[middle + beyond < -slack]] = True
    open_ = ~dead[cell] & (middle - beyond < slack)
    cell = cell[open_]
    # Cells meet at rounded ends; overlap them slightly so that no sliver remains between two ruled-out cells.
    whole = np.stack([low - _FINEST, low + 2 * half + _FINEST], 1)[dead]
    return whole, np.stack([m[open_], low[cell] + half[cell], half[cell]])


def _negative(m: Floats, centre: Floats, half: Floats, exponents: Floats) -> Floats:
    """Intervals ``[k, 2]`` of ``centre ± half`` in which ``B(m) < 0``, for one distance and one cell each.

    Args:
        m, centre, half: float64 ``[candidates]``.
    """
    found = [np.empty((0, 2))]
    while len(m):
        value, slope, bend = _taylor(m, centre, half, exponents)
        # Taylor's theorem: within the cell, a value differs by at most this from the one at the centre.
        change, rest = np.abs(slope) * half, 0.5 * bend * half**2
        below = value + change + rest < 0
        found.append(np.stack([centre - half, centre + half], 1)[below])
        # If one distance rules out a cell, the others need not be checked; in a dense region there are hundreds.
        _, cell = np.unique(centre, return_inverse=True)
        ruled_out = np.zeros(len(m), dtype=bool)
        ruled_out[cell[below]] = True
        unsure = ~ruled_out[cell] & (value - change - rest < 0)
        monotone = unsure & (np.abs(slope) > bend * half)
        found.append(_side_below(m[monotone], centre[monotone], half[monotone], slope[monotone], exponents))
        unsure &= ~monotone
        # Below the resolution, the sign at the centre decides for the whole cell.
        finest = unsure & (half < _FINEST / 2)
        tiny = finest & (value < 0)
        found.append(np.stack([centre - half, centre + half], 1)[tiny])
        unsure &= ~finest
        m, centre, half = m[unsure], centre[unsure], half[unsure] / 2
        m, centre, half = np.r_[m, m], np.r_[centre - half, centre + half], np.r_[half, half]
    return np.concatenate(found)


def _taylor(m: Floats, x: Floats, half: Floats, exponents: Floats) -> tuple[Floats, Floats, Floats]:
    """``B``, ``dB/dx`` at ``x``, and a bound on ``|d²B/dx²|`` within ``x ± half``."""
    angles = m[:, None] * np.exp(-x[:, None] * exponents)
    rates = exponents * angles
    # θ_i(x - half) = θ_i(x)·e^(a_i·half), and a_i < 1.
    growth = np.exp(half)
    bend = (rates**2).sum(1) * growth**2 + (exponents * rates).sum(1) * growth
    return np.cos(angles).sum(1), (rates * np.sin(angles)).sum(1), bend


def _side_below(m: Floats, centre: Floats, half: Floats, slope: Floats, exponents: Floats) -> Floats:
    """The part of each cell below zero, for cells in which B is monotone: Newton's method within a bracket."""
    low, high = centre - half, centre + half
    at_low, at_high = (_taylor(m, x, half, exponents)[0] for x in (low, high))
    whole = (at_low < 0) & (at_high < 0)
    crossing = (at_low < 0) != (at_high < 0)
    roots = _roots(m[crossing], low[crossing], high[crossing], slope[crossing] > 0, exponents)
    rising = slope[crossing] > 0
    ends = np.where(rising, low[crossing], roots), np.where(rising, roots, high[crossing])
    return np.concatenate([np.stack([low, high], 1)[whole], np.stack(ends, 1)])


def _roots(m: Floats, left: Floats, right: Floats, rising: NDArray[np.bool_], exponents: Floats) -> Floats:
    """Zeros of B between ``left`` and ``right``, where it is monotone: Newton's method within a bracket."""
    x = (left + right) / 2
    going = np.arange(len(x))
    for _ in range(_MOST_NEWTON_STEPS):
        if not len(going):
            break
        # Newton's method, with bisection wherever a step would leave the bracket: it converges whatever the
        # function does.
        value, change, _ = _taylor(m[going], x[going], np.zeros(len(going)), exponents)
        root_is_right = (value < 0) == rising[going]
        left[going] = np.where(root_is_right, x[going], left[going])
        right[going] = np.where(root_is_right, right[going], x[going])
        with np.errstate(divide="ignore", invalid="ignore"):
            step = x[going] - value / change
        inside = (step > left[going]) & (step < right[going])
        step = np.where(inside, step, (left[going] + right[going]) / 2)
        moved = np.abs(step - x[going])
        x[going] = step
        going = going[moved > _FINEST / 10]
    return x


def _without(intervals: Floats, holes: Floats) -> Floats:
    """Sorted disjoint intervals ``[k, 2]`` minus gaps in any order."""
    if not len(holes):
        return intervals
    holes = holes[np.argsort(holes[:, 0])]
    reach = np.maximum.accumulate(holes[:, 1])
    # Gaps closer than the resolution are merged.
    begins = np.flatnonzero(np.r_[True, holes[1:, 0] > reach[:-1] + _FINEST])
    start, end = holes[begins, 0], reach[np.r_[begins[1:] - 1, len(reach) - 1]]
    pieces = [np.empty((0, 2))]
    for low, high in intervals:
        # Merged gaps are disjoint, so both of their ends ascend and bisection finds those in the interval.
        inside = slice(np.searchsorted(end, low, side="right"), np.searchsorted(start, high, side="left"))
        # Ends of gaps lie between the ends of the interval, so every pair of edges encloses a part that remains.
        edges = np.r_[low, np.stack([start[inside], end[inside]], 1).ravel(), high].reshape(-1, 2)
        pieces.append(edges[edges[:, 1] - edges[:, 0] > _FINEST])
    return np.concatenate(pieces)
