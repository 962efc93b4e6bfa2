"""Causal attention within a sliding window on a CPU, block by block, with a backward pass of its own.

torch's kernel needs a mask for a window and is slower with one, and autograd would make a gradient of every key for
each block that sees it. Here the gradients of keys that several blocks see are added up in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORE_BYTES = 2**21
"""Most bytes of scores multiplied together, so that they stay in the caches; those of one query may exceed them."""
WIDEST_WINDOW = 2048
"""Widest window for which this was measured to be faster than torch's kernel (docs/log.md)."""
BLOCKS = (32, 64)
"""Fewest and most queries in a block: products of fewer are slow, and more are multiplied with too many keys that they
do not see (benchmarks/attention_windows.py)."""


@dataclass(frozen=True)
class Block:
    """Attributes: queries of a run; the keys that any of them sees; what is added to scores, 0 or -inf if unseen."""

    queries: slice
    keys: slice
    mask: Tensor


def _blocks(q: Tensor, k: Tensor, window: int) -> Iterator[Block]:
    """The blocks of a run's last queries, first to last."""
    before, (groups, count) = k.shape[1] - q.shape[2], q.shape[1:3]
    size = _size(groups * window * q.element_size(), window)
    # Of query i of a block and the j-th key from the first one that query 0 sees.
    back = torch.arange(size)[:, None] + (window - 1) - torch.arange(size + window - 1)
    mask = torch.zeros(back.shape, dtype=q.dtype).masked_fill_((back < 0) | (back >= window), -math.inf)
    for start in range(0, count, size):
        stop = min(start + size, count)
        first = max(0, before + start - window + 1)
        lacking = first - (before + start - window + 1)
        seen = mask[: stop - start, lacking : window - 1 + stop - start]
        yield Block(slice(start, stop), slice(first, before + stop), seen.repeat(groups, 1))


class _Windowed(torch.autograd.Function):
    """Of queries ``[B·K, G, n, D]``, keys ``[B·K, s, D]`` and values ``[B·K, s, V]``, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.window, ctx.scale = window, scale
        output = q.new_empty(*q.shape[:-1], v.shape[-1])
        for block in _blocks(q, k, window):
            weights = _weights(q, k, block, scale)
            rows = torch.bmm(weights, v[:, block.keys])
            output[:, :, block.queries] = rows.unflatten(1, (q.shape[1], -1))
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in _blocks(q, k, ctx.window):
            rows, keys = gradient[:, :, block.queries].flatten(1, 2), block.keys
            weights = _weights(q, k, block, ctx.scale)
            dv[:, keys].baddbmm_(weights.mT, rows)
            scores = torch._softmax_backward_data(rows @ v[:, keys].mT, weights, -1, weights.dtype)
            dq[:, :, block.queries] = torch.bmm(scores, k[:, keys]).unflatten(1, (q.shape[1], -1))
            dk[:, keys].baddbmm_(scores.mT, q[:, :, block.queries].flatten(1, 2), alpha=ctx.scale)
        return dq.mul_(ctx.scale), dk, dv, None, None


def _size(bytes_of_query: int, window: int) -> int:
    """Queries in a block, of which each has this many bytes of scores in the heads that share its keys."""
    fewest, most = BLOCKS
    return max(1, min(most, max(fewest, window // 8), SCORE_BYTES // bytes_of_query))


def _weights(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    """``[B·K, G·n, s]``: the softmax of a block's scores."""
    rows = q[:, :, block.queries].flatten(1, 2)
    return torch.baddbmm(block.mask, rows, k[:, block.keys].mT, alpha=scale).softmax(dim=-1)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attention of a run's last queries, each to the last ``window`` keys up to its own.

    Args:
        q: ``[B, H, n, D]``, queries; the last one sees the last key.
        k: ``[B, K, s, D]``, keys, with K a divisor of H and s at least n.
        v: ``[B, K, s, V]``, values.
        window: keys that a query sees, its own included.
        scale: multiplier of q·k.

    Returns:
        ``[B, H, n, V]`` in the queries' dtype.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (kv_heads, heads // kv_heads)).flatten(0, 1)
    keys, values = (x.to(wide).flatten(0, 1) for x in (k, v))
    # As many heads at a time as leave the scores of whole blocks in the caches.
    bytes_of_query = grouped.shape[1] * window * grouped.element_size()
    together = max(1, SCORE_BYTES // (bytes_of_query * _size(bytes_of_query, window)))
    heads_at_a_time = zip(*(x.split(together) for x in (grouped, keys, values)), strict=True)
    output: Tensor = torch.cat(
        [_Windowed.apply(*each, window, scale) for each in heads_at_a_time]  # type: ignore[no-untyped-call]
    )
    whole: Tensor = output.unflatten(0, (q.shape[0], kv_heads)).flatten(1, 2)  # type: ignore[no-untyped-call]
    return whole.to(q.dtype)
