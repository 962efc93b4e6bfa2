"""The exchanges between ranks that autograd must see, over public functions of torch.distributed alone."""

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
        sent = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(sent, grad.contiguous(), group=ctx.group)
        return sent, None


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """``[ranks, ...]`` to ``[ranks, ...]``: part p goes to rank p, part p of the result came from it.

    Its own inverse, and so its own gradient.
    """
    received: Tensor = _AllToAll.apply(x.contiguous(), group)
    return received
