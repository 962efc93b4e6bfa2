"""sharded_attend: attend, for rows of which each rank holds a shard."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention import attend
from ropewalk.attention.options import PLAIN, AttentionOptions
from ropewalk.parallel.shards import ShardedLayouts
from ropewalk.parallel.ulysses import ulysses


def sharded_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayouts,
    engine: str = "auto",
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention over rows that are cut over the ranks of a sequence group; every rank of it calls this.

    Args:
        query: ``[batch, num_heads, shard_length, head_dim]``, RoPE applied with the row's own positions.
        key: ``[batch, num_kv_heads, shard_length, head_dim]``.
        value: ``[batch, num_kv_heads, shard_length, value_dim]``.
        sharded: how the rows are cut.
        engine, options: as for :func:`ropewalk.attend`.

    Returns:
        ``[batch, num_heads, shard_length, value_dim]``; zeros in padding.

    Raises:
        RopewalkError: if shapes or layouts contradict each other.
        EngineError: if heads cannot be divided, or the engine cannot do this.
    """
    groups = sharded.groups
    if groups.sequence > 1:
        options.check_sinks(query)
        heads = query.shape[1] // groups.sequence
        # Ulysses gives this rank some of the heads.
        options = options.of_heads(slice(groups.sequence_rank * heads, (groups.sequence_rank + 1) * heads))

    def whole_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all places that the sequence group's ranks of one ring rank hold together."""
        if groups.ring > 1:
            from ropewalk.parallel.ring import ring_attend

            return ring_attend(q, k, v, sharded, engine, options)
        # Padding stands at the end; without it the row is the one of a single process.
        length, places = sharded.total_length, q.shape[2]
        q, k, v = (x.split([length, places - length], dim=2)[0] for x in (q, k, v))
        output = attend(q, k, v, sharded.layouts, engine, options)
        return F.pad(output, (0, 0, 0, places - length))

    if groups.sequence == 1:
        return whole_places(query, key, value)
    return ulysses(query, key, value, groups.sequence_group, groups.sequence, whole_places)
