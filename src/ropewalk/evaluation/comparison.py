"""Compare two evaluations on the same samples, and test which differences are statistically significant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import ITSELF, SAMPLES, TaskResult, Unit
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval, paired_score_interval, ratio_interval
from ropewalk.io.results import plain_json

# The smallest possible p-value is 1/10,001, which passes Holm's correction over up to 500 differences.
RESAMPLES = 10_000
LEVEL = 0.05
PROTOCOL = (
    "stride",
    "most_windows",
    "rows",
    "evaluator",
    "mapping",
    "short_context",
    "step",
    "alpha",
    "beta",
)
"""Details that determine which tokens were scored and with how much context; they must be equal in both results."""


@dataclass(frozen=True)
class ScoreDifference:
    """Difference between two results of one task at one length.

    Attributes:
        suite, task, length, unit: as in both results.
        n: number of samples, the same ones in both results; of samples that share texts, the number of texts.
        score_a, score_b: the scores of A and B.
        difference: ``score_b`` - ``score_a`` in percentage points; for perplexities ``score_b`` / ``score_a`` - 1 in
            percent.
        ci95: 95 % interval of the difference, paired by sample. It is an adjusted normal interval for paired
            proportions (Bonett and Price, 2012); for perplexities, it is Student's t interval of the mean loss. NaN
            (null in JSON) if the samples do not determine an interval.
        p_value: two-sided p-value of a permutation test that swaps the scores of A and B in randomly chosen samples.
            NaN (null in JSON) if there are too few samples.
        p_adjusted: ``p_value`` after Holm's correction for all differences of the comparison.
        real: whether ``p_adjusted`` is below 0.05.
        reason: why the two scores cannot be compared; None if they can.
        freedom: degrees of freedom of Student's t distribution, from which a comparison of cells over seeds has its
            interval and p-value; None for two evaluations.
    """

    suite: str
    task: str
    length: int | None
    unit: Unit
    n: int
    score_a: float
    score_b: float
    difference: float
    ci95: Interval
    p_value: float
    p_adjusted: float
    real: bool
    reason: str | None = None
    freedom: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; None for missing numbers."""
        values: dict[str, Any] = plain_json(vars(self))
        return values


def compare(a: Sequence[TaskResult], b: Sequence[TaskResult], seed: int = 0) -> list[ScoreDifference]:
    """Compare the results of B with those of A for each task and length, paired by sample.

    Args:
        a, b: results on the same samples; tasks that only one of them has are left out.
        seed: random seed of the permutation test.

    Returns:
        The differences, in the order of A. A pair that cannot be compared has a reason and no numbers.

    Raises:
        RopewalkError: if A and B have no task and length in common.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 15; Holm 1979.
    """
    other = {(result.suite, result.task, result.length): result for result in b}
    pairs = [(x, y) for x in a if (y := other.get((x.suite, x.task, x.length))) is not None]
    if not pairs:
        raise RopewalkError(
            "the two evaluations have no task and length in common; run both with the same suites and lengths"
        )
    by_key = {(x.suite, x.task, x.length): (x, y) for x, y in pairs}

    def parts(x: TaskResult, y: TaskResult) -> list[_Pair]:
        if x.samples and y.samples:
            return [(x, y)]
        # An overall score has no samples of its own; it is paired task by task, with equal weights as in its mean.
        tasks = x.details.get("tasks", []) if x.unit == "percent" else []
        found = [by_key.get((x.suite, task, x.length)) for task in tasks]
        same = tasks == y.details.get("tasks")
        return [each for each in found if each is not None] if same and None not in found else []

    return holm([_difference(x, y, parts(x, y), seed) for x, y in pairs])


def _difference(a: TaskResult, b: TaskResult, parts: Sequence[_Pair], seed: int) -> ScoreDifference:
    """Compute one difference; ``parts`` are the pairs of task results that a mean over tasks consists of."""
    empty = ScoreDifference(
        a.suite,
        a.task,
        a.length,
        a.unit,
        0,
        a.score,
        b.score,
        math.nan,
        NO_INTERVAL,
        math.nan,
        math.nan,
        False,
    )
    for name, result in (("A", a), ("B", b)):
        if result.status != "ok":
            return replace(empty, reason=f"not run in {name}: {result.reason}")
        if not math.isfinite(result.score):
            return replace(empty, reason=f"the score of {name} is not a finite number")
    strata = []
    for x, y in parts:
        paired = paired_samples(x, y)
        if isinstance(paired, str):
            # In a mean over tasks, name the task that cannot be paired.
            return replace(empty, reason=paired if x is a else f"{x.task}: {paired}")
        strata.append(paired)
    if not strata:
        return replace(empty, reason="the results have no samples to pair")
    value = float(np.mean([deltas.sum() / weights.sum() for deltas, weights in strata]))
    n = sum(len(deltas) for deltas, _ in strata)
    if a.unit == "percent":
        low, high = paired_score_interval([deltas / 100 for deltas, _ in strata])
        ends = (100 * low, 100 * high)
    else:
        # Perplexities are never averaged over tasks, so there is exactly one stratum.
        ((deltas, weights),) = strata
        low, high = ratio_interval(deltas, weights)
        value, ends = _percent_more(value), (_percent_more(low), _percent_more(high))
    return replace(empty, n=n, difference=value, ci95=ends, p_value=exchange_p_value(strata, seed))


def _percent_more(nats: float) -> float:
    """Convert a difference of mean losses in nats to a relative difference of perplexities in percent."""
    try:
        # math.expm1 raises where numpy would return infinity.
        return 100 * math.expm1(nats)
    except OverflowError:
        return math.inf


_Pair = tuple[TaskResult, TaskResult]
_Stratum = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The difference B - A of each sample, and the sample's weight, both ``[n]``."""


def paired_samples(a: TaskResult, b: TaskResult) -> _Stratum | str:
    """Return the paired samples of two results, or the reason why they cannot be paired."""
    requested = a.details.get(SAMPLES)
    if requested is None and SAMPLES not in b.details:
        return "the results have no digest of their samples, so they cannot be paired"
    if requested != b.details.get(SAMPLES):
        # Prompts that a server rejected were samples too.
        asked = [len(each.samples) + len(each.details.get("rejected", ())) for each in (a, b)]
        if asked[0] != asked[1]:
            return f"A has {asked[0]} samples and B has {asked[1]}; run both with the same --samples"
        return "the samples differ in prompts, text or tokenizer"
    if a.details.get("evaluator") == b.details.get("evaluator") == ITSELF:
        return "each model chose its own key tokens; run both with the same --evaluator"
    for key in PROTOCOL:
        if a.details.get(key) != b.details.get(key):
            return f"the settings differ: {key} is {a.details.get(key)} in A and {b.details.get(key)} in B"
    in_a, in_b = ({sample["index"]: sample for sample in result.samples} for result in (a, b))
    if set(in_a) != set(in_b):
        return f"the samples differ: {len(in_a)} in A, {len(in_b)} in B"
    indices = sorted(in_a)
    if a.unit == "percent":
        scores = (np.array([each[i]["score"] for i in indices], dtype=np.float64) for each in (in_a, in_b))
        x, y = scores
        texts = [in_a[i].get("context", i) for i in indices]
        _, text = np.unique(texts, return_inverse=True)
        # Questions about one text are one pair; scaled, so that the mean over texts is that over questions.
        deltas: NDArray[np.float64] = np.bincount(text, weights=y - x).astype(np.float64)
        return deltas * (len(deltas) / len(indices)), np.ones(len(deltas))
    nats_a, nats_b, tokens_a, tokens_b = (
        np.array([each[i][key] for i in indices], dtype=np.float64)
        for key in ("nats", "tokens")
        for each in (in_a, in_b)
    )
    if not np.array_equal(tokens_a, tokens_b):
        return "different tokens were scored in A and B"
    return nats_b - nats_a, tokens_a


def exchange_p_value(strata: Sequence[_Stratum], seed: int) -> float:
    """Compute the two-sided p-value of the mean over strata of ``sum(deltas) / sum(weights)`` by random sign flips.

    If A and B are exchangeable, the p-value is exact up to the randomness of the draws. If they only have equal
    means and the differences are very skewed, it is below 0.05 in up to 12 % of cases.

    Args:
        strata: for each task, the difference B - A of each sample and the sample's weight, both ``[n]``.
        seed: random seed of the sign flips.

    Returns:
        The p-value; NaN if a stratum has fewer than two samples, or a difference is not finite.
    """
    # A single sample has the same absolute difference under both signs, so nothing can be tested.
    if min(len(deltas) for deltas, _ in strata) < 2 or not all(np.isfinite(d).all() for d, _ in strata):
        return math.nan
    rng = np.random.default_rng(seed)
    flips = np.zeros(RESAMPLES)
    for deltas, weights in strata:
        n = len(deltas)
        # Draw in blocks: 10,000 draws for MMLU's 14,000 questions would take a gigabyte at once.
        block = max(1, min(RESAMPLES, 4_000_000 // n))
        for start in range(0, RESAMPLES, block):
            size = min(block, RESAMPLES - start)
            signs = 2.0 * rng.integers(0, 2, (size, n), dtype=np.int8) - 1.0
            flips[start : start + size] += (signs @ deltas) / weights.sum() / len(strata)
    # The observed signs are one of the possible draws; rounding of the sums must not make it count as smaller.
    rounding = 1e-12 * np.mean([np.abs(d).sum() / w.sum() for d, w in strata])
    observed = abs(np.mean([d.sum() / w.sum() for d, w in strata])) - rounding
    # The observed signs count as one draw, so the p-value is never 0 and the test keeps its level.
    return (1 + int((np.abs(flips) >= observed).sum())) / (RESAMPLES + 1)


def holm(differences: Sequence[ScoreDifference]) -> list[ScoreDifference]:
    """Apply Holm's step-down correction: multiply each p-value by the number of remaining hypotheses, monotonically."""
    tested = sorted(
        (i for i, each in enumerate(differences) if not math.isnan(each.p_value)),
        key=lambda i: differences[i].p_value,
    )
    adjusted: dict[int, float] = {}
    highest = 0.0
    for rank, i in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * differences[i].p_value))
        adjusted[i] = highest
    return [
        replace(each, p_adjusted=adjusted[i], real=adjusted[i] < LEVEL) if i in adjusted else each
        for i, each in enumerate(differences)
    ]
