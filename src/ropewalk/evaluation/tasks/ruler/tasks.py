"""RULER's tasks by their names in the paper, its overall score, and the suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.samples import Sample, Task, any_reference, share_of_references
from ropewalk.evaluation.statistics import mean_score_interval
from ropewalk.evaluation.tasks.ruler.niah import NeedleTask
from ropewalk.evaluation.tasks.ruler.qa import qa_tasks
from ropewalk.evaluation.tasks.ruler.upstream import upstream_samples, upstream_unavailable
from ropewalk.evaluation.tasks.ruler.vt import TrackingTask
from ropewalk.evaluation.tasks.ruler.word_counting import CommonWordsTask, FrequentWordsTask
from ropewalk.evaluation.tasks.suite import TEXTS, WHAT, BenchmarkSettings, EssaySettings, GeneratedSuite
from ropewalk.io.settings import FileOrName, Settings

OVERALL = "overall"
"""Name of the mean over tasks."""

PUBLISHED = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
"""The thirteen tasks of the paper, in the paper's order."""

EMBEDDED = tuple(
    f"{name}_embedded"
    for name in ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
)
"""Variants of the essay tasks with prose in the package instead of essays."""


def ruler_tasks(
    essays: Path | None = None, squad: str | None = None, hotpotqa: str | None = None
) -> dict[str, Task]:
    """Return all tasks by name: the published ones in order, then those over the embedded corpus.

    Args:
        essays: folder or file of essays; None for those that are installed or fetched.
        squad: SQuAD v2's dev file, or ``hub``; None for the fetched one.
        hotpotqa: HotpotQA's dev distractor file, or ``hub``; None for the fetched one.
    """
    prose = {
        "niah_single_2": NeedleTask("niah_single_2", "essay", essays=essays),
        "niah_single_3": NeedleTask("niah_single_3", "essay", value_kind="uuids", essays=essays),
        "niah_multikey_1": NeedleTask("niah_multikey_1", "essay", keys=4, essays=essays),
        "niah_multivalue": NeedleTask("niah_multivalue", "essay", values=4, essays=essays),
        "niah_multiquery": NeedleTask("niah_multiquery", "essay", keys=4, queries=4, essays=essays),
    }
    lines = (
        NeedleTask("niah_single_1", "noise"),
        NeedleTask("niah_multikey_2", "needle"),
        NeedleTask("niah_multikey_3", "needle", key_kind="uuids", value_kind="uuids"),
    )
    found: dict[str, Task] = {
        **prose,
        **{task.name: task for task in lines},
        **{task.name: task for task in (TrackingTask(), CommonWordsTask(), FrequentWordsTask())},
        **qa_tasks(squad, hotpotqa),
    }
    embedded = {
        f"{name}_embedded": replace(task, name=f"{name}_embedded", haystack="embedded", essays=None)
        for name, task in prose.items()
    }
    return {**{name: found[name] for name in PUBLISHED}, **embedded}


@dataclass(frozen=True)
class UpstreamTask:
    """A RULER task with the samples of NVIDIA's own script, which ignore the seed.

    Attributes:
        task: the RULER task.
    """

    task: Task

    @property
    def suite(self) -> str:
        return self.task.suite

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def max_new_tokens(self) -> int:
        return self.task.max_new_tokens

    def settings(self) -> Mapping[str, Any]:
        """Return the task's settings, marked as NVIDIA's samples."""
        return {**self.task.settings(), "compat": "nvidia"}

    def unavailable(self) -> str | None:
        """Return why the task, or NVIDIA's form of it, cannot run here, or None."""
        return self.task.unavailable() or upstream_unavailable(self.task)

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """Generate the script's first ``count`` samples; raises at once if they cannot be generated."""
        return upstream_samples(self.task, encoder, length, count)


def overall_results(results: Sequence[TaskResult], left_out: Mapping[str, str]) -> list[TaskResult]:
    """Compute RULER's overall score for each length: the unweighted mean over its tasks.

    Args:
        results: results of RULER's tasks; tasks that were not run are left out of the mean and listed in the result.
        left_out: reasons by the names of published tasks that were not requested.

    Returns:
        One result for each length with at least two scored tasks, in the order of the lengths. Its ``n`` is the total
        number of samples, and its interval that of a mean over strata (``mean_score_interval``).
    """
    by_length: dict[int, list[TaskResult]] = defaultdict(list)
    for result in results:
        # Variants over other prose are not part of the paper's score.
        if result.length is not None and result.task not in EMBEDDED:
            by_length[result.length].append(result)
    found = []
    for length, group in sorted(by_length.items()):
        ran = [result for result in group if result.status == "ok"]
        # A mean over one task would only repeat it.
        if len(ran) < 2:
            continue
        missing = {r.task: r.reason or "" for r in group if r.status != "ok"} | dict(left_out)
        low, high = mean_score_interval([[s["score"] / 100 for s in result.samples] for result in ran])
        named = [f"mean of {len(ran)} tasks without {', '.join(missing)}"] if missing else []
        rejected = sum(len(result.details.get("rejected", ())) for result in ran)
        if rejected:
            named.append(f"without {rejected} prompts that the server rejected")
        found.append(
            TaskResult(
                suite=ran[0].suite,
                task=OVERALL,
                length=length,
                n=sum(result.n for result in ran),
                score=float(np.mean([result.score for result in ran])),
                ci95=(100 * low, 100 * high),
                reason="; ".join(named) or None,
                details={"tasks": [result.task for result in ran], "left_out": missing},
            )
        )
    return found


def mean_of_all(results: Sequence[TaskResult], tasks: int) -> list[TaskResult]:
    """The unweighted mean over a suite's tasks, for each length at which all of them ran.

    Args:
        results: results of the suite's tasks.
        tasks: number of the tasks that the mean is of.
    """
    ran: dict[int | None, list[TaskResult]] = defaultdict(list)
    for result in results:
        if result.status == "ok":
            ran[result.length].append(result)
    return overall_results([result for each in ran.values() if len(each) == tasks for result in each], {})


def weighted_averages(overall: Sequence[TaskResult]) -> dict[str, float] | None:
    """Compute RULER's weighted averages over lengths.

    Returns:
        ``increasing`` with weights 1, 2, 3, … from the shortest to the longest length, and ``decreasing`` with the
        reverse weights; None for fewer than two lengths.
    """
    scores = [result.score for result in sorted(overall, key=lambda result: result.length or 0)]
    if len(scores) < 2:
        return None
    rising = np.arange(1, len(scores) + 1)
    return {
        "increasing": float(np.average(scores, weights=rising)),
        "decreasing": float(np.average(scores, weights=rising[::-1])),
    }


RULER = ruler_tasks()
"""All tasks, without the files that a user has to give for some of them."""


class RulerSettings(Settings):
    """Settings of RULER."""

    compat: Annotated[Literal["none", "nvidia"], WHAT] = Field(
        default="none",
        description="How to make RULER's prompts: none (to RULER's specification, with a random seed for each sample) "
        "or nvidia (exactly the prompts of NVIDIA's scripts).",
    )
    squad: Annotated[FileOrName | None, TEXTS] = Field(
        default=None,
        description='SQuAD v2 dev file for the task qa_1, or "hub" to load the file from the Hub. Default: the file '
        "that ropewalk eval fetch brings; without it, qa_1 does not run.",
    )


class HotpotqaSettings(Settings):
    """Where HotpotQA is, which tasks of RULER and RULERv2 read."""

    hotpotqa: Annotated[FileOrName | None, TEXTS] = Field(
        default=None,
        description="HotpotQA dev distractor file for RULER's qa_2 and RULERv2's qa tasks, or \"hub\" to load the file "
        "from the Hub. Default: the file that ropewalk eval fetch brings; without it, these tasks do not run.",
    )


def _tasks(settings: BenchmarkSettings) -> Mapping[str, Task]:
    own = settings.of(RulerSettings)
    hotpotqa = settings.of(HotpotqaSettings).hotpotqa
    found = ruler_tasks(settings.of(EssaySettings).essays, own.squad, hotpotqa)
    if own.compat == "nvidia":
        return {name: UpstreamTask(task) for name, task in found.items()}
    return found


def _mean(results: Sequence[TaskResult], selected: Sequence[str]) -> list[TaskResult]:
    return overall_results(results, {name: "not selected" for name in PUBLISHED if name not in selected})


def _sharing(settings: BenchmarkSettings) -> int:
    named = [name for name in (*PUBLISHED, *EMBEDDED) if name in settings.tasks]
    # Those of the overall score.
    return len({*PUBLISHED} & {*(named or PUBLISHED)} - {*settings.exclude})


SUITE = GeneratedSuite(
    name="ruler",
    title="RULER",
    figure="tasks",
    default=PUBLISHED,
    settings={"ruler": RulerSettings, "questions": HotpotqaSettings, "prose": EssaySettings},
    tasks=_tasks,
    metrics={"all": share_of_references, "part": any_reference},
    mean=_mean,
    sharing=_sharing,
)
