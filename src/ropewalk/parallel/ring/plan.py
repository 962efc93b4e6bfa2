"""RingPlan: which keys the ranks of a ring exchange, and which queries see them. A pure value, made without processes.

A rank holds its places in (document, order) order, so the keys of one document that another rank holds before some
query are one range of its places, and so are the anchor's. Every rank computes what it sends and what it receives from
the layouts alone; nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ropewalk.attention.engines.runs import Gather, gather_by
from ropewalk.attention.engines.varlen import Call, calls_of
from ropewalk.attention.layout import PackedLayout, kept
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.attention.spans import Ints, Spans
from ropewalk.errors import RopewalkError
from ropewalk.parallel.shards import RowShards

Range = tuple[int, int]
"""(start, end)."""


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What one rank sends, receives and computes.

    A run is a piece of a document, or of the whole row under ``full``, that the rank holds without a gap. Its keys are
    the anchor's and those of its document up to its last query, in the order of the row.

    Attributes:
        ring_rank: this rank.
        sent: int64, local places (of the flattened batch: row · ring_length + place) whose keys go to rank 0, then
            those that go to rank 1, and so on; ascending for each rank, this one included.
        send_counts: how many go to each rank.
        receive_counts: how many come from each rank.
        slots: int64, the received key in each slot of the runs' keys, which stand one after the other; each received
            key stands in one slot or more.
        queries, keys: how many each run has. The runs' queries, one after the other, are all local places that hold a
            token.
        tokens: of each row, how many this rank holds; padding stands behind them.
    """

    ring_rank: int
    sent: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    slots: Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def sent_to_others(self) -> int:
        """Keys that leave this rank; a key that two ranks see counts twice."""
        return sum(self.send_counts) - self.send_counts[self.ring_rank]

    @property
    def received_from_others(self) -> int:
        return sum(self.receive_counts) - self.receive_counts[self.ring_rank]


@kept
def sent_on(plan: RingPlan, device: torch.device) -> Tensor:
    """``plan.sent`` on a device."""
    return plan.sent.to(device)


@kept
def gather_on(plan: RingPlan, device: torch.device) -> Gather | None:
    """The gather of received keys into the runs' slots, None where they lie that way already."""
    return gather_by(plan.slots, device)


@kept
def calls_on(plan: RingPlan, device: torch.device) -> tuple[Call, ...]:
    """The calls of the engine ``varlen``."""
    return calls_of(plan.queries, plan.keys, device)


@kept
def ring_plan(
    layouts: tuple[PackedLayout, ...],
    rows: tuple[RowShards, ...],
    ring_rank: int,
    locality: Locality = EVERYTHING,
) -> RingPlan:
    """What one rank sends, receives and computes; made once a batch, where all layers find it.

    Args:
        layouts: of the whole rows.
        rows: how each is cut, all into shards of one length.
        ring_rank: the rank, 0 to ring - 1.
        locality: of the layer; keys that no query's window or chunk holds are not sent.

    Raises:
        RopewalkError: if shards and layouts do not belong together.
    """
    ring, length = rows[0].ring, rows[0].ring_length
    for layout, row in zip(layouts, rows, strict=True):
        if (row.ring, row.ring_length) != (ring, length):
            raise RopewalkError(
                f"rows of a batch must be cut alike, got rings of {row.ring} x {row.ring_length} places and of {ring} "
                f"x {length}"
            )
        if not torch.equal(row.order, layout.storage_in_order):
            raise RopewalkError(
                "a ring needs rows that are cut in (document, order) order; make their shards with row_shards"
            )
    cuts = [
        _RowCut(Spans.of(layout, locality), row.chunks) for layout, row in zip(layouts, rows, strict=True)
    ]
    sent = [
        np.concatenate([cut.seen(other, ring_rank) + row * length for row, cut in enumerate(cuts)])
        for other in range(ring)
    ]
    # For each rank and row, the places in order whose keys come from there: received in this order.
    received = [[cut.held_by(source)[cut.seen(ring_rank, source)] for cut in cuts] for source in range(ring)]
    slots: list[Ints] = []
    queries: list[int] = []
    for number, cut in enumerate(cuts):
        at, start = np.full(cut.total, -1), 0
        for parts in received:
            at[parts[number]] = np.arange(len(parts[number])) + start + _total(parts[:number])
            start += _total(parts)
        for piece in cut.pieces(ring_rank):
            shared = at[piece.shared_start : piece.shared_end]
            slots.append(np.concatenate([shared, at[piece.first : piece.end]]))
            queries.append(piece.end - piece.start)
    return RingPlan(
        ring_rank=ring_rank,
        sent=torch.from_numpy(np.concatenate(sent)),
        send_counts=tuple(map(len, sent)),
        receive_counts=tuple(_total(parts) for parts in received),
        slots=torch.from_numpy(np.concatenate(slots or [np.arange(0)])),
        queries=tuple(queries),
        keys=tuple(map(len, slots)),
        tokens=tuple(len(cut.held_by(ring_rank)) for cut in cuts),
    )


@dataclass(frozen=True)
class _Piece:
    """A run's queries as places in order, and its keys: shared ones of the row, and those from ``first`` to its end."""

    start: int
    end: int
    first: int
    shared_start: int
    shared_end: int


class _RowCut:
    """One row's spans and chunks, and the arithmetic of places in order and of local ones."""

    def __init__(self, spans: Spans, chunks: Sequence[Sequence[Range]]) -> None:
        self.spans = spans
        self.total = int(spans.starts[-1])
        self.chunks = [np.array(pieces, dtype=np.int64).reshape(-1, 2) for pieces in chunks]
        self._found: dict[int, tuple[Ints, ...]] = {}

    def held_by(self, rank: int) -> Ints:
        """The places in order that a rank holds."""
        return _joined((start, end) for start, end in self.chunks[rank].tolist())

    def held_before(self, rank: int, places: Ints) -> Ints:
        """How many tokens before some places a rank holds: the local place, where it holds that place itself."""
        starts, ends = self.chunks[rank].T
        if not len(starts):
            return np.zeros_like(places)
        before = np.concatenate([np.zeros(1, np.int64), (ends - starts).cumsum()])
        chunk = np.maximum(np.searchsorted(starts, places, side="right") - 1, 0)
        inside: Ints = np.clip(places, starts[chunk], ends[chunk]) - starts[chunk]
        return before[chunk] + inside

    def pieces(self, rank: int) -> list[_Piece]:
        """The rank's places, cut where a chunk or a span ends."""
        columns = (column.tolist() for column in self._pieces(rank))
        return [_Piece(*found) for found in zip(*columns, strict=True)]

    def seen(self, rank: int, source: int) -> Ints:
        """Ascending local places of ``source`` whose keys a rank's queries see."""
        _, *ranges = self._pieces(rank)
        ends, firsts, shared_starts, shared_ends = (self.held_before(source, places) for places in ranges)
        shared = zip(shared_starts.tolist(), shared_ends.tolist(), strict=True)
        own = zip(firsts.tolist(), ends.tolist(), strict=True)
        return _joined(_union([*shared, *own]))

    def _pieces(self, rank: int) -> tuple[Ints, ...]:
        """Of each piece of a rank: start, end, first key of its own span, and the range of shared keys."""
        if rank not in self._found:
            cuts = np.unique(np.concatenate([self.chunks[rank].flatten(), self.spans.starts]))
            starts, ends = cuts[:-1], cuts[1:]
            mine = self.held_before(rank, ends) > self.held_before(rank, starts)
            starts, ends = starts[mine], ends[mine]
            # The first query of a piece sees the oldest keys of any.
            shared_starts, firsts = self.spans.first_seen(starts)
            shared_ends = self.spans.shared_end[self.spans.span_of(starts)]
            self._found[rank] = (starts, ends, firsts, shared_starts, shared_ends)
        return self._found[rank]


def _total(parts: Sequence[Ints]) -> int:
    return sum(len(part) for part in parts)


def _union(ranges: Iterable[Range]) -> list[Range]:
    """Ascending ranges, apart from each other, that cover these and nothing else."""
    joined: list[Range] = []
    for start, end in sorted(each for each in ranges if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _joined(ranges: Iterable[Range]) -> Ints:
    """The places in some ranges."""
    return np.concatenate([np.arange(0), *(np.arange(start, end) for start, end in ranges)])
