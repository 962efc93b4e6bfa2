"""From tokenised documents to evaluation rows: one long causal sequence each."""

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
"""Text read ahead for documents that fill a row alone, as a multiple of what the rows hold."""


@dataclass(frozen=True, eq=False)
class EvaluationRows:
    """Rows to score, and how they came to be.

    Attributes:
        rows: pattern ``full``, positions 0 to length - 1, labels masked where a document ends.
        kind: ``documents``: each row is the beginning of one document; ``packed``: documents joined.
    """

    rows: list[Row]
    kind: Literal["documents", "packed"]


def evaluation_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, limit: int
) -> EvaluationRows:
    """Rows of exactly ``length`` tokens.

    Where at least ``limit`` documents fill a row alone, each row is the beginning of one document. Otherwise
    documents are joined in order and cut every ``length`` tokens, and the incomplete last row is left out.
    Every row begins with BOS, also one that continues a document: models come to lean on their first token.

    Args:
        documents: int ``[tokens]`` each, without special tokens; empty ones are passed over.
        length: tokens of a row, at least 2.
        bos_id: put in front of every document; None for tokenizers that have none.
        eos_id: put after every document; None for none.
        limit: most rows, at least 1. There are fewer where the text ends.

    Raises:
        RopewalkError: if the text does not fill one row; the message says how many tokens there are.
    """
    if length < 2:
        raise RopewalkError(f"an evaluation row needs 2 tokens or more, got {length}")
    if limit < 1:
        raise RopewalkError(f"the number of evaluation rows must be 1 or more, got {limit}")
    head = [] if bos_id is None else [bos_id]
    tail = [] if eos_id is None else [eos_id]
    fill = length - len(head)
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
            f"the text has {available} tokens in {len(documents)} documents, too few for one row of "
            f"{length}; give more text or a shorter length"
        )
    return EvaluationRows(rows, "packed")


def _packed(bodies: Iterable[NDArray[Any]], head: list[int], length: int) -> Iterator[list[NDArray[Any]]]:
    """Complete rows as lists of pieces, a new document or the rest of one in each piece."""
    pieces: list[NDArray[Any]] = []
    room = length
    for body in bodies:
        rest = body
        while len(rest):
            taken = room - len(head)
            # A BOS alone at the end of a row would be a piece without a token of its document.
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

    input_ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    layout = PackedLayout.from_lengths([len(piece) for piece in pieces], pattern="full", anchor_length=0)
    return Row(input_ids, next_token_labels(input_ids, layout), layout)


def take_documents(documents: Iterable[Ids], length: int, limit: int) -> list[Ids]:
    """As many documents of a stream as the evaluation can use; the rest is not read.

    Reads until ``limit`` documents fill a row alone, or until there is eight times the text that the rows
    hold, or to the end.

    Args:
        documents: int ``[tokens]`` each; read once.
        length: tokens of the longest row.
        limit: most rows.
    """
    taken: list[Ids] = []
    long = tokens = 0
    for document in documents:
        taken.append(document)
        # More than a row of a document is of no use to reach the limit: a few books are not many documents.
        tokens += min(len(document), length)
        long += len(document) >= length
        if long >= limit or tokens >= MOST_TOKENS_FACTOR * limit * length:
            break
    return taken


def documents_of(text: str, tokenizer: Any, length: int, rows: int) -> list[Any]:
    """As many tokenised documents as rows of a length need."""
    from ropewalk.data import SourceSpec, read_documents
    from ropewalk.data.tokens.tokenise import tokenise

    stream = tokenise(read_documents([SourceSpec(path=text)]), tokenizer)
    return take_documents((document.input_ids for document in stream), length, rows)


def rows_of(text: str, tokenizer: Any, length: int, limit: int) -> list[Row]:
    """Rows of exactly ``length`` tokens, at most ``limit`` of them."""
    documents = documents_of(text, tokenizer, length, limit)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows


@dataclass(frozen=True)
class Window:
    """The document's tokens ``start <= t < end``, of which those from ``first`` on are scored."""

    start: int
    first: int
    end: int
