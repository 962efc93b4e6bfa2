"""read_documents: every kind of source as one stream of documents, in an order that never changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ropewalk.data.documents import Document, SourceSpec
from ropewalk.data.files import (
    JSON_LINES,
    PARQUET,
    TEXT,
    list_folder,
    plain_stem,
    read_text,
    read_text_if_text,
    split_suffix,
)
from ropewalk.data.records import first_line_is_record, read_hugging_face, read_json_lines, read_parquet
from ropewalk.errors import RopewalkError

HUGGING_FACE = "hf:"
EMBEDDED = "embedded"
EMBEDDED_SPLITS = ("train", "validation", "all")


@dataclass
class ReadingCounts:
    """What read_documents met so far; it is filled while the documents are consumed.

    Attributes:
        documents: documents handed on.
        empty_documents: documents passed over because their text is empty or blank.
        binary_files: files of folders passed over because they are not text.
        hidden_entries: files and folders passed over because their name begins with a dot.
    """

    documents: int = 0
    empty_documents: int = 0
    binary_files: int = 0
    hidden_entries: int = 0


def read_documents(specs: Sequence[SourceSpec], counts: ReadingCounts | None = None) -> Iterator[Document]:
    """Stream the documents of several sources, one source after the other.

    A source is a JSON lines file (``.jsonl``, ``.json``, also ``.gz`` and ``.zst``), a Parquet file, a text
    or source-code file, a folder of any of these (recursive; other files count as text where they decode),
    ``hf:owner/name[:config][@split]`` (streamed, split ``train`` unless given), or
    ``embedded[:train|validation|all]`` (the running Python's own sources and documentation; ``train``
    unless given). The order is that of the specs, of sorted file names, and of lines or rows.

    Args:
        specs: the sources, at least one.
        counts: filled with what was read and passed over.

    Raises:
        RopewalkError: while reading, in one sentence with the file and line: a missing or damaged file, text
            that is not UTF-8, a broken JSON line, a missing or ill-typed field, an unknown suffix, or a
            source without a single document.
    """
    counts = ReadingCounts() if counts is None else counts
    if not specs:
        raise RopewalkError("no documents: give at least one file, folder or dataset")
    for spec in specs:
        before = replace(counts)
        for document in _read_source(spec, counts):
            if not document.text or document.text.isspace():
                counts.empty_documents += 1
                continue
            counts.documents += 1
            yield document
        if counts.documents == before.documents:
            raise RopewalkError(f"no documents in {spec.path}{_passed_over(before, counts)}")


def source_files(spec: SourceSpec) -> tuple[Path, ...]:
    """The files that reading a source opens, in order; none for a dataset or the embedded corpus.

    Raises:
        RopewalkError: if the file or folder does not exist.
    """
    if _is_named(spec.path):
        return ()
    path = existing_path(spec.path)
    return list_folder(path).files if path.is_dir() else (path,)


def existing_path(name: str) -> Path:
    """The path of a file or folder of the user's.

    Raises:
        RopewalkError: if there is none, or it is neither a file nor a folder.
    """
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise RopewalkError(f"there is no file or folder {name!r}")
    if not path.is_dir() and not path.is_file():
        raise RopewalkError(f"{name} is neither a file nor a folder")
    return path


def parse_hugging_face(path: str) -> tuple[str, str | None, str]:
    """``hf:owner/name[:config][@split]`` as (repository, config, split).

    Raises:
        RopewalkError: if the repository, the configuration or the split is empty.
    """
    repository, at, split = path.removeprefix(HUGGING_FACE).partition("@")
    repository, colon, config = repository.partition(":")
    if not repository or (at and not split) or (colon and not config):
        raise RopewalkError(f"{path!r} names no dataset; write hf:owner/name[:config][@split]")
    return repository, config or None, split or "train"


def _is_named(path: str) -> bool:
    return path.startswith(HUGGING_FACE) or path == EMBEDDED or path.startswith(EMBEDDED + ":")


def _read_source(spec: SourceSpec, counts: ReadingCounts) -> Iterator[Document]:
    if spec.path.startswith(HUGGING_FACE):
        repository, config, split = parse_hugging_face(spec.path)
        yield from read_hugging_face(repository, spec, config, split)
    elif _is_named(spec.path):
        yield from _read_embedded(spec)
    else:
        path = existing_path(spec.path)
        if path.is_dir():
            yield from _read_folder(path, spec, counts)
        else:
            yield from _read_file(path, spec, plain_stem(path))


def _read_embedded(spec: SourceSpec) -> Iterator[Document]:
    from ropewalk.data.embedded import embedded_documents

    split = spec.path.removeprefix(EMBEDDED).removeprefix(":") or "train"
    if split == "train":
        documents = embedded_documents("train")
    elif split == "validation":
        documents = embedded_documents("validation")
    elif split == "all":
        documents = embedded_documents("all")
    else:
        raise RopewalkError(f"unknown split in {spec.path!r}; choose one of {', '.join(EMBEDDED_SPLITS)}")
    for document in documents:
        yield replace(document, source=spec.name) if spec.name else document


def _read_folder(folder: Path, spec: SourceSpec, counts: ReadingCounts) -> Iterator[Document]:
    listing = list_folder(folder)
    counts.hidden_entries += listing.hidden
    stem = plain_stem(folder)
    for path in listing.files:
        suffix, compression = split_suffix(path)
        if suffix in TEXT or _is_record_file(path, spec, in_folder=True):
            yield from _read_file(path, spec, stem)
            continue
        # A compressed file of unknown content (an archive, say) is not opened at all.
        text = None if compression else read_text_if_text(path)
        if text is None:
            counts.binary_files += 1
        else:
            yield Document(text, spec.name or stem, str(path))


def _is_record_file(path: Path, spec: SourceSpec, in_folder: bool) -> bool:
    suffix, compression = split_suffix(path)
    if suffix in JSON_LINES or (suffix in PARQUET and not compression):
        return True
    # In a folder, a .json file is most often a configuration, and so a text like any other.
    return suffix == ".json" and (not in_folder or bool(compression) or first_line_is_record(path, spec))


def _read_file(path: Path, spec: SourceSpec, stem: str) -> Iterator[Document]:
    suffix, compression = split_suffix(path)
    if suffix in PARQUET and not compression:
        yield from read_parquet(path, spec, stem)
    elif suffix in JSON_LINES or suffix == ".json":
        yield from read_json_lines(path, spec, stem)
    elif suffix in TEXT:
        yield Document(read_text(path), spec.name or stem, str(path))
    elif not suffix and not compression:
        text = read_text_if_text(path)
        if text is None:
            raise RopewalkError(f"{path} has no suffix and is not UTF-8 text")
        yield Document(text, spec.name or stem, str(path))
    else:
        raise RopewalkError(
            f"unsupported suffix {''.join((suffix, compression))!r} of {path}; ropewalk reads .jsonl, .json, "
            "text and source files (each also .gz or .zst), .parquet, and folders of them"
        )


def _passed_over(before: ReadingCounts, after: ReadingCounts) -> str:
    parts = (
        (after.empty_documents - before.empty_documents, "empty documents"),
        (after.binary_files - before.binary_files, "binary files"),
        (after.hidden_entries - before.hidden_entries, "hidden files or folders"),
    )
    told = [f"{count} {what}" for count, what in parts if count]
    return f" ({', '.join(told)} passed over)" if told else ""
