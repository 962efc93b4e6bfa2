"""What attention over packed rows must give: float64 oracles, and the error that rounding allows an engine.

An engine is held against attention by its definition in float64. How far it may be off is measured, not chosen: twice
the error of plain attention in the engine's dtype, and one rounding of the numbers that a result is computed from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.choices import PATTERNS, POSITIONS
from ropewalk.attention.engines.reference import plain_attention, softmax_of
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import PLAIN, AttentionOptions

# Shapes: B rows, H query heads, K key/value heads, T tokens of a row, D head dim, V value dim.

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of ``[B, H, T, D]`` queries, ``[B, K, T, D]`` keys and ``[B, K, T, V]`` values: ``[B, H, T, V]``."""

Values = tuple[Tensor, ...]
"""The output, and the gradients of queries, keys and values where there are any."""


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention by the layouts' definition, in the dtype of its inputs; give float64 for an oracle.

    Args and returns: as :func:`ropewalk.attend`, one layout a row.
    """
    return plain_attention(q, k, v, _visible(layouts, options, q.device), options)


def repeated_anchor_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Anchor attention of one row as AnchorContext computes it: the anchor stands before every document.

    Independent of the mask and of the engines: each document is run by itself behind a copy of the anchor.
    """
    output = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    anchor = torch.arange(layout.anchor_length)
    for document in layout.document_ids.unique().tolist():
        own = (layout.document_ids == document).nonzero().flatten()
        index = own if document < 0 else torch.cat([anchor, own])
        causal = torch.ones(len(index), len(index), dtype=torch.bool).tril().to(q.device)
        part = plain_attention(q[:, :, index], k[:, :, index], v[:, :, index], causal, PLAIN)
        output[:, :, own] = part[:, :, len(index) - len(own) :]
    return output


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Plain attention that rounds where a fused kernel rounds, and nowhere else; the error of this is the budget's.

    Scores and their softmax are float32 or wider. What enters a matrix product is rounded to the dtype of the inputs:
    weights in the forward pass, gradients of the scores in the backward. Scores of 100 that are
    rounded to bfloat16 are no attention any more.

    Args and returns: as :func:`oracle_attention`.
    """
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    scores = q @ k.repeat_interleave(groups, dim=1).transpose(-2, -1) * options.scale_of(q.shape[-1])
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad.to(dtype).to(wide))
    weights = softmax_of(scores, _visible(layouts, options, q.device), options)
    # The rounding has no gradient of its own.
    rounded = weights + (weights.to(dtype).to(wide) - weights).detach()
    return (rounded @ v.repeat_interleave(groups, dim=1)).to(dtype)


def cotangent_of(q: Tensor, v: Tensor) -> Tensor:
    """What the backward of q, k, v is given: ``[B, H, T, V]``, the same at every call and on every rank.

    In the queries' dtype, so that its rounding is nobody's error.
    """
    shape = (*q.shape[:3], v.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(q.device, q.dtype)


def values_of(attention: Attention, inputs: Sequence[Tensor], cotangent: Tensor | None) -> Values:
    """Output of an attention, and the gradients of its inputs.

    Args:
        attention: to run.
        inputs: q, k and v.
        cotangent: of the output, or None for an attention without a backward.
    """
    leaves = [x.detach().requires_grad_(cotangent is not None) for x in inputs]
    output = attention(*leaves)
    gradients = () if cotangent is None else torch.autograd.grad(output, leaves, cotangent.to(output.dtype))
    return tuple(x.detach() for x in (output, *gradients))


@dataclass(frozen=True)
class AttentionErrors:
    """Largest deviations from the float64 oracle, of an engine and of plain attention in the same dtype.

    Attributes:
        engine: for output and gradients of q, k, v in turn.
        plain: the same for plain attention in the engine's dtype, :func:`fused_attention`.
        unit: one rounding, in that dtype, of the largest value that each is computed from: what "equal" can
            mean at best. For the gradients of q and k these are the products of cotangent and value before
            their mean is taken away: where the two cancel, the difference is all rounding. For that of v it is the
            sum over queries without its signs, for the same reason, and half a rounding for each level of a
            pairwise sum, since no kernel sums all queries of a group exactly. Where the largest score
            is beyond 4, a rounding is half a unit in its last place, in float32 or wider: weights come from scores, and
            in a fused backward from a log-sum-exp of that size, which are rounded to the nearest.
    """

    engine: tuple[float, ...]
    plain: tuple[float, ...]
    unit: tuple[float, ...]

    @property
    def budgets(self) -> tuple[float, ...]:
        """How far the engine may be off: ``2 * plain + unit``."""
        return tuple(2 * p + u for p, u in zip(self.plain, self.unit, strict=True))

    @property
    def worst(self) -> tuple[float, float, float]:
        """Share of its budget, error and budget, of what uses most of it."""
        return max(
            (error / budget if error else 0.0, error, budget)
            for error, budget in zip(self.engine, self.budgets, strict=True)
        )

    @property
    def worst_share(self) -> float:
        """The largest error as a share of the budget; at most 1 is within it."""
        return self.worst[0]


@dataclass(frozen=True, eq=False)
class ExactAttention:
    """What attention of some rows must give, and what rounding allows an engine in the dtype of their queries.

    Attributes:
        values: float64 output and gradients.
        plain, unit: as of :class:`AttentionErrors`.
    """

    values: Values
    plain: tuple[float, ...]
    unit: tuple[float, ...]

    @classmethod
    def of(
        cls,
        inputs: Sequence[Tensor],
        layouts: Sequence[PackedLayout],
        options: AttentionOptions = PLAIN,
        gradients: bool = True,
    ) -> ExactAttention:
        """Compute it.

        Args:
            inputs: q, k and v as for :func:`ropewalk.attend`, in the dtype of the engine to judge.
            layouts: one a row.
            options: as for attend.
            gradients: whether the engine has a backward.
        """
        q, cotangent = inputs[0], cotangent_of(inputs[0], inputs[2]) if gradients else None

        def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return oracle_attention(q, k, v, layouts, options)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fused_attention(q, k, v, layouts, options)

        wide_inputs = [x.detach().double() for x in inputs]
        wide_cotangent = None if cotangent is None else cotangent.double()
        exact = values_of(oracle, wide_inputs, wide_cotangent)
        sources = [0.0]
        if wide_cotangent is not None:
            sources += _gradient_sources(oracle, wide_inputs, wide_cotangent, options.scale_of(q.shape[-1]))
        # Of a weight, by the score or log-sum-exp that it is taken from: an error there is relative to the weight.
        rounding = max(torch.finfo(q.dtype).eps, _score_rounding(inputs, layouts, options))
        unit = (rounding * max(float(x.abs().max()), size) for x, size in zip(exact, sources, strict=True))
        return cls(exact, _largest_errors(values_of(plain, inputs, cotangent), exact), tuple(unit))

    def errors_of(self, found: Values) -> AttentionErrors:
        """How far an engine's output and gradients are off, and may be."""
        return AttentionErrors(_largest_errors(found, self.values), self.plain, self.unit)


def attention_errors(
    engine: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    options: AttentionOptions = PLAIN,
    gradients: bool = True,
) -> AttentionErrors:
    """Hold an engine against the float64 oracle, output and gradients.

    Args:
        engine: the attention to test, of q, k, v.
        q, k, v: as for :func:`ropewalk.attend`, in the dtype to test in.
        layouts: one a row.
        options: as for attend.
        gradients: whether the engine has a backward.

    Example:
        >>> from functools import partial
        >>> layout = PackedLayout.from_lengths([30, 12])
        >>> q, k, v = torch.randn(3, 1, 2, 43, 16).unbind()
        >>> attention_errors(partial(ropewalk.attend, layout=layout), q, k, v, [layout]).worst_share <= 1
        True
    """
    exact = ExactAttention.of((q, k, v), layouts, options, gradients)
    return exact.errors_of(values_of(engine, (q, k, v), cotangent_of(q, v) if gradients else None))


def _gradient_sources(
    oracle: Attention, inputs: Sequence[Tensor], cotangent: Tensor, scale: float
) -> list[float]:
    """The largest values that the gradients of q, k and v are computed from."""
    q, k, v = inputs
    products = float(cotangent.norm(dim=-1).max() * v.norm(dim=-1).max()) * abs(scale)
    queries = q.shape[2] * q.shape[1] // k.shape[1]
    values = v.detach().requires_grad_()
    (summed,) = torch.autograd.grad(oracle(q, k, values), values, cotangent.abs())
    levels = max(1.0, math.log2(queries) / 2)
    return [products * float(k.abs().max()), products * float(q.abs().max()), float(summed.max()) * levels]


def _score_rounding(
    inputs: Sequence[Tensor], layouts: Sequence[PackedLayout], options: AttentionOptions
) -> float:
    """Half a unit in the last place of the largest score that any query sees, as a kernel holds it."""
    q, k, _ = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.detach().double() @ keys.transpose(-2, -1) * options.scale_of(q.shape[-1])
    seen = scores.abs().masked_fill(~_visible(layouts, options, q.device), 0.0)
    largest = min(float(seen.max()), math.inf if options.softcap is None else options.softcap)
    return float(torch.finfo(wide).eps) * 2.0 ** (math.frexp(largest)[1] - 2)


def _largest_errors(found: Values, exact: Values) -> tuple[float, ...]:
    # NaN must not slip through a maximum.
    return tuple(
        float((a.double().to(b.device) - b).abs().nan_to_num(nan=math.inf).max())
        for a, b in zip(found, exact, strict=True)
    )


def _visible(layouts: Sequence[PackedLayout], options: AttentionOptions, device: torch.device) -> Tensor:
    """bool ``[rows, 1, T, T]``: which query sees which key."""
    return torch.stack([layout.dense_mask(options.locality) for layout in layouts]).unsqueeze(1).to(device)


def cut_row(total: int, documents: int, rng: random.Random) -> list[int]:
    """Lengths of ``documents`` documents, at least 1 token each, that add up to ``total``."""
    documents = min(documents, total)
    cuts = sorted(rng.sample(range(1, total), documents - 1))
    return [after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True)]


def random_layout(
    total: int,
    rng: random.Random,
    max_documents: int = 8,
    patterns: Sequence[str] = PATTERNS,
    interleaved: bool = False,
    max_anchor: int = 1,
) -> PackedLayout:
    """A random layout of a row of ``total`` tokens, the anchor included, for property tests.

    Args:
        total: tokens of the row, more than ``max_anchor``.
        rng: source of randomness; the same state gives the same layout.
        max_documents: at most this many documents (or segments).
        patterns: patterns to choose from.
        interleaved: whether segments may share documents in any order.
        max_anchor: longest anchor.
    """
    anchor = rng.randint(0, max_anchor)
    lengths = cut_row(total - anchor, rng.randint(1, max_documents), rng)
    documents = list(range(len(lengths)))
    if interleaved:
        documents = [rng.randrange(max(1, len(lengths) // 2)) for _ in lengths]
    pattern, positions = rng.choice(list(patterns)), rng.choice(list(POSITIONS))
    return PackedLayout.from_segments(lengths, documents, pattern, anchor, positions)  # type: ignore[arg-type]
