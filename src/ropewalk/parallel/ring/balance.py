"""Load balancing: cut a row over a ring so that ranks have equally many tokens and about equal work.

All coordinates are indices into the row sorted by (document, order), ``layout.storage_in_order``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.spans import Spans
from ropewalk.errors import RopewalkError

Chunks = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank of a ring, its pieces as ascending (start, end) index pairs."""

PIECES = (4, 8, 16)
"""Numbers of pieces per rank that ``cost`` tries; more pieces balance better but split more documents."""
TIE = 0.01
"""Relative difference of work that counts as equal: 1 % less work does not justify splitting more documents."""
PIECES_TIE = 0.04
"""Tolerance between numbers of pieces. Each piece of a long document has its own copy of the keys before it: 16 pieces
hold up to four times the keys of a row, 4 pieces little more than one row's (docs/log.md)."""


def ring_chunks(layout: PackedLayout, ring: int, balance: str) -> Chunks:
    """Cut a row over the ranks of a ring; the token counts of ranks differ by at most one.

    Args:
        layout: layout of the row.
        ring: number of ranks.
        balance: ``contiguous``, ``zigzag``, ``cost`` or ``auto``, as for :func:`ropewalk.parallel.row_shards`.
            ``auto`` takes the first cut, in this order, whose busiest rank has at most 1 % more work than that of the
            best cut. ``cost`` takes the cut with the fewest pieces whose busiest rank has at most 4 % more.

    Returns:
        For each rank, its non-empty pieces as (start, end) in ``layout.storage_in_order``.

    Raises:
        RopewalkError: if the row has fewer tokens than the ring has ranks.
    """
    if layout.total_length < ring:
        raise RopewalkError(
            f"a row of {layout.total_length} tokens is too short for a ring of {ring} ranks; use longer rows, or set "
            f"parallel.ring to at most {layout.total_length}"
        )
    total = layout.total_length
    if balance == "contiguous":
        return _cut(list(range(ring)), total)
    if balance == "zigzag":
        # Under a causal mask late tokens see more keys, so rank i pairs an early piece with a late one.
        return _cut([*range(ring), *reversed(range(ring))], total)
    spans = Spans.of(layout)
    # More pieces balance better and send more; the fewest that are about as balanced are taken.
    by_cost = [_cut(_owners_by_work(spans, total, ring, pieces), total) for pieces in PIECES]
    cost = _first_within(PIECES_TIE, layout, by_cost)
    if balance == "cost":
        return cost
    others = [ring_chunks(layout, ring, name) for name in ("contiguous", "zigzag")]
    # Of equals the simplest layout: its shards are contiguous or nearly so, and need less gathering.
    return _first_within(TIE, layout, [*others, cost])


def _first_within(tie: float, layout: PackedLayout, cuts: Sequence[Chunks]) -> Chunks:
    """First cut whose busiest rank has at most (1 + tie) times the work of the best cut's busiest rank."""
    work = [max(ring_work(layout, chunks)) for chunks in cuts]
    return next(chunks for chunks, most in zip(cuts, work, strict=True) if most <= (1 + tie) * min(work))


def ring_work(layout: PackedLayout, chunks: Chunks) -> tuple[int, ...]:
    """Number of visible (query, key) pairs of each rank's queries; the sum equals that of the layout's dense mask."""
    spans = Spans.of(layout)

    def pairs(pieces: tuple[tuple[int, int], ...]) -> int:
        ends = spans.pairs_before(np.array(pieces, dtype=np.int64).reshape(-1, 2))
        return int((ends[:, 1] - ends[:, 0]).sum())

    return tuple(pairs(pieces) for pieces in chunks)


def _owners_by_work(spans: Spans, total: int, ring: int, pieces: int) -> list[int]:
    """Rank of each of ``pieces`` x ``ring`` equal pieces: greedily, the heaviest piece to the least loaded rank.

    All ranks get the same number of pieces, because every rank is padded to the longest one.
    """
    count = pieces * ring
    work = np.diff(spans.pairs_before(np.arange(count + 1) * total // count))
    owners = [0] * count
    # Ties go to the lowest rank, so that all ranks compute the same assignment without communication.
    waiting = [(0, rank, 0) for rank in range(ring)]
    for piece in np.argsort(-work, kind="stable").tolist():
        load, rank, held = heapq.heappop(waiting)
        owners[piece] = rank
        # A rank with all its pieces leaves the queue, even if it is the least loaded.
        if held + 1 < pieces:
            heapq.heappush(waiting, (load + int(work[piece]), rank, held + 1))
    return owners


def _cut(owners: Sequence[int], total: int) -> Chunks:
    """Cut a row into pieces with the given owners; a rank's equal share of the tokens is spread over its pieces."""
    ring = max(owners) + 1
    sizes: list[list[int]] = []
    for rank in range(ring):
        share, pieces = total // ring + (rank < total % ring), owners.count(rank)
        sizes.append([share // pieces + (piece < share % pieces) for piece in range(pieces)])
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ring)]
    start = 0
    for owner in owners:
        end = start + sizes[owner].pop(0)
        # Merge adjacent pieces of one rank: fewer runs for the engine, and no key held twice.
        if chunks[owner] and chunks[owner][-1][1] == start:
            chunks[owner][-1] = (chunks[owner][-1][0], end)
        elif end > start:
            chunks[owner].append((start, end))
        start = end
    return tuple(tuple(pieces) for pieces in chunks)
