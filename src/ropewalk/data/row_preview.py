"""Preview of a packed row: its chunks with their tags, special tokens, padding and text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.rows.assemble import PADDING, PackedRow
from ropewalk.errors import RopewalkError

Kind = Literal["anchor", "text", "special", "left_out", "padding"]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one kind.

    Attributes:
        kind: ``anchor``; ``special`` (BOS, EOS and so on); ``left_out`` (the middle of a long chunk, not shown);
            ``padding``; or ``text``.
        start, stop: range of tokens in the row.
        masked: whether these tokens are never targets; masked text is a tag, in a chat any text but the
            assistant's turns, or text outside spans of loss.
        text: decoded tokens; None for padding, for tokens that are not shown, and before :func:`with_texts`.
        each: text of each token of an anchor or of special tokens.
    """

    kind: Kind
    start: int
    stop: int
    masked: bool
    text: str | None = None
    each: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in ("kind", "start", "stop", "masked", "text")}


@dataclass(frozen=True)
class Chunk:
    """One segment of a row: a document, or one of its interleaved chunks.

    Attributes:
        document: number of the document in the row, from 0.
        number: number of the document in the corpus; -1 for padding.
        source: source of the document; empty for padding.
        start, stop: range of tokens in the row.
        part, parts: number of the chunk among the document's chunks in this row, from 1, and their total.
        continues: whether it continues a document from the previous row.
        spans: the tokens from ``start`` to ``stop``, by kind.
    """

    document: int
    number: int
    source: str
    start: int
    stop: int
    part: int
    parts: int
    continues: bool
    spans: tuple[Span, ...]

    @property
    def is_padding(self) -> bool:
        return self.number == PADDING

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "padding": self.is_padding, "spans": [span.to_json() for span in self.spans]}


@dataclass(frozen=True)
class RowPreview:
    """One row.

    Attributes:
        anchor: the anchor tokens before the first chunk; None if there are none.
        chunks: the segments in the order of the row.
    """

    anchor: Span | None
    chunks: tuple[Chunk, ...]

    @property
    def documents(self) -> int:
        """Number of documents in the row, without padding; the chunks of a document count once."""
        return len({chunk.document for chunk in self.chunks if not chunk.is_padding})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        anchor = None if self.anchor is None else self.anchor.to_json()
        return {"anchor": anchor, "chunks": [chunk.to_json() for chunk in self.chunks]}


def with_texts(
    preview: RowPreview, input_ids: NDArray[np.int32], decode: Callable[[list[int]], str]
) -> RowPreview:
    """Add the decoded text to every span that is shown.

    Args:
        preview: preview of a row.
        input_ids: int32 ``[context]``, token ids of the row.
        decode: converts token ids to text.
    """

    def read(span: Span) -> Span:
        if span.kind in ("left_out", "padding"):
            return span
        ids = input_ids[span.start : span.stop].tolist()
        # Special tokens are decoded one by one: together, some tokenizers join or drop them.
        apart = ids if span.kind in ("special", "anchor") else []
        return replace(span, text=decode(ids), each=tuple(decode([each]) for each in apart))

    chunks = [replace(chunk, spans=tuple(map(read, chunk.spans))) for chunk in preview.chunks]
    return RowPreview(None if preview.anchor is None else read(preview.anchor), tuple(chunks))


def preview_row(
    row: PackedRow,
    anchor_length: int,
    special_ids: Collection[int],
    ends: int | None = None,
    before: PackedRow | None = None,
    eos: int | None = None,
) -> RowPreview:
    """Divide a row into chunks and spans, which are in order and contain each token once.

    Args:
        row: a packed row.
        anchor_length: leading tokens before its first segment.
        special_ids: ids of the tokenizer's special tokens.
        ends: number of tokens to show at the beginning and at the end of each chunk; None for all. A single token is
            never left out.
        before: the previous row under sequential packing, which shows whether the first document is a continuation;
            None if that cannot be known.
        eos: id that ends every document. None if documents have no EOS; an equal document number then counts as a
            continuation.

    Raises:
        RopewalkError: if ``ends`` is less than 1, or the row contradicts itself.
    """
    if ends is not None and ends < 1:
        raise RopewalkError(
            f"the number of tokens to show at each end of a document must be 1 or more, got {ends}"
        )
    total = anchor_length + sum(row.segment_lengths)
    if total != len(row.input_ids):
        raise RopewalkError(f"the row has {len(row.input_ids)} tokens, but its segments add up to {total}")
    masked = _mask(row.masked, total)
    # np.isin would take a set for a single object.
    special = np.isin(row.input_ids, np.fromiter(special_ids, np.int64))
    parts = np.bincount(row.segment_documents, minlength=len(row.sources))
    goes_on = before is not None and _goes_on(before, row, anchor_length, eos)
    seen = [0] * len(row.sources)
    chunks, start = [], anchor_length
    for document, length in zip(row.segment_documents, row.segment_lengths, strict=True):
        seen[document] += 1
        stop = start + length
        number = row.numbers[document]
        if number == PADDING:
            spans: tuple[Span, ...] = (Span("padding", start, stop, masked=True),)
        else:
            spans = _spans(start, stop, masked, special, ends)
        chunks.append(
            Chunk(
                document,
                number,
                row.sources[document],
                start,
                stop,
                part=seen[document],
                parts=int(parts[document]),
                continues=goes_on and document == 0 and seen[document] == 1,
                spans=spans,
            )
        )
        start = stop
    # Nothing precedes the anchor, so nothing is trained to predict it.
    anchor = Span("anchor", 0, anchor_length, masked=True) if anchor_length else None
    return RowPreview(anchor, tuple(chunks))


def _goes_on(before: PackedRow, row: PackedRow, anchor_length: int, eos: int | None) -> bool:
    """Whether the first document of a row is the last one of the previous row and did not end there.

    Documents of a row are numbered in reading order, also if their chunks are shuffled.
    """
    documents = [number for number in before.numbers if number != PADDING]
    if not documents or row.numbers[0] != documents[-1]:
        return False
    last = len(documents) - 1
    stops = anchor_length + np.cumsum(before.segment_lengths)
    end = max(int(stop) for stop, each in zip(stops, before.segment_documents, strict=True) if each == last)
    # The same document may be read again right after its end.
    return eos is None or int(before.input_ids[end - 1]) != eos


def _mask(spans: Sequence[int], total: int) -> np.ndarray:
    masked = np.zeros(total, np.bool_)
    for start, stop in zip(spans[::2], spans[1::2], strict=True):
        if not 0 <= start <= stop <= total:
            raise RopewalkError(f"masked tokens {start} to {stop} lie outside the row of {total} tokens")
        masked[start:stop] = True
    return masked


def _spans(
    start: int, stop: int, masked: np.ndarray, special: np.ndarray, ends: int | None
) -> tuple[Span, ...]:
    """Spans of equal kind; a tag within tokens that are not shown counts as part of them."""
    # More than one token: "1 token left out" would be no shorter than the token.
    if ends is None or stop - start <= 2 * ends + 1:
        return tuple(_runs(start, stop, masked, special))
    head, tail = start + ends, stop - ends
    gap = Span("left_out", head, tail, masked=bool(masked[head:tail].all()))
    return (*_runs(start, head, masked, special), gap, *_runs(tail, stop, masked, special))


def _runs(start: int, stop: int, masked: np.ndarray, special: np.ndarray) -> list[Span]:
    # 0 to 3: whether special, whether masked.
    kinds = 2 * special[start:stop].astype(np.int8) + masked[start:stop]
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), stop - start]
    return [
        Span("special" if special[start + a] else "text", start + a, start + b, bool(masked[start + a]))
        for a, b in pairwise(edges)
    ]
