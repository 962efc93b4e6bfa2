"""The most keys that travel around a ring for documents of a length, known before any row is packed."""

from __future__ import annotations

from functools import lru_cache

from ropewalk.attention.layout import PackedLayout
from ropewalk.parallel.balance import Chunks, ring_chunks


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
