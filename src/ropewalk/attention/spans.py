"""Spans: the visibility of a row whose documents are contiguous, computed by index arithmetic.

All coordinates are indices in (document, order) order, see ``layout.storage_in_order``.
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
    """The visibility that the pattern of a layout and the locality of a layer produce together.

    Query p of the span that starts at s sees the keys s, …, p and, before them, the row's shared keys from
    ``shared_start`` to ``shared_end``. Under a window it sees only the last ``window`` of these.

    Attributes:
        starts: int64 ``[spans + 1]``, the first index of each span, followed by the length of the row.
        shared_start, shared_end: int64 ``[spans]``, range of the anchor's keys that each span sees besides its own.
            The two are equal if there are none.
        window: number of keys that a query sees, including its own; None for all.
    """

    starts: Ints
    shared_start: Ints
    shared_end: Ints
    window: int | None

    @classmethod
    def of(cls, layout: PackedLayout, locality: Locality = EVERYTHING) -> Spans:
        """One span for the whole row under ``full``, otherwise one for each document; the first includes the anchor."""
        anchor = layout.anchor_length
        if layout.pattern == "full":
            lengths, shared = np.array([layout.total_length]), np.zeros(1, np.int64)
        else:
            lengths = layout.document_lengths.numpy()
            if layout.pattern == "anchor":
                lengths, shared = lengths.copy(), np.full(len(lengths), anchor)
                # In document order the anchor directly precedes the first document, so they form one span.
                lengths[0] += anchor
                shared[0] = 0
            else:
                lengths = np.concatenate([np.full(int(anchor > 0), anchor), lengths])
                shared = np.zeros(len(lengths), np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        whole = cls(starts, np.zeros_like(shared), shared, locality.window)
        return whole if locality.chunk is None else whole._cut_into(locality.chunk)

    def _cut_into(self, chunk: int) -> Spans:
        """Cut each span at the ends of its run's chunks; the shared keys lie in the first chunks of the run."""
        starts, shared_start, shared_end = [0], [], []
        runs = zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), self.shared_end.tolist(), strict=True)
        for start, end, shared in runs:
            # Chunks count the anchor in front of a run, so a document behind an anchor starts in the middle of a chunk.
            ends = [*range(start + chunk - shared % chunk, end, chunk), end]
            starts += ends
            # Only the first piece shares a chunk with shared keys: those after their last whole chunk.
            shared_start += [shared - shared % chunk] + [0] * (len(ends) - 1)
            shared_end += [shared] + [0] * (len(ends) - 1)
        return Spans(np.array(starts), np.array(shared_start), np.array(shared_end), self.window)

    def span_of(self, places: Ints) -> Ints:
        """The span that contains each index."""
        found: Ints = np.searchsorted(self.starts[1:-1], places, side="right")
        return found

    def first_seen(self, places: Ints) -> tuple[Ints, Ints]:
        """The oldest keys that the query at each index sees: the first shared key and the first of its own span.

        The first shared key is ``shared_end`` if there is none, or if all of them lie before the window.
        """
        span = self.span_of(places)
        starts, oldest, end = self.starts[span], self.shared_start[span], self.shared_end[span]
        if self.window is None:
            return oldest, starts
        # The window counts shared and own keys as one sequence.
        behind = places - starts - self.window + 1
        return np.clip(end + behind, oldest, end), starts + np.maximum(behind, 0)

    @property
    def pairs(self) -> int:
        """Number of visible pairs of the row."""
        return int(self._pairs(np.diff(self.starts), slice(None)).sum())

    def pairs_before(self, places: Ints) -> Ints:
        """int64: number of visible pairs of all queries before each of these indices."""
        sizes = np.diff(self.starts)
        done = np.concatenate([np.zeros(1, np.int64), self._pairs(sizes, slice(None)).cumsum()])
        span = self.span_of(places)
        pairs: Ints = done[span] + self._pairs(places - self.starts[span], span)
        return pairs

    def _pairs(self, queries: Ints, spans: Ints | slice) -> Ints:
        """Number of pairs of the first queries of some spans: query i sees the shared keys and i + 1 own keys."""
        shared = (self.shared_end - self.shared_start)[spans]
        pairs: Ints = queries * shared + queries * (queries + 1) // 2
        if self.window is None:
            return pairs
        # Remove what lies before the window: from the first query that would see a key too many, 1 + 2 + 3 + ...
        late, early = (np.clip(shared + n - self.window, 0, None) for n in (queries, 0))
        pairs -= (late * (late + 1) - early * (early + 1)) // 2
        return pairs
