"""Plan the rows: assign pieces of documents to rows, from document lengths alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data.settings import Packing, Remainder


_CHUNK = 1 << 16
"""Documents per batch in sequential packing; bounds the temporary arrays."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Contiguous pieces of documents, as arrays with one entry per piece.

    Attributes:
        items: int64 ``[pieces]``, index of the document in the lengths given to :func:`plan_rows`.
        starts: int64 ``[pieces]``, first token of the piece within its document.
        lengths: int64 ``[pieces]``, tokens, all at least 1.
    """

    items: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)

    def select(self, index: slice | NDArray[np.int64]) -> Pieces:
        """The pieces at an index, in its order."""
        return Pieces(self.items[index], self.starts[index], self.lengths[index])


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Assignment of pieces of documents to rows; every token belongs to exactly one piece.

    Attributes:
        row_starts: int64 ``[rows + 1]``; row r consists of the pieces ``row_starts[r] <= i < row_starts[r + 1]``.
        pieces: pieces of all rows, row by row.
        padding: int64 ``[rows]``, number of free tokens at the end of each row.
        remainder: pieces of the incomplete row that is left out; empty if there is none.
        cut: number of documents in more than one row, where the remainder counts as a row.
    """

    row_starts: NDArray[np.int64]
    pieces: Pieces
    padding: NDArray[np.int64]
    remainder: Pieces
    cut: int

    @property
    def num_rows(self) -> int:
        return len(self.padding)

    def row(self, number: int) -> Pieces:
        """The pieces of one row, in order.

        Raises:
            RopewalkError: if there is no such row.
        """
        if not 0 <= number < self.num_rows:
            raise RopewalkError(
                f"the plan has {self.num_rows} rows, numbered from 0; there is no row {number}"
            )
        return self.pieces.select(slice(int(self.row_starts[number]), int(self.row_starts[number + 1])))


def plan_rows(
    lengths: NDArray[np.int64],
    room: int,
    packing: Packing,
    remainder: Remainder,
) -> RowPlan:
    """Assign documents to rows.

    ``sequential`` concatenates the documents and cuts at the end of each row, so only the last row can be incomplete.
    ``best_fit`` cuts only documents that are longer than a row, into full rows and a tail. Tails and other documents
    stay whole. They are placed from longest to shortest (ties: lowest item first), each into the row with the least
    free room that still fits it (ties: the row that reached this room first), or into a new row. Pieces within a row
    are sorted by (item, start), and rows by their first piece.

    Args:
        lengths: int64 ``[documents]``, tokens of each document with its special tokens; a document of length 0 gets
            no piece.
        room: tokens of a row available to documents, at least 1.
        packing: ``sequential`` or ``best_fit``.
        remainder: ``drop`` leaves out the emptiest row (ties: the last one) unless it is full; ``pad`` keeps all rows.

    Raises:
        RopewalkError: if an argument is out of range.

    Source: best-fit-decreasing for documents is arXiv:2404.10830, "Fewer Truncations Improve Language Modeling".
    """
    lengths = _checked(lengths, room)
    if remainder not in ("drop", "pad"):
        raise RopewalkError(f"unknown remainder {remainder!r}; choose one of drop, pad")
    if packing == "sequential":
        pieces, row_starts = _sequential(lengths, room)
    elif packing == "best_fit":
        pieces, rows = _best_fit(lengths, room)
        # The rows ascend, so their first pieces can be found by bisection.
        row_starts = np.searchsorted(rows, np.arange(int(rows[-1]) + 2 if len(rows) else 1)).astype(np.int64)
    else:
        raise RopewalkError(f"unknown packing {packing!r}; choose one of sequential, best_fit")
    num_rows = len(row_starts) - 1
    used = np.add.reduceat(pieces.lengths, row_starts[:-1]) if num_rows else np.zeros(0, np.int64)
    padding = room - used
    # A row never has two pieces of one document, so any piece with a start above 0 marks a cut document.
    cut = _distinct_items(pieces)
    plan = RowPlan(row_starts, pieces, padding, pieces.select(slice(0)), cut)
    if remainder == "pad" or not padding.any():
        return plan
    # The emptiest row is the incomplete one; of several, the last, as in sequential packing.
    return _without_row(plan, num_rows - 1 - int(np.argmax(padding[::-1])))


def _distinct_items(pieces: Pieces) -> int:
    """Number of documents with a piece that is not their first."""
    return len(np.unique(pieces.items[pieces.starts > 0]))


def _without_row(plan: RowPlan, number: int) -> RowPlan:
    first, stop = int(plan.row_starts[number]), int(plan.row_starts[number + 1])
    if number == plan.num_rows - 1:
        # Nothing behind it moves, so views are enough, which take no memory.
        kept_pieces = plan.pieces.select(slice(first))
        return RowPlan(plan.row_starts[:-1], kept_pieces, plan.padding[:-1], plan.row(number), plan.cut)
    row_starts = np.delete(plan.row_starts, number)
    row_starts[number:] -= stop - first
    kept = np.delete(np.arange(len(plan.pieces)), slice(first, stop))
    padding = np.delete(plan.padding, number)
    return RowPlan(row_starts, plan.pieces.select(kept), padding, plan.row(number), plan.cut)


def _checked(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    if room < 1:
        raise RopewalkError(f"a row must have room for 1 token or more, got {room}")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise RopewalkError(
            f"lengths must be a 1-dimensional array of integers, got {lengths.dtype} of shape {lengths.shape}"
        )
    lengths = lengths.astype(np.int64, copy=False)
    if len(lengths) and lengths.min() < 0:
        raise RopewalkError(
            f"document lengths must be 0 or more, got {lengths.min()} at index {lengths.argmin()}"
        )
    return lengths


def _sequential(lengths: NDArray[np.int64], room: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Pieces in order, and the first piece of each row. Works in batches, so temporary arrays stay small."""
    total = int(lengths.sum())
    # Upper bound: each document gives one piece, plus one for each end of a row inside a document.
    most = int(np.count_nonzero(lengths)) + total // room
    items, starts, sizes = (np.empty(most, np.int64) for _ in range(3))
    row_starts = np.empty(-(-total // room) + 1, np.int64)
    filled = position = 0
    for first in range(0, len(lengths), _CHUNK):
        chunk = lengths[first : first + _CHUNK]
        pieces, of_rows = _stretch(chunk, room, position)
        here = slice(filled, filled + len(pieces))
        items[here], starts[here], sizes[here] = pieces.items + first, pieces.starts, pieces.lengths
        # Every row begins with the piece that has its first token.
        begun = np.arange(-(-position // room), -(-(position + int(chunk.sum())) // room))
        row_starts[begun] = filled + np.searchsorted(of_rows, begun)
        filled += len(pieces)
        position += int(chunk.sum())
    row_starts[-1] = filled
    return Pieces(items[:filled], starts[:filled], sizes[:filled]), row_starts


def _stretch(lengths: NDArray[np.int64], room: int, position: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Pieces and rows of a batch of documents whose first token is token ``position`` of all documents."""
    items = np.flatnonzero(lengths)
    ends = position + np.cumsum(lengths)[items]
    begins = ends - lengths[items]
    first_row = begins // room
    # A document has a piece in every row from that of its first token to that of its last.
    document, nth = _expand((ends - 1) // room - first_row + 1)
    rows = first_row[document] + nth
    piece_begins = np.maximum(begins[document], rows * room)
    piece_ends = np.minimum(ends[document], (rows + 1) * room)
    pieces = Pieces(items[document], piece_begins - begins[document], piece_ends - piece_begins)
    return pieces, rows


def _best_fit(lengths: NDArray[np.int64], room: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Pieces in order, and the row of each."""
    items = np.flatnonzero(lengths)
    full, tails = np.divmod(lengths[items], room)
    document, nth = _expand(full + (tails > 0))
    is_tail = nth == full[document]
    pieces = Pieces(items[document], nth * room, np.where(is_tail, tails[document], room))
    rows = np.empty(len(document), np.int64)
    num_full = int(full.sum())
    # Full pieces need no search: each fills a row of its own. Only tails compete for room.
    rows[~is_tail] = np.arange(num_full)
    rows[is_tail] = num_full + _place(pieces.lengths[is_tail], room)
    # Pieces are in order of (item, start) here, so a row's number is the rank of its first appearance.
    first_piece = np.unique(rows, return_index=True)[1]
    rank = np.empty(len(first_piece), np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    rows = rank[rows]
    by_row = np.argsort(rows, kind="stable")
    return pieces.select(by_row), rows[by_row]


def _place(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Best-fit-decreasing bin packing: the row of each size; rows are numbered in the order in which they are opened.

    Equal sizes are placed together: a row that is the best fit for one remains the best fit for the next, because
    placing it only reduces the row's room, until no more fit. The number of searches therefore grows with the
    number of distinct sizes and of rows, not with the number of documents.
    """
    distinct, counts = np.unique(sizes, return_counts=True)
    open_rows = _OpenRows(room)
    takers: list[int] = []
    taken: list[int] = []
    opened = 0
    # Best-fit decreasing: all tails of one length are placed together, so the work grows with distinct lengths.
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            free = open_rows.least_room(size)
            if free is None:
                free, row = room, opened
                opened += 1
            else:
                row = open_rows.take(free)
            copies = min(count, free // size)
            takers.append(row)
            taken.append(copies)
            open_rows.put(row, free - copies * size)
            count -= copies
    rows = np.empty(len(sizes), np.int64)
    # Stable, so that of equal sizes the lowest item comes first.
    rows[np.argsort(-sizes, kind="stable")] = np.repeat(np.array(takers, np.int64), np.array(taken, np.int64))
    return rows


class _OpenRows:
    """Rows with free room: a first-in, first-out queue for each amount of room, and a set of the amounts in use.

    The set is a two-level bit set, so finding the next amount takes a few operations on integers of about √room bits.
    """

    def __init__(self, room: int) -> None:
        self._width = isqrt(room) + 1
        self._blocks = [0] * (room // self._width + 1)
        self._filled = 0
        self._rows: dict[int, deque[int]] = {}

    def put(self, row: int, free: int) -> None:
        # A full row is never searched for.
        if free == 0:
            return
        queue = self._rows.setdefault(free, deque())
        queue.append(row)
        if len(queue) == 1:
            block, bit = divmod(free, self._width)
            self._blocks[block] |= 1 << bit
            self._filled |= 1 << block

    def take(self, free: int) -> int:
        """Remove and return the row that has had this much room for longest."""
        queue = self._rows[free]
        row = queue.popleft()
        if not queue:
            block, bit = divmod(free, self._width)
            self._blocks[block] ^= 1 << bit
            if not self._blocks[block]:
                self._filled ^= 1 << block
        return row

    def least_room(self, size: int) -> int | None:
        """The smallest room of at least ``size`` among open rows; None if there is none."""
        block, bit = divmod(size, self._width)
        rest = self._blocks[block] >> bit
        if rest:
            return size + _lowest_bit(rest)
        # No row in the block of this size: any row in a later block fits, and the first one is the tightest.
        blocks = self._filled >> (block + 1)
        if not blocks:
            return None
        block += 1 + _lowest_bit(blocks)
        return block * self._width + _lowest_bit(self._blocks[block])


def _lowest_bit(number: int) -> int:
    # In two's complement, number & -number leaves the lowest bit alone.
    return (number & -number).bit_length() - 1


def _expand(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of ``counts`` pieces of each document: the document, and the piece's index within it, from 0."""
    document = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return document, np.arange(len(document)) - first[document]
