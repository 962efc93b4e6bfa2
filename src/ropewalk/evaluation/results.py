"""Results of an evaluation: plain values that convert to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval, finite_or_none
from ropewalk.io.digests import digest
from ropewalk.io.json_lines import check_types
from ropewalk.runs import Lines, Log

Status = Literal["ok", "not run"]
Unit = Literal["percent", "perplexity"]

ITSELF = "the model itself"
"""Recorded as the evaluator that chose LongPPL's key tokens if the user named none."""

SAMPLES = "samples_sha256"
"""Key in a result's details: a digest of the prompts or text, equal for two results on the same samples."""

TEXT = "text_sha256"
"""Key in a sample of a perplexity: the beginning of a digest of its text, equal for two samples of the same text."""


def text_digest(input_ids: Sequence[int]) -> str:
    """Return the value of :data:`TEXT` for token ids."""
    # 64 bits: among a million texts, two different ones share a value with a probability of 3e-8.
    return digest(input_ids)[:16]


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
"""Accepted types of the values in JSON."""


@dataclass(frozen=True)
class PositionBin:
    """Perplexity of the targets whose index in the row is ``start <= index < end``.

    Attributes:
        start, end: first position of the bin, and the position after its last one, in tokens.
        n_tokens: number of scored targets in the bin.
        n_windows: number of rows with at least one scored target in the bin.
        perplexity: exp of the mean loss per token; NaN (null in JSON) if nothing was scored.
        ci95: 95 % interval of the perplexity over rows; NaN (null in JSON) with fewer than two rows.
    """

    start: int
    end: int
    n_tokens: int
    n_windows: int
    perplexity: float
    ci95: Interval

    def to_json(self) -> dict[str, Any]:
        ci95 = [finite_or_none(end) for end in self.ci95]
        return {**self.__dict__, "perplexity": finite_or_none(self.perplexity), "ci95": ci95}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PositionBin:
        check_types(value, _TYPES_OF_BIN)
        return cls(**{**value, "perplexity": _number(value["perplexity"]), "ci95": _interval(value["ci95"])})


@dataclass(frozen=True)
class TaskResult:
    """Result of one task at one length.

    Attributes:
        suite: name of the suite, as on the command line.
        task: name of the task within the suite.
        length: tokens of prompt and answer together; None for tasks whose prompts have no set length.
        n: number of independent samples: rows of text for perplexities, prompts for other tasks.
        score: correct answers in percent, or perplexity. A missing score is NaN (null in JSON), never 0.
        ci95: 95 % interval of the score, in the score's unit.
        status: ``ok`` or ``not run``.
        reason: why the task was not run, or a remark on the score; None if there is neither.
        details: facts about how the task was run.
        positions: perplexity by position in the row. Empty, and left out of JSON, for tasks other than perplexity.
        unit: unit of the score.
        samples: one JSON object per sample, in the order of ``index``. An object has the ``score`` in percent or, for a
            perplexity, the summed loss in ``nats``, the number of ``tokens`` and a digest of the text. Paired
            comparisons use these objects. Empty, and left out of JSON, if there are none.
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
            raise RopewalkError(f"unknown status {self.status!r} of a result; choose 'ok' or 'not run'")
        if self.status == "not run" and (not math.isnan(self.score) or not self.reason):
            raise RopewalkError(
                f"the result of {self.task}, which was not run, must have a reason and a score of NaN"
            )

    @classmethod
    def not_run(
        cls, suite: str, task: str, length: int | None, reason: str, unit: Unit = "percent"
    ) -> TaskResult:
        """Return the result of a task without a score, with the reason."""
        return cls(suite, task, length, 0, math.nan, NO_INTERVAL, "not run", reason, unit=unit)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, with None for missing numbers and without empty ``positions`` and ``samples``."""
        value: dict[str, Any] = {
            "suite": self.suite,
            "task": self.task,
            "length": self.length,
            "n": self.n,
            "score": finite_or_none(self.score),
            "unit": self.unit,
            "ci95": [finite_or_none(end) for end in self.ci95],
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
        """Rebuild a result from the output of :meth:`to_json`.

        Raises:
            RopewalkError: if the value is not an object, or has no unit: older versions wrote shares of 1 instead of
                percent.
            KeyError, TypeError, ValueError: if a field is missing or has a wrong type or value.
        """
        if not isinstance(value, Mapping):
            raise RopewalkError(f"a result must be a JSON object, got {value!r}")
        if "unit" not in value:
            raise RopewalkError(
                f"the result of {value.get('task')} has no unit, because an older ropewalk wrote it; run the "
                "evaluation again"
            )
        # to_json leaves out empty positions and samples.
        value = {"details": {}, "positions": [], "samples": [], **value}
        check_types(value, _TYPES_OF_RESULT)
        if value["unit"] not in get_args(Unit):
            raise ValueError(f"unit must be percent or perplexity, got {value['unit']!r}")
        if not all(isinstance(each, Mapping) for each in (*value["positions"], *value["samples"])):
            raise TypeError("a position or a sample is not a JSON object")
        converted = {
            "score": _number(value["score"]),
            "ci95": _interval(value["ci95"]),
            "positions": tuple(PositionBin.from_json(each) for each in value["positions"]),
            "samples": tuple(value["samples"]),
        }
        return cls(**{**value, **converted})


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _interval(value: list[float | None]) -> Interval:
    # Anything but two ends raises ValueError.
    low, high = value
    check_types({"low": low, "high": high}, dict.fromkeys(("low", "high"), _NUMBER))
    return _number(low), _number(high)


ResultKey = tuple[str, str, int | None]

_LINES = Lines[ResultKey, TaskResult](
    key=lambda result: (result.suite, result.task, result.length),
    write=TaskResult.to_json,
    read=TaskResult.from_json,
    # A later result replaces an earlier one: an incomplete group of lm_eval is measured again.
    repeated=lambda old, new: None,
    advice="restore the file, or delete the line to measure its task again",
)


def result_log(path: Path | None = None) -> Log[ResultKey, TaskResult]:
    """Open a log of results, by suite, task and length; without a path, results stay in memory.

    Raises:
        RopewalkError: if the file cannot be read or a line is not a result; the message gives the line number.
    """
    return Log(path, _LINES)
