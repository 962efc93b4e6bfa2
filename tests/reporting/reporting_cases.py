"""Results that figures, tables and pages of the tests show."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

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


def drawing(monkeypatch: pytest.MonkeyPatch, plain: dict[Any, Any], *modules: Any) -> Callable[..., Any]:
    """What draws and returns a figure in place of writing it.

    Args:
        monkeypatch: of the test.
        plain: keeps the pictures without changes, which many tests look at and none alters.
        modules: that save figures.
    """
    kept: list[Any] = []
    for module in modules:
        monkeypatch.setattr(module, "save_figure", lambda figure, _: kept.append(figure))

    def draw(drawer: Callable[..., None], **changes: Any) -> Any:
        # What a caller may as well leave out.
        for name, nothing in (("title", ""), ("caption", None)):
            if changes.get(name, 0) == nothing:
                del changes[name]
        if not changes and drawer in plain:
            return plain[drawer]
        drawer(Path("unused.png"), **changes)
        kept[-1].draw_without_rendering()
        if not changes:
            plain[drawer] = kept[-1]
        return kept[-1]

    return draw
