"""MeshShape: how the ranks of a run are arranged, as pure arithmetic; and the process groups made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ropewalk.errors import RopewalkError

DIMENSIONS = ("replicate", "shard", "ring", "sequence")
"""From the slowest to the fastest: neighbours in rank share the all-to-all of Ulysses, the busiest of all."""


def sharded_dimension(size: Sequence[int], ranks: int) -> int:
    """The dimension in which a parameter is cut over ranks.

    The first, padded where they do not divide it. A stack of matrices, one an expert, would be padded to many times its
    size where there are more ranks than experts: it is cut in the first of its other dimensions that the ranks divide.

    Example:
        >>> sharded_dimension((8, 28672, 4096), 16)
        1
    """
    if len(size) == 3 and size[0] % ranks:
        return next((dimension for dimension in (1, 2) if size[dimension] % ranks == 0), 0)
    return 0


@dataclass(frozen=True)
class Place:
    """Where one rank stands in each dimension of a mesh, from 0."""

    replicate: int
    shard: int
    ring: int
    sequence: int


@dataclass(frozen=True)
class MeshShape:
    """Degrees of parallelism; their product is the number of ranks.

    Ranks of one *sequence group* (``ring`` x ``sequence`` of them) hold parts of the same rows; ``data_degree`` groups
    hold different rows. Parameters are sharded over all ranks that are no replicas of each other.

    Attributes:
        replicate: copies of the sharded model, for data parallelism alone (hybrid sharding).
        shard: ranks that hold different rows and shards of the parameters.
        ring: parts of a row between which keys and values travel.
        sequence: parts of a row between which heads are exchanged (Ulysses).
    """

    replicate: int = 1
    shard: int = 1
    ring: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if getattr(self, name) < 1:
                raise RopewalkError(f"parallel.{name} must be 1 or more, got {getattr(self, name)}")

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.ring * self.sequence

    @property
    def data_degree(self) -> int:
        """Groups of ranks that hold different rows."""
        return self.replicate * self.shard

    @property
    def sequence_degree(self) -> int:
        """Ranks that a row is cut over."""
        return self.ring * self.sequence

    @property
    def shard_degree(self) -> int:
        """Ranks that the parameters are sharded over."""
        return self.shard * self.ring * self.sequence

    def place(self, rank: int) -> Place:
        """Where a rank stands.

        Raises:
            RopewalkError: if there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise RopewalkError(f"rank {rank} is not in a mesh of {self.world_size} ranks")
        rest, sequence = divmod(rank, self.sequence)
        rest, ring = divmod(rest, self.ring)
        replicate, shard = divmod(rest, self.shard)
        return Place(replicate, shard, ring, sequence)

    def neighbours(self, dimension: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group that a dimension connects: those that differ in nothing else."""
        groups: dict[Place, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(replace(self.place(rank), **{dimension: 0}), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def data_rank(self, rank: int) -> int:
        """Which of the ``data_degree`` groups a rank belongs to: ranks of one group read the same rows."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def __str__(self) -> str:
        """Such as ``2 replicate x 4 sequence``; ``1 rank`` where nothing is parallel."""
        parts = [f"{getattr(self, name)} {name}" for name in DIMENSIONS if getattr(self, name) > 1]
        return " x ".join(parts) or "1 rank"


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """This rank's part in the exchange of one row's tokens and heads.

    Attributes:
        ring_group, sequence_group: ``torch.distributed`` process groups of its neighbours in each dimension; None
            where the degree is 1. A rank's number in the group is its place in the dimension.
        ring, sequence: degrees.
        ring_rank, sequence_rank: this rank's places.
    """

    ring_group: Any = None
    sequence_group: Any = None
    ring: int = 1
    sequence: int = 1
    ring_rank: int = 0
    sequence_rank: int = 0


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh of live processes.

    Attributes:
        shape: the degrees.
        rank: this process.
        device_mesh: ``torch.distributed.DeviceMesh`` with the dimensions ``replicate`` and ``shard_all``, over which
            parameters are replicated and sharded.
        groups: for attention.
    """

    shape: MeshShape
    rank: int
    device_mesh: Any
    groups: SequenceGroups

    @property
    def data_rank(self) -> int:
        return self.shape.data_rank(self.rank)


def make_mesh(shape: MeshShape, device_type: str) -> Mesh:
    """Arrange all ranks of the default process group; every one of them must call this.

    Process groups are made once for each arrangement of neighbours and shared by later meshes: each holds connections
    and threads, and torch takes device meshes of one layout for the same, wherever it keeps them. They end with the
    default group.

    Args:
        shape: its world_size must be that of the default group.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        RopewalkError: if the numbers of ranks differ.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    if world != shape.world_size:
        raise RopewalkError(f"a mesh of {shape} needs {shape.world_size} ranks, there are {world}")
    rank = dist.get_rank()
    place = shape.place(rank)
    groups = SequenceGroups(
        ring_group=_neighbours(shape, "ring"),
        sequence_group=_neighbours(shape, "sequence"),
        ring=shape.ring,
        sequence=shape.sequence,
        ring_rank=place.ring,
        sequence_rank=place.sequence,
    )
    return Mesh(shape, rank, _parameter_mesh(shape, device_type), groups)


def forget_groups() -> None:
    """Let go of the groups of a default process group that has been destroyed, so that their threads end."""
    _made.cache_clear()


@lru_cache(maxsize=1)
def _made(world: Any) -> dict[Any, Any]:
    """What has been made of one default process group; another one has other ranks."""
    return {}


def _neighbours(shape: MeshShape, dimension: str) -> Any:
    """This rank's process group in a dimension; None where the degree is 1."""
    import torch.distributed as dist

    if getattr(shape, dimension) == 1:
        return None
    made, lists = _made(dist.group.WORLD), shape.neighbours(dimension)
    if (dimension, lists) not in made:
        # Every rank makes every group, its own and the others'.
        mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists])
        made[dimension, lists] = mine
    return made[dimension, lists]


def _parameter_mesh(shape: MeshShape, device_type: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    made, sizes = _made(dist.group.WORLD), (shape.replicate, shape.shard_degree)
    if (device_type, sizes) not in made:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard_all"))
        made[device_type, sizes] = mesh
    return made[device_type, sizes]
