"""Attention of one row in blocks of queries, each step in its own precision, and what each token received of it.

No attention matrix is held: what is kept of it are sums over queries, and these can be taken block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import Arithmetic, multiplied, operands, rounded
from ropewalk.models.intercept import AttentionCall, LayerRotation, joined, rotate

# Shapes: H query heads, K key/value heads, G = H / K, T row length, Q queries of a block, S keys seen, D head dim.

BLOCK_BYTES = 64 * 2**20
"""Size of the scores of one block of queries; the peak is at most four times this, beside the layer's own tensors."""

CPU_BLOCK_BYTES = 4 * 2**20
"""The same on a CPU: a block of this size stays in memory that the process has already, much of it in the cache. Larger
ones take twice the time, most of it for new pages."""

CPU_QUERIES = 64
"""Queries of a block on a CPU, if ``BLOCK_BYTES`` hold so many: products of fewer are slower than new pages."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What is kept of one layer's attention; float64 on the CPU.

    Attributes:
        received: ``[heads, length]``: the attention that each token received, summed over queries.
        received_by: ``[lengths, length]``: the same for the row cut off at each of some lengths, mean over heads.
        first_scores: ``[heads, length]``: each query's score (logit) of the row's first token; 0 if unseen.
        seen_by: ``[length]``: queries that see each token.
        even: ``[length]``: what each token would receive if every query attended evenly to what it sees.
    """

    received: Tensor
    received_by: Tensor
    first_scores: Tensor
    seen_by: Tensor
    even: Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotation: LayerRotation, arithmetic: Arithmetic) -> Tensor:
    """Queries or keys ``[heads, length, head_dim]`` at their positions, in the arithmetic's wide dtype."""
    wide, width = arithmetic.wide, rotation.rotary_dim
    x = x.to(wide)
    if width == 0:
        return x
    cos, sin = (rounded(part.to(wide), arithmetic.cos_sin) for part in (cos, sin))
    a, b, c, d = (
        rounded(part, arithmetic.rotation) for part in rotate(x[..., :width], cos, sin, rotation.style)
    )
    return torch.cat((joined(a - b, c + d, rotation.style), x[..., width:]), dim=-1)


@dataclass(frozen=True, eq=False)
class RoundedTokens:
    """Tokens whose queries and keys are rotated and rounded in an arithmetic of their own.

    Attributes:
        tokens: bool ``[length]``.
        arithmetic: for the steps up to what the product reads.
        cos, sin: ``[length, rotary_dim / 2]`` in that arithmetic.
    """

    tokens: Tensor
    arithmetic: Arithmetic
    cos: Tensor
    sin: Tensor

    def among(self, x: Tensor, exact: Tensor, rotation: LayerRotation) -> Tensor:
        """Queries or keys ``[heads, length, head_dim]``: ``exact`` but for these tokens."""
        parts = operands(rotated(x, self.cos, self.sin, rotation, self.arithmetic), self.arithmetic.product)
        found = torch.stack([part.to(exact.dtype) for part in parts]).sum(0)
        return torch.where(self.tokens.to(x.device)[:, None], found, exact)


class Prepared:
    """Queries and keys of one layer, rotated and rounded, from which attention comes block by block."""

    def __init__(
        self,
        call: AttentionCall,
        cos: Tensor,
        sin: Tensor,
        rotation: LayerRotation,
        arithmetic: Arithmetic,
        layout: PackedLayout | None = None,
        apart: RoundedTokens | None = None,
    ) -> None:
        self.call, self.arithmetic, self.layout = call, arithmetic, layout
        q_HTD, k_KTD = (rotated(x, cos, sin, rotation, arithmetic) for x in (call.query, call.key))
        if apart is not None:
            q_HTD, k_KTD = apart.among(call.query, q_HTD, rotation), apart.among(call.key, k_KTD, rotation)
        kv_heads = k_KTD.shape[0]
        self.q_KGTD = q_HTD.unflatten(0, (kv_heads, q_HTD.shape[0] // kv_heads))
        self.keys = operands(k_KTD, arithmetic.product)
        self.documents = None if layout is None else layout.document_ids.to(call.query.device)

    def scores(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Scores ``[K, G, Q, S]`` of some queries, not masked yet, and bool ``[Q, S]``: which keys they see."""
        seen = [k_KTD[:, :end] for k_KTD in self.keys]
        scores = _scores(self.q_KGTD[:, :, start:end], seen, self.call, self.arithmetic)
        return scores, _visible(start, end, self.call.window, self.layout, self.documents, scores.device)

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Attention weights ``[K, G, Q, S]``; the scores are masked in place."""
        # Keys before the block are hidden by a window or a layout alone.
        some = self.call.window is not None or (self.layout is not None and self.layout.pattern != "full")
        first = 0 if some else visible.shape[1] - visible.shape[0]
        scores[..., first:].masked_fill_(~visible[:, first:], -torch.inf)
        return scores.to(self.arithmetic.softmax).softmax(-1).to(self.arithmetic.weights)


def block_edges(
    length: int,
    heads: int,
    itemsize: int,
    lengths: Sequence[int],
    block_bytes: int | None,
    device: torch.device,
) -> list[int]:
    """Where blocks of queries begin and end: each holds ``block_bytes`` of scores, and ends at each of the lengths.

    With None, as many as suit the device.
    """
    a_query = heads * length * itemsize
    size = (BLOCK_BYTES if block_bytes is None else block_bytes) // a_query
    if block_bytes is None and device.type == "cpu":
        size = min(size, max(CPU_BLOCK_BYTES // a_query, CPU_QUERIES))
    return sorted({*range(0, length, max(1, size)), *(n for n in lengths if n < length), length})


def streamed_attention(
    call: AttentionCall,
    cos: Tensor,
    sin: Tensor,
    rotation: LayerRotation,
    arithmetic: Arithmetic,
    layout: PackedLayout | None = None,
    lengths: Sequence[int] = (),
    block_bytes: int | None = None,
    apart: RoundedTokens | None = None,
) -> tuple[Tensor, LayerTrace]:
    """Causal attention of one row.

    Args:
        call: queries and keys before rotation, values.
        cos, sin: ``[length, rotary_dim / 2]``.
        rotation: how the layer rotates.
        arithmetic: the precision of each step.
        layout: which tokens see each other; None for all earlier ones.
        lengths: tokens, increasing, for ``received_by``.
        block_bytes: size of the scores held at once; what suits the device if None.
        apart: tokens that are rotated in another arithmetic than the others.

    Returns:
        The output ``[heads, length, value_dim]`` in ``arithmetic.rest``, and the trace.
    """
    heads, length, _ = call.query.shape
    prepared = Prepared(call, cos, sin, rotation, arithmetic, layout, apart)
    # Once a layer: every block of queries sees most values.
    v_KTV = call.value.to(_sums_in(arithmetic))
    edges = block_edges(length, heads, arithmetic.wide.itemsize, lengths, block_bytes, call.query.device)
    received = torch.zeros(heads, length, dtype=torch.float64, device=call.query.device)
    seen_by, even = torch.zeros_like(received[0]), torch.zeros_like(received[0])
    received_by, outputs, first_scores = [], [], []
    for start, end in pairwise(edges):
        scores, visible = prepared.scores(start, end)
        # A new tensor, also where the scores are float64: a view would keep the whole block.
        first_scores.append(torch.where(visible[:, 0], scores[..., 0].flatten(0, 1).double(), 0.0))
        seen_by[:end] += visible.sum(0)
        even[:end] += (visible / visible.sum(1, keepdim=True)).sum(0, dtype=torch.float64)
        weights = prepared.weights(scores, visible)
        # Each block is let go before the next one is made.
        del scores
        received[:, :end] += _summed_over_queries(weights.flatten(0, 1))
        outputs.append(_weighted(weights, v_KTV[:, :end], arithmetic).flatten(0, 1))
        del weights
        if end in lengths:
            received_by.append(received.mean(0).cpu())
    trace = LayerTrace(
        received.cpu(),
        torch.stack(received_by) if received_by else torch.zeros(0, length, dtype=torch.float64),
        torch.cat(first_scores, dim=-1).cpu(),
        seen_by.cpu(),
        even.cpu(),
    )
    return torch.cat(outputs, dim=1), trace


def _scores(q_KGQD: Tensor, k_KSD: Sequence[Tensor], call: AttentionCall, arithmetic: Arithmetic) -> Tensor:
    # The queries of one key head in one product: broadcast, the keys would be copied for each of its heads.
    products = multiplied(operands(q_KGQD.flatten(1, 2), arithmetic.product), k_KSD)
    scores: Tensor = products.unflatten(1, q_KGQD.shape[1:3]).to(arithmetic.wide)
    _round(_round(scores, arithmetic.scores).mul_(call.scale), arithmetic.scores)
    if call.softcap is not None:
        _round(_round(scores.div_(call.softcap), arithmetic.scores).tanh_(), arithmetic.scores)
        _round(scores.mul_(call.softcap), arithmetic.scores)
    return scores


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As :func:`rounded`, in place."""
    return x if x.dtype == dtype else x.copy_(x.to(dtype))


def _summed_over_queries(weights_HQS: Tensor) -> Tensor:
    """float64 ``[H, S]``, head by head: a sum in a wider dtype first makes a copy of all that it sums."""
    return torch.stack([weights_QS.sum(0, dtype=torch.float64) for weights_QS in weights_HQS])


def _visible(
    start: int,
    end: int,
    window: int | None,
    layout: PackedLayout | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor:
    """bool ``[end - start, end]``: the rule of visibility, for some queries."""
    i = torch.arange(start, end, device=device)[:, None]
    j = torch.arange(end, device=device)[None, :]
    visible: Tensor = j <= i
    if window is not None:
        visible = visible & (i - j < window)
    if layout is not None and documents is not None and layout.pattern != "full":
        allowed = documents[start:end, None] == documents[None, :end]
        if layout.pattern == "anchor":
            allowed = allowed | (j < layout.anchor_length)
        visible = visible & allowed
    return visible


def _sums_in(arithmetic: Arithmetic) -> torch.dtype:
    """Sums of values run in float32, or in float64 where weights or values are wider than that."""
    return torch.float64 if torch.float64 in (arithmetic.weights, arithmetic.rest) else torch.float32


def _weighted(weights_KGQS: Tensor, v_KSV: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The mean of the values, ``[K, G, Q, V]``."""
    mean: Tensor = weights_KGQS.to(v_KSV.dtype).flatten(1, 2) @ v_KSV
    found: Tensor = mean.unflatten(1, weights_KGQS.shape[1:3])
    return found.to(arithmetic.rest)
