"""Attention of packed rows by a kernel: sort by document, attend within runs, and merge the anchor's keys and sinks.

A run is a document, or the whole row under ``full``; the anchor belongs to the first document's run. The queries of
other documents see the anchor's keys besides, which :mod:`ropewalk.attention.merge` adds. Forward and backward are
plain functions; :func:`run` makes them one operation of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.attention.engines.runs import Gather, Kernel, Runs, sort_by_document
from ropewalk.attention.kept import KEPT
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.merge import ExtraGradients, ExtraKeys, merge, merge_backward
from ropewalk.attention.options import AttentionOptions, Locality
from ropewalk.attention.spans import Spans

# Shapes: B rows, T tokens of a row, Q and S all queries and keys of the runs (B·T in packed rows), A anchor keys of a
# row, H query heads, K key/value heads, D head dim, V value dim.


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """What all layers with the same locality share.

    Attributes:
        by_document: the gather that sorts each row by document; None if all rows are sorted.
        runs: the runs of all rows, cut into the layer's chunks.
        seen: bool ``[B, T, A]``, whether a query sees each of the first keys of its row in addition to its run; None if
            no query does.
    """

    by_document: Gather | None
    runs: Runs
    seen: Tensor | None


def plan(layouts: Sequence[PackedLayout], device: torch.device, locality: Locality) -> PackedPlan:
    """The plan for rows of one length."""
    spans = [Spans.of(layout, locality) for layout in layouts]
    lengths = tuple(np.concatenate([np.diff(each.starts) for each in spans]).tolist())
    runs = Runs(lengths, lengths, all(each.pattern == "full" for each in layouts))
    return PackedPlan(sort_by_document(layouts, device), runs, _seen(spans, device))


def _seen(spans: Sequence[Spans], device: torch.device) -> Tensor | None:
    shared = np.arange(max(int(each.shared_end.max()) for each in spans))
    rows = []
    for each in spans:
        places = np.arange(each.starts[-1])
        first, end = each.first_seen(places)[0], each.shared_end[each.span_of(places)]
        rows.append((first[:, None] <= shared) & (shared < end[:, None]))
    seen = np.stack(rows)
    return torch.from_numpy(seen).to(device) if seen.any() else None


def attend_forward(
    kernel: Kernel,
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    runs: Runs,
    extra: ExtraKeys | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Attention within runs, to extra keys and sinks.

    Args:
        kernel: computes attention within runs.
        q_QHD, k_SKD, v_SKV: the runs, one after the other.
        runs: their sizes, cut into chunks.
        extra: keys that queries see besides those of their runs; None for none.
        options: scale, soft cap, window and sinks of the layer.

    Returns:
        Output ``[Q, H, V]``, and the log-sum-exp of all scores ``[H, Q]`` in float32 or wider.
    """

    def computed() -> tuple[Tensor, Tensor]:
        with without_autocast(q_QHD.device):
            return merge(*kernel.forward(q_QHD, k_SKD, v_SKV, runs, options), q_QHD, extra, options)

    kept = KEPT.get()
    return computed() if kept is None else kept.results(computed, runs, options.window)


def attend_backward(
    kernel: Kernel,
    grad_QHV: Tensor,
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_QHV: Tensor,
    m_HQ: Tensor,
    runs: Runs,
    extra: ExtraKeys | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, ExtraGradients]:
    """Gradients of q, k and v, and of extra keys and sinks.

    Args:
        grad_QHV: gradient of the output.
        out_QHV, m_HQ: results of :func:`attend_forward`; the other arguments are the same as there.
    """
    with without_autocast(q_QHD.device):
        dq, dk, dv = kernel.backward(grad_QHV, q_QHD, k_SKD, v_SKV, out_QHV, m_HQ, runs, options)
        dq, more = merge_backward(grad_QHV, q_QHD, out_QHV, m_HQ, dq, extra, options)
    return dq, dk, dv, more


def run(
    kernel: Kernel,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTV: Tensor,
    plan: PackedPlan,
    options: AttentionOptions,
) -> Tensor:
    """Attention of packed rows: ``[B, H, T, V]``."""
    output: Tensor = _Attention.apply(q_BHTD, k_BKTD, v_BKTV, options.sinks, kernel, plan, options)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTV: Tensor,
        sinks: Tensor | None,
        kernel: Kernel,
        plan: PackedPlan,
        options: AttentionOptions,
    ) -> Tensor:
        ctx.kernel, ctx.plan, ctx.options = kernel, plan, options
        q, k, v = (_sorted(x, plan.by_document) for x in (q_BHTD, k_BKTD, v_BKTV))
        out, m = attend_forward(kernel, q, k, v, plan.runs, _extra(k, v, plan), options)
        ctx.save_for_backward(q, k, v, out, m)
        return _unsorted(out, plan.by_document, len(q_BHTD))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_BHTV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, m = ctx.saved_tensors
        plan, batch = ctx.plan, len(grad_BHTV)
        grad, extra = _sorted(grad_BHTV, plan.by_document), _extra(k, v, plan)
        dq, dk, dv, more = attend_backward(ctx.kernel, grad, q, k, v, out, m, plan.runs, extra, ctx.options)
        for dx, dx_more in ((dk, more.k), (dv, more.v)):
            if dx_more is not None:
                own = _anchors(dx, batch, dx_more.shape[1])
                own.copy_(own.to(dx_more.dtype) + dx_more)
        gradients = (_unsorted(x, plan.by_document, batch) for x in (dq, dk, dv))
        return (*gradients, _sinks_gradient(more, ctx.options), None, None, None)


def attend_runs(
    kernel: Kernel,
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    runs: Runs,
    options: AttentionOptions,
    extra: ExtraKeys | None = None,
) -> Tensor:
    """:func:`attend_forward` as one operation of autograd, with gradients of extra keys too: ``[Q, H, V]``."""
    keys = (None, None) if extra is None else (extra.k, extra.v)
    seen = None if extra is None else extra.seen
    output: Tensor = _Runs.apply(q_QHD, k_SKD, v_SKV, options.sinks, *keys, seen, kernel, runs, options)  # type: ignore[no-untyped-call]
    return output


class _Runs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        extra_k: Tensor | None,
        extra_v: Tensor | None,
        seen: Tensor | None,
        kernel: Kernel,
        runs: Runs,
        options: AttentionOptions,
    ) -> Tensor:
        ctx.kernel, ctx.runs, ctx.options = kernel, runs, options
        out, m = attend_forward(kernel, q, k, v, runs, _given(extra_k, extra_v, seen), options)
        ctx.save_for_backward(q, k, v, out, m, extra_k, extra_v, seen)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad if grad.stride(2) == 1 else grad.contiguous()
        q, k, v, out, m, extra_k, extra_v, seen = ctx.saved_tensors
        extra = _given(extra_k, extra_v, seen)
        dq, dk, dv, more = attend_backward(ctx.kernel, grad, q, k, v, out, m, ctx.runs, extra, ctx.options)
        return dq, dk, dv, _sinks_gradient(more, ctx.options), more.k, more.v, *(None,) * 4


def _given(k: Tensor | None, v: Tensor | None, seen: Tensor | None) -> ExtraKeys | None:
    return None if k is None or v is None or seen is None else ExtraKeys(k, v, seen)


def _sinks_gradient(more: ExtraGradients, options: AttentionOptions) -> Tensor | None:
    if more.sinks is None or options.sinks is None:
        return None
    return more.sinks.to(options.sinks.dtype)


def _extra(k_SKD: Tensor, v_SKV: Tensor, plan: PackedPlan) -> ExtraKeys | None:
    if plan.seen is None:
        return None
    batch, _, anchors = plan.seen.shape
    return ExtraKeys(_anchors(k_SKD, batch, anchors), _anchors(v_SKV, batch, anchors), plan.seen)


def _anchors(x_SKD: Tensor, batch: int, anchors: int) -> Tensor:
    """A view ``[B, A, K, D]`` of the first tokens of each row."""
    rows: Tensor = x_SKD.unflatten(0, (batch, -1))  # type: ignore[no-untyped-call]
    return rows[:, :anchors]


def _sorted(x_BHTD: Tensor, by_document: Gather | None) -> Tensor:
    """``[B, H, T, D]`` to ``[B·T, H, D]``; without a gather only another view if the strides allow it."""
    x_BTHD = x_BHTD.transpose(1, 2)
    # Kernels read whole heads, so the elements of a head must be contiguous.
    x_BTHD = x_BTHD if x_BTHD.stride(3) == 1 else x_BTHD.contiguous()
    x_QHD = x_BTHD.flatten(0, 1)
    return x_QHD if by_document is None else x_QHD.index_select(0, by_document.index)


def _unsorted(x_QHD: Tensor, by_document: Gather | None, batch: int) -> Tensor:
    """The inverse of :func:`_sorted`."""
    x_QHD = x_QHD if by_document is None else x_QHD.index_select(0, by_document.slot)
    rows: Tensor = x_QHD.unflatten(0, (batch, -1))  # type: ignore[no-untyped-call]
    return rows.transpose(1, 2)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast, which would cast products of float32 to 16 bits."""
    # The meta device has no autocast.
    return (
        torch.autocast(device.type, enabled=False)
        if torch.amp.is_autocast_available(device.type)
        else nullcontext()
    )
