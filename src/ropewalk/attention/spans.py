"""Spans: a row's visibility once its documents are contiguous, as index arithmetic on numbers.

All coordinates are places in the row's (document, order) order, ``layout.storage_in_order``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import EVERYTHING, Locality

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Spans:
    """What the pattern of a layout and the locality of a layer come to.

    Query p of the span that starts at s sees the keys s, …, p and, before them, the shared keys of the row from
    ``shared_start`` to ``shared_end``; under a window the last ``window`` of all these alone.

    Attributes:
        starts: int64 ``[spans + 1]``, where each span starts, and the row's length.
        shared_start, shared_end: int64 ``[spans]``, the keys that each span sees besides its own: those of the anchor.
            Equal where there are none.
        window: keys that a query sees, itself included; None for all.
    """

    starts: Ints
    shared_start: Ints
    shared_end: Ints
    window: int | None

    @classmethod
    def of(cls, layout: PackedLayout, locality: Locality = EVERYTHING) -> Spans:
        """Under ``full`` the row is one run; else each document, the first with the anchor that stands before it."""
        anchor = layout.anchor_length
        if layout.pattern == "full":
            lengths, shared = np.array([layout.total_length]), np.zeros(1, np.int64)
        else:
            lengths = layout.document_lengths.numpy()
            if layout.pattern == "anchor":
                lengths, shared = lengths.copy(), np.full(len(lengths), anchor)
                # The anchor stands where the first document would have it.
                lengths[0] += anchor
                shared[0] = 0
            else:
                lengths = np.concatenate([np.full(int(anchor > 0), anchor), lengths])
                shared = np.zeros(len(lengths), np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        whole = cls(starts, np.zeros_like(shared), shared, locality.window)
        return whole if locality.chunk is None else whole._cut_into(locality.chunk)

    def _cut_into(self, chunk: int) -> Spans:
        """Each span cut where a chunk of its run ends; the shared keys stand in the run's first chunks."""
        starts, shared_start, shared_end = [0], [], []
        runs = zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), self.shared_end.tolist(), strict=True)
        for start, end, shared in runs:
            ends = [*range(start + chunk - shared % chunk, end, chunk), end]
            starts += ends
            # Only the first piece lies in one chunk with shared keys: those after the last whole chunk of them.
            shared_start += [shared - shared % chunk] + [0] * (len(ends) - 1)
            shared_end += [shared] + [0] * (len(ends) - 1)
        return Spans(np.array(starts), np.array(shared_start), np.array(shared_end), self.window)

    def span_of(self, places: Ints) -> Ints:
        """The span that each place lies in."""
        found: Ints = np.searchsorted(self.starts[1:-1], places, side="right")
        return found

    def first_seen(self, places: Ints) -> tuple[Ints, Ints]:
        """The oldest keys that the query at each place sees: the first shared one, and the first of its own span.

        The first shared one is ``shared_end`` where there is none, or the window has left them all.
        """
        span = self.span_of(places)
        starts, oldest, end = self.starts[span], self.shared_start[span], self.shared_end[span]
        if self.window is None:
            return oldest, starts
        # The window counts shared keys and own ones as one sequence.
        behind = places - starts - self.window + 1
        return np.clip(end + behind, oldest, end), starts + np.maximum(behind, 0)

    def pairs_before(self, places: Ints) -> Ints:
        """int64: visible pairs of the queries that stand before each of these places."""
        sizes = np.diff(self.starts)
        done = np.concatenate([np.zeros(1, np.int64), self._pairs(sizes, slice(None)).cumsum()])
        span = self.span_of(places)
        pairs: Ints = done[span] + self._pairs(places - self.starts[span], span)
        return pairs

    def _pairs(self, queries: Ints, spans: Ints | slice) -> Ints:
        """Pairs of the first queries of some spans: query i sees the shared keys and i + 1 own ones."""
        shared = (self.shared_end - self.shared_start)[spans]
        pairs: Ints = queries * shared + queries * (queries + 1) // 2
        if self.window is None:
            return pairs
        # From the query on that would see one key more than the window: 1 + 2 + 3 + ...
        late, early = (np.clip(shared + n - self.window, 0, None) for n in (queries, 0))
        pairs -= (late * (late + 1) - early * (early + 1)) // 2
        return pairs
