"""Build evaluation rows from tokenised documents; each row is one long causal sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row


Ids = NDArray[np.integer[Any]]

MOST_TOKENS_FACTOR = 8
"""How much text to search for documents that fill a row alone, as a multiple of the tokens in all rows."""


@dataclass(frozen=True, eq=False)
class EvaluationRows:
    """Rows to score, and how they were built.

    Attributes:
        rows: rows of pattern ``full`` with positions 0 to length - 1; labels are masked at document ends.
        kind: ``documents`` if each row is the beginning of one document, ``packed`` if rows join documents.
    """

    rows: list[Row]
    kind: Literal["documents", "packed"]


def evaluation_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, limit: int
) -> EvaluationRows:
    """Build rows of exactly ``length`` tokens.

    If at least ``limit`` documents fill a row alone, each row is the beginning of one document. Otherwise the
    documents are joined in order and cut every ``length`` tokens, and the incomplete last row is dropped.
    Every row begins with BOS, even if it continues a document, because models use the first token as an attention
    sink.

    Args:
        documents: int ``[tokens]`` each, without special tokens; empty documents are skipped.
        length: tokens per row, at least 2.
        bos_id: token id before every document; None if the tokenizer has no BOS.
        eos_id: token id after every document; None adds nothing.
        limit: maximum number of rows, at least 1; short text gives fewer.

    Raises:
        RopewalkError: if the text does not fill one row; the message gives its number of tokens.
    """
    if length < 2:
        raise RopewalkError(f"the length of an evaluation row must be 2 tokens or more, got {length}")
    if limit < 1:
        raise RopewalkError(f"the number of evaluation rows must be 1 or more, got {limit}")
    head = [] if bos_id is None else [bos_id]
    tail = [] if eos_id is None else [eos_id]
    fill = length - len(head)
    # Whole documents are preferred: in a row of joined texts, no token depends on another document.
    long = [document for document in documents if len(document) >= fill]
    if len(long) >= limit:
        rows = [_row([np.concatenate([head, document[:fill]])]) for document in long[:limit]]
        return EvaluationRows(rows, "documents")
    bodies = (np.concatenate([document, tail]) for document in documents if len(document))
    rows = []
    for pieces in _packed(bodies, head, length):
        rows.append(_row(pieces))
        if len(rows) == limit:
            break
    if not rows:
        available = sum(len(document) for document in documents)
        raise RopewalkError(
            f"the text has {available} tokens in {len(documents)} documents, which is too few for one row of "
            f"{length} tokens; give more text or a shorter length"
        )
    return EvaluationRows(rows, "packed")


def _packed(bodies: Iterable[NDArray[Any]], head: list[int], length: int) -> Iterator[list[NDArray[Any]]]:
    """Yield complete rows as lists of pieces; each piece is a document or a part of one."""
    pieces: list[NDArray[Any]] = []
    room = length
    for body in bodies:
        rest = body
        while len(rest):
            taken = room - len(head)
            # No room for BOS and a token: fill the row's end without starting a piece of this document.
            if taken < 1:
                pieces.append(np.array(head[:room]))
                room = 0
            else:
                piece = np.concatenate([head, rest[:taken]])
                pieces.append(piece)
                rest = rest[taken:]
                room -= len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], length


def _row(pieces: list[NDArray[Any]]) -> Row:
    import torch

    from ropewalk.attention.layout import PackedLayout, Row, next_token_labels

    # To numpy, an empty head or tail is an array of float64, which makes the joined ids float64 too.
    input_ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    layout = PackedLayout.from_lengths([len(piece) for piece in pieces], pattern="full", anchor_length=0)
    return Row(input_ids, next_token_labels(input_ids, layout), layout)


def take_documents(documents: Iterable[Ids], length: int, limit: int) -> list[Ids]:
    """Take as many documents from a stream as the evaluation can use.

    Reading stops when ``limit`` documents fill a row alone, or after eight times the tokens in all rows, or at the
    end of the stream.

    Args:
        documents: int ``[tokens]`` each; iterated once.
        length: tokens of the longest row.
        limit: maximum number of rows.
    """
    taken: list[Ids] = []
    long = tokens = 0
    for document in documents:
        taken.append(document)
        # Count at most one row per document: a few long books must not use up the budget before `limit` documents.
        tokens += min(len(document), length)
        long += len(document) >= length
        if long >= limit or tokens >= MOST_TOKENS_FACTOR * limit * length:
            break
    return taken


def documents_of(text: str, tokenizer: Any, length: int, rows: int) -> list[Any]:
    """Read and tokenise as many documents as ``rows`` rows of ``length`` tokens need."""
    from ropewalk.data import SourceSpec, read_documents
    from ropewalk.data.tokens.tokenise import tokenise

    stream = tokenise(read_documents([SourceSpec(path=text)]), tokenizer)
    return take_documents((document.input_ids for document in stream), length, rows)


def rows_of(text: str, tokenizer: Any, length: int, limit: int) -> list[Row]:
    """Read a text and build at most ``limit`` rows of exactly ``length`` tokens."""
    documents = documents_of(text, tokenizer, length, limit)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows


@dataclass(frozen=True)
class Window:
    """A window over a document's tokens ``start <= t < end``; the tokens from ``first`` on are scored."""

    start: int
    first: int
    end: int
