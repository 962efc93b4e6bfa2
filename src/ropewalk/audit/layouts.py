"""The documents of a row, laid out as the mends have them."""

from __future__ import annotations

from typing import Literal

from ropewalk.attention.layout import PackedLayout, Positions
from ropewalk.errors import RopewalkError

QUARTERS = 4
"""Documents that a row of one long document is cut into, to have something to lay out."""


def documents_of(layout: PackedLayout) -> PackedLayout:
    """A row's documents in one plain causal sequence; a row of one document counts as four quarters of it.

    Raises:
        RopewalkError: if there are not tokens enough for that.
    """
    lengths, documents = layout.cu_seqlens.diff().tolist(), layout.segment_documents.tolist()
    lengths[0] += layout.anchor_length
    if len(set(documents)) == 1:
        total = layout.total_length
        if total < 2 * QUARTERS:
            raise RopewalkError(f"a row of {total} tokens is too short to lay out {QUARTERS} documents")
        quarter = total // QUARTERS
        lengths, documents = (
            [quarter] * (QUARTERS - 1) + [total - quarter * (QUARTERS - 1)],
            list(range(QUARTERS)),
        )
    return PackedLayout.from_segments(lengths, documents, "full", 0)


def anchored(layout: PackedLayout) -> PackedLayout:
    """The same documents under the pattern ``anchor``; a row without an anchor lends its first token as one."""
    return _again(layout, "anchor", max(1, layout.anchor_length))


def separated(layout: PackedLayout) -> PackedLayout:
    """The same documents each by itself, at positions from 0; an anchor belongs to the first."""
    return _again(layout, "intra_document", 0)


def _again(
    layout: PackedLayout, pattern: Literal["anchor", "intra_document"], anchor_length: int
) -> PackedLayout:
    lengths = layout.cu_seqlens.diff().tolist()
    lengths[0] += layout.anchor_length - anchor_length
    # A document of one token is gone where that token became the anchor; the others are numbered from 0 again.
    kept = [(n, doc) for n, doc in zip(lengths, layout.segment_documents.tolist(), strict=True) if n]
    numbers = {doc: number for number, doc in enumerate(sorted({doc for _, doc in kept}))}
    positions: Positions = "reset" if pattern == "intra_document" else "continuous"
    return PackedLayout.from_segments(
        [n for n, _ in kept], [numbers[doc] for _, doc in kept], pattern, anchor_length, positions
    )
