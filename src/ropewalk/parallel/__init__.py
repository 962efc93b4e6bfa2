"""Sequence parallelism: the mesh of ranks, the shards of a packed row, and attention over sharded rows.

Names are imported on first use: a job in one process may need no torch. Its files::

    world, context           the processes of a run, and where a job runs
    mesh, shards             ranks in a mesh, and the tokens of a row that each holds
    attention, ulysses, ring attention over sharded rows, by heads and by keys
    fragments, states        pieces of runs on ranks, and the states that pass between them in recurrent layers
    collectives, traffic     an exchange with gradients, and the bytes that ranks send
    heartbeat, rank_pool     a run that hangs is ended; processes for tests of collectives
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = on_first_use(__name__)
