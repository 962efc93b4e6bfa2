"""Causal attention within a sliding window on a CPU, block by block, with a backward pass of its own.

torch's kernel needs a mask for a window and is slower with one, and autograd would make a gradient of every key for
each block that sees it. Here the gradients of keys that several blocks see are added up in place. Scores are to base
2, because torch takes powers of 2 in a quarter of the time that powers of e take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORE_BYTES = 2**20
"""Most bytes of scores multiplied together, so that they stay in the caches; those of one query may exceed them."""
WIDEST_WINDOW = 2048
"""Widest window for which this was measured to be faster than torch's kernel (docs/log.md)."""
BLOCKS = (32, 64)
"""Fewest and most queries in a block: products of fewer are slow, and more are multiplied with too many keys that they
do not see (benchmarks/attention_windows.py)."""
WIDEST_KEPT = 128
"""Widest window whose weights are kept for the backward pass: ``size + window`` numbers a query and head, 640 bytes in
float32 in blocks of 32. That saves one of seven products; wider windows have less to gain and more to keep."""
LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Slab:
    """Blocks of the same shape that are multiplied together: one of several heads, or successive ones of one head.

    Attributes:
        heads: of the keys.
        count: number of successive blocks; 1 where there are several heads.
        queries: of all the blocks.
        keys: that the first block sees; each later one sees as many, further on by the queries of a block.
        mask: ``[size·G, keys]``, what is added to the scores of a block: 0, or -inf where a query does not see a key.
    """

    heads: slice
    count: int
    queries: slice
    keys: slice
    mask: Tensor

    @property
    def size(self) -> int:
        """Queries in a block."""
        return len(range(self.queries.start, self.queries.stop)) // self.count

    @property
    def apart(self) -> int:
        """How many blocks further on the first one is that shares no key with a block."""
        return -(-len(range(self.keys.start, self.keys.stop)) // self.size)

    def rows_of(self, x: Tensor) -> Tensor:
        """``[heads·count, size·G, D]``, a view of ``[N, n·G, D]``."""
        groups = len(self.mask) // self.size
        rows = x[self.heads, self.queries.start * groups : self.queries.stop * groups]
        return rows if self.count == 1 else rows.view(self.count, -1, x.shape[2])

    def keys_of(self, x: Tensor, first: int = 0, every: int = 1) -> Tensor:
        """``[heads·count, keys, D]``, a view of ``[N, s, D]`` that may overlap; or of some of the blocks."""
        if self.count == 1:
            return x[self.heads, self.keys]
        blocks = len(range(first, self.count, every))
        strides = (every * self.size * x.stride(1), x.stride(1), x.stride(2))
        key = self.keys.start + first * self.size
        start = x.storage_offset() + self.heads.start * x.stride(0) + key * x.stride(1)
        return x.as_strided((blocks, self.keys.stop - self.keys.start, x.shape[2]), strides, start)


def _slabs(q: Tensor, k: Tensor, groups: int, window: int) -> Iterator[Slab]:
    """Every block of a run's last queries once. The first block may be shorter than the others."""
    heads, length, count = *k.shape[:2], q.shape[1] // groups
    size = _size(groups * window * q.element_size(), groups, window)
    # Of query i of a block and the j-th key from the one that is no longer seen by query 0: `size + window` of them, of
    # which the first is seen by none, because products of even numbers of keys are faster.
    back = torch.arange(size)[:, None] + window - torch.arange(size + window)
    mask = torch.zeros(back.shape, dtype=q.dtype).masked_fill_((back < 0) | (back >= window), -math.inf)
    whole = mask.repeat_interleave(groups, 0)
    together = max(1, SCORE_BYTES // (whole.numel() * q.element_size()))
    lacking = -count % size
    # In queries, with those that the first block lacks; the first of these stands at this place of the keys.
    place, end = length - count - lacking, count + lacking
    # Blocks that reach back to the first key, or lack queries, differ in shape from all others.
    alone = min(end, max(size if lacking else 0, -((place - window) // size) * size))
    for start in range(0, alone, size):
        queries = slice(max(0, start - lacking), start + size - lacking)
        keys = slice(max(0, place + start - window), place + start + size)
        corner = mask[size - queries.stop + queries.start :, size + window - keys.stop + keys.start :]
        seen = corner.repeat_interleave(groups, 0)
        for head in range(0, heads, together):
            yield Slab(slice(head, min(head + together, heads)), 1, queries, keys, seen)
    for head in range(heads):
        for start in range(alone, end, together * size):
            stop = min(start + together * size, end)
            queries = slice(start - lacking, stop - lacking)
            keys = slice(place + start - window, place + start + size)
            yield Slab(slice(head, head + 1), (stop - start) // size, queries, keys, whole)


class _Windowed(torch.autograd.Function):
    """Of queries ``[N, n·G, D]``, keys ``[N, s, D]`` and values ``[N, s, V]``, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: int, window: int, scale: float) -> Tensor:
        output, log2_sums = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 1)
        kept = [] if window <= WIDEST_KEPT else [log2_sums]
        trained = any(ctx.needs_input_grad)
        for slab in _slabs(q, k, groups, window):
            weights = _scores(q, k, slab, scale)
            highest = weights.amax(-1, keepdim=True)
            sums = weights.sub_(highest).exp2_().sum(-1, keepdim=True)
            torch.bmm(weights.div_(sums), slab.keys_of(v), out=slab.rows_of(output))
            if window > WIDEST_KEPT:
                torch.add(sums.log2_(), highest, out=slab.rows_of(log2_sums))
            elif trained:
                kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.groups, ctx.window, ctx.scale = groups, window, scale
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        # The first slab that sees a key sets its gradients to 0, shortly before it adds to them, while they are cached.
        before = k.shape[1] - q.shape[1] // ctx.groups
        dk[:, :before] = dv[:, :before] = 0
        for number, slab in enumerate(_slabs(q, k, ctx.groups, ctx.window)):
            own = slice(before + slab.queries.start, before + slab.queries.stop)
            dk[slab.heads, own] = dv[slab.heads, own] = 0
            queries, rows, keys = slab.rows_of(q), slab.rows_of(gradient), slab.keys_of(k)
            if ctx.window <= WIDEST_KEPT:
                weights = kept[number]
            else:
                weights = _scores(q, k, slab, ctx.scale).sub_(slab.rows_of(kept[0])).exp2_()
            scores = torch.bmm(rows, slab.keys_of(v).mT)
            torch._softmax_backward_data(scores, weights, -1, weights.dtype, grad_input=scores)
            slab.rows_of(dq).baddbmm_(scores, keys, beta=0, alpha=ctx.scale)
            # Products are added in place to keys that no two of them share.
            every = min(slab.apart, slab.count)
            weights, scores = weights.mT, scores.mT
            for first in range(every):
                some = slice(first, None, every)
                slab.keys_of(dv, first, every).baddbmm_(weights[some], rows[some])
                slab.keys_of(dk, first, every).baddbmm_(scores[some], queries[some], alpha=ctx.scale)
        return dq, dk, dv, None, None, None


def _size(bytes_of_query: int, groups: int, window: int) -> int:
    """Queries in a block, of which each has this many bytes of scores in the heads that share its keys."""
    fewest, most = BLOCKS
    # The rows of heads that share their keys are in one product.
    fewest = max(-(-fewest // groups), fewest // 2)
    return max(1, min(most, max(fewest, window // 8), SCORE_BYTES // bytes_of_query))


def _scores(q: Tensor, k: Tensor, slab: Slab, scale: float) -> Tensor:
    """``[heads·count, size·G, keys]``: scores to base 2, -inf where a query does not see a key."""
    return torch.baddbmm(slab.mask, slab.rows_of(q), slab.keys_of(k).mT, alpha=scale * LOG2_E)


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
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    # The queries of heads that share their keys are rows of one product, those of a token next to each other.
    rows = q.to(wide).unflatten(1, (kv_heads, groups)).transpose(2, 3).flatten(2, 3).flatten(0, 1)  # type: ignore[no-untyped-call]
    keys, values = (x.to(wide).flatten(0, 1) for x in (k, v))
    output: Tensor = _Windowed.apply(rows, keys, values, groups, window, scale)  # type: ignore[no-untyped-call]
    by_head: Tensor = output.unflatten(1, (-1, groups)).unflatten(0, (-1, kv_heads)).transpose(2, 3)  # type: ignore[no-untyped-call]
    return by_head.flatten(1, 2).to(q.dtype)
