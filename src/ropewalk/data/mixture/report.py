"""Report of a mixture in numbers and sentences: the achieved mixture compared with the requested one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ropewalk.data.mixture.gzip_ratio import explain_gzip
from ropewalk.data.mixture.synthetic import explain_synthetic
from ropewalk.io.lengths import counted

REPORTS = ("gzip_ratios", "synthetic")
"""Keys of a manifest with reports that only some mixtures have."""

TotalFrom = Literal["tokens", "weights", "shares", "corpus"]
# With more cells than this, sentences describe only the whole mixture; the report still has every cell.
_MOST_CELLS_IN_WORDS = 6


@dataclass(frozen=True)
class Cell:
    """The documents of one source with lengths ``first <= length < end`` in tokens.

    Attributes:
        source: name of the source.
        first, end: range of lengths; an end of None means no upper limit.
        documents: number of available documents, without empty ones.
        available: number of their tokens.
        asked: tokens requested before any cap, rounded to a whole number.
        drawn: tokens in the mixture.
        epochs_asked: ``asked / available``, the requested average number of readings; 0 if there are no tokens.
        most_read: number of readings of the most repeated document.
    """

    source: str
    first: int
    end: int | None
    documents: int
    available: int
    asked: int
    drawn: int
    epochs_asked: float
    most_read: int


@dataclass(frozen=True)
class Proportions:
    """Share of a source, or of all sources, in the tokens, and of long documents in its own tokens.

    Shares are from 0 to 1. Long documents are those in the longest length bin.

    Attributes:
        source: name of the source; None for all sources together.
        share_before, share_asked, share_achieved: share of all tokens in the corpus, as requested, and in the mixture.
            The requested share is None if the settings determine none: if they request no shares, or upsample lengths
            over the whole corpus.
        long_before, long_asked, long_achieved: share of long documents in this source's tokens, likewise. None if the
            settings have no lengths, or there are no tokens.
    """

    source: str | None
    share_before: float
    share_asked: float | None
    share_achieved: float
    long_before: float | None
    long_asked: float | None
    long_achieved: float | None


@dataclass(frozen=True)
class MixtureReport:
    """Numbers that describe a mixture; ``dataclasses.asdict`` converts it to plain values for JSON.

    Attributes:
        tokens_available: own tokens of all candidate documents.
        tokens_asked: own tokens requested before any cap, either directly or as a result of the other settings.
        tokens_achieved: own tokens of the mixture.
        documents: number of readings; a repeated document counts each time.
        distinct_documents: number of different documents in the mixture.
        repeated_documents: number of documents that are read more than once.
        most_read: number of readings of the most repeated document.
        empty_documents: candidates without tokens; left out unless ``as_is``.
        as_is: whether each document is read once, in the order of the corpus.
        long_from: smallest length in tokens of a long document; None if the settings have no lengths.
        total: proportions of all sources together.
        sources: proportions of each source, in the given order.
        cells: length bins of each source, shortest first.
        shortages: one sentence for each cell that is empty or was capped at ``max_epochs``.
        total_from: origin of ``tokens_asked``: the setting ``tokens``; if it is not given, ``weights`` or ``shares``;
            otherwise the size of the ``corpus``.
    """

    tokens_available: int
    tokens_asked: int
    tokens_achieved: int
    documents: int
    distinct_documents: int
    repeated_documents: int
    most_read: int
    empty_documents: int
    as_is: bool
    long_from: int | None
    total: Proportions
    sources: tuple[Proportions, ...]
    cells: tuple[Cell, ...]
    shortages: tuple[str, ...]
    total_from: TotalFrom = "tokens"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MixtureReport:
        """Rebuild a report from the output of ``dataclasses.asdict``, or from its JSON."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, eq=False)
class Request:
    """The requested mixture, as tokens of each source and length bin.

    Attributes:
        sources: names of the sources.
        starts: first length of each bin, ascending.
        asked: int64 ``[sources, bins]``, tokens before any cap.
        by_length: int64 ``[bins]``, tokens over all sources. Larger than the sum of ``asked`` if a length is requested
            of the whole corpus and no source has documents of it.
        total: tokens of the whole mixture.
        total_from: as in MixtureReport.
        by_source: whether the settings request shares of sources.
        lengths_by_source: whether the settings request lengths within each source.
        shortages: as in MixtureReport.
        as_is: whether the corpus is read unchanged.
    """

    sources: tuple[str, ...]
    starts: tuple[int, ...]
    asked: NDArray[np.int64]
    by_length: NDArray[np.int64]
    total: int
    total_from: TotalFrom
    by_source: bool
    lengths_by_source: bool
    shortages: tuple[str, ...] = ()
    as_is: bool = False


def report_on(
    drawn: NDArray[np.int64],
    lengths: NDArray[np.int64],
    cells: NDArray[np.integer],
    request: Request,
) -> MixtureReport:
    """Compare the drawn documents with the request.

    Args:
        drawn: int64, indices of the candidates in reading order.
        lengths: int64 ``[n]``, own tokens of each candidate.
        cells: ``[n]``, ``source * bins + bin`` of each candidate; ``sources * bins`` for one without tokens.
        request: the requested mixture.
    """
    sources, starts = request.sources, request.starts
    shape = (len(sources), len(starts))
    # The last cell is that of documents without tokens, which [:-1] leaves out.
    size = shape[0] * shape[1] + 1

    def by_cell(values: NDArray[np.int64] | None) -> NDArray[np.int64]:
        # Sums in float64 are exact up to 2**53 tokens.
        return np.bincount(cells, values, size)[:-1].astype(np.int64).reshape(shape)

    times = np.bincount(drawn, minlength=len(lengths))
    most = np.zeros(size, np.int64)
    # Plain indexing would keep the value of one document of each cell, not the largest.
    np.maximum.at(most, cells, times)
    documents, before, after = by_cell(None), by_cell(lengths), by_cell(times * lengths)
    asked_of_sources = request.asked if request.by_source else None
    lengths_asked = request.asked if request.lengths_by_source else None
    return MixtureReport(
        tokens_available=int(before.sum()),
        tokens_asked=request.total,
        tokens_achieved=int(after.sum()),
        documents=len(drawn),
        distinct_documents=int((times > 0).sum()),
        repeated_documents=int((times > 1).sum()),
        most_read=int(times.max(initial=0)),
        empty_documents=len(lengths) - int(documents.sum()),
        as_is=request.as_is,
        long_from=int(starts[-1]) if len(starts) > 1 else None,
        total=_proportions(None, slice(None), before, asked_of_sources, request.by_length[None], after),
        sources=tuple(
            _proportions(name, slice(index, index + 1), before, asked_of_sources, lengths_asked, after)
            for index, name in enumerate(sources)
        ),
        cells=tuple(
            Cell(
                source=name,
                first=int(starts[b]),
                end=int(starts[b + 1]) if b + 1 < len(starts) else None,
                documents=int(documents[s, b]),
                available=int(before[s, b]),
                asked=int(request.asked[s, b]),
                drawn=int(after[s, b]),
                epochs_asked=_share(int(request.asked[s, b]), int(before[s, b])) or 0.0,
                most_read=int(most[s * shape[1] + b]),
            )
            for s, name in enumerate(sources)
            for b in range(len(starts))
        ),
        shortages=request.shortages,
        total_from=request.total_from,
    )


def _proportions(
    name: str | None,
    rows: slice,
    before: NDArray[np.int64],
    asked: NDArray[np.int64] | None,
    lengths_asked: NDArray[np.int64] | None,
    after: NDArray[np.int64],
) -> Proportions:
    def of_all(tokens: NDArray[np.int64]) -> float:
        return _share(int(tokens[rows].sum()), int(tokens.sum())) or 0.0

    def long(tokens: NDArray[np.int64] | None) -> float | None:
        # A single bin means that the settings have no lengths.
        if tokens is None or tokens.shape[1] == 1:
            return None
        return _share(int(tokens[rows, -1].sum()), int(tokens[rows].sum()))

    return Proportions(
        source=name,
        share_before=of_all(before),
        share_asked=None if asked is None else of_all(asked),
        share_achieved=of_all(after),
        long_before=long(before),
        long_asked=long(lengths_asked),
        long_achieved=long(after),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def lengths_in_words(first: int, end: int | None) -> str:
    """Describe a bin's lengths as a phrase that follows "documents"; empty for the bin of all lengths."""
    if end is None:
        return f" of {first:,} tokens or more" if first else ""
    return f" of {first:,} to {end - 1:,} tokens" if first else f" of fewer than {end:,} tokens"


def either(choices: Sequence[str]) -> str:
    """Join what a user may do instead: "a", "a, or b", "a, b, or c"."""
    *others, last = choices
    return f"{', '.join(others)}, or {last}" if others else last


def explain(report: MixtureReport) -> list[str]:
    """The report in sentences, most important first; sources and bins are described only if they are few."""
    empty = counted(report.empty_documents, "document")
    if report.as_is:
        sentences = [
            f"The mixture is the unchanged corpus: {counted(report.documents, 'document')} with "
            f"{counted(report.tokens_achieved, 'token')}, each read once, in the order of the corpus."
        ]
        without = [f"Without any tokens: {empty}."] if report.empty_documents else []
        return sentences + without
    sentences = [_whole(report), *report.shortages, _repetition(report)]
    if report.empty_documents:
        sentences.append(f"Left out because they have no tokens: {empty}.")
    if report.long_from is not None:
        sentences.append(_long_sentence("all tokens", report.long_from, report.total))
    if len(report.cells) > _MOST_CELLS_IN_WORDS:
        return sentences
    for source in report.sources:
        sentences.append(
            f"Source {source.source!r} has {_of_three(source.share_before, source.share_asked, source.share_achieved)}"
            " of the tokens."
        )
        if report.long_from is not None and source.long_achieved is not None:
            sentences.append(_long_sentence(f"source {source.source!r}", report.long_from, source))
    # Empty cells are already reported among the shortages.
    return sentences + [
        _cell_sentence(cell) for cell in report.cells if cell.documents and cell.asked != cell.available
    ]


def _whole(report: MixtureReport) -> str:
    has = f"The mixture has {counted(report.tokens_achieved, 'token')}"
    available, requested = f"{report.tokens_available:,}", f"{report.tokens_asked:,}"
    if report.total_from == "tokens":
        return f"{has}; {requested} were requested, and the corpus has {available}."
    if report.total_from == "corpus":
        return f"{has}; the corpus has {available}, and no other total was requested."
    return f"{has}; {requested} follow from the {report.total_from}, and the corpus has {available}."


def _repetition(report: MixtureReport) -> str:
    opening = f"In random order, {counted(report.documents, 'document')} are read"
    if not report.repeated_documents:
        return f"{opening}, none of them twice."
    return (
        f"{opening}: {report.distinct_documents:,} distinct documents, of which {report.repeated_documents:,} are "
        f"repeated, at most {report.most_read} times."
    )


def _of_three(before: float | None, asked: float | None, achieved: float | None) -> str:
    achieved_text = "none" if achieved is None else _percent(achieved)
    notes = [f"requested {_percent(asked)}"] if asked is not None else []
    notes += [f"before {_percent(before)}"] if before is not None else []
    return f"{achieved_text} ({', '.join(notes)})" if notes else achieved_text


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def _long_sentence(whole: str, long_from: int, values: Proportions) -> str:
    shares = _of_three(values.long_before, values.long_asked, values.long_achieved)
    return f"Of {whole}, {shares} lie in documents{lengths_in_words(long_from, None)}."


def _cell_sentence(cell: Cell) -> str:
    documents = f"{counted(cell.documents, 'document')}{lengths_in_words(cell.first, cell.end)}"
    epochs = f"requested {cell.epochs_asked:.3g}"
    if not cell.drawn:
        return f"Source {cell.source!r} has {documents}; none is read ({epochs})."
    return (
        f"Source {cell.source!r} has {documents}, read {cell.drawn / cell.available:.3g} times on average ({epochs}), "
        f"at most {counted(cell.most_read, 'time')} each."
    )


def mixture_reports(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The reports of what a mixture did, by their keys in a manifest: ``mixture``, and those that few have."""
    return {"mixture": manifest["mixture"], **{key: manifest[key] for key in REPORTS if key in manifest}}


def mixture_sentences(reports: Mapping[str, Any]) -> list[str]:
    """Sentences on what the mixture dropped, and on what it drew of what was requested; none without a mixture.

    Args:
        reports: a mapping with the keys of :func:`mixture_reports`.
    """
    report = reports["mixture"]
    drawn = [] if report is None else explain(MixtureReport.from_dict(report))
    return explain_gzip(reports.get("gzip_ratios")) + drawn + explain_synthetic(reports.get("synthetic"))
