"""How far an attention engine may be from exact attention: the float64 oracle, and what its dtype explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.testing import oracle_attention
from ropewalk.training.step import autocast

# Shapes: B rows, H query heads, K key/value heads, T tokens of a row or places of its shard, D head dim, V value dim.

Values = tuple[Tensor, ...]
"""Output, and the gradients of queries, keys and values."""


@dataclass(frozen=True, eq=False)
class Attended:
    """What a layer of the model attended with, and how.

    Attributes:
        query, key, value: ``[B, H, T, D]``, ``[B, K, T, D]``, ``[B, K, T, V]``.
        scale: the model's own multiplier of q·k.
        softcap: soft cap of the scores, None for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None = None

    def to(self, dtype: torch.dtype) -> Attended:
        q, k, v = (x.to(dtype) for x in (self.query, self.key, self.value))
        return Attended(q, k, v, self.scale, self.softcap)

    @cached_property
    def cotangent(self) -> Tensor:
        """``[B, H, T, V]``, the same on every rank; of the queries' dtype, so that its rounding is nobody's error."""
        generator = torch.Generator().manual_seed(0)
        shape = (*self.query.shape[:3], self.value.shape[3])
        return torch.randn(shape, generator=generator).to(self.query.device, self.query.dtype)


def values_of(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    precision: str = "float32",
) -> Values:
    """What a function of queries, keys and values gives, as in training: forward under the precision's autocast."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with autocast(cotangent.device, precision, sharded=True):
        output = run(*leaves)
    return tuple(x.detach() for x in (output, *torch.autograd.grad(output, leaves, cotangent)))


@dataclass(frozen=True, eq=False)
class Expected:
    """Attributes: float64 output and gradients of exact attention; how far each may be off at most."""

    values: Values
    allowed: tuple[float, ...]

    def worst(self, found: Values) -> tuple[float, float, float]:
        """Share of the budget, error and budget, of the worst of output and gradients."""
        shares = []
        for each, exact, allowed in zip(found, self.values, self.allowed, strict=True):
            # NaN must not slip through a maximum.
            error = float((each.double().to(exact.device) - exact).abs().nan_to_num(nan=math.inf).max())
            shares.append((error / allowed if error else 0.0, error, allowed))
        return max(shares)


def expected_of(attended: Attended, layouts: Sequence[PackedLayout]) -> Expected:
    """Exact attention of rows, and the budget of an engine in the dtype of the queries.

    Twice the error of plain attention with float32 scores, and one rounding of the largest value that each result is
    computed from (as ``ropewalk.testing.AttentionErrors`` says). For gradients also half a unit of the largest score,
    in float32 or wider: a fused backward takes its weights from a log-sum-exp of that size, rounded to the nearest.
    """
    inputs = (attended.query, attended.key, attended.value)
    dtype, scale, softcap = attended.query.dtype, attended.scale, attended.softcap
    wide_inputs, cotangent = [x.double() for x in inputs], attended.cotangent.double()

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle_attention(q, k, v, layouts, scale, softcap)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _plain(q, k, v, layouts, scale, softcap)

    exact = values_of(oracle, wide_inputs, cotangent)
    rough = values_of(plain, inputs, attended.cotangent)
    # The sum over queries without its signs, and half a rounding for each level of a pairwise sum over them.
    summed = float(values_of(oracle, wide_inputs, cotangent.abs())[3].max())
    queries = attended.query.shape[2] * attended.query.shape[1] // attended.key.shape[1]
    q, k, v = wide_inputs
    products = float(cotangent.norm(dim=-1).max() * v.norm(dim=-1).max()) * abs(scale)
    sources = (
        0.0,
        products * float(k.abs().max()),
        products * float(q.abs().max()),
        summed * max(1.0, math.log2(queries) / 2),
    )
    eps = torch.finfo(dtype).eps
    score = _peak(q, k, layouts, scale) / 2 * torch.finfo(_wide(dtype)).eps / eps
    allowed = []
    for number, (ours, theirs, source) in enumerate(zip(rough, exact, sources, strict=True)):
        unit = eps * max(float(theirs.abs().max()), source)
        error = float((ours.double() - theirs).abs().max())
        allowed.append(2 * error + unit * (1 + score if number else 1))
    return Expected(exact, tuple(allowed))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[PackedLayout], scale: float, softcap: float | None
) -> Tensor:
    """Plain attention that rounds to the dtype of its inputs where a fused kernel does, and nowhere else.

    Scores and their softmax are float32 or wider; what enters a matrix product is rounded: weights in the forward pass,
    gradients of the scores in the backward. Scores of 100 that are rounded to bfloat16 are no attention any more.
    """
    dtype, wide = q.dtype, _wide(q.dtype)
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.to(wide) for x in (q, k, v))
    scores = q @ k.repeat_interleave(groups, dim=1).transpose(-2, -1) * scale
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad.to(dtype).to(wide))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~_visible(layouts, q.device), -math.inf).softmax(dim=-1)
    rounded = weights + (weights.to(dtype).to(wide) - weights).detach()
    return (rounded @ v.repeat_interleave(groups, dim=1)).to(dtype)


def _peak(q: Tensor, k: Tensor, layouts: Sequence[PackedLayout], scale: float) -> float:
    """The largest score that is seen."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-2, -1) * scale
    return float(scores.abs().masked_fill(~_visible(layouts, q.device), 0.0).max())


def _visible(layouts: Sequence[PackedLayout], device: torch.device) -> Tensor:
    return torch.stack([layout.dense_mask() for layout in layouts]).unsqueeze(1).to(device)
