"""Float64 oracles of attention over packed rows, and the error that rounding allows an engine.

Each engine is compared with attention as defined, in float64. Its error budget is measured rather than chosen: twice
the error of plain attention in the engine's dtype, plus one rounding of the numbers that a result is computed from.
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
"""A function of ``[B, H, T, D]`` queries, ``[B, K, T, D]`` keys and ``[B, K, T, V]`` values to ``[B, H, T, V]``."""

Values = tuple[Tensor, ...]
"""The output, followed by the gradients of queries, keys and values if they were computed."""


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention as the layouts define it, in the dtype of its inputs. Pass float64 for an oracle.

    Arguments and return value are those of :func:`ropewalk.attend`, with one layout for each row.
    """
    return plain_attention(q, k, v, _visible(layouts, options, q.device), options)


def repeated_anchor_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Anchor attention of one row as AnchorContext computes it, with the anchor in front of every document.

    Independent of the mask and of the engines: each document is run separately behind a copy of the anchor.
    """
    output = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    anchor = torch.arange(layout.anchor_length)
    for document in layout.document_ids.unique().tolist():
        own = (layout.document_ids == document).nonzero().flatten()
        index = own if document < 0 else torch.cat([anchor, own])
        causal = torch.ones(len(index), len(index), dtype=torch.bool).tril().to(q.device)
        part = plain_attention(q[:, :, index], k[:, :, index], v[:, :, index], causal, PLAIN)
        # Drops the outputs of the anchor's copy; the anchor's own come from its turn as document -1.
        output[:, :, own] = part[:, :, len(index) - len(own) :]
    return output


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Plain attention that rounds only where a fused kernel rounds. Its error is the basis of the error budget.

    Scores and their softmax are float32 or wider. The operands of a matrix product are rounded to the dtype of the
    inputs: weights in the forward pass, gradients of the scores in the backward pass. Scores are not rounded: at a
    score of 100 the spacing of bfloat16 is 0.5, which would change the softmax entirely.

    Arguments and return value are those of :func:`oracle_attention`.
    """
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    scores = q @ k.repeat_interleave(groups, dim=1).transpose(-2, -1) * options.scale_of(q.shape[-1])
    if scores.requires_grad:
        # Fused kernels round the scores' gradient before its products, so the error budget must include that.
        scores.register_hook(lambda grad: grad.to(dtype).to(wide))
    weights = softmax_of(scores, _visible(layouts, options, q.device), options)
    # Straight-through: the forward pass sees rounded weights, the backward pass differentiates the exact ones.
    rounded = weights + (weights.to(dtype).to(wide) - weights).detach()
    return (rounded @ v.repeat_interleave(groups, dim=1)).to(dtype)


def cotangent_of(q: Tensor, v: Tensor) -> Tensor:
    """The gradient of the output that starts the backward pass: ``[B, H, T, V]``, equal in every call and rank.

    It has the queries' dtype, so that rounding it does not count as an engine's error.
    """
    shape = (*q.shape[:3], v.shape[-1])
    # Drawn on the CPU, because generators of other devices give other numbers for the same seed.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(q.device, q.dtype)


def values_of(attention: Attention, inputs: Sequence[Tensor], cotangent: Tensor | None) -> Values:
    """Output of an attention function and the gradients of its inputs.

    Args:
        attention: function to run.
        inputs: q, k and v.
        cotangent: gradient of the output, or None for an attention without a backward pass.
    """
    leaves = [x.detach().requires_grad_(cotangent is not None) for x in inputs]
    output = attention(*leaves)
    gradients = () if cotangent is None else torch.autograd.grad(output, leaves, cotangent.to(output.dtype))
    return tuple(x.detach() for x in (output, *gradients))


@dataclass(frozen=True)
class AttentionErrors:
    """Largest deviations from the float64 oracle, of an engine and of plain attention in the same dtype.

    Attributes:
        engine: errors of the engine's output, then of the gradients of q, k and v.
        plain: the same errors of plain attention in the engine's dtype, see :func:`fused_attention`.
        unit: one rounding, in that dtype, of the largest value that each result is computed from; no implementation
            can be expected to come closer. For the gradients of q and k these values are the products of cotangent
            and value before their mean is subtracted: where the two cancel, only rounding remains. For the gradient
            of v it is the sum over queries of absolute values, for the same reason, with half a rounding for each
            level of a pairwise sum, since no kernel sums all queries of a group exactly. One rounding is at least half
            a unit in the last place of the largest score or log-sum-exp in float32 or wider: weights are computed from
            scores, and in a fused backward pass from a log-sum-exp, both rounded to nearest. It is at least twice that
            where an anchor is merged, by weights that are computed from two log-sum-exps.
    """

    engine: tuple[float, ...]
    plain: tuple[float, ...]
    unit: tuple[float, ...]

    @property
    def budgets(self) -> tuple[float, ...]:
        """Error budget of the engine for each result: ``2 * plain + unit``."""
        return tuple(2 * p + u for p, u in zip(self.plain, self.unit, strict=True))

    @property
    def worst(self) -> tuple[float, float, float]:
        """The largest share of a budget that is used, with the error and the budget of that result."""
        return max(
            (error / budget if error else 0.0, error, budget)
            for error, budget in zip(self.engine, self.budgets, strict=True)
        )

    @property
    def worst_share(self) -> float:
        """The largest error as a share of its budget; at most 1 means within the budget."""
        return self.worst[0]


@dataclass(frozen=True, eq=False)
class ExactAttention:
    """Exact attention of some rows, and the rounding that an engine in the dtype of their queries is allowed.

    Attributes:
        values: float64 output and gradients.
        plain, unit: error and rounding as in :class:`AttentionErrors`.
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
        """Compute the exact values and the errors of plain attention.

        Args:
            inputs: q, k and v as for :func:`ropewalk.attend`, in the dtype of the engine to judge.
            layouts: one layout for each row.
            options: attention parameters of the layer.
            gradients: whether the engine has a backward pass.
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
        # An error of a score or log-sum-exp is a relative error of the weight, so it counts like rounding the weight.
        rounding = max(torch.finfo(q.dtype).eps, _score_rounding(inputs, layouts, options))
        unit = (rounding * max(float(x.abs().max()), size) for x, size in zip(exact, sources, strict=True))
        return cls(exact, _largest_errors(values_of(plain, inputs, cotangent), exact), tuple(unit))

    def errors_of(self, found: Values) -> AttentionErrors:
        """The errors of an engine's output and gradients, with the errors that are allowed."""
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
    """Compare an engine's output and gradients with the float64 oracle.

    Args:
        engine: attention function of q, k and v to test.
        q, k, v: as for :func:`ropewalk.attend`, in the dtype to test.
        layouts: one layout for each row.
        options: attention parameters of the layer.
        gradients: whether the engine has a backward pass.

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
    """The largest values from which the gradients of q, k and v are computed."""
    q, k, v = inputs
    products = float(cotangent.norm(dim=-1).max() * v.norm(dim=-1).max()) * abs(scale)
    queries = q.shape[2] * q.shape[1] // k.shape[1]
    values = v.detach().requires_grad_()
    (summed,) = torch.autograd.grad(oracle(q, k, values), values, cotangent.abs())
    # Rounding grows with the depth of a pairwise sum, log2 of the summands; half a rounding for each level.
    levels = max(1.0, math.log2(queries) / 2)
    return [products * float(k.abs().max()), products * float(q.abs().max()), float(summed.max()) * levels]


def _score_rounding(
    inputs: Sequence[Tensor], layouts: Sequence[PackedLayout], options: AttentionOptions
) -> float:
    """Half a unit in the last place of the largest score or log-sum-exp, in the dtype in which a kernel stores them.

    Weights by which an anchor is merged are computed from two log-sum-exps, so there it is twice that.
    """
    q, k, _ = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.detach().double() @ keys.transpose(-2, -1) * options.scale_of(q.shape[-1])
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    visible = _visible(layouts, options, q.device)
    sums = scores.masked_fill(~visible, -math.inf).logsumexp(-1)
    if options.sinks is not None:
        sums = torch.logaddexp(sums, options.sinks.detach().double()[None, :, None])
    largest = max(float(scores.abs().masked_fill(~visible, 0.0).max()), float(sums.abs().max()))
    # frexp returns a mantissa in [0.5, 1): the unit in the last place is eps * 2^(exponent - 1), and this is its half.
    rounding = float(torch.finfo(wide).eps) * 2.0 ** (math.frexp(largest)[1] - 2)
    return rounding * (2 if any(layout.pattern == "anchor" for layout in layouts) else 1)


def _largest_errors(found: Values, exact: Values) -> tuple[float, ...]:
    # max() may drop a NaN, so it is counted as an infinite error.
    return tuple(
        float((a.double().to(b.device) - b).abs().nan_to_num(nan=math.inf).max())
        for a, b in zip(found, exact, strict=True)
    )


def _visible(layouts: Sequence[PackedLayout], options: AttentionOptions, device: torch.device) -> Tensor:
    """bool ``[rows, 1, T, T]``: whether a query sees a key."""
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
