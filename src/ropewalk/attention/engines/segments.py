"""The segments engine: one causal SDPA call a document. The CPU's default.

Batching documents of similar length was tried and lost: padding costs more than the calls it saves, and a
document's tensors stay in the cache between its gather, its product and its output (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.runs import Gather, sort_by_document, sort_rows, unsort_rows
from ropewalk.attention.layout import PackedLayout

SCORE_BYTES, CPU_SCORE_BYTES = 256 * 2**20, 4 * 2**20
"""Bound on the scores or the mask of a block of queries; a single query's may exceed it. On a CPU they are twice as
fast where they stay in its caches; a GPU wants large products."""


@dataclass(frozen=True)
class Cut:
    """How one row, in document order, falls apart.

    Attributes:
        lengths: tokens of each piece; together the row.
        shared: leading tokens of the first piece that stand in front of every other piece as well.
    """

    lengths: tuple[int, ...]
    shared: int


@dataclass(frozen=True, eq=False)
class SegmentsPlan:
    """Attributes: the sort by document, None where rows are in order; the cut of each row."""

    by_document: Gather | None
    cuts: tuple[Cut, ...]


def plan(layouts: Sequence[PackedLayout], device: torch.device) -> SegmentsPlan:
    return SegmentsPlan(sort_by_document(layouts, device), tuple(_cut(layout) for layout in layouts))


def _cut(layout: PackedLayout) -> Cut:
    anchor = layout.anchor_length
    if layout.pattern == "full":
        return Cut((layout.total_length,), 0)
    documents = layout.document_lengths.tolist()
    if layout.pattern == "anchor":
        return Cut((anchor + documents[0], *documents[1:]), anchor)
    return Cut((anchor, *documents) if anchor else tuple(documents), 0)


def run(q: Tensor, k: Tensor, v: Tensor, plan: SegmentsPlan, scale: float, softcap: float | None) -> Tensor:
    if plan.by_document is not None:
        q, k, v = (sort_rows(x, plan.by_document) for x in (q, k, v))
    if len(set(plan.cuts)) == 1:
        output = _row(q, k, v, plan.cuts[0], scale, softcap)
    else:
        rows = zip(*(x.split(1) for x in (q, k, v)), plan.cuts, strict=True)
        output = torch.cat([_row(q, k, v, cut, scale, softcap) for q, k, v, cut in rows])
    return output if plan.by_document is None else unsort_rows(output, plan.by_document)


def _row(q: Tensor, k: Tensor, v: Tensor, cut: Cut, scale: float, softcap: float | None) -> Tensor:
    """Rows of one cut: the first piece as it is, the others behind the shared tokens of the first."""
    if len(cut.lengths) == 1:
        return _causal(q, k, v, scale, softcap)
    # split, not slices: the backward of a slice writes a zero gradient as large as the whole.
    (q0, *qs), (k0, *ks), (v0, *vs) = (x.split(cut.lengths, dim=2) for x in (q, k, v))
    outputs = [_causal(q0, k0, v0, scale, softcap)]
    if not cut.shared:
        outputs += [_causal(a, b, c, scale, softcap) for a, b, c in zip(qs, ks, vs, strict=True)]
        return torch.cat(outputs, dim=2)
    shared = [_wide(x.split([cut.shared, x.shape[2] - cut.shared], dim=2)[0]) for x in (q0, k0, v0)]
    for piece in zip(qs, ks, vs, strict=True):
        a, b, c = (torch.cat([s.to(x.dtype), x], dim=2) for s, x in zip(shared, piece, strict=True))
        # The shared tokens' queries see only themselves, as in the first piece: their output is there already.
        whole = _causal(a, b, c, scale, softcap)
        outputs.append(whole.split([cut.shared, whole.shape[2] - cut.shared], dim=2)[1])
    return torch.cat(outputs, dim=2)


def _wide(x: Tensor) -> Tensor:
    """Float32 or wider: the gradients of tokens that several products share add up in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
    if softcap is not None:  # SDPA has no soft cap; one document's scores at a time stay small
        visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return plain_attention(q, k, v, visible, scale, softcap)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def causal_runs(
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    runs: Sequence[tuple[int, int]],
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Causal attention inside each run, whose last query sees its last key.

    Args:
        q_QHD, k_SKD, v_SKV: queries, and keys and values, of the runs one after the other.
        runs: how many queries and keys each has; as many keys as queries, or more. One run at least.
        scale, softcap: as for :func:`ropewalk.attend`.

    Returns:
        ``[Q, H, V]``.
    """
    queries, keys = map(list, zip(*runs, strict=True))
    outputs = []
    for run in zip(q_QHD.split(queries), k_SKD.split(keys), v_SKV.split(keys), strict=True):
        # [n, H, D] to [1, H, n, D] and back.
        q, k, v = (x.transpose(0, 1)[None] for x in run)
        outputs.append(_last_queries(q, k, v, scale, softcap)[0].transpose(0, 1))
    return torch.cat(outputs)


def _last_queries(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
    """A block of queries at a time: neither a mask nor scores of all of them are ever held.

    Blocks are computed again in the backward, for the mask and the scores would be kept until then.
    """
    count, length = q.shape[2], k.shape[2]
    if softcap is None and count == length:
        return _causal(q, k, v, scale, softcap)
    bound = CPU_SCORE_BYTES if q.device.type == "cpu" else SCORE_BYTES
    query_bytes = length * torch.float32.itemsize * (1 if softcap is None else q.shape[1])
    k_wide, v_wide, end, outputs = _wide(k), _wide(v), length - count, []
    for block in q.split(max(1, bound // query_bytes), dim=2):
        end += block.shape[2]
        arguments = (block, k_wide, v_wide, end, scale, softcap)
        outputs.append(checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=2)


def _block(
    q: Tensor, k_wide: Tensor, v_wide: Tensor, end: int, scale: float, softcap: float | None
) -> Tensor:
    """Queries of which the last one sees the first ``end`` keys and no other."""
    count = q.shape[2]
    visible = torch.ones(count, end, dtype=torch.bool, device=q.device).tril(end - count)
    k, v = k_wide[:, :, :end], v_wide[:, :, :end]
    if softcap is not None:
        return plain_attention(_wide(q), k, v, visible, scale, softcap).to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k.to(q.dtype), v.to(q.dtype), attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
