"""The kernel of causal-conv1d, for a convolution of each channel by itself.

Source: causal-conv1d 1.6.1, ``causal_conv1d_interface.py`` and ``cpp_functions.py``: the backward needs the inputs, and
sums gradients of the weights in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.planning.sizing.recurrent import convolution_flops
from ropewalk.training.simulation.recurrent.launch import launch


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: Any = None,
) -> Tensor:
    """``[B, C, L]`` from ``[B, C, L]``.

    Args:
        x: inputs.
        weight: ``[C, width]``.
        bias: ``[C]``.
        seq_idx: int32 ``[B, L]``, number of each token's run.
        activation: SiLU or none, in the same kernel.
    """
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    output: Tensor = _Convolution.apply(x, weight, bias, seq_idx)
    return output


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, again: bool = False
) -> Tensor:
    """The forward's kernel; ``again`` if a backward computes it once more."""
    output, flops = torch.empty_like(x), _flops(x, weight)
    reads = (x, weight, bias, seq_idx)
    launch("causal_conv1d_fwd", reads, (output,), flops, flops if again else 0, again)
    return output


def gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    seq_idx: Tensor | None,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of inputs, in ``dx`` if it is given, of weight and bias."""
    dx = torch.empty_like(x) if dx is None else dx
    sums = [None if each is None else torch.zeros_like(each, dtype=torch.float32) for each in (weight, bias)]
    launch(
        "causal_conv1d_bwd",
        (x, weight, bias, grad, seq_idx),
        (dx, *sums),
        2 * _flops(x, weight),
        gradient=True,
    )
    dweight, dbias = (
        None if total is None or each is None else total.to(each.dtype)
        for total, each in zip(sums, (weight, bias), strict=True)
    )
    assert dweight is not None
    return dx, dweight, dbias


def _flops(x: Tensor, weight: Tensor) -> int:
    return convolution_flops(x.shape[0] * x.shape[2], *weight.shape)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, seq_idx)
        return convolved(x, weight, bias, seq_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias, seq_idx = ctx.saved_tensors
        if grad.stride(2) != 1 and grad.stride(1) != 1:
            grad = grad.contiguous()
        return *gradients(x, weight, bias, grad, seq_idx), None
