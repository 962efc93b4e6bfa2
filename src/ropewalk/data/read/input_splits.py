"""Input splits: parts of the sources that can be read independently, the unit in which machines share work."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.data.read.documents import Document, Record, TokenisedDocument
from ropewalk.data.read.files import (
    HUGGING_FACE,
    companions,
    existing_path,
    file_kind,
    is_named,
    list_folder,
    names_records,
    plain_stem,
    read_text,
    read_text_if_text,
    source_files,
    split_suffix,
)
from ropewalk.data.read.hub import count_shards, hugging_face_stem, parse_hugging_face, read_hugging_face
from ropewalk.data.read.identity import embedded_corpus, file_identities, named_identity
from ropewalk.data.read.records import (
    holds_json_lines,
    read_json_lines,
    read_table,
    row_group_sizes,
)
from ropewalk.data.read.token_files import document_ranges, read_token_file, token_file_kind
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from ropewalk.io.files import refuse_lfs_pointer

RECORDS = frozenset({"lines", "parquet", "arrow", "tokens"})
"""Kinds of files that hold many records."""

SPLIT_BYTES = 1 << 24
"""Intended size of a split in bytes; files are cut or combined where possible."""


@dataclass(frozen=True)
class InputSplit:
    """A contiguous part of one source; all splits in order make up the sources in reading order.

    Attributes:
        spec: the source.
        files: files to read; empty for a dataset on the Hub or the embedded corpus.
        start, stop: range within them: bytes of an uncompressed JSON lines file, row groups of a Parquet file,
            documents of a file of token ids, or shards of a dataset; a stop of None is the end.
        identity: everything that the records depend on, as JSON values: the files' identities, the range, and the
            fields of the spec. It contains no paths of this machine beyond those in the spec.
        size: file size in bytes; 0 if unknown.
    """

    spec: SourceSpec
    files: tuple[Path, ...]
    start: int
    stop: int | None
    identity: dict[str, Any]
    size: int


def plan_input_splits(specs: Sequence[SourceSpec]) -> tuple[InputSplit, ...]:
    """Divide the sources into splits of about ``SPLIT_BYTES``.

    The splits depend on names, sizes, footers of large Parquet files, indexes of large files of token ids, and first
    lines of files that may be JSON lines under another name; small files are read once for their identity. An
    uncompressed JSON lines file is cut into byte ranges, a Parquet file into ranges of row groups, a file of token ids
    into ranges of documents, and a dataset on the Hub into its shards; consecutive texts of a folder are combined. A
    source with ``max_documents`` is one split.

    Raises:
        RopewalkError: if there are no specs, a source is missing, unreadable, empty or given twice, a file's suffix is
            not supported, or ``max_documents`` is less than 1.
    """
    check_specs(specs)
    return tuple(split for spec in specs for split in _identified(spec))


def read_input_split(split: InputSplit) -> Iterator[Record]:
    """Yield the records of a split in order; with ``max_documents``, only up to that many with documents.

    Raises:
        RopewalkError: while reading, with the file and the position, for a missing or damaged file, text that is not
            UTF-8, an invalid JSON line, or a field that is missing or has a wrong type.
    """
    limit = split.spec.max_documents
    return _records(split) if limit is None else _until(_records(split), limit)


def source_splits(spec: SourceSpec, most: float | None = None) -> tuple[InputSplit, ...]:
    """Splits of one source in order, without identities.

    Args:
        spec: the source.
        most: intended size of a split in bytes; None for ``SPLIT_BYTES``, and infinity to divide neither files nor
            datasets.

    Raises:
        RopewalkError: as in :func:`plan_input_splits`.
    """
    limit, most = spec.max_documents, SPLIT_BYTES if most is None else most
    if is_named(spec.path):
        # A limit counts documents from the beginning, so they must be read in order by one process.
        if most == math.inf or limit is not None or not spec.path.startswith(HUGGING_FACE):
            return (InputSplit(spec, (), 0, None, {}, 0),)
        shards = count_shards(spec)
        return tuple(InputSplit(spec, (), shard, shard + 1, {"shards": shards}, 0) for shard in range(shards))
    files = source_files(spec)
    if limit is not None:
        return (InputSplit(spec, files, 0, None, {}, sum(map(_size, files))),) if files else ()
    return tuple(_file_splits(spec, files, most))


def token_files(spec: SourceSpec) -> tuple[Path, ...]:
    """Files of token ids that a source reads, in reading order, without their indexes."""
    return tuple(path for path in source_files(spec) if _kind(path, spec) == "tokens")


def first_tokenised(spec: SourceSpec, files: int, records: int) -> Iterator[list[TokenisedDocument]]:
    """Documents with tokens at the beginning of some files of records, evenly spread over the source.

    Files of token ids are not among them; a file that begins with a text is left after its first record.

    Args:
        spec: the source.
        files: number of files at most.
        records: number of records of each at most.

    Raises:
        RopewalkError: as in :func:`read_input_split`.
    """
    paths = [path for path in source_files(spec) if _kind(path, spec) in RECORDS - {"tokens"}]
    for number in spread(len(paths), files):
        found: list[TokenisedDocument] = []
        with closing(_records(InputSplit(spec, (paths[number],), 0, None, {}, 0))) as read:
            for record in islice(read, records):
                tokenised = [each for each in record.documents if isinstance(each, TokenisedDocument)]
                if len(tokenised) < len(record.documents):
                    break
                found += [each for each in tokenised if not is_blank(each)]
        yield found


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` numbers below ``count``, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, most).astype(int)).tolist() if count else []


NO_DOCUMENTS = "no documents: give at least one file, folder or dataset"


def check_specs(specs: Sequence[SourceSpec]) -> None:
    """Raise if there are no sources, or a source is given twice (:func:`refuse_duplicates`).

    Also raise if ``source_per`` names files that are in no folder, or gives two files one name.
    """
    if not specs:
        raise RopewalkError(NO_DOCUMENTS)
    refuse_duplicates(specs)
    for spec in specs:
        if spec.source_per is not None:
            _refuse_equal_names(spec)


def refuse_duplicates(specs: Sequence[SourceSpec]) -> None:
    """Raise if a file, dataset or part of the embedded corpus would be read twice with the same text field.

    Files are identified by device and inode, so links to one file count as the file. Files without documents do not
    count. A source that cannot be read is ignored here; reading it raises the error.

    Raises:
        RopewalkError: with the first one that is given twice.
    """
    seen: dict[tuple[object, ...], Path | None] = {}
    for spec in specs:
        for place, path in _places(spec):
            # One file may well be read for two different fields.
            key = (*place, spec.text_field)
            if key not in seen:
                seen[key] = path
                continue
            if path is not None and _holds_no_document(path, spec):
                continue
            first = seen[key]
            raise RopewalkError(
                f"{path or spec.path} is given twice{'' if first == path else f' (it is the same file as {first})'}; "
                "give each file or dataset once, and set weights (--weights) to repeat a source in packed rows"
            )


def is_blank(document: Document | TokenisedDocument) -> bool:
    """Whether a document has no tokens, or only white space as text."""
    if isinstance(document, TokenisedDocument):
        return len(document.input_ids) == 0
    return not document.text or document.text.isspace()


def changed(split: InputSplit) -> bool:
    """Whether a file of a split has changed since the split was planned."""
    planned = split.identity.get("inputs")
    return bool(split.files) and planned is not None and file_identities(split.spec, split.files) != planned


def _identified(spec: SourceSpec) -> list[InputSplit]:
    splits = source_splits(spec)
    if not splits:
        hidden = list_folder(existing_path(spec.path)).hidden
        raise RopewalkError(
            f"no documents in {spec.path}"
            + (f" ({hidden} hidden files or folders skipped)" if hidden else "")
        )
    named = named_identity(spec)
    # A file that is cut into several splits is identified once.
    paths = list(dict.fromkeys(path for split in splits for path in split.files))
    known = dict(zip(paths, file_identities(spec, paths), strict=True))
    fields = {
        "name": spec.name,
        "text_field": spec.text_field,
        "source_field": spec.source_field,
        "max_documents": spec.max_documents,
        "stem": _stem(spec),
        # A .json file may count as text in a folder, so this decides the records as well.
        "folder": not named and existing_path(spec.path).is_dir(),
        # Absent where unused, so that tokens of earlier versions are found again.
        **spec.later_fields,
    }
    return [
        replace(
            split,
            identity={
                # The names of these keys are part of the digests that name folders of tokens, and must stay as they
                # are.
                **split.identity,
                # Absent elsewhere, so that tokens of earlier versions are found, but not those of such files as texts.
                **({"kind": "lines"} if _has_lines_by_content(split) else {}),
                "inputs": named or [known[path] for path in split.files],
                "stretch": [split.start, split.stop],
                "spec": fields,
            },
        )
        for split in splits
    ]


def _has_lines_by_content(split: InputSplit) -> bool:
    """Whether a file of a split counts as JSON lines although its name says otherwise."""
    # Files of records are splits of their own, but for a source with a limit.
    if len(split.files) > 1 and split.spec.max_documents is None:
        return False
    return any(
        split_suffix(path)[0] != ".json" and not names_records(path) and _kind(path, split.spec) == "lines"
        for path in split.files
    )


def _file_splits(spec: SourceSpec, files: Sequence[Path], most: float) -> Iterator[InputSplit]:
    texts: list[Path] = []
    size = 0
    for path in files:
        kind = _kind(path, spec)
        if kind == "index":
            continue
        one_record = kind not in RECORDS
        # Splits keep the order of files, so a file of records closes the split of text files before it.
        if texts and (not one_record or size + _size(path) > most):
            yield InputSplit(spec, tuple(texts), 0, None, {}, size)
            texts, size = [], 0
        if one_record:
            texts.append(path)
            size += _size(path)
        else:
            yield from _stretches(spec, path, most)
    if texts:
        yield InputSplit(spec, tuple(texts), 0, None, {}, size)


def _stretches(spec: SourceSpec, path: Path, most: float) -> Iterator[InputSplit]:
    """Split a file of many records if it is large; a compressed file stays whole, because it has no random access."""
    size, kind = _size(path), _kind(path, spec)
    files = (path, *(companions(path) if kind == "tokens" else ()))
    # A compressed file can only be read from its beginning, and an Arrow stream has no list of its batches.
    if size <= most or split_suffix(path)[1] or kind == "arrow":
        yield InputSplit(spec, files, 0, None, {}, size)
        return
    piece = int(most)
    if kind == "tokens":
        bounds, sizes = map(list, zip(*document_ranges(path, spec, piece), strict=True))
    elif kind == "lines":
        bounds = list(range(0, size, piece))
        sizes = [min(piece, size - start) for start in bounds]
    else:
        bounds, sizes = [0], [0]
        for number, bytes_ in enumerate(row_group_sizes(path)):
            # A split has one row group at least, however large it is.
            if sizes[-1] and sizes[-1] + bytes_ > piece:
                bounds.append(number)
                sizes.append(0)
            sizes[-1] += bytes_
    for start, stop, bytes_ in zip(bounds, [*bounds[1:], None], sizes, strict=True):
        yield InputSplit(spec, files, start, stop, {}, bytes_)


def _records(split: InputSplit) -> Generator[Record]:
    spec = split.spec
    if spec.path.startswith(HUGGING_FACE):
        shards = split.identity.get("shards")
        yield from read_hugging_face(spec, None if shards is None else (split.start, shards))
        return
    if is_named(spec.path):
        for document in embedded_corpus(spec.path):
            yield Record((replace(document, source=spec.name) if spec.name else document,))
        return
    whole, stem = spec, _stem(spec)
    for path in split.files:
        kind = _kind(path, spec)
        if whole.source_per is not None:
            spec = whole.model_copy(update={"name": _name_of(path, whole)})
        if kind == "lines":
            yield from read_json_lines(path, spec, stem, split.start, split.stop)
        elif kind in ("parquet", "arrow"):
            yield from read_table(path, spec, stem, split.start, split.stop)
        elif kind == "tokens":
            yield from read_token_file(path, spec, stem, split.start, split.stop)
        elif kind != "index":
            yield _text_record(path, kind, spec, stem)


def _text_record(path: Path, kind: str, spec: SourceSpec, stem: str) -> Record:
    text = read_text(path) if kind == "text" else read_text_if_text(path) if kind == "maybe_text" else None
    if text is not None:
        return Record((Document(text, spec.name or stem, str(path)),))
    if not _in_folder(path, spec):
        raise RopewalkError(
            f"{path} has no suffix and is not UTF-8 text; give a text, JSON Lines, Parquet or Arrow file"
        )
    return Record((), binary=True)


def _until(records: Iterator[Record], limit: int) -> Iterator[Record]:
    for record in records:
        yield record
        limit -= not all(map(is_blank, record.documents))
        if not limit:
            return


def _kind(path: Path, spec: SourceSpec) -> str:
    """Kind of a file as in :func:`file_kind`; more than the name decides for token ids and JSON lines.

    Raises:
        RopewalkError: as in :func:`file_kind` and :func:`holds_json_lines`, and for a Git LFS pointer whose name says
            that it holds documents.
    """
    in_folder = _in_folder(path, spec)
    kind: str | None = token_file_kind(path, spec, in_folder)
    if kind is None and not names_records(path) and holds_json_lines(path, spec):
        return "lines"
    kind = kind or file_kind(path, in_folder)
    if kind not in ("maybe_text", "closed"):
        refuse_lfs_pointer(path)
    return kind


def _in_folder(path: Path, spec: SourceSpec) -> bool:
    return path != Path(spec.path).expanduser()


def _stem(spec: SourceSpec) -> str:
    if spec.path.startswith(HUGGING_FACE):
        return hugging_face_stem(spec.path)
    return "" if is_named(spec.path) else plain_stem(existing_path(spec.path))


def _name_of(path: Path, spec: SourceSpec) -> str:
    """Name of the source of a folder's file, where ``source_per`` gives each file or folder one.

    A file is named by its path in the folder without suffixes (``books``, ``web/part-0``), a folder by its name. Files
    beside the folders belong to a source with the name of the whole folder.
    """
    inside = path.relative_to(Path(spec.path).expanduser())
    if spec.source_per == "folder":
        return inside.parts[0] if len(inside.parts) > 1 else _stem(spec)
    return inside.with_name(plain_stem(path)).as_posix()


def _refuse_equal_names(spec: SourceSpec) -> None:
    if is_named(spec.path) or not existing_path(spec.path).is_dir():
        raise RopewalkError(
            f"source_per {spec.source_per} needs a folder, but {spec.path} is none; omit source_per (--source-per)"
        )
    known: dict[str, Path] = {}
    for path in source_files(spec) if spec.source_per == "file" else ():
        # The name of an index is that of its file of token ids.
        if _kind(path, spec) == "index":
            continue
        name = _name_of(path, spec)
        if known.setdefault(name, path) != path:
            raise RopewalkError(
                f"{path} and {known[name]} would both be the source {name!r}; rename one of them, or set source_per "
                "to folder"
            )


def _size(path: Path) -> int:
    return _status(path).st_size


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror}") from error


def _places(spec: SourceSpec) -> Iterator[tuple[tuple[object, ...], Path | None]]:
    """Keys of everything that a source reads; two sources that read the same have a common key."""
    if spec.path.startswith(HUGGING_FACE):
        yield parse_hugging_face(spec.path), None
    elif is_named(spec.path):
        split = spec.path.partition(":")[2] or "train"
        # `all` reads both parts, so it overlaps with either.
        for part in ("train", "validation") if split == "all" else (split,):
            yield (part,), None
    else:
        try:
            files = source_files(spec)
        except RopewalkError:
            return
        for path in files:
            status = _status(path)
            # The inode, because two paths may lead to one file through links.
            yield (status.st_dev, status.st_ino), path


def _holds_no_document(path: Path, spec: SourceSpec) -> bool:
    kind = _kind(path, spec)
    return (
        not _size(path)
        or kind in ("closed", "index")
        or (kind == "maybe_text" and read_text_if_text(path) is None)
    )
