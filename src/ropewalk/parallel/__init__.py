"""Sequence parallelism: the mesh of ranks, the shards of a packed row, and attention over sharded rows."""

from ropewalk.parallel.attention import sharded_attend
from ropewalk.parallel.mesh import Mesh, MeshShape, Place, SequenceGroups, make_mesh
from ropewalk.parallel.shards import BALANCES, NO_TOKEN, Balance, RowShards, ShardedLayouts, row_shards
from ropewalk.parallel.world import World, joined, require_devices, world_from_environment

__all__ = [
    "BALANCES",
    "NO_TOKEN",
    "Balance",
    "Mesh",
    "MeshShape",
    "Place",
    "RowShards",
    "SequenceGroups",
    "ShardedLayouts",
    "World",
    "joined",
    "make_mesh",
    "require_devices",
    "row_shards",
    "sharded_attend",
    "world_from_environment",
]
