"""ring_attend: context-parallel attention over rows whose queries, keys and values are sharded over a ring of ranks.

Each rank receives the keys and values that its queries see in one all-to-all, and then attends to them as in any packed
row. Everything but the exchange is a differentiable call of an engine, and the backward of the exchange is the reverse
exchange. A rank therefore holds the keys and values of up to a whole row; with gradient checkpointing, for one layer at
a time.

Source: the all-gather form of context parallelism, arXiv:2407.21783, section 3.3.2. docs/log.md says why ropewalk does
not pass keys around in rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention import AttentionSpec, EngineName, check_engine
from ropewalk.attention.api import kernel_of
from ropewalk.attention.engines.runs import into_runs
from ropewalk.attention.engines.varlen import calls_of
from ropewalk.attention.options import EVERYTHING, PLAIN, AttentionOptions, Locality
from ropewalk.attention.packed import attend_runs
from ropewalk.errors import RopewalkError
from ropewalk.parallel.collectives import EntryExchange, send_entries
from ropewalk.parallel.ring.plan import RingPlan, gather_on, ring_plan, sent_on
from ropewalk.parallel.ring.traffic import heads_of_an_exchange
from ropewalk.parallel.shards import ShardedLayouts

# Shapes: B rows, n tokens of one ring rank with padding, H query heads, K key/value heads, D head dim, V value dim, Q
# tokens of the rank without padding, R received keys, S slots of the runs' keys; E = D + V, since a token's key and
# value are sent as one vector.

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
    sinks = options.sinks is not None
    spec = AttentionSpec(query.device, query.dtype, head_dim, value_dim, options.softcap, sinks, ring=True)
    chosen = check_engine(engine, spec)
    plan = ring_plan(sharded.layouts, sharded.rows, sharded.groups.ring_rank, options.locality)
    group = sharded.groups.ring_group
    exchange = EntryExchange(sent_on(plan, query.device), plan.send_counts, plan.receive_counts, group)
    # Heads are exchanged in groups, which bounds the memory of the exchange buffers.
    heads = heads_of_an_exchange(
        len(query) * sharded.total_length, key.shape[1], (head_dim + value_dim) * key.itemsize
    )
    per_key = query.shape[1] // key.shape[1]
    outputs = []
    with _own_dtypes(query):
        parts = zip(
            query.split(heads * per_key, dim=1),
            key.split(heads, dim=1),
            value.split(heads, dim=1),
            strict=True,
        )
        for number, (q, k, v) in enumerate(parts):
            # Keys and values travel in one message.
            kv = torch.cat([_places(k), _places(v)], dim=2)
            own = options.of_heads(slice(number * heads * per_key, (number + 1) * heads * per_key))
            outputs.append(attend_received(q, send_entries(kv, exchange), plan, chosen, own))
    return torch.cat(outputs, dim=1)


def attend_received(
    query: Tensor, kv_RKE: Tensor, plan: RingPlan, engine: EngineName, options: AttentionOptions
) -> Tensor:
    """Attention of a rank's queries to the keys and values that it has received.

    Args:
        query: ``[batch, num_heads, ring_length, head_dim]``.
        kv_RKE: received keys and values, ``[received, num_kv_heads, head_dim + value_dim]``, in the order of the plan.
        plan: plan of this rank, made for the locality of ``options``.
        engine: ``varlen`` or ``sdpa``.
        options: as for :func:`ring_attend`.

    Returns:
        ``[batch, num_heads, ring_length, value_dim]``; zeros in padding.
    """
    length, head_dim = query.shape[2:]
    q_QHD = torch.cat(
        [
            row.transpose(0, 1).split([tokens, length - tokens])[0]
            for row, tokens in zip(query, plan.tokens, strict=True)
        ]
    )
    kv_SKE = into_runs(kv_RKE.transpose(0, 1)[None], gather_on(plan, query.device))
    # Free the received keys before attention allocates: they take as much memory as the slots.
    del kv_RKE
    k_SKD, v_SKV = kv_SKE.split([head_dim, kv_SKE.shape[2] - head_dim], dim=2)
    if not plan.queries:
        # This rank has no token, but its graph must still contain the exchange: its backward is a collective, in which
        # the other ranks would wait forever.
        output_QHV = v_SKV.repeat_interleave(q_QHD.shape[1] // v_SKV.shape[1], dim=1) + q_QHD.sum(
            2, keepdim=True
        )
        if options.sinks is not None:
            output_QHV = output_QHV + options.sinks[:, None].to(output_QHV.dtype)
    else:
        output_QHV = attend_runs(kernel_of(engine), q_QHD, k_SKD, v_SKV, plan.runs, options.of_runs())
    rows = output_QHV.transpose(0, 1).split(list(plan.tokens), dim=1)
    return torch.stack([F.pad(row, (0, 0, 0, length - row.shape[1])) for row in rows])


def prepare(
    sharded: ShardedLayouts,
    engine: EngineName,
    device: torch.device,
    localities: Iterable[Locality] = (EVERYTHING,),
) -> None:
    """Compute and cache the plans of :func:`ring_attend` ahead of time, so that the training step need not wait."""
    for locality in localities:
        plan = ring_plan(sharded.layouts, sharded.rows, sharded.groups.ring_rank, locality)
        sent_on(plan, device)
        gather_on(plan, device)
        if engine == "varlen" and plan.queries:
            calls_of(plan.runs, device)


def _own_dtypes(query: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, which would cast float32 queries, keys and products of soft-capped scores to 16 bits."""
    kind = query.device.type
    # The meta device has no autocast.
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _places(x_BHnD: Tensor) -> Tensor:
    """``[B, H, n, D]`` to ``[B·n, H, D]``."""
    return x_BHnD.transpose(1, 2).flatten(0, 1)


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
