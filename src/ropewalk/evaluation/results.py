"""What an evaluation found, as plain values that go to JSON and come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval
from ropewalk.io.json_lines import check_types

Status = Literal["ok", "not run"]
Unit = Literal["percent", "perplexity"]

ITSELF = "the model itself"
"""What chose LongPPL's key tokens, where the user named no evaluator."""

TASKS_BEFORE = {"forced": "teacher_forced"}
"""Tasks that had another name in version 0.1.0, whose results are read."""

SAMPLES = "samples_sha256"
"""Key in a result's details: a digest of what was asked, equal for two results on the same samples."""


_NUMBER = (int, float, type(None))
_TYPES_OF_RESULT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("suite", "task", "status", "unit"), (str,)),
    "length": (int, type(None)),
    "n": (int,),
    "score": _NUMBER,
    "reason": (str, type(None)),
    "details": (Mapping,),
    **dict.fromkeys(("ci95", "positions", "samples"), (list, tuple)),
}
_TYPES_OF_BIN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("start", "end", "n_tokens", "n_windows"), (int,)),
    "perplexity": _NUMBER,
    "ci95": (list, tuple),
}
"""Types of the values in JSON."""


@dataclass(frozen=True)
class PositionBin:
    """Perplexity of the targets whose index in the row is ``start <= index < end``.

    Attributes:
        start, end: tokens.
        n_tokens: targets that were scored.
        n_windows: rows that have any of them.
        perplexity: exp of the token-weighted mean loss; NaN where nothing was scored.
        ci95: 95 % interval over rows; NaN with fewer than two.
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
        check_types(value, _TYPES_OF_BIN)
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
        length: tokens, room for the answer included; None for tasks whose prompts are as long as they are.
        n: independent samples: prompts, or rows of text.
        score: right answers in percent, or perplexity; NaN where there is none, never 0 in its place.
        ci95: 95 % interval of the score, in its unit.
        status: ``ok`` or ``not run``.
        reason: why it was not run, or a remark on the score.
        details: facts about the run, JSON values.
        positions: perplexity by position, empty for other tasks.
        unit: what the score is in.
        samples: one JSON object a sample, in order of its ``index``: with its ``score`` in percent, or with
            ``nats`` and ``tokens`` for a perplexity. What a paired comparison needs.
    """

    suite: str
    task: str
    length: int | None
    n: int
    score: float
    ci95: Interval
    status: Status = "ok"
    reason: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    positions: tuple[PositionBin, ...] = ()
    unit: Unit = "percent"
    samples: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.status not in ("ok", "not run"):
            raise RopewalkError(f"unknown status {self.status!r}; choose ok or not run")
        if self.status == "not run" and (not math.isnan(self.score) or not self.reason):
            raise RopewalkError(f"{self.task} was not run: it needs a reason and has no score")

    @classmethod
    def not_run(
        cls, suite: str, task: str, length: int | None, reason: str, unit: Unit = "percent"
    ) -> TaskResult:
        """A task that has no score, and why."""
        return cls(suite, task, length, 0, math.nan, NO_INTERVAL, "not run", reason, unit=unit)

    def to_json(self) -> dict[str, Any]:
        """JSON values; a missing number is None. ``positions`` only where there are any."""
        value: dict[str, Any] = {
            "suite": self.suite,
            "task": self.task,
            "length": self.length,
            "n": self.n,
            "score": _finite(self.score),
            "unit": self.unit,
            "ci95": [_finite(end) for end in self.ci95],
            "status": self.status,
            "reason": self.reason,
            "details": dict(self.details),
        }
        if self.positions:
            value["positions"] = [each.to_json() for each in self.positions]
        if self.samples:
            value["samples"] = [dict(each) for each in self.samples]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskResult:
        """What :meth:`to_json` wrote.

        Raises:
            RopewalkError: if the value is no object, or names no unit: ropewalk once wrote shares of 1 in place
                of percent.
            KeyError, TypeError, ValueError: if a value is missing or something else.
        """
        if not isinstance(value, Mapping):
            raise RopewalkError(f"a result is an object, got {value!r}")
        if "unit" not in value:
            raise RopewalkError(
                f"the result of {value.get('task')} names no unit: an older ropewalk wrote it; measure again"
            )
        value = {"details": {}, "positions": [], "samples": [], **value}
        check_types(value, _TYPES_OF_RESULT)
        if value["unit"] not in get_args(Unit):
            raise ValueError(f"unit is {value['unit']!r}")
        if not all(isinstance(each, Mapping) for each in (*value["positions"], *value["samples"])):
            raise TypeError("a position or a sample is not a JSON object")
        return cls(
            value["suite"],
            TASKS_BEFORE.get(value["task"], value["task"]),
            value["length"],
            value["n"],
            _number(value["score"]),
            _interval(value["ci95"]),
            value["status"],
            value["reason"],
            value["details"],
            tuple(PositionBin.from_json(each) for each in value["positions"]),
            value["unit"],
            tuple(value["samples"]),
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _interval(value: list[float | None]) -> Interval:
    low, high = value
    check_types({"low": low, "high": high}, dict.fromkeys(("low", "high"), _NUMBER))
    return _number(low), _number(high)
