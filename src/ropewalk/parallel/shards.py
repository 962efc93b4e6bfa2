"""RowShards: which tokens of a packed row each rank of a sequence group holds. Pure index arithmetic.

Labels are shifted, and cut at document ends, on the whole row; positions are laid on the whole row. So a shard of
anything that has a value for each token is a selection by index, and padding is a place without a token.
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
"""Index of a padding place in a shard."""


@dataclass(frozen=True, eq=False)
class RowShards:
    """One row, cut over ``ring`` parts, and each of those over ``sequence`` equal ones.

    Attributes:
        order: int64 ``[total_length]``, storage indices in the order that the row is cut in: storage order itself
            where ``ring`` is 1, else (document, order), so that a document's pieces are contiguous.
        chunks: for each ring rank its pieces as (start, end) in ``order``, ascending, none empty; together they
            cover the row once.
        sequence: equal parts that each ring rank's places are cut into.
        ring_length: places of one ring rank, padding included, a multiple of ``sequence``; 0 takes the least that
            holds the longest part.

    Raises:
        RopewalkError: if the chunks do not cover the row once, or the places do not suffice.
    """

    order: Tensor
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    sequence: int = 1
    ring_length: int = 0

    def __post_init__(self) -> None:
        longest = max(sum(end - start for start, end in chunks) for chunks in self.chunks)
        if self.ring_length == 0:
            object.__setattr__(self, "ring_length", -(-longest // self.sequence) * self.sequence)
        if self.ring_length < longest or self.ring_length % self.sequence:
            raise RopewalkError(
                f"ring_length {self.ring_length} must hold {longest} tokens and be a multiple of {self.sequence}"
            )
        covered = sorted(chunk for chunks in self.chunks for chunk in chunks)
        ends = [0, *(end for _, end in covered)]
        if [start for start, _ in covered] != ends[:-1] or ends[-1] != self.total_length:
            raise RopewalkError(f"chunks {self.chunks} do not cover a row of {self.total_length} tokens once")

    @property
    def ring(self) -> int:
        return len(self.chunks)

    @property
    def total_length(self) -> int:
        """Tokens of the row."""
        return self.order.numel()

    @property
    def shard_length(self) -> int:
        """Places of one rank, padding included."""
        return self.ring_length // self.sequence

    @property
    def padding(self) -> int:
        """Places of all ranks that hold no token."""
        return self.ring * self.ring_length - self.total_length

    @cached_property
    def tokens(self) -> Tensor:
        """int64 ``[ring, ring_length]``: the storage index in each place, :data:`NO_TOKEN` for padding, at the end."""
        tokens = torch.full((self.ring, self.ring_length), NO_TOKEN)
        for held, chunks in zip(tokens, self.chunks, strict=True):
            found = torch.cat([self.order[start:end] for start, end in chunks] or [self.order[:0]])
            held[: found.numel()] = found
        return tokens

    def of(self, ring_rank: int, sequence_rank: int) -> Tensor:
        """int64 ``[shard_length]``: the storage indices that one rank holds."""
        start = sequence_rank * self.shard_length
        return self.tokens[ring_rank, start : start + self.shard_length]

    def take(self, values: Tensor, ring_rank: int, sequence_rank: int, padding: int | float) -> Tensor:
        """One rank's ``[..., shard_length]`` of ``[..., total_length]``, ``padding`` where there is no token."""
        index = self.of(ring_rank, sequence_rank).to(values.device)
        return values[..., index.clamp_min(0)].masked_fill(index == NO_TOKEN, padding)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """``[..., total_length]`` from every rank's ``[..., shard_length]``, ring rank by ring rank: take's inverse."""
        held = torch.cat(list(shards), dim=-1)
        # On the CPU, where tokens lie: a device would be asked how many places hold one.
        index = self.tokens.flatten()
        places = (index != NO_TOKEN).nonzero().flatten()
        row = held.new_empty(*held.shape[:-1], self.total_length)
        row[..., index[places].to(held.device)] = held[..., places.to(held.device)]
        return row


def row_shards(layout: PackedLayout, ring: int, sequence: int, balance: Balance = "auto") -> RowShards:
    """Cut a row over the ranks of a sequence group.

    Args:
        layout: the row's.
        ring, sequence: degrees.
        balance: how the row is cut over the ring. ``contiguous``: one piece a rank. ``zigzag``: pieces i and 2·ring -
            1 - i of 2·ring equal ones, which balances one long document. ``cost``: equal pieces, given out so that
            the visible pairs of query and key are balanced for these documents. ``auto``: the cut whose busiest rank
            has the least work, in that order where they differ by no more than 1 %. Has no meaning where ``ring`` is 1.

    Raises:
        RopewalkError: for an unknown balance, or a row shorter than the ring.
    """
    if balance not in BALANCES:
        raise RopewalkError(f"unknown balance {balance!r}; choose one of {', '.join(BALANCES)}")
    length = layout.total_length
    if ring == 1:
        return RowShards(torch.arange(length), (((0, length),),), sequence)
    from ropewalk.parallel.ring.balance import ring_chunks

    return RowShards(layout.storage_in_order, ring_chunks(layout, ring, balance), sequence)


@dataclass(frozen=True, eq=False)
class ShardedLayouts:
    """A batch of rows of one length of which this rank holds a shard each; ``model(..., layout=this)`` takes it.

    Attributes:
        layouts: of the whole rows.
        rows: how each is cut, all into shards of one length.
        groups: this rank's.
    """

    layouts: tuple[PackedLayout, ...]
    rows: tuple[RowShards, ...]
    groups: SequenceGroups

    @classmethod
    def of(
        cls, layouts: Sequence[PackedLayout], groups: SequenceGroups, balance: Balance = "auto"
    ) -> ShardedLayouts:
        """Cut rows over a sequence group; rows of a batch that would have shards of other lengths are padded."""
        rows = [row_shards(layout, groups.ring, groups.sequence, balance) for layout in layouts]
        longest = max(row.ring_length for row in rows)
        return cls(tuple(layouts), tuple(replace(row, ring_length=longest) for row in rows), groups)

    @property
    def shard_length(self) -> int:
        """Places of one rank, padding included; the same for all rows."""
        return self.rows[0].shard_length

    @property
    def total_length(self) -> int:
        """Tokens of a whole row."""
        return self.layouts[0].total_length

    def take(self, values: Sequence[Tensor], padding: int | float) -> Tensor:
        """This rank's ``[batch, shard_length]`` of one ``[total_length]`` a row."""
        ring, sequence = self.groups.ring_rank, self.groups.sequence_rank
        return torch.stack(
            [row.take(each, ring, sequence, padding) for row, each in zip(self.rows, values, strict=True)]
        )

    def position_ids(self) -> Tensor:
        """int64 ``[batch, shard_length]``: the rows' own positions, 0 in padding."""
        return self.take([layout.position_ids for layout in self.layouts], 0)
