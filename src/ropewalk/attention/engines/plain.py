"""Attention within runs in plain torch, in blocks of queries: any dtype, head dimension, window, soft cap and device.

It is what the other kernels fall back on where torch has no operator of its own, and their oracle in tests. Products
are in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.options import AttentionOptions

# Shapes: N runs of equal length, H query heads, K key/value heads, G = H / K heads that share their keys, n queries and
# s keys of a run, b queries of a block and c keys that any of them sees, D head dim, V value dim.

SCORE_BYTES, CPU_SCORE_BYTES = 256 * 2**20, 4 * 2**20
"""Most bytes of scores of a block of queries; a single query may exceed them. A CPU is twice as fast if the scores stay
in its caches; a GPU needs large products."""
Seen = Callable[[int, int], Tensor]
"""bool ``[N, 1, b, c]``, whether queries from one place to another see the tokens before the second."""
LEAST_BLOCK = 64
"""Fewest queries in a block under a window: products of fewer queries are slow."""


def forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """See :class:`ropewalk.attention.engines.runs.Kernel`."""
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), runs.new_lse(q)
    for group in runs.groups:
        group.queries_of(out)[:], group.lse_of(lse)[:] = forward_of_group(
            group.queries_of(q), group.keys_of(k), group.keys_of(v), options
        )
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`ropewalk.attention.engines.runs.Kernel`."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for group in runs.groups:
        group.queries_of(dq)[:], group.keys_of(dk)[:], group.keys_of(dv)[:] = backward_of_group(
            group.queries_of(grad),
            group.queries_of(q),
            group.keys_of(k),
            group.keys_of(v),
            group.queries_of(out),
            group.lse_of(lse),
            options,
        )
    return dq, dk, dv


def forward_of_group(
    q_NHnD: Tensor, k_NKsD: Tensor, v_NKsV: Tensor, options: AttentionOptions, seen: Seen | None = None
) -> tuple[Tensor, Tensor]:
    """``[N, H, n, V]`` in the dtype of the queries, and the log-sum-exp ``[N, H, n]``.

    Queries see all earlier tokens of their run, or of its window, unless ``seen`` says otherwise.
    """
    groups, wide = q_NHnD.shape[1] // k_NKsD.shape[1], torch.promote_types(q_NHnD.dtype, torch.float32)
    k, v = k_NKsD.to(wide), v_NKsV.to(wide)
    outputs, sums = [], []
    for block in _blocks(q_NHnD, k.shape[2], options.window, seen):
        q = _rows(block.queries_of(q_NHnD).to(wide), groups)
        scores = block.masked(_scores(q, block.keys_of(k), options))
        # Not exp(scores - lse): a large lse is rounded by more than the sum of the weights.
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest).exp_()
        total = weights.sum(-1, keepdim=True)
        outputs.append(_heads(weights.div_(total) @ block.keys_of(v), groups).to(q_NHnD.dtype))
        sums.append(_heads(total.log_().add_(highest), groups).squeeze(-1))
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def backward_of_group(
    grad_NHnV: Tensor,
    q_NHnD: Tensor,
    k_NKsD: Tensor,
    v_NKsV: Tensor,
    out_NHnV: Tensor,
    lse_NHn: Tensor,
    options: AttentionOptions,
    seen: Seen | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; keys and values add up theirs in float32 or wider."""
    groups, wide = q_NHnD.shape[1] // k_NKsD.shape[1], lse_NHn.dtype
    k, v = k_NKsD.to(wide), v_NKsV.to(wide)
    dk, dv, outputs = torch.zeros_like(k), torch.zeros_like(v), []
    scale = options.scale_of(q_NHnD.shape[-1])
    for block in _blocks(q_NHnD, k.shape[2], options.window, seen):
        grad, q, out = (_rows(block.queries_of(x).to(wide), groups) for x in (grad_NHnV, q_NHnD, out_NHnV))
        lse = _rows(block.queries_of(lse_NHn)[..., None], groups)
        scores = _scores(q, block.keys_of(k), options)
        weights = (block.masked(scores) - lse).exp_()
        gradients = weights * (grad @ block.keys_of(v).mT - (grad * out).sum(-1, keepdim=True)) * scale
        if options.softcap is not None:
            gradients *= 1 - (scores / options.softcap).square()
        outputs.append(_heads(gradients @ block.keys_of(k), groups).to(q_NHnD.dtype))
        block.keys_of(dk).add_(gradients.mT @ q)
        block.keys_of(dv).add_(weights.mT @ grad)
    return torch.cat(outputs, 2), dk.to(k_NKsD.dtype), dv.to(v_NKsV.dtype)


@dataclass(frozen=True, eq=False)
class _Block:
    """Some queries of each run, and the keys that any of them sees.

    Attributes:
        queries, keys: indices in the run.
        seen: bool ``[b, c]`` or ``[N, 1, b, c]``, whether a query sees a key.
    """

    queries: slice
    keys: slice
    seen: Tensor

    def queries_of(self, x_NHn: Tensor) -> Tensor:
        return x_NHn[:, :, self.queries]

    def keys_of(self, x_NKs: Tensor) -> Tensor:
        return x_NKs[:, :, self.keys]

    def masked(self, scores: Tensor) -> Tensor:
        """``[N, K, G·b, c]`` scores, -inf where a query does not see a key."""
        groups = scores.shape[2] // self.seen.shape[-2]
        return scores.masked_fill(~torch.cat([self.seen] * groups, -2), -math.inf)


def _blocks(q_NHnD: Tensor, keys: int, window: int | None, given: Seen | None = None) -> Iterator[_Block]:
    """Consecutive queries of runs with this many keys; the last query sees the last key."""
    runs, heads, queries = q_NHnD.shape[:3]
    bound = CPU_SCORE_BYTES if q_NHnD.device.type == "cpu" else SCORE_BYTES
    most = keys if window is None else min(keys, window)
    # Few large blocks, because the mask of each costs as many calls again.
    bound *= 1 if given is None else 4
    size = max(1, bound // (runs * heads * most * torch.float32.itemsize))
    if window is not None and window < keys:
        # A block of `size` queries is multiplied by `size + window` keys, of which each query sees `window`.
        size = min(size, max(LEAST_BLOCK, window // 4))
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        if given is not None:
            yield _Block(slice(start, stop), slice(0, stop), given(start, stop))
            continue
        last = keys - queries + stop
        first = 0 if window is None else max(0, last - (stop - start) - window + 1)
        distance = torch.arange(last - (stop - start), last, device=q_NHnD.device)[:, None] - torch.arange(
            first, last, device=q_NHnD.device
        )
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        yield _Block(slice(start, stop), slice(first, last), seen)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    scores = q @ k.mT * options.scale_of(q.shape[-1])
    return scores if options.softcap is None else options.softcap * torch.tanh(scores / options.softcap)


def _rows(x_NHbD: Tensor, groups: int) -> Tensor:
    """``[N, K, G·b, D]``: the queries of heads that share their keys are rows of one product."""
    grouped: Tensor = x_NHbD.unflatten(1, (-1, groups))  # type: ignore[no-untyped-call]
    return grouped.flatten(2, 3)


def _heads(x_NKrD: Tensor, groups: int) -> Tensor:
    """The inverse of :func:`_rows`."""
    grouped: Tensor = x_NKrD.unflatten(2, (groups, -1))  # type: ignore[no-untyped-call]
    return grouped.flatten(1, 2)
