"""Causal attention within a sliding window on a CPU, block by block, with a backward pass of its own.

torch's kernel needs a mask for a window and is slower with one, and autograd would make a gradient of every key for
each block that sees it. Here the gradients of keys that several blocks see are added up in place. Scores are to base
2, because torch takes powers of 2 in a quarter of the time that powers of e take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
class Piece:
    """Successive queries of a row and the keys that they may see.

    Attributes:
        queries: of the row.
        keys: of the row. The last query sees the last key.
        lead: further keys of the row, in front of the others: the anchor of several documents.
    """

    queries: range
    keys: range
    lead: range = range(0)

    def split(self, window: int) -> Iterator[Piece]:
        """The queries whose windows begin in the lead, and the others, for which no keys are copied."""
        reached = len(self.queries) - len(self.keys) + window
        if self.lead and reached > 0:
            first = self.queries[:reached]
            yield Piece(first, self.keys[: len(self.keys) - len(self.queries) + len(first)], self.lead)
        else:
            reached = 0
        if reached < len(self.queries):
            yield Piece(self.queries[reached:], self.keys)

    def queries_of(self, x: Tensor, groups: int) -> Tensor:
        """``[N, n·G, D]``, a view of ``[N, Q·G, D]``."""
        return x[:, self.queries.start * groups : self.queries.stop * groups]

    def keys_of(self, x: Tensor) -> Tensor:
        """``[N, s, D]`` of ``[N, S, D]``: a view, or a copy behind the lead."""
        own = _tokens(x, self.keys)
        return torch.cat([_tokens(x, self.lead), own], dim=1) if self.lead else own


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

    def keys_of(self, x: Tensor) -> Tensor:
        """``[heads·count, keys, D]``, a view of ``[N, s, D]`` in which neighbouring blocks overlap."""
        if self.count == 1:
            return x[self.heads, self.keys]
        strides = (self.size * x.stride(1), x.stride(1), x.stride(2))
        start = x.storage_offset() + self.heads.start * x.stride(0) + self.keys.start * x.stride(1)
        return x.as_strided((self.count, self.keys.stop - self.keys.start, x.shape[2]), strides, start)


def _slabs(heads: int, piece: Piece, groups: int, window: int, mask: Tensor) -> Iterator[Slab]:
    """Every block of a piece's queries once, given the mask of a whole block. The first block may be shorter."""
    length, count, size = len(piece.lead) + len(piece.keys), len(piece.queries), mask.shape[1] - window
    whole = mask.repeat_interleave(groups, 0)
    together = max(1, SCORE_BYTES // whole.nbytes)
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


def _mask(groups: int, window: int, dtype: torch.dtype) -> Tensor:
    """Of a block of ``size`` queries and the ``size + window`` keys up to its last: 0, or -inf where one is not seen.

    The first key is seen by none; it is there because products of even numbers of keys are faster.
    """
    size = _size(groups * window * dtype.itemsize, groups, window)
    back = torch.arange(size)[:, None] + window - torch.arange(size + window)
    return torch.zeros(back.shape, dtype=dtype).masked_fill_((back < 0) | (back >= window), -math.inf)


class _Windowed(torch.autograd.Function):
    """Of queries ``[N, n·G, D]``, keys ``[N, s, D]`` and values ``[N, s, V]``, in float32 or wider.

    All documents of a row at once, because to split a row and to join the results copies as much as a narrow window
    reads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pieces: Sequence[tuple[Piece, Sequence[Slab]]],
        groups: int,
        window: int,
        scale: float,
    ) -> Tensor:
        output, log2_sums = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 1)
        kept = [] if window <= WIDEST_KEPT else [log2_sums]
        trained = any(ctx.needs_input_grad)
        for piece, slabs in pieces:
            q_own, output_own, sums_own = (piece.queries_of(x, groups) for x in (q, output, log2_sums))
            k_own, v_own = piece.keys_of(k), piece.keys_of(v)
            for slab in slabs:
                weights = _scores(q_own, k_own, slab, scale)
                highest = weights.amax(-1, keepdim=True)
                sums = weights.sub_(highest).exp2_().sum(-1, keepdim=True)
                torch.bmm(weights.div_(sums), slab.keys_of(v_own), out=slab.rows_of(output_own))
                if window > WIDEST_KEPT:
                    torch.add(sums.log2_(), highest, out=slab.rows_of(sums_own))
                elif trained:
                    kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.pieces, ctx.groups, ctx.window, ctx.scale = pieces, groups, window, scale
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        each = iter(kept)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        # Keys before this one have a gradient already, to which later pieces add theirs.
        done = 0
        for piece, slabs in ctx.pieces:
            q_own, dq_own, gradient_own = (piece.queries_of(x, ctx.groups) for x in (q, dq, gradient))
            k_own, v_own = piece.keys_of(k), piece.keys_of(v)
            # Keys in front of which others stand are a copy, and so are their gradients.
            dk_own, dv_own = (
                torch.empty_like(x) if piece.lead else _tokens(dx, piece.keys)
                for x, dx in ((k_own, dk), (v_own, dv))
            )
            # The first slab that sees a key sets its gradients to 0, shortly before it adds to them, while they are
            # cached.
            before = k_own.shape[1] - q_own.shape[1] // ctx.groups
            begun = slice(0 if piece.lead else max(0, done - piece.keys.start), before)
            dk_own[:, begun] = dv_own[:, begun] = 0
            for slab in slabs:
                own = slice(before + slab.queries.start, before + slab.queries.stop)
                dk_own[slab.heads, own] = dv_own[slab.heads, own] = 0
                queries, rows, keys = slab.rows_of(q_own), slab.rows_of(gradient_own), slab.keys_of(k_own)
                if ctx.window <= WIDEST_KEPT:
                    weights = next(each)
                else:
                    sums = slab.rows_of(piece.queries_of(kept[0], ctx.groups))
                    weights = _scores(q_own, k_own, slab, ctx.scale).sub_(sums).exp2_()
                scores = torch.bmm(rows, slab.keys_of(v_own).mT)
                torch._softmax_backward_data(scores, weights, -1, weights.dtype, grad_input=scores)
                slab.rows_of(dq_own).baddbmm_(scores, keys, beta=0, alpha=ctx.scale)
                # Products are added in place to keys that no two of them share.
                weights, scores = weights.mT, scores.mT
                dk_blocks, dv_blocks = slab.keys_of(dk_own), slab.keys_of(dv_own)
                every = min(slab.apart, slab.count)
                for first in range(every):
                    some = slice(first, None, every)
                    dv_blocks[some].baddbmm_(weights[some], rows[some])
                    dk_blocks[some].baddbmm_(scores[some], queries[some], alpha=ctx.scale)
            if piece.lead:
                for dx, dx_own in ((dk, dk_own), (dv, dv_own)):
                    lead, rest = dx_own.split([len(piece.lead), len(piece.keys)], dim=1)
                    _tokens(dx, piece.lead).add_(lead)
                    _tokens(dx, piece.keys).copy_(rest)
            done = piece.keys.stop
        return dq, dk, dv, None, None, None, None


def _tokens(x: Tensor, tokens: range) -> Tensor:
    """A view of ``[N, S, D]``."""
    return x[:, tokens.start : tokens.stop]


def _size(bytes_of_query: int, groups: int, window: int) -> int:
    """Queries in a block, of which each has this many bytes of scores in the heads that share its keys."""
    fewest, most = BLOCKS
    # The rows of heads that share their keys are in one product.
    fewest = max(-(-fewest // groups), fewest // 2)
    return max(1, min(most, max(fewest, window // 8), SCORE_BYTES // bytes_of_query))


def _scores(q: Tensor, k: Tensor, slab: Slab, scale: float) -> Tensor:
    """``[heads·count, size·G, keys]``: scores to base 2, -inf where a query does not see a key."""
    return torch.baddbmm(slab.mask, slab.rows_of(q), slab.keys_of(k).mT, alpha=scale * LOG2_E)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], window: int, scale: float
) -> Tensor:
    """Attention of a row's pieces, of each query to the last ``window`` keys up to its own.

    Args:
        q: ``[B, H, Q, D]``, queries.
        k: ``[B, K, S, D]``, keys, with K a divisor of H.
        v: ``[B, K, S, V]``, values.
        pieces: in the order of their keys, each query and each key in at least one.
        window: keys that a query sees, its own included.
        scale: multiplier of q·k.

    Returns:
        ``[B, H, Q, V]`` in the queries' dtype.
    """
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    # The queries of heads that share their keys are rows of one product, those of a token next to each other.
    rows = q.to(wide).unflatten(1, (kv_heads, groups)).transpose(2, 3).flatten(2, 3).flatten(0, 1)  # type: ignore[no-untyped-call]
    keys, values = (x.to(wide).flatten(0, 1) for x in (k, v))
    mask = _mask(groups, window, wide)
    parts = [
        (part, tuple(_slabs(keys.shape[0], part, groups, window, mask)))
        for piece in pieces
        for part in piece.split(window)
    ]
    output: Tensor = _Windowed.apply(rows, keys, values, parts, groups, window, scale)  # type: ignore[no-untyped-call]
    by_head: Tensor = output.unflatten(1, (-1, groups)).unflatten(0, (-1, kv_heads)).transpose(2, 3)  # type: ignore[no-untyped-call]
    return by_head.flatten(1, 2).to(q.dtype)
