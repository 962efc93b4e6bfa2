"""Shares, lengths, histograms and repeats against counts by hand."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import IGNORED, PATTERNS, PackedLayout
from ropewalk.data import PackedRow, PackingSettings, packed_statistics, read_documents
from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.rows.training_rows import training_row
from ropewalk.data.settings import SourceSpec
from ropewalk.data.statistics import (
    LONG_LENGTHS,
    DocumentCounts,
    LengthBin,
    Repeats,
    length_statistics,
    rows_report,
    statistics_report,
    targets_of_documents,
)
from ropewalk.errors import RopewalkError
from tests.data.read.read_cases import texts_and_tokens

ONCE = {"repeated_documents": 0, "repeated_tokens": 0, "most_times": 1}


@dataclass
class HandMade:
    """Rows as PackedRows hands them on, without the files."""

    rows: list[PackedRow]
    settings: PackingSettings
    mixed: dict[str, int] = field(default_factory=lambda: ONCE)
    told: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path("rows")

    @property
    def manifest(self) -> dict[str, Any]:
        return {"counts": {"mixture": self.mixed, "packing": {"documents": 4}}, **self.told}

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
    statistics = DocumentCounts(tokenised(web=[1, 2, 3], books=[90])).statistics()
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
    statistics = DocumentCounts(tokenised(**lengths)).statistics()
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
    assert DocumentCounts(documents).statistics().repeats == Repeats(documents=1, tokens=4, most=3)


def test_attention_is_counted_in_the_order_of_reading() -> None:
    """Sorted by source the long document would not be cut: 6 + 4 in the first row, 4 in the second."""
    lengths, ids = np.array([6, 8, 6], np.int64), np.array([0, 1, 0], np.int32)
    statistics = length_statistics(lengths, ids, ["a", "b"], row_length=10)
    assert statistics.attention_share["intra_document"] == (21 + 10 + 10 + 21) / (2 * 55)
    assert statistics.row_length == 10


def test_nothing_is_nan_rather_than_zero() -> None:
    statistics = DocumentCounts().statistics(8)
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
        ([1, 2], [0], None, r"got the shapes lengths \(2,\), source_ids \(1,\)"),
        ([1], [0], [1, 2], r"lengths \(1,\), source_ids \(1,\), hashes \(2,\)"),
        ([4, -1], [0, 0], None, r"a length must be 0 or more, got -1"),
        ([4], [-2], None, r"a source id must be 0 or more, got -2"),
        ([4], [1], None, r"source ids must be from 0 to 0, because the number of sources is 1, got 1"),
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
    return HandMade(rows, PackingSettings(context=12), mixed)


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


@given(st.data())
def test_targets_of_documents_are_the_labels_of_training(data: st.DataObject) -> None:
    anchor = data.draw(st.sampled_from([0, 1]))
    segments = data.draw(st.lists(st.tuples(st.integers(2, 6), st.integers(0, 3)), min_size=1, max_size=8))
    # Documents are numbered in the order in which they first appear.
    seen: dict[int, int] = {}
    segments = [(length, seen.setdefault(document, len(seen))) for length, document in segments]
    context = anchor + sum(length for length, _ in segments)
    row = hand_made_row(context, segments, ["a"] * len(seen), list(range(len(seen))))
    edges = sorted(data.draw(st.sets(st.integers(0, context), max_size=6)))
    row.masked.extend(edges[: len(edges) // 2 * 2])
    settings = PackingSettings(context=context, pattern="anchor" if anchor else "intra_document")
    assert settings.anchor_length == anchor
    made = training_row(row, settings)
    documents = made.layout.document_ids[made.labels != IGNORED]
    assert targets_of_documents(row, anchor).tolist() == [
        int((documents == n).sum()) for n in range(len(seen))
    ]


def whole(**lengths: list[int]) -> dict[str, Any]:
    """Statistics of whole documents, as a manifest holds them."""
    found: dict[str, Any] = json.loads(
        json.dumps(asdict(DocumentCounts(tokenised(**lengths)).statistics(12)))
    )
    return found


def test_rows_tell_whole_documents_and_their_pieces_apart() -> None:
    """The book of 40 tokens is cut; 3 pieces of it and the web are in the rows, and 4 documents were packed."""
    told = {
        "corpus": whole(web=[3, 9], book=[40]),
        "mixed": whole(web=[3, 3], book=[40, 40]),
        "mixture": {"as_is": False},
    }
    rows = HandMade(interleaved().rows, PackingSettings(context=12), interleaved().mixed, told)
    report = rows_report(rows)
    assert (report["documents"], report["tokens"], report["pieces"]) == (4, 86, 3)
    assert report["length_quantiles"]["1"] == 40
    book = report["sources"]["book"]
    assert (book["documents"], book["tokens"], book["mixture_ratio"]) == (2, 80, 0.5)
    assert book["token_ratio"] == 80 / 86
    # In the rows: 15 of 20 tokens, in two pieces of three.
    inside = report["in_rows"]
    assert (inside["pieces"], inside["tokens"], inside["length_quantiles"]["1"]) == (3, 20, 11)
    book = inside["sources"]["book"]
    assert (book["pieces"], book["tokens"], book["piece_ratio"], book["token_ratio"]) == (2, 15, 2 / 3, 0.75)
    # Attention and documents a row are those of the rows, not of documents laid into rows in order.
    there = packed_statistics(rows)
    assert report["attention_share"] == there.attention_share != told["mixed"]["attention_share"]
    assert report["attention_skipped"]["anchor"] == 1 - there.attention_share["anchor"]
    assert (report["packed"], report["rows"], report["documents_per_row"]) == (True, 2, 1.5)
    assert report["repeats"] == {"documents": 1, "tokens": 9, "most": 2}
    assert report["corpus"] == statistics_report(told["corpus"])
    for part in (report, report["corpus"]):
        sources = part["sources"].values()
        for count, ratio in (("documents", "mixture_ratio"), ("tokens", "token_ratio")):
            assert part[count] == sum(each[count] for each in sources)
            assert all(each[ratio] == each[count] / part[count] for each in sources)


def test_without_a_mixture_the_documents_are_those_of_the_corpus() -> None:
    told = {"corpus": whole(web=[3, 9, 1], book=[40]), "mixed": None, "mixture": None}
    report = rows_report(HandMade(interleaved().rows, PackingSettings(context=12), told=told))
    assert (report["documents"], report["tokens"], report["mixture"]) == (4, 53, None)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"corpus": whole(web=[3] * 4), "mixture": {"as_is": False}},
            r"has no statistics of the documents before packing",
        ),
        (
            {"mixed": whole(web=[3] * 4), "mixture": {"as_is": False}},
            r"has no statistics of the documents before packing",
        ),
        ({"corpus": whole(web=[3] * 5), "mixture": None}, r"of 5 documents, but 4 were packed; pack again"),
    ],
)
def test_a_manifest_that_tells_of_other_documents_is_refused(told: dict[str, Any], message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        rows_report(HandMade(interleaved().rows, PackingSettings(context=12), told=told))


def test_documents_are_read_as_packing_reads_them(tmp_path: Path) -> None:
    records = [
        {"text": "one"},
        {"text": " "},
        {"input_ids": [4, 5, 6], "source": "ids"},
        {"input_ids": []},
        {"input_ids": [7, 8, 9], "source": [{"start": 0, "end": 2, "source": "a"}, {"start": 2, "end": 3}]},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "n.txt").write_text("two")
    documents = texts_and_tokens(*(SourceSpec(path=str(tmp_path / name)) for name in ("m.jsonl", "n.txt")))
    found = [
        (each.source, each.text if isinstance(each, Document) else each.input_ids.tolist())
        for each in documents
    ]
    assert found == [("m", "one"), ("ids", [4, 5, 6]), ("a", [7, 8]), ("m", [9]), ("n", "two")]


def test_a_source_without_a_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full.txt").write_text("text")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text(" ")
    (empty / "b.jsonl").write_text(json.dumps({"input_ids": []}) + "\n")
    (empty / "c").write_bytes(b"\xff\x00")
    (empty / ".hidden").write_text("text")
    told = r"empty \(2 empty documents, 1 binary files, 1 hidden files or folders skipped\)"
    with pytest.raises(RopewalkError, match=told):
        list(read_documents([SourceSpec(path=str(empty)), SourceSpec(path=str(tmp_path / "full.txt"))]))
