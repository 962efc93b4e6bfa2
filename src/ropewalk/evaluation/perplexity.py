"""Perplexity by position: what a model makes of context that lies further and further back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import PositionBin
from ropewalk.evaluation.running import Progress, evaluating
from ropewalk.evaluation.statistics import bootstrap_interval
from ropewalk.integrations.losses import OutputHead, token_losses
from ropewalk.packing import IGNORED, Row

MOST_BINS = 8
PLAIN_BINS = 4


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of some rows.

    Attributes:
        bins: by position, in order.
        overall: all positions of the rows, also those outside the bins.
    """

    bins: tuple[PositionBin, ...]
    overall: PositionBin


def default_bins(length: int, trained_length: int | None) -> list[int]:
    """Edges of position bins such that the trained length is one of them.

    Up to eight times the trained length, every bin is as long as it; beyond, each is as long as all before it
    together, and the eighth takes what is left. A row no longer than the trained length is cut in four.

    Args:
        length: tokens of a row.
        trained_length: tokens, at least 1; None where it is not known.

    Example:
        >>> default_bins(2048, 512)
        [0, 512, 1024, 1536, 2048]
    """
    if trained_length is not None and trained_length < 1:
        raise RopewalkError(f"trained_length must be 1 token or more, got {trained_length}")
    if trained_length is None or length <= trained_length:
        return sorted({length * part // PLAIN_BINS for part in range(PLAIN_BINS + 1)})
    if length <= MOST_BINS * trained_length:
        return [*range(0, length, trained_length), length]
    doubled = [trained_length * 2**power for power in range(MOST_BINS - 1)]
    return [0, *(edge for edge in doubled if edge < length), length]


def perplexity_by_position(
    model: Any,
    head: OutputHead,
    rows: Sequence[Row],
    bin_edges: Sequence[int],
    progress: Progress | None = None,
    seed: int = 0,
) -> PerplexityResult:
    """Token-weighted perplexity of rows, by the index of the target's row position.

    The loss at index t, of the token that follows it, belongs to the bin of t: t + 1 tokens were seen.

    Args:
        model: a model from ``load_model``; its training mode is left as it was.
        head: its output head.
        rows: pattern ``full``; one forward pass each.
        bin_edges: tokens, strictly increasing, at least two.
        progress: called after each row.
        seed: of the bootstrap.

    Returns:
        A bin for each pair of neighbouring edges, with 95 % bootstrap intervals over rows. A loss that is not
        finite makes its bin's perplexity so.

    Raises:
        RopewalkError: if there are no rows, a row has another pattern, or the edges do not increase.
        EngineError: if the model or its engine cannot take such rows.
    """
    edges = list(bin_edges)
    check_rows(rows)
    if len(edges) < 2 or edges[0] < 0 or any(b <= a for a, b in pairwise(edges)):
        raise RopewalkError(f"bin edges must increase from 0 or more, got {edges}")
    scored = []
    with evaluating(model):
        for done, row in enumerate(rows, start=1):
            scored.append(row_losses(model, head, row))
            if progress is not None:
                progress(done, len(rows))
    longest = max(row.layout.total_length for row in rows)
    bins = [_bin(scored, start, end, seed) for start, end in pairwise(edges)]
    return PerplexityResult(tuple(bins), _bin(scored, 0, longest, seed))


_Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]


def check_rows(rows: Sequence[Row]) -> None:
    """Raise where there are no rows, or one in which the index of a token is not how many came before it."""
    if not rows:
        raise RopewalkError("perplexity needs at least one row, got none")
    for row in rows:
        if row.layout.pattern != "full":
            raise RopewalkError(
                f"perplexity by position needs rows of pattern full, got {row.layout.pattern}"
            )


def row_losses(model: Any, head: OutputHead, row: Row) -> _Scored:
    """Losses in nats, 0 where there is no target, and where there is one, both ``[total_length]``."""
    ids, labels = row.input_ids[None].to(model.device), row.labels[None].to(model.device)
    losses = token_losses(model, ids, labels, [row.layout], head)[0]
    return losses.double().cpu().numpy(), (row.labels != IGNORED).numpy()


def _bin(scored: list[_Scored], start: int, end: int, seed: int) -> PositionBin:
    totals = np.array([losses[start:end].sum() for losses, _ in scored])
    counts = np.array([has_target[start:end].sum() for _, has_target in scored])
    n_tokens = int(counts.sum())
    mean = float(totals.sum()) / n_tokens if n_tokens else math.nan
    low, high = bootstrap_interval(totals, counts, seed)
    return PositionBin(start, end, n_tokens, int((counts > 0).sum()), _exp(mean), (_exp(low), _exp(high)))


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
