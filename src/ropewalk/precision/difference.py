"""The attention difference D and its relatives, from the attention that each token received in two passes.

D(X, Δ1, Δ2) = Σ_j | Σ_i (A^{Δ1}_ij − A^{Δ2}_ij) |, with A the mean over heads of the attention of query i to token j in
a row X whose first position is Δ; then the mean over layers. One unit is the whole attention of one query, and a
row of T tokens has T. Exact relative positions make it 0.

Source: Wang et al., arXiv:2411.13476, equations 4 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ropewalk.precision.passes import Pass
from ropewalk.precision.results import Sink


def attention_change(first: Pass, second: Pass) -> Tensor:
    """float64 ``[layers, length]``: how much more attention each token received in the first pass, mean over heads."""
    return first.received.mean(1) - second.received.mean(1)


def attention_difference(change: Tensor) -> float:
    """D of a change ``[layers, length]``: mean over layers of the sum of its absolute values."""
    return float(change.abs().sum(-1).mean())


def share_of(change: Tensor, token: int) -> float:
    """How much of D falls on one token, 0 to 1; NaN where D is 0."""
    total = float(change.abs().sum())
    return float(change[:, token].abs().sum()) / total if total else math.nan


def token_parts(change: Tensor) -> Tensor:
    """float64 ``[length]``: each token's part of D; they add up to D."""
    return change.abs().mean(0)


def head_differences(first: Pass, second: Pass) -> Tensor:
    """float64 ``[layers, heads]``: D of each head by itself."""
    return (first.received - second.received).abs().sum(-1)


@dataclass(frozen=True, eq=False)
class ByLength:
    """Differences in a row cut off at each of some lengths, float64 ``[lengths]``.

    Attributes:
        D: attention difference.
        D_logit: sum over queries of the absolute difference of the first token's score, mean over layers and heads.
    """

    D: Tensor
    D_logit: Tensor


def by_length(first: Pass, second: Pass, lengths: tuple[int, ...]) -> ByLength:
    """D and D_logit of two passes' rows, as if cut off at each length: later tokens change nothing before them."""
    changes = first.received_by - second.received_by
    scores = (first.first_scores - second.first_scores).abs().mean((0, 1)).cumsum(-1)
    return ByLength(changes.abs().sum(-1).mean(0), scores[[length - 1 for length in lengths]])


def attention_sink(found: Pass) -> Sink:
    """Which token of a row receives most attention of the queries that see it.

    Only the first half of the row is looked at: what few queries see has no meaning as a mean.
    """
    # Layers with a sliding window let fewer queries see a token.
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
        max(sorted(set(indices)), key=indices.count),
        mean("attention"),
        mean("first_attention"),
        mean("even_attention"),
        mean("strongest_head"),
    )
