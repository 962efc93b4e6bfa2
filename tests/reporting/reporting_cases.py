"""Results that figures, tables and pages of the tests show."""

import math
from itertools import pairwise

from ropewalk.evaluation import PositionBin, TaskResult, wilson_interval

EDGES = [0, 512, 1024, 1536, 2048]


def perplexity(values: list[float], edges: list[int] | None = None) -> TaskResult:
    edges = edges or EDGES
    bins = tuple(
        PositionBin(start, end, 8000, 16, value, (0.9 * value, 1.1 * value))
        for (start, end), value in zip(pairwise(edges), values, strict=True)
    )
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    score = sum(finite) / len(finite)
    details = {"n_tokens": 32_000}
    return TaskResult(
        "perplexity",
        "perplexity",
        edges[-1],
        16,
        score,
        (0.95 * score, 1.05 * score),
        details=details,
        positions=bins,
        unit="perplexity",
    )


def passkey(length: int, right: int, n: int = 20) -> TaskResult:
    low, high = wilson_interval(right, n)
    return TaskResult("passkey", "passkey", length, n, 100 * right / n, (100 * low, 100 * high))


BEFORE = perplexity([2.64, 2.79, 3.19, 4.2])
AFTER = perplexity([2.6, 2.5, 2.45, 2.4])
