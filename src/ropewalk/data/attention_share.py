"""The share of full attention's (query, key) pairs that each pattern computes, in closed form from lengths.

A pattern computes a pair if the query may see the key, itself included. Full attention on a row of ``n`` tokens
computes ``n * (n + 1) / 2`` pairs. The share of pairs equals the share of attention FLOPs, which grow with the square
of the length. Projections, feed-forward layers and the loss grow linearly and are the same under every pattern, so
``1 / share`` bounds the speedup of attention, not that of a training step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.attention.choices import PATTERNS, Pattern
from ropewalk.errors import RopewalkError


def visible_pairs(lengths: ArrayLike, pattern: Pattern, anchor_length: int = 0) -> int:
    """The (query, key) pairs that a pattern computes in one row.

    Args:
        lengths: int ``[documents]``, tokens of each document in the row; how its chunks are interleaved does
            not matter. The anchor is not counted.
        pattern: ``full``, ``intra_document`` or ``anchor``, as in PackedLayout.
        anchor_length: leading tokens before the first document.

    Returns:
        What ``PackedLayout.dense_mask().sum()`` counts, as an exact integer.
    """
    each = np.asarray(lengths, np.int64)
    tokens = int(each.sum())
    if pattern == "full":
        return triangle(anchor_length + tokens)
    within = triangle(anchor_length) + _sum_of_triangles(each)
    return within + anchor_length * tokens if pattern == "anchor" else within


def share_of_documents(lengths: ArrayLike, row_length: int) -> dict[str, float]:
    """Share of full attention by pattern, if the documents are concatenated and cut into rows.

    Under ``anchor``, index 0 of each row is the anchor, which leaves one token less to the documents. The last row
    counts only if it is full or the only one. No BOS or EOS is added.

    Args:
        lengths: int ``[documents]``, tokens of each document in order.
        row_length: tokens of a row, the anchor included; at least 2.

    Returns:
        A share from 0 to 1 by pattern; NaN if there are no tokens.

    Raises:
        RopewalkError: if ``row_length`` is less than 2.
    """
    if row_length < 2:
        raise RopewalkError(f"a row must have 2 tokens or more, got {row_length}")
    each = np.asarray(lengths, np.int64)
    shares: dict[str, float] = {"full": math.nan}
    for pattern, anchor_length in (("intra_document", 0), ("anchor", 1)):
        # The anchor takes its room from every row.
        pieces, rows = cut(each, row_length - anchor_length)
        tokens, triangles = int(pieces.sum()), _sum_of_triangles(pieces)
        # A single row may be shorter than the context; several rows are full ones.
        whole = triangle(anchor_length + tokens) if rows == 1 else rows * triangle(row_length)
        part = rows * triangle(anchor_length) + triangles + anchor_length * tokens
        shares[pattern] = ratio(part, whole)
        # 1, or NaN if there are no tokens.
        shares["full"] = ratio(whole, whole)
    return shares


def cut(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], int]:
    """Concatenate documents and cut them into rows of ``room`` tokens.

    Returns:
        int64, lengths of the pieces in complete rows, or in the only row; and the number of these rows.
    """
    total = int(lengths.sum())
    # Less than one full row counts as the only row.
    rows = max(total // room, min(total, 1))
    kept = min(total, rows * room)
    ends = np.cumsum(lengths)
    # The input is two ascending runs, which a stable (merge) sort combines in linear time.
    edges = np.sort(np.concatenate([np.arange(0, kept, room), ends[ends < kept]]), kind="stable")
    pieces = np.diff(edges, append=kept)
    # Empty documents, and documents that end with a row, leave pieces of length 0.
    return pieces[pieces > 0], rows


def share_of_rows(rows: Iterable[tuple[NDArray[np.int64], int]], anchor_length: int) -> dict[str, float]:
    """Share of full attention by pattern on existing packed rows.

    If the rows have no anchor, ``anchor`` uses their first token as one: it sees the same tokens as before, and all
    later documents see it too.

    Args:
        rows: for each row, the tokens of each document (int64; padding counts as a document, because attention is
            computed for it), and the index of the first document.
        anchor_length: leading tokens of each row before its first document.

    Returns:
        A share from 0 to 1 by pattern; NaN if there are no rows.
    """
    pairs: dict[str, int] = dict.fromkeys(PATTERNS, 0)
    for lengths, first in rows:
        for pattern in PATTERNS:
            pairs[pattern] += visible_pairs(lengths, pattern, anchor_length)
        if anchor_length == 0:
            pairs["anchor"] += int(lengths.sum() - lengths[first])
    return {pattern: ratio(each, pairs["full"]) for pattern, each in pairs.items()}


def skipped(shares: Mapping[str, float]) -> dict[str, float]:
    """The share of full attention's pairs that each pattern does not compute."""
    return {pattern: 1 - share for pattern, share in shares.items()}


def ideal_speedup(shares: Mapping[str, float]) -> dict[str, float]:
    """Speedup of attention alone if its time is proportional to the number of pairs; NaN if there are none."""
    return {pattern: 1 / share if share else math.nan for pattern, share in shares.items()}


def triangle(tokens: int) -> int:
    """Number of (query, key) pairs of full attention on this many tokens."""
    return tokens * (tokens + 1) // 2


def _sum_of_triangles(lengths: NDArray[np.int64]) -> int:
    """Sum exactly even beyond 64 bits, by adding the high and low halves separately."""
    each = lengths.astype(np.uint64)
    pairs = each * (each + np.uint64(1)) // np.uint64(2)
    high, low = pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)
    return (int(high.sum()) << 32) + int(low.sum())


def ratio(part: int, whole: int) -> float:
    """A share from 0 to 1; NaN of an empty whole."""
    return part / whole if whole else math.nan
