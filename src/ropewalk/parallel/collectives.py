"""The exchanges between ranks that autograd must see, over public functions of torch.distributed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        sent = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(sent, grad.contiguous(), group=ctx.group)
        return sent, None


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """``[ranks, ...]`` to ``[ranks, ...]``: part p goes to rank p, part p of the result came from it.

    Its own inverse, and so its own gradient.
    """
    received: Tensor = _AllToAll.apply(x.contiguous(), group)
    return received


@dataclass(frozen=True, eq=False)
class Parcels:
    """Which entries of a tensor go to which ranks.

    Attributes:
        index: int64, entries for rank 0, then for rank 1, and so on; none stands twice among those of one rank.
        send_counts, receive_counts: entries that go to each rank, and that come from each.
        group: process group of these ranks, which a rank alone needs not.
    """

    index: Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]
    group: Any


def send_entries(x: Tensor, parcels: Parcels) -> Tensor:
    """``[entries, ...]`` to ``[received, ...]``: what each rank sends here, rank by rank; every rank calls this.

    In the backward the gradients of received entries return to their owners, where they add up in float32 or wider,
    rank by rank, so that the same bits come out every time.
    """
    received: Tensor = _SendEntries.apply(x, parcels)
    return received


class _SendEntries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parcels: Parcels) -> Tensor:
        ctx.parcels, ctx.shape = parcels, x.shape
        sent = x.index_select(0, parcels.index)
        return _sent(sent, parcels.send_counts, parcels.receive_counts, parcels.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), parcels = grads, ctx.parcels
        returned = _sent(grad.contiguous(), parcels.receive_counts, parcels.send_counts, parcels.group)
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        counts = list(parcels.send_counts)
        for index, part in zip(parcels.index.split(counts), returned.split(counts), strict=True):
            total.index_add_(0, index, part.to(total.dtype))
        return total.to(grad.dtype), None


def _sent(x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Any) -> Tensor:
    if len(send_counts) == 1:
        return x
    received = x.new_empty(sum(receive_counts), *x.shape[1:])
    dist.all_to_all_single(received, x, list(receive_counts), list(send_counts), group=group)
    return received
