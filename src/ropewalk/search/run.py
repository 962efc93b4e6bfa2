"""One search on a model, from settings to what was found: the way that the command and a recipe share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ropewalk.attention.layout import Row
from ropewalk.errors import RopewalkError
from ropewalk.parallel import World
from ropewalk.rope import RopeMethod
from ropewalk.search.algorithms import algorithm_named
from ropewalk.search.goal import Goal
from ropewalk.search.ledger import Ledger
from ropewalk.search.loop import Progress, SearchResult, search
from ropewalk.search.objective import ModelEvaluator, ShortPenalty
from ropewalk.search.settings import SearchSettings


@dataclass(frozen=True)
class Found:
    """What a search found, and what it had to beat; objectives in nats a token.

    Attributes:
        goal: what was searched for.
        settings: how.
        result: the search.
        baselines: objectives of the methods that need no search, by name.
        held_out: objectives on rows that the search did not see, of the best candidate under ``best`` and of each
            baseline; None without such rows.
        seconds: that all of it took.
    """

    goal: Goal
    settings: SearchSettings
    result: SearchResult
    baselines: dict[str, float]
    held_out: dict[str, float] | None
    seconds: float = field(compare=False)


def find(
    model: Any,
    goal: Goal,
    rows: Sequence[Row],
    settings: SearchSettings,
    *,
    short_rows: Sequence[Row] = (),
    held_out: Sequence[Row] = (),
    world: World | None = None,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> Found:
    """Search for a goal on rows of text, and measure what the result has to beat.

    Args:
        model: as for :class:`~ropewalk.search.objective.ModelEvaluator`.
        goal: what for.
        rows: to search on.
        settings: how.
        short_rows: of the trained length, for the short penalty; needed where its weight is not 0.
        held_out: rows of other documents.
        world: processes that share the work; all of them call this alike.
        ledger, progress: as for :func:`~ropewalk.search.loop.search`.
    """
    if settings.short_penalty and not short_rows:
        raise RopewalkError("a short penalty needs rows of the trained length, got none")
    began = time.perf_counter()
    penalty = ShortPenalty(short_rows, settings.short_penalty) if settings.short_penalty else None
    options: dict[str, Any] = {
        "batch": settings.batch,
        "prefill_chunk": settings.prefill_chunk,
        "world": world,
    }
    evaluator = ModelEvaluator(model, goal, rows, penalty, **options)
    space = goal.space(settings.start_tokens, settings.largest)
    baselines = {name: evaluator.baseline(method) for name, method in goal.baselines().items()}
    result = search(
        space,
        evaluator,
        algorithm_named(settings.algorithm),
        goal.seeds(space),
        budget=settings.budget,
        seed=settings.seed,
        racing=settings.racing,
        ledger=ledger,
        progress=progress,
    )
    judged = None
    if held_out:
        judge = ModelEvaluator(model, goal, held_out, **options)
        methods: dict[str, RopeMethod] = {
            "best": goal.method(result.best.candidate),
            **goal.baselines(),
        }
        judged = {name: judge.baseline(method) for name, method in methods.items()}
    return Found(goal, settings, result, baselines, judged, time.perf_counter() - began)
