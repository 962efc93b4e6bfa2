"""What a corpus or a set of packed rows consists of: sources, shares and document lengths."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ropewalk.data.rows import PackedRows
from ropewalk.data.tokenise import TokenisedDocument

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class LengthBin:
    """Documents whose length is from ``start`` to less than ``end`` tokens, and the tokens they hold."""

    start: int
    end: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class SourceStatistics:
    """One source, or all together.

    Attributes:
        documents: documents; in packed rows the pieces of a cut document count each, as they do in training.
        tokens: their tokens, a packed document's BOS and EOS included, a row's anchor not.
        mixture_ratio: share of the documents (the sequences), from 0 to 1.
        token_ratio: share of the tokens, from 0 to 1.
        mean_length: tokens a document.
        quantiles: length in tokens at each of QUANTILES, by name ("0.5" is the median).
        histogram: bins from a power of two to the next, from the shortest to the longest document.
    """

    documents: int
    tokens: int
    mixture_ratio: float
    token_ratio: float
    mean_length: float
    quantiles: dict[str, float]
    histogram: list[LengthBin]


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of tokenised documents or packed rows; plain values, ready for JSON.

    Attributes:
        packed: whether the documents are those of packed rows.
        total: all sources together.
        sources: each source by name, the one with most tokens first.
        rows: packed rows, None for documents that are not packed.
        documents_per_row: mean number of documents a row, None likewise.
    """

    packed: bool
    total: SourceStatistics
    sources: dict[str, SourceStatistics]
    rows: int | None
    documents_per_row: float | None


def tokenised_statistics(documents: Iterable[TokenisedDocument]) -> DataStatistics:
    """Statistics of a stream of tokenised documents; eight bytes a document are kept, for the quantiles."""
    lengths: dict[str, array[int]] = {}
    for document in documents:
        lengths.setdefault(document.source, array("q")).append(len(document.input_ids))
    return _statistics(lengths, None)


def packed_statistics(rows: PackedRows) -> DataStatistics:
    """Statistics of packed rows, as training sees them."""
    lengths: dict[str, array[int]] = {}
    for index in range(len(rows)):
        row = rows.packed(index)
        totals = np.bincount(row.segment_documents, weights=row.segment_lengths, minlength=len(row.sources))
        for source, length in zip(row.sources, totals, strict=True):
            lengths.setdefault(source, array("q")).append(int(length))
    return _statistics(lengths, len(rows))


def _statistics(lengths: dict[str, array[int]], rows: int | None) -> DataStatistics:
    by_source = {source: np.array(each, np.int64) for source, each in lengths.items()}
    everything = np.concatenate([np.zeros(0, np.int64), *by_source.values()])
    documents, tokens = len(everything), int(everything.sum())
    ordered = sorted(by_source.items(), key=lambda item: (-int(item[1].sum()), item[0]))
    return DataStatistics(
        packed=rows is not None,
        total=_source_statistics(everything, documents, tokens),
        sources={source: _source_statistics(each, documents, tokens) for source, each in ordered},
        rows=rows,
        documents_per_row=documents / rows if rows else None,
    )


def _source_statistics(lengths: np.ndarray, all_documents: int, all_tokens: int) -> SourceStatistics:
    documents, tokens = len(lengths), int(lengths.sum())
    values = np.quantile(lengths, QUANTILES) if documents else np.full(len(QUANTILES), np.nan)
    return SourceStatistics(
        documents=documents,
        tokens=tokens,
        mixture_ratio=documents / all_documents if all_documents else float("nan"),
        token_ratio=tokens / all_tokens if all_tokens else float("nan"),
        mean_length=tokens / documents if documents else float("nan"),
        quantiles={f"{quantile:g}": float(value) for quantile, value in zip(QUANTILES, values, strict=True)},
        histogram=_histogram(lengths),
    )


def _histogram(lengths: np.ndarray) -> list[LengthBin]:
    if len(lengths) == 0:
        return []
    # frexp gives n = m * 2**e with m in [0.5, 1), so the bin [2**(e-1), 2**e); a length of 0 gets e = 0.
    exponents = np.frexp(lengths.astype(np.float64))[1]
    documents = np.bincount(exponents)
    tokens = np.bincount(exponents, weights=lengths)
    first = int(exponents.min())
    return [
        LengthBin(2 ** (e - 1) if e else 0, 2**e, int(documents[e]), int(tokens[e]))
        for e in range(first, len(documents))
    ]
