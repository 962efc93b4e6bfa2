"""MeshShape: degrees of parallelism and rank arithmetic; Mesh: the process groups built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ropewalk.errors import RopewalkError

DIMENSIONS = ("replicate", "shard", "ring", "sequence")
"""Slowest-varying first. Adjacent ranks form a Ulysses group, so that the group spans as few nodes as possible."""


def sharded_dimension(size: Sequence[int], ranks: int) -> int:
    """Dimension along which a parameter is sharded.

    This is dimension 0, padded if the number of ranks does not divide it. A stack of expert matrices would be padded to
    many times its size if there are more ranks than experts, so it is sharded along the first other dimension that the
    number of ranks divides.

    Example:
        >>> sharded_dimension((8, 28672, 4096), 16)
        1
    """
    if len(size) == 3 and size[0] % ranks:
        return next((dimension for dimension in (1, 2) if size[dimension] % ranks == 0), 0)
    return 0


@dataclass(frozen=True)
class Place:
    """Zero-based coordinates of a rank in a mesh."""

    replicate: int
    shard: int
    ring: int
    sequence: int


@dataclass(frozen=True)
class MeshShape:
    """Degrees of parallelism; their product is the number of ranks.

    The ``ring`` x ``sequence`` ranks of a *sequence group* hold parts of the same rows; the ``data_degree`` sequence
    groups hold different rows. Parameters are sharded over all ranks of a replica.

    Attributes:
        replicate: replicas of the sharded model (hybrid-sharded data parallelism).
        shard: data-parallel ranks that also shard the parameters (FSDP).
        ring: degree of context parallelism, which exchanges keys and values.
        sequence: degree of Ulysses, which exchanges attention heads.
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
        """Number of sequence groups, which hold different rows."""
        return self.replicate * self.shard

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that share a row."""
        return self.ring * self.sequence

    @property
    def shard_degree(self) -> int:
        """Number of ranks that the parameters are sharded over."""
        return self.shard * self.ring * self.sequence

    def place(self, rank: int) -> Place:
        """Coordinates of a rank in the mesh.

        Raises:
            RopewalkError: if the mesh has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise RopewalkError(
                f"rank must be from 0 to {self.world_size - 1} in a mesh with world_size {self.world_size}, got {rank}"
            )
        rest, sequence = divmod(rank, self.sequence)
        rest, ring = divmod(rest, self.ring)
        replicate, shard = divmod(rest, self.shard)
        return Place(replicate, shard, ring, sequence)

    def neighbours(self, *dimensions: str) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks whose coordinates differ only in the given dimensions."""
        groups: dict[Place, list[int]] = {}
        for rank in range(self.world_size):
            # With these coordinates at 0, a place names the group along the dimensions.
            groups.setdefault(replace(self.place(rank), **dict.fromkeys(dimensions, 0)), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def data_rank(self, rank: int) -> int:
        """Index of the rank's sequence group, 0 to data_degree - 1; its ranks read the same rows."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    @property
    def setting(self) -> str:
        """As a recipe writes it, such as ``{shard: 2, sequence: 4}``."""
        parts = [f"{name}: {getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        return f"{{{', '.join(parts) or 'shard: 1'}}}"

    def __str__(self) -> str:
        """For example ``2 replicate x 4 sequence``, or ``1 rank`` if every degree is 1."""
        parts = [f"{getattr(self, name)} {name}" for name in DIMENSIONS if getattr(self, name) > 1]
        return " x ".join(parts) or "1 rank"


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """Process groups and coordinates of this rank within its sequence group.

    Attributes:
        ring_group, sequence_group: ``torch.distributed`` process groups along each dimension; None if its degree is
            1. The group rank equals the coordinate in that dimension.
        row_group: process group of all ``ring`` x ``sequence`` ranks that share rows; the group rank is :attr:`rank`.
        ring, sequence: degrees.
        ring_rank, sequence_rank: coordinates of this rank.
    """

    ring_group: Any = None
    sequence_group: Any = None
    row_group: Any = None
    ring: int = 1
    sequence: int = 1
    ring_rank: int = 0
    sequence_rank: int = 0

    @property
    def rank(self) -> int:
        """Number of this rank among all that share its rows."""
        return self.ring_rank * self.sequence + self.sequence_rank


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh of running processes.

    Attributes:
        shape: degrees of parallelism.
        rank: rank of this process.
        device_mesh: ``torch.distributed.DeviceMesh`` with the dimensions ``replicate`` and ``shard_all``, over which
            parameters are replicated and sharded.
        groups: process groups for attention.
    """

    shape: MeshShape
    rank: int
    device_mesh: Any
    groups: SequenceGroups

    @property
    def data_rank(self) -> int:
        return self.shape.data_rank(self.rank)


def make_mesh(shape: MeshShape, device_type: str) -> Mesh:
    """Arrange all ranks of the default process group as a mesh; every rank must call this function.

    Later meshes of the same shape share the process groups, because each group holds connections and threads, and
    because torch treats device meshes of one layout as equal. The groups end with the default group.

    Args:
        shape: degrees whose product is the size of the default group.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        RopewalkError: if the shape does not match the size of the default group.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    if world != shape.world_size:
        raise RopewalkError(
            f"a mesh of {shape} needs {shape.world_size} ranks, but the run has {world}; change parallel, or start "
            f"{shape.world_size} processes"
        )
    rank = dist.get_rank()
    place = shape.place(rank)
    groups = SequenceGroups(
        ring_group=_neighbours(shape, "ring"),
        sequence_group=_neighbours(shape, "sequence"),
        row_group=_neighbours(shape, "ring", "sequence"),
        ring=shape.ring,
        sequence=shape.sequence,
        ring_rank=place.ring,
        sequence_rank=place.sequence,
    )
    return Mesh(shape, rank, _parameter_mesh(shape, device_type), groups)


def forget_groups() -> None:
    """Drop the cached groups of a destroyed default process group, so that their threads end."""
    _made.cache_clear()


@lru_cache(maxsize=1)
def _made(world: Any) -> dict[Any, Any]:
    """Cache of the groups built from one default process group; a new default group starts an empty cache."""
    return {}


def _neighbours(shape: MeshShape, *dimensions: str) -> Any:
    """This rank's process group along dimensions; None if their degrees are 1."""
    import torch.distributed as dist

    if all(getattr(shape, dimension) == 1 for dimension in dimensions):
        return None
    made, lists = _made(dist.group.WORLD), shape.neighbours(*dimensions)
    # A group along two dimensions is that along one of them if the other has the degree 1.
    along = tuple(dimension for dimension in dimensions if getattr(shape, dimension) > 1)
    if (along, lists) not in made:
        # torch.distributed requires every rank to create every group, including those it is not in.
        mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists])
        made[along, lists] = mine
    return made[along, lists]


def _parameter_mesh(shape: MeshShape, device_type: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    made, sizes = _made(dist.group.WORLD), (shape.replicate, shape.shard_degree)
    if (device_type, sizes) not in made:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard_all"))
        made[device_type, sizes] = mesh
    return made[device_type, sizes]
