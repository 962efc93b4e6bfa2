"""read_documents: stream the documents of any kind of source in a deterministic order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.read.files import hidden_entries
from ropewalk.data.read.input_splits import check_specs, is_blank, read_input_split, source_splits
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError


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
    for spec, document in _stream(specs, counts):
        if isinstance(document, TokenisedDocument):
            raise RopewalkError(
                f"{spec.path} contains token ids, but this command needs text; give a text source"
            )
        yield document


def read_texts_and_tokens(specs: Sequence[SourceSpec]) -> Iterator[Document | TokenisedDocument]:
    """What packing reads: as :func:`read_documents`, and documents that are tokenised already.

    Raises:
        RopewalkError: as :func:`read_documents`, but for token ids.
    """
    return (document for _, document in _stream(specs))


def _stream(
    specs: Sequence[SourceSpec], counts: ReadingCounts | None = None
) -> Iterator[tuple[SourceSpec, Document | TokenisedDocument]]:
    """Every document that is not blank, with its source."""
    counts = ReadingCounts() if counts is None else counts
    check_specs(specs)
    for spec in specs:
        before = replace(counts)
        counts.hidden_entries += hidden_entries([spec])
        for split in source_splits(spec, whole=True):
            for record in read_input_split(split):
                counts.binary_files += record.binary
                for document in record.documents:
                    if is_blank(document):
                        counts.empty_documents += 1
                        continue
                    counts.documents += 1
                    yield spec, document
        if counts.documents == before.documents:
            since = {name: now - getattr(before, name) for name, now in vars(counts).items()}
            raise no_documents(spec, ReadingCounts(**since))


def no_documents(spec: SourceSpec, counts: ReadingCounts) -> RopewalkError:
    """That a source has none, and what reading passed over in it."""
    parts = (
        (counts.empty_documents, "empty documents"),
        (counts.binary_files, "binary files"),
        (counts.hidden_entries, "hidden files or folders"),
    )
    told = [f"{count} {what}" for count, what in parts if count]
    passed_over = f" ({', '.join(told)} skipped)" if told else ""
    return RopewalkError(f"no documents in {spec.path}{passed_over}")
