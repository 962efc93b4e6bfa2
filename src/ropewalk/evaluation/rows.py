"""Build evaluation rows from tokenised documents; each row is one long causal sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row
    from ropewalk.data import SourceSpec, TokenisedDocument


Ids = NDArray[np.integer[Any]]

MOST_TOKENS_FACTOR = 8
"""How much text to search for documents that fill a row alone, as a multiple of the tokens in all rows."""


@dataclass(frozen=True, eq=False)
class DrawnDocuments(Sequence[Ids]):
    """Token ids of documents in the order in which they were drawn, and the source of each.

    Attributes:
        ids: int ``[tokens]`` each, without special tokens.
        sources: name of each document's source.
    """

    ids: list[Ids]
    sources: list[str]

    @classmethod
    def of(cls, documents: Iterable[TokenisedDocument]) -> DrawnDocuments:
        """Take over the tokens and sources of documents."""
        both = [(each.input_ids, each.source) for each in documents]
        return cls([ids for ids, _ in both], [source for _, source in both])

    def without(self, hashes: Collection[int]) -> DrawnDocuments:
        """The documents but those whose tokens have one of these hashes."""
        from ropewalk.data.read.documents import token_hash

        pairs = zip(self.ids, self.sources, strict=True)
        kept = [(ids, source) for ids, source in pairs if token_hash(ids) not in hashes]
        return DrawnDocuments([ids for ids, _ in kept], [source for _, source in kept])

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Ids: ...
    @overload
    def __getitem__(self, index: slice) -> list[Ids]: ...
    def __getitem__(self, index: int | slice) -> Ids | list[Ids]:
        return self.ids[index]


@dataclass(frozen=True, eq=False)
class EvaluationRows:
    """Rows to score, and how they were built.

    Attributes:
        rows: rows of pattern ``full`` with positions 0 to length - 1; labels are masked at document ends.
        kind: ``documents`` if each row is the beginning of one document, ``packed`` if rows join documents.
        documents: indices of the documents that the rows contain, ascending.
    """

    rows: list[Row]
    kind: Literal["documents", "packed"]
    documents: tuple[int, ...]


def evaluation_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, limit: int
) -> EvaluationRows:
    """Build rows of exactly ``length`` tokens.

    If at least ``limit`` documents fill a row alone, each row is the beginning of one document. Otherwise the
    beginnings of all documents, of at most a row each, are joined in order and cut every ``length`` tokens. Then follow
    the next parts of all documents, and so on, so that one long document does not fill all rows. The incomplete last
    row is dropped. Every row begins with BOS, even if it continues a document, because models use the first token as an
    attention sink.

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
    long = [number for number, document in enumerate(documents) if len(document) >= fill]
    if len(long) >= limit:
        chosen = long[:limit]
        rows = [_row([np.concatenate([head, documents[number][:fill]])]) for number in chosen]
        return EvaluationRows(rows, "documents", tuple(chosen))
    rows, read = [], set()
    for numbers, pieces in _packed(_parts(documents, fill, tail), head, length):
        rows.append(_row(pieces))
        read.update(numbers)
        if len(rows) == limit:
            break
    if not rows:
        available = sum(len(document) for document in documents)
        raise RopewalkError(
            f"the text has {available} tokens in {len(documents)} documents, which is too few for one row of "
            f"{length} tokens; give more text or a shorter length"
        )
    return EvaluationRows(rows, "packed", tuple(sorted(read)))


_Part = tuple[int, NDArray[Any]]
"""A part of a document with the document's index."""


def _parts(documents: Sequence[Ids], most: int, tail: list[int]) -> Iterator[_Part]:
    """Yield the first ``most`` tokens of each document, then the next of each; ``tail`` follows a document's end."""
    start = 0
    left = [number for number, document in enumerate(documents) if len(document)]
    while left:
        for number in left:
            part = documents[number][start : start + most]
            ends = start + most >= len(documents[number])
            yield number, np.concatenate([part, tail]) if ends else part
        start += most
        left = [number for number in left if len(documents[number]) > start]


def _packed(
    parts: Iterable[_Part], head: list[int], length: int
) -> Iterator[tuple[list[int], list[NDArray[Any]]]]:
    """Yield complete rows: the documents in them, and the pieces, each a document or a part of one."""
    numbers: list[int] = []
    pieces: list[NDArray[Any]] = []
    room = length
    for number, part in parts:
        rest = part
        while len(rest):
            taken = room - len(head)
            # No room for BOS and a token: fill the row's end without starting a piece of this document.
            if taken < 1:
                pieces.append(np.array(head[:room]))
                room = 0
            else:
                piece = np.concatenate([head, rest[:taken]])
                numbers.append(number)
                pieces.append(piece)
                rest = rest[taken:]
                room -= len(piece)
            if room == 0:
                yield numbers, pieces
                numbers, pieces, room = [], [], length


def _row(pieces: list[NDArray[Any]]) -> Row:
    import torch

    from ropewalk.attention.layout import PackedLayout, Row, next_token_labels

    # To numpy, an empty head or tail is an array of float64, which makes the joined ids float64 too.
    input_ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    layout = PackedLayout.from_lengths([len(piece) for piece in pieces], pattern="full", anchor_length=0)
    return Row(input_ids, next_token_labels(input_ids, layout), layout)


def take_documents(documents: Iterable[TokenisedDocument], length: int, limit: int) -> DrawnDocuments:
    """Take as many documents from a stream as the evaluation can use.

    Reading stops when ``limit`` documents fill a row alone, or after eight times the tokens in all rows, or at the
    end of the stream.

    Args:
        documents: the stream; iterated once.
        length: tokens of the longest row.
        limit: maximum number of rows.
    """
    taken: list[TokenisedDocument] = []
    long = tokens = 0
    for document in documents:
        taken.append(document)
        size = len(document.input_ids)
        # Count at most one row per document: a few long books must not use up the budget before `limit` documents.
        tokens += min(size, length)
        long += size >= length
        if long >= limit or tokens >= MOST_TOKENS_FACTOR * limit * length:
            break
    return DrawnDocuments.of(taken)


def documents_of(
    sources: Sequence[SourceSpec], tokenizer: Any, length: int, limit: int, seed: int
) -> DrawnDocuments:
    """Draw and tokenise as many documents as ``limit`` rows of ``length`` tokens need; sources and files take turns."""
    from ropewalk.data.read.draw import draw_documents
    from ropewalk.data.tokens.tokenise import tokenise

    return take_documents(tokenise(draw_documents(sources, seed), tokenizer), length, limit)


def rows_of(text: str, tokenizer: Any, length: int, limit: int, seed: int) -> list[Row]:
    """Draw documents of a text and build at most ``limit`` rows of exactly ``length`` tokens."""
    from ropewalk.data import SourceSpec

    documents = documents_of([SourceSpec(path=text)], tokenizer, length, limit, seed)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows


def describe_draw(documents: Sequence[Ids], read: Iterable[int]) -> dict[str, Any]:
    """Return details of a result: the number of documents that were read, and how many of each source.

    Args:
        documents: the documents; their sources are known if they are :class:`DrawnDocuments`.
        read: indices of those that were read.
    """
    numbers = list(read)
    if not isinstance(documents, DrawnDocuments):
        return {"documents": len(numbers)}
    sources = Counter(documents.sources[number] for number in numbers)
    return {"documents": len(numbers), "sources": dict(sorted(sources.items()))}


@dataclass(frozen=True)
class Window:
    """A window over a document's tokens ``start <= t < end``; the tokens from ``first`` on are scored."""

    start: int
    first: int
    end: int
