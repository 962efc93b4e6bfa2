"""ring_attend: attention over rows whose keys and values travel around a ring of ranks.

In round s every rank sends the keys that rank r + s needs and computes with those of rank r - s, while the message
of the next round is on its way. A rank holds its own keys, those of two rounds, and their gradients: never a row's.

Source: Ring Attention, arXiv:2310.01889; rounds are merged in float32 or wider.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.attention import AttentionSpec, EngineName, check_engine
from ropewalk.errors import RopewalkError
from ropewalk.parallel.ring_blocks import (
    Blocks,
    Final,
    Gradients,
    Part,
    Scoring,
    blocks_of,
    wide_dtype,
)
from ropewalk.parallel.ring_plan import RingPlan, Round, ring_plan, sent_on
from ropewalk.parallel.ring_varlen import layers_of
from ropewalk.parallel.shards import ShardedLayouts

# Shapes: B rows, n places of one ring rank, P = B·n, H query heads, K key/value heads, D head dim, V value dim,
# E = D + V: keys and values of a place travel side by side.

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def ring_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayouts,
    engine: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over the places of all ranks of a ring; every rank of it calls this.

    Args:
        query: ``[batch, num_heads, ring_length, head_dim]``, RoPE applied with the row's own positions.
        key: ``[batch, num_kv_heads, ring_length, head_dim]``; num_heads is a multiple of num_kv_heads.
        value: ``[batch, num_kv_heads, ring_length, value_dim]``.
        sharded: how the rows are cut.
        engine: ``auto``, ``segments`` (plain blocks, float32 or wider) or ``varlen`` (CUDA, 16-bit floats).
        scale: multiplier of q·k; 1/sqrt(head_dim) if not given.
        softcap: soft cap of the scores (Gemma 2), none if not given.

    Returns:
        ``[batch, num_heads, ring_length, value_dim]`` in the dtype of the input; zeros in padding.

    Raises:
        RopewalkError: if shapes, dtypes or layouts contradict each other.
        EngineError: if the engine cannot do this; the message says what can.
    """
    return ring_attend_merging(query, key, value, sharded, engine, scale, softcap, wide_dtype(query.dtype))


def ring_attend_merging(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharded: ShardedLayouts,
    engine: str,
    scale: float | None,
    softcap: float | None,
    merge_dtype: torch.dtype,
) -> Tensor:
    """ring_attend, with the dtype that rounds are merged in.

    Anything below float32 loses digits: there to show that it does.
    """
    _check_tensors(query, key, value, sharded)
    head_dim, value_dim = query.shape[3], value.shape[3]
    spec = AttentionSpec(query.device, query.dtype, head_dim, value_dim, softcap, ring=True)
    engine = check_engine(engine, spec)
    ring = Ring(
        plan=ring_plan(sharded.layouts, sharded.rows, sharded.groups.ring_rank),
        group=sharded.groups.ring_group,
        blocks=blocks_of(engine),
        scoring=Scoring(1.0 / math.sqrt(head_dim) if scale is None else scale, softcap),
        merge_dtype=merge_dtype,
    )
    output: Tensor = _RingAttention.apply(query, key, value, ring)
    return output


def prepare(sharded: ShardedLayouts, engine: EngineName, device: torch.device) -> None:
    """Make what :func:`ring_attend` needs of these rows before it is called, so that no step waits for it."""
    for each in ring_plan(sharded.layouts, sharded.rows, sharded.groups.ring_rank).rounds:
        sent_on(each, device)
        if engine == "varlen":
            layers_of(each, device)


@dataclass(frozen=True, eq=False)
class Merged:
    """Parts of all local places, merged so far, in one dtype; a place without any has the shift -inf.

    Attributes: as of :class:`Part`, of all P places.
    """

    out_PHV: Tensor
    shift_PH: Tensor
    total_PH: Tensor

    @classmethod
    def nothing(cls, q_PHD: Tensor, value_dim: int, dtype: torch.dtype) -> Merged:
        out = q_PHD.new_zeros(*q_PHD.shape[:2], value_dim, dtype=dtype)
        return cls(out, torch.full_like(out[..., 0], -math.inf), torch.zeros_like(out[..., 0]))

    def add(self, part: Part) -> None:
        """Merge a part, in place; no exponent is positive, so that none overflows."""
        where, dtype = part.where, self.out_PHV.dtype
        before, shift = self.shift_PH[where], part.shift_nH.to(dtype)
        after = torch.maximum(before, shift)
        kept, added = (before - after).exp(), (shift - after).exp()
        self.out_PHV[where] = (
            self.out_PHV[where] * kept[..., None] + part.out_nHV.to(dtype) * added[..., None]
        )
        self.total_PH[where] = self.total_PH[where] * kept + part.total_nH.to(dtype) * added
        self.shift_PH[where] = after

    def finished(self) -> tuple[Tensor, Tensor]:
        """Output ``[P, H, V]``, zeros where a place is padding, and lse ``[P, H]``."""
        # Padding has the total 0; any divisor gives its zeros.
        total = torch.where(self.total_PH == 0, 1, self.total_PH)
        return self.out_PHV / total[..., None], self.shift_PH + total.log()


@dataclass(frozen=True, eq=False)
class Ring:
    """Everything of a call but its tensors."""

    plan: RingPlan
    group: Any
    blocks: Blocks
    scoring: Scoring
    merge_dtype: torch.dtype

    def start(self, step: int, kv_PKE: Tensor) -> Message | None:
        """Send the keys and values of a round; None after the last."""
        if step == len(self.plan.rounds):
            return None
        each = self.plan.rounds[step]
        sent = kv_PKE.index_select(0, sent_on(each, kv_PKE.device))
        return self._exchange(sent, each.destination, each.source, each.received)

    def give_back(self, each: Round, grad_NKE: Tensor) -> Message:
        """Send the gradients of a round's keys and values back to their owner."""
        return self._exchange(grad_NKE, each.source, each.destination, each.sent.numel())

    def _exchange(self, sent: Tensor, destination: int, source: int, received: int) -> Message:
        to, come = [0] * len(self.plan.rounds), [0] * len(self.plan.rounds)
        to[destination], come[source] = sent.shape[0], received
        buffer = sent.new_empty(received, *sent.shape[1:])
        work = dist.all_to_all_single(buffer, sent, come, to, group=self.group, async_op=True)
        return Message(buffer, sent, work)


@dataclass(frozen=True, eq=False)
class Message:
    """A message under way. What is sent must live until it is there."""

    buffer: Tensor
    sent: Tensor
    work: Any

    def wait(self) -> Tensor:
        self.work.wait()
        return self.buffer


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        q, kv = _places(query), torch.cat([_places(key), _places(value)], dim=2)
        with _own_dtypes(query):
            out, lse = ring_forward(q, kv, key.shape[3], value.shape[3], ring)
        output = _rows(out.to(query.dtype), len(query))
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        q, kv = _places(query), torch.cat([_places(key), _places(value)], dim=2)
        out, grad = _places(output), _places(grads[0])
        wide = wide_dtype(query.dtype)
        delta = (out.to(wide) * grad.to(wide)).sum(dim=-1)
        final = Final(out, lse.to(wide), grad, delta)
        with _own_dtypes(query):
            grad_q, grad_kv = ring_backward(q, kv, key.shape[3], final, ring)

        grad_k, grad_v = grad_kv.split([key.shape[3], value.shape[3]], dim=2)
        grad_query, grad_key, grad_value = (
            _rows(x.to(query.dtype), len(query)) for x in (grad_q, grad_k, grad_v)
        )
        return grad_query, grad_key, grad_value, None


def _own_dtypes(query: Tensor) -> AbstractContextManager[Any]:
    """No autocast: it would turn the products of plain blocks, which are float32, into 16-bit ones."""
    kind = query.device.type
    # There is none on the device meta.
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def ring_forward(
    q_PHD: Tensor, kv_PKE: Tensor, head_dim: int, value_dim: int, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Output ``[P, H, V]`` and log-sum-exp ``[P, H]``, both in the dtype of the merge."""
    merged = Merged.nothing(q_PHD, value_dim, ring.merge_dtype)
    kv = kv_PKE
    for step, each in enumerate(ring.plan.rounds):
        coming = ring.start(step + 1, kv_PKE)
        for part in ring.blocks.forward(q_PHD, kv[..., :head_dim], kv[..., head_dim:], each, ring.scoring):
            merged.add(part)
        kv = coming.wait() if coming is not None else kv
    return merged.finished()


def ring_backward(
    q_PHD: Tensor, kv_PKE: Tensor, head_dim: int, final: Final, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Gradients of queries ``[P, H, D]``, and of keys and values side by side ``[P, K, E]``, wide.

    A key's gradients add up at its owner in the order of the rounds.
    """
    wide = wide_dtype(q_PHD.dtype)
    grad_q, grad_kv = torch.zeros_like(q_PHD, dtype=wide), torch.zeros_like(kv_PKE, dtype=wide)
    kv, under_way = kv_PKE, None
    for step, each in enumerate(ring.plan.rounds):
        coming = ring.start(step + 1, kv_PKE)
        grads = torch.zeros_like(kv, dtype=wide) if step else grad_kv
        into = Gradients(grad_q, grads[..., :head_dim], grads[..., head_dim:])
        ring.blocks.backward(q_PHD, kv[..., :head_dim], kv[..., head_dim:], final, each, ring.scoring, into)
        if under_way is not None:
            _collect(grad_kv, *under_way)
        under_way = (each, ring.give_back(each, grads)) if step else None
        kv = coming.wait() if coming is not None else kv
    if under_way is not None:
        _collect(grad_kv, *under_way)
    return grad_q, grad_kv


def _collect(grad_PKE: Tensor, each: Round, returned: Message) -> None:
    """Add what came back to the gradients of the places that were sent; none was sent twice in a round."""
    grad_PKE.index_add_(0, sent_on(each, grad_PKE.device), returned.wait())


def _places(x_BHnD: Tensor) -> Tensor:
    """``[B, H, n, D]`` to ``[P, H, D]``, contiguous."""
    return x_BHnD.transpose(1, 2).flatten(0, 1).contiguous()


def _rows(x_PHD: Tensor, batch: int) -> Tensor:
    """``[P, H, D]`` to ``[B, H, n, D]``."""
    return x_PHD.reshape(batch, -1, *x_PHD.shape[1:]).transpose(1, 2)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, sharded: ShardedLayouts) -> None:
    rows, groups = sharded.rows, sharded.groups
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or tensor.shape[0] != len(rows) or tensor.shape[2] != rows[0].ring_length:
            raise RopewalkError(
                f"{name} must be [batch, heads, places, width] with {len(rows)} rows of {rows[0].ring_length} places, "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise RopewalkError(
                f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on {query.device}: "
                "they must agree"
            )
    if query.dtype not in DTYPES:
        raise RopewalkError(f"queries must be of one of {', '.join(map(str, DTYPES))}, got {query.dtype}")
    if key.shape[1] != value.shape[1] or key.shape[3] != query.shape[3]:
        raise RopewalkError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit query {tuple(query.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise RopewalkError(f"num_heads {query.shape[1]} is not a multiple of num_kv_heads {key.shape[1]}")
    if groups.ring != rows[0].ring:
        raise RopewalkError(f"rows are cut over a ring of {rows[0].ring} ranks, the mesh has {groups.ring}")
