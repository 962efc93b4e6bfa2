"""What an evaluation found, as plain values that go to JSON and come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval

Status = Literal["ok", "not run"]


@dataclass(frozen=True)
class PositionBin:
    """Perplexity of the targets whose index in the row is ``start <= index < end``.

    Attributes:
        start, end: tokens.
        n_tokens: targets that were scored.
        n_windows: rows that have any of them.
        perplexity: exp of the token-weighted mean loss; NaN where nothing was scored.
        ci95: bootstrap interval over rows; NaN with fewer than two.
    """

    start: int
    end: int
    n_tokens: int
    n_windows: int
    perplexity: float
    ci95: Interval

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "end": self.end,
            "n_tokens": self.n_tokens,
            "n_windows": self.n_windows,
            "perplexity": _finite(self.perplexity),
            "ci95": [_finite(end) for end in self.ci95],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PositionBin:
        return cls(
            value["start"],
            value["end"],
            value["n_tokens"],
            value["n_windows"],
            _number(value["perplexity"]),
            _interval(value["ci95"]),
        )


@dataclass(frozen=True)
class TaskResult:
    """One task at one length.

    Attributes:
        suite: the benchmark it belongs to, as on the command line.
        task: the task within the suite.
        length: tokens, room for the answer included.
        n: independent samples: prompts, or rows of text.
        score: share of right answers from 0 to 1, or perplexity; NaN where there is none, never 0 in its
            place.
        ci95: 95 % interval of the score.
        status: ``ok`` or ``not run``.
        reason: why it was not run, or a remark on the score.
        details: facts about the run, JSON values.
        positions: perplexity by position, empty for other tasks.
        predictions: one JSON object a sample; they go to a file of their own and are no part of
            :meth:`to_json`.
    """

    suite: str
    task: str
    length: int
    n: int
    score: float
    ci95: Interval
    status: Status = "ok"
    reason: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    positions: tuple[PositionBin, ...] = ()
    predictions: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.status not in ("ok", "not run"):
            raise RopewalkError(f"unknown status {self.status!r}; choose ok or not run")
        if self.status == "not run" and (not math.isnan(self.score) or not self.reason):
            raise RopewalkError(f"{self.task} was not run: it needs a reason and has no score")

    @classmethod
    def not_run(cls, suite: str, task: str, length: int, reason: str) -> TaskResult:
        """A task that has no score, and why."""
        return cls(suite, task, length, 0, math.nan, NO_INTERVAL, "not run", reason)

    def to_json(self) -> dict[str, Any]:
        """JSON values; a missing number is None. ``positions`` only where there are any."""
        value: dict[str, Any] = {
            "suite": self.suite,
            "task": self.task,
            "length": self.length,
            "n": self.n,
            "score": _finite(self.score),
            "ci95": [_finite(end) for end in self.ci95],
            "status": self.status,
            "reason": self.reason,
            "details": dict(self.details),
        }
        if self.positions:
            value["positions"] = [each.to_json() for each in self.positions]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskResult:
        """What :meth:`to_json` wrote; predictions are not in it."""
        return cls(
            value["suite"],
            value["task"],
            value["length"],
            value["n"],
            _number(value["score"]),
            _interval(value["ci95"]),
            value["status"],
            value["reason"],
            value.get("details", {}),
            tuple(PositionBin.from_json(each) for each in value.get("positions", ())),
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _interval(value: list[float | None]) -> Interval:
    low, high = value
    return _number(low), _number(high)
