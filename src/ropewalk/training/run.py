"""extend: a whole run, from a recipe to an extended checkpoint with its measurements, resumable anywhere."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import PackedRows, open_rows
from ropewalk.data.rows import is_packed
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import Settings, Subject, TaskResult, evaluate
from ropewalk.evaluation.passkey import PasskeyTask
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.sharded import evaluate_sharded
from ropewalk.files import write_json, write_text
from ropewalk.integrations.losses import LossModel
from ropewalk.integrations.trackers import tracking
from ropewalk.parallel import World, make_mesh
from ropewalk.rope import RopeMethod
from ropewalk.training.checkpoint_files import latest_whole, read_position
from ropewalk.training.choice import Choice, choose_base
from ropewalk.training.documents import ROWS, all_rows, rows_record, validation_documents
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.preflight import Plan, plan
from ropewalk.training.recipe import Recipe, Stage
from ropewalk.training.recipe_file import changed_keys, dump_recipe, parse_recipe
from ropewalk.training.reporter import Reporter
from ropewalk.training.ropes import AUTO, auto_candidates, stage_method
from ropewalk.training.sharded_checkpoint import export_model, load_weights
from ropewalk.training.stage import StageRun, run_stage
from ropewalk.training.step import autocast
from ropewalk.training.team import Team
from ropewalk.versions import software_versions

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
LAUNCH = ".launch"
PREPARED = {"data", ROWS, "versions.json", LAUNCH}
"""What may lie in an output folder before a run has begun: the recipe is written last of all preparations."""


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
    resume = resume or world.lead(lambda: world.restarts > 0 and _begun_by(output) == _launch())
    world.lead(lambda: _check_output(output, recipe, resume))
    # The mesh depends on the memory of the machine that is asked; one of them decides.
    mesh = world.lead(lambda: plan(recipe, world).mesh)
    chosen = plan(recipe, world, mesh)
    team = Team(world, make_mesh(chosen.mesh, chosen.device.type) if world.size > 1 else None)
    began = time.perf_counter()
    if resume and world.restarts:
        reporter.note(f"restart {world.restarts} after a failure: the run goes on from its last checkpoint")
    for line in _announcement(recipe, chosen):
        reporter.note(line)
    measured = world.lead(lambda: (output / _evaluation_file("before")).is_file())
    # A checkpoint that cannot be loaded or measured is refused here, before its documents are packed.
    model = None if measured else team.load(chosen.model, recipe, chosen)
    rows = _shared_rows(recipe, chosen, output, resume, team, reporter)
    documents = world.lead(lambda: validation_documents(recipe, chosen, rows[-1]))
    passkey_lengths = world.lead(lambda: _passkey_lengths(recipe, chosen, reporter))
    world.lead(lambda: _write_start(recipe, chosen, rows, output))
    before = _measure("before", model, recipe, chosen, documents, passkey_lengths, output, reporter, team)
    del model
    metrics = MetricsLog(output / METRICS)
    with ExitStack() as stack:
        if team.leads:
            listener = tracking(recipe.trackers, output / "trackers", _flat(recipe))
            metrics.listener = stack.enter_context(listener)
        last, methods, choices = _train(recipe, chosen, rows, output, metrics, reporter, team)
    final = output / MODEL
    context = recipe.stages[-1].context
    if not world.lead((final / "config.json").is_file):
        trained = team.load(chosen.model, recipe, chosen, methods[-1], context, torch.float32)
        load_weights(last, trained, world, team.mesh)
        export_model(trained, final, chosen.tokenizer, world, chosen.dtype)
        del trained
    saved = team.load(str(final), recipe, chosen, methods[-1], context, chosen.dtype)
    after = _measure("after", saved, recipe, chosen, documents, passkey_lengths, output, reporter, team)
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
            _stage_summary(stage, methods[number], rows[number], choices.get(number))
            for number, stage in enumerate(recipe.stages)
        ],
        "before": [result.to_json() for result in before],
        "after": [result.to_json() for result in after],
        "seconds": time.perf_counter() - began,
        "versions": versions(chosen),
    }
    if team.leads:
        write_json(output / SUMMARY, summary)
    world.barrier()
    return summary


def _launch() -> str:
    """Which torchrun has started this process: its run id, and its own process."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


def _begun_by(output: Path) -> str | None:
    """The launch that began or took up the run in a folder: a restart must not go on with another's."""
    path = output / LAUNCH
    return path.read_text(encoding="utf-8") if path.is_file() and (output / RECIPE).is_file() else None


def _write_start(recipe: Recipe, chosen: Plan, rows: list[PackedRows], output: Path) -> None:
    write_json(output / ROWS, rows_record(recipe, rows))
    write_json(output / "versions.json", versions(chosen))
    write_text(output / LAUNCH, _launch())
    write_text(output / RECIPE, dump_recipe(recipe))


def _shared_rows(
    recipe: Recipe, chosen: Plan, output: Path, resume: bool, team: Team, reporter: Reporter
) -> list[PackedRows]:
    """The rows of every stage: rank 0 packs them, and the others read the same files."""
    there: list[PackedRows] = []

    def pack() -> list[str]:
        there.extend(all_rows(recipe, chosen, output, resume, reporter))
        return [str(rows.folder.resolve()) for rows in there]

    folders = team.world.lead(pack)
    if there:
        return there
    if missing := [folder for folder in folders if not is_packed(Path(folder))]:
        raise RopewalkError(
            f"{missing[0]}, where the packed rows are, is not to be seen from this machine; give an output on a file "
            "system that all machines share"
        )
    return [open_rows(Path(folder)) for folder in folders]


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


def _check_output(output: Path, recipe: Recipe, resume: bool) -> None:
    saved = output / RECIPE
    if resume:
        if not saved.is_file():
            raise RopewalkError(f"nothing to resume in {output}: it holds no {RECIPE}")
        changed = changed_keys(parse_recipe(saved.read_text(encoding="utf-8"), str(saved)), recipe)
        if changed:
            raise RopewalkError(
                f"the recipe differs from the run in {output} in {', '.join(changed[:5])}; a resumed run must be "
                "the same run: restore the recipe, or give another output"
            )
    elif output.is_dir() and {entry.name for entry in output.iterdir()} - PREPARED:
        raise RopewalkError(
            f"output folder {output} is not empty; add --resume to go on with it, or give another"
        )
    elif output.exists() and not output.is_dir():
        raise RopewalkError(f"output {output} is a file; give a folder")


def _announcement(recipe: Recipe, chosen: Plan) -> list[str]:
    told = " (auto)" if recipe.engine == "auto" else ""
    lines = [
        f"model {chosen.model}, trained for {chosen.trained_length} tokens",
        f"attention engine {chosen.engine}{told} on {chosen.device}, {chosen.precision}",
    ]
    if chosen.mesh.world_size > 1:
        told = " (auto)" if recipe.parallel == "auto" else ""
        lines.append(f"{chosen.mesh.world_size} processes: {chosen.mesh}{told}")
    for number, (stage, method) in enumerate(zip(recipe.stages, chosen.methods, strict=True), start=1):
        base = "a base yet to be chosen" if method is None else f"rope_theta {method.rope_theta:,.0f}"
        lines.append(
            f"stage {number}: {stage.context} tokens, {stage.rope.method} with {base}, "
            f"pattern {stage.pattern}, positions {stage.positions}, {stage.steps} steps of {stage.rows_per_step} rows"
        )
    return lines


def _evaluation_file(when: str) -> str:
    return f"evaluation-{when}.json"


def _measure(
    when: str,
    model: LossModel | None,
    recipe: Recipe,
    chosen: Plan,
    documents: list[Ids],
    passkey_lengths: list[int],
    output: Path,
    reporter: Reporter,
    team: Team,
) -> list[TaskResult]:
    """Evaluate once; a resumed run finds the results on disk, and needs no model then."""
    path = output / _evaluation_file(when)
    known = team.world.lead(lambda: path.read_text(encoding="utf-8") if path.is_file() else None)
    if known is not None:
        return [TaskResult.from_json(entry) for entry in json.loads(known)]
    # Where no passkey prompt fits, the suite is left out, and that was said.
    suites = tuple(each for each in recipe.evaluation.suites if each != "passkey" or passkey_lengths)
    if not suites:
        return []
    settings = Settings(
        suites=suites,
        lengths={"perplexity": [recipe.stages[-1].context], "passkey": passkey_lengths},
        samples=recipe.evaluation.samples,
        seed=recipe.seed,
        rows=recipe.evaluation.rows,
        trained_length=chosen.trained_length,
        # Before its extension the model is measured beyond what it was made for.
        beyond_config=True,
    )
    assert model is not None
    sharded = team.mesh is not None
    with (
        reporter.bar(f"evaluation {when}", None) as advance,
        autocast(chosen.device, chosen.precision, sharded),
    ):

        def progress(what: str, done: int, total: int) -> None:
            advance(done, f"{what} {done}/{total}")

        if team.mesh is None:
            subject = Subject.in_memory(model.model, chosen.tokenizer)
            results = evaluate(subject, settings, documents, progress=progress)
        else:
            results = evaluate_sharded(
                model, chosen.tokenizer, settings, documents, team.mesh, progress, team.world
            )
    if team.leads:
        write_json(path, [result.to_json() for result in results])
    return results


def _passkey_lengths(recipe: Recipe, chosen: Plan, reporter: Reporter) -> list[int]:
    """The lengths asked for; else the trained length and the target, where a prompt fits into them."""
    if "passkey" not in recipe.evaluation.suites:
        return []
    if recipe.evaluation.lengths is not None:
        return recipe.evaluation.lengths
    lengths = []
    for length in (chosen.trained_length, recipe.stages[-1].context):
        try:
            encoder = PromptEncoder(chosen.tokenizer)
            PasskeyTask().samples(encoder, length, recipe.evaluation.samples, recipe.seed)
        except RopewalkError as error:
            reporter.note(f"passkey is not run at {length} tokens: {error}")
        else:
            lengths.append(length)
    return lengths


def _train(
    recipe: Recipe,
    chosen: Plan,
    rows: list[PackedRows],
    output: Path,
    metrics: MetricsLog,
    reporter: Reporter,
    team: Team,
) -> tuple[Path, list[RopeMethod], dict[int, Choice]]:
    """All stages that are not done yet; the last checkpoint, each stage's method, and what ``auto`` stages chose."""
    folder = output / CHECKPOINTS
    latest = latest_whole(folder, team.world)
    done = None if latest is None else read_position(latest)
    if team.leads:
        metrics.rewind(done.stage if done else 0, done.step if done else 0)
    tokens = steps = 0
    method, length = chosen.rope, chosen.trained_length
    methods: list[RopeMethod] = []
    choices: dict[int, Choice] = {}
    for number, stage in enumerate(recipe.stages):
        begun = done is not None and done.stage >= number
        if stage.rope.method == AUTO:
            candidates = auto_candidates(stage, method, length, number)
            choices[number] = choose_base(
                number,
                recipe,
                chosen,
                candidates,
                latest,
                length,
                rows[number],
                output,
                begun,
                reporter,
                team,
            )
            method = choices[number].method
        else:
            method = stage_method(stage.rope, method, length, stage.context)
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
                rows=rows[number],
                checkpoints=folder,
                tokens_before=tokens,
                steps_before=steps,
            )
            latest = run_stage(run, metrics, reporter, latest, inside)
        tokens += stage.steps * stage.rows_per_step * stage.context
        steps += stage.steps
    assert latest is not None
    return latest, methods, choices


def _stage_summary(
    stage: Stage, method: RopeMethod, rows: PackedRows, choice: Choice | None
) -> dict[str, Any]:
    return {
        "context": stage.context,
        "method": stage.rope.method,
        "rope_theta": method.rope_theta,
        **({} if choice is None else {"choice": choice.to_json()}),
        "pattern": stage.pattern,
        "positions": stage.positions,
        "steps": stage.steps,
        "tokens": stage.steps * stage.rows_per_step * stage.context,
        "rows": len(rows),
        "mixture": rows.manifest["mixture"],
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

    visit(recipe.model_dump(mode="json"), "")
    return flat
