"""Which pieces of a row each rank of a ring holds, so that ranks hold as many tokens and have as much to compute.

All coordinates are places in the row's (document, order) order, ``layout.storage_in_order``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.spans import Spans
from ropewalk.errors import RopewalkError

Chunks = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank of a ring its pieces as (start, end), ascending."""

PIECES = (4, 8, 16)
"""Pieces a rank that ``cost`` tries; more of them balance better and leave fewer documents whole."""
TIE = 0.01
"""Work that differs by less counts as equal: a hundredth is not worth cutting more documents."""
PIECES_TIE = 0.04
"""The same between numbers of pieces: each piece of a long document has its own copy of the keys before it, so that 16
of them hold up to four times a row's, where 4 hold little more than one (docs/log.md)."""


def ring_chunks(layout: PackedLayout, ring: int, balance: str) -> Chunks:
    """Cut a row over the ranks of a ring; ranks hold the same number of tokens, or one fewer.

    Args:
        layout: the row's.
        ring: number of ranks.
        balance: ``contiguous``, ``zigzag``, ``cost`` or ``auto``, as for :func:`ropewalk.parallel.row_shards`.
            ``auto`` takes the first cut, in that order, whose busiest rank has at most 1 % more work than the best
            cut's; ``cost`` likewise the one with the fewest pieces, at most 4 %.

    Returns:
        For each rank its pieces as (start, end) in ``layout.storage_in_order``, none empty.

    Raises:
        RopewalkError: if the row has fewer tokens than the ring has ranks.
    """
    if layout.total_length < ring:
        raise RopewalkError(
            f"a row of {layout.total_length} tokens cannot be cut over a ring of {ring} ranks; use longer rows or "
            f"parallel.ring up to {layout.total_length}"
        )
    total = layout.total_length
    if balance == "contiguous":
        return _cut(list(range(ring)), total)
    if balance == "zigzag":
        return _cut([*range(ring), *reversed(range(ring))], total)
    spans = Spans.of(layout)
    by_cost = [_cut(_owners_by_work(spans, total, ring, pieces), total) for pieces in PIECES]
    cost = _first_within(PIECES_TIE, layout, by_cost)
    if balance == "cost":
        return cost
    others = [ring_chunks(layout, ring, name) for name in ("contiguous", "zigzag")]
    return _first_within(TIE, layout, [*others, cost])


def _first_within(tie: float, layout: PackedLayout, cuts: Sequence[Chunks]) -> Chunks:
    """The first cut whose busiest rank has at most this share more work than the best one's."""
    work = [max(ring_work(layout, chunks)) for chunks in cuts]
    return next(chunks for chunks, most in zip(cuts, work, strict=True) if most <= (1 + tie) * min(work))


def ring_work(layout: PackedLayout, chunks: Chunks) -> tuple[int, ...]:
    """Visible pairs of query and key whose query each rank holds; their sum is that of the layout's dense mask."""
    spans = Spans.of(layout)

    def pairs(pieces: tuple[tuple[int, int], ...]) -> int:
        ends = spans.pairs_before(np.array(pieces, dtype=np.int64).reshape(-1, 2))
        return int((ends[:, 1] - ends[:, 0]).sum())

    return tuple(pairs(pieces) for pieces in chunks)


def _owners_by_work(spans: Spans, total: int, ring: int, pieces: int) -> list[int]:
    """The rank of each of ``pieces`` x ``ring`` equal pieces: the heaviest first, to the rank with the least so far.

    Every rank takes as many pieces as the others, since ranks are padded to the one with the most tokens.
    """
    count = pieces * ring
    work = np.diff(spans.pairs_before(np.arange(count + 1) * total // count))
    owners = [0] * count
    waiting = [(0, rank, 0) for rank in range(ring)]
    for piece in np.argsort(-work, kind="stable").tolist():
        load, rank, held = heapq.heappop(waiting)
        owners[piece] = rank
        if held + 1 < pieces:
            heapq.heappush(waiting, (load + int(work[piece]), rank, held + 1))
    return owners


def _cut(owners: Sequence[int], total: int) -> Chunks:
    """Pieces of a row whose owners are given in order: each rank's share of the tokens, over its pieces equally."""
    ring = max(owners) + 1
    sizes: list[list[int]] = []
    for rank in range(ring):
        share, pieces = total // ring + (rank < total % ring), owners.count(rank)
        sizes.append([share // pieces + (piece < share % pieces) for piece in range(pieces)])
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ring)]
    start = 0
    for owner in owners:
        end = start + sizes[owner].pop(0)
        if chunks[owner] and chunks[owner][-1][1] == start:
            chunks[owner][-1] = (chunks[owner][-1][0], end)
        elif end > start:
            chunks[owner].append((start, end))
        start = end
    return tuple(tuple(pieces) for pieces in chunks)
