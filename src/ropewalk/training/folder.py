"""The output folder of a run: names in it, whether a run may begin or go on there, and how far it came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.io.files import is_left_over, remove_left_overs
from ropewalk.runs.store import RUN, Store
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    Position,
    checkpoint_name,
    checkpoints_in,
    place_of,
)
from ropewalk.training.recipe.changes import Progress
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe

HOLDS = "training run"
ADVICE = "give another output"
RECIPE = "recipe.yaml"
"""Written once every check has passed: a folder that has it holds a run, and no longer only rows for one."""
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
VERSIONS = "versions.json"
MODEL = "model"
ADAPTER = "adapter"
LOCK = ".lock"
CURVES = "during-*.png"
"""Figures of the evaluations during training, one a suite."""
PAGE = "report.html"
"""Written last: a run that has it has nothing left to do."""
REPORT = (
    PAGE,
    "answers",
    "perplexity.png",
    "passkey.png",
    "passkey-teacher_forced.png",
    "training.png",
    "factors.png",
)


@dataclass(frozen=True)
class StageRange:
    """Which stages a launch trains, counted from 1 as in messages.

    Attributes:
        first: stage to start again from the end of the stage before it; None goes on where the run is.
        last: stage after which to stop; None for the last one.
    """

    first: int | None = None
    last: int | None = None

    def check(self, recipe: Recipe, resume: bool) -> None:
        """Raise a RopewalkError if the recipe has no such stages, or if there is no run to start again."""
        number = len(recipe.stages)
        # Stage 1 cannot be trained again, see below.
        for option, stage, least in (("--from-stage", self.first, 2), ("--until-stage", self.last, 1)):
            if stage is not None and not 1 <= stage <= number:
                has = "1 stage" if number == 1 else f"{number} stages"
                give = f"give a number from {least} to {number}" if number > least else f"give {number}"
                instead = give if number >= least else f"omit {option}"
                raise RopewalkError(f"{option} is {stage}, but the recipe has {has}; {instead}")
        if self.first is None:
            return
        if self.last is not None and self.last < self.first:
            raise RopewalkError(
                f"--until-stage {self.last} comes before --from-stage {self.first}; give --until-stage {self.first} or "
                "more"
            )
        if self.first == 1:
            raise RopewalkError(
                "--from-stage 1 would train all stages again; start a new run in another output folder"
            )
        if not resume:
            raise RopewalkError(
                f"--from-stage {self.first} needs --resume, because the stage continues from a checkpoint of a run; "
                "either add --resume, or, for a new run, set model to a trained model and remove the earlier stages "
                "from the recipe"
            )


def refuse_folder(output: Path, resume: bool) -> None:
    """Raise if a folder that this process has locked holds something else than a run, or nothing to resume.

    Args:
        output: the folder.
        resume: whether to resume the run in it.

    Raises:
        RopewalkError: with advice on what to set.
    """
    if (output / RUN).is_file():
        return
    if (output / RECIPE).is_file():
        raise RopewalkError(
            f"{output} was written by another version of ropewalk, which this one cannot continue; set output to a new "
            "folder"
        )
    # The lock is this process's own.
    there = {entry.name for entry in output.iterdir() if not is_left_over(entry.name)} - {LOCK}
    if resume and not there:
        raise RopewalkError(
            f"nothing to resume: the folder {str(output)!r} contains no run; leave out --resume to start a run, or "
            "set output to the folder of the interrupted run"
        )
    if there:
        raise RopewalkError(
            f"nothing to resume: the folder {str(output)!r} contains no {RECIPE}; set output to the folder of a run"
            if resume
            else f"output folder {output} is not empty; set output to a new folder"
        )
    remove_left_overs(output)


def recipe_so_far(output: Path) -> Recipe | None:
    """The recipe of the run in a folder; None if its training has not started.

    Raises:
        RopewalkError: if it is damaged.
    """
    saved = output / RECIPE
    if not saved.is_file():
        return None
    try:
        return parse_recipe(saved.read_text(encoding="utf-8"), str(saved))
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"cannot read {saved}: {getattr(error, 'strerror', None) or error}") from error
    except RopewalkError as error:
        raise RopewalkError(
            f"the run's own {RECIPE} is damaged ({error}); restore the file, or start a new run in another output "
            "folder"
        ) from error


def progress_in(store: Store, recipe: Recipe) -> Progress:
    """Progress of the run in a folder, according to the names of its checkpoints and to its records.

    Args:
        store: records of the folder.
        recipe: recipe of the run so far.
    """
    assert store.folder is not None
    begun = 0
    for number, each in enumerate(recipe.stages):
        # A stage has begun once its RoPE is measured, even without a step: a resumed run must not measure again.
        if each.rope.limiting.measured and store.is_done(f"rope-{number + 1}"):
            begun = number + 1
    if checkpoints := checkpoints_in(store.folder / CHECKPOINTS):
        stage, step = place_of(checkpoints[-1])
        return Progress(stage, step, max(begun, stage + 1))
    # Without checkpoints, which may be deleted after a run, the exported model tells that the run was complete.
    if store.is_done(MODEL) and (store.folder / MODEL).exists():
        return Progress(len(recipe.stages) - 1, recipe.stages[-1].steps, len(recipe.stages))
    return Progress(0, 0, begun)


def first_to_train(recipe: Recipe, progress: Progress) -> int:
    """Index of the first stage that is not complete."""
    stages, at = recipe.stages, progress.stage
    # A stage of 0 steps is at its last step before it begins, so the step alone does not tell.
    done = at < len(stages) and progress.begun > at and progress.step >= stages[at].steps
    return at + done


def end_of_stage(stage: int, output: Path, recipe: Recipe, progress: Progress) -> Position:
    """Position of the checkpoint at the end of a stage, counted from 1.

    Raises:
        RopewalkError: if the run has not reached it, or has not kept it.
    """
    # Names and comparisons use stage and step alone, so the number of tokens does not matter.
    end = Position(stage - 1, recipe.stages[stage - 1].steps, 0)
    # The second condition is for a stage of 0 steps, whose end has the same step as its beginning.
    if (progress.stage, progress.step) < (end.stage, end.step) or progress.begun < stage:
        raise RopewalkError(
            f"--from-stage is {stage + 1}, but the run in {output} has not completed stage {stage}; omit --from-stage "
            "to resume where the run stopped"
        )
    if not (output / CHECKPOINTS / checkpoint_name(end)).is_dir():
        raise RopewalkError(
            f"--from-stage {stage + 1} needs the checkpoint {checkpoint_name(end)}, which the run in {output} did not "
            "keep; start a new run with a larger checkpoints.keep"
        )
    return end


def left_off(output: Path) -> str:
    """Progress of an interrupted run and how to resume it; a sentence without its full stop."""
    if not (output / RECIPE).is_file():
        return (
            "no training step is done yet; run the same command to start again (it uses the rows that are already "
            "packed)"
        )
    if (output / SUMMARY).is_file():
        return f"{output / MODEL} and {output / SUMMARY} are written; the same command with --resume completes the rest"
    checkpoints = checkpoints_in(output / CHECKPOINTS)
    if not checkpoints:
        return (
            f"the run in {output} has no checkpoint yet; the same command with --resume restarts its training"
        )
    return f"the last checkpoint is {checkpoints[-1]}; the same command with --resume continues from this checkpoint"
