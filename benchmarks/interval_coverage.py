"""Coverage and width of the 95 % intervals that evaluations report, and of those they were chosen from.

    python -m benchmarks.interval_coverage [--simulations 4000]

Each line is a distribution of scores or losses whose mean is known, a number of samples, and for each method how
often its interval holds that mean (in percent) and how wide it is on average (percentage points for scores, nats a
token for losses). ``ropewalk`` is what the program computes, through its own functions; the methods it was chosen from
are simulated a quarter as often, bootstraps a tenth. Until this benchmark was written the program computed MOVER for
means over tasks, Wilson's interval of the sum of scores for one task, and a percentile bootstrap for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri, stdtrit

from benchmarks.common import parsed, parser_of, write
from ropewalk.evaluation.comparison import exchange_p_value
from ropewalk.evaluation.statistics import (
    Z_95,
    mean_score_interval,
    paired_score_interval,
    ratio_interval,
    score_interval,
)

Floats = NDArray[np.float64]
Ends = tuple[float, float]
Scores = Callable[[np.random.Generator, int, int], Floats]
"""``[simulations, tasks, samples]`` from a generator, the simulations, and the samples of a task."""
Rows = Callable[[np.random.Generator, int], tuple[Floats, Floats]]
"""Mean loss and number of tokens of each row, from a generator and the number of rows."""

TASKS = 13
RESAMPLES = 500


# Means over tasks: scores [tasks, samples] from 0 to 1, all tasks with as many samples.


def wilson(share: Any, n: float, z: Any = Z_95) -> tuple[Any, Any]:
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n * n)) / (1 + z**2 / n)
    return centre - half, centre + half


def mover(scores: Floats) -> Ends:
    """Zou and Donner 2008: distances of Wilson's ends from each task's mean, added in squares."""
    means = scores.mean(1)
    low, high = wilson(means, scores.shape[1])
    below, above = np.square(means - low).sum(), np.square(high - means).sum()
    return means.mean() - np.sqrt(below) / len(means), means.mean() + np.sqrt(above) / len(means)


def pooled_wilson(scores: Floats) -> Ends:
    """As if all samples were of one task."""
    return wilson(scores.mean(), scores.size)


def stratified_wilson(scores: Floats) -> Ends:
    """Yan and Su 2010, section 2: Wilson's ends of each task at one z, such that their mean is the wanted end."""
    means = scores.mean(1)
    errors = np.sqrt(means * (1 - means))
    z = Z_95 * np.sqrt(np.square(errors).sum()) / errors.sum() if errors.any() else Z_95 / np.sqrt(len(means))
    low, high = wilson(means, scores.shape[1], z)
    return low.mean(), high.mean()


def effective_number(scores: Floats) -> tuple[float, float]:
    """Mean over tasks, and effective number of samples, as ``mean_score_interval`` has it."""
    mean, n = float(scores.mean()), scores.size
    error = scores.var(axis=1, ddof=1).mean() / n
    return mean, n * max((n * mean * (1 - mean) + Z_95**2) / (n * n * error + Z_95**2), 1.0)


def effective_wilson(scores: Floats) -> Ends:
    return wilson(*effective_number(scores))


def effective_jeffreys(scores: Floats) -> Ends:
    mean, n = effective_number(scores)
    right = mean * n
    low = betaincinv(right + 0.5, n - right + 0.5, 0.025) if mean > 0 else 0.0
    high = betaincinv(right + 0.5, n - right + 0.5, 0.975) if mean < 1 else 1.0
    return float(low), float(high)


def independent(shares: Sequence[float], parts: int = 1) -> tuple[Scores, float]:
    """Tasks of these true scores, each sample the mean of independent parts (references that may be found)."""

    def draw(rng: np.random.Generator, simulations: int, samples: int) -> Floats:
        return rng.binomial(parts, np.array(shares)[:, None], (simulations, len(shares), samples)) / parts

    return draw, float(np.mean(shares))


def correlated(share: float, parts: int, tasks: int) -> tuple[Scores, float]:
    """Parts of a sample that are found together more often than not (beta-binomial, correlation 1/2)."""

    def draw(rng: np.random.Generator, simulations: int, samples: int) -> Floats:
        return rng.binomial(parts, rng.beta(share, 1 - share, (simulations, tasks, samples))) / parts

    return draw, share


def rare_failure(usual: float, rate: float, tasks: int) -> tuple[Scores, float]:
    """All samples score the same but for a few that score 0: most small samples show no spread at all."""

    def draw(rng: np.random.Generator, simulations: int, samples: int) -> Floats:
        return np.where(rng.random((simulations, tasks, samples)) < rate, 0.0, usual)

    return draw, usual * (1 - rate)


OVERALL: Mapping[str, tuple[Scores, float]] = {
    **{f"right or wrong, {p:g} in all": independent([p] * TASKS) for p in (0.5, 0.9, 0.95, 0.98, 1)},
    "right or wrong, 0.02 in all": independent([0.02] * TASKS),
    "right or wrong, 1 in 8 and 0.6 in 5": independent([1] * 8 + [0.6] * 5),
    "right or wrong, 1 in 7, 0.98 in 3, 0.9, 0.7, 0.4": independent([1] * 7 + [0.98] * 3 + [0.9, 0.7, 0.4]),
    "right or wrong, 1 in 12 and 0.5 in one": independent([1] * 12 + [0.5]),
    "right or wrong, 1 in 12 and 0.95 in one": independent([1] * 12 + [0.95]),
    **{f"share of 4, independent, {p:g}": independent([p] * TASKS, 4) for p in (0.5, 0.9, 0.98)},
    **{f"share of 4, correlated, {p:g}": correlated(p, 4, TASKS) for p in (0.5, 0.9, 0.98)},
    **{f"0.75, but 0 once in {round(1 / r)}": rare_failure(0.75, r, TASKS) for r in (0.002, 0.01, 0.05)},
}
OVERALL_METHODS: Mapping[str, Callable[[Floats], Ends]] = {
    "ropewalk": lambda scores: mean_score_interval(list(scores)),
    "MOVER": mover,
    "pooled Wilson": pooled_wilson,
    "stratified Wilson": stratified_wilson,
    "effective Wilson": effective_wilson,
    "effective Jeffreys": effective_jeffreys,
}

ONE_TASK: Mapping[str, tuple[Scores, float]] = {
    **{f"right or wrong, {p:g}": independent([p]) for p in (0.5, 0.9, 0.95, 0.98, 1)},
    **{f"share of 4, independent, {p:g}": independent([p], 4) for p in (0.5, 0.9, 0.98)},
    **{f"share of 4, correlated, {p:g}": correlated(p, 4, 1) for p in (0.5, 0.9, 0.98)},
    **{f"0.75, but 0 once in {round(1 / r)}": rare_failure(0.75, r, 1) for r in (0.002, 0.01, 0.05)},
}


def bootstrap(totals: Floats, counts: Floats, rng: np.random.Generator) -> Ends:
    """Percentile bootstrap over samples of ``sum(totals) / sum(counts)``."""
    n = len(totals)
    drawn = rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)
    low, high = np.quantile((drawn @ totals) / (drawn @ counts), [0.025, 0.975])
    return low, high


def one_task_methods(rng: np.random.Generator) -> Mapping[str, Callable[[Floats], Ends]]:
    return {
        "ropewalk": lambda scores: score_interval(scores[0]),
        "Wilson": lambda scores: wilson(scores.mean(), scores.size),
        "percentile bootstrap": lambda scores: bootstrap(scores[0], np.ones(scores.size), rng),
    }


# Paired differences: scores [tasks, samples] from -1 to 1.


def bonett_price(differences: Floats) -> Ends:
    """Bonett and Price 2012 over all samples, whatever their task: two more differences, of -1 and of 1."""
    n = differences.size + 2
    centre = differences.sum() / n
    half = Z_95 * np.sqrt(((np.square(differences).sum() + 2) / n - centre**2) / n)
    return centre - half, centre + half


def stratified_t(differences: Floats) -> Ends:
    tasks, n = differences.shape
    half = stdtrit(tasks * (n - 1), 0.975) * np.sqrt(
        differences.var(axis=1, ddof=1).mean() / differences.size
    )
    return differences.mean() - half, differences.mean() + half


def pairs(better: float, worse: float, tasks: int) -> tuple[Scores, float]:
    """Right or wrong answers of two models: B alone is right, or A alone, at these rates."""

    def draw(rng: np.random.Generator, simulations: int, samples: int) -> Floats:
        drawn = rng.random((simulations, tasks, samples))
        return (drawn < better).astype(float) - ((drawn >= better) & (drawn < better + worse))

    return draw, better - worse


def paired_methods(rng: np.random.Generator) -> Mapping[str, Callable[[Floats], Ends]]:
    def resampled(differences: Floats) -> Ends:
        n = differences.shape[1]
        drawn = sum(rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) @ task / n for task in differences)
        low, high = np.quantile(drawn / len(differences), [0.025, 0.975])
        return low, high

    return {
        "ropewalk": lambda differences: paired_score_interval(list(differences)),
        "percentile bootstrap": resampled,
        "stratified t": stratified_t,
        "Bonett and Price": bonett_price,
    }


# Losses over rows, whose number of tokens may differ.


def bca(totals: Floats, counts: Floats, rng: np.random.Generator) -> Ends:
    """Bias-corrected and accelerated bootstrap, Efron and Tibshirani, chapter 14."""
    n, ratio = len(totals), totals.sum() / counts.sum()
    drawn = rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)
    means = (drawn @ totals) / (drawn @ counts)
    left_out = (totals.sum() - totals) / (counts.sum() - counts)
    apart = left_out.mean() - left_out
    acceleration = (apart**3).sum() / (6 * np.square(apart).sum() ** 1.5)
    bias = ndtri(np.clip((means < ratio).mean(), 1 / RESAMPLES, 1 - 1 / RESAMPLES))
    shifted = bias + np.array([-Z_95, Z_95])
    low, high = np.quantile(means, ndtr(bias + shifted / (1 - acceleration * shifted)))
    return low, high


def studentised(totals: Floats, counts: Floats, rng: np.random.Generator) -> Ends:
    """Bootstrap of t, Efron and Tibshirani, section 12.5, with the linearised error."""
    n, ratio = len(totals), totals.sum() / counts.sum()
    drawn = rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)
    means = (drawn @ totals) / (drawn @ counts)
    squares = drawn @ totals**2 - 2 * means * (drawn @ (totals * counts)) + means**2 * (drawn @ counts**2)
    errors = np.sqrt(np.maximum(squares, 0) * n / (n - 1)) / (drawn @ counts)
    kept = errors > 1e-9
    error = np.sqrt(np.square(totals - ratio * counts).sum() * n / (n - 1)) / counts.sum()
    low, high = np.quantile((means - ratio)[kept] / errors[kept], [0.025, 0.975])
    return ratio - high * error, ratio - low * error


def linearised_t(totals: Floats, counts: Floats) -> Ends:
    n, ratio = len(totals), totals.sum() / counts.sum()
    error = np.sqrt(np.square(totals - ratio * counts).sum() * n / (n - 1)) / counts.sum()
    return ratio - stdtrit(n - 1, 0.975) * error, ratio + stdtrit(n - 1, 0.975) * error


def jackknife_t(totals: Floats, counts: Floats) -> Ends:
    """As ``ratio_interval``, with n - 1 degrees of freedom whatever the counts."""
    n, ratio = len(totals), totals.sum() / counts.sum()
    left_out = (totals.sum() - totals) / (counts.sum() - counts)
    error = np.sqrt(left_out.var() * (n - 1))
    return ratio - stdtrit(n - 1, 0.975) * error, ratio + stdtrit(n - 1, 0.975) * error


def rows_methods(rng: np.random.Generator) -> Mapping[str, Callable[[Floats, Floats], Ends]]:
    return {
        "ropewalk": ratio_interval,
        "percentile bootstrap": lambda totals, counts: bootstrap(totals, counts, rng),
        "BCa bootstrap": lambda totals, counts: bca(totals, counts, rng),
        "studentised bootstrap": lambda totals, counts: studentised(totals, counts, rng),
        "t, linearised": linearised_t,
        "t, jackknife, n - 1": jackknife_t,
    }


def equal_rows(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    return rng.normal(2.5, 0.3, n), np.full(n, 1000.0)


def lognormal_rows(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    return np.exp(rng.normal(0.8, 0.4, n)), np.full(n, 1000.0)


def unequal_rows(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    return rng.normal(2.5, 0.3, n), np.exp(rng.normal(6, 0.8, n))


def correlated_rows(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    size = rng.normal(0, 1, n)
    return 2.5 - 0.15 * size + rng.normal(0, 0.25, n), np.exp(6 + 0.8 * size)


ROWS: Mapping[str, Rows] = {
    "normal losses, rows of one length": equal_rows,
    "lognormal losses, rows of one length": lognormal_rows,
    "normal losses, lognormal lengths": unequal_rows,
    "the longer the better": correlated_rows,
}


def true_ratio(rows: Rows, simulations: int) -> float:
    losses, counts = rows(np.random.default_rng(1), 1000 * simulations)
    return float((losses * counts).sum() / counts.sum())


# What is measured.


def covered(ends: Sequence[Ends], truth: float, least: float, most: float, unit: float) -> dict[str, float]:
    """Coverage in percent, and mean width within what is possible."""
    low, high = np.array(ends).T
    inside = (low <= truth + 1e-9) & (truth - 1e-9 <= high)
    width = np.minimum(high, most) - np.maximum(low, least)
    return {"coverage": round(100 * float(inside.mean()), 2), "width": round(unit * float(width.mean()), 4)}


def of_scores(
    cases: Mapping[str, tuple[Scores, float]],
    methods: Callable[[np.random.Generator], Mapping[str, Callable[[Floats], Ends]]],
    sizes: Sequence[int],
    simulations: int,
    least: float = 0.0,
) -> list[dict[str, Any]]:
    found = []
    for samples in sizes:
        for name, (draw, truth) in cases.items():
            rng = np.random.default_rng(samples)
            scores = draw(rng, simulations, samples)
            line: dict[str, Any] = {"scores": name, "samples": samples, "truth": truth}
            for method, interval in methods(rng).items():
                some = scores[: share_of(method, simulations)]
                with np.errstate(all="ignore"):
                    line[method] = covered([interval(each) for each in some], truth, least, 1.0, 100)
            found.append(line)
            say(line)
    return found


def of_rows(simulations: int) -> list[dict[str, Any]]:
    found = []
    for name, rows in ROWS.items():
        truth = true_ratio(rows, simulations)
        for n in (2, 3, 4, 8, 16, 32, 100):
            rng = np.random.default_rng(n)
            drawn = [rows(rng, n) for _ in range(simulations)]
            line: dict[str, Any] = {"losses": name, "rows": n, "truth": truth}
            for method, interval in rows_methods(rng).items():
                if method == "studentised bootstrap" and n < 8:
                    continue  # some resamples hold one row again and again and have no error
                some = drawn[: share_of(method, simulations)]
                ends = [interval(losses * counts, counts) for losses, counts in some]
                line[method] = covered(ends, truth, -np.inf, np.inf, 1)
            found.append(line)
            say(line)
    return found


def false_alarms(simulations: int) -> list[dict[str, Any]]:
    """How often ``compare`` calls a difference real where the two models do not differ, before Holm's correction."""
    found = []
    for name, draw in {
        **{
            f"right or wrong, {p:g} of the answers differ": pairs(p / 2, p / 2, 1)[0]
            for p in (0.02, 0.2, 0.6)
        },
        "normal losses": lambda rng, t, n: rng.normal(0, 0.02, (t, 1, n)),
        "lognormal losses, skewed": lambda rng, t, n: np.exp(0.8 * rng.normal(size=(t, 1, n))) - np.exp(0.32),
    }.items():
        for n in (8, 20, 100):
            rng = np.random.default_rng(n)
            values = [
                exchange_p_value([(differences[0], np.ones(n))], seed)
                for seed, differences in enumerate(draw(rng, simulations, n))
            ]
            share = round(100 * float(np.mean(np.array(values) < 0.05)), 2)
            found.append({"differences": name, "samples": n, "below_0.05": share})
            print(f"{name}, {n}: p < 0.05 in {share} %", flush=True)
    return found


def share_of(method: str, simulations: int) -> int:
    """How many simulations of a method are enough."""
    return simulations // (10 if "bootstrap" in method else 1 if method == "ropewalk" else 4)


def say(line: Mapping[str, Any]) -> None:
    head = ", ".join(str(value) for value in line.values() if not isinstance(value, dict))
    cells = [f"{k} {v['coverage']:.1f}/{v['width']:.3g}" for k, v in line.items() if isinstance(v, dict)]
    print(f"{head}: {'; '.join(cells)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--simulations", type=int, default=4000)
    options = parsed(parser, {"simulations": 40}, arguments)
    many = options.simulations
    paired = {
        f"{words}, B better in {b:g}, worse in {w:g}": pairs(b, w, tasks)
        for tasks, words in ((1, "one task"), (TASKS, f"{TASKS} tasks"))
        for b, w in ((0, 0), (0.01, 0.01), (0.05, 0.05), (0.2, 0.2), (0.1, 0), (0.3, 0.05), (0.9, 0))
    }
    result = {
        "simulations": many,
        "mean_over_tasks": of_scores(OVERALL, lambda _: OVERALL_METHODS, (20, 100, 500), many),
        "one_task": of_scores(ONE_TASK, one_task_methods, (20, 100, 500), many),
        "paired": of_scores(paired, paired_methods, (20, 100), many, -1.0),
        "losses": of_rows(many),
        "false_alarms": false_alarms(many // 8),
    }
    write("interval_coverage", result, options)


if __name__ == "__main__":
    main()
