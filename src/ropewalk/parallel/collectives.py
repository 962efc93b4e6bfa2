"""A differentiable all-to-all exchange, built on public functions of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
