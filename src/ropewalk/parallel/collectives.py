"""Differentiable all-to-all exchanges, built on public functions of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, sent: Sequence[int] | None, received: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchanged(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        return exchanged(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def all_to_all(
    x: Tensor, group: Any, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:
    """Send parts of ``x`` to all ranks; part p of the result comes from rank p. Differentiable.

    The backward is the inverse exchange. Each rank must therefore use the result in its graph, even if it is empty:
    otherwise the others wait forever.

    Args:
        x: ``[entries, ...]``, first those for rank 0.
        group: process group.
        sent, received: number of entries for, and from, each rank; None for one entry each.
    """
    parts: Tensor = _AllToAll.apply(x, group, sent, received)
    return parts


def exchanged(
    x: Tensor, group: Any, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:
    """The result of :func:`all_to_all`, without gradients."""
    entries = len(x) if received is None else sum(received)
    # A gradient may be expanded or transposed, while the collective needs contiguous buffers.
    result = x.new_empty(entries, *x.shape[1:])
    splits = [None if each is None else list(each) for each in (received, sent)]
    dist.all_to_all_single(result, x.contiguous(), splits[0], splits[1], group=group)
    return result
