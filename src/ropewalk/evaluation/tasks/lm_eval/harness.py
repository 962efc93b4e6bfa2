"""lm_eval's tasks run on a model in memory: what it found, as plain values.

Of this library only the modules ``harness*`` and ``quiet_libraries`` import lm_eval, which is optional: import
them where it is installed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import lm_eval.evaluator
import numpy as np
import torch

from ropewalk.errors import RunFailure
from ropewalk.evaluation.tasks.lm_eval.catalogue import Loaded, seeded
from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel, quiet_libraries


@dataclass(frozen=True)
class TaskOutcome:
    """What lm_eval found for one task, as plain values.

    Attributes:
        name: of the task.
        metric: the one that stands for the task.
        value: its value over all documents, as lm_eval gives it.
        metrics: all of them by name; ``metric,filter`` where answers are filtered.
        aggregation: what makes the value from the documents': ``mean``, ``perplexity`` and so on.
        values: one a document, in the order of ``indices``: a number, or what the aggregation takes.
        indices: of the documents in the task's data.
        answers: the model's own words a document; empty for tasks that have none.
        truncated: documents with a prompt that was cut.
        num_fewshot: examples before the question.
        version: of the task.
        higher_is_better: None where the task does not say.
        asked: digests of documents and prompts, one a document.
    """

    name: str
    metric: str
    value: float
    metrics: Mapping[str, float]
    aggregation: str
    values: tuple[Any, ...]
    indices: tuple[int, ...]
    answers: tuple[str, ...]
    truncated: int
    num_fewshot: int
    version: str
    higher_is_better: bool | None
    asked: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """A task, or a group and its tasks.

    Attributes:
        tasks: at least one.
        value: the group's, as lm_eval weights its tasks; None for what has no common score.
        by_size: whether each document counts alike in it, or each task.
    """

    tasks: tuple[TaskOutcome, ...]
    value: float | None = None
    by_size: bool = False


@dataclass(frozen=True)
class Manner:
    """How a task's prompts are made: in a chat template, and cut in the middle when they are too long."""

    chat: bool = False
    middle: bool = False


def installed_version() -> str:
    """lm_eval's own version."""
    return version("lm_eval")


def run(
    model: HarnessModel,
    loaded: Loaded,
    limit: int | None,
    manner: Callable[[str], Manner],
    metric: Callable[[str], str | None],
    seed: int,
) -> Outcome:
    """Ask the model and score its answers as lm_eval does.

    Args:
        model: to be asked.
        loaded: from :func:`load`.
        limit: first documents of each task; all of them if None.
        manner: of each task by its name.
        metric: that stands for a task, by the task's name; None for the first that the task lists.
        seed: of whatever a task draws.

    Raises:
        RunFailure: if the memory gives out, or an answer cannot be scored.
    """
    parts: dict[Manner, dict[str, Any]] = defaultdict(dict)
    for name, task in loaded.tasks.items():
        parts[manner(name)][name] = task
    results: dict[str, Any] = {}
    outcomes: dict[str, TaskOutcome] = {}
    common = loaded.group.aggregate_metric_list[0] if loaded.group is not None else None
    for how, tasks in parts.items():
        model.middle = how.middle
        model.truncated.clear()
        found = _evaluate(model, tasks, limit, how.chat, seed)
        results |= found["results"]
        for name, task in tasks.items():
            wanted = common.metric if common is not None else metric(name)
            outcomes[name] = _outcome(name, task, found, wanted, model.truncated)
    in_order = tuple(outcomes[name] for name in loaded.tasks)
    if common is None:
        return Outcome(in_order)
    merged = loaded.group.aggregate(results)
    key = next(key for key in merged if key.startswith(f"{common.metric},"))
    return Outcome(in_order, float(merged[key]), bool(common.weight_by_size))


def _evaluate(
    model: HarnessModel, tasks: Mapping[str, Any], limit: int | None, chat: bool, seed: int
) -> dict[str, Any]:
    try:
        with quiet_libraries(), seeded(seed):
            found = lm_eval.evaluator.evaluate(
                lm=model,
                task_dict={"tasks": dict(tasks), "groups": {}},
                limit=limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
    except torch.OutOfMemoryError as error:
        raise RunFailure(
            f"out of memory at {model.batch_size} prompts at once; lower the batch size or max_length"
        ) from error
    return dict(found)


def _outcome(
    name: str, task: Any, found: Mapping[str, Any], wanted: str | None, truncated: set[Any]
) -> TaskOutcome:
    values = {
        key: float(value)
        for key, value in found["results"][name].items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float | np.number)
    }
    listed = [each["metric"] for each in task.get_config("metric_list") or []]
    order = [wanted] if wanted else [metric for metric in listed if isinstance(metric, str)]
    keys = [key for metric in order for key in values if key.startswith(f"{metric},")] or list(values)
    if not keys:
        raise RunFailure(f"lm_eval found no number for {name}")
    metric, _, chosen = keys[0].partition(",")
    samples = [sample for sample in found["samples"][name] if sample["filter"] == chosen and metric in sample]
    generated = task.get_config("output_type") == "generate_until"
    better = (found["higher_is_better"].get(name) or {}).get(metric)
    return TaskOutcome(
        name=name,
        metric=metric,
        value=values[keys[0]],
        metrics={key.removesuffix(",none"): value for key, value in values.items()},
        aggregation=getattr(task.aggregation().get(metric), "__name__", "mean"),
        values=tuple(sample[metric] for sample in samples),
        indices=tuple(int(sample["doc_id"]) for sample in samples),
        answers=tuple(str(sample["resps"][0][0]) for sample in samples) if generated else (),
        truncated=sum(any(_asked(each) in truncated for each in s["arguments"]) for s in samples),
        num_fewshot=int(found["n-shot"].get(name) or 0),
        version=str(found["versions"].get(name)),
        higher_is_better=None if better is None else bool(better),
        asked=tuple(f"{sample['doc_hash']} {sample['prompt_hash']}" for sample in samples),
    )


def _asked(arguments: Sequence[Any]) -> Any:
    """How :class:`HarnessModel` remembers a request: by its texts."""
    texts = tuple(each for each in arguments if isinstance(each, str))
    return texts if len(texts) > 1 else texts[0]
