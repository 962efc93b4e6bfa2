"""extend: a whole run, from a recipe to an extended checkpoint with its measurements, resumable anywhere."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import PackedRows, SourceSpec, ValidationSettings, open_rows, prepare_rows, read_documents
from ropewalk.data.identity import digest, inputs_identity
from ropewalk.data.rows import is_packed
from ropewalk.data.tokenise import tokenise
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult, evaluate
from ropewalk.evaluation.passkey import passkey_samples
from ropewalk.evaluation.rows import Ids, evaluation_rows, take_documents
from ropewalk.files import new_folder, write_json, write_text
from ropewalk.integrations.losses import OutputHead
from ropewalk.integrations.models import load_model, save_model
from ropewalk.integrations.trackers import tracking
from ropewalk.rope import RopeMethod
from ropewalk.training.checkpoint import checkpoints_in, read_position
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.preflight import Plan, plan
from ropewalk.training.recipe import Recipe, Source
from ropewalk.training.recipe_file import changed_keys, dump_recipe, parse_recipe
from ropewalk.training.reporter import Reporter, Silent
from ropewalk.training.stage import StageRun, run_stage
from ropewalk.training.step import autocast
from ropewalk.versions import software_versions

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
ROWS = "rows.json"
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
    rows = _all_rows(recipe, chosen, output, resume, reporter)
    documents = _validation(recipe, chosen, rows[-1])
    passkey_lengths = _passkey_lengths(recipe, chosen, reporter)
    write_json(output / ROWS, _rows_record(recipe, rows))
    write_json(output / "versions.json", versions(chosen))
    write_text(output / RECIPE, dump_recipe(recipe))
    before = _measure("before", model, recipe, chosen, documents, passkey_lengths, output, reporter)
    del model
    metrics = MetricsLog(output / METRICS)
    with tracking(recipe.trackers, output / "trackers", _flat(recipe)) as listener:
        metrics.listener = listener
        last = _train(recipe, chosen, rows, output, metrics, reporter)
    final = output / MODEL
    trained = _load(str(last), recipe, chosen, chosen.methods[-1], chosen.dtype)
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
        "stages": [_stage_summary(recipe, chosen, rows, number) for number in range(len(recipe.stages))],
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
        lines.append(
            f"stage {number}: {stage.context} tokens, {stage.rope.method} with rope_theta {method.rope_theta:,.0f}, "
            f"pattern {stage.pattern}, positions {stage.positions}, {stage.steps} steps of {stage.rows_per_step} rows"
        )
    return lines


def _all_rows(
    recipe: Recipe, chosen: Plan, output: Path, resume: bool, reporter: Reporter
) -> list[PackedRows]:
    """The packed rows of every stage; a resumed run gets the very rows it began with, or is refused.

    Raises:
        RopewalkError: if the documents have changed since and the rows are no longer there.
    """
    saved = output / ROWS
    began = json.loads(saved.read_text(encoding="utf-8")) if resume and saved.is_file() else None
    if began is not None and began["validation_sources"] != _rows_record(recipe, [])["validation_sources"]:
        raise RopewalkError(f"the validation sources have changed since the run in {output} began")
    rows = []
    for number in range(len(recipe.stages)):
        folder = None if began is None else Path(began["rows"][number])
        if folder is not None and is_packed(folder):
            rows.append(open_rows(folder))
            continue
        rows.append(_rows(recipe, chosen, number, output, reporter))
        if folder is not None and rows[-1].folder.name != folder.name:
            raise RopewalkError(
                f"the documents have changed since the run in {output} began, and its packed rows {folder} are gone; "
                "a resumed run must see the same rows: restore the documents, or start again"
            )
    return rows


def _rows_record(recipe: Recipe, rows: list[PackedRows]) -> dict[str, Any]:
    """What a resumed run must find again: the folders of rows, and the validation sources' identity."""
    sources = _specs(recipe.data.validation_sources)
    return {
        "rows": [str(each.folder.resolve()) for each in rows],
        "validation_sources": digest(inputs_identity(sources)) if sources else None,
    }


def _rows(recipe: Recipe, chosen: Plan, number: int, output: Path, reporter: Reporter) -> PackedRows:
    data = recipe.data
    with reporter.bar(f"stage {number + 1} data", None) as advance:
        rows = prepare_rows(
            _specs(data.sources),
            chosen.tokenizer,
            chosen.packing[number],
            data.cache or output / "data",
            ValidationSettings(documents=0 if data.validation_sources else data.validation_documents),
            workers=data.workers,
            progress=lambda documents, tokens: advance(documents, f"{tokens:,} tokens"),
        )
    stage = recipe.stages[number]
    epochs = stage.steps * stage.rows_per_step / len(rows)
    repeated = f", read {epochs:.1f} times" if epochs > 1 else ""
    reporter.note(f"stage {number + 1}: {len(rows)} training rows of {stage.context} tokens{repeated}")
    return rows


def _specs(sources: Sequence[Source]) -> list[SourceSpec]:
    return [SourceSpec(s.path, s.name, s.text_field, s.source_field) for s in sources]


def _validation(recipe: Recipe, chosen: Plan, rows: PackedRows) -> list[Ids]:
    """The documents to measure on, as token ids; none where perplexity is not asked for.

    Raises:
        RopewalkError: if there are none, or too few for one row: now, and not after the training.
    """
    if "perplexity" not in recipe.evaluation.suites:
        return []
    length, limit = recipe.stages[-1].context, recipe.evaluation.rows
    if recipe.data.validation_sources:
        texts = read_documents(_specs(recipe.data.validation_sources))
        documents = take_documents((d.input_ids for d in tokenise(texts, chosen.tokenizer)), length, limit)
    else:
        documents = [rows.validation[i].input_ids for i in range(len(rows.validation))]
    if not documents:
        raise RopewalkError(
            "there are no validation documents; raise data.validation_documents, or give data.validation_sources"
        )
    bos, eos = chosen.tokenizer.bos_token_id, chosen.tokenizer.eos_token_id
    evaluation_rows(documents, length, bos, eos if bos is None else None, limit)
    return documents


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
    if not recipe.evaluation.suites:
        return []
    with reporter.bar(f"evaluation {when}", None) as advance, autocast(chosen.device, chosen.precision):
        results = evaluate(
            model,
            chosen.tokenizer,
            documents,
            lengths={"perplexity": [recipe.stages[-1].context], "passkey": passkey_lengths},
            suites=recipe.evaluation.suites,
            samples=recipe.evaluation.samples,
            seed=recipe.seed,
            rows=recipe.evaluation.rows,
            trained_length=chosen.trained_length,
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
            passkey_samples(chosen.tokenizer, length, recipe.evaluation.samples, recipe.seed)
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
) -> Path:
    """All stages that are not done yet; returns the last checkpoint."""
    folder = output / CHECKPOINTS
    existing = checkpoints_in(folder)
    latest = existing[-1] if existing else None
    done = read_position(latest) if latest is not None else None
    metrics.rewind(done.stage if done else 0, done.step if done else 0)
    tokens = steps = 0
    for number, stage in enumerate(recipe.stages):
        finished = done is not None and (done.stage, done.step) >= (number, stage.steps)
        if not finished:
            inside = latest if done is not None and done.stage == number else None
            if inside is not None:
                reporter.note(f"resuming stage {number + 1} after step {done.step if done else 0}")
            source = chosen.model if number == 0 else str(checkpoints_in(folder)[-1])
            run = StageRun(
                number=number,
                recipe=recipe,
                source=source,
                rope=chosen.methods[number],
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
    return checkpoints_in(folder)[-1]


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


def _stage_summary(recipe: Recipe, chosen: Plan, rows: list[PackedRows], number: int) -> dict[str, Any]:
    stage, method = recipe.stages[number], chosen.methods[number]
    return {
        "context": stage.context,
        "method": stage.rope.method,
        "rope_theta": method.rope_theta,
        "pattern": stage.pattern,
        "positions": stage.positions,
        "steps": stage.steps,
        "tokens": stage.steps * stage.rows_per_step * stage.context,
        "rows": len(rows[number]),
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
