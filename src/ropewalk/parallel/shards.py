"""Shard: the part of a row's tokens that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ropewalk.errors import RopewalkError


@dataclass(frozen=True)
class Shard:
    """A contiguous slice of every row. The default holds the whole row.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: number of slices.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise RopewalkError(f"rank {self.rank} is not in a world of {self.world_size}")

    def take(self, tokens: Tensor) -> Tensor:
        """``[..., length]`` to this rank's ``[..., length / world_size]``.

        Labels are shifted and position ids laid on the whole row before this, so both are plain slices.

        Raises:
            RopewalkError: if the length is not divisible.
        """
        length = tokens.shape[-1]
        if length % self.world_size:
            raise RopewalkError(f"a row of {length} tokens cannot be cut into {self.world_size} equal shards")
        size = length // self.world_size
        return tokens[..., self.rank * size : (self.rank + 1) * size]
