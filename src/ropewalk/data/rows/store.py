"""Pack sources into rows on disk; runs are resumable, cached, and can be shared between machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.mixture import mix
from ropewalk.data.read.files import hidden_entries
from ropewalk.data.read.identity import file_digests, inputs_identity
from ropewalk.data.read.input_splits import InputSplit, plan_input_splits
from ropewalk.data.rows.assemble import Packed, assemble_rows, pack_documents, refuse_no_rows
from ropewalk.data.rows.manifest import description, length_states, versions
from ropewalk.data.rows.special_tokens import DocumentEnds
from ropewalk.data.rows.stored import (
    FORMAT,
    FORMAT_VERSION,
    VALIDATION,
    WORK,
    PackedRows,
    RowsWriter,
    begin,
    give_up,
    is_packed,
    open_rows,
    packed_folders,
    row_files,
    rows_file,
)
from ropewalk.data.settings import PackConfig, SourceSpec
from ropewalk.data.tokens.arrow import INT32_LIST, INT64_LIST, STRING, STRING_LIST, write_table
from ropewalk.data.tokens.corpus import Corpus, tokenise_splits
from ropewalk.data.tokens.split import hold_out
from ropewalk.data.tokens.tokenise import (
    Progress,
    backend_tokenizer,
    load_tokenizer,
    special_ids,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest

MOST_FILE_TOKENS, LEAST_FILE_TOKENS, FILES = 1 << 25, 1 << 16, 64
"""Rows are divided into about FILES files within these bounds: what machines share, and a killed run repeats."""

BATCH_TOKENS = 1 << 20

_COLUMNS = {
    "input_ids": INT32_LIST,
    "segment_lengths": INT32_LIST,
    "segment_documents": INT32_LIST,
    "sources": STRING_LIST,
    "numbers": INT64_LIST,
    "masked": INT32_LIST,
}

Writing = Callable[[int, int], None]
"""Called with the rows that are on disk and those that there will be."""


@dataclass(frozen=True)
class Part:
    """What one machine of several has written, where rows of the others are still missing.

    Attributes:
        folder: where the rows lie.
        rows: rows that are there.
        total: rows that there will be.
        missing: files of rows that are not there yet.
    """

    folder: Path
    rows: int
    total: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """A packing run with its tokenizer loaded and its sources cut into input splits.

    Attributes:
        config: what rows to make.
        tokenizer: a transformers tokenizer with a fast backend.
        splits: the input splits of all sources.
        depends: all that the rows depend on, as JSON has it, and ``digest`` of it.
    """

    config: PackConfig
    tokenizer: Any
    splits: tuple[InputSplit, ...]
    depends: dict[str, Any]


def prepare_rows(
    config: PackConfig, cache_dir: str | Path, *, tokenizer: Any = None, progress: Progress | None = None
) -> PackedRows:
    """Make packed rows, or open those that the same call made before.

    The rows lie in a folder below ``cache_dir`` whose name is a digest of all they depend on: the sources'
    files, the tokenizer, the settings, the mixture, the validation split and this format's version.
    Tokenised documents are kept beside them, so that rows of another length need no tokenisation.

    Args:
        config: what rows to make; its shard and token store are those of one machine and of ``cache_dir``.
        cache_dir: the folder to keep packed rows in; it is made if need be.
        tokenizer: the config's tokenizer where it is loaded already.
        progress: called with documents and tokens so far; not at all where the rows are found.

    Raises:
        RopewalkError: as :func:`pack_rows`.
    """
    cache = Path(cache_dir).expanduser()
    job = _job(config.alone(), tokenizer, cache)
    rows = _pack(job, cache / job.depends["digest"], cache / "tokens", progress, None)
    assert isinstance(rows, PackedRows)
    return rows


def pack_rows(
    config: PackConfig,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    written: Writing | None = None,
) -> PackedRows | Part:
    """Read, tokenise, mix and pack documents into a folder; go on where an earlier call was interrupted.

    Every file appears whole. The files of a run that was killed and begun again are, byte for byte, those of
    one that was not; so are those of several machines together, each of which writes a stretch of the rows.

    Args:
        config: what rows to make, and this machine's part of the work.
        folder: where to; it must be new, empty, or of the same rows.
        tokenizer: the config's tokenizer where it is loaded already.
        progress: called with documents and tokens so far.
        written: called with rows on disk and rows in all.

    Returns:
        The rows, or a Part where other machines' files are not there yet.

    Raises:
        RopewalkError: for bad sources or settings, for too few tokens to fill one row, if a file changed
            while it was read, if the folder holds something else or cannot be written.
    """
    folder = Path(folder).expanduser()
    store = config.work.token_store
    tokens = folder / WORK / "tokens" if store is None else store.expanduser()
    return _pack(_job(config, tokenizer, folder, tokens), folder, tokens, progress, written)


def _job(config: PackConfig, tokenizer: Any, *folders: Path) -> _Job:
    """Check a packing run before anything is written; ``folders`` are what it will write to."""
    for folder in folders:
        _refuse_circles(config.sources, folder)
    tokenizer = load_tokenizer(config.tokenizer) if tokenizer is None else tokenizer
    config.rows.bos_policy(special_ids(tokenizer))
    splits = plan_input_splits(config.sources)
    depends = {
        "format_version": FORMAT_VERSION,
        "inputs": inputs_identity(config.sources),
        "settings": config.rows.model_dump(),
        "mixing": None if config.mixture.as_is else config.mixture.model_dump(),
        "specs": [source.model_dump() for source in config.sources],
        "tokenizer": tokenizer_identity(tokenizer),
        "validation": config.validation.model_dump(),
    }
    # Round-trip through JSON so that later comparisons with the file see lists instead of tuples.
    depends = {"digest": digest(depends)[:32], **json.loads(json.dumps(depends))}
    return _Job(config, tokenizer, splits, depends)


def _pack(
    job: _Job, folder: Path, tokens: Path, progress: Progress | None, written: Writing | None
) -> PackedRows | Part:
    config, tokenizer = job.config, job.tokenizer
    if begin(folder, job.depends):
        return open_rows(folder)
    try:
        corpus = tokenise_splits(
            job.splits,
            tokenizer,
            tokens,
            work=config.work,
            progress=progress,
        )
        if inputs_identity(config.sources) != job.depends["inputs"]:
            raise RopewalkError("a file changed during packing; pack again when the file is complete")
        try:
            packed, told, validation = _planned(config, tokenizer, corpus)
        except RopewalkError:
            give_up(folder)
            raise
        told["counts"]["reading"]["hidden_entries"] = hidden_entries(config.sources)
        manifest = {
            "format": FORMAT,
            **job.depends,
            "tokenizer": {"name_or_path": config.tokenizer, **job.depends["tokenizer"]},
            **told,
            "files": file_digests(config.sources),
            "versions": versions(),
        }
        writer = RowsWriter(folder, manifest, row_files(packed.num_rows, rows_per_file(packed)))
        try:
            return _write(writer, packed, corpus, validation, config.work.shard, written)
        finally:
            corpus.close()
    except (OSError, RopewalkError):
        # Another process may have finished the same rows and removed the folder of unfinished work.
        if is_packed(folder):
            shutil.rmtree(folder / WORK, ignore_errors=True)
            return open_rows(folder)
        raise


def _planned(
    config: PackConfig, tokenizer: Any, corpus: Corpus
) -> tuple[Packed, dict[str, Any], NDArray[np.int64]]:
    """The plan of all rows, what the manifest says of it, and the documents that are held out."""
    settings = config.rows
    split = hold_out(corpus, config.validation, special_ids(tokenizer))
    documents, mixture = split.training, None
    if not config.mixture.as_is:
        mixture = mix(corpus.lengths[documents], corpus.source_ids[documents], corpus.sources, config.mixture)
        documents = documents[mixture.documents]
    # Compute before planning: both need memory per document, and this memory is free again afterwards.
    lengths = length_states(corpus, split.training, None if mixture is None else documents, settings.context)
    ends = DocumentEnds(
        corpus.lengths[documents],
        corpus.first_ids[documents],
        corpus.last_ids[documents],
        corpus.source_ids[documents],
    )
    tags = None if settings.tag is None else tag_tokens(tokenizer, settings.tag, corpus.sources)
    packed = pack_documents(documents, ends, corpus.sources, settings, special_ids(tokenizer), tags)
    counts = packed.counts(ends)
    refuse_no_rows(packed, counts, len(split.validation) + split.withheld_duplicates)
    told = {**description(corpus, split, mixture, documents, counts), **lengths}
    return packed, told, split.validation


def tag_tokens(tokenizer: Any, tag: str, sources: Sequence[str]) -> list[NDArray[np.int32]]:
    """The tag of each source as token ids, without special tokens.

    Raises:
        RopewalkError: if a source's tag gives no token, or a BOS or EOS token.
    """
    # Use the same backend as for documents, the one that the tokenizer's identity covers.
    backend, special, tags = backend_tokenizer(tokenizer), special_ids(tokenizer), []
    for source in sources:
        ids = backend.encode(tag.format(source=source), add_special_tokens=False).ids
        if not ids:
            raise RopewalkError(
                f"the tag {tag!r} produces no token for the source {source!r}; change the tag"
            )
        if {special.bos, special.eos} & set(ids):
            raise RopewalkError(
                f"the tag {tag!r} contains a BOS or EOS token for the source {source!r}; change the tag"
            )
        tags.append(np.array(ids, np.int32))
    return tags


def _write(
    writer: RowsWriter,
    packed: Packed,
    corpus: Corpus,
    validation: NDArray[np.int64],
    shard: tuple[int, int],
    written: Writing | None,
) -> PackedRows | Part:
    """Write this machine's files, those that are not there yet, and finish the folder if all are."""
    folder, rows, per_file = writer.folder, packed.num_rows, rows_per_file(packed)
    number, machines = shard
    mine = range(len(writer.files) * number // machines, len(writer.files) * (number + 1) // machines)
    if not writer.intact(VALIDATION):
        columns = {"input_ids": INT32_LIST, "source": STRING}
        writer.commit(VALIDATION, write_table(folder / VALIDATION, columns, _held_out(corpus, validation)))
    for file in mine:
        first, stop = file * per_file, min(rows, (file + 1) * per_file)
        name = rows_file(file)
        if not writer.intact(name):
            writer.commit(name, write_table(folder / name, _COLUMNS, _batches(packed, corpus, first, stop)))
        if written is not None:
            written(stop - mine.start * per_file, min(rows, mine.stop * per_file) - mine.start * per_file)
    missing = writer.finish({VALIDATION, *(rows_file(file) for file in mine)})
    if not missing:
        return open_rows(folder)
    there = sum(count for name, count in writer.files if name not in missing)
    return Part(folder, there, rows, tuple(missing))


def _held_out(corpus: Corpus, validation: NDArray[np.int64]) -> Iterator[dict[str, list[Any]]]:
    """The validation documents, about a million tokens at a time."""
    ends = np.cumsum(corpus.lengths[validation])
    for batch in np.split(validation, np.flatnonzero(np.diff(ends // BATCH_TOKENS)) + 1):
        yield {
            "input_ids": [corpus.tokens(n) for n in batch.tolist()],
            "source": [corpus.sources[s] for s in corpus.source_ids[batch]],
        }


def rows_per_file(packed: Packed) -> int:
    """Rows of each file but the last, from the number of rows and their length alone."""
    context = packed.settings.context
    least, most = (max(1, tokens // context) for tokens in (LEAST_FILE_TOKENS, MOST_FILE_TOKENS))
    return min(most, max(least, -(-packed.num_rows // FILES)))


def _batches(packed: Packed, corpus: Corpus, first: int, stop: int) -> Iterator[dict[str, list[Any]]]:
    step = max(1, BATCH_TOKENS // packed.settings.context)
    for begin_row in range(first, stop, step):
        rows = assemble_rows(packed, corpus, begin_row, min(stop, begin_row + step))
        yield {name: [getattr(row, name) for row in rows] for name in _COLUMNS}


def _refuse_circles(specs: Sequence[SourceSpec], cache: Path) -> None:
    """Refuse to read packed rows as documents, or to write rows into a source folder."""
    for spec in specs:
        path = Path(spec.path).expanduser()
        if not path.is_dir():
            continue
        if cache.resolve().is_relative_to(path.resolve()):
            raise RopewalkError(
                f"the output folder {cache} lies inside the source {spec.path}; choose a folder outside it"
            )
        if is_packed(path) or packed_folders(path):
            raise RopewalkError(f"{spec.path} contains packed rows; give the original documents instead")
