"""Statistics of a corpus or of packed rows: sources, shares, lengths, repeats and skipped attention."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.attention_share import ideal_speedup, ratio, share_of_documents, share_of_rows, skipped
from ropewalk.data.mixture.report import mixture_reports
from ropewalk.data.read.documents import TokenisedDocument, token_hash
from ropewalk.data.rows.assemble import PADDING, PackedRow
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data.rows.packed_rows import PackedRows

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
LONG_LENGTHS = (4096, 16384, 65536, 131072)
"""Lengths in tokens above which documents count as long in ``long_shares``."""


@dataclass(frozen=True)
class LengthBin:
    """Numbers of documents with lengths ``start <= length < end``, and of their tokens."""

    start: int
    end: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class SourceStatistics:
    """Statistics of one source, or of all sources together.

    Attributes:
        documents: number of documents. In packed rows, each piece of a cut document counts, as in training, and a
            document that is read twice counts twice.
        tokens: number of tokens. In packed rows, they include BOS, tags and EOS, but not anchors and padding.
        mixture_ratio: share of all documents, from 0 to 1.
        token_ratio: share of all tokens, from 0 to 1.
        mean_length: mean tokens per document.
        length_quantiles: length in tokens at each of QUANTILES, by name ("0.5" is the median).
        long_shares: share of the tokens in documents longer than each of LONG_LENGTHS, by name.
        histogram: bins between powers of two, from the shortest to the longest document.
        trained_tokens: number of tokens that training learns to predict: all of plain text, the assistant's turns of a
            chat. In packed rows, the targets of the loss, so without tags and the first token of each document. None
            if they were not counted.
    """

    documents: int
    tokens: int
    mixture_ratio: float
    token_ratio: float
    mean_length: float
    length_quantiles: dict[str, float]
    long_shares: dict[str, float]
    histogram: list[LengthBin]
    trained_tokens: int | None = None


@dataclass(frozen=True)
class Repeats:
    """Repeated documents, identified by their text, or in packed rows by their number in the corpus.

    Attributes:
        documents: number of different documents that occur more than once.
        tokens: tokens of all copies but the first of each; in packed rows, own tokens.
        most: number of copies of the most frequent document.
    """

    documents: int
    tokens: int
    most: int


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of tokenised documents or packed rows; plain values, ready for JSON.

    Attributes:
        packed: whether these are the documents of packed rows.
        total: all sources together.
        sources: each source by name, by descending number of tokens.
        rows: number of packed rows; None for documents that are not packed.
        documents_per_row: mean number of documents per row; None for documents that are not packed.
        documents_per_row_quantiles: number of documents per row at each of QUANTILES; None likewise.
        row_length: tokens of a row; None if no length is given.
        attention_share: share of full attention's (query, key) pairs that each pattern computes on rows of
            ``row_length``; empty without a length. See ``ropewalk.data.attention_share``.
        repeats: repeated documents; None if unknown.
    """

    packed: bool
    total: SourceStatistics
    sources: dict[str, SourceStatistics]
    rows: int | None
    documents_per_row: float | None
    documents_per_row_quantiles: dict[str, float] | None
    row_length: int | None
    attention_share: dict[str, float]
    repeats: Repeats | None


def length_statistics(
    lengths: NDArray[np.int64],
    source_ids: NDArray[np.int32],
    sources: Sequence[str],
    *,
    row_length: int | None = None,
    hashes: NDArray[np.uint64] | None = None,
    trained: NDArray[np.int64] | None = None,
) -> DataStatistics:
    """Statistics of documents that are not packed.

    Args:
        lengths: int64 ``[documents]``, tokens of each document in reading order.
        source_ids: int32 ``[documents]``, source of each document.
        sources: the sources' names by id; sources without documents are left out.
        row_length: tokens of the rows for the shares of attention, including the anchor; None computes no shares.
        hashes: uint64 ``[documents]``, equal for equal texts; None if repeats need not be found.
        trained: int64 ``[documents]``, tokens of each document that training learns to predict; None if unknown.

    Raises:
        RopewalkError: if the arrays do not match, a length is negative, a source has no name, or
            ``row_length`` is less than 2.
    """
    if lengths.shape != source_ids.shape or (hashes is not None and hashes.shape != lengths.shape):
        shapes = f"lengths {lengths.shape}, source_ids {source_ids.shape}"
        shapes += "" if hashes is None else f", hashes {hashes.shape}"
        raise RopewalkError(f"each array must have one entry per document, got the shapes {shapes}")
    for what, values in (("a length", lengths), ("a source id", source_ids)):
        if len(values) and int(values.min()) < 0:
            raise RopewalkError(f"{what} must be 0 or more, got {int(values.min())}")
    total, by_source = _by_source(lengths, source_ids, sources, trained)
    return DataStatistics(
        packed=False,
        total=total,
        sources=by_source,
        rows=None,
        documents_per_row=None,
        documents_per_row_quantiles=None,
        row_length=row_length,
        attention_share={} if row_length is None else share_of_documents(lengths, row_length),
        repeats=None if hashes is None else _repeats(lengths, hashes),
    )


class DocumentCounts:
    """Counts of tokenised documents, of which 28 bytes per document are kept in memory."""

    def __init__(self, documents: Iterable[TokenisedDocument] = ()) -> None:
        # Arrays instead of lists: 8 bytes per value instead of an object each.
        self.lengths, self.source_ids, self.hashes, self.trained = (array(kind) for kind in "qiQq")
        self.sources: dict[str, int] = {}
        for document in documents:
            self.lengths.append(len(document.input_ids))
            self.source_ids.append(self.sources.setdefault(document.source, len(self.sources)))
            self.hashes.append(token_hash(document.input_ids))
            self.trained.append(len(document.input_ids) if document.trained is None else document.trained)

    def extend(self, other: DocumentCounts) -> None:
        """Append the counts of the documents that follow."""
        numbers = [self.sources.setdefault(name, len(self.sources)) for name in other.sources]
        self.lengths.extend(other.lengths)
        self.source_ids.extend(numbers[number] for number in other.source_ids)
        self.hashes.extend(other.hashes)
        self.trained.extend(other.trained)

    def statistics(self, row_length: int | None = None) -> DataStatistics:
        """Statistics of the documents in reading order; documents with equal tokens are repeats.

        Args:
            row_length: as in :func:`length_statistics`.

        Raises:
            RopewalkError: if ``row_length`` is less than 2.
        """
        return length_statistics(
            np.array(self.lengths, np.int64),
            np.array(self.source_ids, np.int32),
            list(self.sources),
            row_length=row_length,
            hashes=np.array(self.hashes, np.uint64),
            trained=np.array(self.trained, np.int64),
        )


def packed_statistics(rows: PackedRows, progress: Callable[[int], None] | None = None) -> DataStatistics:
    """Statistics of packed rows as training reads them; 20 bytes per document are kept in memory.

    Padding counts neither as a document nor as tokens, but it counts in the shares of attention, because attention is
    computed for it. Repeats are taken from the manifest, where they were counted before an incomplete row was left out:
    the pieces in rows do not distinguish a second reading from a continuation.

    Args:
        rows: packed rows.
        progress: called with the number of rows counted so far.
    """
    lengths, source_ids, per_row, trained = array("q"), array("i"), array("q"), array("q")
    numbers: dict[str, int] = {}

    def documents() -> Iterator[tuple[NDArray[np.int64], int]]:
        for index in range(len(rows)):
            row = rows.packed(index)
            each = document_lengths(row)
            before = len(lengths)
            targets = targets_of_documents(row, rows.settings.anchor_length).tolist()
            for length, target, source, number in zip(
                each.tolist(), targets, row.sources, row.numbers, strict=True
            ):
                if number != PADDING:
                    lengths.append(length)
                    trained.append(target)
                    source_ids.append(numbers.setdefault(source, len(numbers)))
            per_row.append(len(lengths) - before)
            if progress is not None:
                progress(index + 1)
            yield each, row.segment_documents[0]

    mixture = rows.manifest["counts"]["mixture"]
    attention = share_of_rows(documents(), rows.settings.anchor_length)
    total, by_source = _by_source(
        np.array(lengths, np.int64),
        np.array(source_ids, np.int32),
        list(numbers),
        np.array(trained, np.int64),
    )
    return DataStatistics(
        packed=True,
        total=total,
        sources=by_source,
        rows=len(rows),
        documents_per_row=total.documents / len(rows) if len(rows) else None,
        documents_per_row_quantiles=_quantiles(*np.unique(np.array(per_row, np.int64), return_counts=True)),
        row_length=rows.settings.context,
        attention_share=attention,
        repeats=Repeats(mixture["repeated_documents"], mixture["repeated_tokens"], mixture["most_times"]),
    )


def document_lengths(row: PackedRow) -> NDArray[np.int64]:
    """int64 ``[documents]``: tokens of each document of a row over all its chunks; includes padding as a document."""
    sums = np.zeros(len(row.sources), np.int64)
    np.add.at(sums, row.segment_documents, row.segment_lengths)
    return sums


def targets_of_documents(row: PackedRow, anchor_length: int) -> NDArray[np.int64]:
    """int64 ``[documents]``: targets of the loss in each document of a row, counted as ``training_row`` labels them."""
    stops = anchor_length + np.cumsum(row.segment_lengths)
    trained = np.ones(int(stops[-1]), np.bool_)
    for start, stop in zip(row.masked[::2], row.masked[1::2], strict=True):
        trained[start:stop] = False
    starts = stops - row.segment_lengths
    # Nothing of a document precedes its first token, so nothing is trained to predict it.
    trained[starts[np.unique(row.segment_documents, return_index=True)[1]]] = False
    before = np.concatenate([[0], np.cumsum(trained)])
    sums = np.zeros(len(row.sources), np.int64)
    np.add.at(sums, row.segment_documents, before[stops] - before[starts])
    return sums


def statistics_report(statistics: DataStatistics | Mapping[str, Any]) -> dict[str, Any]:
    """Statistics as ``ropewalk data stats --json`` prints them: the total's values on the outermost level.

    Args:
        statistics: statistics, or the plain values that ``dataclasses.asdict`` made of some.
    """
    values = dict(asdict(statistics) if isinstance(statistics, DataStatistics) else statistics)
    # For the total these ratios are always 1.
    total = {name: each for name, each in values.pop("total").items() if not name.endswith("_ratio")}
    return {
        **total,
        **values,
        "attention_skipped": skipped(values["attention_share"]),
        "attention_ideal_speedup": ideal_speedup(values["attention_share"]),
    }


def rows_report(rows: PackedRows, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Statistics of packed rows as ``ropewalk data stats --json`` prints them.

    The main statistics are those of the packed documents before they were cut, each reading counted, with their own
    tokens. Lengths and ratios before and after a mixture are therefore comparable. The pieces of documents in rows,
    with BOS, tags and EOS, have statistics of their own.

    Args:
        rows: packed rows.
        progress: called with the number of rows counted so far.

    Returns:
        :func:`statistics_report` of the packed documents, with numbers of rows, documents per row, shares of attention
        and repeats from the rows. In addition: ``pieces``, the number of pieces in rows; ``in_rows``, their lengths and
        shares in total and by source; ``mixture``, the manifest's report of the mixture; ``corpus``, statistics of the
        documents before mixing; ``gzip_ratios`` and ``synthetic``, if the mixture asks for them; and ``kind``, the
        documents that were packed, if their lengths decided.

    Raises:
        RopewalkError: if the manifest lacks statistics of the documents, or has those of other documents.
    """
    manifest, in_rows = rows.manifest, packed_statistics(rows, progress)
    before, packed = manifest.get("corpus"), manifest["counts"]["packing"]["documents"]
    whole = manifest.get("mixed")
    if whole is None and manifest["mixture"] is None:
        whole = before
    if before is None or whole is None:
        raise RopewalkError(
            "the manifest of the packed rows has no statistics of the documents before packing; pack again"
        )
    if whole["total"]["documents"] != packed:
        raise RopewalkError(
            f"the manifest of the packed rows has statistics of {whole['total']['documents']} documents, but {packed} "
            "were packed; pack again"
        )
    of_rows = ("packed", "rows", "row_length", "documents_per_row", "documents_per_row_quantiles")
    pieces = statistics_report(in_rows)
    return {
        **statistics_report(whole),
        **{key: each for key, each in pieces.items() if key in of_rows or key.startswith("attention_")},
        "repeats": pieces["repeats"],
        "pieces": in_rows.total.documents,
        "in_rows": {
            **_pieces(in_rows.total),
            "sources": {name: _pieces(each) for name, each in in_rows.sources.items()},
        },
        "corpus": statistics_report(before),
        **mixture_reports(manifest),
        # Absent where documents of any length are packed, as in reports of earlier versions.
        **({} if rows.settings.kind is None else {"kind": rows.settings.kind}),
    }


def _pieces(statistics: SourceStatistics) -> dict[str, Any]:
    return {
        "pieces": statistics.documents,
        "tokens": statistics.tokens,
        "piece_ratio": statistics.mixture_ratio,
        "token_ratio": statistics.token_ratio,
        "mean_length": statistics.mean_length,
        "length_quantiles": statistics.length_quantiles,
        "long_shares": statistics.long_shares,
        "trained_tokens": statistics.trained_tokens,
    }


def _by_source(
    lengths: NDArray[np.int64],
    source_ids: NDArray[np.int32],
    sources: Sequence[str],
    trained: NDArray[np.int64] | None,
) -> tuple[SourceStatistics, dict[str, SourceStatistics]]:
    if len(source_ids) and int(source_ids.max()) >= len(sources):
        raise RopewalkError(
            f"source ids must be from 0 to {len(sources) - 1}, because the number of sources is {len(sources)}, got "
            f"{int(source_ids.max())}"
        )
    targets = None if trained is None else _sums(trained, source_ids, len(sources))
    bounds, values, times = _distinct(lengths, source_ids, len(sources))
    documents, tokens = len(lengths), int(lengths.sum())
    found = []
    for source, (start, stop) in enumerate(pairwise(bounds.tolist())):
        if start < stop:
            own = None if targets is None else int(targets[source])
            each = _source_statistics(values[start:stop], times[start:stop], documents, tokens, own)
            found.append((sources[source], each))
    found.sort(key=lambda item: (-item[1].tokens, item[0]))
    all_values, index = np.unique(values, return_inverse=True)
    all_targets = None if trained is None else int(trained.sum())
    total = _source_statistics(
        all_values, _sums(times, index, len(all_values)), documents, tokens, all_targets
    )
    return total, dict(found)


def _sums(values: NDArray[np.int64], groups: NDArray[np.integer], count: int) -> NDArray[np.int64]:
    """Sum of the values in each group; exact, unlike bincount with weights, which goes through float64."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, groups, values)
    return sums


def _distinct(
    lengths: NDArray[np.int64], source_ids: NDArray[np.int32], sources: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The distinct lengths of each source and how often they occur: far fewer than documents, and all statistics need.

    Returns:
        int64 ``[sources + 1]``, where the lengths of each source begin; the lengths, ascending within each source; and
        the number of documents of each.
    """
    width = int(lengths.max(initial=0)) + 1
    keys, times = np.unique(source_ids.astype(np.int64) * width + lengths, return_counts=True)
    return np.searchsorted(keys, np.arange(sources + 1) * width), keys % width, times


def _source_statistics(
    values: NDArray[np.int64],
    times: NDArray[np.int64],
    all_documents: int,
    all_tokens: int,
    trained_tokens: int | None,
) -> SourceStatistics:
    """Statistics of documents whose distinct lengths are ``values``, ascending, each occurring ``times``."""
    documents, each = int(times.sum()), values * times
    tokens = int(each.sum())
    return SourceStatistics(
        documents=documents,
        tokens=tokens,
        mixture_ratio=ratio(documents, all_documents),
        token_ratio=ratio(tokens, all_tokens),
        mean_length=ratio(tokens, documents),
        length_quantiles=_quantiles(values, times),
        long_shares={str(n): ratio(int(each[values > n].sum()), tokens) for n in LONG_LENGTHS},
        histogram=_histogram(values, times),
        trained_tokens=trained_tokens,
    )


def _quantiles(values: NDArray[np.int64], times: NDArray[np.int64]) -> dict[str, float]:
    """As numpy.quantile gives them of all values, each repeated as often as it occurs."""
    ends = np.cumsum(times)
    found = np.full(len(QUANTILES), math.nan)
    for number, quantile in enumerate(QUANTILES if len(values) else ()):
        place = quantile * (int(ends[-1]) - 1)
        # Between two neighbours in order, as numpy interpolates.
        pair = [
            values[np.searchsorted(ends, at, side="right")] for at in (math.floor(place), math.ceil(place))
        ]
        found[number] = np.quantile(pair, place - math.floor(place))
    return {f"{quantile:g}": float(value) for quantile, value in zip(QUANTILES, found, strict=True)}


def _histogram(values: NDArray[np.int64], times: NDArray[np.int64]) -> list[LengthBin]:
    if len(values) == 0:
        return []
    # frexp gives n = m * 2**e with m in [0.5, 1), so the bin [2**(e-1), 2**e); a length of 0 gets e = 0.
    exponents = np.frexp(values.astype(np.float64))[1]
    documents = _sums(times, exponents, int(exponents.max()) + 1)
    tokens = _sums(values * times, exponents, len(documents))
    first = int(exponents.min())
    return [
        LengthBin(2 ** (e - 1) if e else 0, 2**e, int(documents[e]), int(tokens[e]))
        for e in range(first, len(documents))
    ]


def _repeats(lengths: NDArray[np.int64], hashes: NDArray[np.uint64]) -> Repeats:
    # All empty texts have the same hash; do not count them as repeats.
    full = lengths > 0
    sizes = lengths[full]
    _, firsts, times = np.unique(hashes[full], return_index=True, return_counts=True)
    repeated = int(sizes.sum() - sizes[firsts].sum())
    return Repeats(int((times > 1).sum()), repeated, int(times.max(initial=0)))
