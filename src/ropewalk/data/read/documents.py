"""Documents, as text or token ids, and the records that contain them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        text: the text. It may be blank in a Record; ``read_documents`` skips blank documents.
        source: name by which mixtures and statistics group documents ("arxiv", "python-docs").
        origin: file and line or row, for error messages ("corpus/a.jsonl:17").
        chat: whether the text is a conversation, as a JSON object with ``messages`` and ``tools``.
        spans: start and stop in characters of each part of the text that counts in the loss, ascending; None if all of
            it does.
        unread_spans: whether the record has spans of loss although no field is set for them.
        dropped_nulls: number of null tool arguments, defaults and constants of the conversation that were left out,
            because a table does not tell them from absent ones.
    """

    text: str
    source: str
    origin: str
    chat: bool = False
    spans: tuple[tuple[int, int], ...] | None = None
    unread_spans: bool = False
    dropped_nulls: int = 0


@dataclass(frozen=True, eq=False)
class TokenisedDocument:
    """A document as token ids.

    Attributes:
        input_ids: int32 ``[num_tokens]``, without added special tokens; may be empty.
        source: as in Document.
        trained: number of tokens that count in the loss, such as the assistant's turns of a chat; None if all do.
        origin: file and position, for error messages; empty if unknown.
    """

    input_ids: NDArray[np.int32]
    source: str
    trained: int | None = None
    origin: str = ""


@dataclass(frozen=True)
class Record:
    """One record of an input: a line, a row of a table, or a file.

    Attributes:
        documents: one document for a text, one per span for a tokenised record with boundaries, and none for a blank
            line or a binary file.
        binary: whether the record is a file in a folder that was skipped because it is not text.
    """

    documents: tuple[Document | TokenisedDocument, ...]
    binary: bool = False


def text_hash(text: str) -> int:
    """Hash a text to a number from 0 to 2**64 - 1, equal on every machine."""
    return _hash(text.encode("utf-8"))


def token_hash(input_ids: NDArray[np.integer[Any]]) -> int:
    """Hash token ids, as little-endian bytes, to a number from 0 to 2**64 - 1."""
    return _hash(np.ascontiguousarray(input_ids, "<i4").data)


def _hash(content: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
