"""Documents of a run: packed rows for training, and held-out documents for evaluation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ropewalk.attention.layout import IGNORED, PackedLayout, Row
from ropewalk.data import (
    PackedRows,
    StepRow,
    TrainingRows,
    open_rows,
    prepare_rows,
    rows_for_step,
    tokenizer_identity,
)
from ropewalk.data.mixture.report import mixture_reports, mixture_sentences
from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.data.read.draw import drawn
from ropewalk.data.read.identity import inputs_identity
from ropewalk.data.read.input_splits import is_blank, read_input_split, refuse_duplicates, source_splits
from ropewalk.data.rows.kinds import short_rows_of
from ropewalk.data.rows.pack import held_out_texts, refuse_cut_documents
from ropewalk.data.rows.packed_rows import WORK, is_packed
from ropewalk.data.settings import LIMITS, PackConfig, SourceSpec, ValidationSettings, WorkSettings
from ropewalk.data.statistics import targets_of_documents
from ropewalk.data.tokens.chat import required_template
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import DrawnDocuments, documents_of, evaluation_rows
from ropewalk.io.digests import digest
from ropewalk.io.files import write_json
from ropewalk.io.settings import deciding
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.recipe import Data, Recipe
from ropewalk.training.resolved import ResolvedRecipe, folder_of

ROWS = "rows.json"
DATA = "data"

HeldOut = tuple[tuple[int, ...], dict[str, Any]]
"""Hashes of the documents that a run holds out of its own data, and the identity of that data."""


def rows_identity(resolved: ResolvedRecipe, number: int, short: bool = False) -> dict[str, Any]:
    """What decides the rows of a stage, in the keys of the recipe; of packed rows that the recipe names, their digest.

    Not the documents themselves: a run goes on after its documents are gone.

    Args:
        resolved: the recipe.
        number: index of the stage, counted from 0.
        short: whether they are its short rows.
    """
    stage, data = resolved.recipe.stages[number], resolved.stages[number].settings.data
    own = {} if stage.data is None else {"data": deciding(stage.data)}
    if data.rows:
        return {"data": {"rows": rows_digest(named_rows(resolved, number, short=short))}}
    return {
        "stages": {str(number): {**_wanted(resolved, number, short), **own}},
        "data": deciding(resolved.recipe.data),
    }


def _wanted(resolved: ResolvedRecipe, number: int, short: bool) -> dict[str, Any]:
    """Settings by which rows belong to a stage."""
    stage, length = resolved.recipe.stages[number], resolved.short_lengths[number]
    if short:
        return {
            "context": stage.context,
            "pattern": "intra_document",
            "positions": "reset",
            "documents_up_to": length,
        }
    limits = {} if length is None else {"documents_above": length}
    return {"context": stage.context, "pattern": stage.pattern, "positions": stage.positions, **limits}


def pack_rows(
    resolved: ResolvedRecipe,
    context: RunContext,
    number: int,
    before: Mapping[str, Any] | None,
    held_out: Callable[[], HeldOut],
    short: bool = False,
) -> tuple[PackedRows, dict[str, Any]]:
    """Pack the rows of a stage, or open those that the recipe names.

    Args:
        resolved: the recipe.
        context: the run's folder and reporter.
        number: index of the stage, counted from 0.
        before: the record of rows that the run had for this stage, which must come out again; None for new rows.
        held_out: documents that the run holds out, for a stage with documents of its own.
        short: whether to pack the short rows of the stage.

    Returns:
        The rows, and their record: JSON values that say which they are, not where.

    Raises:
        RopewalkError: if the documents have changed and the rows are gone; or if rows that the recipe names are
            damaged, or were packed with another tokenizer or for another stage.
    """
    recipe = resolved.recipe
    withheld: HeldOut | None = None
    if recipe.data.rows:
        rows = named_rows(resolved, number, verify=True, short=short)
    else:
        if recipe.stages[number].own_documents and not recipe.data.validation_sources:
            withheld = held_out()
        rows = _rows(resolved, context, number, withheld, short)
        # The name is a digest of all that the rows depend on, the documents included.
        if before is not None and rows.folder.name != before["name"]:
            raise RopewalkError(
                f"the documents have changed since the run in {folder_of(context)} started, and the packed rows "
                f"{before['name']} of stage {number + 1} are gone, so the run cannot train on the same rows; restore "
                "the documents, or start a new run"
            )
    return rows, {
        # Of rows that the recipe names, the folder may have moved.
        "name": None if recipe.data.rows else rows.folder.name,
        "digest": rows_digest(rows),
        "rows": len(rows),
        **mixture_reports(rows.manifest),
        "documents": None if recipe.data.rows else digest(rows.manifest["inputs"]),
        "withheld": None if withheld is None else digest(withheld[1]),
    }


def open_packed(
    resolved: ResolvedRecipe,
    context: RunContext,
    number: int,
    record: Mapping[str, Any],
    verify: bool,
    short: bool = False,
) -> PackedRows | None:
    """Open the rows of a stage that an earlier process packed; None if they are gone.

    Args:
        resolved, context, number: as for :func:`pack_rows`.
        record: their record.
        verify: whether to verify their files.
        short: whether they are the short rows of the stage.

    Raises:
        RopewalkError: if they are damaged, or others.
    """
    if resolved.recipe.data.rows:
        return named_rows(resolved, number, verify, short)
    for folder in _places(resolved, context, number, record["name"], short):
        if is_packed(folder):
            return _opened(resolved, context, folder, record, verify)
        # A folder with WORK in it is an interrupted packing, which continues.
        if folder.is_dir() and not (folder / WORK).is_dir():
            raise RopewalkError(
                f"the packed rows in {folder} have no readable manifest; delete the folder {folder}, and --resume will "
                "pack the rows again"
            )
    return None


def _opened(
    resolved: ResolvedRecipe, context: RunContext, folder: Path, record: Mapping[str, Any], verify: bool
) -> PackedRows:
    try:
        rows = open_rows(folder, tokenizer=tokenizer_identity(resolved.tokenizer), verify=verify)
    except RopewalkError as error:
        raise RopewalkError(
            f"{error} (once the folder {folder.name} is deleted, --resume packs the rows again)"
        ) from error
    if rows_digest(rows) != record["digest"]:
        raise RopewalkError(
            f"the packed rows in {folder} are not those that the run in {folder_of(context)} started with; delete the "
            f"folder {folder}, and --resume will pack the rows again"
        )
    return rows


def _places(resolved: ResolvedRecipe, context: RunContext, number: int, name: str, short: bool) -> list[Path]:
    """Folders in which rows of a name may be, the one that the run has noted first."""
    output = folder_of(context)
    noted = noted_rows(output, short).get(number)
    data = resolved.stages[number].settings.data
    places = [] if noted is None or Path(noted).name != name else [output / noted]
    return list(dict.fromkeys([*places, Path(_cache(data, context)) / name, output / DATA / name]))


def noted_rows(output: Path, short: bool = False) -> dict[int, str]:
    """Folders of the rows of each stage, as far as ``rows.json`` tells: relative to the run's folder, or absolute."""
    try:
        rows = json.loads((output / ROWS).read_text(encoding="utf-8"))["short_rows" if short else "rows"]
        return {number: str(each) for number, each in enumerate(rows) if each is not None}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        # It only saves the user from packing again: what the rows must be is in the records of the run.
        return {}


def note_rows(output: Path, number: int, rows: PackedRows, short: bool = False) -> None:
    """Note in ``rows.json`` where the rows of a stage are; inside the run relatively, so that it can be moved."""
    place, home = rows.folder.resolve(), output.resolve()
    noted = {"rows": noted_rows(output), "short_rows": noted_rows(output, short=True)}
    folder = str(place.relative_to(home) if place.is_relative_to(home) else place)
    noted["short_rows" if short else "rows"][number] = folder
    written = {
        kind: [each.get(stage) for stage in range(max(each) + 1)] for kind, each in noted.items() if each
    }
    write_json(output / ROWS, written)


def refuse_other_documents(
    resolved: ResolvedRecipe, records: Sequence[tuple[int, Mapping[str, Any]]], output: Path
) -> None:
    """Raise if stages were packed from different states of the same sources.

    One could then train on documents that another one holds out.

    Args:
        resolved: the recipe.
        records: index of the stage and record of all rows.
        output: folder of the run.
    """
    if resolved.recipe.data.rows:
        return
    states: dict[str, set[str]] = {}
    for number, record in records:
        for sources, documents in (
            (resolved.stages[number].settings.data.sources, record["documents"]),
            (resolved.recipe.data.sources, record["withheld"]),
        ):
            if documents is not None:
                specs = json.dumps([spec.model_dump() for spec in sources])
                states.setdefault(specs, set()).add(documents)
    if any(len(found) > 1 for found in states.values()):
        raise RopewalkError(
            f"the documents have changed since the run in {output} started, so a new stage could train on documents "
            "that the run holds out for evaluation; restore the documents as they were, or start a new run"
        )


def held_out_identity(recipe: Recipe) -> dict[str, Any]:
    """What decides which documents the run holds out, apart from its packed rows, which tell it themselves."""
    data = recipe.data
    if data.validation_sources:
        return {"data": {"validation_sources": _sources_digest(data.validation_sources)}, "seed": recipe.seed}
    of_rows: dict[str, Any] = {"validation_documents": data.validation_documents}
    # A run without training has no packed rows, and takes its documents as they are.
    if not any(stage.steps for stage in recipe.stages):
        if data.rows:
            # The last folder, because rows_with_validation evaluates on its held-out documents.
            of_rows = {"rows": rows_digest(open_rows(data.rows[-1], verify=True))}
        else:
            of_rows = {"sources": _sources_digest(data.sources)}
    return {"data": of_rows, "seed": recipe.seed}


def may_lack_targets(manifest: Mapping[str, Any]) -> bool:
    """Whether documents of packed rows have tokens that are never targets."""
    return "chat_template" in manifest or "span_documents" in manifest["counts"]["reading"]


def refuse_steps_without_targets(resolved: ResolvedRecipe, rows: Sequence[TrainingRows | None]) -> None:
    """Raise if a step would have no token to train on, before training begins.

    Only chats and documents with spans of loss can lack targets: ``truncate`` may cut one before its first answer.

    Raises:
        RopewalkError: with the stage and the first such step.
    """
    for number, each in enumerate(rows):
        if each is None or not may_lack_targets(each.folder.manifest):
            continue
        settings = resolved.stages[number].settings
        silent = {
            StepRow(folder, index)
            for folder in (each.folder, each.short)
            for index in range(0 if folder is None else len(folder))
            if folder is not None
            and not targets_of_documents(folder.packed(index), folder.settings.anchor_length).any()
        }
        for step in range(settings.stage.steps if silent else 0):
            # The order of the training itself, so that only a step that would occur is refused.
            wanted = each.of_step(step, settings.stage.rows_per_step, settings.seed)
            if silent.issuperset(wanted):
                raise RopewalkError(
                    f"stage {number + 1}: step {step + 1} has no token to train on, because all documents in its rows "
                    "were cut before their first target; set data.long_documents: skip"
                )


def held_out_of_run(resolved: ResolvedRecipe, context: RunContext) -> HeldOut:
    """Hashes of the documents that the run holds out of its own data, and the identity of that data."""
    with context.rank_0_reporter.bar("held-out documents", None) as advance:
        config = _pack_config(resolved, resolved.recipe.data, 0)
        return held_out_texts(
            config,
            _cache(resolved.recipe.data, context),
            tokenizer=resolved.tokenizer,
            progress=lambda documents, tokens: advance(documents, f"{tokens:,} tokens"),
        )


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
    for each in data:
        refuse_cut_documents(each.sources, recipe.data, each.mixture)
    packed = [each.sources for each in data]
    for sources in (*packed, recipe.data.validation_sources):
        refuse_duplicates(sources)
        if any(spec.messages_field for spec in sources):
            required_template(resolved.tokenizer)
        for spec in sources:
            records = (record for split in source_splits(spec) for record in read_input_split(split))
            # One document of each source shows most mistakes (a wrong field, a damaged file) before anything is loaded.
            next((d for record in records for d in record.documents if not is_blank(d)), None)


def _sources_digest(sources: Sequence[SourceSpec]) -> str | None:
    return digest(inputs_identity(sources)) if sources else None


def rows_digest(rows: PackedRows) -> str:
    """Digest of packed rows: of their settings, and of the files that they are in."""
    files = [*rows.manifest["row_files"], rows.manifest["validation_file"]]
    return digest([rows.manifest["digest"], [each["sha256"] for each in files]])


def trained_kinds(resolved: ResolvedRecipe, number: int, rows: TrainingRows) -> dict[str, Any]:
    """Rows and trained tokens of both kinds of rows over all steps of a stage, and their shares, as JSON values.

    Args:
        resolved: the recipe.
        number: index of the stage, counted from 0.
        rows: its rows, of both kinds.
    """
    settings = resolved.stages[number].settings
    steps = (
        rows.of_step(step, settings.stage.rows_per_step, settings.seed)
        for step in range(settings.stage.steps)
    )
    times = Counter(row for step in steps for row in step)
    found: dict[str, dict[str, Any]] = {}
    for kind, folder in (("short", rows.short), ("long", rows.folder)):
        assert folder is not None
        read = {row.number: count for row, count in times.items() if row.folder is folder}
        anchor = folder.settings.anchor_length
        found[kind] = {
            "documents": folder.settings.kind,
            "packed_rows": len(folder),
            "rows": sum(read.values()),
            "trained_tokens": sum(
                count * int(targets_of_documents(folder.packed(index), anchor).sum())
                for index, count in read.items()
            ),
        }
    for name in ("rows", "trained_tokens"):
        total = sum(each[name] for each in found.values())
        for each in found.values():
            each[f"{name}_share"] = each[name] / total if total else None
    return found


def named_rows(
    resolved: ResolvedRecipe, number: int, verify: bool = False, short: bool = False
) -> PackedRows:
    """The folder of rows for a stage, or of its short rows, among those that the recipe names.

    Raises:
        RopewalkError: if none of them fits the stage, or several do.
    """
    stage, identity = resolved.recipe.stages[number], tokenizer_identity(resolved.tokenizer)
    key = f"stages.{number}.data.rows" if stage.own_documents else "data.rows"
    there = [open_rows(folder, tokenizer=identity) for folder in resolved.stages[number].settings.data.rows]
    wanted = _wanted(resolved, number, short)
    names = tuple(dict.fromkeys([*wanted, *(limit for limit in LIMITS)]))
    fitting = [
        each for each in there if all(getattr(each.settings, name) == wanted.get(name) for name in names)
    ]
    if len(fitting) != 1:
        found = ", ".join(
            f"{each.folder} ({_in_words({name: getattr(each.settings, name) for name in names}, ', ')})"
            for each in fitting or there
        )
        raise RopewalkError(
            f"stage {number + 1} needs one folder of rows with {_in_words(wanted, ' and ')}, but {key} names "
            + (
                f"{len(fitting)} such folders; keep only one of {found}"
                if fitting
                else f"no such folder, only {found}; pack the rows of this stage, and add their folder to {key}"
            )
        )
    return open_rows(fitting[0].folder, tokenizer=identity, verify=True) if verify else fitting[0]


def _in_words(settings: Mapping[str, Any], last: str) -> str:
    """Settings of rows in words, without those that are not set."""
    *most, least = (f"{name} {value}" for name, value in settings.items() if value is not None)
    return f"{', '.join(most)}{last}{least}"


def refuse_other_split(recipe: Recipe, rows: Sequence[PackedRows | None]) -> None:
    """Raise if a stage's own rows could contain documents that the run's rows hold out for evaluation."""
    if not recipe.data.rows or recipe.data.validation_sources:
        return
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
    resolved: ResolvedRecipe,
    data: Data,
    number: int,
    withheld: tuple[int, ...] | None = None,
    short: bool = False,
) -> PackConfig:
    """Settings for packing rows of a stage; ``withheld``: hashes of documents it neither trains on nor holds out."""
    packing = resolved.packing[number]
    rows = packing.short_rows if short else packing.rows
    assert rows is not None
    # Documents withheld from a stage's own data are those held out already; it holds out no others.
    held_out = 0 if data.validation_sources or withheld is not None else data.validation_documents
    return PackConfig(
        sources=data.sources,
        tokenizer=resolved.tokenizer.name_or_path,
        rows=rows,
        mixture=data.mixture or MixtureSettings(),
        validation=ValidationSettings(documents=held_out),
        work=WorkSettings(workers=data.workers),
        withheld=withheld or (),
    )


def _cache(data: Data, context: RunContext) -> str | Path:
    return data.cache or folder_of(context) / DATA


def _rows(
    resolved: ResolvedRecipe, context: RunContext, number: int, held_out: HeldOut | None, short: bool
) -> PackedRows:
    recipe, reporter = resolved.recipe, context.rank_0_reporter
    data = resolved.stages[number].settings.data
    withheld = None
    if recipe.stages[number].own_documents:
        # The stage's own documents may include those on which the run is evaluated.
        withheld = () if held_out is None else held_out[0]
    made = False

    def progress(documents: int, tokens: int) -> None:
        nonlocal made
        made = True
        advance(documents, f"{tokens:,} tokens")

    kind = "" if resolved.short_lengths[number] is None else "short " if short else "long "
    with reporter.bar(f"stage {number + 1} {kind}data", None) as advance:
        config = _pack_config(resolved, data, number, withheld, short)
        try:
            rows = prepare_rows(
                config,
                _cache(data, context),
                tokenizer=resolved.tokenizer,
                progress=progress,
                note=reporter.note,
            )
        except RopewalkError as error:
            if not kind:
                raise
            raise RopewalkError(f"stage {number + 1}, {kind}rows: {error}") from error
    if not made:
        # The rows come from a cache that another run filled, so their digests must be verified.
        open_rows(rows.folder, verify=True)
    stage = recipe.stages[number]
    trained = stage.steps * stage.rows_per_step
    if stage.short_rows is not None:
        of_short = short_rows_of(stage.short_rows, trained)
        trained = of_short if short else trained - of_short
    epochs = trained / len(rows)
    repeated = f", read {epochs:.1f} times" if epochs > 1 else ""
    of_kind = f" of {rows.settings.kind}" if kind else ""
    reporter.note(
        f"stage {number + 1}: {len(rows)} {kind}training rows of {stage.context} tokens{of_kind}{repeated}"
    )
    for sentence in mixture_sentences(rows.manifest):
        reporter.note(f"stage {number + 1}: {sentence}")
    return rows


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


def validation_documents(
    resolved: ResolvedRecipe, rows: PackedRows | None, searched: frozenset[int] = frozenset()
) -> DrawnDocuments:
    """Token ids of the evaluation documents; none if no suite reads documents.

    If no stage trains, nothing is packed (``rows`` is None) and all documents of the sources count as held out.

    Args:
        resolved: the recipe.
        rows: packed rows whose held-out documents the run evaluates on.
        searched: hashes of documents that are left out, because searches of the run measure on them.

    Raises:
        RopewalkError: if there are no documents, or too few for one row; the error comes before training.
    """
    recipe = resolved.recipe
    if not recipe.evaluation.reads_text:
        return DrawnDocuments([], [])
    length, limit = resolved.reach, recipe.evaluation.rows
    documents = _unsearched(resolved, rows, searched)
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


def _unsearched(
    resolved: ResolvedRecipe, rows: PackedRows | None, searched: frozenset[int]
) -> DrawnDocuments:
    """Held-out documents for the evaluation, without those on which a search measures."""
    length, wanted = resolved.reach, resolved.recipe.evaluation.rows
    limit, known = wanted, 0
    while True:
        documents = held_out_documents(resolved, rows, length, limit)
        left = documents.without(searched) if searched else documents
        # Of sources, only as many documents are read as usually suffice: read more in the place of those left out.
        if len(left) == len(documents) or len(documents) == known or _fill(left, resolved, length, wanted):
            return left
        known, limit = len(documents), 2 * limit


def _fill(documents: DrawnDocuments, resolved: ResolvedRecipe, length: int, wanted: int) -> bool:
    try:
        return len(full_rows(documents, resolved, length, wanted)) == wanted
    except RopewalkError:
        return False


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
