"""FlexAttention's kernels as a dry run sees them: operators with their results, and no way to compute them.

On a GPU, FlexAttention is compiled for the tensors at hand, so no operator of its own reaches the recorder. These take
its place on the simulated device: :mod:`ropewalk.training.simulation.operations` counts them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "ropewalk::flex_attention"


def _compute(*_: Any) -> Any:
    raise AssertionError("tensors of the simulated device have no data to compute with")


_forward = torch.library.custom_op(
    NAME,
    _compute,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int pairs) -> (Tensor, Tensor, Tensor)",
)
_backward = torch.library.custom_op(
    f"{NAME}_backward",
    _compute,
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int pairs) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)


def simulated_flex(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, V]`` and log-sum-exp ``[B, H, T]`` of FlexAttention, without data.

    Args:
        q, k, v: ``[B, H, T, D]``, ``[B, K, T, D]`` and ``[B, K, T, V]``.
        pairs: pairs of query and key that the rows see.
    """
    out, lse, _ = _forward(q, k, v, pairs)
    return out, lse


@_forward.register_fake
def _results(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, its log-sum-exp, and the same to the base 2, which the kernel keeps for its backward.

    Source: torch's ``_inductor/kernel/flex/flex_attention.py``; the output is stored in the order of the queries.
    """
    out = torch.empty_like(q) if v.shape[3] == q.shape[3] else _ordered_as(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return out, lse, torch.empty_like(lse)


def _ordered_as(q: Tensor, width: int) -> Tensor:
    """``[B, H, T, width]``, dense, with its dimensions in memory as those of ``q``."""
    order = sorted(range(4), key=q.stride, reverse=True)
    shape = (*q.shape[:3], width)
    inverse = [order.index(dim) for dim in range(4)]
    return q.new_empty([shape[dim] for dim in order]).permute(inverse)


@_backward.register_fake
def _gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The query heads of a group add up their gradients of keys and values inside the kernel."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.pairs = inputs
    out, _, base_2 = output
    ctx.save_for_backward(q, k, v, out, base_2)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor, grad_lse: Tensor | None, _: None
) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_backward(grad, grad_lse, *ctx.saved_tensors, ctx.pairs), None


_forward.register_autograd(_differentiate, setup_context=_keep)
