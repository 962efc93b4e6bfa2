"""What a ring's exchanges bring: heads and bytes of rows that are there, and keys at most before any row is packed."""

from __future__ import annotations

from functools import lru_cache

import torch

from ropewalk.attention.layout import PackedLayout
from ropewalk.parallel.ring.balance import Chunks, ring_chunks
from ropewalk.parallel.ring.plan import RingPlan

EXCHANGED_BYTES = 2**30
"""Keys and values of whole rows that one exchange may bring, of as many heads as fit, one at least.

It bounds what is held for a moment, gradients and copies; what the backward needs of all heads is held anyway."""


def heads_of_an_exchange(tokens: int, num_kv_heads: int, key_bytes: int) -> int:
    """Key/value heads whose keys and values one exchange brings: the same number on every rank.

    Args:
        tokens: of all whole rows.
        num_kv_heads: of one rank.
        key_bytes: of a key and its value.
    """
    return min(num_kv_heads, max(1, EXCHANGED_BYTES // (tokens * key_bytes)))


def ring_bytes(
    plan: RingPlan, num_kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes that a rank sends to others in a forward and in a backward of ``ring_attend``.

    Keys and values travel in the forward; in the backward the gradients of received ones return to their owners, in
    the same dtype.

    Args:
        plan: the rank's.
        num_kv_heads, head_dim, value_dim: of the tensors that ring_attend gets (under Ulysses, a rank's share).
        dtype: theirs.
    """
    key = num_kv_heads * (head_dim + value_dim) * dtype.itemsize
    return plan.sent_to_others * key, plan.received_from_others * key


@lru_cache(maxsize=64)
def packed_ring_keys(row_length: int, document_length: int, ring: int) -> tuple[tuple[int, int], ...]:
    """Keys that each ring rank sends and receives at most, in a row of equal documents cut as ``auto`` does.

    Args:
        row_length: tokens of the row.
        document_length: tokens of each document, the last one takes the rest; they do not see each other.
        ring: ranks that the row is cut over.

    Returns:
        (sent, received) of each rank.

    Raises:
        RopewalkError: if the row has fewer tokens than the ring has ranks.
    """
    full, rest = divmod(row_length, document_length)
    lengths = [document_length] * full + [rest] * (rest > 0)
    layout = PackedLayout.from_lengths(lengths, "intra_document", anchor_length=0)
    return most_ring_keys(ring_chunks(layout, ring, "auto"), document_length)


def most_ring_keys(chunks: Chunks, longest: int) -> tuple[tuple[int, int], ...]:
    """Keys that each ring rank sends and receives at most, for any documents of up to ``longest`` tokens in a row.

    A piece's last document is the only one that goes on behind it. A rank whose next piece starts g places behind
    has a query of it only if the document has g + 1 tokens there, and so at most longest - g - 1 in the piece.

    Args:
        chunks: each rank's pieces, as of :class:`ropewalk.parallel.RowShards`.
        longest: tokens of a document, 1 or more.

    Returns:
        (sent, received) of each rank; exact for one document that is the whole row.
    """
    pieces = sorted((start, end, rank) for rank, held in enumerate(chunks) for start, end in held)
    sent, received = [0] * len(chunks), [0] * len(chunks)
    for index, (start, end, rank) in enumerate(pieces):
        reached = {rank}
        for first, _, other in pieces[index + 1 :]:
            left = longest - (first - end) - 1
            if left <= 0 or len(reached) == len(chunks):
                break
            if other not in reached:
                reached.add(other)
                sent[rank] += min(end - start, left)
                received[other] += min(end - start, left)
    return tuple(zip(sent, received, strict=True))
