"""Means over seeds and differences between cells, with 95 % intervals that count seeds and samples.

The design is that of randomised blocks: a seed decides the order of the data and the samples for every cell, so seeds
are blocks, and a difference between two cells is taken within each seed. Two levels vary:

- seeds. The residual mean square of the layout cells x seeds, ``MS`` with ``(C-1)(S-1)`` degrees of freedom, is what is
  left of the scores once cells and seeds are taken out; a difference of two means over ``S`` seeds has the variance
  ``2 MS / S``. It contains the variance of samples that differ by seed.
- samples. Where seeds have samples in common (held-out rows), chance in their choice is common to all seeds and not
  part of ``MS``; the variance of the difference over samples is added.

The variance of the samples alone is a lower bound of the variance of a difference, so scores that happen to agree in
all seeds announce no certainty. Intervals and p-values are Student's; Holm's correction is over all differences.
``benchmarks/results/comparison_nulls.json`` has the share of simulated grids without any effect that announce one:
at most 5 %, but up to 8 % where one cell varies four times as much between seeds as the others (``docs/log.md``).

Source: Montgomery, Design and Analysis of Experiments, chapter 4 (randomised blocks); Holm 1979; Grubbs 1948 (variance
of each of several measurements); Box 1954 (degrees of freedom where variances differ).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.evaluation.comparison import ScoreDifference, holm, paired_samples
from ropewalk.evaluation.results import SAMPLES, TEXT, PositionBin, TaskResult
from ropewalk.evaluation.statistics import NO_INTERVAL, PSEUDO_DIFFERENCES, PSEUDO_SCORES, Interval, exp_nats
from ropewalk.evaluation.student import student_p_value, student_quantile

Seeds = Mapping[int, Sequence[TaskResult]]
"""Results of one cell by seed."""
Key = tuple[str, str, int | None]
Floats = NDArray[np.float64]
_Values = Mapping[Key, Mapping[str, Mapping[int, float]]]
"""Scores as shares, or mean losses in nats, by task, cell and seed."""


@dataclass(frozen=True)
class _Spread:
    """Estimate of a mean with its variance.

    Attributes:
        mean: in the unit of a share, or in nats.
        variance: of the mean.
        freedom: degrees of freedom of the variance.
    """

    mean: float
    variance: float
    freedom: float

    def interval(self) -> Interval:
        if not math.isfinite(self.variance) or self.freedom < 1:
            return NO_INTERVAL
        half = student_quantile(self.freedom) * math.sqrt(self.variance)
        return self.mean - half, self.mean + half

    def p_value(self) -> float:
        """Two-sided p-value of a mean of 0."""
        if not math.isfinite(self.variance) or self.freedom < 1:
            return math.nan
        # Perplexities get no pseudo-variance, so equal losses in every sample would divide by zero below.
        if not self.variance:
            return 1.0 if not self.mean else 0.0
        return student_p_value(self.freedom, self.mean / math.sqrt(self.variance))


def means_over_seeds(cell: Seeds) -> list[TaskResult]:
    """Mean of each task and length over the seeds of a cell; with one seed, its results as they are.

    Perplexities are averaged on the logarithmic scale. The interval is Student's over seeds; its variance is at least
    that of the samples. ``n`` counts distinct samples: a text that several seeds have measured is one. Perplexities
    have their position bins, if all seeds have the same, and then ``position_spreads`` in their details has the lowest
    and the highest seed in each bin. Tasks that did not run with every seed are left out.
    """
    if len(cell) == 1:
        return [result for results in cell.values() for result in results]
    found = []
    for key, results in _by_key(cell).items():
        # A mean over fewer seeds than the others' would compare different things, so the task is left out.
        if len(results) < len(cell) or any(not _scored(result) for result in results.values()):
            continue
        first = next(iter(results.values()))
        values = np.array([_value(result) for result in results.values()])
        pseudo = PSEUDO_SCORES / 4 if first.unit == "percent" else 0.0
        seeds = float(values.var(ddof=1)) / len(values)
        samples = [_samples(result) for result in results.values()]
        strata = [_own_scores(result) for result in results.values()]
        variance = _both_levels(seeds, strata, samples, pseudo)
        spread = _Spread(float(values.mean()), variance, len(values) - 1)
        score, ci95 = _in_unit(spread, first.unit)
        details: dict[str, Any] = {"seeds": sorted(results)}
        positions, spreads = _mean_positions([*results.values()], samples)
        if positions:
            details["position_spreads"] = spreads
        if first.positions:
            of_text = zip(chain(*samples), chain(*(weights for _, weights in strata)), strict=True)
            details["n_tokens"] = int(sum(dict(of_text).values()))
        found.append(
            TaskResult(
                *key,
                len({*chain(*samples)}),
                score,
                ci95,
                details=details,
                positions=positions,
                unit=first.unit,
            )
        )
    return found


def differences(cells: Mapping[str, Seeds]) -> dict[str, list[ScoreDifference]]:
    """Differences of each cell from the first one, paired by seed and sample, by the cell's name.

    Args:
        cells: results by seed, of at least one cell; the first is the reference.

    Returns:
        For each other cell its differences in the order of the reference's tasks; ``p_adjusted`` is corrected over all
        differences of all cells. A difference without a test has a reason.
    """
    reference, *others = cells
    found: list[tuple[str, ScoreDifference]] = []
    layout = {name: _by_key(cell) for name, cell in cells.items()}
    values = {
        key: {
            name: {seed: _value(result) for seed, result in tasks.get(key, {}).items() if _scored(result)}
            for name, tasks in layout.items()
        }
        for key in layout[reference]
    }
    for name in others:
        for key in layout[reference]:
            if key in layout[name]:
                pair = layout[reference][key], layout[name][key]
                found.append((name, _difference(values, key, (reference, name), *pair)))
    tested = holm([difference for _, difference in found])
    result: dict[str, list[ScoreDifference]] = {name: [] for name in others}
    for (name, _), difference in zip(found, tested, strict=True):
        result[name].append(difference)
    return result


def _difference(
    values: _Values,
    key: Key,
    names: tuple[str, str],
    a: Mapping[int, TaskResult],
    b: Mapping[int, TaskResult],
) -> ScoreDifference:
    """One difference of two cells, before Holm's correction; ``a`` and ``b`` are their results by seed."""
    seeds = sorted(a.keys() & b.keys())
    one = next(iter(a.values()))
    empty = ScoreDifference(
        *key, one.unit, 0, math.nan, math.nan, math.nan, NO_INTERVAL, math.nan, math.nan, False
    )
    if not seeds:
        # Without a common seed, chance in the seeds cannot be told from the difference of the cells.
        return replace(empty, reason="the two have no seed in common")
    pairs = [(a[seed], b[seed]) for seed in seeds]
    for result in (result for pair in pairs for result in pair):
        if not _scored(result):
            return replace(empty, reason=result.reason or "the score is not a finite number")
    deltas = []
    for pair in pairs:
        paired = paired_samples(*pair)
        if isinstance(paired, str):
            return replace(empty, reason=paired)
        share = 100.0 if one.unit == "percent" else 1.0
        deltas.append((paired[0] / share, paired[1]))
    by_seed = np.array([d.sum() / w.sum() for d, w in deltas])
    samples = [_samples(x) for x, _ in pairs]
    pseudo = PSEUDO_DIFFERENCES if one.unit == "percent" else 0.0
    if len(seeds) == 1:
        # With one seed, only chance in the samples can be estimated; the conclusion says so.
        spread = _Spread(float(by_seed[0]), _samples_variance(deltas, pseudo), len(deltas[0][0]) - 1)
    else:
        variance, freedom = _block_variance(values, key, names, seeds, by_seed)
        variance = _both_levels(variance, deltas, samples, pseudo)
        spread = _Spread(float(by_seed.mean()), variance, freedom)
    value, ci95 = _difference_in_unit(spread, one.unit)
    return replace(
        empty,
        n=len({*chain(*samples)}),
        score_a=_mean_score([x for x, _ in pairs]),
        score_b=_mean_score([y for _, y in pairs]),
        difference=value,
        ci95=ci95,
        p_value=spread.p_value(),
        freedom=spread.freedom,
    )


def _block_variance(
    values: _Values, key: Key, pair: tuple[str, str], seeds: Sequence[int], by_seed: Floats
) -> tuple[float, float]:
    """Variance of a mean difference over seeds and its degrees of freedom.

    All cells that have the task with all these seeds share their residual mean square. Cells may differ in how much
    seeds move them, so the variance is never below that of the pair's own differences, nor below the two cells' share
    of it in all tasks; and a mean square that comes from one cell mostly has fewer degrees of freedom.
    """
    here = _with_seeds(values[key], seeds)
    names, (cells, count) = list(here), (len(here), len(seeds))
    freedom = (cells - 1) * (count - 1)
    pooled = 2 * float(np.square(_residuals(np.array(list(here.values())))).sum()) / freedom / count
    own = float(by_seed.var(ddof=1)) / count
    # Shares are averaged over tasks that the same cells have.
    alike = [table for each in values.values() if (table := _with_seeds(each, seeds)).keys() == here.keys()]
    shares, epsilon = _shares(np.array([list(table.values()) for table in alike]))
    share = float(np.mean([shares[names.index(name)] for name in pair]))
    return max(pooled, own, pooled * share), max(1.0, freedom * epsilon)


def _with_seeds(task: Mapping[str, Mapping[int, float]], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Values of the cells that have all these seeds, in their order."""
    return {name: [row[seed] for seed in seeds] for name, row in task.items() if row.keys() >= set(seeds)}


def _residuals(values: Floats) -> Floats:
    """What is left after the effects of cell and seed: how much training itself varies, ``[..., cells, seeds]``."""
    of_seed, of_cell = values.mean(-2, keepdims=True), values.mean(-1, keepdims=True)
    return np.asarray(values - of_seed - of_cell + values.mean((-2, -1), keepdims=True))


def _shares(values: Floats) -> tuple[Floats, float]:
    """Variance between seeds of each cell over the mean of all, ``[cells]``, and Box's epsilon for these shares.

    Epsilon is the part of its degrees of freedom that the residual mean square keeps: 1 where cells are equal, less
    where one outweighs the others. Chance in the shares makes it smaller too. That part is taken out, so that even
    cells lose little: the variance of a mean of mean squares, which is larger where tasks rise and fall together.

    Args:
        values: ``[tasks, cells, seeds]``.
    """
    _, cells, count = values.shape
    residual = _residuals(values)
    total = np.square(residual).sum((1, 2))
    # Tasks without any residual but rounding say nothing about shares.
    told = total > 1e-24 * np.square(values).sum((1, 2))
    # With two cells the residuals of one are those of the other with the other sign.
    if cells < 3 or not told.any():
        return np.ones(cells), 1.0
    # Every task has the same weight, whatever its unit and size.
    residual = residual[told] / np.sqrt(total[told])[:, None, None]
    mean = np.square(residual).sum(2)
    # Grubbs's estimate up to a factor: a residual of one cell contains a part of every other's.
    variance = np.maximum(mean - mean.sum(1, keepdims=True) / (cells * (cells - 1)), 0.0)
    shares = (variance / variance.mean(1, keepdims=True)).mean(0)
    flat = residual.reshape(len(residual), -1)
    chance = 2 / (count - 1) * float(np.square(flat @ flat.T).mean())
    return shares, min(1.0, cells * (1 + chance) / float(np.square(shares).sum()))


def _samples(result: TaskResult) -> list[Hashable]:
    """What each sample is, in order: a text that two seeds have measured is the same for both."""
    # Without a digest, nothing says that two results have samples in common.
    drawn = result.details.get(SAMPLES, id(result))
    return [sample.get(TEXT, (drawn, sample["index"])) for sample in result.samples]


def _mean_positions(
    results: Sequence[TaskResult], samples: Sequence[Sequence[Hashable]]
) -> tuple[tuple[PositionBin, ...], list[dict[str, float | None]]]:
    """Mean of each position bin over seeds, as of the whole perplexity, and the lowest and highest seed in it.

    None if the seeds have different bins.
    """
    edges = {tuple((each.start, each.end) for each in result.positions) for result in results}
    if len(edges) > 1:
        return (), []
    distinct, total = len({*chain(*samples)}), sum(map(len, samples))
    found: list[PositionBin] = []
    spreads: list[dict[str, float | None]] = []
    for bins in zip(*(result.positions for result in results), strict=True):
        perplexity, ci95 = math.nan, NO_INTERVAL
        spread: dict[str, float | None] = {"min": None, "max": None}
        # A bin at the very end of the rows has no target.
        if all(math.isfinite(each.perplexity) for each in bins):
            of_seeds = [each.perplexity for each in bins]
            spread = {"min": min(of_seeds), "max": max(of_seeds)}
            nats = np.log(of_seeds)
            seeds = float(nats.var(ddof=1)) / len(nats)
            of_samples = [_variance_of(each) for each in bins]
            own = sum(of_samples) / len(of_samples) ** 2
            variance = seeds + fmean(of_samples) if distinct < total else max(seeds, own)
            perplexity, ci95 = _in_unit(_Spread(float(nats.mean()), variance, len(nats) - 1), "perplexity")
        # Bins do not say which texts they hold, so those in common are taken to have as many tokens as the others.
        n_tokens, n_windows = (
            round(sum(counts) * distinct / total)
            for counts in zip(*((each.n_tokens, each.n_windows) for each in bins), strict=True)
        )
        found.append(PositionBin(bins[0].start, bins[0].end, n_tokens, n_windows, perplexity, ci95))
        spreads.append(spread)
    return tuple(found), spreads


def _variance_of(position: PositionBin) -> float:
    """Variance of a bin's mean loss over texts, from its interval; 0 if a single text left it without an interval."""
    high = position.ci95[1]
    if not math.isfinite(high) or position.n_windows < 2:
        return 0.0
    # From the upper end, because the lower end of a loss stops at 0.
    return (math.log(high / position.perplexity) / student_quantile(position.n_windows - 1)) ** 2


def _both_levels(
    seeds: float,
    strata: Sequence[tuple[Floats, Floats]],
    samples: Sequence[Sequence[Hashable]],
    pseudo: float,
) -> float:
    """Variance of a mean over several seeds from both levels.

    Args:
        seeds: the variance that the scores of the seeds show.
        strata: for each seed the sums of the samples, and their weights, both ``[n]``.
        samples: what each sample is, from :func:`_samples`. Chance in the choice of samples that seeds have in common
            moves these seeds alike, so it is not in ``seeds`` and no number of seeds makes it smaller. If they have
            none in common, it is in ``seeds`` already, and is only a lower bound.
        pseudo: as in :func:`_samples_variance`.
    """
    found: dict[Hashable, list[tuple[float, float]]] = {}
    for (sums, weights), of_seed in zip(strata, samples, strict=True):
        for sample, total, weight in zip(of_seed, sums, weights, strict=True):
            found.setdefault(sample, []).append((total, weight))
    if len(found) == sum(map(len, samples)):
        return max(seeds, _samples_variance(strata, pseudo))
    # Each sample is averaged over seeds first: its scores under different seeds are not independent draws.
    mean = np.array([np.mean(each, axis=0) for each in found.values()])
    variance = _samples_variance([(mean[:, 0], mean[:, 1])], pseudo)
    return seeds if math.isnan(variance) else seeds + variance


def _samples_variance(strata: Sequence[tuple[Floats, Floats]], pseudo: float) -> float:
    """Variance of the mean over seeds that comes from the samples.

    Args:
        strata: for each seed the sums of the samples, and their weights, both ``[n]``.
        pseudo: variance added to the sum over all samples, so that equal samples do not give 0.
    """
    count = len(strata)
    total = 0.0
    for sums, weights in strata:
        n = len(sums)
        if n < 2:
            # One sample says nothing about the variance; several seeds still do.
            return math.nan if count == 1 else 0.0
        ratio = sums.sum() / weights.sum()
        # Linearised variance of a ratio of sums; with weights of 1, the variance of a mean.
        total += n / (n - 1) * float(np.square(sums - ratio * weights).sum()) / float(weights.sum()) ** 2
    samples = sum(len(sums) for sums, _ in strata)
    return total / count**2 + pseudo / samples**2


def _by_key(cell: Seeds) -> dict[Key, dict[int, TaskResult]]:
    """Results of tasks with samples by task and length, then by seed."""
    found: dict[Key, dict[int, TaskResult]] = {}
    for seed, results in cell.items():
        for result in results:
            if result.samples or result.status != "ok":
                found.setdefault((result.suite, result.task, result.length), {})[seed] = result
    return found


def _scored(result: TaskResult) -> bool:
    return result.status == "ok" and math.isfinite(result.score) and result.score > -math.inf


def _value(result: TaskResult) -> float:
    """Score as a share, or mean loss in nats."""
    sums, weights = _own_scores(result)
    return float(sums.sum() / weights.sum())


def _own_scores(result: TaskResult) -> tuple[Floats, Floats]:
    """Sums and weights of a result's samples: scores from 0 to 1 and 1, or nats and tokens."""
    if result.unit == "percent":
        scores = np.array([sample["score"] for sample in result.samples], dtype=np.float64) / 100
        return scores, np.ones(len(scores))
    nats = np.array([sample["nats"] for sample in result.samples], dtype=np.float64)
    return nats, np.array([sample["tokens"] for sample in result.samples], dtype=np.float64)


def _mean_score(results: Sequence[TaskResult]) -> float:
    """Mean over seeds in the unit of the score."""
    mean = fmean(_value(result) for result in results)
    return 100 * mean if results[0].unit == "percent" else exp_nats(mean)


def _in_unit(spread: _Spread, unit: str) -> tuple[float, Interval]:
    low, high = spread.interval()
    if unit == "percent":
        return 100 * spread.mean, (100 * _clipped(low, 0), 100 * _clipped(high, 0))
    # No loss is below 0 nats, so no perplexity is below 1; NaN stays NaN, because max() keeps its first argument.
    return exp_nats(spread.mean), (exp_nats(max(low, 0.0)), exp_nats(high))


def _difference_in_unit(spread: _Spread, unit: str) -> tuple[float, Interval]:
    """Difference in percentage points, or of perplexities in percent."""
    low, high = spread.interval()
    if unit == "percent":
        return 100 * spread.mean, (100 * _clipped(low, -1), 100 * _clipped(high, -1))
    return _percent_more(spread.mean), (_percent_more(low), _percent_more(high))


def _percent_more(nats: float) -> float:
    """Convert a difference of mean losses in nats to a relative difference of perplexities in percent."""
    return 100 * (exp_nats(nats) - 1)


def _clipped(value: float, least: float) -> float:
    return value if math.isnan(value) else min(max(value, least), 1.0)
