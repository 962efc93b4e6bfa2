"""Perplexity of documents: by position in a row, through sliding windows, and of their beginnings alone.

By position: what a model makes of context that lies further and further back.

Sliding: a window begins with BOS and moves through a document by ``stride`` tokens. The first scores all its tokens,
each later one only those that none before it held. Source: Peng et al., arXiv:2309.00071, and ``eval/perplexity.py``
of its repository jquesnelle/yarn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.protocol import Progress, evaluating
from ropewalk.evaluation.results import SAMPLES, PositionBin, TaskResult
from ropewalk.evaluation.rows import EvaluationRows, Ids, Window, evaluation_rows
from ropewalk.evaluation.statistics import Interval, exp_nats, ratio_interval
from ropewalk.evaluation.tasks.suite import WHAT, LikelihoodInput, LikelihoodSuite
from ropewalk.io.digests import digest
from ropewalk.io.settings import Option, Settings

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row
    from ropewalk.evaluation.backends.likelihoods import WindowReader
    from ropewalk.models.losses import OutputHead

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
        prefill_chunk: as in :func:`~ropewalk.evaluation.backends.likelihoods.causal_losses`, which a row then goes
            through; None for one pass over the row with its layout.

    Returns:
        A bin for each pair of neighbouring edges, with 95 % intervals over rows (Student's, of the mean loss). A
        loss that is not finite makes its bin's perplexity so.

    Raises:
        RopewalkError: if there are no rows, a row has another pattern, or the edges do not increase.
        EngineError: if the model or its engine cannot take such rows, or such chunks.
    """
    from ropewalk.evaluation.backends.likelihoods import check_prefill_chunk, check_rows, row_losses

    check_rows(rows)
    check_prefill_chunk(model, prefill_chunk)
    check_edges(bin_edges)
    losses = []
    with evaluating(model):
        for done, row in enumerate(rows, start=1):
            losses.append(row_losses(model, head, row, prefill_chunk))
            if progress is not None:
                progress(done, len(rows))
    return perplexity_of(losses, rows, bin_edges)


_Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]


def perplexity_of(
    losses: Iterable[NDArray[np.float64]], rows: Sequence[Row], bin_edges: Sequence[int]
) -> PerplexityResult:
    """What the losses of rows amount to, wherever they were computed.

    Args:
        losses: of each row, as :func:`~ropewalk.evaluation.backends.likelihoods.row_losses` gives them.
        rows, bin_edges: as for :func:`perplexity_by_position`, checked.
    """
    from ropewalk.evaluation.backends.likelihoods import has_target

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


def _bin(scored: list[_Scored], start: int, end: int) -> PositionBin:
    totals = np.array([losses[start:end].sum() for losses, _ in scored])
    counts = np.array([targets[start:end].sum() for _, targets in scored])
    n_tokens = int(counts.sum())
    mean = float(totals.sum()) / n_tokens if n_tokens else math.nan
    low, high = ratio_interval(totals, counts, at_least=0)
    return PositionBin(
        start, end, n_tokens, int((counts > 0).sum()), exp_nats(mean), (exp_nats(low), exp_nats(high))
    )


STRIDE = 256
FEWEST_TOKENS = 2


@dataclass(frozen=True)
class SlidingWindows:
    """Windows through which documents are read.

    Attributes:
        length: tokens of a window, BOS included.
        stride: tokens that a window scores, the first of a document apart; less than ``length``, so that every
            token has one before it. None for one window a document, its beginning.
        most_windows: of a document; the rest of it is left out, and the result says of how many. None for no limit.

    Raises:
        RopewalkError: if a number is out of range.
    """

    length: int
    stride: int | None = STRIDE
    most_windows: int | None = None

    def __post_init__(self) -> None:
        if self.length < 2:
            raise RopewalkError(f"a window needs 2 tokens or more, got {self.length}")
        if self.stride is not None and not 1 <= self.stride < self.length:
            raise RopewalkError(
                f"stride must be from 1 to {self.length - 1} tokens for windows of {self.length}, got {self.stride}"
            )
        if self.most_windows is not None and self.most_windows < 1:
            raise RopewalkError(f"most_windows must be 1 or more, got {self.most_windows}")

    def of(self, n_tokens: int, special: int) -> list[Window]:
        """Those of a document of so many tokens, behind so many special tokens."""
        room = self.length - special
        windows = document_windows(n_tokens, room, self.stride or room, 1 - special)
        return list(islice(windows, 1 if self.stride is None else self.most_windows))


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
        windows: that they were read through.
        documents: in order, without those skipped.
        n_skipped: documents of fewer than two tokens.
        n_short: scored documents that do not fill a window.
        n_cut: documents whose ends are not scored, for ``most_windows`` or because they have one window.
        published: exp of the mean of the windows' mean losses, each window with the same weight.
        published_ci95: its 95 % interval over documents (Student's, of the mean loss).
        token_weighted: exp of the mean loss of all tokens.
        token_weighted_ci95: likewise.
    """

    windows: SlidingWindows
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
    reader: WindowReader,
    documents: Sequence[Ids],
    windows: SlidingWindows,
    progress: Progress | None = None,
) -> SlidingPerplexity:
    """Perplexity of documents, read through windows that share their text with the one before.

    The cost is that of a whole window every ``stride`` tokens: 512 windows of 128K tokens for 128K more tokens of
    one document. ``most_windows`` bounds it.

    Args:
        reader: the model; its training mode is left as it was.
        documents: int ``[tokens]`` each, without special tokens; those of fewer than two are skipped and counted.
        windows: their length and stride.
        progress: called with the windows done and all windows.

    Returns:
        Both averages, with intervals, and what each document adds. A loss that is not finite makes them so.

    Raises:
        RopewalkError: if no document has two tokens, or windows cannot be read so.
        EngineError: if the model cannot be read in chunks.

    Source: Peng et al., arXiv:2309.00071; ``published`` is what ``eval/perplexity.py`` of jquesnelle/yarn prints.
    """
    if not documents:
        raise RopewalkError("perplexity needs at least one document, got none")
    reader.check()
    room = windows.length - reader.special
    usable = [len(document) >= FEWEST_TOKENS for document in documents]
    if not any(usable):
        raise RopewalkError(f"none of the {len(documents)} documents has {FEWEST_TOKENS} tokens or more")
    kept = [
        windows.of(len(document), reader.special) if fit else []
        for document, fit in zip(documents, usable, strict=True)
    ]
    jobs = [(documents[index], window) for index, each in enumerate(kept) for window in each]
    nats = np.empty(len(jobs))
    with evaluating(reader.model):
        for done, (number, losses) in enumerate(reader.losses(jobs), start=1):
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
        windows,
        found,
        n_skipped=usable.count(False),
        n_short=sum(FEWEST_TOKENS <= len(document) < room for document in documents),
        n_cut=sum(each[-1].end < len(d) for each, d in zip(kept, documents, strict=True) if each),
        published=published,
        published_ci95=published_ci95,
        token_weighted=token_weighted,
        token_weighted_ci95=token_weighted_ci95,
    )


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
    windows = result.windows
    if windows.stride is not None:
        details |= {
            "stride": windows.stride,
            "most_windows": windows.most_windows,
            "documents_cut": result.n_cut,
        }
    good = math.isfinite(result.token_weighted)
    return TaskResult(
        suite="perplexity",
        task="truncated" if windows.stride is None else "sliding",
        length=windows.length,
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


class PerplexitySettings(Settings):
    """What perplexity alone reads."""

    stride: Annotated[int, WHAT] = Field(STRIDE, ge=1, description="Tokens that a sliding window moves.")
    most_windows: Annotated[int | None, WHAT, Option(name="--windows")] = Field(
        None, ge=1, description="Most sliding windows of a document; all if not given."
    )


def _rows(given: LikelihoodInput, length: int) -> EvaluationRows:
    bos, eos = given.tokenizer.bos_token_id, given.tokenizer.eos_token_id
    return evaluation_rows(given.documents, length, bos, eos if bos is None else None, given.settings.rows)


def _check(task: str, length: int, given: LikelihoodInput) -> None:
    """Raise where the documents do not fill a row, or a window would have no context."""
    if task == "perplexity":
        _rows(given, length)
    elif task == "sliding" and (stride := given.settings.of(PerplexitySettings).stride) >= length:
        raise RopewalkError(
            f"--stride {stride} leaves no context in windows of {length} tokens; give a smaller one"
        )


def _measure(task: str, length: int, given: LikelihoodInput, progress: Progress | None) -> TaskResult:
    return (
        _measure_rows(length, given, progress)
        if task == "perplexity"
        else _measure_windows(length, given, task == "truncated", progress)
    )


def _measure_rows(length: int, given: LikelihoodInput, progress: Progress | None) -> TaskResult:
    text, losses = _rows(given, length), []
    assert given.under_test.likelihoods is not None
    for of_row in given.under_test.likelihoods.row_losses(text.rows):
        losses.append(of_row)
        if progress is not None:
            progress(len(losses), len(text.rows))
    edges = default_bins(length, given.settings.trained_length or given.under_test.max_position_embeddings)
    return perplexity_task(text, perplexity_of(losses, text.rows, edges))


def _measure_windows(
    length: int, given: LikelihoodInput, truncate: bool, progress: Progress | None
) -> TaskResult:
    own = given.settings.of(PerplexitySettings)
    windows = (
        SlidingWindows(length, None) if truncate else SlidingWindows(length, own.stride, own.most_windows)
    )
    reader = given.under_test.window_reader(length)
    measured = sliding_perplexity(reader, given.documents[: given.settings.rows], windows, progress)
    most: int | None = length
    if not truncate:
        most = None if own.most_windows is None else length + (own.most_windows - 1) * own.stride
    return with_digest_of_text(sliding_task(measured), given, most)


def with_digest_of_text(result: TaskResult, given: LikelihoodInput, most: int | None) -> TaskResult:
    """A result that says what was read, and only that: other text behind it makes no difference.

    Args:
        result: of documents.
        given: of which each document was read.
        most: tokens of a document that were read at most; None for all.
    """
    read = digest([document[:most].tolist() for document in given.documents[: given.settings.rows]])
    return replace(result, details={**result.details, SAMPLES: read})


SUITE = LikelihoodSuite(
    name="perplexity",
    figure="by position",
    default=("perplexity",),
    sharded="perplexity",
    settings={"perplexity": PerplexitySettings},
    tasks=("perplexity", "sliding", "truncated"),
    check=_check,
    measure=_measure,
)
