"""The output folder of a run: whether a run may start or resume in it, its result files, and its progress."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.answers import answers_file
from ropewalk.evaluation.store import model_digest
from ropewalk.io.files import is_left_over, remove_left_overs, writing
from ropewalk.parallel import World
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    RECORD,
    Completed,
    Position,
    check_export,
    checkpoint_name,
    checkpoints_in,
    latest_whole,
    nothing_more,
    place_of,
    read_export_record,
    read_exported_weights,
    read_position,
)
from ropewalk.training.checkpoint.remote import RemoteCopy
from ropewalk.training.documents import DATA, ROWS, RunInputs, read_run_inputs
from ropewalk.training.final_weights import exported_as
from ropewalk.training.measurement import DURING, during_files, evaluation_file, evaluation_record
from ropewalk.training.metrics import LOST, MetricsLog
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
ADAPTER = "adapter"
LAUNCH = ".launch"
LOCK = ".lock"
EARLIER = "earlier"
CURVES = "during-*.png"
"""Figures of the evaluations during training, one a suite."""
REPORT = (
    "report.html",
    "samples.html",
    "perplexity.png",
    "passkey.png",
    "passkey-teacher_forced.png",
    "training.png",
    "factors.png",
)

PREPARED = {DATA, ROWS, VERSIONS, LAUNCH, LOCK}
"""Files that may exist in an output folder before a run starts; preparation ends with writing the recipe."""

RESULTS = (
    MODEL,
    ADAPTER,
    evaluation_file("after"),
    evaluation_record("after"),
    answers_file("after"),
    SUMMARY,
    *REPORT,
)
"""Files that are written after the last step."""


@dataclass(frozen=True)
class Start:
    """How a run starts or resumes.

    Attributes:
        recipe: the recipe, with the history of its changes.
        resumed: whether the run had started before.
        inputs: inputs of the run when it first started; None for a new run.
        others: indices of stages that are new or changed.
        notes: sentences for the user.
        progress: progress according to the names of the run's checkpoints.
        again: position from which training starts again, whatever was trained after it; None for the latest checkpoint.
        until: number of stages after which the run stops; None for all.
    """

    recipe: Recipe
    resumed: bool = False
    inputs: RunInputs | None = None
    others: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    progress: Progress = field(default_factory=Progress)
    again: Position | None = None
    until: int | None = None

    @property
    def training(self) -> range:
        """Indices of the stages that this launch trains."""
        return range(_first_to_train(self.recipe, self.progress), self.until or len(self.recipe.stages))


@dataclass(frozen=True)
class Reached:
    """Progress of a run, after verifying its files.

    Attributes:
        checkpoint: the latest checkpoint; None if there is none.
        position: position of the checkpoint, or of the exported model if checkpoints were deleted after the run.
        exported: whether the folder contains an intact model of the recipe's last step.
        outdated: files and folders to move away if they exist, because new results will replace them.
        why: sentence that tells the user why they are outdated.
        done: completed steps of each stage, starting with the first.
        gap: sentence on missing steps in the log that the user has accepted; None if no step is missing.
    """

    checkpoint: Path | None = None
    position: Position | None = None
    exported: bool = False
    outdated: tuple[str, ...] = ()
    why: str = ""
    done: tuple[int, ...] = ()
    gap: str | None = None


def launch() -> str:
    """Identity of the torchrun that started this process: its run id and its process id."""
    # The run id alone is not unique: torchrun's default is "none" for every launch.
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


def started_by(output: Path) -> str | None:
    """Identity of the launch that started or resumed the run in a folder; a restart must not resume another's run."""
    path = output / LAUNCH
    return path.read_text(encoding="utf-8") if path.is_file() and (output / RECIPE).is_file() else None


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


def take_up(output: Path, recipe: Recipe, resume: bool, stages: StageRange | None = None) -> Start:
    """Decide whether a recipe may start or resume in a folder that this process has locked.

    Temporary files that killed processes left behind are removed.

    Args:
        output: the folder.
        recipe: recipe to run.
        resume: whether to resume the run in the folder.
        stages: which stages to train; all that are not complete if None.

    Raises:
        RopewalkError: if the folder contains other files, no run to resume, or a run of another recipe, or if the run
            has no such stages.
    """
    stages = stages or StageRange()
    stages.check(recipe, resume)
    saved = output / RECIPE
    notes: list[str] = []
    if not (resume and saved.is_file()):
        # The lock is this process's own.
        there = {entry.name for entry in output.iterdir() if not is_left_over(entry.name)} - {LOCK}
        if resume and not there:
            raise RopewalkError(
                f"nothing to resume: the folder {str(output)!r} contains no run; leave out --resume to start a run, or "
                "set output to the folder of the interrupted run"
            )
        if there - PREPARED:
            raise RopewalkError(
                f"nothing to resume: the folder {str(output)!r} contains no {RECIPE}; set output to the folder of a run"
                if resume
                else f"output folder {output} is not empty; either add --resume to continue the run in this folder, or "
                "set output to a new folder"
                if saved.is_file()
                else f"output folder {output} is not empty; set output to a new folder"
            )
        if resume:
            notes.append(
                f"the run in {output} was interrupted before training started; it continues from there"
            )
        remove_left_overs(output)
        if recipe.history:
            notes.append(
                "the recipe's history belongs to another run and is dropped; this run uses its values from step 1 on"
            )
            recipe = recipe.model_copy(update={"history": []})
        if stages.first is not None:
            raise RopewalkError(
                f"--from-stage {stages.first} starts from a checkpoint, but the run in {output} has none; omit "
                "--from-stage"
            )
        return Start(recipe, notes=tuple(notes), until=stages.last)
    text = _read(saved)
    try:
        old = parse_recipe(text, str(saved))
    except RopewalkError as error:
        raise RopewalkError(
            f"the run's own {RECIPE} is damaged ({error}); restore the file, or start a new run in another output "
            "folder"
        ) from error
    progress, again = progress_in(output, old), None
    if stages.first is not None:
        again = _end_of_stage(stages.first - 1, output, old, progress)
        progress = Progress(again.stage, again.step, again.stage + 1)
        notes.append(
            f"stage {stages.first} starts again from {checkpoint_name(again)}; what was trained after it moves to "
            f"{output / EARLIER}"
        )
    elif stages.last is not None and _first_to_train(old, progress) > stages.last:
        raise RopewalkError(
            f"--until-stage is {stages.last}, but the run in {output} has reached step {progress.step} of stage "
            f"{progress.stage + 1}; omit --until-stage, or give --until-stage {progress.stage + 1} or more"
        )
    found = changes(old, recipe, progress)
    inputs = read_run_inputs(output)
    _refuse_unproven(found, old, recipe, inputs)
    for folder in (output, output / CHECKPOINTS, output / DURING):
        remove_left_overs(folder)
    history = [*old.history, *found.onward]
    return Start(
        recipe.model_copy(update={"history": history}),
        True,
        inputs,
        found.stages,
        (*notes, *found.sentences(old, recipe)),
        progress,
        again,
        stages.last,
    )


def _first_to_train(recipe: Recipe, progress: Progress) -> int:
    """Index of the first stage that is not complete."""
    stages, at = recipe.stages, progress.stage
    # A stage of 0 steps is at its last step before it begins, so the step alone does not tell.
    done = at < len(stages) and progress.begun > at and progress.step >= stages[at].steps
    return at + done


def _end_of_stage(stage: int, output: Path, recipe: Recipe, progress: Progress) -> Position:
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


def progress_in(output: Path, recipe: Recipe) -> Progress:
    """Progress of the run in a folder, according to the names of its checkpoints."""
    stage = step = begun = 0
    if checkpoints := checkpoints_in(output / CHECKPOINTS):
        stage, step = place_of(checkpoints[-1])
        begun = stage + 1
    # Without checkpoints, which may be deleted after a run, the exported model tells how far the run came.
    elif (position := _exported_position(output / MODEL)) is not None:
        stage, step, begun = position.stage, position.step, position.stage + 1
    choices = choices_in(output)
    for number, each in enumerate(recipe.stages):
        # A stage has begun once its RoPE is decided, even without a step: a resumed run must not decide again.
        chosen = each.rope.limiting.method == "auto" and number in choices
        searched = (
            each.rope.limiting.search is not None and (output / factors_file(stage_name(number))).is_file()
        )
        if chosen or searched:
            begun = max(begun, number + 1)
    return Progress(stage, step, begun)


def copying(output: Path, url: str | None) -> Completed:
    """What a run does with each complete checkpoint: copy it to a URL, or nothing."""
    if url is None:
        return nothing_more
    copy = RemoteCopy(url)

    def completed(checkpoint: Path) -> None:
        files = [*output.glob("*"), *(output / DURING).glob("*")]
        needed = [path for path in files if path.is_file() and not path.name.startswith(".")]
        # The recipe says that the folder contains a run.
        copy.upload(output, sorted(needed, key=lambda path: path.name == RECIPE), checkpoint)

    return completed


def take_from_copy(output: Path, url: str | None, resume: bool) -> str | None:
    """Check that a copy can be written to, and fill an empty folder with it before a run is resumed.

    Args:
        output: folder of the run, which this process has locked.
        url: URL of the copy; None for none.
        resume: whether to resume the run.

    Returns:
        A sentence for the user if the folder was filled.

    Raises:
        RopewalkError: if the URL cannot be written to or read, or contains another run.
    """
    if url is None:
        return None
    copy = RemoteCopy(url)
    copy.check()
    there = copy.read(RECIPE) is not None
    if (output / RECIPE).is_file():
        if there and not _same_run(output, copy):
            # A damaged log is named as such, and not taken for that of another run.
            MetricsLog(output / METRICS).read()
            raise RopewalkError(
                f"{copy.url} contains the copy of another run; set checkpoints.copy_to to another URL"
            )
        return None
    if there and not resume:
        raise RopewalkError(
            f"{copy.url} contains the copy of a run; add --resume to continue that run, or set checkpoints.copy_to to "
            "another URL"
        )
    if not resume:
        return None
    names = copy.restore(output, RECIPE)
    return f"the run was copied from {copy.url}, with {', '.join(names)}" if names else None


def _same_run(output: Path, copy: RemoteCopy) -> bool:
    """Whether a copy is that of the run in a folder."""
    places = (output / METRICS, output / LOST, output / EARLIER / METRICS)
    log, lost, earlier = (_lines(path.read_bytes() if path.is_file() else None) for path in places)
    copied = _lines(copy.read(METRICS))
    # A line holds the loss and duration of a step, which no two runs share.
    if copied & (log | lost | earlier) or not (copied or log):
        return True
    # The checkpoints tell only where the log is lost: a recipe that is run twice may give the same weights.
    records = [path / RECORD for path in checkpoints_in(output / CHECKPOINTS) if (path / RECORD).is_file()]
    return (not log or (output / LOST).exists()) and any(
        copy.read(f"{CHECKPOINTS}/{path.parent.name}/{RECORD}") == path.read_bytes() for path in records
    )


def _lines(log: bytes | None) -> set[bytes]:
    """Complete lines of a log."""
    return set((log or b"").split(b"\n")[:-1]) - {b""}


def reached(output: Path, start: Start, world: World) -> Reached:
    """Verify the latest checkpoint, the exported model and the log of steps; every rank must call this function.

    Raises:
        RopewalkError: if the checkpoint is damaged; if the model is damaged and no checkpoint is left to export it
            again; if the log is damaged or lacks completed steps; or if the recipe requests more training but no
            checkpoint is left.
    """
    if not start.resumed:
        return Reached()
    model = output / MODEL
    # Collective, because checking a sharded checkpoint is divided among the ranks.
    limit = None if start.again is None else (start.again.stage, start.again.step)
    checkpoint = latest_whole(output / CHECKPOINTS, world, limit)
    there = world.on_rank_0(model.exists)
    damage = check_export(model, world) if there else None
    if there and start.recipe.adapter is not None:
        spoilt = check_export(output / ADAPTER, world)
        damage = damage or (None if spoilt is None else f"its adapter: {spoilt}")
    exported = world.on_rank_0(lambda: _exported_position(model)) if there and damage is None else None
    end = (len(start.recipe.stages) - 1, start.recipe.stages[-1].steps)
    changed = None
    made_of = world.on_rank_0(lambda: read_exported_weights(model)) if exported is not None else None
    if exported is not None and limit is None and exported_as(made_of) != start.recipe.export:
        was, now = exported_as(made_of).weights, start.recipe.export.weights
        if checkpoint is None:
            raise world.known_to_all(
                RopewalkError(
                    f"the recipe sets export to {now!r}, but the model in {model} was exported with {was!r}, and the "
                    f"run has no checkpoint left to export; set export to {was!r}"
                )
            )
        exported, changed = None, f"export changes from {was} to {now}"
    if checkpoint is None:
        position = exported
        if there and exported is None:
            raise world.known_to_all(
                RopewalkError(
                    f"the model in {model} is damaged ({damage or 'it is not from a run'}), and there is no "
                    f"checkpoint in {output / CHECKPOINTS} to export the model again; restore the model or a "
                    "checkpoint, or start a new run in another output folder"
                )
            )
        if exported is not None and (exported.stage, exported.step) != end:
            raise world.known_to_all(
                RopewalkError(
                    f"the run in {output} has no checkpoint left to continue training from; start a new run with "
                    f"model: {model}"
                )
            )
    else:
        position = world.on_rank_0(lambda: read_position(checkpoint))
    done: tuple[int, ...] = ()
    if position is not None:
        done = (*(stage.steps for stage in start.recipe.stages[: position.stage]), position.step)
    gap = world.on_rank_0(lambda: MetricsLog(output / METRICS).check(done))
    outdated = [*_files_of(start.others), *world.on_rank_0(lambda: _trained_after(output, start))]
    outdated += [*world.on_rank_0(lambda: _measured_after(output, position))]
    complete = position is not None and (position.stage, position.step) == end
    if exported is not None and complete and (exported.stage, exported.step) == end:
        return Reached(checkpoint, position, True, tuple(outdated), done=done, gap=gap)
    if there or not complete:
        outdated += [*RESULTS, *world.on_rank_0(lambda: sorted(path.name for path in output.glob(CURVES)))]
    if not complete:
        # Short factors were searched on the final weights, which will change.
        outdated += [factors_file(SHORT), _log_of(factors_file(SHORT))]
    if there and exported is None:
        assert checkpoint is not None
        how = f"from {checkpoint.name}" if complete else f"after the steps that follow {checkpoint.name}"
        wrong = changed or f"{model} is not what the run saved ({damage})"
        why = f"{wrong}; it will be exported again {how}"
    elif position is not None:
        why = f"the run continues after step {position.step} of stage {position.stage + 1}"
    else:
        why = "the run restarts its training"
    return Reached(checkpoint, position, False, tuple(outdated), why, done, gap)


def set_aside(output: Path, names: Iterable[str], position: Position | None) -> Path | None:
    """Move outdated files and folders of a run to a subfolder, so that new ones do not overwrite them.

    Args:
        output: folder of the run.
        names: files and folders to move, if they exist.
        position: position that the run had reached.

    Returns:
        The folder that contains them now; None if none existed.

    Raises:
        RopewalkError: if they cannot be moved.
    """
    there = [name for name in names if (output / name).exists()]
    if not there:
        return None
    name = "start" if position is None else checkpoint_name(position)
    with writing(output / EARLIER):
        # A run may be resumed several times from the same position, with results to move each time.
        folder, number = output / EARLIER / name, 1
        while folder.exists():
            number += 1
            folder = output / EARLIER / f"{name}-{number}"
        folder.mkdir(parents=True)
        for each in there:
            # Some names have a folder, such as those of checkpoints.
            (folder / each).parent.mkdir(exist_ok=True)
            (output / each).rename(folder / each)
    return folder


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


def _files_of(stages: Sequence[int]) -> tuple[str, ...]:
    """Files that depend on changed stages, and on the target context that followed from them."""
    if not stages:
        return ()
    tables = [factors_file(stage_name(number)) for number in stages]
    before = (evaluation_file("before"), evaluation_record("before"), answers_file("before"))
    return *before, *(each for table in tables for each in (table, _log_of(table)))


def _measured_after(output: Path, position: Position | None) -> list[str]:
    """Evaluations during training that were made after a position, whose steps will be trained again."""
    # Earlier than any evaluation, so that all of them count as later.
    first = Position(-1, 0, 0) if position is None else position
    paths = [path.relative_to(output) for path in during_files(output, first)]
    return [str(each) for path in paths for each in (path, path.with_suffix(".digest.json"))]


def _trained_after(output: Path, start: Start) -> list[str]:
    """Checkpoints, and what was measured or searched, after the position from which training starts again."""
    if start.again is None:
        return []
    limit = start.again.stage, start.again.step
    later = [path for path in checkpoints_in(output / CHECKPOINTS) if place_of(path) > limit]
    tables = [factors_file(stage_name(n)) for n in range(start.again.stage + 1, len(start.recipe.stages))]
    return [
        *(f"{CHECKPOINTS}/{path.name}" for path in later),
        *(each for table in tables for each in (table, _log_of(table))),
    ]


def _log_of(table: str) -> str:
    return str(Path(table).with_suffix(".jsonl"))


def _exported_position(model: Path) -> Position | None:
    try:
        return read_export_record(model)[0]
    except RopewalkError:
        return None


def _refuse_unproven(found: Changes, old: Recipe, new: Recipe, began: RunInputs) -> None:
    """Raise if a new value must be equivalent to the old one, but the run's record cannot prove it."""
    if "model" in found.same and (began.model is None or model_digest(resolve_model(new.model)) is None):
        raise RopewalkError(
            f"the run started with model {old.model}, but the recipe has {new.model}, and ropewalk cannot check "
            f"whether the weights are the same; set model: {old.model}"
        )
    # The new recipe may have more stages than the old one.
    for number, (was, is_) in enumerate(zip(old.stages, new.stages, strict=False)):
        keys = {f"stages.{number}.rope.factors", f"stages.{number}.rope.full_attention.factors"} & found.same
        files = [each.rope.limiting.factors for each in (was, is_)]
        if keys and not all(files):
            before, now = (file or "none" for file in files)
            raise RopewalkError(
                f"the run started with {min(keys)} {before}, but the recipe has {now}; restore the old value"
            )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
