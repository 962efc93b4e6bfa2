"""Documents of a run: packed rows for training, and held-out documents for evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ropewalk.attention.layout import IGNORED, PackedLayout, Row
from ropewalk.data import (
    PackedRows,
    open_rows,
    prepare_rows,
    rows_for_step,
    tokenizer_identity,
)
from ropewalk.data.mixture.report import MixtureReport, explain
from ropewalk.data.read.draw import drawn
from ropewalk.data.read.identity import inputs_identity
from ropewalk.data.read.input_splits import is_blank, read_input_split, refuse_duplicates, source_splits
from ropewalk.data.rows.pack import held_out_texts, refuse_cut_chats
from ropewalk.data.rows.packed_rows import WORK, is_packed
from ropewalk.data.settings import MixtureSettings, PackConfig, SourceSpec, ValidationSettings, WorkSettings
from ropewalk.data.statistics import targets_of_documents
from ropewalk.data.tokens.chat import required_template
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import DrawnDocuments, documents_of, evaluation_rows
from ropewalk.evaluation.store import model_digest
from ropewalk.io.digests import digest
from ropewalk.io.files import parse_json, write_json
from ropewalk.io.settings import explain as explain_settings
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.recipe import Data, Recipe
from ropewalk.training.resolved import ResolvedRecipe, folder_of

ROWS = "rows.json"
DATA = "data"

HeldOut = tuple[tuple[int, ...], dict[str, Any]]
"""Hashes of the documents that a run holds out of its own data, and the identity of that data."""


class RunInputs(BaseModel):
    """Inputs of a run when it started, stored in ``rows.json``; a resumed run must find the same inputs.

    Attributes:
        rows: for each stage, the folder of its packed rows, relative to the run's folder or absolute; None for a stage
            without training.
        digests: for each stage, the digest of its rows.
        validation_sources: digest of the validation sources; None if the recipe has none.
        unpacked: digest of documents used for evaluation that are never packed.
        model: digest of the recipe's model; None if its files were not available.
        precision: the resolved precision.
    """

    model_config = ConfigDict(frozen=True)

    rows: list[str | None]
    digests: list[str | None]
    validation_sources: str | None
    unpacked: str | None
    model: str | None
    precision: str

    @model_validator(mode="after")
    def _fit(self) -> RunInputs:
        if len(self.rows) != len(self.digests):
            raise ValueError(
                f"rows and digests must be equally long, got {len(self.rows)} rows and {len(self.digests)} digests"
            )
        return self

    def of_stage(self, number: int) -> tuple[str, str | None] | None:
        """Folder and digest of a stage's rows; None for a stage without training, or a new one."""
        folder = self.rows[number] if number < len(self.rows) else None
        return None if folder is None else (folder, self.digests[number])


def read_run_inputs(output: Path) -> RunInputs:
    """Read the record of a run's inputs from its folder.

    Raises:
        RopewalkError: if the record is missing or damaged.
    """
    path = output / ROWS
    advice = "restore the file, or start a new run in another output folder"
    try:
        return RunInputs.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise RopewalkError(
            f"{path}, the record of the run's training data, is missing, and a resumed run must train on the same "
            f"rows; {advice}"
        ) from error
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        what = explain_settings(error, RunInputs).strip()
        raise RopewalkError(f"{path} is damaged ({what}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise RopewalkError(f"{path} is damaged ({error}); {advice}") from error


def all_rows(
    resolved: ResolvedRecipe, context: RunContext, began: RunInputs | None, others: Collection[int] = ()
) -> list[PackedRows | None]:
    """Packed rows of every stage; None for a stage without training.

    A resumed run gets exactly the rows it started with, or is refused.

    Args:
        resolved: the recipe.
        context: the run's folder and reporter.
        began: inputs of the run when it started, if it is resumed.
        others: indices of stages that are new, or that differ from those in ``began``.

    Raises:
        RopewalkError: if the model has changed since the run started; if the documents have changed and the rows are
            gone; or if rows that the recipe names are damaged, or were packed with another tokenizer or for another
            stage.
    """
    recipe, output = resolved.recipe, folder_of(context)
    if began is not None:
        _refuse_changed(resolved, began, output)
    if recipe.data.rows:
        return _packed_before(resolved, began, others)
    rows: list[PackedRows | None] = []
    # Made once, and only if a stage with its own documents must leave them out.
    held_out = cache(lambda: _held_out(resolved, context))
    for number, stage in enumerate(recipe.stages):
        known = None if began is None or number in others else began.of_stage(number)
        if not stage.steps:
            rows.append(None)
        elif known is None:
            rows.append(_rows(resolved, context, number, held_out))
        else:
            rows.append(_rows_again(resolved, context, number, known, held_out))
    # Stages packed from different states of the same sources could train on documents that another stage holds out.
    seen = [
        (resolved.stages[number].settings.data.sources, each.manifest["inputs"])
        for number, each in enumerate(rows)
        if each is not None
    ]
    # Not called unless a stage has needed it: that would tokenise the documents for this check alone.
    if held_out.cache_info().currsize:
        seen.append((recipe.data.sources, held_out()[1]))
    states: dict[str, set[str]] = {}
    for sources, inputs in seen:
        specs = json.dumps([spec.model_dump() for spec in sources])
        states.setdefault(specs, set()).add(json.dumps(inputs, sort_keys=True))
    if any(len(inputs) > 1 for inputs in states.values()):
        raise RopewalkError(
            f"the documents have changed since the run in {output} started, so a new stage could train on documents "
            "that the run holds out for evaluation; restore the documents as they were, or start a new run"
        )
    return rows


def refuse_steps_without_targets(resolved: ResolvedRecipe, rows: Sequence[PackedRows | None]) -> None:
    """Raise if a step would have no token to train on, before training begins.

    Only chats can lack targets: ``truncate`` may cut one before its first answer.

    Raises:
        RopewalkError: with the stage and the first such step.
    """
    for number, each in enumerate(rows):
        if each is None or "chat_template" not in each.manifest:
            continue
        anchor, settings = each.settings.anchor_length, resolved.stages[number].settings
        silent = {
            index for index in range(len(each)) if not targets_of_documents(each.packed(index), anchor).any()
        }
        for step in range(settings.stage.steps if silent else 0):
            # The order of the training itself, so that only a step that would occur is refused.
            wanted = rows_for_step(step, settings.stage.rows_per_step, len(each), settings.seed)
            if silent.issuperset(wanted):
                raise RopewalkError(
                    f"stage {number + 1}: step {step + 1} has no token to train on, because all chats in its rows were "
                    "cut before their first answer; set data.long_documents: skip"
                )


def _held_out(resolved: ResolvedRecipe, context: RunContext) -> HeldOut:
    """Hashes of the documents that the run holds out of its own data, and the identity of that data."""
    with context.rank_0_reporter.bar("held-out documents", None) as advance:
        config = _pack_config(resolved, resolved.recipe.data, 0)
        return held_out_texts(
            config,
            _cache(resolved.recipe.data, context),
            tokenizer=resolved.tokenizer,
            progress=lambda documents, tokens: advance(documents, f"{tokens:,} tokens"),
        )


def _rows_again(
    resolved: ResolvedRecipe,
    context: RunContext,
    number: int,
    known: tuple[str, str | None],
    held_out: Callable[[], HeldOut],
) -> PackedRows:
    """The rows that a stage of a resumed run started with, read from disk or packed again."""
    output = folder_of(context)
    folder, digest_ = output / known[0], known[1]
    if not is_packed(folder):
        # A folder with WORK in it is an interrupted packing, which _rows continues.
        if folder.is_dir() and not (folder / WORK).is_dir():
            raise RopewalkError(
                f"the packed rows in {folder} have no readable manifest; delete the folder {folder}, and --resume will "
                "pack the rows again"
            )
        packed = _rows(resolved, context, number, held_out)
        # The name is a digest of all that the rows depend on, the documents included.
        if packed.folder.name != folder.name:
            raise RopewalkError(
                f"the documents have changed since the run in {output} started, and the packed rows {folder} are gone, "
                "so the run cannot train on the same rows; restore the documents, or start a new run"
            )
        return packed
    try:
        there = open_rows(folder, tokenizer=tokenizer_identity(resolved.tokenizer), verify=True)
    except RopewalkError as error:
        raise RopewalkError(
            f"{error} (once the folder {folder.name} is deleted, --resume packs the rows again)"
        ) from error
    if _rows_digest(there) != digest_:
        raise RopewalkError(
            f"the packed rows in {folder} are not those that the run in {output} started with; delete the folder "
            f"{folder}, and --resume will pack the rows again"
        )
    return there


def run_inputs(
    resolved: ResolvedRecipe,
    rows: Sequence[PackedRows | None],
    output: Path,
    before: RunInputs | None = None,
) -> RunInputs:
    """Record of the inputs that a resumed run must find again: rows, model, and documents that are not packed.

    Args:
        resolved: the recipe.
        rows: packed rows of every stage.
        output: folder of the run; rows inside it are recorded with relative paths, so that the folder can be moved.
        before: the record from when the run started, if it is resumed.
    """
    recipe, home = resolved.recipe, output.resolve()
    places = [None if each is None else each.folder.resolve() for each in rows]
    return RunInputs(
        rows=[
            None if p is None else str(p.relative_to(home) if p.is_relative_to(home) else p) for p in places
        ],
        digests=[_rows_digest(each) for each in rows],
        validation_sources=_sources_digest(recipe.data.validation_sources),
        unpacked=_unpacked_digest(recipe),
        # A resumed run keeps the recorded digest; _refuse_changed has already compared it with the model's files.
        model=model_digest(resolved.model) if before is None or before.model is None else before.model,
        precision=resolved.precision,
    )


def write_run_inputs(output: Path, began: RunInputs) -> None:
    """Write the record that :func:`read_run_inputs` reads."""
    write_json(output / ROWS, began.model_dump())


def check_sources(resolved: ResolvedRecipe) -> None:
    """Read the first document of every source, or the manifests of packed rows, to fail before any long work.

    Raises:
        RopewalkError: if a source is missing, unreadable or given twice, if its first record lacks the text field, or
            if rows were packed with another tokenizer.
    """
    recipe, identity = resolved.recipe, tokenizer_identity(resolved.tokenizer)
    data = [
        recipe.data,
        *(each.settings.data for each in resolved.stages if each.settings.stage.own_documents),
    ]
    for folder in dict.fromkeys(folder for each in data for folder in each.rows):
        open_rows(folder, tokenizer=identity)
    packed = [each.sources for each in data]
    for sources in (*packed, recipe.data.validation_sources):
        refuse_duplicates(sources)
        if any(spec.messages_field for spec in sources):
            if sources in packed:
                refuse_cut_chats(recipe.data)
            required_template(resolved.tokenizer)
        for spec in sources:
            records = (record for split in source_splits(spec) for record in read_input_split(split))
            # One document of each source shows most mistakes (a wrong field, a damaged file) before anything is loaded.
            next((d for record in records for d in record.documents if not is_blank(d)), None)


def model_at_start(output: Path) -> str | None:
    """Digest of the recipe's model when the run started; None if its files were not available, or are not recorded."""
    return read_run_inputs(output).model if (output / ROWS).is_file() else None


def _refuse_changed(resolved: ResolvedRecipe, began: RunInputs, output: Path) -> None:
    """Raise if the model, the precision, or documents that are not packed differ from those the run started with."""
    recipe, since = resolved.recipe, f"since the run in {output} started"
    if began.validation_sources != _sources_digest(recipe.data.validation_sources):
        raise RopewalkError(f"the validation sources have changed {since}; restore them, or start a new run")
    if began.unpacked is not None and began.unpacked != _unpacked_digest(recipe):
        what = "the rows in data.rows" if recipe.data.rows else "the documents of data.sources"
        raise RopewalkError(f"{what} have changed {since}; restore them, or start a new run")
    # None means that the model's files are not available here, so there is nothing to compare.
    if began.model is not None and model_digest(resolved.model) not in (None, began.model):
        raise RopewalkError(
            f"the weights or the config of the model in {resolved.model} have changed {since}; restore them, or start "
            "a new run"
        )
    if began.precision != resolved.precision:
        here = (
            f"auto resolves to {resolved.precision} here"
            if recipe.precision == "auto"
            else f"cannot resume in {recipe.precision}"
        )
        raise RopewalkError(
            f"the run in {output} started with precision {began.precision}, but {here}; set precision: "
            f"{began.precision}"
        )


def _sources_digest(sources: Sequence[SourceSpec]) -> str | None:
    return digest(inputs_identity(sources)) if sources else None


def _unpacked_digest(recipe: Recipe) -> str | None:
    """Digest of the documents for evaluation and search in a run without training, which has no packed rows."""
    if any(stage.steps for stage in recipe.stages):
        return None
    if recipe.data.rows:
        # The last folder, because rows_with_validation evaluates on its held-out documents.
        return _rows_digest(open_rows(recipe.data.rows[-1], verify=True))
    return None if recipe.data.validation_sources else _sources_digest(recipe.data.sources)


def _rows_digest(rows: PackedRows | None) -> str | None:
    if rows is None:
        return None
    files = [*rows.manifest["row_files"], rows.manifest["validation_file"]]
    return digest([rows.manifest["digest"], [each["sha256"] for each in files]])


def _packed_before(
    resolved: ResolvedRecipe, began: RunInputs | None, others: Collection[int]
) -> list[PackedRows | None]:
    """Select the folder of rows for each stage from those that the recipe names."""
    recipe, identity = resolved.recipe, tokenizer_identity(resolved.tokenizer)
    # Stages may share a folder of rows, and verifying hashes all of it.
    opened = cache(lambda folder: open_rows(folder, tokenizer=identity, verify=True))
    rows: list[PackedRows | None] = []
    for number, stage in enumerate(recipe.stages):
        key = f"stages.{number}.data.rows" if stage.own_documents else "data.rows"
        there = [opened(folder) for folder in resolved.stages[number].settings.data.rows]
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
                f"{each.folder} (context {each.settings.context}, pattern {each.settings.pattern}, positions "
                f"{each.settings.positions})"
                for each in fitting or there
            )
            raise RopewalkError(
                f"stage {number + 1} needs one folder of rows with context {stage.context}, pattern {stage.pattern} "
                f"and positions {stage.positions}, but {key} names "
                + (
                    f"{len(fitting)} such folders; keep only one of {found}"
                    if fitting
                    else f"no such folder, only {found}; pack the rows of this stage, and add their folder to {key}"
                )
            )
        rows.append(fitting[0])
    if not recipe.data.validation_sources:
        _refuse_other_split(recipe, rows)
    for number, each in enumerate(rows):
        known = None if began is None or number in others else began.of_stage(number)
        if known is not None and known[1] != _rows_digest(each):
            raise RopewalkError(
                f"the packed rows of stage {number + 1} are not those that the run started with; restore the rows, or "
                "start a new run"
            )
    return rows


def _refuse_other_split(recipe: Recipe, rows: Sequence[PackedRows | None]) -> None:
    """Raise if a stage's own rows could contain documents that the run's rows hold out for evaluation."""
    run = rows_with_validation(recipe, rows)
    for number, (stage, each) in enumerate(zip(recipe.stages, rows, strict=True)):
        if each is None or run is None or not stage.own_documents:
            continue
        if any(each.manifest[key] != run.manifest[key] for key in ("inputs", "specs", "validation")):
            raise RopewalkError(
                f"stages.{number}.data.rows and data.rows either have different documents or hold out different "
                f"documents, so stage {number + 1} may train on documents that the run evaluates on; name separate "
                "documents for evaluation in data.validation_sources"
            )


def _pack_config(
    resolved: ResolvedRecipe, data: Data, number: int, withheld: tuple[int, ...] | None = None
) -> PackConfig:
    """Settings for packing rows of a stage; ``withheld``: hashes of documents it neither trains on nor holds out."""
    # Documents withheld from a stage's own data are those held out already; it holds out no others.
    held_out = 0 if data.validation_sources or withheld is not None else data.validation_documents
    return PackConfig(
        sources=data.sources,
        tokenizer=resolved.tokenizer.name_or_path,
        rows=resolved.packing[number],
        mixture=data.mixture or MixtureSettings(),
        validation=ValidationSettings(documents=held_out),
        work=WorkSettings(workers=data.workers),
        withheld=withheld or (),
    )


def _cache(data: Data, context: RunContext) -> str | Path:
    return data.cache or folder_of(context) / DATA


def _rows(
    resolved: ResolvedRecipe, context: RunContext, number: int, held_out: Callable[[], HeldOut]
) -> PackedRows:
    recipe, reporter = resolved.recipe, context.rank_0_reporter
    data = resolved.stages[number].settings.data
    withheld = None
    if recipe.stages[number].own_documents:
        # The stage's own documents may include those on which the run is evaluated.
        withheld = () if data.validation_sources else held_out()[0]
    made = False

    def progress(documents: int, tokens: int) -> None:
        nonlocal made
        made = True
        advance(documents, f"{tokens:,} tokens")

    with reporter.bar(f"stage {number + 1} data", None) as advance:
        config = _pack_config(resolved, data, number, withheld)
        rows = prepare_rows(config, _cache(data, context), tokenizer=resolved.tokenizer, progress=progress)
    if not made:
        # The rows come from a cache that another run filled, so their digests must be verified.
        open_rows(rows.folder, verify=True)
    stage = recipe.stages[number]
    epochs = stage.steps * stage.rows_per_step / len(rows)
    repeated = f", read {epochs:.1f} times" if epochs > 1 else ""
    reporter.note(f"stage {number + 1}: {len(rows)} training rows of {stage.context} tokens{repeated}")
    for sentence in mixture_sentences(rows.manifest["mixture"]):
        reporter.note(f"stage {number + 1}: {sentence}")
    return rows


def mixture_sentences(report: dict[str, Any] | None) -> list[str]:
    """Sentences that compare the requested mixture with the actual one; none if there is no mixture."""
    return [] if report is None else explain(MixtureReport.from_dict(report))


def rows_with_validation(recipe: Recipe, rows: Sequence[PackedRows | None]) -> PackedRows | None:
    """The packed rows whose held-out documents the run evaluates on; None if the run packs nothing."""
    packed = [
        each
        for stage, each in zip(recipe.stages, rows, strict=True)
        if each is not None and not stage.own_documents
    ]
    if packed or not recipe.data.rows:
        return packed[-1] if packed else None
    return open_rows(recipe.data.rows[-1], verify=True)


def validation_documents(resolved: ResolvedRecipe, rows: PackedRows | None) -> DrawnDocuments:
    """Token ids of the evaluation documents; none if no suite reads documents.

    If no stage trains, nothing is packed (``rows`` is None) and all documents of the sources count as held out.

    Raises:
        RopewalkError: if there are no documents, or too few for one row; the error comes before training.
    """
    recipe = resolved.recipe
    if not recipe.evaluation.reads_text:
        return DrawnDocuments([], [])
    length, limit = resolved.target, recipe.evaluation.rows
    documents = held_out_documents(resolved, rows, length, limit)
    if not documents:
        more = (
            "pack the rows with --validation-documents"
            if recipe.data.rows
            else "raise data.validation_documents"
        )
        raise RopewalkError(
            f"the evaluation needs held-out documents, but there are none; {more}, or set data.validation_sources"
        )
    # Called for its error alone: text that does not fill a row must be refused before training.
    full_rows(documents, resolved, length, limit)
    return documents


def probe_rows(resolved: ResolvedRecipe, rows: PackedRows, context: int, limit: int) -> tuple[list[Row], str]:
    """Rows on which ``auto`` compares bases for a stage, and their origin, ``held-out`` or ``training``.

    The rows consist of held-out documents if these fill a row; otherwise they are those that the stage trains on first.
    Every token attends to all earlier ones, whatever the stage's pattern, because bases differ in their effect at long
    distances.

    Args:
        resolved: the recipe.
        rows: packed rows of the stage.
        context: tokens per row.
        limit: largest number of rows.
    """
    documents = held_out_documents(resolved, rows, context, limit)
    try:
        return full_rows(documents, resolved, context, limit), "held-out"
    except RopewalkError:
        return training_rows(rows, context, limit, resolved.recipe.seed), "training"


def training_rows(rows: PackedRows, context: int, limit: int, seed: int) -> list[Row]:
    """The rows of the first steps, each treated as one document in which every token attends to all earlier ones.

    Rows may be stored in the order of their documents, of which the first may all come from one source.
    """
    first = (rows[number] for number in rows_for_step(0, min(limit, len(rows)), len(rows), seed))
    layout = PackedLayout.from_lengths([context], pattern="full", anchor_length=0)
    return [_in_storage_order(row, layout) for row in first]


def _in_storage_order(row: Row, layout: PackedLayout) -> Row:
    """A training row in storage order; targets that are not the next token (in interleaved chunks) are dropped."""
    following = torch.roll(row.input_ids, -1)
    return Row(row.input_ids, row.labels.where(row.labels == following, IGNORED), layout)


def held_out_documents(
    resolved: ResolvedRecipe, rows: PackedRows | None, length: int, limit: int
) -> DrawnDocuments:
    """Documents that no stage trains on, enough for ``limit`` rows of ``length`` tokens if possible.

    They come from the validation sources if given, otherwise from the documents held out of packed rows, or, if no rows
    are packed, from the sources. They are drawn with the run's seed; a larger length or limit only adds documents at
    the end.
    """
    recipe = resolved.recipe
    sources = recipe.data.validation_sources or (recipe.data.sources if rows is None else [])
    if sources:
        return documents_of(sources, resolved.tokenizer, length, limit, recipe.seed)
    assert rows is not None
    held_out = rows.validation
    return DrawnDocuments.of(drawn([held_out[i] for i in range(len(held_out))], recipe.seed))


def full_rows(documents: DrawnDocuments, resolved: ResolvedRecipe, length: int, limit: int) -> list[Row]:
    """Rows of ``length`` tokens on which the evaluation measures perplexity, at most ``limit``."""
    bos, eos = resolved.tokenizer.bos_token_id, resolved.tokenizer.eos_token_id
    # EOS separates documents only where no BOS does.
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows
