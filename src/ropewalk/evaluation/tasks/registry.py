"""From settings to tasks: which of each suite's tasks are asked for, and what makes their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample import Sample, Task
from ropewalk.evaluation.settings import Settings, check_names
from ropewalk.evaluation.tasks.lm_eval.retention import LONGBENCH, SHORT
from ropewalk.evaluation.tasks.longeval import LinesTask
from ropewalk.evaluation.tasks.needle import NeedleGridTask
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.ruler.tasks import PUBLISHED, ruler_tasks
from ropewalk.evaluation.tasks.ruler.upstream import upstream_samples, upstream_unavailable

FORCED = "forced"
"""The needle grid's task that generates nothing."""


@dataclass(frozen=True)
class UpstreamTask:
    """One of RULER's tasks with the samples that NVIDIA's own script makes, whatever the seed.

    Attributes:
        task: the task.
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
        """The task's own, and whose samples these are."""
        return {**self.task.settings(), "compat": "nvidia"}

    def unavailable(self) -> str | None:
        """As the task's own, or what NVIDIA's script needs beyond it."""
        return self.task.unavailable() or upstream_unavailable(self.task)

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """The script's first ``count`` samples; what cannot be made is refused at once."""
        return upstream_samples(self.task, encoder.tokenizer, length, count, chat=encoder.chat)


def known_tasks(settings: Settings) -> dict[str, list[str]]:
    """The names of all tasks of the suites that are asked for."""
    ruler = list(ruler_tasks())
    known = {
        "perplexity": ["perplexity", "sliding", "truncated"],
        "passkey": ["passkey"],
        "needle": ["generated", FORCED],
        "longeval": [task.name for task in _records(settings)],
        "ruler": ruler,
        "longppl": ["longppl"],
        "short": list(SHORT),
        "longbench": list(LONGBENCH),
        "lm_eval": list(settings.harness_names),
    }
    return {suite: known[suite] for suite in settings.suites}


def chosen_tasks(settings: Settings) -> dict[str, list[str]]:
    """The names of the tasks to run, by suite, in order.

    ``tasks`` narrows the suites that it names tasks of; the others run what they run by default.

    Raises:
        RopewalkError: for a name that none of the suites has, or if nothing is left to run.
    """
    known = known_tasks(settings)
    every = [name for names in known.values() for name in names]
    check_names("task", [*settings.tasks, *settings.exclude], every)
    default = {**known, "perplexity": ["perplexity"], "ruler": list(PUBLISHED)}
    chosen = {}
    for suite, names in known.items():
        named = [name for name in names if name in settings.tasks]
        chosen[suite] = [name for name in named or default[suite] if name not in settings.exclude]
    if not any(chosen.values()):
        raise RopewalkError(f"--exclude {','.join(settings.exclude)} leaves no task to run")
    return chosen


def generated_tasks(settings: Settings) -> dict[tuple[str, str], Task]:
    """The tasks in which the model writes an answer, by suite and name, in order."""
    chosen = chosen_tasks(settings)
    materials = settings.materials
    depths = settings.depths
    grid = tuple(n / (depths - 1) for n in range(depths)) if depths > 1 else (0.5,)
    found: dict[str, Mapping[str, Task]] = {
        "passkey": {"passkey": PasskeyTask()},
        "needle": {"generated": NeedleGridTask(grid, settings.haystack, materials.essays)},
        "longeval": {task.name: task for task in _records(settings)},
        "ruler": ruler_tasks(materials.essays, materials.squad, materials.hotpotqa),
    }
    if settings.compat == "nvidia":
        found["ruler"] = {name: UpstreamTask(task) for name, task in found["ruler"].items()}
    return {
        (suite, name): found[suite][name]
        for suite, names in chosen.items()
        if suite in found
        for name in names
        if name != FORCED
    }


def _records(settings: Settings) -> list[LinesTask]:
    return [LinesTask(lines, "chat" if settings.chat else "base") for lines in settings.lines or (None,)]


def lengths_of(task: Task, settings: Settings, encoder: PromptEncoder) -> list[int]:
    """The lengths of a task: those asked for, or the one that a record of so many lines has."""
    if isinstance(task, LinesTask) and task.lines is not None:
        return [task.needed_length(encoder, settings.samples, settings.seed)]
    return settings.lengths_of(task.suite)


def needle_grid(settings: Settings) -> Task:
    """The needle grid, whose samples both of its tasks share."""
    return generated_tasks(
        Settings(
            suites=("needle",),
            depths=settings.depths,
            haystack=settings.haystack,
            materials=settings.materials,
        )
    )["needle", "generated"]


def ruler_left_out(settings: Settings) -> dict[str, str]:
    """Reasons by the names of the published tasks that are not asked for."""
    chosen = chosen_tasks(settings).get("ruler", [])
    return {name: "not asked for" for name in PUBLISHED if name not in chosen}
