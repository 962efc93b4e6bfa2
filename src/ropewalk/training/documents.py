"""The documents of a run: packed rows to train on, and what is held out to measure on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import (
    MixtureSettings,
    PackedRows,
    SourceSpec,
    ValidationSettings,
    open_rows,
    prepare_rows,
    read_documents,
    tokenizer_identity,
)
from ropewalk.data.identity import digest, inputs_identity
from ropewalk.data.mixture import MixtureReport, explain
from ropewalk.data.rows import is_packed
from ropewalk.data.tokenise import tokenise
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.identity import model_digest
from ropewalk.evaluation.rows import Ids, evaluation_rows, take_documents
from ropewalk.packing import IGNORED, PackedLayout, Row
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe import Recipe, Source
from ropewalk.training.reporter import Reporter

ROWS = "rows.json"


def all_rows(
    recipe: Recipe, chosen: Plan, output: Path, resume: bool, reporter: Reporter
) -> list[PackedRows | None]:
    """The packed rows of every stage, None for one that trains nothing.

    A resumed run gets the very rows it began with, or is refused.

    Raises:
        RopewalkError: if the model or the documents have changed since, and the rows are no longer there, or rows that
            the recipe names are damaged, or of another tokenizer or stage.
    """
    began = _record_in(output) if resume else None
    if began is not None:
        _refuse_changed(recipe, chosen, began, output)
    if recipe.data.rows:
        return _packed_before(recipe, chosen, began)
    rows: list[PackedRows | None] = []
    for number, stage in enumerate(recipe.stages):
        if not stage.steps:
            rows.append(None)
            continue
        folder = None if began is None else Path(began["rows"][number])
        if folder is not None and is_packed(folder):
            there = open_rows(folder, verify=True)
            rows.append(there)
            if began is not None and _rows_digest(there) != began["digests"][number]:
                raise RopewalkError(
                    f"the packed rows in {folder} are not those that the run in {output} began with; a resumed run "
                    "must see the same rows: start again"
                )
            continue
        packed = _rows(recipe, chosen, number, output, reporter)
        rows.append(packed)
        if folder is not None and packed.folder.name != folder.name:
            raise RopewalkError(
                f"the documents have changed since the run in {output} began, and its packed rows {folder} are gone; "
                "a resumed run must see the same rows: restore the documents, or start again"
            )
    return rows


def rows_record(recipe: Recipe, chosen: Plan, rows: Sequence[PackedRows | None]) -> dict[str, Any]:
    """What a resumed run must find again: the folders of rows, and the identity of the model and of other text."""
    return {
        "rows": [None if each is None else str(each.folder.resolve()) for each in rows],
        "digests": [_rows_digest(each) for each in rows],
        "validation_sources": _sources_digest(recipe.data.validation_sources),
        "unpacked": _unpacked_digest(recipe),
        "model": model_digest(chosen.model),
    }


def model_at_start(output: Path) -> str | None:
    """Digest of the recipe's model when a run began; None where it was not at hand, or not recorded yet."""
    began = _record_in(output)
    return None if began is None else began.get("model")


def _record_in(output: Path) -> dict[str, Any] | None:
    saved = output / ROWS
    return json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else None


def _refuse_changed(recipe: Recipe, chosen: Plan, began: Mapping[str, Any], output: Path) -> None:
    """Raise where the model, or text that is not packed, is no longer what a run began with."""
    since = f"since the run in {output} began"
    if began["validation_sources"] != _sources_digest(recipe.data.validation_sources):
        raise RopewalkError(f"the validation sources have changed {since}")
    # Earlier versions recorded neither of these.
    if began.get("unpacked") not in (None, _unpacked_digest(recipe)):
        what = "the rows in data.rows" if recipe.data.rows else "the documents of data.sources"
        raise RopewalkError(f"{what} have changed {since}; restore them, or start again")
    known = began.get("model")
    if known is not None and model_digest(chosen.model) not in (None, known):
        raise RopewalkError(
            f"the weights or the config of the model in {chosen.model} have changed {since}; restore them, or start "
            "again"
        )


def _sources_digest(sources: Sequence[Source]) -> str | None:
    return digest(inputs_identity(_specs(sources))) if sources else None


def _unpacked_digest(recipe: Recipe) -> str | None:
    """Identity of the text that a run measures and searches on where no stage trains, so that no rows speak for it."""
    if any(stage.steps for stage in recipe.stages):
        return None
    if recipe.data.rows:
        return _rows_digest(open_rows(recipe.data.rows[-1], verify=True))
    return None if recipe.data.validation_sources else _sources_digest(recipe.data.sources)


def _rows_digest(rows: PackedRows | None) -> str | None:
    if rows is None:
        return None
    files = [*rows.manifest["row_files"], rows.manifest["validation_file"]]
    return digest([rows.manifest["digest"], [each["sha256"] for each in files]])


def _packed_before(recipe: Recipe, chosen: Plan, began: dict[str, Any] | None) -> list[PackedRows | None]:
    """The folders of rows that the recipe names, one for each stage."""
    identity = tokenizer_identity(chosen.tokenizer)
    there = [open_rows(folder, tokenizer=identity, verify=True) for folder in recipe.data.rows]
    rows: list[PackedRows | None] = []
    for number, stage in enumerate(recipe.stages):
        if not stage.steps:
            rows.append(None)
            continue
        wanted = (stage.context, stage.pattern, stage.positions)
        fitting = [
            each
            for each in there
            if (each.settings.context, each.settings.pattern, each.settings.positions) == wanted
        ]
        if len(fitting) != 1:
            found = ", ".join(
                f"{each.folder} ({each.settings.context}, {each.settings.pattern}, {each.settings.positions})"
                for each in there
            )
            raise RopewalkError(
                f"stage {number + 1} needs one folder of rows of {stage.context} tokens, pattern {stage.pattern}, "
                f"positions {stage.positions}; data.rows has {len(fitting)} such: {found}"
            )
        rows.append(fitting[0])
    if began is not None and began["digests"] != [_rows_digest(each) for each in rows]:
        raise RopewalkError(
            "the rows in data.rows are not those that the run began with; a resumed run must see the same rows: "
            "restore them, or start again"
        )
    return rows


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
            mixture=None if data.mixture is None else MixtureSettings(**data.mixture.model_dump()),
        )
    stage = recipe.stages[number]
    epochs = stage.steps * stage.rows_per_step / len(rows)
    repeated = f", read {epochs:.1f} times" if epochs > 1 else ""
    reporter.note(f"stage {number + 1}: {len(rows)} training rows of {stage.context} tokens{repeated}")
    for sentence in mixture_sentences(rows.manifest["mixture"]):
        reporter.note(f"stage {number + 1}: {sentence}")
    return rows


def mixture_sentences(report: dict[str, Any] | None) -> list[str]:
    """What was asked of a mixture and what came out, for people; none where there is no mixture."""
    return [] if report is None else explain(MixtureReport.from_dict(report))


def _specs(sources: Sequence[Source]) -> list[SourceSpec]:
    return [SourceSpec(s.path, s.name, s.text_field, s.source_field, s.max_documents) for s in sources]


def rows_with_validation(recipe: Recipe, rows: Sequence[PackedRows | None]) -> PackedRows | None:
    """The packed rows whose held-out documents a run measures on; None where it trains and packs nothing."""
    packed = [each for each in rows if each is not None]
    if packed or not recipe.data.rows:
        return packed[-1] if packed else None
    return open_rows(recipe.data.rows[-1], verify=True)


def validation_documents(recipe: Recipe, chosen: Plan, rows: PackedRows | None) -> list[Ids]:
    """The documents to measure on, as token ids; none where perplexity is not asked for.

    Where no stage trains and so nothing is packed (``rows`` is None), all documents of the sources are as good as held
    out.

    Raises:
        RopewalkError: if there are none, or too few for one row: now, and not after the training.
    """
    if "perplexity" not in recipe.evaluation.suites:
        return []
    length, limit = recipe.stages[-1].context, recipe.evaluation.rows
    documents = held_out_documents(recipe, chosen, rows, length, limit)
    if not documents:
        more = (
            "pack the rows with --validation-documents"
            if recipe.data.rows
            else "raise data.validation_documents"
        )
        raise RopewalkError(f"there are no validation documents; {more}, or give data.validation_sources")
    _full_rows(documents, chosen, length, limit)
    return documents


def probe_rows(
    recipe: Recipe, chosen: Plan, rows: PackedRows, context: int, limit: int
) -> tuple[list[Row], str]:
    """Rows to choose a stage's base on, and what they are made of.

    Held-out documents where they fill a row, as in the evaluation; else the stage's first training rows. Either way
    every token sees all before it, whatever the stage's pattern: it is the distances that the bases differ in.

    Args:
        rows: packed rows of the stage.
        context: tokens of a row.
        limit: most rows.
    """
    documents = held_out_documents(recipe, chosen, rows, context, limit)
    try:
        return _full_rows(documents, chosen, context, limit), "held-out"
    except RopewalkError:
        return training_rows(rows, context, limit), "training"


def training_rows(rows: PackedRows, context: int, limit: int) -> list[Row]:
    """The first training rows, each as one run of text in which every token sees all before it."""
    first = (rows[number] for number in range(min(limit, len(rows))))
    layout = PackedLayout.from_lengths([context], pattern="full", anchor_length=0)
    return [_in_storage_order(row, layout) for row in first]


def _in_storage_order(row: Row, layout: PackedLayout) -> Row:
    """A training row as one run of text: a target that is not the next token (of interleaved chunks) is none."""
    following = torch.roll(row.input_ids, -1)
    return Row(row.input_ids, row.labels.where(row.labels == following, IGNORED), layout)


def held_out_documents(
    recipe: Recipe, chosen: Plan, rows: PackedRows | None, length: int, limit: int
) -> list[Ids]:
    """Documents that no stage trains on, enough for ``limit`` rows of ``length`` tokens if there are so many.

    Those of the validation sources; else those held out of packed rows; where no rows are packed, the sources' own.
    """
    sources = recipe.data.validation_sources or (recipe.data.sources if rows is None else [])
    if sources:
        texts = read_documents(_specs(sources))
        return take_documents((d.input_ids for d in tokenise(texts, chosen.tokenizer)), length, limit)
    assert rows is not None
    return [rows.validation[i].input_ids for i in range(len(rows.validation))]


def _full_rows(documents: list[Ids], chosen: Plan, length: int, limit: int) -> list[Row]:
    bos, eos = chosen.tokenizer.bos_token_id, chosen.tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows
