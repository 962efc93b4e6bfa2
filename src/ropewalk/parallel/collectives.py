"""Differentiable all-to-all exchanges, built on public functions of torch.distributed."""

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
        # A gradient may be expanded or transposed, while the collective needs contiguous buffers of equal layout.
        sent = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(sent, grad.contiguous(), group=ctx.group)
        return sent, None


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """Send part p of ``[ranks, ...]`` to rank p; part p of the result, ``[ranks, ...]``, comes from rank p.

    The exchange is its own inverse, so the backward is the same exchange.
    """
    received: Tensor = _AllToAll.apply(x.contiguous(), group)
    return received


@dataclass(frozen=True, eq=False)
class EntryExchange:
    """Plan of which entries of a tensor go to which ranks.

    Attributes:
        index: int64, the entries for rank 0, then those for rank 1, and so on, without duplicates for one rank.
        send_counts, receive_counts: number of entries sent to each rank and received from each rank.
        group: process group of these ranks; unused if there is one rank.
    """

    index: Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]
    group: Any


def send_entries(x: Tensor, exchange: EntryExchange) -> Tensor:
    """Exchange entries: ``[entries, ...]`` in, ``[received, ...]`` out, in rank order of the senders; collective.

    The backward returns the gradients of received entries to their owners, which sum them in float32 or wider and in
    rank order, so the result is deterministic.
    """
    received: Tensor = _SendEntries.apply(x, exchange)
    return received


class _SendEntries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: EntryExchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, x.shape
        sent = x.index_select(0, exchange.index)
        return _sent(sent, exchange.send_counts, exchange.receive_counts, exchange.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), exchange = grads, ctx.exchange
        returned = _sent(grad.contiguous(), exchange.receive_counts, exchange.send_counts, exchange.group)
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        counts = list(exchange.send_counts)
        # One index_add_ per rank: an index occurs once in each, so no atomic additions race on CUDA.
        for index, part in zip(exchange.index.split(counts), returned.split(counts), strict=True):
            total.index_add_(0, index, part.to(total.dtype))
        return total.to(grad.dtype), None


def _sent(x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Any) -> Tensor:
    if len(send_counts) == 1:
        return x
    received = x.new_empty(sum(receive_counts), *x.shape[1:])
    dist.all_to_all_single(received, x, list(receive_counts), list(send_counts), group=group)
    return received
