"""95 % intervals: Wilson for a proportion, bootstrap over samples for a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.errors import RopewalkError

Interval = tuple[float, float]
"""Low and high end, both included; NaN where the samples say nothing of their own spread."""

NO_INTERVAL: Interval = (math.nan, math.nan)
Z_95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""
RESAMPLES = 2000


def wilson_interval(successes: float, n: int) -> Interval:
    """Wilson's 95 % score interval of a proportion, without continuity correction.

    For scores between 0 and 1 give their sum: the interval is then too wide if anything, since no value within
    0 and 1 varies more than one that is either.

    Args:
        successes: how often it succeeded, or the sum of the scores, 0 to ``n``.
        n: number of independent trials.

    Returns:
        (low, high) within [0, 1]; (NaN, NaN) for no trials. It has width even where all or none succeed.

    Raises:
        RopewalkError: if ``successes`` is not within 0 to ``n``.

    Source: Wilson 1927; checked against the table of Newcombe, Statistics in Medicine 17 (1998), 857-872.
    """
    if not 0 <= successes <= n:
        raise RopewalkError(f"successes must be from 0 to the number of trials {n}, got {successes}")
    if n == 0:
        return NO_INTERVAL
    share, z2 = successes / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # The ends are exact there; rounding must not leave 1e-17 or 1 + 1e-16.
    low = 0.0 if successes <= 0 else max(centre - half, 0.0)
    high = 1.0 if successes >= n else min(centre + half, 1.0)
    return low, high


def mean_interval(means: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """95 % interval of the unweighted mean of independent means that have intervals of their own.

    The distances of the ends from the means add up in squares (MOVER), so the interval has width even where
    every mean is 0 or all are 100.

    Args:
        means: at least one.
        intervals: one a mean, in the same unit.

    Returns:
        (low, high); (NaN, NaN) where a mean has no interval.

    Raises:
        RopewalkError: if there are no means, or not as many intervals.

    Source: Zou and Donner, Statistics in Medicine 27 (2008), 1693-1702.
    """
    if not means or len(means) != len(intervals):
        raise RopewalkError(
            f"each mean needs an interval, got {len(means)} means and {len(intervals)} intervals"
        )
    centres = np.asarray(means, dtype=np.float64)
    ends = np.asarray(intervals, dtype=np.float64)
    below, above = np.square(centres - ends[:, 0]).sum(), np.square(ends[:, 1] - centres).sum()
    centre, n = centres.mean(), len(centres)
    return float(centre - math.sqrt(below) / n), float(centre + math.sqrt(above) / n)


def bootstrap_interval(
    totals: ArrayLike, counts: ArrayLike | None = None, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Percentile bootstrap 95 % interval of ``sum(totals) / sum(counts)``, resampling whole samples.

    What a sample holds (the tokens of one row, say) is correlated, so a sample is drawn as a whole and its
    tokens keep their weight. With few samples the interval is too narrow: at 16 it covers about 92 %.

    Args:
        totals: float ``[n]``, a sample's sum.
        counts: ``[n]``, how many values each sum has, 0 or more; 1 each if None, for a plain mean.
        seed: of the resampling; the same seed gives the same interval.
        resamples: how many.

    Returns:
        (low, high); (NaN, NaN) where fewer than two samples hold anything, or a total is not finite.

    Raises:
        RopewalkError: if the shapes differ or a count is negative.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    sums = np.asarray(totals, dtype=np.float64)
    weights = np.ones_like(sums) if counts is None else np.asarray(counts, dtype=np.float64)
    if sums.ndim != 1 or weights.shape != sums.shape:
        raise RopewalkError(f"totals and counts must be [n], got shapes {sums.shape} and {weights.shape}")
    if (weights < 0).any():
        raise RopewalkError(f"counts must be 0 or more, got {weights.min():g}")
    holding = weights > 0
    sums, weights = sums[holding], weights[holding]
    n = len(sums)
    if n < 2 or not np.isfinite(sums).all():
        return NO_INTERVAL
    times_drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    means = (times_drawn @ sums) / (times_drawn @ weights)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
