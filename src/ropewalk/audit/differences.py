"""Differences of attention between passes of one row, and the token that attracts most attention."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ropewalk.audit.layer_attention import block_edges
from ropewalk.audit.passes import Pass, Runner
from ropewalk.audit.replaced_attention import float32_products
from ropewalk.audit.results import Sink

Term = tuple[float, Pass]
"""A factor, and the pass whose attention it multiplies."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, eq=False)
class AttentionDifference:
    """A difference of attention, on the CPU in float64.

    Attributes:
        sums: ``[layers, heads, length]``: for each token, the sum over queries of the absolute difference.
        sums_at: ``[lengths, length]``: the same for the row truncated at each length, summed over layers and heads.
        lengths: the lengths in ``sums_at``, in tokens.
    """

    sums: Tensor
    sums_at: Tensor
    lengths: tuple[int, ...]

    @property
    def heads(self) -> Tensor:
        """``[layers, heads]``: each head's part of D."""
        return (self.sums / queries_from(self.sums.shape[-1])).sum(-1)

    @property
    def tokens(self) -> Tensor:
        """``[length]``: each token's part of D."""
        return (self.sums / queries_from(self.sums.shape[-1])).sum((0, 1))

    @property
    def D(self) -> float:
        return float(self.heads.sum())

    @property
    def moved(self) -> float:
        """The share of all attention that moves to other tokens, 0 to 1: one token's loss is another's gain.

        Attention lost to a learned sink, or gained from it, counts half.
        """
        return float(self.sums.sum()) / 2 / self.sums.numel()

    @property
    def D_at(self) -> list[float]:
        """D of the row truncated at each length."""
        found = []
        for length, sums in zip(self.lengths, self.sums_at, strict=True):
            found.append(float((sums[:length] / queries_from(length)).sum()))
        return found

    def share_of(self, token: int) -> float:
        """The share of D that falls on one token, 0 to 1; NaN if D is 0."""
        return float(self.tokens[token]) / self.D if self.D else math.nan


def queries_from(length: int) -> Tensor:
    """float64 ``[length]``: number of queries at or after each token, whatever a layout lets them see."""
    return length - torch.arange(length, dtype=torch.float64)


def differences(
    runner: Runner, wanted: Mapping[Name, Sequence[Term]], lengths: tuple[int, ...] = ()
) -> dict[Name, AttentionDifference]:
    """The absolute values of weighted sums of passes' attention, summed over queries; each pass is computed once.

    Args:
        runner: the runner that made the passes.
        wanted: the terms of each difference by name: factors, and passes of one row that kept their ``layers``, such as
            ``(1, a), (-1, b)``.
        lengths: lengths for ``sums_at`` in tokens, increasing.
    """
    passes = _passes(*wanted.values())
    layers, heads, length = passes[0].received.shape
    sums = {name: torch.zeros(layers, heads, length, dtype=torch.float64) for name in wanted}
    sums_at = {name: torch.zeros(len(lengths), length, dtype=torch.float64) for name in wanted}
    # Allocating costs more than summing, so a tensor that nobody needs afterwards is overwritten.
    once = sum(map(len, wanted.values())) == len(passes) and len(wanted) == 1
    for layer, end, weights in _blocks(runner, passes, lengths):
        scratch = weights[passes[0]] if once else torch.empty_like(weights[passes[0]])
        for name, terms in wanted.items():
            found = sums[name]
            found[layer, :, :end] += _weighted_sum(terms, weights, scratch).abs_().sum(-2).cpu()
            # Every length is the end of a block, so the sums up to there are those of the truncated row.
            for number, cut in enumerate(lengths):
                if end == cut:
                    sums_at[name][number] += found[layer].sum(0)
    return {name: AttentionDifference(sums[name], sums_at[name], lengths) for name in wanted}


def share(runner: Runner, whole: Sequence[Term], part: Sequence[Term]) -> tuple[float, float]:
    """The contribution of a part of a change of attention to the D of the whole change, and that D.

    Contributions of parts that add up to the whole add up to its D.
    """
    passes = _passes(whole, part)
    added = total = 0.0
    for _, end, weights in _blocks(runner, passes, ()):
        first, second = (
            _weighted_sum(terms, weights, torch.empty_like(weights[passes[0]])) for terms in (whole, part)
        )
        seen = queries_from(passes[0].received.shape[-1])[:end].to(first.device)
        total += float((first.abs() / seen).sum())
        # sign(whole) * part: over parts that add up to the whole, these terms add up to |whole|.
        added += float((first.sign() * second / seen).sum())
    return added, total


def _passes(*terms: Sequence[Term]) -> list[Pass]:
    """The distinct passes of some terms, in order of appearance."""
    return list(dict.fromkeys(found for each in terms for _, found in each))


def _weighted_sum(terms: Sequence[Term], weights: Mapping[Pass, Tensor], into: Tensor) -> Tensor:
    """The weighted sum; it may reuse the memory of the first term."""
    (factor, first), *others = terms
    torch.mul(weights[first], factor, out=into)
    for factor, each in others:
        into.add_(weights[each], alpha=factor)
    return into


def _blocks(
    runner: Runner, passes: Sequence[Pass], lengths: tuple[int, ...]
) -> Iterator[tuple[int, int, dict[Pass, Tensor]]]:
    """Layer, end of the block of queries, and each pass's attention ``[heads, queries, keys]`` in float64."""
    layers, heads, length = passes[0].received.shape
    # The float64 weights of all passes are in memory at once, 8 bytes each.
    edges = block_edges(
        length, heads, 8 * len(passes), lengths, runner.block_bytes, runner.audited_model.device
    )
    for layer in range(layers):
        prepared = {found: runner.prepared(found, layer) for found in passes}
        for start, end in pairwise(edges):
            with float32_products(), torch.no_grad():
                weights = {
                    found: one.weights(*one.scores(start, end)).flatten(0, 1).double()
                    for found, one in prepared.items()
                }
            yield layer, end, weights


def logit_differences(first: Pass, second: Pass, lengths: tuple[int, ...]) -> list[float]:
    """D_logit of the row truncated at each length T: Σ_layers Σ_heads 1/T Σ_i | S^{Δ1}_i0 − S^{Δ2}_i0 |.

    S_i0 is the score, before softmax, that query i gives the row's first token.
    """
    scores = (first.first_scores - second.first_scores).abs().sum((0, 1)).cumsum(-1)
    return [float(scores[length - 1]) / length for length in lengths]


def attention_sink(found: Pass) -> Sink:
    """The token of a row that receives most attention from the queries that see it.

    Only the first half of the row is considered: a mean over the few queries that see a late token is meaningless.
    """
    # With a sliding window, fewer queries see a token.
    by_query = found.received / found.seen_by[:, None]
    mean = by_query.mean((0, 1))[: max(1, found.received.shape[-1] // 2)]
    index = int(mean.argmax())
    return Sink(
        index=index,
        attention=float(mean[index]),
        first_attention=float(mean[0]),
        even_attention=float((found.even / found.seen_by).mean(0)[0]),
        strongest_head=float(by_query[..., 0].max()),
    )


def mean_sink(sinks: list[Sink]) -> Sink:
    """Over rows: the most frequent index, and mean values."""
    indices = [sink.index for sink in sinks]

    def mean(name: str) -> float:
        return float(sum(getattr(sink, name) for sink in sinks)) / len(sinks)

    return Sink(
        # Sorted, so that of equally frequent tokens the earliest wins.
        max(sorted(set(indices)), key=indices.count),
        mean("attention"),
        mean("first_attention"),
        mean("even_attention"),
        mean("strongest_head"),
    )
