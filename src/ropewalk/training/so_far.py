"""How far a run has come, from the files in its folder; it may be training meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.io.results import Result
from ropewalk.io.settings import FilePath, Option, Settings
from ropewalk.training.folder import METRICS, SUMMARY, recipe_so_far
from ropewalk.training.measurement import evaluated_during, name_of, results_in
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.update.peak_memory import GPU, PROCESS

RECENT = 20
"""Steps whose median is the present speed."""


class WatchSettings(Settings):
    """Settings of ``ropewalk watch``."""

    run: Annotated[FilePath, Option(argument=True)] = Field(
        description="Folder of a run by `ropewalk extend`."
    )
    every: float = Field(default=5.0, gt=0, description="Seconds from one look at the folder to the next.")
    page: FilePath | None = Field(
        default=None,
        description="Also write a page (.html) with the same, and with the curve of the loss. It reloads itself.",
    )
    once: bool = Field(default=False, description="Look once instead of until the run ends.")


@dataclass(frozen=True)
class ScoreSoFar:
    """A score that a run has measured.

    Attributes:
        when: ``before``, ``after``, or the place in training such as ``stage 1, step 40``.
        name: what was measured, such as ``passkey/1024``.
        score: its value.
    """

    when: str
    name: str
    score: float | None


@dataclass(frozen=True)
class RunSoFar(Result):
    """A run as its folder shows it.

    Attributes:
        run: the folder.
        model: the recipe's model.
        state: ``finished``, ``training``, or ``before training``.
        stage, stages: stage of the last step, counted from 1, and their number.
        step, steps: steps done in this stage, and those that it has.
        context: tokens of a row in this stage.
        losses: loss of each step in order; None where it is not finite.
        tokens: tokens of all steps so far, padding included.
        tokens_per_second: median of the last steps; None before the first.
        memory: peak of a GPU, or of the process on a CPU, in bytes; None before the first step.
        seconds_left: time that the rest of the training takes at the present speed, without evaluations; None if that
            is not known. Later stages with longer rows take longer than this says.
        silent_seconds: time since the last step was written; None before the first.
        measured: scores so far.
    """

    run: Path
    model: str
    state: str
    stage: int
    stages: int
    step: int
    steps: int
    context: int
    losses: tuple[float | None, ...]
    tokens: int
    tokens_per_second: float | None
    memory: int | None
    seconds_left: float | None
    silent_seconds: float | None
    measured: tuple[ScoreSoFar, ...]


def so_far(run: Path) -> RunSoFar:
    """Read how far a run has come.

    Raises:
        RopewalkError: if the folder has no run whose steps have begun, or a file in it is damaged.
    """
    recipe = recipe_so_far(run)
    if recipe is None:
        raise RopewalkError(
            f"{run} has no run to watch: there is no recipe.yaml, which `ropewalk extend` writes when it has read the "
            "model and the documents"
        )
    lines = MetricsLog(run / METRICS).read() if (run / METRICS).is_file() else []
    last: dict[str, Any] = lines[-1] if lines else {"stage": 0, "step": 0, "tokens": 0}
    number, step = last["stage"], last["step"]
    recent = [line["tokens_per_second"] for line in lines[-RECENT:] if line["stage"] == number]
    speed = median(recent) if recent else None
    rest = tokens_left(recipe, number, step)
    # A finished run that goes on with more steps keeps its summary until it is evaluated again.
    finished = (run / SUMMARY).is_file() and not rest
    memory = [line[key] for line in lines for key in (GPU, PROCESS) if line.get(key) is not None]
    return RunSoFar(
        run,
        recipe.model,
        "finished" if finished else "training" if lines else "before training",
        number + 1,
        len(recipe.stages),
        step,
        recipe.stages[number].steps,
        recipe.stages[number].context,
        tuple(line["loss"] for line in lines),
        last["tokens"],
        speed,
        max(memory, default=None),
        None if not speed else rest / speed,
        time.time() - (run / METRICS).stat().st_mtime if lines else None,
        tuple(_scores(run)),
    )


def tokens_left(recipe: Recipe, stage: int, step: int) -> int:
    """Tokens of the steps that follow a step of a stage, counted from 0, padding included."""
    later = recipe.stages[stage:]
    steps = [later[0].steps - step, *(each.steps for each in later[1:])]
    return sum(count * each.rows_per_step * each.context for count, each in zip(steps, later, strict=True))


def _scores(run: Path) -> Iterator[ScoreSoFar]:
    yield from _measured("before", results_in(run, "before") or ())
    for each in evaluated_during(run):
        yield from _measured(f"stage {each.stage + 1}, step {each.step}", each.results)
    yield from _measured("after", results_in(run, "after") or ())


def _measured(when: str, results: Sequence[TaskResult]) -> Iterator[ScoreSoFar]:
    for each in results:
        score = each.score
        yield ScoreSoFar(when, name_of(each), score if score is not None and math.isfinite(score) else None)
