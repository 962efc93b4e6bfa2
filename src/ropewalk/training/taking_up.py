"""How a launch takes up the run in its folder: whether it may, what it verifies first, and what it sets aside."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropewalk.attention.kept import Keeping
from ropewalk.errors import RopewalkError
from ropewalk.io.files import remove_left_overs, write_json, write_text, writing
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.parallel import MeshShape, make_mesh
from ropewalk.parallel.context import RunContext
from ropewalk.runs import Found, Runner, State, Store, Todo
from ropewalk.runs.store import EARLIER, launch
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    Position,
    check_export,
    checkpoint_name,
    checkpoints_in,
    latest_whole,
    place_of,
    read_exported_weights,
    refuse,
)
from ropewalk.training.documents import (
    refuse_other_documents,
    refuse_other_split,
    refuse_steps_without_targets,
)
from ropewalk.training.final_weights import check_final_weights, check_metric, exported_as
from ropewalk.training.folder import (
    CURVES,
    METRICS,
    MODEL,
    RECIPE,
    VERSIONS,
    StageRange,
    end_of_stage,
    first_to_train,
    progress_in,
    recipe_so_far,
)
from ropewalk.training.measurement import (
    DURING,
    describe_during,
    during_files,
    evaluated_during,
    prompt_lengths,
    requested_lengths,
)
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.preflight import Meshes, announcement, resolve
from ropewalk.training.recipe.changes import Progress, changes, refuse_lost_tables, sentences
from ropewalk.training.recipe.export import Export
from ropewalk.training.recipe.file import dump_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.run_state import Run, Start, rows_steps
from ropewalk.training.stage_rope.base import stage_name
from ropewalk.training.stage_rope.search import SCALE, SHORT, searches_of, split_of
from ropewalk.training.summary import versions


def started(store: Store, recipe: Recipe, resume: bool, stages: StageRange, restarts: int) -> Start:
    """Decide on rank 0 whether a recipe may start or resume in a folder that is locked.

    Raises:
        RopewalkError: if the folder holds a run that is not to be resumed, or the recipe has no such stages.
    """
    output, notes = store.folder, list[str]()
    assert output is not None
    # Processes that torchrun restarts after a failure resume without --resume, and go on with what they have done.
    if restarts and store.about.launch == launch():
        resume, stages = True, replace(stages, first=None)
        notes.append(f"restart {restarts} after a failure: the run resumes from its last checkpoint")
    stages.check(recipe, resume)
    old = recipe_so_far(output)
    if old is None:
        if stages.first is not None:
            raise RopewalkError(
                f"--from-stage {stages.first} starts from a checkpoint, but the run in {output} has none; omit "
                "--from-stage"
            )
        if resume:
            notes.append(
                f"the run in {output} was interrupted before training started; it continues from there"
            )
        return Start(False, Progress(), None, stages.last, (), tuple(notes))
    if not resume:
        raise RopewalkError(
            f"output folder {output} is not empty; either add --resume to continue the run in this folder, or set "
            "output to a new folder"
        )
    progress = progress_in(store, old)
    if stages.first is not None:
        again = end_of_stage(stages.first - 1, output, old, progress)
        progress = Progress(again.stage, again.step, again.stage + 1)
        notes.append(
            f"stage {stages.first} starts again from {checkpoint_name(again)}; what was trained after it moves to "
            f"{output / EARLIER}"
        )
    elif stages.last is not None and first_to_train(old, progress) > stages.last:
        raise RopewalkError(
            f"--until-stage is {stages.last}, but the run in {output} has reached step {progress.step} of stage "
            f"{progress.stage + 1}; omit --until-stage, or give --until-stage {progress.stage + 1} or more"
        )
    found = changes(old, recipe, progress)
    refuse_lost_tables(old, recipe, progress.begun)
    for folder in (output / CHECKPOINTS, output / DURING):
        remove_left_overs(folder)
    notes += sentences(found, old, recipe)
    return Start(True, progress, stages.first, stages.last, tuple(found), tuple(notes))


def resolved_run(recipe: Recipe, context: RunContext, runner: Runner, start: Start, clock: float) -> Run:
    """Resolve the recipe, and find out what decides the steps of its run."""
    world, reporter = context.world, context.rank_0_reporter
    training = range(first_to_train(recipe, start.progress), start.last or len(recipe.stages))
    resolved = _resolved(recipe, context, training)
    contexts = [_on(each.mesh, resolved, context) for each in resolved.stages]
    context = _on(resolved.mesh, resolved, context)
    for line in world.on_rank_0(lambda: announcement(resolved)):
        reporter.note(line)
    lengths = world.on_rank_0(lambda: prompt_lengths(resolved, reporter))
    during = world.on_rank_0(lambda: _asked_during(resolved, context))
    run = Run(
        resolved,
        context,
        contexts,
        runner,
        start,
        world.on_rank_0(lambda: _digest_of_model(runner.store, resolved)),
        requested_lengths(resolved, lengths),
        during,
        [],
        clock,
        MetricsLog(_folder(context) / METRICS),
    )
    run.splits = world.on_rank_0(lambda: _splits(run))
    return run


def _folder(context: RunContext) -> Path:
    assert context.output is not None
    return context.output


def _resolved(recipe: Recipe, context: RunContext, training: range) -> ResolvedRecipe:
    """The resolved recipe, with what rank 0 chooses for all, as the choices depend on a machine's memory."""
    world = context.world

    def choices() -> tuple[Meshes, list[Keeping | None]]:
        chosen = resolve(recipe, world, training=training)
        meshes = chosen.mesh, tuple(stage.mesh for stage in chosen.stages)
        return meshes, [stage.keeping for stage in chosen.stages]

    if world.size == 1:
        return resolve(recipe, world, training=training)
    meshes, keeping = world.on_rank_0(choices)
    return resolve(recipe, world, meshes).keeps(keeping)


def _on(mesh: MeshShape, resolved: ResolvedRecipe, context: RunContext) -> RunContext:
    """The context with its processes arranged as a mesh; every rank must call this function."""
    return context if context.world.size == 1 else context.on(make_mesh(mesh, resolved.device.type))


def _asked_during(resolved: ResolvedRecipe, context: RunContext) -> list[dict[str, list[int]] | None]:
    """Suites and lengths of the evaluations during each stage; None for a stage without."""
    reporter, requested = context.rank_0_reporter, list[dict[str, list[int]] | None]()
    for number, stage in enumerate(resolved.recipe.stages):
        if resolved.recipe.evaluation.every is None or not stage.steps:
            requested.append(None)
            continue
        found = requested_lengths(resolved, prompt_lengths(resolved, reporter, number), number)
        requested.append(found or None)
    if any(requested):
        reporter.note(describe_during(resolved, requested))
    return requested


def _digest_of_model(store: Store, resolved: ResolvedRecipe) -> str | None:
    """Digest of the recipe's model, on rank 0; that of the run so far if the files are not here to be compared.

    Raises:
        RopewalkError: if the recipe names another model than the run began with, and their weights cannot be compared.
    """
    here, record = model_digest(resolved.model), store.record("before")
    old = None if store.folder is None else recipe_so_far(store.folder)
    if old is None or record is None or None not in (here, record.identity["model"]):
        return here
    if old.model != resolved.recipe.model:
        raise RopewalkError(
            f"the run started with model {old.model}, but the recipe has {resolved.recipe.model}, and ropewalk cannot "
            f"check whether the weights are the same; set model: {old.model}"
        )
    began: str | None = record.identity["model"]
    return began


def _splits(run: Run) -> list[dict[str, Any]]:
    """What decides the text of each search, on rank 0: that of earlier launches first, which stays split off."""
    store, record = run.runner.store, run.runner.store.record("held-out")
    known: list[dict[str, Any]] = list(record.goal) if record and isinstance(record.goal, list) else []
    trained = first_to_train(run.recipe, run.start.progress)
    for name, wanted in searches_of(run.resolved).items():
        numbers = [n for n in range(len(run.recipe.stages)) if stage_name(n) == name]
        done = store.is_done(f"rope-{numbers[0] + 1}" if numbers else name)
        # A search that stays needs no other text, whatever becomes of the evaluation.
        stays = done and (
            numbers[0] <= run.start.progress.stage if numbers else trained == len(run.recipe.stages)
        )
        split = split_of(name, wanted, run.resolved)
        if split not in known and not (stays and any(each["search"] == name for each in known)):
            known.append(split)
    return known


def verified(run: Run) -> tuple[int, ...]:
    """Verify the latest checkpoint and the log of steps, if something to do needs them; all ranks call this function.

    Returns:
        Completed steps of each stage, starting with the first.

    Raises:
        RopewalkError: if the checkpoint or the log is damaged, or what is to do needs a checkpoint and none is left.
    """
    world, output, stages = run.context.world, run.output, run.recipe.stages
    if not run.start.resumed:
        return ()
    # What is done is verified only if something reads it.
    if has_trained_all(run) and not _exports(run):
        done = tuple(stage.steps for stage in stages)
    else:
        first = run.start.first
        limit = None if first is None else (first - 2, stages[first - 2].steps)
        run.checkpoint = latest_whole(output / CHECKPOINTS, world, limit)
        if run.checkpoint is None:
            _refuse_without_checkpoint(run)
        position = None if run.checkpoint is None else place_of(run.checkpoint)
        done = () if position is None else (*(stage.steps for stage in stages[: position[0]]), position[1])
    gap = world.on_rank_0(lambda: run.metrics.check(done))
    # Steps missing from metrics.jsonl, which the user has accepted with metrics.lost.jsonl.
    if gap is not None:
        run.context.rank_0_reporter.note(gap)
    if done:
        # Only for its check: a damaged file would otherwise fail the run when it writes its summary.
        world.on_rank_0(lambda: evaluated_during(output, Position(len(done) - 1, done[-1], 0)))
    return done


def _refuse_without_checkpoint(run: Run) -> None:
    """Raise if a complete run, whose checkpoints were deleted, would have to train or to export again."""
    world, model = run.context.world, run.output / MODEL
    if not world.on_rank_0(lambda: run.runner.store.is_done(MODEL) and model.exists()):
        return
    if (damage := check_export(model, world)) is not None:
        refuse(
            world,
            f"the model in {model} is damaged ({damage}), and there is no checkpoint in {run.output / CHECKPOINTS} to "
            "export the model again; restore the model or a checkpoint, or start a new run in another output folder",
        )
    exported = exported_as(world.on_rank_0(lambda: read_exported_weights(model)))
    if exported != run.recipe.export:
        was, now = exported.weights, run.recipe.export.weights
        refuse(
            world,
            f"the recipe sets export to {now!r}, but the model in {model} was exported with {was!r}, and the run has "
            f"no checkpoint left to export; set export to {was!r}",
        )
    refuse(
        world,
        f"the run in {run.output} has no checkpoint left to continue training from; start a new run with model: "
        f"{model}",
    )


def has_trained_all(run: Run) -> bool:
    """Whether nothing of the training is left to do, unless a RoPE that is found again turns out to be another one.

    A damaged table of factors, or a lost record, comes back as it was, and until then nothing of the result moves.
    """
    found = run.todo.found
    ropes, training = (
        [found[name].state for name in found if name.startswith(kind)] for kind in ("rope-", "train-")
    )
    return not {State.OTHER, State.OUTDATED} & set(ropes) and set(training) <= {State.DONE, State.WAITS}


def _exports(run: Run) -> bool:
    """Whether the model is exported again, as far as is known before it is trained on."""
    return run.todo.found[MODEL].state not in (State.DONE, State.WAITS) or (
        any(run.todo.found[name].state in (State.OTHER, State.OUTDATED) for name in _on_final_weights(run))
    )


def _on_final_weights(run: Run) -> list[str]:
    """The steps that measure the final weights before they are exported."""
    return [name for name in (SHORT, SCALE) if name in run.todo.found]


def refuse_too_little(run: Run) -> None:
    """Raise now if a stage, an evaluation or the export would fail when the run reaches it."""
    world, recipe, resolved, todo = run.context.world, run.recipe, run.resolved, run.todo
    numbers = range(len(recipe.stages))
    records = [(n, run.runner.values[name]) for n in numbers for name in rows_steps(recipe, n)]
    world.on_rank_0(lambda: refuse_other_documents(resolved, records, run.output))
    rows = [None if todo.is_done(f"train-{number + 1}") else run.training_rows(number) for number in numbers]
    for kind in ("folder", "short"):
        folders = [getattr(each, kind, None) for each in rows]
        world.on_rank_0(partial(refuse_other_split, recipe, folders))
    world.on_rank_0(lambda: refuse_steps_without_targets(resolved, rows))
    if not (todo.is_done("before") and todo.is_done("after") and has_trained_all(run)):
        run.documents()
    world.on_rank_0(lambda: check_metric(resolved, run.during[-1]))
    if not todo.is_done(MODEL):
        world.on_rank_0(lambda: check_final_weights(run.output, recipe, run.checkpoint))


def set_aside(run: Run) -> None:
    """Move what will be made again, with the results that follow from it, to ``earlier/``."""
    model = run.todo.found[MODEL]
    if not has_trained_all(run) or _exports(run):
        late = [*(() if has_trained_all(run) else _on_final_weights(run)), MODEL, "after"]
        why = run.context.world.on_rank_0(lambda: _why_again(run, model))
        found = {**run.todo.found, **{name: Found(State.OTHER, why) for name in late}}
        run.todo = Todo(found, run.todo.again | set(late), run.todo.short)
    run.context.world.on_rank_0(lambda: _adopt(run))
    run.runner.set_aside(run.todo, run.steps)
    if (moved := run.context.world.on_rank_0(lambda: _move_measured(run))) is not None:
        run.context.rank_0_reporter.note(
            f"steps after the checkpoint are evaluated again; the earlier results were moved to {moved}"
        )


def _why_again(run: Run, model: Found) -> str:
    """Why results will be made again, on rank 0."""
    trained, last = has_trained_all(run), run.checkpoint
    name = "the start" if last is None else last.name
    how = f"from {name}" if trained else f"after the steps that follow {name}"
    if trained and model.state is State.DAMAGED and (run.output / MODEL).exists():
        return (
            f"{run.output / MODEL} is not what the run saved ({model.why}); it will be exported again {how}"
        )
    record = run.runner.store.record(MODEL)
    if model.differences and record is not None:
        was = Export.model_validate(record.identity["export"]).weights
        return f"export changes from {was} to {run.recipe.export.weights}; it will be exported again {how}"
    if trained:
        again = {SHORT: "the short factors are searched again", SCALE: "the softmax scale is measured again"}
        return "; ".join(again[name] for name in _on_final_weights(run))
    if last is None:
        return "the run restarts its training"
    stage, step = place_of(last)
    return f"the run continues after step {step} of stage {stage + 1}"


def _move_measured(run: Run) -> Path | None:
    """Move evaluations of steps that will be trained again to ``earlier/``, and return their folder there."""
    if has_trained_all(run):
        return None
    # Earlier than any evaluation, so that all of them count as later.
    place = (-1, 0) if run.checkpoint is None else place_of(run.checkpoint)
    paths = during_files(run.output, Position(*place, 0))
    if not paths:
        return None
    name = "start" if run.checkpoint is None else run.checkpoint.name
    # A run may be resumed several times from the same checkpoint.
    folder, number = run.output / EARLIER / name, 1
    while folder.exists():
        number += 1
        folder = run.output / EARLIER / f"{name}-{number}"
    with writing(folder):
        (folder / DURING).mkdir(parents=True)
        for path in (*paths, *(path.with_suffix(".digest.json") for path in paths)):
            path.rename(folder / DURING / path.name)
    return folder


def _adopt(run: Run) -> None:
    """Register files of steps that are about to move, whose names were not known when the steps began."""
    store, moving = run.runner.store, (State.OTHER, State.OUTDATED)
    for step in run.steps:
        record = store.record(step.name)
        if record is None or run.todo.found[step.name].state not in moving:
            continue
        paths = list(run.output.glob(CURVES)) if step.name == "after" else []
        if step.name.startswith("train-"):
            number = int(step.name.removeprefix("train-")) - 1
            there = [*checkpoints_in(run.output / CHECKPOINTS), *during_files(run.output)]
            paths = [path for path in there if place_of(path.with_suffix(""))[0] == number]
            paths += [digest for path in paths if (digest := path.with_suffix(".digest.json")).is_file()]
        for path in paths:
            store.register(step.name, record, path.relative_to(run.output).as_posix(), True)


def write_start(run: Run) -> None:
    """Write what the run is; from here on its folder holds a run."""
    run.runner.store.note_changes([asdict(change) for change in run.start.changes])
    write_json(run.output / VERSIONS, versions(run.resolved))
    write_text(run.output / RECIPE, dump_recipe(run.recipe))
