"""The segments engine: one causal SDPA call for each document. It is the default on a CPU.

Batching documents of similar length was tried and is slower: padding costs more than the saved calls, and the
tensors of one document stay in the cache from its gather through its product to its output (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.runs import Gather, sort_by_document, sort_rows, unsort_rows
from ropewalk.attention.engines.wide_windows import LEAST_WINDOW, wide_windowed_attention
from ropewalk.attention.engines.windows import WIDEST_WINDOW, Piece, windowed_attention
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions, Locality

SCORE_BYTES, CPU_SCORE_BYTES = 256 * 2**20, 4 * 2**20
"""Most bytes of scores or mask for a block of queries; a single query may exceed them. A CPU is twice as fast if the
scores stay in its caches; a GPU needs large products."""
LEAST_BLOCK = 64
"""Fewest queries in a block under a window: products of fewer queries are slow (benchmarks/attention_cpu.py)."""


@dataclass(frozen=True)
class Cut:
    """Cut of one row, in document order, into pieces.

    Attributes:
        lengths: tokens of each piece; they add up to the row.
        shared: leading tokens of the first piece that also precede every other piece.
    """

    lengths: tuple[int, ...]
    shared: int


@dataclass(frozen=True, eq=False)
class SegmentsPlan:
    """Attributes: the gather that sorts by document, None if rows are sorted; the cut of each row."""

    by_document: Gather | None
    cuts: tuple[Cut, ...]


def plan(layouts: Sequence[PackedLayout], device: torch.device, locality: Locality) -> SegmentsPlan:
    """Plan how rows are sorted and cut. The locality is not used here: each run applies its own window or chunks."""
    return SegmentsPlan(sort_by_document(layouts, device), tuple(_cut(layout) for layout in layouts))


def _cut(layout: PackedLayout) -> Cut:
    anchor = layout.anchor_length
    if layout.pattern == "full":
        return Cut((layout.total_length,), 0)
    documents = layout.document_lengths.tolist()
    if layout.pattern == "anchor":
        return Cut((anchor + documents[0], *documents[1:]), anchor)
    return Cut((anchor, *documents) if anchor else tuple(documents), 0)


def run(q: Tensor, k: Tensor, v: Tensor, plan: SegmentsPlan, options: AttentionOptions) -> Tensor:
    if plan.by_document is not None:
        q, k, v = (sort_rows(x, plan.by_document) for x in (q, k, v))
    if len(set(plan.cuts)) == 1:
        output = _row(q, k, v, plan.cuts[0], options)
    else:
        rows = zip(*(x.split(1) for x in (q, k, v)), plan.cuts, strict=True)
        output = torch.cat([_row(q, k, v, cut, options) for q, k, v, cut in rows])
    return output if plan.by_document is None else unsort_rows(output, plan.by_document)


def _row(q: Tensor, k: Tensor, v: Tensor, cut: Cut, options: AttentionOptions) -> Tensor:
    """Attention of rows with the same cut: the first piece as it is, the others behind its shared tokens."""
    window = _narrow_window(q, max(cut.lengths[0], cut.shared + max(cut.lengths)), options)
    if window is not None and not _takes_triangles(q, v, window, options):
        seen = range(max(0, cut.shared - window + 1), cut.shared)
        tokens = [range(end - n, end) for end, n in zip(accumulate(cut.lengths), cut.lengths, strict=True)]
        pieces = [Piece(own, own, seen if own.start else range(0)) for own in tokens]
        return windowed_attention(q, k, v, pieces, window, options.scale_of(q.shape[-1]))
    if len(cut.lengths) == 1:
        return _run(q, k, v, options)
    # split instead of slices: the backward pass of a slice writes a zero gradient as large as the whole tensor.
    (q0, *qs), (k0, *ks), (v0, *vs) = (x.split(cut.lengths, dim=2) for x in (q, k, v))
    outputs = [_run(q0, k0, v0, options)]
    if not cut.shared:
        outputs += [_run(a, b, c, options) for a, b, c in zip(qs, ks, vs, strict=True)]
        return torch.cat(outputs, dim=2)
    # Widened once, outside the loop, so that the gradients of all documents meet in one float32 tensor.
    shared = [_wide(x.split([cut.shared, x.shape[2] - cut.shared], dim=2)[0]) for x in (q0, k0, v0)]
    for piece in zip(qs, ks, vs, strict=True):
        a, b, c = (torch.cat([s.to(x.dtype), x], dim=2) for s, x in zip(shared, piece, strict=True))
        # The shared tokens' queries see only themselves, as in the first piece, so their output is already known.
        whole = _run(a, b, c, options)
        outputs.append(whole.split([cut.shared, whole.shape[2] - cut.shared], dim=2)[1])
    return torch.cat(outputs, dim=2)


def _wide(x: Tensor) -> Tensor:
    """Float32 or wider, because the gradients of tokens shared by several products add up in this dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_runs(
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    runs: Sequence[tuple[int, int]],
    options: AttentionOptions,
) -> Tensor:
    """Causal attention within each run, aligned so that the last query sees the last key.

    Args:
        q_QHD, k_SKD, v_SKV: queries, keys and values of the runs, one run after the other.
        runs: number of queries and of keys of each run, with at least as many keys as queries; at least one run.
        options: as for :func:`ropewalk.attend`, but without chunks, which must be separate runs here.

    Returns:
        ``[Q, H, V]``.
    """
    assert options.chunk is None
    window = _narrow_window(q_QHD, max(keys for _, keys in runs), options)
    if window is not None:
        sizes = ([queries for queries, _ in runs], [keys for _, keys in runs])
        ends = zip(*(accumulate(each) for each in sizes), strict=True)
        pieces = [Piece(range(a - n, a), range(b - s, b)) for (a, b), (n, s) in zip(ends, runs, strict=True)]
        q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_SKD, v_SKV))
        output = windowed_attention(q, k, v, pieces, window, options.scale_of(q.shape[-1]))
        return output[0].transpose(0, 1)
    # is_causal of SDPA aligns the first query with the first key, which is wrong if there are more keys than queries;
    # _last_queries uses a mask then.
    queries, keys = map(list, zip(*runs, strict=True))
    outputs = []
    for run in zip(q_QHD.split(queries), k_SKD.split(keys), v_SKV.split(keys), strict=True):
        # [n, H, D] to [1, H, n, D] and back.
        q, k, v = (x.transpose(0, 1)[None] for x in run)
        outputs.append(_last_queries(q, k, v, options)[0].transpose(0, 1))
    return torch.cat(outputs)


def _narrow_window(q: Tensor, longest: int, options: AttentionOptions) -> int | None:
    """The window of the layer, if some run exceeds it and all runs are computed together (`windows`)."""
    local = options.locality.within(longest)
    if local.window is None or local.chunk is not None or local.window > WIDEST_WINDOW:
        return None
    return local.window if options.is_plain and q.device.type == "cpu" else None


def _takes_triangles(q: Tensor, v: Tensor, window: int, options: AttentionOptions) -> bool:
    """Whether torch's kernel computes whole runs under this window faster without a mask (`wide_windows`)."""
    plain = options.is_plain and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]
    return plain and window >= LEAST_WINDOW


def _run(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """A whole run with as many queries as keys: one call, or one for each of its chunks."""
    local = options.locality.within(q.shape[2])
    if local.chunk is None:
        return _last_queries(q, k, v, options)
    chunks = zip(*(x.split(local.chunk, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([_last_queries(a, b, c, options) for a, b, c in chunks], dim=2)


def _last_queries(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention from a run's last queries to its keys, computed in blocks of queries if it needs a mask.

    Neither a mask nor the scores of all queries are ever stored, and nothing before a window is computed.
    """
    count, length = q.shape[2], k.shape[2]
    window = options.locality.within(length).window
    if window is not None:
        if count == length and _takes_triangles(q, v, window, options):
            return wide_windowed_attention(q, k, v, window, options.scale_of(q.shape[-1]))
        return _windowed(q, k, v, window, options)
    if options.is_plain and count == length:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    size = _most_queries(q, length, options)
    if count == length <= size:
        return _block(q, k, v, _visible(count, length, length, q.device), options)
    # Checkpointed: otherwise autograd would keep the mask and the scores of all blocks for the backward pass.
    wide_k, wide_v, end, outputs = _wide(k), _wide(v), length - count, []
    for block in q.split(size, dim=2):
        end += block.shape[2]
        arguments = (block, wide_k, wide_v, end, options)
        outputs.append(checkpoint(_first_keys, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=2)


def _first_keys(q: Tensor, wide_k: Tensor, wide_v: Tensor, end: int, options: AttentionOptions) -> Tensor:
    """A block of queries whose last query sees exactly the first ``end`` keys."""
    return _block(
        q, wide_k[:, :, :end], wide_v[:, :, :end], _visible(q.shape[2], end, end, q.device), options
    )


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, options: AttentionOptions) -> Tensor:
    """Process one block of queries at a time with the keys of its windows, so work grows with the window, not the run.

    Keys are split at the boundaries of query blocks, and the pieces that a block sees are concatenated. The gradients
    of all blocks then take time proportional to the blocks, not to the run for each block.
    """
    count, length = q.shape[2], k.shape[2]
    # A block of `size` queries is multiplied by `size + window` keys, of which each query sees `window`.
    size = min(_most_queries(q, window, options), max(LEAST_BLOCK, window // 4))
    # Keys before every query's window are split off and never multiplied.
    unseen = max(0, length - count - window + 1)
    lead = length - count - unseen
    pieces = [lead % size] * (lead % size > 0) + [size] * (lead // size)
    leading = len(pieces)
    pieces += [block.shape[2] for block in q.split(size, dim=2)]
    ks, vs = (_wide(x).split([unseen, *pieces], dim=2)[1:] for x in (k, v))
    # Number of earlier pieces that the first query of a block can reach into.
    behind = -(-(window - 1) // size)
    # Blocks of the same shape share a mask: it depends only on the distance between query and key.
    masks: dict[tuple[int, int], Tensor] = {}
    outputs = []
    for number, block in enumerate(q.split(size, dim=2), leading):
        seen = slice(max(0, number - behind), number + 1)
        k_seen, v_seen = torch.cat(ks[seen], dim=2), torch.cat(vs[seen], dim=2)
        shape = (block.shape[2], k_seen.shape[2])
        if shape not in masks:
            masks[shape] = _visible(*shape, window, q.device)
        arguments = (block, k_seen, v_seen, masks[shape], options)
        if options.is_plain:
            outputs.append(_block(*arguments))
        else:
            # Checkpointed: otherwise autograd would keep the scores until the backward pass.
            outputs.append(checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=2)


def _most_queries(q: Tensor, seen: int, options: AttentionOptions) -> int:
    """The most queries in a block, each with ``seen`` keys, for which the mask or the scores stay small."""
    bound = CPU_SCORE_BYTES if q.device.type == "cpu" else SCORE_BYTES
    return max(1, bound // (seen * torch.float32.itemsize * (1 if options.is_plain else q.shape[1])))


def _visible(count: int, length: int, window: int, device: torch.device) -> Tensor:
    """bool ``[count, length]``: the last ``count`` queries of a run of ``length`` tokens, each with its window."""
    visible = torch.ones(count, length, dtype=torch.bool, device=device).tril(length - count)
    return visible if window >= length else visible.triu(length - count - window + 1)


def _block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of queries to the keys that any of them sees; keys and values may be wider than queries."""
    if not options.is_plain:
        return plain_attention(_wide(q), _wide(k), _wide(v), visible, options).to(q.dtype)
    return F.scaled_dot_product_attention(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        attn_mask=visible,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
