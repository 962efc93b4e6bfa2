"""read_documents: every kind of source as one stream of documents, in an order that never changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.read.files import existing_path, is_named, list_folder, source_files
from ropewalk.data.read.hub import parse_hugging_face
from ropewalk.data.read.input_splits import is_blank, read_input_split, refuse_duplicates, source_splits
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError

__all__ = [
    "ReadingCounts",
    "existing_path",
    "parse_hugging_face",
    "read_documents",
    "read_input_split",
    "source_files",
]


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
            that is not UTF-8, a broken JSON line, a missing or ill-typed field, an unknown suffix, a source
            without a single document, one that is given twice, or one of token ids rather than texts.
    """
    counts = ReadingCounts() if counts is None else counts
    if not specs:
        raise RopewalkError("no documents: give at least one file, folder or dataset")
    refuse_duplicates(specs)
    for spec in specs:
        before = replace(counts)
        for document in _texts(spec, counts):
            if is_blank(document):
                counts.empty_documents += 1
                continue
            counts.documents += 1
            yield document
        if counts.documents == before.documents:
            raise RopewalkError(f"no documents in {spec.path}{_passed_over(before, counts)}")


def _texts(spec: SourceSpec, counts: ReadingCounts) -> Iterator[Document]:
    if not is_named(spec.path) and (folder := existing_path(spec.path)).is_dir():
        counts.hidden_entries += list_folder(folder).hidden
    for split in source_splits(spec, whole=True):
        for record in read_input_split(split):
            counts.binary_files += record.binary
            for document in record.documents:
                if isinstance(document, TokenisedDocument):
                    raise RopewalkError(f"{spec.path} holds token ids, and texts are read here")
                yield document


def _passed_over(before: ReadingCounts, after: ReadingCounts) -> str:
    parts = (
        (after.empty_documents - before.empty_documents, "empty documents"),
        (after.binary_files - before.binary_files, "binary files"),
        (after.hidden_entries - before.hidden_entries, "hidden files or folders"),
    )
    told = [f"{count} {what}" for count, what in parts if count]
    return f" ({', '.join(told)} passed over)" if told else ""
