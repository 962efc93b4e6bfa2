"""Compute in closed form which blocks of the attention matrix a packed layout touches.

``create_block_mask`` evaluates the mask for all T² pairs. A packed row does not need that: the keys that a block
of queries touches are the anchor's blocks and those from the start of its first token's document to the block
itself. Finding them takes time and memory proportional to their number. The tables that a kernel reads
(:func:`padded_lists`) have an entry for every pair of blocks, touched or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.attention.spans import Ints, Spans

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TouchedBlocks:
    """Block coordinates of one row, sorted by query block, then key block.

    Attributes:
        partial: int64 ``[n, 2]``, (query block, key block) pairs in which some pairs of tokens are visible.
        full: int64 ``[m, 2]``, (query block, key block) pairs in which all pairs of tokens are visible.
        num_blocks: number of blocks along each side; the last one may be incomplete.
    """

    partial: Blocks
    full: Blocks
    num_blocks: int


def touched_blocks(layout: PackedLayout, block_size: int, locality: Locality = EVERYTHING) -> TouchedBlocks:
    """The touched blocks of a row whose documents are contiguous. Sort an interleaved row by document first.

    Args:
        layout: a layout whose tokens are taken in (document, order) order.
        block_size: tokens along each side of a block.
        locality: window or chunk of the layer.
    """
    # The first and last token of a query block suffice: within a span, a later query also sees newer keys and, under a
    # window, fewer old ones.
    total = layout.total_length
    spans = Spans.of(layout, locality)
    num_blocks = -(-total // block_size)
    first_token = np.arange(num_blocks, dtype=np.int64) * block_size
    last_token = np.minimum(first_token + block_size, total) - 1
    first_span, last_span = spans.span_of(first_token), spans.span_of(last_token)

    # Own keys of a query block: from the oldest key that its first token sees up to the block itself. A block below the
    # diagonal is full if the last token also sees all of it and the query block lies within one span.
    low = spans.first_seen(first_token)[1] // block_size
    own_query, own_key = _ranges(low, np.arange(1, num_blocks + 1))
    of_last = spans.first_seen(last_token)[1]
    one_span = (first_span == last_span)[own_query]
    own_full = one_span & (own_key * block_size >= of_last[own_query]) & (own_key < own_query)

    shared_query, shared_key, newest, shared_end = _shared_blocks(spans, first_token, last_token, block_size)
    # Blocks with both shared and own keys are already among the own ones; listing them twice would count them twice.
    before_own = shared_key < low[shared_query]

    queries = np.concatenate([shared_query[before_own], own_query])
    keys = np.concatenate([shared_key[before_own], own_key])
    full = np.concatenate([np.zeros(before_own.sum(), dtype=bool), own_full])
    # A block of shared keys only is full if every token of the query block sees the oldest of them.
    full |= (
        (keys * block_size >= newest[queries]) & ((keys + 1) * block_size <= shared_end) & (keys < queries)
    )
    # Shared keys come before own keys, and each list is sorted, so a stable sort by query block sorts the pairs.
    order = _stable_order(queries)
    pairs = np.stack([queries, keys], axis=1)[order]
    return TouchedBlocks(pairs[~full[order]], pairs[full[order]], num_blocks)


def _shared_blocks(
    spans: Spans, first_token: Ints, last_token: Ints, block_size: int
) -> tuple[Ints, Ints, Ints, int]:
    """The keys that several spans share, as the query blocks see them.

    Returns:
        Query and key block of each pair; for each query block the first key from which all its tokens see the shared
        keys, or the length of the row if some tokens see none; and the end of the shared keys.
    """
    first_span, last_span = spans.span_of(first_token), spans.span_of(last_token)
    sharing = spans.shared_end > spans.shared_start
    if not sharing.any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.full_like(first_token, spans.starts[-1]), 0
    # All spans with shared keys see the same ones from their first token. A query block sees those that its first
    # token sees and, if a span with shared keys begins inside the block, those that the span's first token sees.
    example = int(sharing.argmax())
    end = int(spans.shared_end[example])
    from_start = spans.first_seen(spans.starts[example : example + 1])[0][0]
    count = np.concatenate([np.zeros(1, np.int64), sharing.cumsum()])
    oldest = np.where(sharing[first_span], spans.first_seen(first_token)[0], end)
    oldest = np.where(count[last_span + 1] > count[first_span + 1], np.minimum(oldest, from_start), oldest)
    pairs = _ranges(oldest // block_size, np.where(oldest < end, -(-end // block_size), 0))
    # The first span has the shared keys as its own. No token of a block is further from the start of its span than
    # `furthest`, and no run has more keys in front, so from here on the window has not excluded any shared key.
    count = np.concatenate([np.zeros(1, np.int64), (sharing | (spans.starts[:-1] == 0)).cumsum()])
    all_share = count[last_span + 1] - count[first_span] == last_span - first_span + 1
    newest = np.full_like(oldest, spans.shared_start[example])
    if spans.window is not None:
        furthest = last_token - spans.starts[first_span]
        newest = np.maximum(newest, end + furthest - spans.window + 1)
    return *pairs, np.where(all_share, newest, spans.starts[-1]), end


def _ranges(low: Blocks, high: Blocks) -> tuple[Blocks, Blocks]:
    """The pairs (i, low[i]), …, (i, high[i] - 1) for each i, as two flat arrays."""
    counts = np.maximum(high - low, 0)
    rows = np.repeat(np.arange(len(low), dtype=np.int64), counts)
    inside = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, np.repeat(low, counts) + inside


def padded_lists(
    pairs: list[Blocks], num_blocks: int, by: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Lists of blocks in the rectangular form that kernels read.

    Args:
        pairs: one ``[n, 2]`` array of (query block, key block) a batch row, sorted by query block, then key block.
        num_blocks: number of lists a batch row, and the width of each.
        by: 0 to list the key blocks of each query block, 1 for the query blocks of each key block.

    Returns:
        int32 counts ``[batch, 1, num_blocks]`` and int32 indices ``[batch, 1, num_blocks, num_blocks]``.
    """
    counts = np.zeros((len(pairs), 1, num_blocks), dtype=np.int32)
    indices = np.zeros((len(pairs), 1, num_blocks, num_blocks), dtype=np.int32)
    for row, blocks in enumerate(pairs):
        ordered = blocks if by == 0 else blocks[_stable_order(blocks[:, 1])]
        count = np.bincount(ordered[:, by], minlength=num_blocks)
        place = np.arange(len(ordered)) - np.repeat(np.cumsum(count) - count, count)
        counts[row, 0] = count
        indices[row, 0, ordered[:, by], place] = ordered[:, 1 - by]
    return counts, indices


def _stable_order(blocks: Blocks) -> npt.NDArray[np.intp]:
    """Stable argsort of block numbers; numpy radix-sorts 16-bit integers, which is ten times faster."""
    small = len(blocks) == 0 or blocks.max() < 2**16
    return np.argsort(blocks.astype(np.uint16) if small else blocks, kind="stable")
