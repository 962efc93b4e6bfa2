"""read_documents: stream the documents of any kind of source in a deterministic order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from ropewalk.data.read.documents import Document, Record, TokenisedDocument
from ropewalk.data.read.files import hidden_entries
from ropewalk.data.read.input_splits import (
    InputSplit,
    check_specs,
    is_blank,
    read_input_split,
    source_splits,
)
from ropewalk.data.read.records import LOSS_SPANS
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError

Reader = Callable[[InputSplit], Iterator[Record]]
"""Yields the records of a split, like ``read_input_split``."""


@dataclass
class ReadingCounts:
    """Counts of what ``read_documents`` has read so far; updated while the documents are consumed.

    Attributes:
        documents: documents that were yielded.
        empty_documents: documents skipped because their text is empty or blank.
        binary_files: files in folders skipped because they are not text.
        hidden_entries: files and folders skipped because their names begin with a dot.
        dropped_nulls: null tool arguments, defaults and constants that were left out of chats in tables.
        span_documents: documents of which only spans count in the loss.
    """

    documents: int = 0
    empty_documents: int = 0
    binary_files: int = 0
    hidden_entries: int = 0
    dropped_nulls: int = 0
    span_documents: int = 0

    @classmethod
    def total(cls, counts: Sequence[ReadingCounts]) -> ReadingCounts:
        """The sum of several counts."""
        return cls(*(sum(getattr(each, field.name) for each in counts) for field in fields(cls)))


def read_documents(specs: Sequence[SourceSpec], counts: ReadingCounts | None = None) -> Iterator[Document]:
    """Stream the documents of several sources, one source after the other.

    A source is a JSON lines file (``.jsonl``, ``.json``, also ``.gz`` and ``.zst``), a Parquet or Arrow file, a text or
    source-code file, a folder of any of these (recursive; other files count as text if they decode),
    ``hf:owner/name[:config][@split]`` (streamed; the default split is ``train``), or
    ``embedded[:train|validation|all]`` (the sources and documentation of the running Python; the default is ``train``).
    Documents are in the order of the specs, then of sorted file names, then of lines or rows.

    Args:
        specs: the sources, at least one.
        counts: updated with the numbers of documents read and skipped.

    Raises:
        RopewalkError: while reading, with the file and line, for a missing or damaged file, text that is not UTF-8, an
            invalid JSON line, a field that is missing or has a wrong type, an unknown suffix, a source without
            documents, a source that is given twice, or token ids instead of texts.
    """
    counts = ReadingCounts() if counts is None else counts
    check_specs(specs)
    for spec in specs:
        # A copy, so that an error can state the counts of this source alone.
        before = replace(counts)
        counts.hidden_entries += hidden_entries([spec])
        # Undivided, because a single process reads everything.
        for split in source_splits(spec, math.inf):
            for document in documents_in(split, counts):
                yield refuse_token_ids(spec, document)
        if counts.documents == before.documents:
            since = {name: now - getattr(before, name) for name, now in vars(counts).items()}
            raise no_documents(spec, ReadingCounts(**since))


def documents_in(
    split: InputSplit, counts: ReadingCounts, read: Reader = read_input_split
) -> Iterator[Document | TokenisedDocument]:
    """Yield the documents of a split that are not blank, and count them and what is skipped.

    Args:
        split: the split.
        counts: updated while the documents are consumed.
        read: yields the split's records.

    Raises:
        RopewalkError: as in :func:`read_input_split`.
    """
    for record in read(split):
        counts.binary_files += record.binary
        for document in record.documents:
            if is_blank(document):
                counts.empty_documents += 1
                continue
            counts.documents += 1
            if isinstance(document, Document):
                counts.dropped_nulls += document.dropped_nulls
                counts.span_documents += document.spans is not None
            yield document


def training_documents(
    split: InputSplit, counts: ReadingCounts, read: Reader = read_input_split
) -> Iterator[Document | TokenisedDocument]:
    """As :func:`documents_in`, for documents whose loss counts.

    Raises:
        RopewalkError: also for a record with spans of loss that no setting names.
    """
    for document in documents_in(split, counts, read):
        if isinstance(document, Document) and document.unread_spans:
            raise RopewalkError(
                f"{document.origin}: there is a field {LOSS_SPANS}; set loss_spans_field (--loss-spans-field) to "
                f"{LOSS_SPANS} to train on these spans of the text alone, and train_around_spans "
                "(--train-around-spans) to train on all of it"
            )
        yield document


def refuse_token_ids(spec: SourceSpec, document: Document | TokenisedDocument) -> Document:
    """Return a text as it is, and raise for a document of token ids."""
    if isinstance(document, TokenisedDocument):
        raise RopewalkError(
            f"{spec.path} contains token ids, but this command needs text; give a text source"
        )
    return document


def refuse_unused_spans(specs: Sequence[SourceSpec], counts: ReadingCounts) -> None:
    """Raise if documents were to have spans of loss, but none has any: a wrong name would train on everything.

    Raises:
        RopewalkError: with the name of the field.
    """
    asked = next((spec for spec in specs if spec.loss_spans_field and not spec.train_around_spans), None)
    if asked is not None and not counts.span_documents:
        raise RopewalkError(
            f"no record of {asked.path} has a list of spans in the field {asked.loss_spans_field!r}; correct "
            "loss_spans_field (--loss-spans-field), or omit it to train on whole documents"
        )


def no_documents(spec: SourceSpec, counts: ReadingCounts) -> RopewalkError:
    """Return the error for a source without documents, with the counts of what was skipped."""
    parts = (
        (counts.empty_documents, "empty documents"),
        (counts.binary_files, "binary files"),
        (counts.hidden_entries, "hidden files or folders"),
    )
    skipped = [f"{count} {what}" for count, what in parts if count]
    passed_over = f" ({', '.join(skipped)} skipped)" if skipped else ""
    return RopewalkError(f"no documents in {spec.path}{passed_over}")
