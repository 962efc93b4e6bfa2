"""Attention of one layer in any precision of each step, in blocks of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import (
    Arithmetic,
    multiplied,
    operands,
    rounded,
)
from ropewalk.audit.audited_model import LayerRotation, joined, rotate
from ropewalk.audit.replaced_attention import AttentionCall

# Shapes: H query heads, K key/value heads, G = H / K, T row length, Q queries of a block, S keys seen, D head dim.

BLOCK_BYTES = 64 * 2**20
"""Size in bytes of the scores of one block of queries; the peak is at most four times this plus the layer's tensors."""

CPU_BLOCK_BYTES = 4 * 2**20
"""The same limit on a CPU: a block of this size reuses memory that the process already has, much of it in the cache.
Larger blocks take twice the time, mostly for page faults."""

CPU_QUERIES = 64
"""Fewest queries in a block on a CPU, if they fit in ``BLOCK_BYTES``: smaller products cost more than page faults."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """Summary of one layer's attention, in float64 on the CPU.

    Attributes:
        received: ``[heads, length]``: the attention that each token received, summed over queries.
        first_scores: ``[heads, length]``: each query's score (logit) of the row's first token; 0 if not visible.
        seen_by: ``[length]``: number of queries that see each token.
        even: ``[length]``: attention each token would receive if every query attended evenly to what it sees.
    """

    received: Tensor
    first_scores: Tensor
    seen_by: Tensor
    even: Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotation: LayerRotation, arithmetic: Arithmetic) -> Tensor:
    """Queries or keys ``[heads, length, head_dim]`` at their positions, in the arithmetic's wide dtype."""
    wide, width = arithmetic.wide, rotation.rotary_dim
    x = x.to(wide)
    if width == 0:
        return x
    turning = x[..., rotation.dims]
    cos, sin = (rounded(part.to(wide), arithmetic.cos_sin) for part in (cos, sin))
    a, b, c, d = (rounded(part, arithmetic.rotation) for part in rotate(turning, cos, sin, rotation.style))
    return rotation.put_back(x, joined(a - b, c + d, rotation.style))


@dataclass(frozen=True, eq=False)
class RoundedTokens:
    """Tokens whose queries and keys are rotated and rounded in a different arithmetic.

    Attributes:
        tokens: bool ``[length]``.
        arithmetic: arithmetic of the steps up to the operands of the product.
        cos, sin: ``[length, rotary_dim / 2]`` in that arithmetic.
    """

    tokens: Tensor
    arithmetic: Arithmetic
    cos: Tensor
    sin: Tensor

    def among(self, x: Tensor, exact: Tensor, rotation: LayerRotation) -> Tensor:
        """Queries or keys ``[heads, length, head_dim]``: ``exact`` with these tokens replaced."""
        parts = operands(rotated(x, self.cos, self.sin, rotation, self.arithmetic), self.arithmetic.product)
        # The two parts of the split are added up again, which float64 does without rounding.
        found = torch.stack([part.to(exact.dtype) for part in parts]).sum(0)
        return torch.where(self.tokens.to(x.device)[:, None], found, exact)


class LayerAttention:
    """Rotated and rounded queries and keys of one layer, from which attention is computed block by block.

    Args:
        call: queries and keys before rotation, and values.
        table: cos and sin, ``[length, rotary_dim / 2]`` each.
        rotation: how the layer rotates.
        arithmetic: precision of each step.
        layout: visibility of tokens; None for plain causal attention.
        apart: tokens that are rotated in a different arithmetic.
    """

    def __init__(
        self,
        call: AttentionCall,
        table: tuple[Tensor, Tensor],
        rotation: LayerRotation,
        arithmetic: Arithmetic,
        layout: PackedLayout | None = None,
        apart: RoundedTokens | None = None,
    ) -> None:
        self.call, self.arithmetic, self.layout = call, arithmetic, layout
        q_HTD, k_KTD = (rotated(x, *table, rotation, arithmetic) for x in (call.query, call.key))
        if apart is not None:
            q_HTD, k_KTD = apart.among(call.query, q_HTD, rotation), apart.among(call.key, k_KTD, rotation)
        kv_heads = k_KTD.shape[0]
        # The query heads of a key head are neighbours, as transformers' repeat_kv lays them out.
        self.q_KGTD = q_HTD.unflatten(0, (kv_heads, q_HTD.shape[0] // kv_heads))
        self.keys = operands(k_KTD, arithmetic.product)
        device = call.query.device
        self.documents = None if layout is None else layout.document_ids.to(device)
        # Windows and chunks count tokens of a run, whatever lies between them in the row.
        length = q_HTD.shape[1]
        self.places = torch.arange(length) if layout is None else layout.run_index
        self.places = self.places.to(device)

    def scores(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Scores ``[K, G, Q, S]`` of some queries before masking, and bool ``[Q, S]``: visible keys."""
        seen = [k_KTD[:, :end] for k_KTD in self.keys]
        scores = _scores(self.q_KGTD[:, :, start:end], seen, self.call, self.arithmetic)
        return scores, self.visible(start, end)

    def visible(self, start: int, end: int) -> Tensor:
        """bool ``[end - start, end]``: the visibility rule for some queries."""
        device, layout, locality = self.call.query.device, self.layout, self.call.options.locality
        # Keys after the block are causally hidden from all of its queries and are never computed.
        i = torch.arange(start, end, device=device)[:, None]
        j = torch.arange(end, device=device)[None, :]
        visible: Tensor = j <= i
        query, key = self.places[start:end, None], self.places[None, :end]
        if locality.window is not None:
            visible = visible & (query - key < locality.window)
        if locality.chunk is not None:
            visible = visible & (query // locality.chunk == key // locality.chunk)
        if layout is not None and self.documents is not None and layout.pattern != "full":
            allowed = self.documents[start:end, None] == self.documents[None, :end]
            if layout.pattern == "anchor":
                allowed = allowed | (j < layout.anchor_length)
            visible = visible & allowed
        return visible

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Attention weights ``[K, G, Q, S]``; masks the scores in place.

        Each head's sink takes its share and is left out, so with sinks the weights of a query sum to less than 1.
        """
        # Keys before the block are hidden only by a window, a chunk or a layout.
        some = self.call.options.locality.reach is not None or (
            self.layout is not None and self.layout.pattern != "full"
        )
        first = 0 if some else visible.shape[1] - visible.shape[0]
        scores[..., first:].masked_fill_(~visible[:, first:], -torch.inf)
        if self.call.options.sinks is None:
            return scores.to(self.arithmetic.softmax).softmax(-1).to(self.arithmetic.weights)
        weights = (
            _beside_sinks(scores, self.call.options.sinks, self.arithmetic)
            .to(self.arithmetic.softmax)
            .softmax(-1)
        )
        # The last column is the sink's share.
        return weights[..., :-1].to(self.arithmetic.weights)


def block_edges(
    length: int,
    heads: int,
    itemsize: int,
    lengths: Sequence[int],
    block_bytes: int | None,
    device: torch.device,
) -> list[int]:
    """Boundaries of blocks of queries, each with at most ``block_bytes`` of scores; every length is a boundary.

    If ``block_bytes`` is None, a default for the device is used.
    """
    a_query = heads * length * itemsize
    size = (BLOCK_BYTES if block_bytes is None else block_bytes) // a_query
    if block_bytes is None and device.type == "cpu":
        size = min(size, max(CPU_BLOCK_BYTES // a_query, CPU_QUERIES))
    # The requested lengths are edges too, so that a sum over blocks can be read off at each of them.
    return sorted({*range(0, length, max(1, size)), *(n for n in lengths if n < length), length})


def streamed_attention(layer: LayerAttention, block_bytes: int | None = None) -> tuple[Tensor, LayerTrace]:
    """Causal attention of one row.

    Args:
        layer: queries, keys and values of the layer, and the arithmetic.
        block_bytes: size in bytes of the scores computed at once; None for a default for the device.

    Returns:
        The output ``[heads, length, value_dim]`` in ``arithmetic.rest``, and the trace.
    """
    call, arithmetic = layer.call, layer.arithmetic
    heads, length, _ = call.query.shape
    # Converted once for each layer, because every block of queries sees most values.
    v_KTV = call.value.to(_sums_in(arithmetic))
    edges = block_edges(length, heads, arithmetic.wide.itemsize, (), block_bytes, call.query.device)
    received = torch.zeros(heads, length, dtype=torch.float64, device=call.query.device)
    seen_by, even = torch.zeros_like(received[0]), torch.zeros_like(received[0])
    outputs, first_scores = [], []
    for start, end in pairwise(edges):
        scores, visible = layer.scores(start, end)
        # torch.where makes a new tensor: a view would keep the whole block alive.
        first_scores.append(torch.where(visible[:, 0], scores[..., 0].flatten(0, 1).double(), 0.0))
        seen_by[:end] += visible.sum(0)
        even[:end] += (visible / visible.sum(1, keepdim=True)).sum(0, dtype=torch.float64)
        weights = layer.weights(scores, visible)
        # Free each block before the next one is computed.
        del scores
        received[:, :end] += _summed_over_queries(weights.flatten(0, 1))
        outputs.append(_weighted(weights, v_KTV[:, :end], arithmetic).flatten(0, 1))
        del weights
    trace = LayerTrace(
        received.cpu(),
        torch.cat(first_scores, dim=-1).cpu(),
        seen_by.cpu(),
        even.cpu(),
    )
    return torch.cat(outputs, dim=1), trace


def _scores(q_KGQD: Tensor, k_KSD: Sequence[Tensor], call: AttentionCall, arithmetic: Arithmetic) -> Tensor:
    # One product for all queries of a key head: broadcasting would copy the keys for each query head.
    products = multiplied(operands(q_KGQD.flatten(1, 2), arithmetic.product), k_KSD)
    scores: Tensor = products.unflatten(1, q_KGQD.shape[1:3]).to(arithmetic.wide)
    _round(
        _round(scores, arithmetic.scores).mul_(call.options.scale_of(call.query.shape[-1])), arithmetic.scores
    )
    if call.options.softcap is not None:
        _round(_round(scores.div_(call.options.softcap), arithmetic.scores).tanh_(), arithmetic.scores)
        _round(scores.mul_(call.options.softcap), arithmetic.scores)
    return scores


def _beside_sinks(scores_KGQS: Tensor, sinks: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``[K, G, Q, S + 1]``: masked scores and each head's sink minus their maximum, rounded as gpt-oss does.

    Its eager attention concatenates the sinks to the scores in their dtype and subtracts the maximum in that dtype.
    """
    kv_heads, groups, queries, _ = scores_KGQS.shape
    sinks = rounded(sinks.to(scores_KGQS.dtype), arithmetic.scores).view(kv_heads, groups, 1, 1)
    both = torch.cat((scores_KGQS, sinks.expand(-1, -1, queries, -1)), dim=-1)
    return _round(both.sub_(both.amax(-1, keepdim=True)), arithmetic.scores)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`rounded`, in place."""
    return x if x.dtype == dtype else x.copy_(x.to(dtype))


def _summed_over_queries(weights_HQS: Tensor) -> Tensor:
    """float64 ``[H, S]``, computed head by head: a sum in a wider dtype first copies its whole input."""
    return torch.stack([weights_QS.sum(0, dtype=torch.float64) for weights_QS in weights_HQS])


def _sums_in(arithmetic: Arithmetic) -> torch.dtype:
    """Sums of values run in float32, or in float64 if weights or values are wider than float32."""
    return torch.float64 if torch.float64 in (arithmetic.weights, arithmetic.rest) else torch.float32


def _weighted(weights_KGQS: Tensor, v_KSV: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The weighted mean of the values, ``[K, G, Q, V]``."""
    mean: Tensor = weights_KGQS.to(v_KSV.dtype).flatten(1, 2) @ v_KSV
    found: Tensor = mean.unflatten(1, weights_KGQS.shape[1:3])
    return found.to(arithmetic.rest)
