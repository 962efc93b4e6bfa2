"""Causal attention within a wide sliding window on a CPU, by torch's own causal kernel, without a mask.

Cut a run into blocks as long as the window. A query then sees its own block up to itself, and of the block before only
the keys at later places than its own. Both are triangles, and the second is causal attention too if queries and keys
are read backwards. The two are joined by their log-sum-exp. Nothing outside of the window is computed but what the
kernel's tiles overlap at the edges of triangles, which costs narrow windows more than :mod:`.windows` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST_WINDOW = 1280
"""Narrowest window for which this was measured to be faster than :mod:`.windows` (docs/log.md)."""


@dataclass(frozen=True)
class Span:
    """Successive blocks of a run.

    Attributes:
        start, stop: of the run's tokens, a multiple of ``size`` apart.
        size: tokens of a block.
    """

    start: int
    stop: int
    size: int

    def blocks(self, x: Tensor) -> Tensor:
        """``[B·n, H, size, D]``, a view of ``[B, H, L, D]`` if B or n is 1, as for contiguous tensors."""
        each: Tensor = x[:, :, self.start : self.stop].unflatten(2, (-1, self.size))  # type: ignore[no-untyped-call]
        return each.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Cut:
    """Blocks of a run of ``length`` tokens. A block that is shorter than the window comes first.

    Attributes:
        own: blocks whose queries see the keys of the same block.
        before: blocks of queries, and for each the block of keys before it.
    """

    own: tuple[Span, ...]
    before: tuple[tuple[Span, Span], ...]

    @classmethod
    def of(cls, length: int, window: int) -> Cut:
        rest = length % window
        own, before = [Span(rest, length, window)], []
        if rest:
            own.insert(0, Span(0, rest, rest))
            before.append((Span(rest, rest + window, window), Span(0, rest, rest)))
        if length - rest > window:
            before.append((Span(rest + window, length, window), Span(rest, length - window, window)))
        return cls(tuple(own), tuple(before))


class _Wide(torch.autograd.Function):
    """One row at a time (``B = 1``), so that blocks of contiguous tensors are views."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        cut = Cut.of(q.shape[2], window)
        output, lse = torch.empty_like(q), q.new_empty(*q.shape[:-1], 1)
        for span in cut.own:
            o, s = _causal(scale, *(span.blocks(x) for x in (q, k, v)))
            span.blocks(output).copy_(o)
            span.blocks(lse).copy_(s)
        for queries, keys in cut.before:
            seen = (_backwards_keys(keys, x, window) for x in (k, v))
            o, s = _causal(scale, _backwards_queries(queries, q), *seen)
            o, s = o.flip(2), s.flip(2)
            # All but the last query of a block, which sees nothing of the block before.
            own, own_lse = (queries.blocks(x)[:, :, :-1] for x in (output, lse))
            own.lerp_(o, torch.sigmoid(s - own_lse))
            own_lse.copy_(torch.logaddexp(own_lse, s))
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.cut, ctx.window, ctx.scale = cut, window, scale
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        # With the output and the log-sum-exp of both triangles, each one's gradients are its part of the whole.
        for span in ctx.cut.own:
            found = _causal_backward(ctx.scale, *(span.blocks(x) for x in (gradient, q, k, v, output, lse)))
            for dx, part in zip((dq, dk, dv), found, strict=True):
                span.blocks(dx).copy_(part)
        for queries, keys in ctx.cut.before:
            g, q_own, o, s = (_backwards_queries(queries, x) for x in (gradient, q, output, lse))
            k_own, v_own = (_backwards_keys(keys, x, ctx.window) for x in (k, v))
            dq_part, dk_part, dv_part = _causal_backward(ctx.scale, g, q_own, k_own, v_own, o, s)
            queries.blocks(dq)[:, :, :-1].add_(dq_part.flip(2))
            skipped = int(keys.size == ctx.window)
            keys.blocks(dk)[:, :, skipped:].add_(dk_part.flip(2))
            keys.blocks(dv)[:, :, skipped:].add_(dv_part.flip(2))
        return dq, dk, dv, None, None


def _backwards_queries(span: Span, x: Tensor) -> Tensor:
    return span.blocks(x)[:, :, :-1].flip(2)


def _backwards_keys(span: Span, x: Tensor, window: int) -> Tensor:
    """The first key of a whole block is outside of every window of the next block."""
    return span.blocks(x)[:, :, int(span.size == window) :].flip(2)


def _causal(scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp ``[..., 1]``; query and key 0 are aligned. The only use of torch's private operators."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return output, lse[..., None]


def _causal_backward(
    scale: float, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, output, lse[..., 0], 0.0, True, scale=scale
        )
    )
    return found


def wide_windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attention within one run of each query to the last ``window`` keys up to its own.

    Args:
        q: ``[B, H, L, D]``, queries, on the CPU.
        k, v: ``[B, K, L, D]``, keys and values, with K a divisor of H.
        window: keys that a query sees, its own included; from 2 to L - 1.
        scale: multiplier of q·k.

    Returns:
        ``[B, H, L, D]`` in the queries' dtype; sums are made in float32 or wider.
    """
    assert 2 <= window < q.shape[2]
    wide = (x.to(torch.promote_types(x.dtype, torch.float32)).contiguous().split(1) for x in (q, k, v))
    rows = [_Wide.apply(*row, window, scale) for row in zip(*wide, strict=True)]  # type: ignore[no-untyped-call]
    return torch.cat(rows).to(q.dtype)
