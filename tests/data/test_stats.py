"""Shares, lengths, histograms and repeats against counts by hand."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import PackedRow, PackingSettings, packed_statistics, tokenised_statistics
from ropewalk.data.documents import TokenisedDocument
from ropewalk.data.stats import LONG_LENGTHS, LengthBin, Repeats, length_statistics, statistics_report
from ropewalk.errors import RopewalkError
from ropewalk.packing import PATTERNS, PackedLayout

ONCE = {"repeated_documents": 0, "repeated_tokens": 0, "most_times": 1}


@dataclass
class HandMade:
    """Rows as PackedRows hands them on, without the files."""

    rows: list[PackedRow]
    settings: PackingSettings
    mixed: dict[str, int] = field(default_factory=lambda: ONCE)

    @property
    def manifest(self) -> dict[str, Any]:
        return {"counts": {"mixture": self.mixed}}

    def __len__(self) -> int:
        return len(self.rows)

    def packed(self, index: int) -> PackedRow:
        return self.rows[index]


def hand_made_row(
    context: int, segments: list[tuple[int, int]], sources: list[str], numbers: list[int]
) -> PackedRow:
    """Segments are (length, document)."""
    lengths, documents = ([each[n] for each in segments] for n in (0, 1))
    return PackedRow(np.zeros(context, np.int32), lengths, documents, sources, numbers, [])


def tokenised(**lengths: list[int]) -> list[TokenisedDocument]:
    return [
        TokenisedDocument(np.zeros(n, np.int32), source) for source, each in lengths.items() for n in each
    ]


def test_shares_by_hand() -> None:
    statistics = tokenised_statistics(tokenised(web=[1, 2, 3], books=[90]))
    assert list(statistics.sources) == ["books", "web"]
    assert statistics.sources["books"].mixture_ratio == 0.25
    assert statistics.sources["books"].token_ratio == 90 / 96
    assert statistics.sources["web"].length_quantiles["0.5"] == 2
    assert statistics.sources["web"].mean_length == 2
    assert statistics.sources["web"].histogram == [LengthBin(1, 2, 1, 1), LengthBin(2, 4, 2, 5)]
    assert statistics.total.length_quantiles["1"] == 90
    assert statistics.rows is None
    assert statistics.attention_share == {}
    json.dumps(asdict(statistics), allow_nan=False)


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 5000), min_size=1), min_size=1))
def test_every_document_and_token_lies_in_one_bin(lengths: dict[str, list[int]]) -> None:
    statistics = tokenised_statistics(tokenised(**lengths))
    assert sum(source.mixture_ratio for source in statistics.sources.values()) == pytest.approx(1)
    for source, each in lengths.items():
        histogram = statistics.sources[source].histogram
        assert sum(b.tokens for b in histogram) == sum(each) == statistics.sources[source].tokens
        for bin_ in histogram:
            inside = [n for n in each if bin_.start <= n < bin_.end]
            assert (bin_.documents, bin_.tokens) == (len(inside), sum(inside))


AROUND = st.sampled_from([n + d for n in LONG_LENGTHS for d in (-1, 0, 1)] + [1, 7, 300_000])


@given(st.lists(st.tuples(AROUND, st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=30))
def test_statistics_equal_a_plain_loop(documents: list[tuple[int, int, int]]) -> None:
    """Mixed sources, lengths on the edges of "longer than", and texts that repeat."""
    lengths, ids, texts = (np.array(column) for column in zip(*documents, strict=True))
    # Equal texts have equal lengths.
    lengths = np.array([lengths[texts.tolist().index(text)] for text in texts], np.int64)
    statistics = length_statistics(
        lengths, ids.astype(np.int32), ["a", "b", "c"], hashes=texts.astype(np.uint64)
    )
    for name, found in [("all", statistics.total), *statistics.sources.items()]:
        mine = [int(n) for n, i in zip(lengths, ids, strict=True) if name == "all" or "abc"[i] == name]
        assert found.documents == len(mine)
        assert found.tokens == sum(mine)
        assert found.mixture_ratio == len(mine) / len(documents)
        assert found.token_ratio == sum(mine) / int(lengths.sum())
        assert found.length_quantiles["0"] == min(mine)
        assert found.length_quantiles["1"] == max(mine)
        for limit in LONG_LENGTHS:
            assert found.long_shares[str(limit)] == sum(n for n in mine if n > limit) / sum(mine)
    assert set(statistics.sources) == {"abc"[i] for i in ids}
    times = Counter(texts.tolist())
    length_of = dict(zip(texts.tolist(), lengths.tolist(), strict=True))
    assert statistics.repeats == Repeats(
        documents=sum(n > 1 for n in times.values()),
        tokens=sum((n - 1) * length_of[text] for text, n in times.items()),
        most=max(times.values()),
    )


def test_repeats_of_a_stream_are_documents_of_equal_tokens() -> None:
    texts = [[1, 2], [3], [1, 2], [], [], [1, 2], [1, 3]]
    documents = [TokenisedDocument(np.array(ids, np.int32), "a") for ids in texts]
    assert tokenised_statistics(documents).repeats == Repeats(documents=1, tokens=4, most=3)


def test_attention_is_counted_in_the_order_of_reading() -> None:
    """Sorted by source the long document would not be cut: 6 + 4 in the first row, 4 in the second."""
    lengths, ids = np.array([6, 8, 6], np.int64), np.array([0, 1, 0], np.int32)
    statistics = length_statistics(lengths, ids, ["a", "b"], row_length=10)
    assert statistics.attention_share["intra_document"] == (21 + 10 + 10 + 21) / (2 * 55)
    assert statistics.row_length == 10


def test_nothing_is_nan_rather_than_zero() -> None:
    statistics = tokenised_statistics([], 8)
    assert statistics.total.documents == 0
    assert math.isnan(statistics.total.mean_length)
    assert math.isnan(statistics.total.long_shares["4096"])
    assert math.isnan(statistics.attention_share["full"])
    assert statistics.sources == {}
    assert statistics.repeats == Repeats(0, 0, 0)


def test_sources_without_a_document_are_left_out() -> None:
    statistics = length_statistics(np.array([3]), np.array([1], np.int32), ["none", "one", "neither"])
    assert list(statistics.sources) == ["one"]
    assert statistics.repeats is None


@pytest.mark.parametrize(
    ("lengths", "ids", "hashes", "message"),
    [
        ([1, 2], [0], None, r"one a document, got \[\(2,\), \(1,\)\]"),
        ([1], [0], [1, 2], r"one a document, got \[\(1,\), \(1,\), \(2,\)\]"),
        ([4, -1], [0, 0], None, r"a length is 0 or more, got -1"),
        ([4], [-2], None, r"a source's number is 0 or more, got -2"),
        ([4], [1], None, r"there are 1 source names, got a document of source 1"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(
    lengths: list[int], ids: list[int], hashes: list[int] | None, message: str
) -> None:
    given_hashes = None if hashes is None else np.array(hashes, np.uint64)
    with pytest.raises(RopewalkError, match=message):
        length_statistics(np.array(lengths, np.int64), np.array(ids, np.int32), ["only"], hashes=given_hashes)


def interleaved() -> HandMade:
    """Two rows of 12: an anchor, web in two chunks around a book, padding; then a book alone."""
    rows = [
        hand_made_row(12, [(2, 0), (4, 1), (3, 0), (2, 2)], ["web", "book", ""], [7, 3, -1]),
        hand_made_row(12, [(11, 0)], ["book"], [3]),
    ]
    mixed = {"repeated_documents": 1, "repeated_tokens": 9, "most_times": 2}
    return HandMade(rows, PackingSettings(12), mixed)


def test_packed_rows_by_hand() -> None:
    statistics = packed_statistics(interleaved())
    assert statistics.packed
    assert (statistics.total.documents, statistics.total.tokens) == (3, 20)
    assert set(statistics.sources) == {"book", "web"}
    assert statistics.sources["web"].histogram == [LengthBin(4, 8, 1, 5)]
    assert statistics.sources["book"].token_ratio == 15 / 20
    assert (statistics.rows, statistics.row_length) == (2, 12)
    assert statistics.documents_per_row == 1.5
    assert statistics.documents_per_row_quantiles is not None
    assert statistics.documents_per_row_quantiles["0"] == 1
    assert statistics.documents_per_row_quantiles["1"] == 2
    assert statistics.repeats == Repeats(documents=1, tokens=9, most=2)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_on_packed_rows_is_that_of_their_layouts(pattern: str) -> None:
    rows = interleaved()
    share = packed_statistics(rows).attention_share
    layouts = [
        PackedLayout.from_segments(row.segment_lengths, row.segment_documents, pattern, 1)
        for row in rows.rows
    ]
    assert share[pattern] == sum(int(each.dense_mask().sum()) for each in layouts) / (2 * 12 * 13 / 2)


def test_the_report_has_the_totals_outside_and_survives_json() -> None:
    statistics = packed_statistics(interleaved())
    report = statistics_report(statistics)
    assert report["tokens"] == 20
    assert report["long_shares"]["4096"] == 0
    assert "token_ratio" not in report
    assert report["attention_skipped"]["full"] == 0
    share = report["attention_share"]["anchor"]
    assert report["attention_skipped"]["anchor"] == 1 - share
    assert report["attention_ideal_speedup"]["anchor"] == 1 / share
    # A manifest holds the plain values.
    assert statistics_report(json.loads(json.dumps(asdict(statistics)))) == report
