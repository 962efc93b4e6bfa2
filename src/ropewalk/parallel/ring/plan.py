"""RingPlan: which keys the ranks of a ring exchange, and which queries see them. Computing it needs no processes.

Each rank stores its tokens in (document, order) order, so the keys of a document that precede a query form one range of
indices on each rank. Every rank computes from the layouts alone what it sends and receives; the ranks do not
communicate for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.attention.spans import Ints, Spans
from ropewalk.errors import RopewalkError
from ropewalk.parallel.shards import RowShards

Range = tuple[int, int]
"""(start, end)."""


@dataclass(frozen=True, eq=False)
class AnchorKeys:
    """The keys of the anchors of all rows, row by row. Every rank has them besides the keys of its runs.

    Attributes:
        received: int64 ``[keys]``, where they are among the keys that this rank receives.
        held: int64, the tokens of this rank that belong to an anchor.
        places: int64, the places of these tokens among the keys.
        seen: bool ``[tokens of this rank, keys]``, whether a query sees a key in addition to those of its run.
    """

    received: Tensor
    held: Tensor
    places: Tensor
    seen: Tensor

    def to(self, device: torch.device) -> AnchorKeys:
        return AnchorKeys(*(each.to(device) for each in (self.received, self.held, self.places, self.seen)))


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Keys that one rank sends and receives, and the runs whose attention it computes.

    A run is a contiguous piece of a document on this rank, or of the whole row under the pattern ``full``. Its keys are
    those of its document up to its last query, in row order. The anchor belongs to the first document.

    Tokens of a rank are numbered row by row, without padding.

    Attributes:
        ring_rank: this rank.
        sent: int64, the tokens whose keys are sent to rank 0, then of those sent to rank 1, and so on, this rank
            included; ascending for each rank.
        send_counts: number of keys sent to each rank.
        receive_counts: number of keys received from each rank.
        slots: int64, for each slot of the runs' concatenated keys, the index of the received key; a received key fills
            no slot if only the anchors' keys contain it.
        runs: numbers of queries and keys of each run. The concatenated queries of the runs are all tokens.
        anchors: the anchors' keys; None if no query of any rank sees a key besides those of its run.
        tokens: for each row, the number of tokens on this rank; padding follows them.
    """

    ring_rank: int
    sent: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    slots: Tensor
    runs: Runs
    anchors: AnchorKeys | None
    tokens: tuple[int, ...]

    @property
    def sent_to_others(self) -> int:
        """Keys that leave this rank; a key that two ranks see counts twice."""
        return sum(self.send_counts) - self.send_counts[self.ring_rank]

    @property
    def received_from_others(self) -> int:
        return sum(self.receive_counts) - self.receive_counts[self.ring_rank]


@cached_per_layout
def ring_plan(
    layouts: tuple[PackedLayout, ...],
    rows: tuple[RowShards, ...],
    ring_rank: int,
    locality: Locality = EVERYTHING,
) -> RingPlan:
    """Compute the plan of one rank; it is cached, so all layers of a batch share it.

    Args:
        layouts: layouts of the whole rows.
        rows: shards of each row, all of one length.
        ring_rank: the rank, 0 to ring - 1.
        locality: window or chunks of the layer; keys outside every query's window or chunk are not sent.

    Raises:
        RopewalkError: if shards and layouts do not match.
    """
    ring, length = rows[0].ring, rows[0].ring_length
    for layout, row in zip(layouts, rows, strict=True):
        if (row.ring, row.ring_length) != (ring, length):
            raise RopewalkError(
                f"all rows of a batch must have the same ring and the same ring_length, got ring {ring} and "
                f"ring_length {length} in one row, ring {row.ring} and ring_length {row.ring_length} in another"
            )
        if not torch.equal(row.order, layout.storage_in_order):
            raise RopewalkError(
                "the order of the shards must be the layout's storage_in_order; create the shards "
                "with row_shards"
            )
    spans = [Spans.of(layout, locality) for layout in layouts]
    cuts = [_RowCut(each, row.chunks) for each, row in zip(spans, rows, strict=True)]
    anchors = _anchor_lengths(spans)
    tokens = tuple(len(cut.held_by(ring_rank)) for cut in cuts)
    first_tokens = np.cumsum((0, *tokens)).tolist()

    def seen(rank: int, source: int) -> list[Ints]:
        """For each row, ascending indices in it on ``source`` of the keys that ``rank`` sees."""
        return [cut.seen(rank, source, anchor) for cut, anchor in zip(cuts, anchors, strict=True)]

    # What this rank sends follows from what the other rank sees: both compute the same ranges, so no sizes are
    # exchanged.
    sent = [
        np.concatenate(
            [found + first for found, first in zip(seen(other, ring_rank), first_tokens, strict=False)]
        )
        for other in range(ring)
    ]
    # For each source rank and row, the sorted indices of the keys that come from there, in the order of arrival.
    received = [
        [cut.held_by(source)[found] for cut, found in zip(cuts, seen(ring_rank, source), strict=True)]
        for source in range(ring)
    ]
    slots: list[Ints] = []
    queries: list[int] = []
    first_keys: list[Ints] = []
    for number, (cut, anchor) in enumerate(zip(cuts, anchors, strict=True)):
        # at[i]: position in the receive buffer of the key at sorted index i, -1 if it is not received.
        at, start = np.full(cut.total, -1), 0
        for parts in received:
            at[parts[number]] = np.arange(len(parts[number])) + start + _total(parts[:number])
            start += _total(parts)
        first_keys.append(at[:anchor])
        for piece in cut.pieces(ring_rank):
            slots.append(at[piece.first : piece.end])
            queries.append(piece.end - piece.start)
    return RingPlan(
        ring_rank=ring_rank,
        sent=torch.from_numpy(np.concatenate(sent)),
        send_counts=tuple(map(len, sent)),
        receive_counts=tuple(_total(parts) for parts in received),
        slots=torch.from_numpy(np.concatenate(slots or [np.arange(0)])),
        runs=Runs(
            tuple(queries), tuple(map(len, slots)), all(layout.pattern == "full" for layout in layouts)
        ),
        anchors=_anchors(spans, cuts, ring_rank, np.concatenate(first_keys)) if any(anchors) else None,
        tokens=tokens,
    )


def _anchor_lengths(spans: Sequence[Spans]) -> list[int]:
    """For each row, how many of its first keys some span sees besides its own."""
    # The first token of a span sees the most shared keys.
    return [
        int((each.shared_end * (each.first_seen(each.starts[:-1])[0] < each.shared_end)).max())
        for each in spans
    ]


def _anchors(spans: Sequence[Spans], cuts: Sequence[_RowCut], rank: int, received: Ints) -> AnchorKeys:
    held, places, rows = [], [], []
    tokens = keys = 0
    for span, cut, length in zip(spans, cuts, _anchor_lengths(spans), strict=True):
        own = cut.held_by(rank)
        (anchor,) = np.nonzero(own < length)
        held.append(anchor + tokens)
        places.append(own[anchor] + keys)
        oldest, end, shared = span.first_seen(own)[0], span.shared_end[span.span_of(own)], np.arange(length)
        rows.append(torch.from_numpy((oldest[:, None] <= shared) & (shared < end[:, None])))
        tokens, keys = tokens + len(own), keys + length
    return AnchorKeys(
        torch.from_numpy(received),
        torch.from_numpy(np.concatenate(held)),
        torch.from_numpy(np.concatenate(places)),
        # A query sees the anchor of its own row alone.
        torch.block_diag(*rows).bool(),
    )


@dataclass(frozen=True)
class _Piece:
    """A run in sorted indices: queries start to end, keys first to end."""

    start: int
    end: int
    first: int


class _RowCut:
    """Spans and chunks of one row, and the arithmetic between sorted indices of the row and local ones of a rank."""

    def __init__(self, spans: Spans, chunks: Sequence[Sequence[Range]]) -> None:
        self.spans = spans
        self.total = int(spans.starts[-1])
        self.chunks = [np.array(pieces, dtype=np.int64).reshape(-1, 2) for pieces in chunks]
        self._found: dict[int, tuple[Ints, Ints, Ints]] = {}

    def held_by(self, rank: int) -> Ints:
        """Sorted indices of the tokens that a rank holds."""
        return _joined((start, end) for start, end in self.chunks[rank].tolist())

    def held_before(self, rank: int, places: Ints) -> Ints:
        """Number of the rank's tokens before each sorted index, which is the local index of a token it holds."""
        starts, ends = self.chunks[rank].T
        if not len(starts):
            return np.zeros_like(places)
        before = np.concatenate([np.zeros(1, np.int64), (ends - starts).cumsum()])
        chunk = np.maximum(np.searchsorted(starts, places, side="right") - 1, 0)
        inside: Ints = np.clip(places, starts[chunk], ends[chunk]) - starts[chunk]
        return before[chunk] + inside

    def pieces(self, rank: int) -> list[_Piece]:
        """The rank's tokens as pieces that end where a chunk or a span ends."""
        columns = (column.tolist() for column in self._pieces(rank))
        return [_Piece(*found) for found in zip(*columns, strict=True)]

    def seen(self, rank: int, source: int, anchor: int) -> Ints:
        """Ascending local indices on ``source`` of the anchor's keys and of those of runs that ``rank`` computes."""
        _, ends, firsts = (self.held_before(source, places) for places in self._pieces(rank))
        own = zip(firsts.tolist(), ends.tolist(), strict=True)
        return _joined(_union([(0, int(self.held_before(source, np.array([anchor]))[0])), *own]))

    def _pieces(self, rank: int) -> tuple[Ints, Ints, Ints]:
        """Arrays over the pieces of a rank: start, end, and first key of the own span."""
        if rank not in self._found:
            # A piece within one chunk and one span sees contiguous keys, which is what makes it a run.
            cuts = np.unique(np.concatenate([self.chunks[rank].flatten(), self.spans.starts]))
            starts, ends = cuts[:-1], cuts[1:]
            mine = self.held_before(rank, ends) > self.held_before(rank, starts)
            starts, ends = starts[mine], ends[mine]
            # Windows and chunks only move forward, so the first query of a piece sees the oldest keys.
            self._found[rank] = (starts, ends, self.spans.first_seen(starts)[1])
        return self._found[rank]


def _total(parts: Sequence[Ints]) -> int:
    return sum(len(part) for part in parts)


def _union(ranges: Iterable[Range]) -> list[Range]:
    """Union of ranges as ascending, disjoint ranges."""
    joined: list[Range] = []
    for start, end in sorted(each for each in ranges if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _joined(ranges: Iterable[Range]) -> Ints:
    """Concatenated indices of the ranges."""
    return np.concatenate([np.arange(0), *(np.arange(start, end) for start, end in ranges)])
