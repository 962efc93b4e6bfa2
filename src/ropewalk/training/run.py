"""extend: a whole run, from a recipe to an extended checkpoint with its measurements, resumable anywhere."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import PackedRows
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import Settings, Subject, TaskResult, evaluate
from ropewalk.evaluation.passkey import PasskeyTask
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.rows import Ids
from ropewalk.files import new_folder, write_json, write_text
from ropewalk.integrations.losses import OutputHead
from ropewalk.integrations.models import load_model, save_model
from ropewalk.integrations.trackers import tracking
from ropewalk.rope import RopeMethod
from ropewalk.training.checkpoint import checkpoints_in, read_position
from ropewalk.training.choice import Choice, choose_base
from ropewalk.training.documents import ROWS, all_rows, rows_record, validation_documents
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.preflight import Plan, plan
from ropewalk.training.recipe import Recipe, Stage
from ropewalk.training.recipe_file import changed_keys, dump_recipe, parse_recipe
from ropewalk.training.reporter import Reporter, Silent
from ropewalk.training.ropes import AUTO, auto_candidates, stage_method
from ropewalk.training.stage import StageRun, run_stage
from ropewalk.training.step import autocast
from ropewalk.versions import software_versions

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
PREPARED = {"data", ROWS, "versions.json"}
"""What may lie in an output folder before a run has begun: the recipe is written last of all preparations."""


def extend(recipe: Recipe, resume: bool = False, reporter: Reporter | None = None) -> dict[str, Any]:
    """Run a recipe: measure, change RoPE, train, measure again, save.

    Args:
        recipe: what to do.
        resume: go on with the run that lies in ``recipe.output``, exactly where its last checkpoint was.
        reporter: where progress goes; nowhere if None.

    Returns:
        The summary that also lies in ``summary.json``: paths, stages, ``before`` and ``after`` results.

    Raises:
        RopewalkError: for bad input, before anything is written; a run that breaks off can be resumed.
    """
    reporter = reporter or Silent()
    output = Path(recipe.output).expanduser()
    _check_output(output, recipe, resume)
    chosen = plan(recipe)
    began = time.perf_counter()
    for line in _announcement(recipe, chosen):
        reporter.note(line)
    measured = (output / _evaluation_file("before")).is_file()
    # A checkpoint that cannot be loaded or measured is refused here, before its documents are packed.
    model = None if measured else _load(chosen.model, recipe, chosen)
    if model is not None:
        OutputHead.of(model)
    rows = all_rows(recipe, chosen, output, resume, reporter)
    documents = validation_documents(recipe, chosen, rows[-1])
    passkey_lengths = _passkey_lengths(recipe, chosen, reporter)
    write_json(output / ROWS, rows_record(recipe, rows))
    write_json(output / "versions.json", versions(chosen))
    write_text(output / RECIPE, dump_recipe(recipe))
    before = _measure("before", model, recipe, chosen, documents, passkey_lengths, output, reporter)
    del model
    metrics = MetricsLog(output / METRICS)
    with tracking(recipe.trackers, output / "trackers", _flat(recipe)) as listener:
        metrics.listener = listener
        last, methods, choices = _train(recipe, chosen, rows, output, metrics, reporter)
    final = output / MODEL
    trained = _load(str(last), recipe, chosen, methods[-1], chosen.dtype)
    if not (final / "config.json").is_file():
        with new_folder(final) as partial:
            save_model(trained, partial, chosen.tokenizer)
    after = _measure("after", trained, recipe, chosen, documents, passkey_lengths, output, reporter)
    summary = {
        "output": str(output),
        "model": str(final),
        "trained_length": chosen.trained_length,
        "context": recipe.stages[-1].context,
        "engine": chosen.engine,
        "device": str(chosen.device),
        "precision": chosen.precision,
        "stages": [
            _stage_summary(stage, methods[number], rows[number], choices.get(number))
            for number, stage in enumerate(recipe.stages)
        ],
        "before": [result.to_json() for result in before],
        "after": [result.to_json() for result in after],
        "seconds": time.perf_counter() - began,
        "versions": versions(chosen),
    }
    write_json(output / SUMMARY, summary)
    return summary


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
    model: Any,
    recipe: Recipe,
    chosen: Plan,
    documents: list[Ids],
    passkey_lengths: list[int],
    output: Path,
    reporter: Reporter,
) -> list[TaskResult]:
    """Evaluate once; a resumed run finds the results on disk, and needs no model then."""
    path = output / _evaluation_file(when)
    if path.is_file():
        return [TaskResult.from_json(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
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
    with reporter.bar(f"evaluation {when}", None) as advance, autocast(chosen.device, chosen.precision):
        results = evaluate(
            Subject.in_memory(model, chosen.tokenizer),
            settings,
            documents,
            progress=lambda what, done, total: advance(done, f"{what} {done}/{total}"),
        )
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
) -> tuple[Path, list[RopeMethod], dict[int, Choice]]:
    """All stages that are not done yet; the last checkpoint, each stage's method, and what ``auto`` stages chose."""
    folder = output / CHECKPOINTS
    existing = checkpoints_in(folder)
    latest = existing[-1] if existing else None
    done = read_position(latest) if latest is not None else None
    metrics.rewind(done.stage if done else 0, done.step if done else 0)
    tokens = steps = 0
    method, length = chosen.rope, chosen.trained_length
    methods: list[RopeMethod] = []
    choices: dict[int, Choice] = {}
    for number, stage in enumerate(recipe.stages):
        begun = done is not None and done.stage >= number
        source = chosen.model if number == 0 or begun else str(checkpoints_in(folder)[-1])
        if stage.rope.method == AUTO:
            candidates = auto_candidates(stage, method, length, number)
            choices[number] = choose_base(
                number, recipe, chosen, candidates, source, length, rows[number], output, begun, reporter
            )
            method = choices[number].method
        else:
            method = stage_method(stage.rope, method, length, stage.context)
        methods.append(method)
        length = stage.context
        if done is None or (done.stage, done.step) < (number, stage.steps):
            inside = latest if done is not None and done.stage == number else None
            if inside is not None:
                reporter.note(f"resuming stage {number + 1} after step {done.step if done else 0}")
            run = StageRun(
                number=number,
                recipe=recipe,
                source=source,
                rope=method,
                rows=rows[number],
                tokenizer=chosen.tokenizer,
                checkpoints=folder,
                device=chosen.device,
                precision=chosen.precision,
                tokens_before=tokens,
                steps_before=steps,
            )
            run_stage(run, metrics, reporter, inside)
        tokens += stage.steps * stage.rows_per_step * stage.context
        steps += stage.steps
    return checkpoints_in(folder)[-1], methods, choices


def _load(
    path: str,
    recipe: Recipe,
    chosen: Plan,
    method: RopeMethod | None = None,
    dtype: torch.dtype | str = "auto",
) -> Any:
    """A model to measure: the checkpoint as it is, or with the last stage's method and context."""
    return load_model(
        path,
        rope=method,
        engine=recipe.engine,
        dtype=dtype,
        exact_rope=recipe.exact_rope,
        device=chosen.device,
        max_position_embeddings=None if method is None else recipe.stages[-1].context,
        trust_remote_code=recipe.trust_remote_code,
    )


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
