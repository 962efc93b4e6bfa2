"""The documents of a run: packed rows to train on, and what is held out to measure on."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ropewalk.attention.layout import IGNORED, PackedLayout, Row
from ropewalk.data import (
    PackedRows,
    open_rows,
    prepare_rows,
    read_documents,
    tokenizer_identity,
)
from ropewalk.data.mixture.report import MixtureReport, explain
from ropewalk.data.read.identity import inputs_identity
from ropewalk.data.read.input_splits import is_blank, read_input_split, refuse_duplicates, source_splits
from ropewalk.data.rows.stored import WORK, is_packed
from ropewalk.data.settings import MixtureSettings, PackConfig, SourceSpec, ValidationSettings, WorkSettings
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import Ids, evaluation_rows, take_documents
from ropewalk.evaluation.store import model_digest
from ropewalk.io.digests import digest
from ropewalk.io.files import parse_json, write_json
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe, folder_of

ROWS = "rows.json"
DATA = "data"


class Began(BaseModel):
    """What a run began with, as ``rows.json`` keeps it: a resumed run must find the same again.

    Attributes:
        rows: folder of each stage's packed rows, below the run's own folder or absolute; None for a stage without.
        digests: of these rows.
        validation_sources: digest of the text, where there are such sources.
        unpacked: digest of text that is measured on and never packed.
        model: digest of the recipe's model; None where its files were not at hand.
        precision: that ``auto`` stood for; None in files of earlier versions, as may be the two before it.
    """

    model_config = ConfigDict(frozen=True)

    rows: list[str | None]
    digests: list[str | None]
    validation_sources: str | None
    unpacked: str | None = None
    model: str | None = None
    precision: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> Began:
        if len(self.rows) != len(self.digests):
            raise ValueError(f"{len(self.rows)} rows and {len(self.digests)} digests")
        return self

    def of_stage(self, number: int) -> tuple[str, str | None] | None:
        """Folder and digest of a stage's rows; None for a stage without, or one that is new."""
        folder = self.rows[number] if number < len(self.rows) else None
        return None if folder is None else (folder, self.digests[number])


def read_began(output: Path) -> Began:
    """What the run in a folder began with.

    Raises:
        RopewalkError: if its record is missing or damaged.
    """
    path = output / ROWS
    advice = "restore the file, or give another output and begin a new run"
    try:
        return Began.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise RopewalkError(
            f"{path}, which says what the run trains on, is missing; a resumed run must see the same rows: {advice}"
        ) from error
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        what = f"{where}: {error.errors()[0]['msg']}".removeprefix(": ").replace("Value error, ", "")
        raise RopewalkError(f"{path} is damaged ({what}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise RopewalkError(f"{path} is damaged ({error}); {advice}") from error


def all_rows(
    resolved: ResolvedRecipe, context: RunContext, began: Began | None, others: Collection[int] = ()
) -> list[PackedRows | None]:
    """The packed rows of every stage, None for one that trains nothing.

    A resumed run gets the very rows it began with, or is refused.

    Args:
        resolved: the recipe.
        context: the run's folder, and where progress goes.
        began: what a resumed run began with.
        others: stages, counted from 0, that are no longer those of ``began``, or new.

    Raises:
        RopewalkError: if the model or the documents have changed since, and the rows are no longer there, or rows that
            the recipe names are damaged, or of another tokenizer or stage.
    """
    recipe, output = resolved.recipe, folder_of(context)
    if began is not None:
        _refuse_changed(resolved, began, output)
    if recipe.data.rows:
        return _packed_before(resolved, began, others)
    rows: list[PackedRows | None] = []
    for number, stage in enumerate(recipe.stages):
        known = None if began is None or number in others else began.of_stage(number)
        if not stage.steps:
            rows.append(None)
        elif known is None:
            rows.append(_rows(resolved, context, number))
        else:
            rows.append(_rows_again(resolved, context, number, known))
    # Otherwise the documents of one stage could be those that another one holds out.
    inputs = {json.dumps(each.manifest["inputs"], sort_keys=True) for each in rows if each is not None}
    if len(inputs) > 1:
        raise RopewalkError(
            f"the documents have changed since the run in {output} began, so a new stage cannot have the same; restore "
            "them, or begin a new run"
        )
    return rows


def _rows_again(
    resolved: ResolvedRecipe, context: RunContext, number: int, known: tuple[str, str | None]
) -> PackedRows:
    """The rows that a stage of a resumed run began with: as they lie on disk, or packed again."""
    output = folder_of(context)
    folder, digest_ = _place(known[0], output), known[1]
    if not is_packed(folder):
        if folder.is_dir() and not (folder / WORK).is_dir():
            raise RopewalkError(
                f"the packed rows in {folder} have no manifest that can be read; delete the folder {folder}, and "
                "--resume packs them again"
            )
        packed = _rows(resolved, context, number)
        if packed.folder.name != folder.name:
            raise RopewalkError(
                f"the documents have changed since the run in {output} began, and its packed rows {folder} are gone; a "
                "resumed run must see the same rows: restore the documents, or start again"
            )
        return packed
    try:
        there = open_rows(folder, tokenizer=tokenizer_identity(resolved.tokenizer), verify=True)
    except RopewalkError as error:
        raise RopewalkError(f"{error} (--resume does so once {folder} is gone)") from error
    if _rows_digest(there) != digest_:
        raise RopewalkError(
            f"the packed rows in {folder} are not those that the run in {output} began with; a resumed run must see "
            f"the same rows: delete the folder {folder}, and --resume packs them again"
        )
    return there


def _place(folder: str, output: Path) -> Path:
    """Where the rows of a record lie, after the run may have been moved; earlier versions noted absolute paths."""
    moved = output / DATA / Path(folder).name
    return moved if moved.is_dir() else output / folder


def began_with(
    resolved: ResolvedRecipe,
    rows: Sequence[PackedRows | None],
    output: Path,
    before: Began | None = None,
) -> Began:
    """What a resumed run must find again: the folders of rows, and the identity of the model and of other text.

    Args:
        resolved: the recipe.
        rows: of every stage.
        output: folder of the run; rows within it are noted relative to it, so that it can be moved.
        before: what was noted when the run began, if it is resumed.
    """
    recipe, home = resolved.recipe, output.resolve()
    places = [None if each is None else each.folder.resolve() for each in rows]
    return Began(
        rows=[
            None if p is None else str(p.relative_to(home) if p.is_relative_to(home) else p) for p in places
        ],
        digests=[_rows_digest(each) for each in rows],
        validation_sources=_sources_digest(recipe.data.validation_sources),
        unpacked=_unpacked_digest(recipe),
        # A resumed run has compared it already, where it is at hand.
        model=model_digest(resolved.model) if before is None or before.model is None else before.model,
        precision=resolved.precision,
    )


def write_began(output: Path, began: Began) -> None:
    """Write the record that :func:`read_began` reads."""
    write_json(output / ROWS, began.model_dump())


def check_sources(resolved: ResolvedRecipe) -> None:
    """Read the first document of every source, or the manifests of packed rows: before anything that takes long.

    Raises:
        RopewalkError: as reading all of them does: a source that is not there, cannot be read or is given twice, a
            first record without its text field, rows of another tokenizer.
    """
    recipe, identity = resolved.recipe, tokenizer_identity(resolved.tokenizer)
    for folder in recipe.data.rows:
        open_rows(folder, tokenizer=identity)
    for sources in (recipe.data.sources, recipe.data.validation_sources):
        refuse_duplicates(sources)
        for spec in sources:
            records = (record for split in source_splits(spec) for record in read_input_split(split))
            next((d for record in records for d in record.documents if not is_blank(d)), None)


def model_at_start(output: Path) -> str | None:
    """Digest of the recipe's model when a run began; None where it was not at hand, or not recorded yet."""
    return read_began(output).model if (output / ROWS).is_file() else None


def _refuse_changed(resolved: ResolvedRecipe, began: Began, output: Path) -> None:
    """Raise where the model, or text that is not packed, is no longer what a run began with."""
    recipe, since = resolved.recipe, f"since the run in {output} began"
    if began.validation_sources != _sources_digest(recipe.data.validation_sources):
        raise RopewalkError(f"the validation sources have changed {since}; restore them, or start again")
    # Earlier versions recorded none of these.
    if began.unpacked is not None and began.unpacked != _unpacked_digest(recipe):
        what = "the rows in data.rows" if recipe.data.rows else "the documents of data.sources"
        raise RopewalkError(f"{what} have changed {since}; restore them, or start again")
    if began.model is not None and model_digest(resolved.model) not in (None, began.model):
        raise RopewalkError(
            f"the weights or the config of the model in {resolved.model} have changed {since}; restore them, or start "
            "again"
        )
    if began.precision is not None and began.precision != resolved.precision:
        here = (
            f"auto is {resolved.precision} here"
            if recipe.precision == "auto"
            else f"cannot go on in {recipe.precision}"
        )
        raise RopewalkError(
            f"the run in {output} began with precision {began.precision}, and {here}; set precision: {began.precision}"
        )


def _sources_digest(sources: Sequence[SourceSpec]) -> str | None:
    return digest(inputs_identity(sources)) if sources else None


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


def _packed_before(
    resolved: ResolvedRecipe, began: Began | None, others: Collection[int]
) -> list[PackedRows | None]:
    """The folders of rows that the recipe names, one for each stage."""
    recipe, identity = resolved.recipe, tokenizer_identity(resolved.tokenizer)
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
    for number, each in enumerate(rows):
        known = None if began is None or number in others else began.of_stage(number)
        if known is not None and known[1] != _rows_digest(each):
            raise RopewalkError(
                "the rows in data.rows are not those that the run began with; a resumed run must see the same rows: "
                "restore them, or start again"
            )
    return rows


def _rows(resolved: ResolvedRecipe, context: RunContext, number: int) -> PackedRows:
    recipe, reporter = resolved.recipe, context.told
    data = recipe.data
    made = False

    def progress(documents: int, tokens: int) -> None:
        nonlocal made
        made = True
        advance(documents, f"{tokens:,} tokens")

    with reporter.bar(f"stage {number + 1} data", None) as advance:
        config = PackConfig(
            sources=data.sources,
            tokenizer=resolved.tokenizer.name_or_path,
            rows=resolved.packing[number],
            mixture=data.mixture or MixtureSettings(),
            validation=ValidationSettings(
                documents=0 if data.validation_sources else data.validation_documents
            ),
            work=WorkSettings(workers=data.workers),
        )
        rows = prepare_rows(
            config, data.cache or folder_of(context) / DATA, tokenizer=resolved.tokenizer, progress=progress
        )
    if not made:
        # Another run has packed them, maybe long ago.
        open_rows(rows.folder, verify=True)
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


def rows_with_validation(recipe: Recipe, rows: Sequence[PackedRows | None]) -> PackedRows | None:
    """The packed rows whose held-out documents a run measures on; None where it trains and packs nothing."""
    packed = [each for each in rows if each is not None]
    if packed or not recipe.data.rows:
        return packed[-1] if packed else None
    return open_rows(recipe.data.rows[-1], verify=True)


def validation_documents(resolved: ResolvedRecipe, rows: PackedRows | None) -> list[Ids]:
    """The documents to measure on, as token ids; none where no suite reads text.

    Where no stage trains and so nothing is packed (``rows`` is None), all documents of the sources are as good as held
    out.

    Raises:
        RopewalkError: if there are none, or too few for one row: now, and not after the training.
    """
    recipe = resolved.recipe
    if not recipe.evaluation.reads_text:
        return []
    length, limit = resolved.target, recipe.evaluation.rows
    documents = held_out_documents(resolved, rows, length, limit)
    if not documents:
        more = (
            "pack the rows with --validation-documents"
            if recipe.data.rows
            else "raise data.validation_documents"
        )
        raise RopewalkError(f"there are no validation documents; {more}, or give data.validation_sources")
    _full_rows(documents, resolved, length, limit)
    return documents


def probe_rows(resolved: ResolvedRecipe, rows: PackedRows, context: int, limit: int) -> tuple[list[Row], str]:
    """Rows to choose a stage's base on, and what they are made of.

    Held-out documents where they fill a row, as in the evaluation; else the stage's first training rows. Either way
    every token sees all before it, whatever the stage's pattern: it is the distances that the bases differ in.

    Args:
        rows: packed rows of the stage.
        context: tokens of a row.
        limit: most rows.
    """
    documents = held_out_documents(resolved, rows, context, limit)
    try:
        return _full_rows(documents, resolved, context, limit), "held-out"
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
    resolved: ResolvedRecipe, rows: PackedRows | None, length: int, limit: int
) -> list[Ids]:
    """Documents that no stage trains on, enough for ``limit`` rows of ``length`` tokens if there are so many.

    Those of the validation sources; else those held out of packed rows; where no rows are packed, the sources' own.
    """
    recipe = resolved.recipe
    sources = recipe.data.validation_sources or (recipe.data.sources if rows is None else [])
    if sources:
        texts = read_documents(sources)
        return take_documents((d.input_ids for d in tokenise(texts, resolved.tokenizer)), length, limit)
    assert rows is not None
    return [rows.validation[i].input_ids for i in range(len(rows.validation))]


def _full_rows(documents: list[Ids], resolved: ResolvedRecipe, length: int, limit: int) -> list[Row]:
    bos, eos = resolved.tokenizer.bos_token_id, resolved.tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows
