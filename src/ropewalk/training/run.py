"""A whole run, from a recipe to an extended checkpoint with its evaluation; it can resume after any interruption.

A run is a list of steps, see :func:`_steps`; each has a builder below that says what it does and what decides it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest
from ropewalk.io.files import room_for, write_json
from ropewalk.io.settings import deciding
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.parameters import count_parameters
from ropewalk.models.softmax_scale import fold_softmax_scale
from ropewalk.parallel.context import RunContext
from ropewalk.planning.sizing.model_shape import MASTER_BYTES
from ropewalk.rope import LongRope
from ropewalk.runs import Runner, State, Step, Work, opened
from ropewalk.runs.store import EARLIER
from ropewalk.search import goal_of, write_factors
from ropewalk.search.data import SearchData
from ropewalk.training.checkpoint.adapter import export_adapter
from ropewalk.training.checkpoint.average import load_average
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    RECORD,
    Position,
    checkpoint_name,
    checkpoints_in,
    place_of,
    read_position,
)
from ropewalk.training.checkpoint.sharded import export_model, load_weights
from ropewalk.training.copied import refuse_other_copy, take_from_copy
from ropewalk.training.documents import ROWS, check_sources, rows_identity, trained_kinds
from ropewalk.training.final_weights import check_whole, describe_weights, final_weights
from ropewalk.training.folder import (
    ADAPTER,
    ADVICE,
    HOLDS,
    METRICS,
    MODEL,
    REPORT,
    SUMMARY,
    StageRange,
    refuse_folder,
)
from ropewalk.training.measurement import measure
from ropewalk.training.metrics import tracking
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe, RopeAt, load_for_run
from ropewalk.training.run_state import Run, rows_step, rows_steps, searched_of
from ropewalk.training.softmax_scale import choose_softmax_scale, describe_softmax_scale
from ropewalk.training.stage import StageRun, run_stage
from ropewalk.training.stage_engine import CHOICES as ENGINES
from ropewalk.training.stage_rope.auto import CHOICES as BASES
from ropewalk.training.stage_rope.base import as_json, factors_file, stage_name
from ropewalk.training.stage_rope.decide import decide, rope_identity
from ropewalk.training.stage_rope.search import (
    SCALE,
    SHORT,
    SHORT_LABEL,
    FactorSearch,
    candidate_of,
    rows_for_search,
    search_factors,
    search_summary,
    searches_of,
)
from ropewalk.training.summary import RunResult, StoppedRun, summary
from ropewalk.training.taking_up import (
    has_trained_all,
    refuse_too_little,
    resolved_run,
    set_aside,
    started,
    verified,
    write_start,
)


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
    with _taken_up(recipe, context, resume, StageRange(from_stage)) as run:
        run.runner.run(run.steps, run.todo)
        return summary(run)


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
    with _taken_up(recipe, context, resume, StageRange(from_stage, until_stage)) as run:
        run.runner.run(run.steps, run.todo, until=f"train-{until_stage}")
        last = run.output / CHECKPOINTS / run.runner.values[f"train-{until_stage}"]["checkpoint"]
        if not run.context.world.on_rank_0(last.is_dir):
            raise RopewalkError(
                f"the run in {run.output} is complete and its checkpoints were deleted, so it cannot stop at a stage; "
                f"use the model in {run.output / MODEL}, or start a new run in another output folder"
            )
        return StoppedRun(
            run.output, until_stage, len(run.recipe.stages), last, time.perf_counter() - run.clock
        )


@contextmanager
def _taken_up(recipe: Recipe, context: RunContext | None, resume: bool, stages: StageRange) -> Iterator[Run]:
    """Start or resume a run, and hold its folder until the end.

    All checks are made, rows are packed, and what will be made again is set aside; nothing else has moved before.
    """
    clock = time.perf_counter()
    output = Path(recipe.output).expanduser()
    # Without the caller's mesh: the run chooses its own below.
    context = replace(context or RunContext(), output=output, mesh=None)
    world, reporter, notes = context.world, context.rank_0_reporter, list[str]()

    def prepare() -> None:
        if note := take_from_copy(output, recipe.checkpoints.copy_to, resume):
            notes.append(note)
        refuse_folder(output, resume)

    with ExitStack() as held:
        # On rank 0 under the lock: another process might still be writing what looks like left-overs.
        store = held.enter_context(opened(output, HOLDS, world, None, ADVICE, prepare))
        world.on_rank_0(lambda: refuse_other_copy(store, recipe.checkpoints.copy_to))
        start = world.on_rank_0(lambda: started(store, recipe, resume, stages, world.restarts))
        for line in notes:
            reporter.note(line)
        run = resolved_run(recipe, context, Runner(store, world, reporter), start, clock)
        packing, run.steps = _steps(run)
        again = None if start.first is None else f"rope-{start.first}"
        run.todo = run.runner.survey([*packing, *run.steps], again)
        # Only now: a change that is refused is no change.
        for line in start.notes:
            reporter.note(line)
        done = verified(run)
        # Rows that are packed need no source again.
        if not all(run.todo.is_done(step.name) for step in packing):
            world.on_rank_0(lambda: check_sources(run.resolved))
        if run.todo.found["before"].state not in (State.DONE, State.WAITS):
            # Before packing, so that a checkpoint that cannot be loaded fails early.
            run.loaded.append(load_for_run(run.resolved, run.context, run.resolved.model))
        run.runner.run(packing, run.todo)
        refuse_too_little(run)
        if not has_trained_all(run) and (said := world.on_rank_0(lambda: _room_for_checkpoints(run))):
            reporter.note(said)
        # Only after all checks: a run that is refused leaves its results where they were.
        set_aside(run)
        world.on_rank_0(lambda: write_start(run))
        # Steps after the checkpoint run again, and their lines must not stand in the log twice.
        if again := world.on_rank_0(lambda: run.metrics.rewind(done, output / EARLIER / METRICS)):
            reporter.note(again)
        if context.is_rank_0 and not has_trained_all(run):
            plain = recipe.model_dump(mode="json")
            run.metrics.listener = held.enter_context(tracking(recipe.trackers, output / "trackers", plain))
        yield run


def _room_for_checkpoints(run: Run) -> str | None:
    """How much the checkpoints will take that are not there yet: weights and AdamW's moments; None if it is little."""
    if run.recipe.adapter is not None:
        return None
    there = len(list((run.output / CHECKPOINTS).glob("*-step*")))
    # One more than are kept, because the oldest goes when the newest is complete.
    waiting = max(1, run.recipe.checkpoints.keep + 1 - there)
    parameters = count_parameters(read_model_config(run.resolved.model)) or 0
    size = 3 * MASTER_BYTES * parameters
    return room_for(run.output, waiting * size, f"{waiting} checkpoints of {size / 1e9:,.3g} GB each")


def _steps(run: Run) -> tuple[list[Step], list[Step]]:
    """All that a run does, in order: what decides its documents, and what follows."""
    stages = range(len(run.recipe.stages))
    packing = [
        _rows(run, number, name != rows_step(number))
        for number in stages
        for name in rows_steps(run.recipe, number)
    ]
    training = [step for number in stages for step in (_rope(run, number), _train(run, number))]
    short = [_short(run)] if run.recipe.short_context is not None else []
    short += [_scale(run)] if run.recipe.stages[-1].rope.softmax_scale is not None else []
    return (
        [*packing, _held_out(run)],
        [_evaluation(run, "before"), *training, *short, _model(run), _evaluation(run, "after")],
    )


def _rows(run: Run, number: int, short: bool) -> Step:
    """Pack the rows of a stage, or its short rows, or find those that the recipe names."""

    def body(work: Work) -> Any:
        work.kept(ROWS)
        return run.context.world.on_rank_0(lambda: run.pack(number, work.before, short))

    return Step(rows_step(number, short), lambda: rows_identity(run.resolved, number, short), (), body)


def _held_out(run: Run) -> Step:
    """Split the texts of evaluations and searches, once: what a search measures on, no evaluation ever reads."""
    splits = run.splits

    def body(work: Work) -> Any:
        found = list(work.before["searches"]) if work.before else []
        wanted = searches_of(run.resolved)
        for split in splits[len(found) :]:
            name = split["search"]
            number = next((n for n in range(len(run.recipe.stages)) if stage_name(n) == name), None)
            at = run.at(number, searched=searched_of(found))

            # A search that the recipe asked for once, and no longer does, needs no text.
            split_off = (
                partial(rows_for_search, wanted[name], at) if name in wanted else partial(SearchData, [])
            )
            data = run.context.world.on_rank_0(split_off)
            found.append({"search": name, "sha256": data.sha256, "documents": sorted(data.documents)})
        return {"searches": found}

    return Step("held-out", run.held_out_identity, (), body, goal=splits)


def _evaluation(run: Run, when: str) -> Step:
    """Evaluate the recipe's model before training, or the exported model after it."""
    resolved, recipe, context = run.resolved, run.recipe, run.context
    evaluated = {
        **deciding(recipe, ELSEWHERE),
        "precision": resolved.precision,
        "evaluation": deciding(recipe.evaluation, ("every", "during")),
        "lengths": run.asked,
    }

    def before(work: Work) -> None:
        # Loaded before packing unless the rows had to tell first whether the evaluation is needed at all.
        model = run.loaded.pop() if run.loaded else load_for_run(resolved, context, resolved.model)
        measure(when, model, run.measurement(), context, work)

    def after(work: Work) -> None:
        for name in (SUMMARY, *REPORT):
            work.kept(name)
        # The exported folder is read back and measured, so that the scores are those of the files that users get.
        rope = run.exported_method(), resolved.reach
        model = load_for_run(resolved, context, str(run.output / MODEL), rope, resolved.dtype)
        measure(when, model, run.measurement(), context, work)

    if when == "before":
        return Step(when, lambda: {"model": run.model, **evaluated}, ("held-out",), before)
    return Step(when, lambda: evaluated, ("held-out", MODEL), after)


def _rope(run: Run, number: int) -> Step:
    """Decide the RoPE of a stage: as the recipe gives it, by a search, or by comparing bases."""
    resolved, stage = run.resolved, run.recipe.stages[number]
    rope, name, table = stage.rope.limiting, f"rope-{number + 1}", resolved.tables[number]
    earlier = (f"rope-{number}", f"train-{number}") if number else ()
    inputs = (*earlier, rows_step(number)) if rope.measured and stage.steps else earlier

    def identity() -> Mapping[str, Any]:
        before = run.before(number)
        if before is None:
            # What comes first is not decided again yet, and its result then decides here.
            record = run.runner.store.record(name)
            return {} if record is None else record.identity
        found = rope_identity(run.recipe, number, before, table)
        others = {kind: as_json(method) for kind, method in resolved.other_ropes[number].items()}
        found |= {"other_layers": others} if others else {}
        decided = {"stages": {str(number): {"rope": found}}}
        if not rope.measured:
            return decided
        precision = resolved.stages[number].precision
        split = run.split(stage_name(number)) if rope.search is not None else None
        # Of the held-out text, only what was searched on: more text for the evaluation changes nothing about a search.
        return {**decided, **run.held_out_identity(), "precision": precision, **(split or {})}

    def body(work: Work) -> Any:
        if rope.search is not None or table is not None:
            path = work.file(factors_file(stage_name(number)))
            if rope.search is not None:
                work.kept(path.with_suffix(".jsonl").name)
            elif table is not None:
                run.context.world.on_rank_0(partial(write_factors, path, table))
        before = run.before(number)
        assert before is not None
        start = run.end_of(number - 1) if number else None
        decision = decide(
            number, before, run.at(number, start) if rope.measured else run.without_rows(number, start)
        )
        if rope.method == "auto":
            work.kept(BASES)
            made = [*run.decisions()[:number], decision]
            choices = [each.found["choice"] for each in made if "choice" in each.found]
            run.context.world.on_rank_0(lambda: write_json(run.output / BASES, choices))
        return decision.to_json()

    precious = rope.measured and run.has_trained(number)
    return Step(name, identity, inputs, body, precious=precious, why=_ways_on(number), decides=_method)


def _train(run: Run, number: int) -> Step:
    """Train a stage, to a checkpoint at its context; with 0 steps only its RoPE changes."""
    resolved, recipe, name = run.resolved, run.recipe, f"train-{number + 1}"
    stage, settings = recipe.stages[number], resolved.stages[number].settings

    def identity() -> Mapping[str, Any]:
        own = deciding(stage, ("rope", "data", "precision", "seed"))
        # In the keys of the recipe; seed and precision are what they come to.
        found = {"model": run.model, **deciding(recipe, ELSEWHERE), "stages": {str(number): own}}
        found |= {"seed": settings.seed, "precision": resolved.stages[number].precision}
        record = run.runner.store.record(name)
        began = None if record is None else record.identity.get("evaluation")
        measures = run.during[number] is not None
        # Evaluations during training may begin and end at any step, but must be comparable with each other.
        if (measures and record is None) or began is not None:
            own_evaluation = deciding(recipe.evaluation.in_training(), ("during",))
            found["evaluation"] = own_evaluation if measures else began
        return found

    def reached() -> int:
        there = checkpoints_in(run.output / CHECKPOINTS)
        at, step = place_of(there[-1]) if there else (-1, -1)
        return stage.steps if at > number else step if at == number else -1

    def body(work: Work) -> Any:
        for each in (METRICS, ENGINES):
            work.kept(each)
        place = None if run.checkpoint is None else place_of(run.checkpoint)
        if place is None or place < (number, stage.steps):
            inside = place is not None and place[0] == number
            if place is not None and inside:
                run.context.rank_0_reporter.note(f"resuming stage {number + 1} after step {place[1]}")
            earlier = recipe.stages[:number]
            tokens = sum(each.steps * each.rows_per_step * each.context for each in earlier)
            steps = sum(each.steps for each in earlier)
            method, at = run.decisions()[number].method, run.at(number, run.checkpoint)
            measured = None if run.during[number] is None else run.measurement(number)
            run.checkpoint = run_stage(
                StageRun(number, at, method, tokens, steps, inside, measured), run.metrics
            )
        end = run.output / CHECKPOINTS / checkpoint_name(Position(number, stage.steps, 0))
        rows = None if stage.short_rows is None else run.training_rows(number)

        def value() -> dict[str, Any]:
            kinds = {} if rows is None else {"kinds": trained_kinds(resolved, number, rows)}
            return {**_checkpoint(end), **kinds}

        return run.context.world.on_rank_0(value)

    earlier = (f"train-{number}",) if number else ()
    inputs = (*rows_steps(recipe, number), *earlier, f"rope-{number + 1}")
    precious = run.has_trained(number)
    return Step(name, identity, inputs, body, stage.steps, reached, precious, _ways_on(number))


def _ways_on(number: int) -> str:
    """What a user can do whose recipe does not fit what a stage began with."""
    again = f", or train the stage again with --resume --from-stage {number + 1}" if number else ""
    return (
        f"either restore the values with which stage {number + 1} began, or start a new run in another output "
        f"folder{again}"
    )


def _method(value: Mapping[str, Any]) -> Any:
    """What training and export use of a decision; how it was found, and its table, say how long a search took."""
    return value["method"]


def _short(run: Run) -> Step:
    """Search LongRoPE's short factors, on the final weights."""
    recipe, last = run.recipe, len(run.recipe.stages)
    settings = recipe.short_context
    assert settings is not None

    def identity() -> Mapping[str, Any]:
        precision = run.resolved.stages[-1].precision
        wanted = {"short_context": deciding(settings), "seed": recipe.seed, "precision": precision}
        return {**wanted, **(run.split(SHORT) or {})}

    def body(work: Work) -> Any:
        method = run.decisions()[-1].method
        assert isinstance(method, LongRope)
        goal = goal_of(method, run.resolved.target, method.original_max_position_embeddings)
        path = work.file(factors_file(SHORT))
        work.kept(path.with_suffix(".jsonl").name)
        search = FactorSearch(SHORT, SHORT_LABEL, goal, settings, run.end_of(last - 1))
        found = search_factors(search, run.at(None, run.end_of(last - 1)))
        with_short = goal.extended(candidate_of(found))
        return {"method": as_json(with_short), "found": search_summary(found, path.name)}

    return Step(SHORT, identity, (f"rope-{last}", f"train-{last}"), body, decides=_method)


def _scale(run: Run) -> Step:
    """Measure softmax scales, on the final weights."""
    recipe, last = run.recipe, len(run.recipe.stages)
    settings = recipe.stages[-1].rope.softmax_scale
    assert settings is not None

    def identity() -> Mapping[str, Any]:
        precision = run.resolved.stages[-1].precision
        return {"softmax_scale": deciding(settings), "precision": precision, **(run.split(SCALE) or {})}

    def body(work: Work) -> Any:
        wanted, rope = searches_of(run.resolved)[SCALE], (run.exported_method(), run.resolved.reach)
        found = choose_softmax_scale(settings, wanted, rope, run.at(None, run.end_of(last - 1)))
        run.context.rank_0_reporter.note(f"softmax scale {describe_softmax_scale(found)}")
        return found

    return Step(SCALE, identity, (f"rope-{last}", f"train-{last}"), body)


def _model(run: Run) -> Step:
    """Export the model, and the adapter if the run trained one."""
    resolved, recipe, context, last = run.resolved, run.recipe, run.context, len(run.recipe.stages)
    short = [SHORT] if recipe.short_context is not None else []
    short += [SCALE] if recipe.stages[-1].rope.softmax_scale is not None else []

    def body(work: Work) -> Any:
        # Registered now: what is there of a killed process belongs to this step.
        final = work.file(MODEL)
        if resolved.adapter is not None:
            work.file(ADAPTER)
        end = run.end_of(last - 1)
        weights = context.world.on_rank_0(lambda: final_weights(run.output, recipe, end))
        check_whole(weights, context.world)
        if (made_of := weights.record()) is not None:
            context.rank_0_reporter.note(f"the result has the weights of {describe_weights(made_of)}")
        position = context.world.on_rank_0(lambda: read_position(end))
        rope = run.exported_method(), resolved.reach
        if not rope[0].rotates:
            context.rank_0_reporter.note(_reach_without_rope(resolved))
        if resolved.adapter is not None:
            # Merging needs whole matrices, so rank 0 does it alone.
            (checkpoint,) = weights.checkpoints
            context.world.on_rank_0(lambda: _export_adapter(run, checkpoint, position, rope, made_of))
        else:
            _export_whole(run, final, weights.checkpoints, position, rope, made_of)
        return {"weights": made_of}

    inputs = (f"rope-{last}", f"train-{last}", *short)
    return Step(MODEL, lambda: {"export": recipe.export.model_dump(mode="json")}, inputs, body)


def _reach_without_rope(resolved: ResolvedRecipe) -> str:
    why = "the longest length that the run measures"
    if resolved.reach == resolved.target:
        why = (
            "the context of the last stage, since the run measures no longer one (evaluation.lengths names lengths "
            "for perplexity and prompts)"
        )
    return f"the result has no RoPE; its config states max_position_embeddings {resolved.reach:,}, {why}"


ELSEWHERE = frozenset(Recipe.model_fields) - {"lift", "adapter", "exact_rope", "trust_remote_code", "seed"}
"""Keys of a recipe that steps compare by sections of their own."""


def _checkpoint(path: Path) -> dict[str, Any]:
    """Which checkpoint a stage ended with: its record has the digests of its files."""
    read_position(path)
    return {"checkpoint": path.name, "digest": FileDigest.of(path / RECORD).sha256}


def _export_whole(
    run: Run,
    final: Path,
    checkpoints: tuple[Path, ...],
    position: Position,
    rope: RopeAt,
    made_of: Mapping[str, Any] | None,
) -> None:
    resolved, context = run.resolved, run.context
    model = load_for_run(
        resolved, context, resolved.model, rope, torch.float32, other_ropes=resolved.other_ropes[-1]
    )
    if len(checkpoints) == 1:
        load_weights(checkpoints[0], model, context.world, context.mesh)
    else:
        load_average(checkpoints, model, context.world, context.mesh)
    if SCALE in run.runner.values:
        fold_softmax_scale(model.model, run.runner.values[SCALE]["scale"])
    # The float32 copy is freed at the return, before the exported model is loaded.
    export_model(model, final, resolved.tokenizer, context.world, resolved.dtype, position, made_of)


def _export_adapter(
    run: Run, checkpoint: Path, position: Position, rope: RopeAt, made_of: Mapping[str, Any] | None
) -> None:
    resolved, alone = run.resolved, RunContext()
    others = resolved.other_ropes[-1]
    model = load_for_run(
        resolved, alone, resolved.model, rope, torch.float32, other_ropes=others, with_adapter=True
    )
    load_weights(checkpoint, model, alone.world)
    export_adapter(
        model,
        run.output / ADAPTER,
        run.output / MODEL,
        resolved.tokenizer,
        resolved.dtype,
        resolved.reach,
        model_digest(resolved.model),
        position,
        made_of,
    )
