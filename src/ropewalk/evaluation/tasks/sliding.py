"""Sliding-window perplexity over documents: every token with a context nearly as long as the window.

A window begins with BOS and moves through a document by ``stride`` tokens. The first scores all its tokens, each
later one only those that none before it held.

Source: Peng et al., arXiv:2309.00071, and ``eval/perplexity.py`` of its repository jquesnelle/yarn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ropewalk.attention.layout import IGNORED
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.running import Progress, evaluating
from ropewalk.evaluation.statistics import Interval, exp_nats, ratio_interval
from ropewalk.evaluation.tasks.perplexity import causal_losses, check_prefill_chunk
from ropewalk.models.losses import OutputHead

STRIDE = 256
FEWEST_TOKENS = 2


@dataclass(frozen=True)
class Window:
    """The document's tokens ``start <= t < end``, of which those from ``first`` on are scored."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class DocumentPerplexity:
    """What one document adds.

    Attributes:
        index: its number among those given, from 0.
        windows: that were scored.
        tokens: that were scored.
        nats: their losses together.
        window_means: the mean losses of the windows, summed.
    """

    index: int
    windows: int
    tokens: int
    nats: float
    window_means: float

    @property
    def perplexity(self) -> float:
        """Of its tokens, all with the same weight."""
        return exp_nats(self.nats / self.tokens)


@dataclass(frozen=True)
class SlidingPerplexity:
    """Perplexity of documents read through windows.

    Attributes:
        length: tokens of a full window, BOS included.
        stride: tokens from a window's beginning to the next one's; None where each document has one window.
        most_windows: of a document; None for no limit.
        documents: in order, without those skipped.
        n_skipped: documents of fewer than two tokens.
        n_short: scored documents that do not fill a window.
        n_cut: documents whose ends are not scored, for ``most_windows`` or because they have one window.
        published: exp of the mean of the windows' mean losses, each window with the same weight.
        published_ci95: its 95 % interval over documents (Student's, of the mean loss).
        token_weighted: exp of the mean loss of all tokens.
        token_weighted_ci95: likewise.
    """

    length: int
    stride: int | None
    most_windows: int | None
    documents: tuple[DocumentPerplexity, ...]
    n_skipped: int
    n_short: int
    n_cut: int
    published: float
    published_ci95: Interval
    token_weighted: float
    token_weighted_ci95: Interval

    @property
    def n_windows(self) -> int:
        return sum(each.windows for each in self.documents)

    @property
    def n_tokens(self) -> int:
        return sum(each.tokens for each in self.documents)


def document_windows(n_tokens: int, room: int, stride: int, first: int) -> Iterator[Window]:
    """The windows of one document.

    Args:
        n_tokens: of the document.
        room: tokens of it that a window holds, at least ``stride``.
        stride: tokens.
        first: the first token that can be scored: 0 behind a BOS, else 1.

    Yields:
        Windows in order; the first holds the beginning, the last the end.

    Example:
        >>> [(w.start, w.first, w.end) for w in document_windows(9, 5, 2, 0)]
        [(0, 0, 5), (2, 5, 7), (4, 7, 9)]
    """
    start, scored = 0, first
    while True:
        end = min(start + room, n_tokens)
        yield Window(start, scored, end)
        if end == n_tokens:
            return
        start, scored = start + stride, end


def sliding_perplexity(
    model: Any,
    head: OutputHead,
    documents: Sequence[Ids],
    bos_id: int | None,
    length: int,
    stride: int = STRIDE,
    truncate: bool = False,
    most_windows: int | None = None,
    batch_size: int = 1,
    prefill_chunk: int | None = None,
    progress: Progress | None = None,
) -> SlidingPerplexity:
    """Perplexity of documents, read through windows that share their text with the one before.

    The cost is that of a whole window every ``stride`` tokens: 512 windows of 128K tokens for 128K more tokens of
    one document. ``most_windows`` bounds it.

    Args:
        model: a model from ``load_model``; its training mode is left as it was.
        head: its output head.
        documents: int ``[tokens]`` each, without special tokens; those of fewer than two are skipped and counted.
        bos_id: put in front of every window; None for tokenizers that have none.
        length: tokens of a window, BOS included.
        stride: tokens that a window scores, the first of a document apart; less than ``length``, so that every
            token has one before it. It has no meaning with ``truncate``.
        truncate: one window a document, its beginning.
        most_windows: of a document; the rest of it is left out, and the result says of how many.
        batch_size: windows of equal length in one pass.
        prefill_chunk: tokens of a pass, as in :func:`~ropewalk.evaluation.tasks.perplexity.causal_losses`.
        progress: called with the windows done and all windows.

    Returns:
        Both averages, with intervals, and what each document adds. A loss that is not finite makes them so.

    Raises:
        RopewalkError: if an argument is out of range, or no document has two tokens.
        EngineError: if the model cannot be read in chunks.

    Source: Peng et al., arXiv:2309.00071; ``published`` is what ``eval/perplexity.py`` of jquesnelle/yarn prints.
    """
    _check(len(documents), bos_id, length, None if truncate else stride, most_windows, batch_size)
    check_prefill_chunk(model, prefill_chunk)
    special = 0 if bos_id is None else 1
    room, limit = length - special, 1 if truncate else most_windows
    usable = [len(document) >= FEWEST_TOKENS for document in documents]
    if not any(usable):
        raise RopewalkError(f"none of the {len(documents)} documents has {FEWEST_TOKENS} tokens or more")
    kept = [
        list(islice(document_windows(len(document), room, stride, 1 - special), limit)) if fit else []
        for document, fit in zip(documents, usable, strict=True)
    ]
    jobs = [(documents[index], window) for index, each in enumerate(kept) for window in each]
    nats = np.empty(len(jobs))
    with evaluating(model):
        read = read_windows(model, head, jobs, bos_id, batch_size, prefill_chunk)
        for done, (number, losses) in enumerate(read, start=1):
            nats[number] = losses.sum()
            if progress is not None:
                progress(done, len(jobs))
    ends = np.cumsum([len(each) for each in kept])
    found = tuple(
        _document(index, sums, kept[index])
        for index, sums in enumerate(np.split(nats, ends[:-1]))
        if kept[index]
    )
    published, published_ci95 = _average([(each.window_means, each.windows) for each in found])
    token_weighted, token_weighted_ci95 = _average([(each.nats, each.tokens) for each in found])
    return SlidingPerplexity(
        length,
        None if truncate else stride,
        None if truncate else most_windows,
        found,
        n_skipped=usable.count(False),
        n_short=sum(FEWEST_TOKENS <= len(document) < room for document in documents),
        n_cut=sum(each[-1].end < len(d) for each, d in zip(kept, documents, strict=True) if each),
        published=published,
        published_ci95=published_ci95,
        token_weighted=token_weighted,
        token_weighted_ci95=token_weighted_ci95,
    )


def _check(
    documents: int,
    bos_id: int | None,
    length: int,
    stride: int | None,
    most_windows: int | None,
    batch_size: int,
) -> None:
    if not documents:
        raise RopewalkError("perplexity needs at least one document, got none")
    if length < 2:
        raise RopewalkError(f"a window needs 2 tokens or more, got {length}")
    if stride is not None and not 1 <= stride < length:
        raise RopewalkError(
            f"stride must be from 1 to {length - 1} tokens for windows of {length}, got {stride}"
        )
    for name, value in (("most_windows", most_windows), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise RopewalkError(f"{name} must be 1 or more, got {value}")


def read_windows(
    model: Any,
    head: OutputHead,
    windows: Sequence[tuple[Ids, Window]],
    bos_id: int | None,
    batch_size: int = 1,
    prefill_chunk: int | None = None,
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Losses of windows' scored tokens, as a forward pass over each alone gives them.

    Args:
        model: a causal decoder, in evaluation mode and without gradients.
        head: its output head.
        windows: each with its document.
        bos_id: put in front of each; None for none.
        batch_size: windows of equal length in one pass.
        prefill_chunk: as in :func:`~ropewalk.evaluation.tasks.perplexity.causal_losses`.

    Yields:
        A window's number among those given, and ``[end - first]`` in nats. The longest windows come first: what
        does not fit into memory fails at once.
    """
    # In batches of equal length nothing is padded, so that no window depends on what is beside it.
    of_length: dict[int, list[int]] = {}
    for number, (_, window) in enumerate(windows):
        of_length.setdefault(window.end - window.start, []).append(number)
    for same in (of_length[tokens] for tokens in sorted(of_length, reverse=True)):
        for batch in (same[at : at + batch_size] for at in range(0, len(same), batch_size)):
            rows = [window_row(*windows[number], bos_id) for number in batch]
            ids, labels = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
            ids, labels = ids.to(model.device), labels.to(model.device)
            losses = causal_losses(model, head, ids, labels, prefill_chunk).cpu().numpy()
            for number, row in zip(batch, losses, strict=True):
                window = windows[number][1]
                yield number, row[window.first - window.end - 1 : -1]


def window_row(document: Ids, window: Window, bos_id: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """A window as a row: token ids with BOS in front, and labels, shifted; both int64 ``[length]``."""
    head = [] if bos_id is None else [bos_id]
    ids = np.concatenate([head, document[window.start : window.end]]).astype(np.int64)
    labels = np.full_like(ids, IGNORED)
    scored = window.end - window.first
    labels[-scored - 1 : -1] = ids[-scored:]
    return ids, labels


def _document(index: int, sums: NDArray[np.float64], windows: Sequence[Window]) -> DocumentPerplexity:
    tokens = np.array([window.end - window.first for window in windows])
    return DocumentPerplexity(
        index, len(windows), int(tokens.sum()), math.fsum(sums), math.fsum(sums / tokens)
    )


def _average(sums: Sequence[tuple[float, int]]) -> tuple[float, Interval]:
    """Perplexity of documents' (sum of losses, number of them), and its interval."""
    totals, counts = zip(*sums, strict=True)
    low, high = ratio_interval(totals, counts, at_least=0)
    return exp_nats(math.fsum(totals) / sum(counts)), (exp_nats(low), exp_nats(high))


def sliding_task(result: SlidingPerplexity) -> TaskResult:
    """The result as a task of the suite ``perplexity``: ``truncated`` with one window a document, else ``sliding``.

    Its score is the token-weighted average; the published one is among the details.
    """
    details: dict[str, Any] = {
        "published": finite(result.published),
        "published_ci95": [finite(end) for end in result.published_ci95],
        "n_windows": result.n_windows,
        "n_tokens": result.n_tokens,
        "documents": len(result.documents),
        "documents_skipped": result.n_skipped,
        "documents_shorter_than_window": result.n_short,
        "documents_cut": result.n_cut,
    }
    if result.stride is not None:
        details |= {
            "stride": result.stride,
            "most_windows": result.most_windows,
            "documents_cut": result.n_cut,
        }
    good = math.isfinite(result.token_weighted)
    return TaskResult(
        suite="perplexity",
        task="truncated" if result.stride is None else "sliding",
        length=result.length,
        n=len(result.documents),
        score=result.token_weighted,
        ci95=result.token_weighted_ci95,
        reason=None if good else "the perplexity is not a finite number",
        details=details,
        unit="perplexity",
        samples=tuple(
            {
                "index": each.index,
                "nats": finite(each.nats),
                "tokens": each.tokens,
                "windows": each.windows,
                "perplexity": finite(each.perplexity),
            }
            for each in result.documents
        ),
    )


def finite(number: float) -> float | None:
    """A number as JSON has it: None for what is none, or infinite."""
    return number if math.isfinite(number) else None
