"""Merge keys into attention that was computed without them, by the log-sum-exp of its scores.

Documents attend to their own tokens in a kernel. What else their queries see joins afterwards: the keys of the anchor,
and a head's sink, which is a key with a score and without a value. Nothing is copied and no kernel knows of it.

Forward, with the scores ``s_ij`` of the extra keys: ``m_i = logsumexp(lse_i, s_i·)``, ``p_ij = exp(s_ij - m_i)``,
``out_i = exp(lse_i - m_i) * out_i + sum_j p_ij v_j``. Backward, with ``delta_i = grad_i · out_i``: the kernel's
backward with the merged ``(out, m)`` gives exactly the part of the kernel's own keys, and
``ds_ij = p_ij (grad_i · v_j - delta_i)`` that of the extra ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.options import AttentionOptions
from ropewalk.fused import fused

# Shapes: B rows, T queries of a row, Q = B·T, A extra keys of a row, H query heads, K key/value heads, G = H / K heads
# that share their keys, D head dim, V value dim. All sums are float32 or wider.

FEW = 4
"""Up to as many extra keys are multiplied one by one, which a compiler fuses with what surrounds it."""
MOST_SCORES = 2**27
"""Most scores of extra keys at a time: 512 MiB in float32."""


@dataclass(frozen=True, eq=False)
class ExtraKeys:
    """Keys that the queries of each row see besides those of their run.

    Attributes:
        k: ``[B, A, K, D]``.
        v: ``[B, A, K, V]``.
        seen: bool ``[B, T, A]``, whether a query sees a key.
    """

    k: Tensor
    v: Tensor
    seen: Tensor


@dataclass(frozen=True, eq=False)
class ExtraGradients:
    """Gradients of extra keys and sinks in float32 or wider; None for what there is not.

    Attributes:
        k: ``[B, A, K, D]``.
        v: ``[B, A, K, V]``.
        sinks: ``[H]``.
    """

    k: Tensor | None
    v: Tensor | None
    sinks: Tensor | None


def merge(
    out_QHV: Tensor, lse_HQ: Tensor, q_QHD: Tensor, extra: ExtraKeys | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention over a kernel's keys, extra keys and sinks.

    Args:
        out_QHV, lse_HQ: output and log-sum-exp of the kernel.
        q_QHD: queries, row after row.
        extra: the extra keys; None for none.
        options: scale, soft cap and sinks of the layer.

    Returns:
        Output ``[Q, H, V]`` in its dtype, and the log-sum-exp of all scores ``[H, Q]``.
    """
    if extra is None and options.sinks is None:
        return out_QHV, lse_HQ
    scale = options.scale_of(q_QHD.shape[-1])
    parts = [
        _merged(out, lse, q, keys, values, seen, options.sinks, scale, options.softcap)
        for (out, q), lse, (keys, values, seen) in _blocks(extra, (out_QHV, q_QHD), lse_HQ)
    ]
    out, m = (_joined(each, dim) for each, dim in zip(zip(*parts, strict=True), (1, 2), strict=True))
    return out.flatten(0, 1), m.flatten(1)


def merge_backward(
    grad_QHV: Tensor,
    q_QHD: Tensor,
    out_QHV: Tensor,
    m_HQ: Tensor,
    dq_QHD: Tensor,
    extra: ExtraKeys | None,
    options: AttentionOptions,
) -> tuple[Tensor, ExtraGradients]:
    """What extra keys and sinks add to the gradients of a kernel that ran backward with the merged output and lse.

    Args:
        grad_QHV: gradient of the output.
        q_QHD, extra, options: as for :func:`merge`.
        out_QHV, m_HQ: the results of :func:`merge`.
        dq_QHD: the kernel's gradient of the queries.

    Returns:
        The gradient of the queries in its dtype; the gradients of extra keys and sinks.
    """
    if extra is None and options.sinks is None:
        return dq_QHD, ExtraGradients(None, None, None)
    scale = options.scale_of(q_QHD.shape[-1])
    parts = [
        _merged_backward(grad, q, out, dq, m, keys, values, seen, options.sinks, scale, options.softcap)
        for (grad, q, out, dq), m, (keys, values, seen) in _blocks(
            extra, (grad_QHV, q_QHD, out_QHV, dq_QHD), m_HQ
        )
    ]
    dq, *others = zip(*parts, strict=True)
    # Blocks of queries see the same keys.
    dk, dv, dsinks = (None if each[0] is None else sum(each[1:], each[0]) for each in others)
    return _joined(dq, 1).flatten(0, 1), ExtraGradients(dk, dv, dsinks)


def _blocks(
    extra: ExtraKeys | None, by_token: Sequence[Tensor], by_head: Tensor
) -> Iterator[tuple[list[Tensor], Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]]:
    """``[B, T, ...]`` of tensors of tokens, ``[H, B, T]`` of one of heads, in blocks of T with few enough scores."""
    batch = 1 if extra is None else len(extra.k)
    tokens = [x.unflatten(0, (batch, -1)) for x in by_token]  # type: ignore[no-untyped-call]
    heads: Tensor = by_head.unflatten(1, (batch, -1))  # type: ignore[no-untyped-call]
    if extra is None:
        yield tokens, heads, (None, None, None)
        return
    block = max(1, MOST_SCORES // (batch * len(by_head) * extra.k.shape[1]))
    parts = zip(*(x.split(block, 1) for x in (*tokens, extra.seen)), heads.split(block, 2), strict=True)
    for *own, seen, lse in parts:
        yield own, lse, (extra.k, extra.v, seen)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


@fused
def _merged(
    out_BTHV: Tensor,
    lse_HBT: Tensor,
    q_BTHD: Tensor,
    k_BAKD: Tensor | None,
    v_BAKV: Tensor | None,
    seen_BTA: Tensor | None,
    sinks_H: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    wide = lse_HBT.dtype
    lse = lse_HBT.permute(1, 2, 0).contiguous()
    m = lse
    if k_BAKD is not None:
        assert v_BAKV is not None
        assert seen_BTA is not None
        scores = _scores(q_BTHD, k_BAKD, scale, softcap, wide)
        scores = scores.masked_fill(~seen_BTA[:, :, None], -math.inf)
        m = torch.logaddexp(m, scores.logsumexp(-1))
    if sinks_H is not None:
        m = torch.logaddexp(m, sinks_H.to(wide))
    out = out_BTHV.to(wide) * (lse - m).exp()[..., None]
    if k_BAKD is not None and v_BAKV is not None:
        out = out + _weighted((scores - m[..., None]).exp(), v_BAKV.to(wide))
    return out.to(out_BTHV.dtype), m.permute(2, 0, 1).contiguous()


@fused
def _merged_backward(
    grad_BTHV: Tensor,
    q_BTHD: Tensor,
    out_BTHV: Tensor,
    dq_BTHD: Tensor,
    m_HBT: Tensor,
    k_BAKD: Tensor | None,
    v_BAKV: Tensor | None,
    seen_BTA: Tensor | None,
    sinks_H: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    wide = m_HBT.dtype
    m, grad = m_HBT.permute(1, 2, 0).contiguous(), grad_BTHV.to(wide)
    delta = (grad * out_BTHV.to(wide)).sum(-1)
    dq, dk, dv, dsinks = dq_BTHD, None, None, None
    if k_BAKD is not None:
        assert v_BAKV is not None
        assert seen_BTA is not None
        scores = _scores(q_BTHD, k_BAKD, scale, softcap, wide)
        p = (scores - m[..., None]).exp().masked_fill(~seen_BTA[:, :, None], 0.0)
        ds = scale * p * (_dots(grad, v_BAKV.to(wide)) - delta[..., None])
        if softcap is not None:
            ds = ds * (1 - (scores / softcap).square())
        dq = (dq_BTHD.to(wide) + _weighted(ds, k_BAKD.to(wide))).to(dq_BTHD.dtype)
        kv_heads = k_BAKD.shape[2]
        dk, dv = _summed(ds, q_BTHD.to(wide), kv_heads), _summed(p, grad, kv_heads)
    if sinks_H is not None:
        dsinks = -((sinks_H.to(wide) - m).exp() * delta).sum((0, 1))
    return dq, dk, dv, dsinks


def _scores(q_BTHD: Tensor, k_BAKD: Tensor, scale: float, softcap: float | None, wide: torch.dtype) -> Tensor:
    """``[B, T, H, A]``."""
    scores = scale * _dots(q_BTHD.to(wide), k_BAKD.to(wide))
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _dots(x_BTHD: Tensor, y_BAKD: Tensor) -> Tensor:
    """``[B, T, H, A]``: the product of each query with each key of its head."""
    x = _grouped(x_BTHD, y_BAKD.shape[2])
    if y_BAKD.shape[1] <= FEW:
        dots = torch.stack([(x * y[:, None, :, None]).sum(-1) for y in y_BAKD.unbind(1)], -1)
    else:
        dots = torch.einsum("btkgd,bakd->btkga", x, y_BAKD)
    return dots.flatten(2, 3)


def _weighted(w_BTHA: Tensor, y_BAKD: Tensor) -> Tensor:
    """``[B, T, H, D]``: the sum of the keys of its head, with each query's weights."""
    w = _grouped(w_BTHA, y_BAKD.shape[2])
    if y_BAKD.shape[1] <= FEW:
        parts = [w[..., a, None] * y[:, None, :, None] for a, y in enumerate(y_BAKD.unbind(1))]
        weighted = sum(parts[1:], parts[0])
    else:
        weighted = torch.einsum("btkga,bakd->btkgd", w, y_BAKD)
    return weighted.flatten(2, 3)


def _summed(w_BTHA: Tensor, x_BTHD: Tensor, kv_heads: int) -> Tensor:
    """``[B, A, K, D]``: the sum of all queries of the heads that share a key, with the weights of that key."""
    w, x = _grouped(w_BTHA, kv_heads), _grouped(x_BTHD, kv_heads)
    if w.shape[-1] <= FEW:
        return torch.stack([(each[..., None] * x).sum((1, 3)) for each in w.unbind(-1)], 1)
    return torch.einsum("btkga,btkgd->bakd", w, x)


def _grouped(x_BTHD: Tensor, kv_heads: int) -> Tensor:
    grouped: Tensor = x_BTHD.unflatten(2, (kv_heads, -1))  # type: ignore[no-untyped-call]
    return grouped
