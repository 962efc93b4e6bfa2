"""RowShards: which tokens of a packed row each rank of a sequence group holds. Pure index arithmetic.

Labels are shifted and masked at document ends on the whole row, and positions are computed on the whole row. A shard of
any per-token value is therefore a selection by index, with a fill value for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.parallel.mesh import SequenceGroups

Balance = Literal["auto", "contiguous", "zigzag", "cost"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
NO_TOKEN = -1
"""Index that marks padding in a shard."""


@dataclass(frozen=True, eq=False)
class RowShards:
    """One row, cut into ``ring`` parts, each of which is cut into ``sequence`` equal parts.

    Attributes:
        order: int64 ``[total_length]``, storage indices in the order in which the row is cut: storage order if ``ring``
            is 1, otherwise (document, order), which keeps the pieces of a document contiguous.
        chunks: for each ring rank, its non-empty pieces as ascending (start, end) in ``order``; together they cover
            the row exactly once.
        sequence: number of equal parts that each ring rank's tokens are cut into.
        ring_length: tokens of one ring rank including padding, a multiple of ``sequence``; 0 means the smallest length
            that fits the longest part.

    Raises:
        RopewalkError: if the chunks do not cover the row exactly once, or if ring_length is too small.
    """

    order: Tensor
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    sequence: int = 1
    ring_length: int = 0

    def __post_init__(self) -> None:
        longest = max(sum(end - start for start, end in chunks) for chunks in self.chunks)
        if self.ring_length == 0:
            # The dataclass is frozen.
            object.__setattr__(self, "ring_length", -(-longest // self.sequence) * self.sequence)
        if self.ring_length < longest or self.ring_length % self.sequence:
            raise RopewalkError(
                f"ring_length must be a multiple of sequence {self.sequence} and at least {longest}, the largest "
                f"number of tokens of a ring rank, got {self.ring_length}"
            )
        covered = sorted(chunk for chunks in self.chunks for chunk in chunks)
        # Sorted pieces cover the row exactly once if each starts where the previous one ends.
        ends = [0, *(end for _, end in covered)]
        if [start for start, _ in covered] != ends[:-1] or ends[-1] != self.total_length:
            raise RopewalkError(
                f"chunks must cover each of the row's {self.total_length} tokens exactly once, got {self.chunks}"
            )

    @property
    def ring(self) -> int:
        return len(self.chunks)

    @property
    def total_length(self) -> int:
        """Number of tokens in the row, without padding."""
        return self.order.numel()

    @property
    def shard_length(self) -> int:
        """Tokens per rank, including padding."""
        return self.ring_length // self.sequence

    @property
    def padding(self) -> int:
        """Padding tokens of all ranks together."""
        return self.ring * self.ring_length - self.total_length

    @cached_property
    def tokens(self) -> Tensor:
        """int64 ``[ring, ring_length]``: storage indices of each ring rank, then :data:`NO_TOKEN` for padding."""
        tokens = torch.full((self.ring, self.ring_length), NO_TOKEN)
        for held, chunks in zip(tokens, self.chunks, strict=True):
            found = torch.cat([self.order[start:end] for start, end in chunks] or [self.order[:0]])
            held[: found.numel()] = found
        return tokens

    def of(self, ring_rank: int, sequence_rank: int) -> Tensor:
        """int64 ``[shard_length]``: storage indices of one rank's tokens."""
        start = sequence_rank * self.shard_length
        return self.tokens[ring_rank, start : start + self.shard_length]

    def take(self, values: Tensor, ring_rank: int, sequence_rank: int, padding: int | float) -> Tensor:
        """Select one rank's ``[..., shard_length]`` from ``[..., total_length]``, filling padding with ``padding``."""
        # Padding has a negative index, which would select from the end: clamp it for the gather and overwrite its
        # value.
        index = self.of(ring_rank, sequence_rank).to(values.device)
        return values[..., index.clamp_min(0)].masked_fill(index == NO_TOKEN, padding)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of take: ``[..., total_length]`` from all ranks' ``[..., shard_length]``, ring rank by ring rank."""
        held = torch.cat(list(shards), dim=-1)
        # Index arithmetic stays on the CPU: nonzero() on a CUDA tensor would synchronise with the device.
        index = self.tokens.flatten()
        places = (index != NO_TOKEN).nonzero().flatten()
        row = held.new_empty(*held.shape[:-1], self.total_length)
        row[..., index[places].to(held.device)] = held[..., places.to(held.device)]
        return row


def row_shards(layout: PackedLayout, ring: int, sequence: int, balance: Balance = "auto") -> RowShards:
    """Cut a row over the ranks of a sequence group.

    Args:
        layout: layout of the row.
        ring, sequence: degrees of context parallelism and of Ulysses.
        balance: how the row is cut over the ring; ignored if ``ring`` is 1. ``contiguous``: one piece per rank.
            ``zigzag``: rank i gets pieces i and 2·ring - 1 - i of 2·ring equal ones, which balances one long document.
            ``cost``: equal pieces, assigned so that the numbers of visible (query, key) pairs are balanced for these
            documents. ``auto``: the cut whose busiest rank has the least work; cuts within 1 % count as equal, and the
            first in the order above wins.

    Raises:
        RopewalkError: for an unknown balance, or a row shorter than the ring.
    """
    if balance not in BALANCES:
        raise RopewalkError(f"unknown balance {balance!r}; choose from {', '.join(BALANCES)}")
    length = layout.total_length
    if ring == 1:
        return RowShards(torch.arange(length), (((0, length),),), sequence)
    from ropewalk.parallel.ring.balance import ring_chunks

    return RowShards(layout.storage_in_order, ring_chunks(layout, ring, balance), sequence)


@dataclass(frozen=True, eq=False)
class ShardedLayouts:
    """A batch of rows of one length, sharded over a sequence group; pass it to a model as ``model(..., layout=this)``.

    Attributes:
        layouts: layouts of the whole rows.
        rows: shards of each row, all of one length.
        groups: process groups and coordinates of this rank.
    """

    layouts: tuple[PackedLayout, ...]
    rows: tuple[RowShards, ...]
    groups: SequenceGroups

    @classmethod
    def of(
        cls, layouts: Sequence[PackedLayout], groups: SequenceGroups, balance: Balance = "auto"
    ) -> ShardedLayouts:
        """Cut rows over a sequence group, and pad all shards of the batch to one length."""
        rows = [row_shards(layout, groups.ring, groups.sequence, balance) for layout in layouts]
        # Collectives need tensors of equal shape on all ranks, and rows of a batch are stacked.
        longest = max(row.ring_length for row in rows)
        return cls(tuple(layouts), tuple(replace(row, ring_length=longest) for row in rows), groups)

    @property
    def shard_length(self) -> int:
        """Tokens per rank, including padding; the same for all rows."""
        return self.rows[0].shard_length

    @property
    def total_length(self) -> int:
        """Number of tokens in a whole row."""
        return self.layouts[0].total_length

    def take(self, values: Sequence[Tensor], padding: int | float) -> Tensor:
        """This rank's ``[batch, shard_length]``, from one ``[total_length]`` tensor per row."""
        ring, sequence = self.groups.ring_rank, self.groups.sequence_rank
        return torch.stack(
            [row.take(each, ring, sequence, padding) for row, each in zip(self.rows, values, strict=True)]
        )

    def position_ids(self) -> Tensor:
        """int64 ``[batch, shard_length]``: position of each token in its row's layout, 0 in padding."""
        return self.take([layout.position_ids for layout in self.layouts], 0)
