"""What lm_eval found, as results like all others: in percent or perplexity, with n and an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropewalk.evaluation.results import SAMPLES, TaskResult, Unit
from ropewalk.evaluation.statistics import (
    NO_INTERVAL,
    Interval,
    exp_nats,
    mean_score_interval,
    ratio_interval,
    score_interval,
)
from ropewalk.io.digests import digest

if TYPE_CHECKING:
    from ropewalk.evaluation.tasks.lm_eval.harness import Outcome, TaskOutcome

PERPLEXITIES = ("perplexity", "weighted_perplexity")
"""lm_eval's aggregations that give e to the mean loss of a document, or of its words or bytes."""

IN_PERCENT = ("bleu", "chrf", "ter")
"""lm_eval's aggregations whose values are percent already."""


@dataclass(frozen=True)
class Scored:
    """One task's score in our units.

    Attributes:
        score: percent or perplexity; NaN where the metric is neither.
        unit: which.
        ci95: of the score.
        samples: one JSON object a document; empty where the score is no mean over documents.
        remark: what is to be said of the score, or None.
    """

    score: float
    unit: Unit
    ci95: Interval
    samples: tuple[dict[str, Any], ...] = ()
    remark: str | None = None


def task_result(
    suite: str, name: str, outcome: Outcome, details: Mapping[str, Any], remarks: Sequence[str]
) -> TaskResult:
    """The result of a task, or of a group whose tasks have a common score.

    Args:
        suite: as on the command line.
        name: as it was asked for.
        outcome: what lm_eval found.
        details: further facts, JSON values.
        remarks: what is to be said of the score.
    """
    alone = outcome.value is None
    parts = [scored(task) for task in outcome.tasks]
    whole = parts[0] if alone else _group(outcome, parts)
    first = outcome.tasks[0]
    facts: dict[str, Any] = {
        "metric": first.metric,
        "metrics": _finite(first.metrics) if alone else {first.metric: outcome.value},
        "higher_is_better": first.higher_is_better,
        "num_fewshot": _common([task.num_fewshot for task in outcome.tasks]),
        "task_version": _common([task.version for task in outcome.tasks]),
        "truncated": sum(task.truncated for task in outcome.tasks),
        SAMPLES: digest([[task.name, *task.asked] for task in outcome.tasks]),
    }
    if not alone:
        facts["subtasks"] = {
            task.name: _subtask(task, part) for task, part in zip(outcome.tasks, parts, strict=True)
        }
    if not alone and not whole.samples:
        facts["tasks"] = [task.name for task in outcome.tasks]
    said = [*remarks, *([whole.remark] if whole.remark else [])]
    if math.isnan(whole.score):
        empty = TaskResult.not_run(suite, name, None, "; ".join(said))
        return TaskResult(**{**empty.__dict__, "details": {**facts, **details}})
    return TaskResult(
        suite=suite,
        task=name,
        length=None,
        n=sum(len(task.values) for task in outcome.tasks),
        score=whole.score,
        ci95=whole.ci95,
        reason="; ".join(said) or None,
        details={**facts, **details},
        unit=whole.unit,
        samples=whole.samples,
    )


def scored(task: TaskOutcome) -> Scored:
    """A task's main metric in percent or as a perplexity.

    A mean of values from 0 to 1 becomes percent, with :func:`~ropewalk.evaluation.statistics.score_interval`.
    Perplexities have Student's interval over documents. A metric that is no mean over documents (F1 over a whole
    set, BLEU) has no interval, which the remark says.

    Args:
        task: what lm_eval found.
    """
    if task.aggregation in PERPLEXITIES:
        return _perplexity(task)
    plain = all(isinstance(value, int | float) for value in _numbers(task.values))
    if task.aggregation == "mean" and plain and _shares(task.values):
        shares = [float(value) for value in task.values]
        samples = _samples(task, [100 * share for share in shares])
        return Scored(100 * task.value, "percent", _percent(score_interval(shares)), samples)
    if task.aggregation in IN_PERCENT or 0 <= task.value <= 1:
        score = task.value if task.aggregation in IN_PERCENT else 100 * task.value
        remark = f"no interval: {task.metric} is no mean of shares over documents"
        return Scored(score, "percent", NO_INTERVAL, remark=remark)
    remark = f"its metric {task.metric} is {task.value:.6g}, neither a share of 1 nor a perplexity"
    return Scored(math.nan, "percent", NO_INTERVAL, remark=remark)


def _perplexity(task: TaskOutcome) -> Scored:
    pairs = [value if isinstance(value, tuple | list) else (value, 1) for value in task.values]
    nats, units = [-float(likelihood) for likelihood, _ in pairs], [int(count) for _, count in pairs]
    low, high = ratio_interval(nats, units, at_least=0)
    samples = tuple(
        {"index": index, "nats": loss, "tokens": count}
        for index, loss, count in zip(task.indices, nats, units, strict=True)
    )
    remark = None if math.isfinite(task.value) else f"the {task.metric} is not a finite number"
    score = task.value if math.isfinite(task.value) else math.nan
    return Scored(score, "perplexity", (exp_nats(low), exp_nats(high)), samples, remark)


def _group(outcome: Outcome, parts: Sequence[Scored]) -> Scored:
    assert outcome.value is not None
    if any(part.unit != "percent" or not part.samples for part in parts):
        remark = f"no interval: {outcome.tasks[0].metric} is no mean of shares over documents"
        inside = 0 <= outcome.value <= 1
        return Scored(100 * outcome.value if inside else math.nan, "percent", NO_INTERVAL, remark=remark)
    # Samples stand for the score only where their plain mean is the score.
    usable = outcome.by_size or len({len(task.values) for task in outcome.tasks}) == 1
    samples: list[dict[str, Any]] = []
    for task, part in zip(outcome.tasks, parts, strict=True):
        for sample in part.samples:
            samples.append({**sample, "task": task.name, "document": sample["index"], "index": len(samples)})
    if outcome.by_size:
        interval = score_interval([float(value) for task in outcome.tasks for value in task.values])
    else:
        interval = mean_score_interval([[float(value) for value in task.values] for task in outcome.tasks])
    return Scored(100 * outcome.value, "percent", _percent(interval), tuple(samples) if usable else ())


def _percent(interval: Interval) -> Interval:
    low, high = interval
    return 100 * low, 100 * high


def _shares(values: Sequence[Any]) -> bool:
    return all(0 <= float(value) <= 1 for value in values)


def _numbers(values: Sequence[Any]) -> list[Any]:
    """numpy's scalars as Python's own, all else as it is."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def _samples(task: TaskOutcome, scores: Sequence[float]) -> tuple[dict[str, Any], ...]:
    samples: list[dict[str, Any]] = [
        {"index": index, "score": score} for index, score in zip(task.indices, scores, strict=True)
    ]
    for sample, answer in zip(samples, task.answers, strict=False):
        sample["prediction"] = answer
    return tuple(samples)


def _subtask(task: TaskOutcome, part: Scored) -> dict[str, Any]:
    ends = [None if math.isnan(end) else end for end in part.ci95]
    score = None if math.isnan(part.score) else part.score
    return {
        "score": score,
        "n": len(task.values),
        "ci95": ends,
        "metrics": _finite(task.metrics),
        "truncated": task.truncated,
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _common(values: Sequence[Any]) -> Any:
    """The one value that all have, or each one's."""
    return values[0] if len(set(values)) == 1 else list(values)
