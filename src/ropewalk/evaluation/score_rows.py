"""Scores as rows: one form of every result, from which tables, figures, pages and model cards take what they show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ropewalk.evaluation.results import TaskResult, Unit
from ropewalk.evaluation.statistics import Interval
from ropewalk.evaluation.tasks.registry import BY_NAME

Series = Mapping[str, Sequence[TaskResult]]
"""Results by model name, such as ``{"before": …, "after": …}``."""

OVERALL = "overall"
BY_TOKEN, PUBLISHED = "by token", "published"
"""Metrics of document perplexities: the average over all tokens, and that of the YaRN repository."""
HAYSTACKS = {
    "noise": " in repeated noise",
    "essay": " in essays",
    "embedded": " in the embedded corpus",
    "text": " in given text",
}


@dataclass(frozen=True)
class ScoreRow:
    """One score: a view of a :class:`~ropewalk.evaluation.results.TaskResult`, or of a part of it.

    Attributes:
        suite, task: names of suite and task.
        length: tokens of prompt and answer together; None for tasks whose prompts have no set length.
        when: name of the model, or ``before`` and ``after``.
        value: score in percent, or perplexity. NaN if there is none.
        ci95: 95 % interval in the same unit; NaN if there is none.
        n: number of samples.
        unit: unit of the score.
        ran: whether the task ran.
        note: why the task did not run, or a remark on the score; empty if there is neither. It may quote a server's
            message of any length.
        metric: name of the metric; empty if the suite has one only.
        depth: depth of the answer as a share of the text, from 0 to 1; None for a score over all depths. For scores by
            fifths of the text, the middle of the fifth; ``facts`` then has ``fifths``.
        difficulty: difficulty as the task counts it, such as steps or needles; None for a score over all of them.
        group: label of the questions that it is of, such as ``domain: law``; empty for a score over all of them.
        cell: first position and the position after the last one, in tokens; None for a score over all positions.
        facts: details of the result, such as the number of tokens.
    """

    suite: str
    task: str
    length: int | None
    when: str
    value: float
    ci95: Interval
    n: int
    unit: Unit = "percent"
    ran: bool = True
    note: str = ""
    metric: str = ""
    depth: float | None = None
    cell: tuple[int, int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    difficulty: float | None = None
    group: str = ""

    def record(self) -> dict[str, Any]:
        """The row as plain values, without its facts: one line of a data frame."""
        first = {name: getattr(self, name) for name in ("suite", "task", "length", "when", "value")}
        then = {name: getattr(self, name) for name in ("n", "unit", "metric", "depth", "difficulty", "group")}
        start, end = self.cell or (None, None)
        where = {"start": start, "end": end, "ran": self.ran, "note": self.note}
        return {**first, "low": self.ci95[0], "high": self.ci95[1], **then, **where}

    @property
    def is_whole(self) -> bool:
        """Whether this is a task's score, and not a part of it or the same score averaged in another way."""
        parts = (self.depth, self.cell, self.difficulty)
        return all(each is None for each in parts) and not self.group and self.metric != PUBLISHED

    @property
    def name(self) -> str:
        """Name of the task, preceded by its suite unless the suite is obvious."""
        return task_words(self.suite, self.task)


def score_rows(series: Series) -> list[ScoreRow]:
    """Rows of all results, by model in the order given: each score, then its parts by position and by depth."""
    return [row for when, results in series.items() for each in results for row in _rows(when, each)]


def score_records(series: Series) -> list[dict[str, Any]]:
    """The rows of :func:`score_rows` as plain values."""
    return [row.record() for row in score_rows(series)]


def score_during(score: Mapping[str, Any]) -> ScoreRow:
    """Row of a score that a run measured during training, as its summary has it: without samples and details."""
    return ScoreRow(
        *(score["suite"], score["task"], score["length"], "during"),
        *(or_nan(score["score"]), _ends(score["ci95"]), score["n"], score["unit"]),
    )


def _rows(when: str, result: TaskResult) -> Iterator[ScoreRow]:
    facts = result.details
    metric = BY_TOKEN if "published" in facts else str(facts.get("metric", ""))
    whole = ScoreRow(
        result.suite,
        result.task,
        result.length,
        when,
        result.score,
        result.ci95,
        result.n,
        result.unit,
        result.status == "ok",
        result.reason or "",
        metric,
        facts=facts,
    )
    yield whole
    if not whole.ran:
        return
    if "published" in facts:
        ends = _ends(facts.get("published_ci95", (None, None)))
        yield replace(whole, value=or_nan(facts["published"]), ci95=ends, metric=PUBLISHED, note="")
    # Only means over seeds have spreads.
    for part, spread in zip_longest(result.positions, facts.get("position_spreads", ())):
        yield replace(
            whole,
            value=part.perplexity,
            ci95=part.ci95,
            n=part.n_windows,
            note="",
            cell=(part.start, part.end),
            facts={"n_tokens": part.n_tokens} | ({"spread": spread} if spread else {}),
        )
    for key, name, of in (
        ("depths", "depth", {}),
        ("fifths", "depth", {"fifths": True}),
        ("difficulties", "difficulty", {}),
    ):
        for each in facts.get(key, ()):
            level: dict[str, Any] = {name: float(each[name])}
            ends, value = _ends(each.get("ci95", (None, None))), or_nan(each["score"])
            yield replace(whole, value=value, ci95=ends, n=int(each["n"]), facts=of, **level)
    for grouping, groups in facts.get("groups", {}).items():
        for each in groups:
            ends, value = _ends(each.get("ci95", (None, None))), or_nan(each["score"])
            name = f"{grouping}: {each['label']}"
            yield replace(whole, value=value, ci95=ends, n=int(each["n"]), facts={}, note="", group=name)


def by_suite(rows: Iterable[ScoreRow]) -> dict[str, list[ScoreRow]]:
    """Rows of each suite: those of the registry in its order, then the others."""
    found: dict[str, list[ScoreRow]] = {}
    for row in rows:
        found.setdefault(row.suite, []).append(row)
    ranks = {name: rank for rank, name in enumerate(BY_NAME)}
    return dict(sorted(found.items(), key=lambda pair: ranks.get(pair[0], len(ranks))))


def by_task(rows: Iterable[ScoreRow]) -> dict[str, list[ScoreRow]]:
    """Rows of each task, the overall score last."""
    found: dict[str, list[ScoreRow]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    # False sorts before True.
    return dict(sorted(found.items(), key=lambda pair: pair[0] == OVERALL))


def is_by_length(rows: Iterable[ScoreRow]) -> bool:
    """Whether all scores are percentages, some of them at a length."""
    rows = list(rows)
    return all(row.unit == "percent" for row in rows) and any(row.length is not None for row in rows)


def haystack_words(rows: Iterable[ScoreRow]) -> str:
    """Haystack source, such as `` in essays``, if all results that ran share one; otherwise empty."""
    named = {str(row.facts.get("haystack")) for row in rows if row.ran and row.is_whole}
    return HAYSTACKS.get(named.pop(), "") if len(named) == 1 else ""


def task_words(suite: str, task: str) -> str:
    """Name of a task, preceded by its suite unless the suite is obvious."""
    # RULER's tasks are known by their own names, but "overall" says nothing without its suite.
    return task if task == suite or (suite == "ruler" and task != OVERALL) else f"{suite} {task}"


def or_nan(value: Any) -> float:
    """A number from JSON, which has no NaN and states a missing one as null."""
    return math.nan if value is None else float(value)


def _ends(ends: Sequence[float | None]) -> Interval:
    low, high = map(or_nan, ends)
    return low, high
