"""The exchange of a ring: each rank gets the keys and values that its queries see, and returns their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.attention.layout import cached_per_layout
from ropewalk.attention.merge import ExtraKeys
from ropewalk.parallel.collectives import exchanged
from ropewalk.parallel.ring.plan import AnchorKeys, RingPlan

# Shapes: Q tokens of the rank, N sent keys, R received keys, S slots of the runs' keys, A keys of anchors, K key/value
# heads, D head dim, V value dim; E = D + V, since a token's key and value are sent as one vector.


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys and values of a rank's queries.

    Attributes:
        k, v: ``[S, K, D]`` and ``[S, K, V]``, those of the runs.
        anchors: those of the anchors in float32 or wider, for all rows as if they were one; None for none.
    """

    k: Tensor
    v: Tensor
    anchors: ExtraKeys | None


def exchange(k_QKD: Tensor, v_QKV: Tensor, plan: RingPlan, group: Any) -> Keys:
    """Exchange the keys and values of all ranks of a ring; collective, and so is the backward.

    The backward returns the gradients of received keys to their owners in the dtype of the keys, which add them up in
    float32 or wider. Anchors, whose gradients come from all ranks, are reduced in float32 or wider instead.

    Args:
        k_QKD, v_QKV: keys and values of this rank's tokens.
        plan: plan of this rank.
        group: process group of the ring; unused if it has one rank.
    """
    k, v, *of_anchors = _Exchange.apply(k_QKD, v_QKV, plan, group)  # type: ignore[no-untyped-call]
    anchors = indices_on(plan, k.device).anchors
    if anchors is None:
        return Keys(k, v, None)
    anchor_k, anchor_v = of_anchors
    return Keys(k, v, ExtraKeys(anchor_k[None], anchor_v[None], anchors.seen[None]))


@dataclass(frozen=True, eq=False)
class _Bags:
    """Groups of entries of a tensor to add up.

    Attributes:
        entries: int64, the entries of the groups, one group after the other.
        offsets: int64 ``[groups + 1]``, where each group begins.
    """

    entries: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, groups: Tensor, count: int, device: torch.device) -> _Bags:
        """The entries of each of ``count`` groups, from the group of each entry."""
        offsets = F.pad(groups.bincount(minlength=count).cumsum(0), (1, 0))
        return cls(groups.argsort(stable=True).to(device), offsets.to(device))

    def sums(self, x: Tensor) -> Tensor:
        """``[groups, ...]`` of ``[entries, ...]``, summed in float32 or wider and in a fixed order; 0 for no entry."""
        bags = F.embedding_bag(self.entries, x.flatten(1), self.offsets, mode="sum", include_last_offset=True)
        return bags.view(-1, *x.shape[1:])


@dataclass(frozen=True, eq=False)
class _Indices:
    """A plan's indices on a device.

    Attributes:
        sent: tokens whose keys are sent.
        of_tokens: for each token of this rank, the sent keys that are its own.
        slots: the received key in each slot; None if the received keys are those of the runs, in their order.
        of_keys: for each received key, its slots.
        anchors: the anchors' keys.
    """

    sent: Tensor
    of_tokens: _Bags
    slots: Tensor | None
    of_keys: _Bags
    anchors: AnchorKeys | None


@cached_per_layout
def indices_on(plan: RingPlan, device: torch.device) -> _Indices:
    """Indices of a plan; all layers of a batch share them."""
    received = sum(plan.receive_counts)
    return _Indices(
        plan.sent.to(device),
        _Bags.of(plan.sent, sum(plan.tokens), device),
        None if torch.equal(plan.slots, torch.arange(received)) else plan.slots.to(device),
        _Bags.of(plan.slots, received, device),
        None if plan.anchors is None else plan.anchors.to(device),
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k_QKD: Tensor, v_QKV: Tensor, plan: RingPlan, group: Any) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group, widths = plan, group, [k_QKD.shape[2], v_QKV.shape[2]]
        at = indices_on(plan, k_QKD.device)
        # Keys and values travel in one message.
        sent_NKE = k_QKD.new_empty(len(at.sent), k_QKD.shape[1], sum(widths))
        for x, part in zip((k_QKD, v_QKV), sent_NKE.split(widths, 2), strict=True):
            torch.index_select(x, 0, at.sent, out=part)
        received_RKE = _all_to_all(sent_NKE, plan.send_counts, plan.receive_counts, group)
        # This rank has a copy of the keys before each of its runs.
        keys = received_RKE if at.slots is None else received_RKE.index_select(0, at.slots)
        if at.anchors is None:
            return tuple(keys.split(widths, 2))
        anchors = received_RKE.index_select(0, at.anchors.received)
        anchors = anchors.to(torch.promote_types(anchors.dtype, torch.float32))
        return *keys.split(widths, 2), *anchors.split(widths, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dk, dv, *of_anchors), plan = grads, ctx.plan
        at = indices_on(plan, dk.device)
        returned = torch.cat([dk, dv], 2)
        returned = returned if at.slots is None else at.of_keys.sums(returned)
        back = _all_to_all(returned, plan.receive_counts, plan.send_counts, ctx.group)
        own = at.of_tokens.sums(back)
        if at.anchors is not None:
            anchors, held = torch.cat(of_anchors, 2), at.anchors.held
            if len(plan.send_counts) > 1:
                dist.all_reduce(anchors, group=ctx.group)
            if len(held):
                total = anchors.index_select(0, at.anchors.places).add_(own.index_select(0, held))
                own.index_copy_(0, held, total.to(own.dtype))
        return *own.split([dk.shape[2], dv.shape[2]], 2), None, None


def _all_to_all(
    sent: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Any
) -> Tensor:
    return sent if len(send_counts) == 1 else exchanged(sent, group, send_counts, receive_counts)
