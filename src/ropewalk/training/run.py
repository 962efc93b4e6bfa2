"""A whole run, from a recipe to an extended checkpoint with its evaluation; it can resume after any interruption."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ropewalk.attention.kept import Keeping
from ropewalk.compatibility import Reading
from ropewalk.data import PackedRows, open_rows
from ropewalk.data.read.embedded import EMBEDDED, RETRIEVAL
from ropewalk.data.rows.packed_rows import is_packed
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.evaluation.store import model_digest
from ropewalk.io.files import write_json, write_text
from ropewalk.io.lock import locked
from ropewalk.io.progress import Reporter
from ropewalk.io.results import Result
from ropewalk.models.checkpoint.origin import origin_of
from ropewalk.parallel import MeshShape, make_mesh
from ropewalk.parallel.context import RunContext
from ropewalk.rope import LongRope, RopeMethod
from ropewalk.search import Factors, goal_of, write_factors
from ropewalk.training.checkpoint.adapter import export_adapter
from ropewalk.training.checkpoint.average import load_average
from ropewalk.training.checkpoint.files import Position, read_exported_weights, read_position
from ropewalk.training.checkpoint.sharded import export_model, load_weights
from ropewalk.training.documents import (
    all_rows,
    check_sources,
    read_run_inputs,
    refuse_steps_without_targets,
    rows_with_validation,
    run_inputs,
    validation_documents,
    write_run_inputs,
)
from ropewalk.training.final_weights import (
    FinalWeights,
    check_final_weights,
    check_metric,
    check_whole,
    describe_weights,
    final_weights,
)
from ropewalk.training.measurement import (
    Measurement,
    describe_during,
    evaluated_during,
    evaluation_file,
    measure,
    prompt_lengths,
    requested_lengths,
    results_in,
    short_context,
)
from ropewalk.training.metrics import MetricsLog, tracking
from ropewalk.training.preflight import Meshes, announcement, resolve
from ropewalk.training.recipe.file import dump_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import AtStage, ResolvedRecipe, RopeAt, folder_of, load_for_run
from ropewalk.training.run_folder import (
    ADAPTER,
    EARLIER,
    LAUNCH,
    METRICS,
    MODEL,
    RECIPE,
    SUMMARY,
    VERSIONS,
    Reached,
    StageRange,
    Start,
    launch,
    reached,
    set_aside,
    started_by,
    take_from_copy,
    take_up,
)
from ropewalk.training.stage import StageRun, run_stage
from ropewalk.training.stage_engine import choices_in
from ropewalk.training.stage_rope.auto import forget_choices
from ropewalk.training.stage_rope.base import Before, Decision, factors_file, refuse_other_rope, stage_name
from ropewalk.training.stage_rope.decide import check_stage, decide, settled
from ropewalk.training.stage_rope.search import (
    SHORT,
    SHORT_LABEL,
    FactorSearch,
    candidate_of,
    check_short_rows,
    kept_factors,
    search_factors,
    search_summary,
)
from ropewalk.versions import software_versions


@dataclass(frozen=True)
class RunResult(Result):
    """Result of a run, as in its ``summary.json``.

    Attributes:
        output: folder of the run.
        model: folder of the extended model.
        trained_length, context: context before and after the run, in tokens.
        engine, device, precision: attention engine, device and precision of the training.
        processes: number of processes, and the degree of each kind of parallelism.
        stages: settings and results of each stage.
        short_factors: result of the search for LongRoPE's short factors, those for inputs up to the original length;
            None if there was no search.
        original_length: trained length before any extension, in tokens, if the result is a longrope checkpoint;
            otherwise None.
        short_context: perplexity at ``original_length`` before and after training; None if it was not measured.
        before, after: evaluation results before and after training.
        during: stage, step and scores of each evaluation during training. Empty, and left out of JSON, if there was
            none.
        exported: checkpoints that the weights of ``model`` come from, and the settings ``export`` of the recipe. The
            weights are those of the checkpoint with the best score, or the mean of several checkpoints. None, and left
            out of JSON, if the weights are those of the last step.
        history: changes that ``--resume`` made to the recipe.
        seconds: duration of the process that finished the run.
        versions: versions of the software, and a description of the machine.
        adapter: folder of the adapter. None, and left out of JSON, if the run trained the model's own weights.
        source: the model before the run: its name, its id and revision on the Hub, the licence in its model card, the
            SHA-256 of its config and weights, and its RoPE.
        files: paths of the report and its figures, which only the command ``ropewalk extend`` writes. None, and left
            out of JSON, in ``summary.json`` and in the result of the Python function.
        readers: how other programs read the model's RoPE. None, and left out of JSON, wherever ``files`` is left out.
    """

    output: Path
    model: Path
    trained_length: int
    context: int
    engine: str
    device: str
    precision: str
    processes: dict[str, int]
    stages: tuple[dict[str, Any], ...]
    short_factors: dict[str, Any] | None
    original_length: int | None
    short_context: dict[str, Any] | None
    before: tuple[TaskResult, ...]
    after: tuple[TaskResult, ...]
    during: tuple[dict[str, Any], ...]
    history: tuple[dict[str, Any], ...]
    seconds: float
    versions: dict[str, str]
    source: dict[str, Any]
    adapter: Path | None = None
    exported: dict[str, Any] | None = None
    files: tuple[Path, ...] | None = None
    readers: tuple[Reading, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Content of ``summary.json``; without the parts that this run does not have, or not yet."""
        values = super().to_json()
        if not values["during"]:
            del values["during"]
        for name in ("adapter", "exported", "files", "readers"):
            if values[name] is None:
                del values[name]
        return values


@dataclass(frozen=True)
class StoppedRun(Result):
    """A run that has stopped after a stage, as requested.

    Attributes:
        output: folder of the run.
        stage: the stage after which it stopped, counted from 1.
        stages: number of stages of its recipe.
        checkpoint: checkpoint at the end of the stage.
        seconds: duration of this process.
    """

    output: Path
    stage: int
    stages: int
    checkpoint: Path
    seconds: float


def extend(
    recipe: Recipe, context: RunContext | None = None, resume: bool = False, from_stage: int | None = None
) -> RunResult:
    """Run a recipe: evaluate, change RoPE, train, evaluate again, and save.

    Args:
        recipe: recipe to run, from :func:`ropewalk.training.load_recipe`.
        context: processes and reporter; None runs this process alone and prints nothing. With several processes, take
            ``world`` from :func:`ropewalk.parallel.joined` and call this function in each process. All processes must
            share the file system of the output folder. The recipe sets output folder, device and dtype; those of the
            context are ignored.
        resume: whether to resume the run in ``recipe.output`` from its last checkpoint.
        from_stage: number of a stage to train again, at least 2 (stages count from 1). Training starts from the
            checkpoint at the end of the previous stage. Needs ``resume``. None resumes from the last checkpoint.

    Returns:
        The content of ``summary.json``. For example, ``model`` is the folder of the extended model, ``stages`` has the
            settings and results of each stage, and ``before`` and ``after`` have the evaluation results before and
            after training.

    Raises:
        RopewalkError: for invalid input, before anything is written. Also if the run fails later; such a run can be
            resumed.
    """
    with _begun(recipe, context, resume, StageRange(from_stage)) as (run, clock):
        return _finished(run, *_trained(run), clock)


def extend_until(
    recipe: Recipe,
    until_stage: int,
    context: RunContext | None = None,
    resume: bool = False,
    from_stage: int | None = None,
) -> StoppedRun:
    """Run a recipe up to the end of a stage; ``extend`` with ``resume`` goes on from its checkpoint.

    Args:
        recipe, context, resume, from_stage: as for :func:`extend`.
        until_stage: stage after which to stop, counted from 1.

    Raises:
        RopewalkError: as for :func:`extend`.
    """
    with _begun(recipe, context, resume, StageRange(from_stage, until_stage)) as (run, clock):
        last, _ = _trained(run)
        if last is None:
            raise RopewalkError(
                f"the run in {run.output} is complete and its checkpoints were deleted, so it cannot stop at a stage; "
                f"use the model in {run.output / 'model'}, or start a new run in another output folder"
            )
        stages = len(run.resolved.recipe.stages)
        return StoppedRun(run.output, until_stage, stages, last, time.perf_counter() - clock)


@contextmanager
def _begun(
    recipe: Recipe, context: RunContext | None, resume: bool, stages: StageRange
) -> Iterator[tuple[_Run, float]]:
    """Start or resume a run up to its training, and hold its folder until the end; also the time of the beginning."""
    clock = time.perf_counter()
    output = Path(recipe.output).expanduser()
    # Without the caller's mesh: the run chooses its own below.
    context = replace(context or RunContext(), output=output, mesh=None)
    world = context.world
    # Processes that torchrun restarts after a failure resume without --resume, and go on with what they have done.
    if world.on_rank_0(lambda: world.restarts > 0 and started_by(output) == launch()):
        resume, stages = True, replace(stages, first=None)
    with ExitStack() as held:
        # Only rank 0 takes the lock, because only rank 0 writes.
        world.on_rank_0(lambda: held.enter_context(locked(output, "give another output")))
        if note := world.on_rank_0(lambda: take_from_copy(output, recipe.checkpoints.copy_to, resume)):
            context.rank_0_reporter.note(note)
        # Under the lock: take_up removes temporary files, which another process might still be writing.
        start = world.on_rank_0(lambda: take_up(output, recipe, resume, stages))
        resolved = _resolved(start, context)
        contexts = [_on(each.mesh, resolved, context) for each in resolved.stages]
        context = _on(resolved.mesh, resolved, context)
        run = _prepared(start, resolved, context, contexts)
        before = measure("before", run.model, run.measurement, context)
        # Not needed any more: the first stage loads its own copy, and two would not fit.
        run = replace(run, model=None, before=before)
        yield run, clock


def _finished(run: _Run, last: Path | None, decisions: list[Decision], clock: float) -> RunResult:
    """Export and evaluate a run that has trained all stages."""
    resolved, context, before = run.resolved, run.context, run.before
    # After training, because short factors are searched on the final weights.
    method, short = _short_factors(run, last, decisions[-1].method)
    after = measure("after", _saved_model(run, last, method), run.measurement, context)
    # Short factors change the method of the last stage after its training; the summary names the exported one.
    methods = [*(each.method for each in decisions[:-1]), method]
    result = RunResult(
        output=run.output,
        model=run.output / MODEL,
        trained_length=resolved.trained_length,
        context=resolved.target,
        engine=resolved.engine,
        device=str(resolved.device),
        precision=resolved.precision,
        processes={"number": context.world.size, **asdict(resolved.mesh)},
        stages=tuple(
            _stage_summary(number, run, found, method)
            for number, (found, method) in enumerate(zip(decisions, methods, strict=True))
        ),
        short_factors=None if short is None else search_summary(short, factors_file(SHORT)),
        original_length=resolved.original_length,
        short_context=short_context(resolved.original_length, before, after),
        before=tuple(before),
        after=tuple(after),
        during=tuple(each.summary() for each in evaluated_during(run.output)),
        history=tuple(change.model_dump() for change in resolved.recipe.history),
        seconds=time.perf_counter() - clock,
        versions=versions(resolved),
        adapter=None if resolved.adapter is None else run.output / ADAPTER,
        exported=context.world.on_rank_0(lambda: read_exported_weights(run.output / MODEL)),
        source=context.world.on_rank_0(lambda: _source(run)),
    )
    if context.is_rank_0:
        write_json(run.output / SUMMARY, result.to_json())
    # No rank returns before the summary is on disk.
    context.world.barrier()
    return result


def _resolved(start: Start, context: RunContext) -> ResolvedRecipe:
    """The resolved recipe, with what rank 0 chooses for all, as the choices depend on a machine's memory."""
    recipe, world = start.recipe, context.world

    def choices() -> tuple[Meshes, list[Keeping | None]]:
        chosen = resolve(recipe, world, training=start.training)
        meshes = chosen.mesh, tuple(stage.mesh for stage in chosen.stages)
        return meshes, [stage.keeping for stage in chosen.stages]

    if world.size == 1:
        return resolve(recipe, world, training=start.training)
    meshes, keeping = world.on_rank_0(choices)
    return resolve(recipe, world, meshes).keeps(keeping)


def _on(mesh: MeshShape, resolved: ResolvedRecipe, context: RunContext) -> RunContext:
    """The context with its processes arranged as a mesh; every rank must call this function."""
    return context if context.world.size == 1 else context.on(make_mesh(mesh, resolved.device.type))


@dataclass(frozen=True, eq=False)
class _Run:
    """A run that has passed all checks.

    Attributes:
        resolved: the recipe.
        context: processes, output folder and reporter.
        contexts: the same for each stage, with the processes arranged as the stage requests.
        reached: progress so far.
        decisions: RoPE of the stages that have started.
        rows: packed rows of each stage; None for a stage without training.
        held_out: packed rows whose held-out documents the run evaluates on.
        measurement: evaluation before and after training.
        during: evaluation during each stage; None for a stage without.
        training: indices of the stages that this launch trains.
        model: the recipe's model if it has yet to be evaluated; otherwise None.
        before: results before training, once they are known.
    """

    resolved: ResolvedRecipe
    context: RunContext
    contexts: list[RunContext]
    reached: Reached
    decisions: list[Decision]
    rows: list[PackedRows | None]
    held_out: PackedRows | None
    measurement: Measurement
    during: list[Measurement | None]
    training: range
    model: Any
    before: Sequence[TaskResult] = ()

    @property
    def output(self) -> Path:
        """Folder of the run."""
        return folder_of(self.context)

    def at(self, weights: Path | None, number: int | None = None) -> AtStage:
        """State of the run at stage ``number``, or after the last stage if None, with weights of a checkpoint."""
        if number is None:
            return AtStage(self.resolved, self.context, weights, None, self.held_out)
        return AtStage(self.resolved, self.contexts[number], weights, self.rows[number], self.held_out)


def _prepared(
    start: Start, resolved: ResolvedRecipe, context: RunContext, contexts: list[RunContext]
) -> _Run:
    """Make all checks that can refuse the run, then move outdated results away and write the run's records."""
    world, output, reporter = context.world, folder_of(context), context.rank_0_reporter
    if start.resumed and world.restarts:
        reporter.note(f"restart {world.restarts} after a failure: the run resumes from its last checkpoint")
    for line in (*start.notes, *world.on_rank_0(lambda: announcement(resolved))):
        reporter.note(line)
    at = reached(output, start, world)
    # Steps missing from metrics.jsonl, which the user has accepted with metrics.lost.jsonl.
    if at.gap is not None:
        reporter.note(at.gap)
    # A resumed run with unchanged stages has its rows packed, and need not read a source again.
    if not start.resumed or start.others:
        world.on_rank_0(lambda: check_sources(resolved))
    lengths = world.on_rank_0(lambda: prompt_lengths(resolved, reporter))
    requested = requested_lengths(resolved, lengths)

    def known(when: str) -> bool:
        return evaluation_file(when) not in at.outdated and results_in(output, when, requested) is not None

    if at.position is not None:
        # Only for its check: a damaged file would otherwise fail the run when it writes its summary.
        world.on_rank_0(lambda: evaluated_during(output, at.position))
    # Both are read, so that damage to either is found now; only the first decides whether the model is needed.
    measured, _ = world.on_rank_0(lambda: [known(when) for when in ("before", "after")])
    # Load the model before packing, so that a checkpoint that cannot be loaded fails early.
    model = None if measured else load_for_run(resolved, context, resolved.model)
    decisions = world.on_rank_0(lambda: decisions_so_far(resolved, at, output))
    rows = _shared_rows(start, resolved, context)
    held_out = rows_with_validation(resolved.recipe, rows)
    documents = world.on_rank_0(lambda: validation_documents(resolved, held_out))
    measurement = Measurement(resolved, requested, documents)
    during = world.on_rank_0(lambda: _requested_during(resolved, reporter))
    parts = [
        None if each is None else Measurement(resolved, each, documents, n) for n, each in enumerate(during)
    ]
    run = _Run(
        resolved, context, contexts, at, decisions, rows, held_out, measurement, parts, start.training, model
    )
    world.on_rank_0(lambda: _check_stages(run))
    world.on_rank_0(lambda: _check_export(run))
    # Only after all checks: a run that is refused leaves its results where they were.
    moved = world.on_rank_0(lambda: set_aside(output, at.outdated, at.position))
    if moved is not None:
        reporter.note(f"{at.why}; the earlier results were moved to {moved}")
    if start.again is not None:
        # rope-choices.json holds the choices of all stages, so it cannot move away as a whole.
        after = start.again.stage + 1
        world.on_rank_0(lambda: forget_choices(output, after))
    world.on_rank_0(lambda: _write_start(start, run))
    return run


def _requested_during(resolved: ResolvedRecipe, reporter: Reporter) -> list[dict[str, list[int]] | None]:
    """Suites and lengths of the evaluations during each stage; None for a stage without."""
    requested: list[dict[str, list[int]] | None] = []
    for number, stage in enumerate(resolved.recipe.stages):
        if resolved.recipe.evaluation.every is None or not stage.steps:
            requested.append(None)
            continue
        found = requested_lengths(resolved, prompt_lengths(resolved, reporter, number), number)
        requested.append(found or None)
    if any(requested):
        reporter.note(describe_during(resolved, requested))
    return requested


def decisions_so_far(resolved: ResolvedRecipe, at: Reached, output: Path) -> list[Decision]:
    """RoPE of the stages that have started, from the run's folder or from the recipe.

    Raises:
        RopewalkError: if a decision is missing, or differs from the RoPE that the latest checkpoint was trained with.
    """
    if at.position is None:
        return []
    before = Before.first((resolved.rope, resolved.trained_length))
    decisions = []
    for number, stage in enumerate(resolved.recipe.stages[: at.position.stage + 1]):
        decision = settled(resolved, number, before, output, True)
        assert decision is not None
        if number == at.position.stage and at.checkpoint is not None:
            others = resolved.other_ropes[number]
            refuse_other_rope(at.checkpoint, decision.method, stage, number, others)
        decisions.append(decision)
        before = before.after(stage, decision.method)
    return decisions


def _check_stages(run: _Run) -> None:
    """Raise now if a stage, or the search after the last stage, would fail when the run reaches it."""
    trained = run.resolved.trained_length
    for number, stage in enumerate(run.resolved.recipe.stages):
        check_stage(number, trained, run.at(None, number), run.reached.outdated)
        trained = stage.context
    check_short_rows(run.at(None), run.reached.outdated)


def _check_export(run: _Run) -> None:
    """Raise now if the weights to export would be missing at the end."""
    last = run.during[-1]
    check_metric(run.resolved, None if last is None else last.asked)
    if not run.reached.exported:
        check_final_weights(run.output, run.resolved.recipe, run.reached.checkpoint)


def _write_start(start: Start, run: _Run) -> None:
    output, resolved = run.output, run.resolved
    write_run_inputs(output, run_inputs(resolved, run.rows, output, start.inputs))
    write_json(output / VERSIONS, versions(resolved))
    write_text(output / LAUNCH, launch())
    # After the other records: a folder that has a recipe counts as a run that has started.
    write_text(output / RECIPE, dump_recipe(resolved.recipe))
    for number, table in enumerate(resolved.tables):
        kept = output / factors_file(stage_name(number))
        # The copy made at the first start stays, because TableRope.check compares later files with it.
        if table is not None and not kept.is_file():
            write_factors(kept, table)


def _shared_rows(start: Start, resolved: ResolvedRecipe, context: RunContext) -> list[PackedRows | None]:
    """Packed rows of every stage; rank 0 packs them, and the other ranks open the same files."""
    # Filled on rank 0 alone: packed rows are memory maps, so the other ranks receive only their folders.
    there: list[PackedRows | None] = []

    def pack() -> list[str | None]:
        there.extend(all_rows(resolved, context, start.inputs, start.others))
        refuse_steps_without_targets(resolved, there)
        return [None if rows is None else str(rows.folder.resolve()) for rows in there]

    folders = context.world.on_rank_0(pack)
    if there:
        return there
    if missing := [folder for folder in folders if folder and not is_packed(Path(folder))]:
        raise RopewalkError(
            f"the folder of packed rows {missing[0]} is not visible on this machine; set output to a folder on a file "
            "system that all machines share"
        )
    return [None if folder is None else open_rows(Path(folder)) for folder in folders]


def versions(resolved: ResolvedRecipe) -> dict[str, str]:
    """Versions of the software, and the machine, on which a result depends."""
    device = resolved.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        **software_versions(),
        "platform": platform.platform(),
        "device": f"{device.type} {machine}",
        "processes": str(resolved.mesh.world_size),
        "threads": str(torch.get_num_threads()),
    }


def _trained(run: _Run) -> tuple[Path | None, list[Decision]]:
    """Run all stages that are not complete.

    Returns:
        The checkpoint of the last stage, None if it was deleted after the run; and the RoPE of each stage.
    """
    metrics = MetricsLog(run.output / METRICS)
    with ExitStack() as stack:
        if run.context.is_rank_0:
            recipe = run.resolved.recipe
            listener = tracking(
                recipe.trackers, run.output / "trackers", recipe.model_dump(mode="json", exclude={"history"})
            )
            metrics.listener = stack.enter_context(listener)
        return _train(run, metrics)


def _train(run: _Run, metrics: MetricsLog) -> tuple[Path | None, list[Decision]]:
    resolved, reporter, at = run.resolved, run.context.rank_0_reporter, run.reached
    # Steps after the checkpoint run again, and their lines must not stand in the log twice.
    if again := run.context.world.on_rank_0(lambda: metrics.rewind(at.done, run.output / EARLIER / METRICS)):
        reporter.note(again)
    # No checkpoint: either the run is new, or it is complete and its checkpoints were deleted.
    latest, done = at.checkpoint, at.position
    tokens = steps = 0
    before = Before.first((resolved.rope, resolved.trained_length))
    decisions = list(run.decisions)
    for number, stage in enumerate(resolved.recipe.stages[: run.training.stop]):
        here = run.at(latest, number)
        if number == len(decisions):
            decisions.append(decide(number, before, here))
        method = decisions[number].method
        before = before.after(stage, method)
        if done is None or (done.stage, done.step) < (number, stage.steps):
            inside = done is not None and done.stage == number
            if inside:
                reporter.note(f"resuming stage {number + 1} after step {done.step if done else 0}")
            latest = run_stage(
                StageRun(number, here, method, tokens, steps, inside, run.during[number]), metrics
            )
        # Counted for complete stages too: the next stage builds on both numbers.
        tokens += stage.steps * stage.rows_per_step * stage.context
        steps += stage.steps
    return latest, decisions


def _short_factors(run: _Run, last: Path | None, method: RopeMethod) -> tuple[RopeMethod, Factors | None]:
    """RoPE method of the result; if the recipe has short_context, with short factors searched on the final weights."""
    recipe = run.resolved.recipe
    if recipe.short_context is None:
        return method, None
    assert isinstance(method, LongRope)
    goal = goal_of(method, run.resolved.target, method.original_max_position_embeddings)
    search = FactorSearch(SHORT, SHORT_LABEL, goal, recipe.short_context, last)
    kept = run.context.world.on_rank_0(lambda: kept_factors(search, recipe, run.output, run.reached.exported))
    found = kept if kept is not None else search_factors(search, run.at(last))
    return goal.extended(candidate_of(found)), found


def _saved_model(run: _Run, last: Path | None, method: RopeMethod) -> Any:
    """Load the result from the run's folder, after exporting it if necessary."""
    resolved, context, final = run.resolved, run.context, run.output / MODEL
    rope = (method, resolved.target)
    if not run.reached.exported:
        assert last is not None
        weights, position = _final_weights(run, last)
        if resolved.adapter is not None:
            # Merging needs whole matrices, so rank 0 does it alone.
            context.world.on_rank_0(lambda: _export_adapter(run, weights, position, rope))
        else:
            _export_whole(run, weights, position, rope)
    # The exported folder is read back and measured, so that the scores are those of the files that users get.
    return load_for_run(resolved, context, str(final), rope, resolved.dtype)


def _export_whole(run: _Run, weights: FinalWeights, position: Position, rope: RopeAt) -> None:
    resolved, context = run.resolved, run.context
    model = load_for_run(
        resolved, context, resolved.model, rope, torch.float32, other_ropes=resolved.other_ropes[-1]
    )
    if len(weights.checkpoints) == 1:
        load_weights(weights.checkpoints[0], model, context.world, context.mesh)
    else:
        load_average(weights.checkpoints, model, context.world, context.mesh)
    final, made_of = run.output / MODEL, weights.record()
    # The float32 copy is freed at the return, before the exported model is loaded.
    export_model(model, final, resolved.tokenizer, context.world, resolved.dtype, position, made_of)


def _final_weights(run: _Run, last: Path) -> tuple[FinalWeights, Position]:
    """The checkpoints to export, and the progress of the run."""
    world = run.context.world
    found = world.on_rank_0(lambda: final_weights(run.output, run.resolved.recipe, last))
    check_whole(found, world)
    if (made_of := found.record()) is not None:
        run.context.rank_0_reporter.note(f"the result has the weights of {describe_weights(made_of)}")
    return found, world.on_rank_0(lambda: read_position(last))


def _export_adapter(run: _Run, weights: FinalWeights, position: Position, rope: RopeAt) -> None:
    resolved, alone = run.resolved, RunContext()
    others = resolved.other_ropes[-1]
    model = load_for_run(
        resolved, alone, resolved.model, rope, torch.float32, other_ropes=others, with_adapter=True
    )
    # Exactly one, because a recipe with an adapter cannot average.
    (checkpoint,) = weights.checkpoints
    load_weights(checkpoint, model, alone.world)
    export_adapter(
        model,
        run.output / ADAPTER,
        run.output / MODEL,
        resolved.tokenizer,
        resolved.dtype,
        resolved.target,
        model_digest(resolved.model),
        position,
        weights.record(),
    )


def _source(run: _Run) -> dict[str, Any]:
    """The model before the run, for the summary."""
    resolved = run.resolved
    chosen = resolved.recipe.model
    origin = origin_of(resolved.model, chosen if chosen in (EMBEDDED, RETRIEVAL) else None)
    rope = resolved.rope
    return {
        **asdict(origin),
        "sha256": read_run_inputs(run.output).model,
        "rope": {"method": rope.name, **rope.to_entry()},
    }


def _stage_summary(number: int, run: _Run, decision: Decision, method: RopeMethod) -> dict[str, Any]:
    engine = choices_in(run.output).get(number)
    stage, rows = run.resolved.recipe.stages[number], run.rows[number]
    ropes = run.resolved.other_ropes[number].items()
    others = {kind: {"method": rope.name, **rope.to_entry()} for kind, rope in ropes}
    found: dict[str, Any] = dict(decision.found)
    if isinstance(method, LongRope):
        found |= {
            "short_factor": list(method.short_factor),
            "long_factor": list(method.long_factor),
            "attention_factor": method.attention_factor,
        }
    return {
        "context": stage.context,
        "method": stage.rope.limiting.method,
        "rope_theta": method.rope_theta,
        **({"other_layers": others} if others else {}),
        **found,
        "pattern": stage.pattern,
        "positions": stage.positions,
        "steps": stage.steps,
        "tokens": stage.steps * stage.rows_per_step * stage.context,
        "rows": 0 if rows is None else len(rows),
        "mixture": None if rows is None else rows.manifest["mixture"],
        **({"own": own} if (own := stage.own_settings) else {}),
        **({} if engine is None else {"engine": engine.summary()}),
    }
