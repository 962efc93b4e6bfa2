"""Attention of one row in blocks of queries, each step in its own precision, and what each token received of it.

The attention difference needs no attention matrix: the attention that a token receives, summed over the queries, is
enough, and sums over queries can be taken block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ropewalk.integrations.intercept import AttentionCall, LayerRotation, joined, rotate
from ropewalk.packing import PackedLayout
from ropewalk.precision.arithmetic import Arithmetic, inner_products, operand, rounded

# Shapes: H query heads, K key/value heads, G = H / K, T row length, Q queries of a block, S keys seen, D head dim.

BLOCK_BYTES = 64 * 2**20
"""Size of the scores of one block of queries; the peak is about five times this, beside the layer's own tensors."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What is kept of one layer's attention; float64 on the CPU.

    Attributes:
        received: ``[heads, length]``: the attention that each token received, summed over queries.
        received_by: ``[lengths, length]``: the same for the row cut off at each of some lengths, mean over heads.
        first_scores: ``[heads, length]``: each query's score (logit) of the row's first token.
    """

    received: Tensor
    received_by: Tensor
    first_scores: Tensor


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
        found = operand(rotated(x, self.cos, self.sin, rotation, self.arithmetic), self.arithmetic.product)
        return torch.where(self.tokens.to(x.device)[:, None], found.to(exact.dtype), exact)


def streamed_attention(
    call: AttentionCall,
    cos: Tensor,
    sin: Tensor,
    rotation: LayerRotation,
    arithmetic: Arithmetic,
    layout: PackedLayout | None = None,
    lengths: Sequence[int] = (),
    block_bytes: int = BLOCK_BYTES,
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
        block_bytes: size of the scores held at once.
        apart: tokens that are rotated in another arithmetic than the others.

    Returns:
        The output ``[heads, length, value_dim]`` in ``arithmetic.rest``, and the trace.
    """
    heads, length, _ = call.query.shape
    kv_heads = call.key.shape[0]
    q_HTD, k_KTD = (rotated(x, cos, sin, rotation, arithmetic) for x in (call.query, call.key))
    if apart is not None:
        q_HTD, k_KTD = apart.among(call.query, q_HTD, rotation), apart.among(call.key, k_KTD, rotation)
    q_KGTD, k_K1TD = q_HTD.unflatten(0, (kv_heads, heads // kv_heads)), k_KTD[:, None]
    v_K1TV = call.value[:, None]
    size = max(1, block_bytes // (heads * length * arithmetic.wide.itemsize))
    edges = sorted({*range(0, length, size), *(n for n in lengths if n < length), length})
    documents = None if layout is None else layout.document_ids.to(call.query.device)
    received = torch.zeros(heads, length, dtype=torch.float64, device=call.query.device)
    received_by, outputs, first_scores = [], [], []
    for start, end in pairwise(edges):
        scores = _scores(q_KGTD[:, :, start:end], k_K1TD[:, :, :end], call, arithmetic)
        # A copy, also where the scores are float64: a view would keep the whole block, and see it masked.
        first_scores.append(scores[..., 0].flatten(0, 1).to(torch.float64, copy=True))
        visible = _visible(start, end, call.window, layout, documents, scores.device)
        weights = scores.masked_fill_(~visible, -torch.inf).to(arithmetic.softmax).softmax(-1)
        weights = weights.to(arithmetic.weights)
        received[:, :end] += weights.flatten(0, 1).sum(-2, dtype=torch.float64)
        outputs.append(_weighted(weights, v_K1TV[:, :, :end], arithmetic).flatten(0, 1))
        if end in lengths:
            received_by.append(received.mean(0).cpu())
    trace = LayerTrace(
        received.cpu(),
        torch.stack(received_by) if received_by else torch.zeros(0, length, dtype=torch.float64),
        torch.cat(first_scores, dim=-1).cpu(),
    )
    return torch.cat(outputs, dim=1), trace


def _scores(q_KGQD: Tensor, k_K1SD: Tensor, call: AttentionCall, arithmetic: Arithmetic) -> Tensor:
    scores = inner_products(q_KGQD, k_K1SD, arithmetic.product).to(arithmetic.wide)
    scores = rounded(rounded(scores, arithmetic.scores).mul_(call.scale), arithmetic.scores)
    if call.softcap is not None:
        capped = rounded(torch.tanh(rounded(scores / call.softcap, arithmetic.scores)), arithmetic.scores)
        scores = rounded(capped * call.softcap, arithmetic.scores)
    return scores


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


def _weighted(weights: Tensor, v_K1SV: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The mean of the values: sums in float32, or in float64 where weights or values are wider than that."""
    wide = torch.float64 if torch.float64 in (arithmetic.weights, arithmetic.rest) else torch.float32
    return (weights.to(wide) @ v_K1SV.to(wide)).to(arithmetic.rest)
