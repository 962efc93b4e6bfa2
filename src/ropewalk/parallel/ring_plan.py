"""RingPlan: which keys travel around the ring, and which queries see them. A pure value, made without processes.

A rank holds its places in (document, order) order. So the keys of one document that another rank holds before some
query are one range of its places, and so are the anchor's: a query's keys are at most two ranges, whatever the
pattern and however the row is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.attention.kept import kept
from ropewalk.attention.layout import PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.parallel.balance import Spans
from ropewalk.parallel.shards import RowShards

Range = tuple[int, int]
"""(start, end)."""
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Run:
    """A range of queries and the keys that they see in one round.

    Attributes:
        queries: local places, of the flattened batch (row · ring_length + place).
        shared: anchor keys in the round's buffer of keys, perhaps none; further runs see them too.
        own: keys of the queries' document in the buffer, perhaps none; no other run of the same layer sees them.
        layer: how many of this rank's pieces of the document stand before this one.
    """

    queries: Range
    shared: Range
    own: Range
    layer: int

    @property
    def keys(self) -> tuple[Range, ...]:
        """The ranges of keys that are not empty, in the order of the row."""
        return tuple(each for each in (self.shared, self.own) if each[0] < each[1])

    @property
    def num_keys(self) -> int:
        return self.shared[1] - self.shared[0] + self.own[1] - self.own[0]


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank does in one round.

    Attributes:
        destination, source: ring ranks that keys go to and come from; this rank itself in round 0.
        sent: int64, ascending local places whose keys go to ``destination``; empty in round 0.
        received: keys that come from ``source``, which are the round's buffer of keys; in round 0 it is all local
            places.
        runs: every query stands in at most one. In round 0 they are causal, aligned at the last query and the last
            key; in others every query sees all keys of its run.
        causal: whether this is round 0.
    """

    destination: int
    source: int
    sent: Tensor
    received: int
    runs: tuple[Run, ...]
    causal: bool


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Attributes: local places of all rows, padding included; the rounds, as many as ranks."""

    places: int
    rounds: tuple[Round, ...]


@kept
def sent_on(each: Round, device: torch.device) -> Tensor:
    """``each.sent`` on a device."""
    return each.sent.to(device)


@kept
def ring_plan(layouts: tuple[PackedLayout, ...], rows: tuple[RowShards, ...], ring_rank: int) -> RingPlan:
    """What one rank sends, receives and computes; made once a batch, where all layers find it.

    Args:
        layouts: of the whole rows.
        rows: how each is cut, all into shards of one length.
        ring_rank: the rank, 0 to ring - 1.

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
    cuts = [_RowCut(Spans.of(layout), row.chunks) for layout, row in zip(layouts, rows, strict=True)]
    rounds = []
    for step in range(ring):
        destination, source = (ring_rank + step) % ring, (ring_rank - step) % ring
        if step == 0:
            runs = [run for cut, offset in _offsets(cuts, length) for run in cut.own_runs(ring_rank, offset)]
            rounds.append(Round(ring_rank, ring_rank, _places([]), len(rows) * length, tuple(runs), True))
            continue
        sent = [
            (start + offset, end + offset)
            for cut, offset in _offsets(cuts, length)
            for start, end in _union(cut.seen(destination, ring_rank))
        ]
        runs, received = [], 0
        for cut, offset in _offsets(cuts, length):
            found, size = cut.runs(ring_rank, source, offset, received)
            runs += found
            received += size
        rounds.append(Round(destination, source, _places(sent), received, tuple(runs), False))
    return RingPlan(len(rows) * length, tuple(rounds))


def ring_bytes(
    plan: RingPlan, num_kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes that a rank sends to others in a forward and in a backward of ``ring_attend``.

    Keys and values travel in ``dtype`` in both; in the backward the gradients of received keys and values return to
    their owners in float32, or in float64 for float64.

    Args:
        plan: the rank's.
        num_kv_heads, head_dim, value_dim: of the tensors that ring_attend gets (under Ulysses, a rank's share).
        dtype: theirs.
    """
    width = num_kv_heads * (head_dim + value_dim)
    forward = sum(each.sent.numel() for each in plan.rounds) * width * dtype.itemsize
    returned = sum(each.received for each in plan.rounds[1:]) * width
    return forward, forward + returned * torch.promote_types(dtype, torch.float32).itemsize


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Pieces of one rank's queries, cut at chunks and spans: first place in order, first local place, and so on."""

    start: Ints
    end: Ints
    local: Ints
    span: Ints
    layer: Ints


class _RowCut:
    """One row's spans and chunks, and the arithmetic of places in order (``p``) and of local ones."""

    def __init__(self, spans: Spans, chunks: Sequence[Sequence[Range]]) -> None:
        self.spans = spans
        self.chunks = [np.array(pieces, dtype=np.int64).reshape(-1, 2) for pieces in chunks]
        self.shared = np.where(spans.starts[:-1] < spans.shared, 0, spans.shared)

    def held(self, rank: int, p: Ints) -> Ints:
        """How many tokens before p a rank holds: the local place of p, where it holds p itself."""
        starts, ends = self.chunks[rank].T
        if not len(starts):
            return np.zeros_like(p)
        before = np.concatenate([np.zeros(1, np.int64), (ends - starts).cumsum()])
        chunk = np.searchsorted(starts[1:], p, side="right")
        inside: Ints = np.clip(p, starts[chunk], ends[chunk]) - starts[chunk]
        return before[chunk] + inside

    def pieces(self, rank: int) -> _Pieces:
        """The rank's queries, cut where a chunk or a span ends."""
        starts, ends = self.chunks[rank].T
        cuts = np.unique(np.concatenate([starts, ends, self.spans.starts]))
        middle, upper = cuts[:-1], cuts[1:]
        mine = self.held(rank, upper) > self.held(rank, middle)
        start, end = middle[mine], upper[mine]
        span = np.searchsorted(self.spans.starts, start, side="right") - 1
        # Pieces of one span stand beside each other: a piece's layer is its distance from the first.
        layer = np.arange(len(span)) - np.searchsorted(span, span)
        return _Pieces(start, end, self.held(rank, start), span, layer)

    def seen(self, rank: int, source: int) -> Ints:
        """``[pieces, 4]``: ranges of ``source``'s local places, anchor and own span, that a rank's pieces see."""
        pieces = self.pieces(rank)
        anchor = self.held(source, self.shared[pieces.span])
        first = self.held(source, self.spans.starts[pieces.span])
        # No place of the source lies inside a piece, so what stands before the piece is before all its queries.
        return np.stack([np.zeros_like(anchor), anchor, first, self.held(source, pieces.start)], axis=1)

    def runs(self, rank: int, source: int, offset: int, buffer: int) -> tuple[list[Run], int]:
        """A rank's runs over keys of another, in a buffer of what was sent from place ``buffer`` on; its size."""
        pieces, seen = self.pieces(rank), self.seen(rank, source)
        sent = np.array(_union(seen), dtype=np.int64).reshape(-1, 2)
        slots = np.concatenate([np.zeros(1, np.int64), (sent[:, 1] - sent[:, 0]).cumsum()]) + buffer
        runs = []
        for start, end, local, layer, (a, b, c, d) in zip(
            pieces.start.tolist(),
            pieces.end.tolist(),
            pieces.local.tolist(),
            pieces.layer.tolist(),
            seen,
            strict=True,
        ):
            if b > a or d > c:
                shared, own = (_slots(each, sent, slots) for each in ((a, b), (c, d)))
                runs.append(Run((local + offset, local + end - start + offset), shared, own, layer))
        return runs, int(slots[-1]) - buffer

    def own_runs(self, rank: int, offset: int) -> list[Run]:
        """A rank's runs over its own keys: one a span, since its places of a span stand beside each other."""
        pieces = self.pieces(rank)
        runs = []
        for span in np.unique(pieces.span):
            first, end, anchor = self.held(
                rank, np.array([self.spans.starts[span], self.spans.starts[span + 1], self.shared[span]])
            ).tolist()
            own = (first + offset, end + offset)
            runs.append(Run(own, (offset, offset + anchor), own, 0))
        return runs


def _offsets(cuts: Sequence[_RowCut], length: int) -> list[tuple[_RowCut, int]]:
    """Each row's cut, and its first place in the flattened batch."""
    return [(cut, row * length) for row, cut in enumerate(cuts)]


def _union(seen: Ints) -> list[Range]:
    """Ascending ranges, apart from each other, that cover these ``[pieces, 4]`` ranges and nothing else."""
    ranges = sorted((start, end) for start, end in seen.reshape(-1, 2).tolist() if start < end)
    joined: list[Range] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _slots(found: tuple[int, int], sent: Ints, slots: Ints) -> Range:
    """Where a range of the sender's places lies in the buffer of what it sent."""
    start, end = int(found[0]), int(found[1])
    if start >= end:
        return (0, 0)
    which = int(np.searchsorted(sent[:, 0], start, side="right")) - 1
    first = int(slots[which]) + start - int(sent[which, 0])
    return (first, first + end - start)


def _places(ranges: Sequence[Range]) -> Tensor:
    """int64: the places in some ranges."""
    return torch.cat([torch.arange(start, end) for start, end in ranges] or [torch.arange(0)])
