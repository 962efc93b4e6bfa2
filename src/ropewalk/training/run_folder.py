"""A run's folder: whether a run may begin or go on in it, what its results are, and where it was left off."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.store import model_digest
from ropewalk.io.files import is_left_over, remove_left_overs, writing
from ropewalk.parallel import World
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    Position,
    check_export,
    checkpoint_name,
    checkpoints_in,
    latest_whole,
    place_of,
    read_export_record,
    read_position,
)
from ropewalk.training.documents import DATA, ROWS, Began, read_began
from ropewalk.training.measurement import evaluation_file, evaluation_record
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.changes import Changes, Progress, changes
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.auto import choices_in
from ropewalk.training.stage_rope.base import factors_file, stage_name
from ropewalk.training.stage_rope.search import SHORT

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
VERSIONS = "versions.json"
MODEL = "model"
LAUNCH = ".launch"
LOCK = ".lock"
EARLIER = "earlier"
REPORT = ("report.html", "perplexity.png", "passkey.png", "training.png", "factors.png")

PREPARED = {DATA, ROWS, VERSIONS, LAUNCH, LOCK}
"""What may lie in an output folder before a run has begun: the recipe is written last of all preparations."""

RESULTS = (MODEL, evaluation_file("after"), evaluation_record("after"), SUMMARY, *REPORT)
"""What is made after the last step."""


@dataclass(frozen=True)
class Start:
    """What a run begins, or goes on, with.

    Attributes:
        recipe: with the history of its changes.
        resumed: whether the run had begun before.
        began: what it began with then.
        others: stages, counted from 0, that are new or no longer what they were.
        told: what people are to know.
    """

    recipe: Recipe
    resumed: bool = False
    began: Began | None = None
    others: tuple[int, ...] = ()
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reached:
    """How far a run has come, all files checked.

    Attributes:
        checkpoint: the latest; None where there is none.
        position: of the checkpoint; where they have been deleted after the run's end, of the exported model.
        exported: whether the model that lies in the folder is whole, and of the recipe's last step.
        outdated: files and folders that are to make room for new results, where they are there.
        why: they are, a sentence for people.
        done: steps of each stage, from the first on, that are done.
        gap: what the user said may be missing from the log of these steps, a sentence; None where nothing is.
    """

    checkpoint: Path | None = None
    position: Position | None = None
    exported: bool = False
    outdated: tuple[str, ...] = ()
    why: str = ""
    done: tuple[int, ...] = ()
    gap: str | None = None


def launch() -> str:
    """Which torchrun has started this process: its run id, and its own process."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


def begun_by(output: Path) -> str | None:
    """The launch that began or took up the run in a folder: a restart must not go on with another's."""
    path = output / LAUNCH
    return path.read_text(encoding="utf-8") if path.is_file() and (output / RECIPE).is_file() else None


def take_up(output: Path, recipe: Recipe, resume: bool) -> Start:
    """Decide whether a recipe may begin, or go on, in a folder that this process has locked.

    What killed processes left there under temporary names is removed.

    Args:
        output: the folder.
        recipe: to run.
        resume: go on with the run that lies there.

    Raises:
        RopewalkError: if it holds something else, no run to go on with, or one of another recipe.
    """
    saved = output / RECIPE
    told: list[str] = []
    if not (resume and saved.is_file()):
        there = {entry.name for entry in output.iterdir() if not is_left_over(entry.name)} - {LOCK}
        if resume and not there:
            raise RopewalkError(f"nothing to resume in {output}: there is no such run")
        if there - PREPARED:
            raise RopewalkError(
                f"nothing to resume in {output}: it holds no {RECIPE}"
                if resume
                else f"output folder {output} is not empty; add --resume to go on with it, or give another"
            )
        if resume:
            told.append(f"the run in {output} was cut off before it began to train, and goes on from there")
        remove_left_overs(output)
        if recipe.history:
            told.append(
                "the recipe's history is of another run; this one has these values from its first step on"
            )
            recipe = recipe.model_copy(update={"history": []})
        return Start(recipe, told=tuple(told))
    text = _read(saved)
    try:
        old = parse_recipe(text, str(saved))
    except RopewalkError as error:
        raise RopewalkError(
            f"the run's own {RECIPE} is damaged ({error}); restore the file, or give another output and begin a new run"
        ) from error
    found = changes(old, recipe, progress_in(output, old))
    began = read_began(output)
    _refuse_unproven(found, old, recipe, began)
    for folder in (output, output / CHECKPOINTS):
        remove_left_overs(folder)
    history = [*old.history, *found.onward]
    return Start(
        recipe.model_copy(update={"history": history}),
        True,
        began,
        found.stages,
        (*told, *found.sentences(old, recipe)),
    )


def progress_in(output: Path, recipe: Recipe) -> Progress:
    """How far the run in a folder has come, by the names of its checkpoints."""
    stage = step = begun = 0
    if checkpoints := checkpoints_in(output / CHECKPOINTS):
        stage, step = place_of(checkpoints[-1])
        begun = stage + 1
    elif (position := _exported_position(output / MODEL)) is not None:
        stage, step, begun = position.stage, position.step, position.stage + 1
    choices = choices_in(output)
    for number, each in enumerate(recipe.stages):
        chosen = each.rope.limiting.method == "auto" and number in choices
        searched = (
            each.rope.limiting.search is not None and (output / factors_file(stage_name(number))).is_file()
        )
        if chosen or searched:
            begun = max(begun, number + 1)
    return Progress(stage, step, begun)


def reached(output: Path, start: Start, world: World) -> Reached:
    """Check the latest checkpoint, the exported model and the log of the steps; every rank calls this.

    Raises:
        RopewalkError: if the checkpoint is damaged, or the model and there is no checkpoint to make it again from, or
            the log is damaged or lacks steps that are done, or more training is asked for where only the model is left.
    """
    if not start.resumed:
        return Reached()
    model = output / MODEL
    checkpoint = latest_whole(output / CHECKPOINTS, world)
    there = world.on_rank_0(model.exists)
    damage = check_export(model, world) if there else None
    exported = world.on_rank_0(lambda: _exported_position(model)) if there and damage is None else None
    end = (len(start.recipe.stages) - 1, start.recipe.stages[-1].steps)
    if checkpoint is None:
        position = exported
        if there and exported is None:
            raise world.known_to_all(
                RopewalkError(
                    f"the model in {model} is damaged ({damage or 'it is of no run'}), and there is no checkpoint in "
                    f"{output / CHECKPOINTS} to make it again from: restore the file or a checkpoint, or give another "
                    "output and begin a new run"
                )
            )
        if exported is not None and (exported.stage, exported.step) != end:
            raise world.known_to_all(
                RopewalkError(
                    f"the run in {output} has no checkpoint any more to train on from; begin a new run with model: "
                    f"{model}"
                )
            )
    else:
        position = world.on_rank_0(lambda: read_position(checkpoint))
    done: tuple[int, ...] = ()
    if position is not None:
        done = (*(stage.steps for stage in start.recipe.stages[: position.stage]), position.step)
    gap = world.on_rank_0(lambda: MetricsLog(output / METRICS).check(done))
    outdated = list(_files_of(start.others))
    complete = position is not None and (position.stage, position.step) == end
    if exported is not None and complete and (exported.stage, exported.step) == end:
        return Reached(checkpoint, position, True, tuple(outdated), done=done, gap=gap)
    if there or not complete:
        outdated += RESULTS
    if not complete:
        # They were searched for on other weights.
        outdated += [factors_file(SHORT), _log_of(factors_file(SHORT))]
    if there and exported is None:
        assert checkpoint is not None
        how = f"from {checkpoint.name}" if complete else f"after the steps that follow {checkpoint.name}"
        why = f"{model} is not what the run has saved there ({damage}); it is made again {how}"
    elif position is not None:
        why = f"the run goes on after step {position.step} of stage {position.stage + 1}"
    else:
        why = "the run begins its training again"
    return Reached(checkpoint, position, False, tuple(outdated), why, done, gap)


def set_aside(output: Path, names: Iterable[str], position: Position | None) -> Path | None:
    """Move files and folders of a run away, so that new ones can be made and none is lost.

    Args:
        output: folder of the run.
        names: what to move, if it is there.
        position: that the run had reached.

    Returns:
        The folder that they are in now; None if none of them was there.

    Raises:
        RopewalkError: if they cannot be moved.
    """
    there = [name for name in names if (output / name).exists()]
    if not there:
        return None
    name = "start" if position is None else checkpoint_name(position)
    with writing(output / EARLIER):
        folder, number = output / EARLIER / name, 1
        while folder.exists():
            number += 1
            folder = output / EARLIER / f"{name}-{number}"
        folder.mkdir(parents=True)
        for each in there:
            (output / each).rename(folder / each)
    return folder


def left_off(output: Path) -> str:
    """Where an interrupted run stands, and how it goes on; a sentence without its full stop."""
    if not (output / RECIPE).is_file():
        return "nothing is trained yet; the same command starts again, and finds what is packed so far"
    checkpoints = checkpoints_in(output / CHECKPOINTS)
    if not checkpoints:
        return f"the run in {output} has no checkpoint yet; the same command with --resume goes on from its beginning"
    return f"the last checkpoint is {checkpoints[-1]}; the same command with --resume goes on from there"


def _files_of(stages: Sequence[int]) -> tuple[str, ...]:
    """What belongs to stages that are no longer what they were, and to the target that they led to."""
    if not stages:
        return ()
    tables = [factors_file(stage_name(number)) for number in stages]
    before = (evaluation_file("before"), evaluation_record("before"))
    return *before, *(each for table in tables for each in (table, _log_of(table)))


def _log_of(table: str) -> str:
    return str(Path(table).with_suffix(".jsonl"))


def _exported_position(model: Path) -> Position | None:
    try:
        return read_export_record(model)[0]
    except RopewalkError:
        return None


def _refuse_unproven(found: Changes, old: Recipe, new: Recipe, began: Began) -> None:
    """Raise where a new value ought to come to the same as the old one, and the run's record cannot tell."""
    if "model" in found.same and (began.model is None or model_digest(resolve_model(new.model)) is None):
        raise RopewalkError(
            f"the recipe differs from that of the run in model ({old.model} -> {new.model}), and nothing tells that "
            "they are the same; restore it"
        )
    for number, (was, is_) in enumerate(zip(old.stages, new.stages, strict=False)):
        keys = {f"stages.{number}.rope.factors", f"stages.{number}.rope.full_attention.factors"} & found.same
        files = [each.rope.limiting.factors for each in (was, is_)]
        if keys and not all(files):
            told = f"{min(keys)} ({' -> '.join(file or 'none' for file in files)})"
            raise RopewalkError(f"the recipe differs from that of the run in {told}; restore it")
    if "precision" in found.same and began.precision is None:
        raise RopewalkError(
            f"the recipe differs from that of the run in precision ({old.precision} -> {new.precision}); restore it"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
