"""What reading gives: documents, as text or as token ids, and records, which hold them."""

from __future__ import annotations

import hashlib
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


def text_hash(text: str) -> int:
    """A number from 0 to 2**64 - 1 that depends on the text alone, the same on every machine."""
    return _hash(text.encode("utf-8"))


def token_hash(input_ids: NDArray[np.int32]) -> int:
    """The same of a document that came as token ids, of their little-endian bytes."""
    return _hash(np.ascontiguousarray(input_ids, "<i4").data)


def _hash(content: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
