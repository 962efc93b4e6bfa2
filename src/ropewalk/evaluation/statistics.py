"""95 % confidence intervals of scores, means over tasks, paired differences, and losses over a few rows.

``benchmarks/results/interval_coverage.json`` and docs/evaluation.md give the simulated coverage of each interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.student import student_quantile

Interval = tuple[float, float]
"""Low and high end, both included; NaN if the samples do not determine an interval."""

NO_INTERVAL: Interval = (math.nan, math.nan)
Z_95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""
PSEUDO_SCORES = Z_95**2
"""Variance added to the sum of scores from 0 to 1: Wilson's pseudo-observations, at the largest possible deviation."""
PSEUDO_DIFFERENCES = 2.0
"""Variance added to the sum of differences from -1 to 1: one pseudo-observation at each end."""


def finite_or_none(number: float) -> float | None:
    """Return a number as JSON has it: None for NaN and infinity."""
    return number if math.isfinite(number) else None


def wilson_interval(successes: float, n: float) -> Interval:
    """Compute Wilson's 95 % score interval of a proportion, without continuity correction.

    Args:
        successes: number of successes, 0 to ``n``.
        n: number of independent trials; may be an effective number, see :func:`score_interval`.

    Returns:
        (low, high) within [0, 1]; (NaN, NaN) for no trials. Its width is positive even if all or no trials succeed.

    Raises:
        RopewalkError: if ``successes`` is not within 0 to ``n``.

    Source: Wilson 1927; checked against the table of Newcombe, Statistics in Medicine 17 (1998), 857-872.
    """
    if not 0 <= successes <= n:
        raise RopewalkError(f"successes must be from 0 to {n}, the number of trials, got {successes}")
    if n == 0:
        return NO_INTERVAL
    share, z2 = successes / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # With no or only successes one end is exactly 0 or 1; rounding must not make it 1e-17 or 1 + 1e-16.
    low = 0.0 if successes <= 0 else max(centre - half, 0.0)
    high = 1.0 if successes >= n else min(centre + half, 1.0)
    return low, high


def score_interval(scores: ArrayLike, contexts: Sequence[int] | None = None) -> Interval:
    """Compute the 95 % interval of the mean of scores from 0 to 1.

    This is Wilson's interval on an effective number of samples. Scores of 0 and 1 get exactly Wilson's interval.
    Other scores vary less than a proportion of the same mean, so they count as the number of correct and wrong
    answers whose mean has the same variance. ``PSEUDO_SCORES`` is added to the variance, so that the interval of
    samples with equal scores does not collapse to a point.

    Questions about the same text are right or wrong together. If ``contexts`` says which text each is about, the texts
    are the independent samples, and the variance of the mean is that between texts (a cluster-robust variance): k
    questions about each of g texts count as g samples if the answers about a text agree, and as up to k g if they do
    not depend on the text.

    Args:
        scores: ``[n]``.
        contexts: number of the text of each score, ``[n]``; None if the scores are independent.

    Returns:
        (low, high) within [0, 1]; (NaN, NaN) for no scores.

    Raises:
        RopewalkError: if a score is not within 0 to 1.

    Source: Miller, Adding Error Bars to Evals, arXiv:2411.00640, section 2.2.
    """
    values = _scores(scores)
    if not len(values):
        return NO_INTERVAL
    mean = float(np.clip(values.mean(), 0, 1))
    _, texts = np.unique(np.arange(len(values)) if contexts is None else contexts, return_inverse=True)
    residuals = np.bincount(texts, weights=values - values.mean())
    variance = float(np.square(residuals).sum()) / len(values) ** 2
    n = _effective_number(mean, variance, len(residuals))
    return wilson_interval(min(mean * n, n), n)


def mean_score_interval(tasks: Sequence[ArrayLike]) -> Interval:
    """Compute the 95 % interval of the unweighted mean of scores over tasks.

    This is Agresti and Coull's interval on an effective number of samples. The tasks are strata: differences between
    tasks do not count as variance. As in :func:`score_interval`, the samples count as the number of correct and
    wrong answers whose plain mean has the same variance. Pseudo-observations are added once to all tasks together.
    Adding them to each task, as MOVER does with Wilson's intervals, pulls the mean of many tasks away from 0 and 1,
    where the coverage is then too low.

    Args:
        tasks: independent scores from 0 to 1 of each task, ``[n]`` each; at least one task.

    Returns:
        (low, high) within [0, 1]; (NaN, NaN) if a task has no scores.

    Raises:
        RopewalkError: if there is no task, or a score is not within 0 to 1.

    Source: Agresti and Coull, The American Statistician 52 (1998), 119-126.
    """
    mean, variance, n = _stratified([_scores(task) for task in tasks], most_variance=0.25)
    if math.isnan(mean):
        return NO_INTERVAL
    mean = min(max(mean, 0.0), 1.0)
    # Agresti and Coull add Z_95² pseudo-observations with a mean of one half.
    more = _effective_number(mean, variance, n) + Z_95**2
    centre = mean + (0.5 - mean) * Z_95**2 / more
    half = Z_95 * math.sqrt(centre * (1 - centre) / more)
    # Rounding must not push an end past the mean itself.
    return max(min(centre - half, mean), 0.0), min(max(centre + half, mean), 1.0)


def paired_score_interval(tasks: Sequence[ArrayLike]) -> Interval:
    """Compute the 95 % interval of the unweighted mean over tasks of paired differences of scores.

    This is a normal interval with the stratified variance plus that of ``PSEUDO_DIFFERENCES``: one difference of -1
    and one of 1, shared by all tasks. So its width is positive even if both models have equal scores everywhere.

    Args:
        tasks: differences from -1 to 1 of each task, ``[n]`` each; at least one task.

    Returns:
        (low, high) within [-1, 1], around the mean; (NaN, NaN) if a task has fewer than two differences.

    Raises:
        RopewalkError: if there is no task.

    Source: after Bonett and Price, British Journal of Mathematical and Statistical Psychology 65 (2012), 479-488,
    who add the same two pairs to a two-by-two table.
    """
    strata = [np.asarray(task, dtype=np.float64) for task in tasks]
    mean, variance, n = _stratified(strata, most_variance=1.0)
    if min(map(len, strata)) < 2 or not math.isfinite(mean):
        return NO_INTERVAL
    half = Z_95 * math.sqrt(variance + PSEUDO_DIFFERENCES / n**2)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def ratio_interval(
    totals: ArrayLike, counts: ArrayLike | None = None, at_least: float = -math.inf
) -> Interval:
    """Compute Student's 95 % interval of ``sum(totals) / sum(counts)`` by a jackknife over whole samples.

    Values within a sample (such as the tokens of one row) are correlated, so the jackknife leaves out whole samples.
    The degrees of freedom are the effective number of samples, ``sum(counts)² / sum(counts²)``, minus 1: ten
    documents count as little more than one if one of them has most of the tokens. For a perplexity, pass losses in
    nats and exponentiate both ends, which gives the interval on the logarithmic scale.

    Args:
        totals: float ``[n]``, sum of each sample's values.
        counts: ``[n]``, number of values in each sum, 0 or more; None for 1 each, which gives a plain mean.
        at_least: lower bound of the ratio, such as 0 for a loss.

    Returns:
        (low, high); (NaN, NaN) if fewer than two samples have values, or a total is not finite.

    Raises:
        RopewalkError: if the shapes differ or a count is negative.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 11. The percentile bootstrap of chapter 13
    had a coverage of only 82 % with 4 rows and 91 % with 16.
    """
    sums = np.asarray(totals, dtype=np.float64)
    weights = np.ones_like(sums) if counts is None else np.asarray(counts, dtype=np.float64)
    if sums.ndim != 1 or weights.shape != sums.shape:
        raise RopewalkError(
            "totals and counts must be 1-dimensional and equally long, got the shapes "
            f"{sums.shape} and {weights.shape}"
        )
    if (weights < 0).any():
        raise RopewalkError(f"counts must be 0 or more, got {weights.min():g}")
    # Rows without targets in a bin say nothing about it.
    holding = weights > 0
    sums, weights = sums[holding], weights[holding]
    n = len(sums)
    if n < 2 or not np.isfinite(sums).all():
        return NO_INTERVAL
    total, count = sums.sum(), weights.sum()
    ratio = float(total / count)
    # Leave-one-out ratios minus the full ratio, computed from residuals because subtracting the ratios would cancel.
    left_out = (ratio * weights - sums) / (count - weights)
    error = math.sqrt((n - 1) / n * float(np.square(left_out - left_out.mean()).sum()))
    # Kish's effective number of rows, minus one: rows of unequal length count as fewer than they are.
    freedom = max(float(count**2 / np.square(weights).sum()) - 1, 1.0)
    # Student's quantile instead of the normal one: with a few long rows the variance itself is uncertain.
    half = student_quantile(freedom) * error
    return max(ratio - half, at_least), ratio + half


def exp_nats(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _scores(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1:
        raise RopewalkError(
            f"scores must be a 1-dimensional list of numbers from 0 to 1, got shape {values.shape}"
        )
    # Allow for rounding: sums of thirds and percentages divided by 100 may be off in the last digit.
    outside = values[~((values >= -1e-9) & (values <= 1 + 1e-9))]
    if len(outside):
        raise RopewalkError(f"scores must be from 0 to 1, got {outside[0]:g}")
    return values


def _stratified(strata: Sequence[NDArray[np.float64]], most_variance: float) -> tuple[float, float, float]:
    """Return the mean over strata, its variance, and the equivalent number of samples in a single stratum.

    A stratum of one sample gets the variance ``most_variance``, the largest possible one.
    """
    if not strata:
        raise RopewalkError("a mean over tasks needs at least one task, got none")
    sizes = np.array([len(values) for values in strata], dtype=np.float64)
    if not sizes.all():
        return math.nan, math.nan, math.nan
    variances = [values.var(ddof=1) if len(values) > 1 else most_variance for values in strata]
    tasks = len(strata)
    # fsum rounds once, so that the mean does not depend on the order of tasks.
    mean = math.fsum(values.mean() for values in strata) / tasks
    return mean, math.fsum(variances / sizes) / tasks**2, tasks**2 / math.fsum(1 / sizes)


def _effective_number(mean: float, variance: float, n: float) -> float:
    """Return the number of correct and wrong answers whose mean has the same variance; at least ``n``.

    Args:
        mean: mean of scores from 0 to 1.
        variance: estimated variance of the mean.
        n: number of samples.
    """
    binomial = n * mean * (1 - mean)
    return n * max((binomial + PSEUDO_SCORES) / (n**2 * variance + PSEUDO_SCORES), 1.0)
