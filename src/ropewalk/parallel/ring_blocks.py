"""What a rank computes in one round of a ring: plain blocks, for every device and dtype.

A block gives, over the keys of its round alone, the sum of values weighted by exp(score - shift), that of the weights,
and the shift, from which rounds are merged. The backward takes the output and the log-sum-exp (lse) of scores over all
rounds: then each score's weight is its final one, and gradients of rounds add up.

Source: FlashAttention-2, arXiv:2307.08691, section 3.1; Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.parallel.ring_plan import Round, Run

# Shapes: P local places of all rows, N keys in a round's buffer, H query heads, K key/value heads, G = H / K,
# n queries and m keys of a block, D head dim, V value dim.

SCORE_BYTES, CPU_SCORE_BYTES = 256 * 2**20, 4 * 2**20
"""Bound on the scores of a plain block, which are written out; a single query's may exceed it. On a CPU they are
twice as fast where they stay in its caches; a GPU wants large products."""

Where = slice | Tensor
"""Local places: a range, or int64 indices none of which repeats."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: what partial results are kept and added up in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Scoring:
    """Attributes: multiplier of q·k; soft cap of the scores (Gemma 2), None for none."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True, eq=False)
class Final:
    """What a backward needs of the whole attention, all rounds together.

    Attributes:
        out_PHV: output in the dtype of the inputs.
        lse_PH: log-sum-exp of all scores of a query, wide.
        grad_PHV: gradient of the output.
        delta_PH: sum of output times gradient over V, wide.
    """

    out_PHV: Tensor
    lse_PH: Tensor
    grad_PHV: Tensor
    delta_PH: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Wide buffers that a backward adds to: of all local queries, and of the round's keys and values."""

    q_PHD: Tensor
    k_NKD: Tensor
    v_NKV: Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Attention of some queries over some keys, not yet divided by the sum of weights.

    Attributes:
        where: the queries' local places; no place stands in two parts of a round.
        out_nHV: sum of exp(score - shift) times value.
        shift_nH: the largest score, or the lse; what keeps weights from overflowing.
        total_nH: sum of exp(score - shift).
    """

    where: Where
    out_nHV: Tensor
    shift_nH: Tensor
    total_nH: Tensor


class Blocks(Protocol):
    """One round's attention. Queries that see no key in the round appear nowhere, and so cannot give NaN."""

    def forward(
        self, q_PHD: Tensor, k_NKD: Tensor, v_NKV: Tensor, each: Round, scoring: Scoring
    ) -> Iterator[Part]:
        """The round's parts."""
        ...

    def backward(
        self,
        q_PHD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        final: Final,
        each: Round,
        scoring: Scoring,
        into: Gradients,
    ) -> None:
        """Add the round's gradients to buffers, in a fixed order."""
        ...


def blocks_of(engine: str) -> Blocks:
    """The blocks of ``varlen`` or ``segments``."""
    if engine == "varlen":
        from ropewalk.parallel.ring_varlen import VarlenBlocks

        return VarlenBlocks()
    return PlainBlocks()


class PlainBlocks:
    """Matrix products in float32 or wider, a bounded number of queries at a time."""

    def forward(
        self, q_PHD: Tensor, k_NKD: Tensor, v_NKV: Tensor, each: Round, scoring: Scoring
    ) -> Iterator[Part]:
        for run in each.runs:
            k_KmD, v_KmV = _keys(k_NKD, run), _keys(v_NKV, run)
            for places, keys in _pieces(run, each.causal, q_PHD.shape[1], k_KmD):
                scores, _ = _scores(q_PHD[places], k_KmD[:, :keys], each.causal, scoring)
                # Divided at the end by the sum of these very weights: a rounded lse would be an error of each.
                shift = scores.amax(dim=-1, keepdim=True)
                weights = (scores - shift).exp()
                found = (weights @ v_KmV[:, :keys], shift, weights.sum(dim=-1, keepdim=True))
                out, shift, total = (_unfold(x, q_PHD.shape[1]) for x in found)
                yield Part(places, out, shift.squeeze(-1), total.squeeze(-1))

    def backward(
        self,
        q_PHD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        final: Final,
        each: Round,
        scoring: Scoring,
        into: Gradients,
    ) -> None:
        heads, kv_heads = q_PHD.shape[1], k_NKD.shape[1]
        for run in each.runs:
            k_KmD, v_KmV = _keys(k_NKD, run), _keys(v_NKV, run)
            grad_k, grad_v = torch.zeros_like(k_KmD), torch.zeros_like(v_KmV)
            for places, keys in _pieces(run, each.causal, heads, k_KmD):
                k, v = k_KmD[:, :keys], v_KmV[:, :keys]
                scores, slope = _scores(q_PHD[places], k, each.causal, scoring)
                lse, delta = (
                    _fold(x[places].unsqueeze(-1), kv_heads) for x in (final.lse_PH, final.delta_PH)
                )
                grad = _fold(final.grad_PHV[places], kv_heads)
                weights = (scores - lse).exp()
                grad_v[:, :keys] += weights.transpose(1, 2) @ grad
                grad_scores = weights * (grad @ v.transpose(1, 2) - delta) * scoring.scale
                if slope is not None:
                    grad_scores *= slope
                into.q_PHD[places] += _unfold(grad_scores @ k, heads)
                grad_k[:, :keys] += grad_scores.transpose(1, 2) @ _fold(q_PHD[places], kv_heads)
            _add_keys(into.k_NKD, grad_k, run)
            _add_keys(into.v_NKV, grad_v, run)


def _pieces(run: Run, causal: bool, heads: int, k_KmD: Tensor) -> Iterator[tuple[slice, int]]:
    """A run's queries, so many at a time that their scores stay under the bound; and how many keys they see."""
    start, end = run.queries
    bound = CPU_SCORE_BYTES if k_KmD.device.type == "cpu" else SCORE_BYTES
    size = max(1, bound // (heads * run.num_keys * k_KmD.dtype.itemsize))
    for first in range(start, end, size):
        last = min(first + size, end)
        yield slice(first, last), run.num_keys - (end - last if causal else 0)


def _scores(q_nHD: Tensor, k_KmD: Tensor, causal: bool, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """``[K, G·n, m]``, -inf where the last query's key is the last one; and the slope of the soft cap, if any."""
    scores = _fold(q_nHD, k_KmD.shape[0]) @ k_KmD.transpose(1, 2) * scoring.scale
    slope = None
    if scoring.softcap is not None:
        capped = torch.tanh(scores / scoring.softcap)
        scores, slope = capped * scoring.softcap, 1 - capped * capped
    if causal:
        n, m = q_nHD.shape[0], k_KmD.shape[1]
        hidden = torch.ones(n, m, dtype=torch.bool, device=scores.device).triu(m - n + 1)
        scores = scores.unflatten(1, (-1, n)).masked_fill_(hidden, -math.inf).flatten(1, 2)
    return scores, slope


def _fold(x_nHD: Tensor, kv_heads: int) -> Tensor:
    """``[n, H, D]`` to ``[K, G·n, D]``, wide: query heads of one key/value head stand one after the other."""
    n, heads, dim = x_nHD.shape
    x_nKGD = x_nHD.to(wide_dtype(x_nHD.dtype)).reshape(n, kv_heads, heads // kv_heads, dim)
    return x_nKGD.permute(1, 2, 0, 3).flatten(1, 2)


def _unfold(x_KRD: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`_fold`: ``[K, G·n, D]`` to ``[n, H, D]``."""
    kv_heads, rows, dim = x_KRD.shape
    x_KGnD = x_KRD.view(kv_heads, heads // kv_heads, rows * kv_heads // heads, dim)
    return x_KGnD.permute(2, 0, 1, 3).flatten(1, 2)


def _keys(x_NKD: Tensor, run: Run) -> Tensor:
    """``[K, m, D]``, wide: the keys of a run."""
    x_mKD = torch.cat([x_NKD[start:end] for start, end in run.keys])
    return x_mKD.to(wide_dtype(x_NKD.dtype)).transpose(0, 1).contiguous()


def _add_keys(into_NKD: Tensor, grad_KmD: Tensor, run: Run) -> None:
    sizes = [end - start for start, end in run.keys]
    for (start, end), grad in zip(run.keys, grad_KmD.transpose(0, 1).split(sizes), strict=True):
        into_NKD[start:end] += grad
