"""ring_attend: context-parallel attention over rows whose queries, keys and values are sharded over a ring of ranks.

Each rank receives the keys and values that its queries see in one all-to-all, and then attends to them as in any packed
row: a kernel attends within runs, and the keys of anchors, which every rank has, are merged. A rank therefore holds the
keys and values of up to a whole row; with gradient checkpointing, for one layer at a time.

Source: the all-gather form of context parallelism, arXiv:2407.21783, section 3.3.2. docs/log.md says why ropewalk does
not pass keys around in rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention import AttentionSpec, EngineName, check_engine
from ropewalk.attention.api import kernel_of, of_one_run
from ropewalk.attention.engines import plain, varlen
from ropewalk.attention.options import EVERYTHING, PLAIN, AttentionOptions, Locality
from ropewalk.attention.packed import attend_runs
from ropewalk.errors import RopewalkError
from ropewalk.parallel.ring.exchange import Keys, exchange, indices_on
from ropewalk.parallel.ring.plan import RingPlan, ring_plan
from ropewalk.parallel.ring.traffic import heads_of_an_exchange
from ropewalk.parallel.shards import ShardedLayouts

# Shapes: B rows, n tokens of one ring rank with padding, H query heads, K key/value heads, D head dim, V value dim, Q
# tokens of the rank without padding.

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def ring_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayouts,
    engine: str = "auto",
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention over the tokens of all ranks of a ring; every rank of the ring must call this function.

    Args:
        query: ``[batch, num_heads, ring_length, head_dim]``, with RoPE applied at the row's own positions.
        key: ``[batch, num_kv_heads, ring_length, head_dim]``; num_heads is a multiple of num_kv_heads.
        value: ``[batch, num_kv_heads, ring_length, value_dim]``.
        sharded: layouts of the whole rows and the tokens of this rank.
        engine: ``auto``, ``sdpa`` or ``varlen`` (CUDA, 16-bit floats).
        options: scale, soft cap, window or chunks, and sinks of the layer, as for :func:`ropewalk.attend`.

    Returns:
        ``[batch, num_heads, ring_length, value_dim]`` in the dtype of the input; zeros in padding.

    Raises:
        RopewalkError: if shapes, dtypes or layouts contradict each other.
        EngineError: if the engine does not support these inputs; the message names engines that do.
    """
    _check_tensors(query, key, value, sharded)
    head_dim, value_dim = query.shape[3], value.shape[3]
    options.check_sinks(query)
    spec = AttentionSpec(
        query.device,
        query.dtype,
        head_dim,
        value_dim,
        options.softcap,
        options.sinks is not None,
        ring=True,
        one_run=of_one_run(sharded.layouts, options.locality),
    )
    chosen = check_engine(engine, spec)
    plan = ring_plan(sharded.layouts, sharded.rows, sharded.groups.ring_rank, options.locality)
    group = sharded.groups.ring_group
    # Heads are exchanged in groups, which bounds the memory of the exchange buffers.
    heads = heads_of_an_exchange(
        len(query) * sharded.total_length, key.shape[1], (head_dim + value_dim) * key.itemsize
    )
    per_key = query.shape[1] // key.shape[1]
    outputs = []
    for first in range(0, key.shape[1], heads):
        own = slice(first * per_key, (first + heads) * per_key)
        q, k, v = query[:, own], key[:, first : first + heads], value[:, first : first + heads]
        keys = exchange(tokens_of(k, plan.tokens), tokens_of(v, plan.tokens), plan, group)
        outputs.append(attend_received(q, keys, plan, chosen, options.of_heads(own)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend_received(
    query: Tensor, keys: Keys, plan: RingPlan, engine: EngineName, options: AttentionOptions
) -> Tensor:
    """Attention of a rank's queries to the keys and values that it has received.

    Args:
        query: ``[batch, num_heads, ring_length, head_dim]``.
        keys: keys and values in the order of the plan.
        plan: plan of this rank, made for the locality of ``options``.
        engine: ``varlen`` or ``sdpa``.
        options: as for :func:`ring_attend`.

    Returns:
        ``[batch, num_heads, ring_length, value_dim]``; zeros in padding.
    """
    q_QHD, kernel, anchors = tokens_of(query, plan.tokens), kernel_of(engine), keys.anchors
    if not plan.runs.queries:
        # This rank has no token, but its graph must still contain the exchange: its backward is a collective, in which
        # the other ranks would wait forever.
        kernel, anchors = plain, None
    output_QHV = attend_runs(kernel, q_QHD, keys.k, keys.v, plan.runs, options, anchors)
    return _rows(output_QHV, plan.tokens, query.shape[2])


def tokens_of(x_BHnD: Tensor, tokens: Sequence[int]) -> Tensor:
    """``[Q, H, D]``: the tokens of all rows without padding; a view if there is no padding and the strides allow it."""
    # Kernels read whole heads, so the elements of a head must be contiguous.
    x_BHnD = x_BHnD if x_BHnD.stride(3) == 1 else x_BHnD.contiguous()
    if all(count == x_BHnD.shape[2] for count in tokens):
        return x_BHnD.transpose(1, 2).flatten(0, 1)
    rows = zip(x_BHnD, tokens, strict=True)
    return torch.cat([row.split([count, row.shape[1] - count], 1)[0].transpose(0, 1) for row, count in rows])


def _rows(x_QHD: Tensor, tokens: Sequence[int], length: int) -> Tensor:
    """The inverse of :func:`tokens_of`, with zeros in padding: ``[B, H, n, D]``."""
    if all(count == length for count in tokens):
        rows: Tensor = x_QHD.unflatten(0, (len(tokens), length))  # type: ignore[no-untyped-call]
        return rows.transpose(1, 2)
    parts = x_QHD.transpose(0, 1).split(list(tokens), dim=1)
    return torch.stack([F.pad(part, (0, 0, 0, length - part.shape[1])) for part in parts])


def prepare(
    sharded: ShardedLayouts,
    engine: EngineName,
    device: torch.device,
    localities: Iterable[Locality] = (EVERYTHING,),
) -> None:
    """Compute and cache the plans of :func:`ring_attend` ahead of time, so that the training step need not wait."""
    for locality in localities:
        plan = ring_plan(sharded.layouts, sharded.rows, sharded.groups.ring_rank, locality)
        indices_on(plan, device)
        if engine == "varlen":
            varlen.calls_of(plan.runs, device)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, sharded: ShardedLayouts) -> None:
    rows, groups = sharded.rows, sharded.groups
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or tensor.shape[0] != len(rows) or tensor.shape[2] != rows[0].ring_length:
            raise RopewalkError(
                f"{name} must have the shape (batch, heads, ring_length, head_dim) with batch {len(rows)} and "
                f"ring_length {rows[0].ring_length}, got {tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise RopewalkError(
                f"{name} is {tensor.dtype} on {tensor.device} but query is {query.dtype} on {query.device}; "
                "use the same dtype and device for query, key and value"
            )
    if query.dtype not in DTYPES:
        raise RopewalkError(
            f"query must have one of the dtypes {', '.join(map(str, DTYPES))}, got {query.dtype}"
        )
    if key.shape[1] != value.shape[1] or key.shape[3] != query.shape[3]:
        raise RopewalkError(
            f"key must have the same number of heads as value and the same head_dim as query, got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise RopewalkError(f"num_heads {query.shape[1]} is not a multiple of num_kv_heads {key.shape[1]}")
    if groups.ring != rows[0].ring:
        raise RopewalkError(
            f"the rows are sharded with ring={rows[0].ring}, but the mesh has ring={groups.ring}; call row_shards "
            f"with ring={groups.ring}"
        )
