"""Sequence parallelism: the mesh of ranks, the shards of a packed row, and attention over sharded rows."""

from ropewalk.parallel.attention import sharded_attend as sharded_attend
from ropewalk.parallel.mesh import (
    Mesh as Mesh,
    MeshShape as MeshShape,
    Place as Place,
    SequenceGroups as SequenceGroups,
    make_mesh as make_mesh,
)
from ropewalk.parallel.shards import (
    BALANCES as BALANCES,
    NO_TOKEN as NO_TOKEN,
    Balance as Balance,
    RowShards as RowShards,
    ShardedLayouts as ShardedLayouts,
    row_shards as row_shards,
)
from ropewalk.parallel.world import (
    World as World,
    joined as joined,
    require_devices as require_devices,
    world_from_environment as world_from_environment,
)
