"""sharded_attend: attention over rows that are sharded over ranks."""

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
    """Attention over rows sharded over the ranks of a sequence group; every rank of the group must call this function.

    Args:
        query: ``[batch, num_heads, shard_length, head_dim]``, with RoPE applied at the row's own positions.
        key: ``[batch, num_kv_heads, shard_length, head_dim]``.
        value: ``[batch, num_kv_heads, shard_length, value_dim]``.
        sharded: layouts of the whole rows and the tokens of this rank.
        engine, options: as for :func:`ropewalk.attend`.

    Returns:
        ``[batch, num_heads, shard_length, value_dim]``; zeros in padding.

    Raises:
        RopewalkError: if shapes or layouts contradict each other.
        EngineError: if the Ulysses degree does not divide the heads, or the engine does not support these inputs.
    """
    groups = sharded.groups
    if groups.sequence > 1:
        options.check_sinks(query)
        heads = query.shape[1] // groups.sequence
        # After the Ulysses exchange this rank has a slice of the heads, and needs only their sinks.
        options = options.of_heads(slice(groups.sequence_rank * heads, (groups.sequence_rank + 1) * heads))

    def whole_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention after the Ulysses exchange, over all tokens of one ring rank."""
        if groups.ring > 1:
            from ropewalk.parallel.ring import ring_attend

            return ring_attend(q, k, v, sharded, engine, options)
        # Padding is at the end; without it the row is exactly the row of a single process.
        length, places = sharded.total_length, q.shape[2]
        q, k, v = (x.split([length, places - length], dim=2)[0] for x in (q, k, v))
        output = attend(q, k, v, sharded.layouts, engine, options)
        return F.pad(output, (0, 0, 0, places - length))

    if groups.sequence == 1:
        return whole_places(query, key, value)
    return ulysses(query, key, value, groups.sequence_group, groups.sequence, whole_places)
