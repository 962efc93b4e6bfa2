"""Perplexity by position: what a model makes of context that lies further and further back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.attention.layout import IGNORED, Row
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.results import SAMPLES, PositionBin, TaskResult
from ropewalk.evaluation.rows import EvaluationRows
from ropewalk.evaluation.running import Progress, evaluating
from ropewalk.evaluation.statistics import exp_nats, ratio_interval
from ropewalk.io.digests import digest
from ropewalk.models.losses import OutputHead, chunked_token_losses, decoder_of, token_losses
from ropewalk.rope import RotaryEmbedding, methods_from_config

MOST_BINS = 8
PLAIN_BINS = 4


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of some rows.

    Attributes:
        bins: by position, in order.
        overall: all positions of the rows, also those outside the bins.
        rows: nats and scored tokens of each row, in order.
    """

    bins: tuple[PositionBin, ...]
    overall: PositionBin
    rows: tuple[tuple[float, int], ...] = ()


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
    prefill_chunk: int | None = None,
) -> PerplexityResult:
    """Token-weighted perplexity of rows, by the index of the target's row position.

    The loss at index t, of the token that follows it, belongs to the bin of t: t + 1 tokens were seen.

    Args:
        model: a model from ``load_model``; its training mode is left as it was.
        head: its output head.
        rows: pattern ``full``; one forward pass each.
        bin_edges: tokens, strictly increasing, at least two.
        progress: called after each row.
        prefill_chunk: as in :func:`causal_losses`, which a row then goes through; None for one pass over the
            row with its layout.

    Returns:
        A bin for each pair of neighbouring edges, with 95 % intervals over rows (Student's, of the mean loss). A
        loss that is not finite makes its bin's perplexity so.

    Raises:
        RopewalkError: if there are no rows, a row has another pattern, or the edges do not increase.
        EngineError: if the model or its engine cannot take such rows, or such chunks.
    """
    check_rows(rows)
    check_prefill_chunk(model, prefill_chunk)
    check_edges(bin_edges)
    losses = []
    with evaluating(model):
        for done, row in enumerate(rows, start=1):
            losses.append(row_losses(model, head, row, prefill_chunk)[0])
            if progress is not None:
                progress(done, len(rows))
    return perplexity_of(losses, rows, bin_edges)


_Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]

RowLosses = Callable[[Sequence[Row]], Iterable[NDArray[np.float64]]]
"""What gives the losses of rows, in order: ``[total_length]`` each in nats, 0 where there is no target."""


def perplexity_of(
    losses: Iterable[NDArray[np.float64]], rows: Sequence[Row], bin_edges: Sequence[int]
) -> PerplexityResult:
    """What the losses of rows amount to, wherever they were computed.

    Args:
        losses: of each row, as :func:`row_losses` gives them.
        rows, bin_edges: as for :func:`perplexity_by_position`, checked.
    """
    scored = [(of_row, has_target(row)) for of_row, row in zip(losses, rows, strict=True)]
    longest = max(row.layout.total_length for row in rows)
    bins = [_bin(scored, start, end) for start, end in pairwise(bin_edges)]
    of_rows = tuple((float(of_row.sum()), int(targets.sum())) for of_row, targets in scored)
    return PerplexityResult(tuple(bins), _bin(scored, 0, longest), of_rows)


def perplexity_task(text: EvaluationRows, measured: PerplexityResult) -> TaskResult:
    """The perplexity of rows of one length as a result.

    Args:
        text: the rows and what they are made of.
        measured: what was found of them.
    """
    overall = measured.overall
    finite = math.isfinite(overall.perplexity)
    return TaskResult(
        suite="perplexity",
        task="perplexity",
        length=text.rows[0].layout.total_length,
        n=overall.n_windows,
        score=overall.perplexity,
        ci95=overall.ci95,
        reason=None if finite else "the perplexity is not a finite number",
        details={
            "rows": text.kind,
            "n_tokens": overall.n_tokens,
            SAMPLES: digest([row.input_ids.tolist() for row in text.rows]),
        },
        positions=measured.bins,
        unit="perplexity",
        samples=tuple(
            {"index": index, "nats": nats if math.isfinite(nats) else None, "tokens": tokens}
            for index, (nats, tokens) in enumerate(measured.rows)
        ),
    )


def check_edges(bin_edges: Sequence[int]) -> None:
    """Raise for edges that are no bins."""
    edges = list(bin_edges)
    if len(edges) < 2 or edges[0] < 0 or any(b <= a for a, b in pairwise(edges)):
        raise RopewalkError(f"bin edges must increase from 0 or more, got {edges}")


def has_target(row: Row) -> NDArray[np.bool_]:
    """Where a row has something to score, ``[total_length]``."""
    return (row.labels != IGNORED).numpy()


def check_rows(rows: Sequence[Row]) -> None:
    """Raise where there are no rows, or one in which the index of a token is not how many came before it."""
    if not rows:
        raise RopewalkError("perplexity needs at least one row, got none")
    for row in rows:
        if row.layout.pattern != "full":
            raise RopewalkError(
                f"perplexity by position needs rows of pattern full, got {row.layout.pattern}"
            )


def row_losses(model: Any, head: OutputHead, row: Row, prefill_chunk: int | None = None) -> _Scored:
    """Losses in nats, 0 where there is no target, and where there is one, both ``[total_length]``.

    ``prefill_chunk`` as in :func:`causal_losses`; None for one pass with the row's layout.
    """
    ids, labels = row.input_ids[None].to(model.device), row.labels[None].to(model.device)
    if prefill_chunk is None:
        losses = token_losses(model, ids, labels, [row.layout], head)[0]
    else:
        losses = causal_losses(model, head, ids, labels, prefill_chunk)[0]
    return losses.double().cpu().numpy(), has_target(row)


def chunked_row_losses(
    model: Any, head: OutputHead, input_ids: Tensor, chunk: int | None
) -> NDArray[np.float64]:
    """Losses of one causal sequence, every token of which but the first is scored.

    Args:
        model, head: as in :func:`causal_losses`.
        input_ids: int64 ``[length]``, BOS included.
        chunk: tokens of a pass; None for one pass.

    Returns:
        ``[length - 1]`` in nats; index t is the loss of the token at t + 1.
    """
    ids = input_ids.to(model.device)[None]
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
    with torch.no_grad():
        return causal_losses(model, head, ids, labels, chunk)[0, :-1].cpu().numpy()


def causal_losses(
    model: Any, head: OutputHead, input_ids: Tensor, labels: Tensor, prefill_chunk: int | None = None
) -> Tensor:
    """Losses of plain causal sequences of one length, as a forward pass over each alone gives them.

    Logits exist only for scored positions and a few at a time. In chunks, so do all hidden states: of the whole
    length there are keys and values alone. Attention is the model's own, sliding windows included.

    Args:
        model: a causal decoder, in evaluation mode and without gradients.
        head: its output head.
        input_ids: int64 ``[batch, length]``, on the model's device.
        labels: int64 ``[batch, length]``, already shifted; ``IGNORED`` where nothing is scored.
        prefill_chunk: tokens of a pass, of which each attends to those before it through a cache; None for one
            pass. Losses are equal within rounding. A RoPE that depends on the length is fixed by the whole one.

    Returns:
        float64 ``[batch, length]`` in nats, 0 where nothing is scored.
    """
    length = input_ids.shape[1]
    losses = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    decoder = decoder_of(model)
    if prefill_chunk is None or prefill_chunk >= length:
        _score(losses, decoder(input_ids, use_cache=False).last_hidden_state, labels, head)
        return losses
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    pieces = zip(*(each.split(prefill_chunk, dim=1) for each in (losses, input_ids, labels)), strict=True)
    with _rope_fixed(model, length):
        for losses_of_piece, ids, targets in pieces:
            hidden = decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state
            _score(losses_of_piece, hidden, targets, head)
    return losses


def _score(losses: Tensor, hidden: Tensor, labels: Tensor, head: OutputHead) -> None:
    """Write the losses of the labels that there are."""
    scored = labels != IGNORED
    losses[scored] = chunked_token_losses(hidden[scored], labels[scored], head).double()


@contextmanager
def _rope_fixed(model: Any, length: int) -> Iterator[None]:
    """Every chunk with the frequencies of the whole sequence, or keys of the first carry others than the last's."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                stack.enter_context(module.pinned(module.total_length or length))
        yield


def check_prefill_chunk(model: Any, prefill_chunk: int | None) -> None:
    """Raise where a sequence cannot be read in such chunks.

    Raises:
        RopewalkError: if a chunk has no token.
        EngineError: if the model's RoPE depends on the length and is transformers' own, which takes that of the
            chunk for it.
    """
    if prefill_chunk is None:
        return
    if prefill_chunk < 1:
        raise RopewalkError(f"prefill_chunk must be 1 token or more, got {prefill_chunk}")
    if any(isinstance(module, RotaryEmbedding) for module in model.modules()):
        return
    methods = methods_from_config(model.config.get_text_config().to_dict())
    dependent = [method.name for method in methods.values() if method.length_dependent]
    if dependent:
        raise EngineError(
            f"transformers' own RoPE of {type(model).__name__} is {dependent[0]}, which would change from chunk to "
            f"chunk of {prefill_chunk} tokens; load the model with exact_rope=True or leave prefill_chunk out"
        )


def _bin(scored: list[_Scored], start: int, end: int) -> PositionBin:
    totals = np.array([losses[start:end].sum() for losses, _ in scored])
    counts = np.array([targets[start:end].sum() for _, targets in scored])
    n_tokens = int(counts.sum())
    mean = float(totals.sum()) / n_tokens if n_tokens else math.nan
    low, high = ratio_interval(totals, counts, at_least=0)
    return PositionBin(
        start, end, n_tokens, int((counts > 0).sum()), exp_nats(mean), (exp_nats(low), exp_nats(high))
    )
