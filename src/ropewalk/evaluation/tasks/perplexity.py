"""Perplexity of documents: by position in a row, with sliding windows, and of truncated documents.

Perplexity by position shows how a model uses more and more context.

Sliding windows begin with BOS and move through a document by ``stride`` tokens. The first window scores all its tokens,
each later window only its new ones. Source: Peng et al., arXiv:2309.00071, and ``eval/perplexity.py`` of its repository
jquesnelle/yarn.
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
from ropewalk.evaluation.results import SAMPLES, TEXT, PositionBin, TaskResult, text_digest
from ropewalk.evaluation.rows import EvaluationRows, Ids, Window, describe_draw, evaluation_rows
from ropewalk.evaluation.statistics import Interval, exp_nats, finite_or_none, ratio_interval
from ropewalk.evaluation.tasks.suite import WHAT, LikelihoodInput, LikelihoodSuite
from ropewalk.io.digests import digest
from ropewalk.io.settings import Count, Option, Settings

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row
    from ropewalk.evaluation.backends.likelihoods import WindowReader

PLAIN_BINS = 4
"""Default number of position bins up to the trained length, if rows are not longer, and in each of its doublings."""


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of some rows.

    Attributes:
        bins: perplexity by position, in order.
        overall: perplexity over all positions of the rows, including those outside the bins.
        rows: total loss in nats and number of scored tokens of each row, in order.
    """

    bins: tuple[PositionBin, ...]
    overall: PositionBin
    rows: tuple[tuple[float, int], ...] = ()


def default_bins(length: int, trained_length: int | None) -> list[int]:
    """Choose edges of position bins such that the trained length is one of them.

    The trained length is one bin. Beyond it, there are four equal bins up to twice the trained length, four from there
    up to four times the trained length, and so on, so that the table shows where the perplexity rises. Rows no longer
    than the trained length have four equal bins.

    Args:
        length: tokens of a row.
        trained_length: tokens, at least 1; None if unknown.

    Example:
        >>> default_bins(2048, 512)
        [0, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    """
    if trained_length is not None and trained_length < 1:
        raise RopewalkError(f"trained_length must be 1 token or more, got {trained_length}")
    if trained_length is None or length <= trained_length:
        return equal_bins(length, PLAIN_BINS)
    # A set, because the edges of a very short trained length coincide.
    edges = {0, length}
    start = trained_length
    while start < length:
        edges |= {start + start * part // PLAIN_BINS for part in range(PLAIN_BINS)}
        start *= 2
    return sorted(edge for edge in edges if edge <= length)


def equal_bins(length: int, bins: int) -> list[int]:
    """Return the edges of position bins of equal width, fewer than requested if there are not as many tokens."""
    return sorted({length * part // bins for part in range(bins + 1)})


_Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]


def perplexity_of(
    losses: Iterable[NDArray[np.float64]], rows: Sequence[Row], bin_edges: Sequence[int]
) -> PerplexityResult:
    """Compute the token-weighted perplexity of rows by position from their losses.

    The loss at index t is that of the next token, with t + 1 tokens of context, and belongs to the bin that contains t.

    Args:
        losses: losses of each row, as :func:`~ropewalk.evaluation.backends.likelihoods.row_losses` returns them.
        rows: rows of pattern ``full``.
        bin_edges: edges in tokens, strictly increasing, at least two.

    Returns:
        One bin for each pair of neighbouring edges, with 95 % intervals over rows (Student's, of the mean loss). A
        loss that is not finite makes its bin's perplexity not finite.
    """
    from ropewalk.evaluation.backends.likelihoods import has_target

    scored = [(of_row, has_target(row)) for of_row, row in zip(losses, rows, strict=True)]
    longest = max(row.layout.total_length for row in rows)
    bins = [_bin(scored, start, end) for start, end in pairwise(bin_edges)]
    of_rows = tuple((float(of_row.sum()), int(targets.sum())) for of_row, targets in scored)
    return PerplexityResult(tuple(bins), _bin(scored, 0, longest), of_rows)


def perplexity_task(text: EvaluationRows, measured: PerplexityResult) -> TaskResult:
    """Convert the perplexity of rows of one length to a task result.

    Args:
        text: the rows, and how they were built.
        measured: perplexity of the rows.
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
            SAMPLES: rows_text_digest(text.rows),
        },
        positions=measured.bins,
        unit="perplexity",
        samples=tuple(
            {
                "index": index,
                "nats": finite_or_none(nats),
                "tokens": tokens,
                TEXT: text_digest(row.input_ids.tolist()),
            }
            for index, ((nats, tokens), row) in enumerate(zip(measured.rows, text.rows, strict=True))
        ),
    )


def rows_text_digest(rows: Sequence[Row]) -> str:
    """Return the digest that a result of the task perplexity has of the text of its rows."""
    return digest([row.input_ids.tolist() for row in rows])


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
    """Sliding windows over documents.

    Attributes:
        length: tokens of a window, including BOS.
        stride: new tokens that each window after the first scores; less than ``length``, so that every token has
            context. None for a single window at the beginning of each document.
        most_windows: maximum number of windows per document; the rest of the document is not scored, and the result
            counts such documents. None for no limit.

    Raises:
        RopewalkError: if a number is out of range.
    """

    length: int
    stride: int | None = STRIDE
    most_windows: int | None = None

    def __post_init__(self) -> None:
        if self.length < 2:
            raise RopewalkError(f"the length of a window must be 2 tokens or more, got {self.length}")
        if self.stride is not None and not 1 <= self.stride < self.length:
            raise RopewalkError(
                f"stride must be from 1 to {self.length - 1} tokens for windows of {self.length}, got {self.stride}"
            )
        if self.most_windows is not None and self.most_windows < 1:
            raise RopewalkError(f"most_windows must be 1 or more, got {self.most_windows}")

    def of(self, n_tokens: int, special: int) -> list[Window]:
        """Return the windows of a document with ``n_tokens`` tokens; each begins with ``special`` special tokens."""
        room = self.length - special
        # Without BOS, the first token has no context and is not scored.
        windows = document_windows(n_tokens, room, self.stride or room, 1 - special)
        return list(islice(windows, 1 if self.stride is None else self.most_windows))


@dataclass(frozen=True)
class DocumentPerplexity:
    """Losses of one document.

    Attributes:
        index: index of the document in the given sequence, from 0.
        windows: number of scored windows.
        tokens: number of scored tokens.
        nats: total loss of the scored tokens.
        window_means: sum of the mean losses of the windows.
    """

    index: int
    windows: int
    tokens: int
    nats: float
    window_means: float

    @property
    def perplexity(self) -> float:
        """Token-weighted perplexity of the document."""
        return exp_nats(self.nats / self.tokens)


@dataclass(frozen=True)
class SlidingPerplexity:
    """Perplexity of documents over sliding windows.

    Attributes:
        windows: the windows.
        documents: results of the documents in order, without skipped ones.
        n_skipped: number of skipped documents, which have fewer than two tokens.
        n_short: number of scored documents that do not fill a window.
        n_cut: number of documents whose end is not scored, because of ``most_windows`` or a single window.
        published: exp of the mean of the windows' mean losses, with equal weight for each window.
        published_ci95: 95 % interval of ``published`` over documents (Student's, of the mean loss).
        token_weighted: exp of the mean loss of all tokens.
        token_weighted_ci95: 95 % interval of ``token_weighted`` over documents.
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
    """Yield the windows of one document.

    Args:
        n_tokens: tokens of the document.
        room: tokens of the document per window, at least ``stride``.
        stride: tokens by which the window moves.
        first: index of the first token to score: 0 after a BOS, otherwise 1.

    Yields:
        Windows in order, from the beginning to the end of the document.

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
    """Compute the perplexity of documents with overlapping sliding windows.

    The cost is one forward pass over a whole window for every ``stride`` tokens: another 128K tokens of a document cost
    512 windows of 128K tokens with the default stride. ``most_windows`` bounds the cost.

    Args:
        reader: the model; its training mode is left unchanged.
        documents: int ``[tokens]`` each, without special tokens; documents of fewer than two tokens are skipped and
            counted.
        windows: length, stride and maximum number of windows.
        progress: called with the number of completed windows and the total.

    Returns:
        Both averages with intervals, and the losses of each document. A loss that is not finite makes the averages
        not finite.

    Raises:
        RopewalkError: if no document has two tokens, or the reader's settings are invalid.
        EngineError: if the model cannot read a sequence in chunks.

    Source: Peng et al., arXiv:2309.00071; ``published`` is what ``eval/perplexity.py`` of jquesnelle/yarn prints.
    """
    if not documents:
        raise RopewalkError("perplexity needs at least one document, got none")
    reader.check()
    room = windows.length - reader.special
    usable = [len(document) >= FEWEST_TOKENS for document in documents]
    if not any(usable):
        raise RopewalkError(
            f"perplexity needs a document of {FEWEST_TOKENS} tokens or more, but all "
            f"{len(documents)} documents are shorter"
        )
    kept = [
        windows.of(len(document), reader.special) if fit else []
        for document, fit in zip(documents, usable, strict=True)
    ]
    jobs = [(documents[index], window) for index, each in enumerate(kept) for window in each]
    nats = np.empty(len(jobs))
    with evaluating(reader.model):
        for done, (number, losses) in enumerate(reader.losses(jobs), start=1):
            # The reader yields the longest windows first, so each loss goes to its own place.
            nats[number] = losses.sum()
            if progress is not None:
                progress(done, len(jobs))
    # Jobs are in the order of documents, so their sums split at these ends; skipped documents get an empty part.
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
    """Return the perplexity of the documents' (sum of losses, number of losses), and its interval."""
    totals, counts = zip(*sums, strict=True)
    low, high = ratio_interval(totals, counts, at_least=0)
    return exp_nats(math.fsum(totals) / sum(counts)), (exp_nats(low), exp_nats(high))


def sliding_task(result: SlidingPerplexity) -> TaskResult:
    """Convert to a task result: ``truncated`` with a single window per document, otherwise ``sliding``.

    The score is the token-weighted average; the details contain the published one.
    """
    details: dict[str, Any] = {
        "published": finite_or_none(result.published),
        "published_ci95": [finite_or_none(end) for end in result.published_ci95],
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
                "nats": finite_or_none(each.nats),
                "tokens": each.tokens,
                "windows": each.windows,
                "perplexity": finite_or_none(each.perplexity),
            }
            for each in result.documents
        ),
    )


class PerplexitySettings(Settings):
    """Settings of perplexity."""

    stride: Annotated[int, WHAT] = Field(
        default=STRIDE,
        ge=1,
        description="Number of tokens by which the window moves in the task sliding (sliding-window perplexity).",
    )
    most_windows: Annotated[int | None, WHAT, Option(name="--windows")] = Field(
        default=None,
        ge=1,
        description="Maximum number of windows per document in the task sliding. Default: no limit.",
    )
    position_bins: Annotated[Count | None, WHAT] = Field(
        default=None,
        ge=1,
        description="Number of position bins, all of the same width, in the task perplexity (perplexity by position). "
        "Default: the trained length is one bin, and each doubling of it has four.",
    )


def _rows(given: LikelihoodInput, length: int) -> EvaluationRows:
    bos, eos = given.tokenizer.bos_token_id, given.tokenizer.eos_token_id
    # BOS marks where a document begins; EOS is needed only by tokenizers without one.
    return evaluation_rows(given.documents, length, bos, eos if bos is None else None, given.settings.rows)


def _check(task: str, length: int, given: LikelihoodInput) -> None:
    """Raise if the documents do not fill a row, or sliding windows would have no context."""
    if task == "perplexity":
        bins = given.settings.of(PerplexitySettings).position_bins
        if bins is not None and bins > length:
            raise RopewalkError(
                f"--position-bins {bins} is more than the {length} tokens of a sequence; give --position-bins {length} "
                "or fewer"
            )
        _rows(given, length)
    elif task == "sliding" and (stride := given.settings.of(PerplexitySettings).stride) >= length:
        shortest = min(SUITE.lengths_of(given.settings))
        raise RopewalkError(
            f"--stride {stride} leaves no context in windows of {length} tokens; give --stride {shortest - 1} or less"
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
    trained = given.settings.trained_length or given.under_test.max_position_embeddings
    bins = given.settings.of(PerplexitySettings).position_bins
    edges = default_bins(length, trained) if bins is None else equal_bins(length, bins)
    result = perplexity_task(text, perplexity_of(losses, text.rows, edges))
    return replace(result, details={**result.details, **describe_draw(given.documents, text.documents)})


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
        # Windows after the first move by a stride, so no token behind this one is read.
        most = None if own.most_windows is None else length + (own.most_windows - 1) * own.stride
    return with_digest_of_text(sliding_task(measured), given, most)


def with_digest_of_text(result: TaskResult, given: LikelihoodInput, most: int | None) -> TaskResult:
    """Add what was drawn to a result, and the digest of the text; text that was not read does not change the digest.

    Args:
        result: result of a likelihood task on documents.
        given: input of the task.
        most: maximum number of tokens that were read per document; None for all.
    """
    texts = given.documents[: given.settings.rows]
    drawn = {**describe_draw(given.documents, range(len(texts))), "documents": result.details["documents"]}
    read = [document[:most].tolist() for document in texts]
    samples = tuple({**each, TEXT: text_digest(read[each["index"]])} for each in result.samples)
    return replace(result, details={**result.details, **drawn, SAMPLES: digest(read)}, samples=samples)


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
