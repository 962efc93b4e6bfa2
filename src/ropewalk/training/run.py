"""extend: a whole run, from a recipe to an extended checkpoint with its measurements, resumable anywhere."""

from __future__ import annotations

import platform
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import PackedRows, open_rows
from ropewalk.data.rows.stored import is_packed
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_json, write_text
from ropewalk.io.lock import locked
from ropewalk.io.progress import Reporter
from ropewalk.parallel import World, make_mesh
from ropewalk.rope import LongRope, RopeMethod, methods_from_config
from ropewalk.search import Factors, goal_of, read_factors, write_factors
from ropewalk.training.announcement import announcement
from ropewalk.training.checkpoint.files import read_position
from ropewalk.training.checkpoint.sharded import export_model, load_weights
from ropewalk.training.context import Team
from ropewalk.training.documents import (
    all_rows,
    began_with,
    check_sources,
    rows_with_validation,
    validation_documents,
    write_began,
)
from ropewalk.training.measurement import (
    asked_for,
    evaluation_file,
    measure,
    passkey_lengths,
    results_in,
    short_context,
)
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.preflight import Plan, plan
from ropewalk.training.recipe.file import dump_recipe
from ropewalk.training.recipe.recipe import Recipe, Stage
from ropewalk.training.run_folder import (
    CHECKPOINTS,
    EARLIER,
    LAUNCH,
    METRICS,
    MODEL,
    RECIPE,
    SUMMARY,
    VERSIONS,
    Reached,
    Start,
    begun_by,
    launch,
    reached,
    set_aside,
    take_up,
)
from ropewalk.training.stage import StageRun, run_stage
from ropewalk.training.stage_rope.auto import Choice, choose_base
from ropewalk.training.stage_rope.methods import (
    AUTO,
    auto_candidates,
    origin_after,
    search_goals,
    stage_method,
)
from ropewalk.training.stage_rope.search import FactorSearch, candidate_of, search_summary, searched_factors
from ropewalk.training.stage_rope.search_data import (
    SHORT,
    SHORT_LABEL,
    check_materials,
    factors_file,
    stage_name,
)
from ropewalk.training.trackers import tracking
from ropewalk.versions import software_versions


def extend(
    recipe: Recipe, resume: bool = False, reporter: Reporter | None = None, world: World | None = None
) -> dict[str, Any]:
    """Run a recipe: measure, change RoPE, train, measure again, save.

    Args:
        recipe: what to do.
        resume: go on with the run that lies in ``recipe.output``, exactly where its last checkpoint was.
        reporter: where progress goes; nowhere if None.
        world: from :func:`ropewalk.parallel.joined`, where several processes run one recipe, each calling this; None
            for this process alone. They must share the file system that the output lies on.

    Returns:
        The summary that also lies in ``summary.json``: paths, stages, ``before`` and ``after`` results.

    Raises:
        RopewalkError: for bad input, before anything is written; a run that breaks off can be resumed.
    """
    world = world or World()
    reporter = Team(world).reporter(reporter)
    output = Path(recipe.output).expanduser()
    # Processes that torchrun starts again after a failure go on by themselves.
    resume = resume or world.lead(lambda: world.restarts > 0 and begun_by(output) == launch())
    with ExitStack() as held:
        # One process writes for all of them.
        world.lead(lambda: held.enter_context(locked(output, "give another output")))
        start = world.lead(lambda: take_up(output, recipe, resume))
        return _extend(start, output, reporter, world)


def _extend(start: Start, output: Path, reporter: Reporter, world: World) -> dict[str, Any]:
    """The run, in a folder that no other one writes to."""
    recipe = start.recipe
    # The mesh depends on the memory of the machine that is asked; one of several processes decides.
    mesh = world.lead(lambda: plan(recipe, world).mesh) if world.size > 1 else None
    chosen = plan(recipe, world, mesh)
    team = Team(world, make_mesh(chosen.mesh, chosen.device.type) if world.size > 1 else None)
    clock = time.perf_counter()
    if start.resumed and world.restarts:
        reporter.note(f"restart {world.restarts} after a failure: the run goes on from its last checkpoint")
    for line in (*start.told, *world.lead(lambda: announcement(recipe, chosen))):
        reporter.note(line)
    at = reached(output, start, world)
    if at.gap is not None:
        reporter.note(at.gap)
    if not start.resumed or start.others:
        world.lead(lambda: check_sources(recipe, chosen))
    prompt_lengths = world.lead(lambda: passkey_lengths(recipe, chosen, reporter))
    asked = asked_for(recipe, chosen, prompt_lengths)

    def known(when: str) -> bool:
        return evaluation_file(when) not in at.outdated and results_in(output, when, asked) is not None

    measured = world.lead(lambda: [known(when) for when in ("before", "after")])[0]
    # A checkpoint that cannot be loaded or measured is refused here, before its documents are packed.
    model = None if measured else team.load(chosen.model, recipe, chosen)
    rows = _shared_rows(start, chosen, output, team, reporter)
    held_out = rows_with_validation(recipe, rows)
    documents = world.lead(lambda: validation_documents(recipe, chosen, held_out))
    # The last that may be refused of a recipe, and then the results so far make room.
    world.lead(lambda: check_materials(recipe, chosen, rows, output, at.outdated))
    world.lead(lambda: _check_tables(recipe, chosen, output, at.outdated))
    moved = world.lead(lambda: set_aside(output, at.outdated, at.position))
    if moved is not None:
        reporter.note(f"{at.why}; the results so far are kept in {moved}")
    world.lead(lambda: _write_start(start, chosen, rows, output))
    before = measure("before", model, recipe, chosen, documents, prompt_lengths, output, reporter, team)
    del model
    metrics = MetricsLog(output / METRICS)
    with ExitStack() as stack:
        if team.leads:
            listener = tracking(recipe.trackers, output / "trackers", _flat(recipe))
            metrics.listener = stack.enter_context(listener)
        trained = _train(recipe, chosen, rows, output, at, metrics, reporter, team)
    final = output / MODEL
    context = recipe.stages[-1].context
    short = _short_factors(recipe, chosen, trained, held_out, output, at.exported, reporter, team)
    method = trained.methods[-1]
    if not at.exported:
        last = trained.last
        assert last is not None
        model = team.load(chosen.model, recipe, chosen, method, context, torch.float32)
        load_weights(last, model, world, team.mesh)
        position = world.lead(lambda: read_position(last))
        export_model(model, final, chosen.tokenizer, world, chosen.dtype, position)
        del model
    saved = team.load(str(final), recipe, chosen, method, context, chosen.dtype)
    after = measure("after", saved, recipe, chosen, documents, prompt_lengths, output, reporter, team)
    summary = {
        "output": str(output),
        "model": str(final),
        "trained_length": chosen.trained_length,
        "context": context,
        "engine": chosen.engine,
        "device": str(chosen.device),
        "precision": chosen.precision,
        "processes": {"number": world.size, **asdict(chosen.mesh)},
        "stages": [
            _stage_summary(number, recipe, trained, rows[number]) for number in range(len(recipe.stages))
        ],
        "short_factors": None if short is None else search_summary(short, factors_file(SHORT)),
        "original_length": chosen.original_length,
        "short_context": short_context(chosen.original_length, before, after),
        "before": [result.to_json() for result in before],
        "after": [result.to_json() for result in after],
        "history": [change.model_dump() for change in recipe.history],
        "seconds": time.perf_counter() - clock,
        "versions": versions(chosen),
    }
    if team.leads:
        write_json(output / SUMMARY, summary)
    world.barrier()
    return summary


def _short_factors(
    recipe: Recipe,
    chosen: Plan,
    trained: _Trained,
    held_out: PackedRows | None,
    output: Path,
    exported: bool,
    reporter: Reporter,
    team: Team,
) -> Factors | None:
    """Search the short factors on the final weights, if the recipe says so, and put them into the last method."""
    method, context = trained.methods[-1], recipe.stages[-1].context
    if recipe.short_context is None:
        return None
    assert isinstance(method, LongRope)
    goal = goal_of(method, context, method.original_max_position_embeddings)
    search = FactorSearch(SHORT, SHORT_LABEL, goal, recipe.short_context, trained.last)
    found = searched_factors(search, recipe, chosen, None, held_out, output, exported, reporter, team)
    trained.methods[-1] = goal.extended(candidate_of(found))
    return found


def _write_start(start: Start, chosen: Plan, rows: list[PackedRows | None], output: Path) -> None:
    recipe = start.recipe
    write_began(output, began_with(recipe, chosen, rows, output, start.began))
    write_json(output / VERSIONS, versions(chosen))
    write_text(output / LAUNCH, launch())
    write_text(output / RECIPE, dump_recipe(recipe))
    for number, table in enumerate(chosen.tables):
        kept = output / factors_file(stage_name(number))
        if table is not None and not kept.is_file():
            write_factors(kept, table)


def _check_tables(recipe: Recipe, chosen: Plan, output: Path, outdated: Collection[str]) -> None:
    """A resumed run must train with the factors that it began with."""
    for number, table in enumerate(chosen.tables):
        name = factors_file(stage_name(number))
        kept = output / name
        if table is None or name in outdated or not kept.is_file() or read_factors(kept) == table:
            continue
        raise RopewalkError(
            f"the factor table {recipe.stages[number].rope.factors} has changed since the run began with what lies in "
            f"{kept}; restore it, or start again"
        )


def _shared_rows(
    start: Start, chosen: Plan, output: Path, team: Team, reporter: Reporter
) -> list[PackedRows | None]:
    """The rows of every stage that trains: rank 0 packs them, and the others read the same files."""
    there: list[PackedRows | None] = []

    def pack() -> list[str | None]:
        there.extend(all_rows(start.recipe, chosen, output, start.began, reporter, start.others))
        return [None if rows is None else str(rows.folder.resolve()) for rows in there]

    folders = team.world.lead(pack)
    if there:
        return there
    if missing := [folder for folder in folders if folder and not is_packed(Path(folder))]:
        raise RopewalkError(
            f"{missing[0]}, where the packed rows are, is not to be seen from this machine; give an output on a file "
            "system that all machines share"
        )
    return [None if folder is None else open_rows(Path(folder)) for folder in folders]


def versions(plan: Plan) -> dict[str, str]:
    """Versions and machine that a result depends on."""
    device = plan.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        **software_versions(),
        "platform": platform.platform(),
        "device": f"{device.type} {machine}",
        "threads": str(torch.get_num_threads()),
    }


@dataclass(frozen=True)
class _Trained:
    """What all stages together have left.

    Attributes:
        last: checkpoint of the last stage; None where it was deleted after the run's end.
        methods: of each stage.
        choices: what ``auto`` stages chose, by the stage's number.
        searches: the factor tables that stages searched for.
    """

    last: Path | None
    methods: list[RopeMethod]
    choices: dict[int, Choice]
    searches: dict[int, Factors]


def _train(
    recipe: Recipe,
    chosen: Plan,
    rows: list[PackedRows | None],
    output: Path,
    at: Reached,
    metrics: MetricsLog,
    reporter: Reporter,
    team: Team,
) -> _Trained:
    """All stages that are not done yet."""
    folder = output / CHECKPOINTS
    latest, done = at.checkpoint, at.position
    if again := team.world.lead(lambda: metrics.rewind(at.done, output / EARLIER / METRICS)):
        reporter.note(again)
    tokens = steps = 0
    method, length = chosen.rope, chosen.trained_length
    origin = (method, length)
    methods: list[RopeMethod] = []
    choices: dict[int, Choice] = {}
    searches: dict[int, Factors] = {}
    for number, stage in enumerate(recipe.stages):
        begun = done is not None and done.stage >= number
        packed = rows[number]
        if stage.rope.method == AUTO:
            assert packed is not None
            candidates = auto_candidates(stage, method, length, number)
            choices[number] = choose_base(
                number,
                recipe,
                chosen,
                candidates,
                latest,
                length,
                packed,
                output,
                begun,
                reporter,
                team,
            )
            method = choices[number].method
        elif stage.rope.search is not None:
            checkpoint = (chosen.rope, chosen.trained_length)
            measured, goal = search_goals(stage, method, length, checkpoint, number)
            weights = latest if stage.rope.search.weights == "current" else None
            search = FactorSearch(
                stage_name(number), f"stage {number + 1}", measured, stage.rope.search, weights
            )
            validation = rows_with_validation(recipe, rows)
            searches[number] = searched_factors(
                search, recipe, chosen, packed, validation, output, begun, reporter, team
            )
            method = goal.extended(candidate_of(searches[number]))
        else:
            table = chosen.tables[number]
            method = stage_method(stage.rope, method, length, stage.context, origin, table)
        if done is not None and done.stage == number and latest is not None:
            trained_with = latest
            team.world.lead(lambda: _refuse_other_rope(trained_with, method, stage, number))  # noqa: B023
        origin = origin_after(stage, method, origin)
        methods.append(method)
        length = stage.context
        if done is None or (done.stage, done.step) < (number, stage.steps):
            inside = done is not None and done.stage == number
            if inside:
                reporter.note(f"resuming stage {number + 1} after step {done.step if done else 0}")
            run = StageRun(
                number=number,
                recipe=recipe,
                chosen=chosen,
                team=team,
                rope=method,
                rows=packed,
                checkpoints=folder,
                tokens_before=tokens,
                steps_before=steps,
            )
            latest = run_stage(run, metrics, reporter, latest, inside)
        tokens += stage.steps * stage.rows_per_step * stage.context
        steps += stage.steps
    return _Trained(latest, methods, choices, searches)


def _refuse_other_rope(checkpoint: Path, method: RopeMethod, stage: Stage, number: int) -> None:
    """A version of ropewalk that decides on another base than the one before must not train on with it.

    Shards hold no config, so nothing can be said of a checkpoint of several processes.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        return
    saved = methods_from_config(parse_json(path.read_text(encoding="utf-8"))).get(None)
    if saved is None:
        return
    there, here = (each.frequencies(stage.context).inv_freq for each in (saved, method))
    if there.shape != here.shape or not torch.allclose(there, here, rtol=1e-6, atol=0):
        raise RopewalkError(
            f"{checkpoint.name} was trained with {saved.name} of rope_theta {saved.rope_theta:.10g}, and "
            f"stages.{number}.rope comes to {method.name} of rope_theta {method.rope_theta:.10g} now; write "
            f"rope_theta: {saved.rope_theta:.10g} for the stage into the recipe and into the run's own {RECIPE}"
        )


def _stage_summary(number: int, recipe: Recipe, trained: _Trained, rows: PackedRows | None) -> dict[str, Any]:
    stage, method = recipe.stages[number], trained.methods[number]
    found: dict[str, Any] = {}
    if (choice := trained.choices.get(number)) is not None:
        found["choice"] = choice.to_json()
    if (table := trained.searches.get(number)) is not None:
        found["search"] = search_summary(table, factors_file(stage_name(number)))
    if isinstance(method, LongRope):
        found |= {
            "short_factor": list(method.short_factor),
            "long_factor": list(method.long_factor),
            "attention_factor": method.attention_factor,
        }
    return {
        "context": stage.context,
        "method": stage.rope.method,
        "rope_theta": method.rope_theta,
        **found,
        "pattern": stage.pattern,
        "positions": stage.positions,
        "steps": stage.steps,
        "tokens": stage.steps * stage.rows_per_step * stage.context,
        "rows": 0 if rows is None else len(rows),
        "mixture": None if rows is None else rows.manifest["mixture"],
    }


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Values that every tracker can store."""
    flat: dict[str, Any] = {}

    def visit(value: Any, key: str) -> None:
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in pairs:
                visit(item, f"{key}.{name}".lstrip("."))
        elif value is not None:
            flat[key] = value

    visit(recipe.model_dump(mode="json", exclude={"history"}), "")
    return flat
