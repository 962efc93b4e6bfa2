"""Size of a ring's exchanges: bytes for given rows, and upper bounds on keys before any row is packed."""

from __future__ import annotations

from functools import lru_cache

import torch

from ropewalk.attention.layout import PackedLayout
from ropewalk.parallel.ring.balance import Chunks, ring_chunks
from ropewalk.parallel.ring.plan import RingPlan

EXCHANGED_BYTES = 2**30
"""Upper bound in bytes on the keys and values of whole rows in one exchange; an exchange has at least one head.

The bound limits temporary buffers: gradients and copies. The tensors that the backward needs are held for all heads
regardless."""


def heads_of_an_exchange(tokens: int, num_kv_heads: int, key_bytes: int) -> int:
    """Number of key/value heads per exchange, the same on every rank.

    Args:
        tokens: tokens of all whole rows.
        num_kv_heads: key/value heads of one rank.
        key_bytes: bytes of one key and its value.
    """
    return min(num_kv_heads, max(1, EXCHANGED_BYTES // (tokens * key_bytes)))


def ring_bytes(
    plan: RingPlan, num_kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes that a rank sends to others in the forward and in the backward of ``ring_attend``.

    The forward sends keys and values. The backward returns the gradients of received ones to their owners, in the same
    dtype, and adds up those of anchors over the ranks, in float32 or wider.

    Args:
        plan: plan of the rank.
        num_kv_heads, head_dim, value_dim: sizes of the tensors passed to ring_attend (under Ulysses, with this rank's
            share of the heads).
        dtype: dtype of keys and values.

    Returns:
        (forward, backward), bytes.
    """
    numbers = num_kv_heads * (head_dim + value_dim)
    wide = torch.promote_types(dtype, torch.float32)
    anchors = 0 if plan.anchors is None else len(plan.anchors.received) * numbers * wide.itemsize
    ranks = len(plan.send_counts)
    # What is added up is sent twice, apart from a rank's own part.
    reduced = 2 * anchors * (ranks - 1) // ranks
    forward, backward = (
        keys * numbers * dtype.itemsize for keys in (plan.sent_to_others, plan.received_from_others)
    )
    return forward, backward + reduced


@lru_cache(maxsize=64)
def packed_ring_keys(row_length: int, document_length: int, ring: int) -> tuple[tuple[int, int], ...]:
    """Largest number of keys that each ring rank sends and receives, for a row of equal documents and balance ``auto``.

    Args:
        row_length: tokens of the row.
        document_length: tokens of each document, which see only their own document; the last one takes the rest.
        ring: number of ranks.

    Returns:
        (sent, received) keys of each rank.

    Raises:
        RopewalkError: if the row has fewer tokens than the ring has ranks.
    """
    full, rest = divmod(row_length, document_length)
    lengths = [document_length] * full + [rest] * (rest > 0)
    layout = PackedLayout.from_lengths(lengths, "intra_document", anchor_length=0)
    return most_ring_keys(ring_chunks(layout, ring, "auto"), document_length)


def most_ring_keys(chunks: Chunks, longest: int) -> tuple[tuple[int, int], ...]:
    """Largest number of keys that each ring rank sends and receives, for any documents of up to ``longest`` tokens.

    Only the last document of a piece continues after it. A rank whose next piece starts g tokens later has a query of
    that document only if the document has at least g + 1 tokens after the piece, and so at most longest - g - 1 in it.

    Args:
        chunks: pieces of each rank, as in :class:`ropewalk.parallel.RowShards`.
        longest: tokens of the longest document, 1 or more.

    Returns:
        (sent, received) keys of each rank; exact if one document fills the row.
    """
    pieces = sorted((start, end, rank) for rank, held in enumerate(chunks) for start, end in held)
    sent, received = [0] * len(chunks), [0] * len(chunks)
    for index, (start, end, rank) in enumerate(pieces):
        reached = {rank}
        for first, _, other in pieces[index + 1 :]:
            # A query sees a key at most longest - 1 tokens back, whatever lies between them.
            left = longest - (first - end) - 1
            if left <= 0 or len(reached) == len(chunks):
                break
            if other not in reached:
                reached.add(other)
                sent[rank] += min(end - start, left)
                received[other] += min(end - start, left)
    return tuple(zip(sent, received, strict=True))
