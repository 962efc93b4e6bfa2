"""Run lm_eval's tasks on a model in memory, and return the outcomes as plain values.

lm_eval is optional, and only the modules ``harness``, ``catalogue`` and ``model`` of this package import it. Import
them only after checking that lm_eval is installed.
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
    """Outcome of one lm_eval task, as plain values.

    Attributes:
        name: name of the task.
        metric: name of the task's main metric.
        value: value of the main metric over all documents, as lm_eval reports it.
        metrics: all metrics by name; the key is ``metric,filter`` if answers are filtered.
        aggregation: function that computes the value from those of the documents: ``mean``, ``perplexity`` and so on.
        values: one value per document, in the order of ``indices``: a number, or another input of the aggregation.
        indices: indices of the documents in the task's data.
        answers: generated text per document; empty for tasks without generation.
        truncated: number of documents with a truncated prompt.
        num_fewshot: number of examples before the question.
        version: version of the task.
        higher_is_better: whether higher values are better; None if the task does not say.
        prompt_digests: digest of document and prompt, for each document.
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
    prompt_digests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task, or of a group with its tasks.

    Attributes:
        tasks: outcomes of the tasks, at least one.
        value: score of the group, with lm_eval's weights of its tasks; None without a common score.
        by_size: True if each document has equal weight in the group's score, False if each task has.
    """

    tasks: tuple[TaskOutcome, ...]
    value: float | None = None
    by_size: bool = False


@dataclass(frozen=True)
class PromptFormat:
    """Format of a task's prompts: whether they use the chat template, and whether they are truncated in the middle."""

    chat: bool = False
    middle: bool = False


def installed_version() -> str:
    """Return the version of lm_eval."""
    return version("lm_eval")


def run(
    model: HarnessModel,
    loaded: Loaded,
    limit: int | None,
    prompt_format: Callable[[str], PromptFormat],
    metric: Callable[[str], str | None],
    seed: int,
) -> Outcome:
    """Run a task or group with lm_eval, and score it as lm_eval does.

    Args:
        model: the model to measure.
        loaded: the task or group from :func:`load`.
        limit: use only the first ``limit`` documents of each task; None for all.
        prompt_format: returns the format of a task's prompts, given its name.
        metric: returns the name of a task's main metric, given its name; None for the first one that the task lists.
        seed: random seed of everything that a task draws.

    Raises:
        RunFailure: if memory runs out, or an answer cannot be scored.
    """
    parts: dict[PromptFormat, dict[str, Any]] = defaultdict(dict)
    for name, task in loaded.tasks.items():
        # lm_eval has one prompt format per call, so tasks are grouped by theirs.
        parts[prompt_format(name)][name] = task
    results: dict[str, Any] = {}
    outcomes: dict[str, TaskOutcome] = {}
    # A group has one score; ropewalk reports its first metric.
    common = loaded.group.aggregate_metric_list[0] if loaded.group is not None else None
    for how, tasks in parts.items():
        model.middle = how.middle
        # The same text may be cut in one format and fit in another.
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
    # Keys are "metric,filter", and a group may have been scored with any filter.
    key = next(key for key in merged if key.startswith(f"{common.metric},"))
    return Outcome(in_order, float(merged[key]), bool(common.weight_by_size))


def _evaluate(
    model: HarnessModel, tasks: Mapping[str, Any], limit: int | None, chat: bool, seed: int
) -> dict[str, Any]:
    try:
        with quiet_libraries(), seeded(seed):
            found = lm_eval.evaluator.evaluate(
                lm=model,
                # Groups are scored in run(), once the tasks of all prompt formats are done.
                task_dict={"tasks": dict(tasks), "groups": {}},
                limit=limit,
                # Intervals are computed from the samples by our own statistics.
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
    except torch.OutOfMemoryError as error:
        raise RunFailure(
            f"out of memory with a batch size of {model.batch_size}; lower the batch size or max_length"
        ) from error
    return dict(found)


def _outcome(
    name: str, task: Any, found: Mapping[str, Any], wanted: str | None, truncated: set[Any]
) -> TaskOutcome:
    values = {
        key: float(value)
        for key, value in found["results"][name].items()
        # Scores have a filter behind a comma; other entries are names and counts.
        if "," in key and "_stderr," not in key and isinstance(value, int | float | np.number)
    }
    listed = [each["metric"] for each in task.get_config("metric_list") or []]
    order = [wanted] if wanted else [metric for metric in listed if isinstance(metric, str)]
    keys = [key for metric in order for key in values if key.startswith(f"{metric},")] or list(values)
    if not keys:
        raise RunFailure(f"lm_eval returned no score for {name}; run the evaluation without this task")
    metric, _, chosen = keys[0].partition(",")
    # A task with several filters repeats each document once per filter.
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
        truncated=sum(any(_request_key(each) in truncated for each in s["arguments"]) for s in samples),
        num_fewshot=int(found["n-shot"].get(name) or 0),
        version=str(found["versions"].get(name)),
        higher_is_better=None if better is None else bool(better),
        prompt_digests=tuple(f"{sample['doc_hash']} {sample['prompt_hash']}" for sample in samples),
    )


def _request_key(arguments: Sequence[Any]) -> Any:
    """Return the key under which :class:`HarnessModel` records a truncated request: its texts."""
    texts = tuple(each for each in arguments if isinstance(each, str))
    return texts if len(texts) > 1 else texts[0]
