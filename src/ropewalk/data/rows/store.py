"""From sources to packed rows on disk: once, resumable, and shared between machines where they like."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.mixture import MixtureSettings, mix
from ropewalk.data.read.documents import SourceSpec
from ropewalk.data.read.files import hidden_entries
from ropewalk.data.read.identity import file_digests, inputs_identity
from ropewalk.data.read.input_splits import Portion, plan_portions
from ropewalk.data.rows.assemble import Packed, assemble_rows, pack_documents, refuse_no_rows
from ropewalk.data.rows.manifest import description, length_states, versions
from ropewalk.data.rows.settings import PackingSettings
from ropewalk.data.rows.special_tokens import DocumentEnds
from ropewalk.data.rows.stored import (
    FORMAT,
    FORMAT_VERSION,
    VALIDATION,
    WORK,
    Making,
    PackedRows,
    begin,
    give_up,
    is_packed,
    open_rows,
    packed_folders,
    row_files,
    rows_file,
)
from ropewalk.data.tokens.arrow import INT32_LIST, INT64_LIST, STRING, STRING_LIST, write_table
from ropewalk.data.tokens.corpus import Corpus, tokenise_portions
from ropewalk.data.tokens.holdout import hold_out
from ropewalk.data.tokens.split import ValidationSettings
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
class Job:
    """What rows are to be made, and how.

    Attributes:
        specs: the sources, in the order that their documents are read.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        settings: how documents become rows.
        mixture: which documents, how often and in which order; None takes each once, as they are read.
        validation: which documents are held out; None holds out none.
    """

    specs: Sequence[SourceSpec]
    tokenizer: Any
    settings: PackingSettings
    mixture: MixtureSettings | None = None
    validation: ValidationSettings | None = None


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


def prepare_rows(
    specs: Sequence[SourceSpec],
    tokenizer: Any,
    settings: PackingSettings,
    cache_dir: str | Path,
    validation: ValidationSettings | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    mixture: MixtureSettings | None = None,
) -> PackedRows:
    """Make packed rows, or open those that the same call made before.

    The rows lie in a folder below ``cache_dir`` whose name is a digest of all they depend on: the sources'
    files, the tokenizer, the settings, the mixture, the validation split and this format's version.
    Tokenised documents are kept beside them, so that rows of another length need no tokenisation.

    Args:
        specs, tokenizer, settings, mixture, validation: as in :class:`Job`.
        cache_dir: the folder to keep packed rows in; it is made if need be.
        workers: tokenisation processes.
        progress: called with documents and tokens so far; not at all where the rows are found.

    Raises:
        RopewalkError: as :func:`pack_rows`.
    """
    cache = Path(cache_dir).expanduser()
    begun = _begun(Job(specs, tokenizer, settings, mixture, validation), cache)
    folder = cache / begun.plan["digest"]
    rows = _pack(begun, folder, cache / "tokens", workers, (0, 1), progress, None)
    assert isinstance(rows, PackedRows)
    return rows


def pack_rows(
    job: Job,
    folder: str | Path,
    *,
    tokens: str | Path | None = None,
    workers: int = 1,
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    written: Writing | None = None,
) -> PackedRows | Part:
    """Read, tokenise, mix and pack documents into a folder; go on where an earlier call was interrupted.

    Every file appears whole. The files of a run that was killed and begun again are, byte for byte, those of
    one that was not; so are those of several machines together, each of which writes a stretch of the rows.

    Args:
        job: what to make.
        folder: where to; it must be new, empty, or of the same job.
        tokens: folder of tokenised documents, kept and used by every job that reads the same; None keeps
            them in ``folder`` until the rows are complete.
        workers: tokenisation processes.
        shard: (number from 0, of how many) machines; each begins with its own share of the documents. With
            one folder of tokens they share that work, without it each does all of it.
        progress: called with documents and tokens so far.
        written: called with rows on disk and rows in all.

    Returns:
        The rows, or a Part where other machines' files are not there yet.

    Raises:
        RopewalkError: for bad sources or settings, for too few tokens to fill one row, if a file changed
            while it was read, if the folder holds something else or cannot be written.
    """
    number, machines = shard
    if machines < 1 or not 0 <= number < machines:
        raise RopewalkError(
            f"shard {number}/{machines} is none: the first of n machines is 0/n, the last n-1/n"
        )
    folder = Path(folder).expanduser()
    store = folder / WORK / "tokens" if tokens is None else Path(tokens).expanduser()
    begun = _begun(job, folder, store)
    return _pack(begun, folder, store, workers, shard, progress, written)


@dataclass(frozen=True)
class _Begun:
    """A job with its tokenizer loaded, its sources cut into portions, and all that its rows depend on."""

    job: Job
    tokenizer: Any
    portions: tuple[Portion, ...]
    plan: dict[str, Any]


def _begun(job: Job, *folders: Path) -> _Begun:
    """Check a job before anything is written; ``folders`` are what it will write to."""
    for folder in folders:
        _refuse_circles(job.specs, folder)
    tokenizer = load_tokenizer(job.tokenizer) if isinstance(job.tokenizer, str) else job.tokenizer
    job.settings.bos_policy(special_ids(tokenizer))
    portions = plan_portions(job.specs)
    depends = {
        "format_version": FORMAT_VERSION,
        "inputs": inputs_identity(job.specs),
        "settings": asdict(job.settings),
        "mixing": None if job.mixture is None or job.mixture.as_is else asdict(job.mixture),
        "specs": [asdict(spec) for spec in job.specs],
        "tokenizer": tokenizer_identity(tokenizer),
        "validation": asdict(job.validation or ValidationSettings()),
    }
    # As it will be read again: tuples are lists in JSON.
    plan = {"digest": digest(depends)[:32], **json.loads(json.dumps(depends))}
    return _Begun(job, tokenizer, portions, plan)


def _pack(
    begun: _Begun,
    folder: Path,
    tokens: Path,
    workers: int,
    shard: tuple[int, int],
    progress: Progress | None,
    written: Writing | None,
) -> PackedRows | Part:
    job, plan, tokenizer = begun.job, begun.plan, begun.tokenizer
    if begin(folder, plan):
        return open_rows(folder)
    try:
        corpus = tokenise_portions(
            begun.portions, tokenizer, tokens, shard=shard, workers=workers, progress=progress
        )
        if inputs_identity(job.specs) != plan["inputs"]:
            raise RopewalkError("a file changed while it was being packed; pack again when it is complete")
        try:
            packed, told, validation = _planned(job, tokenizer, corpus)
        except RopewalkError:
            give_up(folder)
            raise
        named = job.tokenizer if isinstance(job.tokenizer, str) else tokenizer.name_or_path
        told["counts"]["reading"]["hidden_entries"] = hidden_entries(job.specs)
        manifest = {
            "format": FORMAT,
            **plan,
            "tokenizer": {"name_or_path": named, **plan["tokenizer"]},
            **told,
            "files": file_digests(job.specs),
            "versions": versions(),
        }
        try:
            return _write(folder, packed, corpus, validation, manifest, shard, written)
        finally:
            corpus.close()
    except (OSError, RopewalkError):
        # Another process may have finished the same rows, and taken the unfinished ones' folder away.
        if is_packed(folder):
            shutil.rmtree(folder / WORK, ignore_errors=True)
            return open_rows(folder)
        raise


def _planned(job: Job, tokenizer: Any, corpus: Corpus) -> tuple[Packed, dict[str, Any], NDArray[np.int64]]:
    """The plan of all rows, what the manifest says of it, and the documents that are held out."""
    settings = job.settings
    split = hold_out(corpus, job.validation or ValidationSettings(), special_ids(tokenizer))
    documents, mixture = split.training, None
    if job.mixture is not None and not job.mixture.as_is:
        mixture = mix(corpus.lengths[documents], corpus.source_ids[documents], corpus.sources, job.mixture)
        documents = documents[mixture.documents]
    # Before the plan is there: both take memory by the document.
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
    # The backend that documents are tokenised with, and that the tokenizer's identity is of.
    backend, special, tags = backend_tokenizer(tokenizer), special_ids(tokenizer), []
    for source in sources:
        ids = backend.encode(tag.format(source=source), add_special_tokens=False).ids
        if not ids:
            raise RopewalkError(f"the tag {tag!r} gives no token for the source {source!r}")
        if {special.bos, special.eos} & set(ids):
            raise RopewalkError(f"the tag {tag!r} holds a BOS or EOS token for the source {source!r}")
        tags.append(np.array(ids, np.int32))
    return tags


def _write(
    folder: Path,
    packed: Packed,
    corpus: Corpus,
    validation: NDArray[np.int64],
    manifest: dict[str, Any],
    shard: tuple[int, int],
    written: Writing | None,
) -> PackedRows | Part:
    context, rows = packed.settings.context, packed.num_rows
    per_file = rows_per_file(rows, context)
    making = Making(folder, manifest, row_files(rows, per_file))
    number, machines = shard
    mine = range(len(making.files) * number // machines, len(making.files) * (number + 1) // machines)
    if not making.intact(VALIDATION):
        columns = {"input_ids": INT32_LIST, "source": STRING}
        making.seal(VALIDATION, write_table(folder / VALIDATION, columns, _held_out(corpus, validation)))
    for file in mine:
        first, stop = file * per_file, min(rows, (file + 1) * per_file)
        name = rows_file(file)
        if not making.intact(name):
            making.seal(name, write_table(folder / name, _COLUMNS, _batches(packed, corpus, first, stop)))
        if written is not None:
            written(stop - mine.start * per_file, min(rows, mine.stop * per_file) - mine.start * per_file)
    missing = making.publish_if_complete({VALIDATION, *(rows_file(file) for file in mine)})
    if not missing:
        return open_rows(folder)
    there = sum(count for name, count in making.files if name not in missing)
    return Part(folder, there, rows, tuple(missing))


def _held_out(corpus: Corpus, validation: NDArray[np.int64]) -> Iterator[dict[str, list[Any]]]:
    """The validation documents, about a million tokens at a time."""
    ends = np.cumsum(corpus.lengths[validation])
    for batch in np.split(validation, np.flatnonzero(np.diff(ends // BATCH_TOKENS)) + 1):
        yield {
            "input_ids": [corpus.tokens(n) for n in batch.tolist()],
            "source": [corpus.sources[s] for s in corpus.source_ids[batch]],
        }


def rows_per_file(rows: int, context: int) -> int:
    """Rows of each file but the last, from the number of rows and their length alone."""
    least, most = (max(1, tokens // context) for tokens in (LEAST_FILE_TOKENS, MOST_FILE_TOKENS))
    return min(most, max(least, -(-rows // FILES)))


def _batches(packed: Packed, corpus: Corpus, first: int, stop: int) -> Iterator[dict[str, list[Any]]]:
    step = max(1, BATCH_TOKENS // packed.settings.context)
    for begin_row in range(first, stop, step):
        rows = assemble_rows(packed, corpus, begin_row, min(stop, begin_row + step))
        yield {name: [getattr(row, name) for row in rows] for name in _COLUMNS}


def _refuse_circles(specs: Sequence[SourceSpec], cache: Path) -> None:
    """Rows must not become documents of the next run, and so change what the next run depends on."""
    for spec in specs:
        path = Path(spec.path).expanduser()
        if not path.is_dir():
            continue
        if cache.resolve().is_relative_to(path.resolve()):
            raise RopewalkError(f"packed rows cannot be kept in {cache}, inside the source {spec.path}")
        if is_packed(path) or packed_folders(path):
            raise RopewalkError(f"{spec.path} holds rows that are packed already, not documents")
