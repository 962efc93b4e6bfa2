"""Document, TokenisedDocument, Record: what reading gives; SourceSpec: where documents come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Document:
    """One text as it was read.

    Attributes:
        text: the document; it may be blank in a Record, and is not in what ``read_documents`` hands on.
        source: the name that mixtures and statistics group by ("arxiv", "python-docs").
        origin: file and line or row, for error messages ("corpus/a.jsonl:17").
    """

    text: str
    source: str
    origin: str


@dataclass(frozen=True, eq=False)
class TokenisedDocument:
    """A document's own tokens.

    Attributes:
        input_ids: int32 ``[num_tokens]``, no special token added; it may be empty.
        source: as in Document.
    """

    input_ids: NDArray[np.int32]
    source: str


@dataclass(frozen=True)
class Record:
    """One record of an input: a line, a table's row, a file.

    Attributes:
        documents: one for a text; one a stretch for a record that is tokenised already and names the
            boundaries of several; none for a blank line or a binary file.
        binary: whether it was a file of a folder that is not text, and was passed over.
    """

    documents: tuple[Document | TokenisedDocument, ...]
    binary: bool = False


@dataclass(frozen=True)
class SourceSpec:
    """One place that documents come from.

    Attributes:
        path: a file, a folder, ``hf:owner/name[:config][@split]``, or ``embedded[:train|validation|all]``.
        name: the source name of every document; None takes the source field, else the file's or folder's
            stem.
        text_field: the field (JSONL, Parquet, Hugging Face) that holds the text.
        source_field: the field that names the source where a record has it; dots reach into nested records
            (``meta.redpajama_set_name``); None ignores such fields.
        max_documents: read no more records than this, from the beginning; None reads all.
    """

    path: str
    name: str | None = None
    text_field: str = "text"
    source_field: str | None = "source"
    max_documents: int | None = None
