"""Which blocks of the attention matrix a packed layout touches, in closed form.

``create_block_mask`` evaluates the mask for all T² pairs. A packed row does not need that: for each block of
queries the keys it touches run from the start of its first token's document to itself, plus the anchor's
blocks. Finding them takes time and memory proportional to their number; the tables that a kernel reads
(:func:`padded_lists`) have an entry for every pair of blocks, touched or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropewalk.attention.layout import PackedLayout

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TouchedBlocks:
    """Block coordinates of one row, sorted by query block, then key block.

    Attributes:
        partial: int64 ``[n, 2]``, (query block, key block) pairs in which some pairs of tokens are visible.
        full: int64 ``[m, 2]``, pairs in which all are.
        num_blocks: blocks along each side, the last one possibly incomplete.
    """

    partial: Blocks
    full: Blocks
    num_blocks: int


def touched_blocks(layout: PackedLayout, block_size: int) -> TouchedBlocks:
    """The blocks of a row whose documents are contiguous (sort an interleaved one by document first).

    Args:
        layout: a layout whose tokens are taken in (document, order) order.
        block_size: tokens along each side of a block.
    """
    total, anchor = layout.total_length, layout.anchor_length
    num_blocks = -(-total // block_size)
    query = np.arange(num_blocks, dtype=np.int64)
    first_token = query * block_size
    last_token = np.minimum(first_token + block_size, total) - 1
    if layout.pattern == "full":
        document_starts = np.zeros(1, dtype=np.int64)
    else:
        lengths = layout.document_lengths.numpy()
        document_starts = anchor + np.cumsum(lengths) - lengths
        if layout.pattern == "anchor":
            # The first document sees the anchor in front of it as its own beginning.
            document_starts[0] = 0
        elif anchor:
            document_starts = np.concatenate([[0], document_starts])
    first_document = np.searchsorted(document_starts, first_token, side="right") - 1
    last_document = np.searchsorted(document_starts, last_token, side="right") - 1
    start = document_starts[first_document]
    low = start // block_size

    # Keys of the query block's own document(s): from `low` to the block itself. A block below the diagonal is
    # full where it starts inside the one document that the whole query block belongs to.
    own_query, own_key = _ranges(low, query + 1)
    one_document = (first_document == last_document)[own_query]
    own_full = one_document & (own_key * block_size >= start[own_query]) & (own_key < own_query)

    # Keys of the anchor, where they lie in blocks before `low`. A block that holds nothing else is full.
    shared = anchor if layout.pattern == "anchor" else 0
    anchor_query, anchor_key = _ranges(np.zeros_like(low), np.minimum(low, -(-shared // block_size)))

    queries = np.concatenate([anchor_query, own_query])
    keys = np.concatenate([anchor_key, own_key])
    full = np.concatenate([np.zeros(len(anchor_key), dtype=bool), own_full])
    full |= ((keys + 1) * block_size <= shared) & (keys < queries)
    # The anchor's keys of a query block stand before its own, and both in order.
    order = _stable_order(queries)
    pairs = np.stack([queries, keys], axis=1)[order]
    return TouchedBlocks(pairs[~full[order]], pairs[full[order]], num_blocks)


def _ranges(low: Blocks, high: Blocks) -> tuple[Blocks, Blocks]:
    """For each i the pairs (i, low[i]), …, (i, high[i] - 1), as two flat arrays."""
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
    """Stable argsort of block numbers; numpy sorts 16-bit ones by radix, ten times as fast."""
    small = len(blocks) == 0 or blocks.max() < 2**16
    return np.argsort(blocks.astype(np.uint16) if small else blocks, kind="stable")
