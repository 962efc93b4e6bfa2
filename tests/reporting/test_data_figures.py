"""Pictures and tables of a corpus say what was counted, whoever named the sources."""

import math
import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from ropewalk.data.stats.stats import length_statistics, statistics_report
from ropewalk.errors import RopewalkError
from ropewalk.reporting import data_tables
from ropewalk.reporting.data_figures import SourceLengths, length_figure, source_lengths

EVIL = "ev[red]il\x1b[31m $x$"


def report(lengths: dict[str, list[int]], **changes: Any) -> dict[str, Any]:
    ids = [number for number, each in enumerate(lengths.values()) for _ in each]
    every = np.array([length for each in lengths.values() for length in each], np.int64)
    statistics = length_statistics(every, np.array(ids, np.int32), list(lengths), row_length=64)
    return {**statistics_report(statistics), **changes}


BEFORE = report({"web": [3, 5, 6, 20], "books": [100, 66]})
AFTER = report({"web": [5, 20, 20], "books": [100, 100, 66], EVIL: [1]})


def said(svg: Path) -> list[str]:
    """matplotlib writes every text of a figure as a comment before its outlines."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    figures: list[Any] = []
    monkeypatch.setattr(
        "ropewalk.reporting.data_figures.save_figure", lambda figure, _: figures.append(figure)
    )
    return figures


def test_two_states_stand_side_by_side_and_are_named(tmp_path: Path) -> None:
    svg = tmp_path / "two.svg"
    length_figure(
        {"before": source_lengths(BEFORE), "after": source_lengths(AFTER)}, svg, "Title", "Caption."
    )
    texts = said(svg)
    for text in ("Title", "Caption.", "before", "after", "books", "83.0 % → 85.3 % of tokens", "128"):
        assert text in texts
    assert "ev[red]il\\x1b[31m $x$" in texts
    assert "0.0 % → 0.3 % of tokens" in texts
    # Told apart without colour: what was before is hatched.
    assert "<pattern" in svg.read_text()


def test_bars_are_shares_of_the_source_and_lie_in_their_bins(tmp_path: Path, kept: list[Any]) -> None:
    length_figure({"documents": source_lengths(BEFORE)}, tmp_path / "one.svg")
    books, web = kept[0].axes
    assert web.get_xlim() == books.get_xlim() == (1, 7)
    heights = [bar.get_height() for bar in web.patches]
    # 3 lies in [2, 4), 5 and 6 in [4, 8), 20 in [16, 32).
    assert heights == pytest.approx([3 / 34, 11 / 34, 0, 20 / 34, 0, 0])
    for power, bar in enumerate(web.patches, start=1):
        assert power < bar.get_x() < bar.get_x() + bar.get_width() < power + 1
    assert sum(bar.get_height() for bar in books.patches) == pytest.approx(1)
    assert kept[0].legends == []


def test_bars_of_two_states_do_not_cover_each_other(tmp_path: Path, kept: list[Any]) -> None:
    length_figure({"a": source_lengths(BEFORE), "b": source_lengths(AFTER)}, tmp_path / "two.svg")
    bars = sorted(kept[0].axes[0].patches, key=lambda bar: bar.get_x())
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
    assert all(left[1] <= right[0] + 1e-9 for left, right in pairwise(ends))
    assert len(bars) == 2 * (bars[-1].get_x() // 1 - bars[0].get_x() // 1 + 1)


def test_many_sources_share_the_last_panel(tmp_path: Path, kept: list[Any]) -> None:
    sources = {f"s{n}": SourceLengths([(4, 8, n), (8, 16, 1)], n / 78) for n in range(1, 13)}
    length_figure({"documents": sources}, tmp_path / "many.svg")
    names = [axes.texts[0].get_text() for axes in kept[0].axes]
    assert len(names) == 8
    assert names[0] == "s12\n15.4 % of tokens"
    assert names[-1] == "5 other sources\n19.2 % of tokens"
    assert [bar.get_height() for bar in kept[0].axes[-1].patches] == pytest.approx([15 / 20, 5 / 20])


HEBREW = "מאמרים בעברית מן הרשת"
CJK = "中文网络文本语料库"
NAMES = [
    "common-crawl-2023-head-and-middle-perplexity-part-1",
    "common-crawl-2023-head-and-middle-perplexity-part-2",
    HEBREW,
    CJK,
    "W" * 50,
    *(f"a-source-of-text-with-a-long-name-number-{n}" for n in range(7)),
]


def state(names: list[str], longest: int, seed: int) -> dict[str, SourceLengths]:
    """Each source with documents of every length up to 2 ** longest."""
    bins = [(1 << n, 2 << n, (seed * n) % 7 + 1) for n in range(longest)]
    return {name: SourceLengths(bins, (1 + number) / 78) for number, name in enumerate(names)}


# Every pair of the three, and both states where panels are most and bins fewest or most.
@pytest.mark.parametrize(
    ("count", "longest", "many"),
    [
        (count, longest, 1 + (m + n) % 2)
        for m, count in enumerate((1, 2, 3, 7, 12), 1)
        for n, longest in enumerate((3, 8, 13, 20, 24))
    ],
)
def test_words_keep_to_their_panels(
    tmp_path: Path, kept: list[Any], count: int, longest: int, many: int
) -> None:
    states = {name: state(NAMES[:count], longest, n) for n, name in enumerate(("before", "after")[:many], 2)}
    length_figure(states, tmp_path / "names.png", "Title", "Caption.")
    (figure,) = kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    columns = min(2, len(panels))
    for axes in panels:
        box, (heading,) = axes.get_window_extent(renderer), axes.texts
        # A quarter is enough for the numbers and the label of the vertical axis.
        assert box.width > 0.75 * figure.bbox.width / columns
        assert not heading.get_in_layout()
        words = Text.get_window_extent(heading, renderer)
        assert box.x0 <= words.x0 < words.x1 <= box.x1
        assert words.y1 <= box.y1
        highest = max(bar.get_window_extent(renderer).y1 for bar in axes.patches)
        assert highest <= words.y0
        low, high = axes.get_xlim()
        labels = sorted(axes.get_xticklabels(), key=lambda label: label.get_position()[0])
        assert all(low <= label.get_position()[0] <= high for label in labels)
        ticks = [label.get_window_extent(renderer) for label in labels if label.get_visible()]
        assert len(ticks) in (0, len(labels))
        assert all(left.x1 < right.x0 for left, right in pairwise(ticks))


def test_a_long_name_loses_its_middle(tmp_path: Path, kept: list[Any]) -> None:
    length_figure({"documents": state(NAMES[:2], 9, 2)}, tmp_path / "a.png")
    second, first = (axes.texts[0].get_text().split("\n")[0] for axes in kept[0].axes)
    assert re.fullmatch(r"common-crawl-2023.*….*-part-1", first)
    assert re.fullmatch(r"common-crawl-2023.*….*-part-2", second)
    length_figure({"documents": state(["a-short-name"], 9, 2)}, tmp_path / "b.png")
    assert kept[1].axes[0].texts[0].get_text().startswith("a-short-name\n")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_name_in_another_script_warns_of_nothing_and_turns_nothing_around(
    tmp_path: Path, suffix: str
) -> None:
    """Warnings are errors here. Each line of a heading is laid out by itself."""
    path = tmp_path / f"a.{suffix}"
    states = {"before": state([HEBREW, CJK], 9, 2), "after": state([HEBREW, CJK], 9, 3)}
    length_figure(states, path, "Title", "Caption.")
    assert path.stat().st_size
    if suffix == "svg":
        texts = said(path)
        assert "1.3 % → 1.3 % of tokens" in texts
        assert any(text.startswith("Caption. A box stands for a character") for text in texts)
    length_figure({"before": state([HEBREW], 9, 2)}, tmp_path / "b.svg", "Title", "Caption.")
    assert "Caption." in said(tmp_path / "b.svg")


def test_same_statistics_give_the_same_file(tmp_path: Path) -> None:
    for suffix in ("png", "svg"):
        one, two = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        for path in (one, two):
            length_figure({"documents": source_lengths(AFTER)}, path, "x", "y")
        assert one.read_bytes() == two.read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    drawn = source_lengths(BEFORE)
    with pytest.raises(RopewalkError, match=r"no token to draw"):
        length_figure({"documents": source_lengths(report({"web": [0, 0]}))}, tmp_path / "a.png")
    with pytest.raises(RopewalkError, match=r"one or two states, got 3"):
        length_figure({"a": drawn, "b": drawn, "c": drawn}, tmp_path / "a.png")
    with pytest.raises(RopewalkError, match=r"\.png or \.svg, got a\.pdf"):
        length_figure({"a": drawn}, tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []


def test_columns_of_long_documents_are_those_that_say_something() -> None:
    table = data_tables.source_table(report({"web": [5000, 10], "books": [70_000]}))
    assert table.header[-3:] == ("> 4K", "> 16K", "> 64K")
    assert table.rows[0] == (
        "books",
        "1",
        "33.3 %",
        "70,000",
        "93.3 %",
        *(["70,000"] * 4),
        *(["100.0 %"] * 3),
    )
    assert table.rows[1][-3:] == ("99.8 %", "0.0 %", "0.0 %")
    assert table.rows[2][:5] == ("all", "3", "100.0 %", "75,010", "100.0 %")
    short = data_tables.source_table(BEFORE)
    assert short.header[-1] == "longest"
    assert ">" not in short.title


def test_pieces_stand_in_a_table_of_their_own() -> None:
    pieces = report({"web": [3], "books": [63, 63, 17_000]})
    inside = {
        "pieces": 4,
        "piece_ratio": 1.0,
        "token_ratio": 1.0,
        **{key: pieces[key] for key in ("tokens", "mean_length", "length_quantiles", "long_shares")},
        "sources": {
            name: {"pieces": each["documents"], "piece_ratio": each["mixture_ratio"], **each}
            for name, each in pieces["sources"].items()
        },
    }
    table = data_tables.pieces_table({**BEFORE, "packed": True, "in_rows": inside})
    assert "pieces of documents" in table.title
    assert table.header == (
        *("source", "pieces", "share of pieces", "tokens in rows", "share", "mean", "median", "longest"),
        *("> 4K", "> 16K"),
    )
    assert table.rows == (
        ("books", "3", "75.0 %", "17,126", "100.0 %", "5,709", "63", "17,000", "99.3 %", "99.3 %"),
        ("web", "1", "25.0 %", "3", "< 0.1 %", "3", "3", "3", "0.0 %", "0.0 %"),
        ("all", "4", "100.0 %", "17,129", "100.0 %", "4,282", "63", "17,000", "99.2 %", "99.2 %"),
    )


def test_a_table_of_packed_documents_says_that_they_are_whole() -> None:
    plain, packed = (data_tables.source_table({**BEFORE, "packed": each}) for each in (False, True))
    assert packed.title.startswith("Documents packed, by source: whole, repeated ones each time")
    assert "packed" not in plain.title
    assert packed.header == plain.header
    assert packed.header[1] == "documents"


def test_names_of_sources_are_made_visible() -> None:
    assert data_tables.source_table(AFTER).rows[2][0] == "ev[red]il\\x1b[31m $x$"


def test_nothing_reads_as_a_dash() -> None:
    (row,) = data_tables.source_table(report({})).rows
    assert row == ("all", "0", "–", "0", "–", "–", "–", "–", "–")
    assert data_tables.attention_sentence(report({})) == ""


@given(st.floats(0, 1))
def test_a_bar_is_as_long_as_its_part_to_an_eighth(part: float) -> None:
    drawn = data_tables.bar(part)
    partial = " ▏▎▍▌▋▊▉█"
    eighths = sum(partial.index(cell) for cell in drawn)
    assert abs(eighths - 240 * part) <= (0.5 if part > 1 / 240 else 1)
    assert (eighths > 0) == (part > 0)
    assert set(drawn[:-1]) <= {"█"}


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (1e-5, "< 0.1 %"), (0.123456, "12.3 %"), (math.nan, "–"), (None, "–")]
)
def test_a_small_share_is_not_nothing(share: float | None, text: str) -> None:
    assert data_tables.share_text(share) == text


def test_attention_in_words() -> None:
    told = data_tables.attention_sentence(report({"a": [32] * 6}))
    # Two documents a row: 2 * 528 of 2080 pairs. The anchor's rows take 63: two documents, then three pieces.
    assert told.startswith(
        "rows of 64 tokens filled with these documents in order: intra_document computes 50.8 % of full "
        "attention's pairs, anchor "
    )
    assert "attention alone is at best 1.97 and " in told
    assert data_tables.attention_sentence({**BEFORE, "attention_share": {}}) == ""


def test_repeats_in_words() -> None:
    none = {"documents": 0, "tokens": 0, "most": 1}
    one = {"documents": 1, "tokens": 20, "most": 3}
    assert data_tables.repeats_sentence({**BEFORE, "repeats": none}) == ""
    assert data_tables.repeats_sentence({**BEFORE, "repeats": None}) == ""
    assert data_tables.repeats_sentence({**BEFORE, "repeats": one}) == (
        "1 text is there more than once, 3 times at most; further copies have 20 tokens (10.0 % of all)"
    )
    two = {**BEFORE, "packed": True, "repeats": {"documents": 2, "tokens": 100, "most": 4}}
    assert data_tables.repeats_sentence(two).startswith("2 documents are read more than once, 4 times")


def test_rows_in_words() -> None:
    packed = {**BEFORE, "rows": 1, "documents_per_row": 2.0, "documents_per_row_quantiles": {"0": 2, "1": 2}}
    assert data_tables.rows_sentence(BEFORE) == ""
    assert data_tables.rows_sentence(packed) == "1 row, 2.0 documents a row"
    packed |= {"rows": 1200, "documents_per_row": 2.25, "documents_per_row_quantiles": {"0": 1, "1": 8}}
    assert data_tables.rows_sentence(packed) == "1,200 rows, 2.2 documents a row (1 to 8)"


def test_a_mixture_shows_before_asked_and_achieved() -> None:
    def proportions(source: str | None, *shares: float | None) -> dict[str, Any]:
        keys = [f"{kind}_{state}" for kind in ("share", "long") for state in ("before", "asked", "achieved")]
        return {"source": source, **dict(zip(keys, shares, strict=True))}

    mixture = {
        "tokens_asked": 1000,
        "tokens_achieved": 998,
        "tokens_available": 2000,
        "total_from": "tokens",
        "long_from": 4096,
        "total": proportions(None, 1.0, 1.0, 1.0, 0.3, 0.5, 0.49),
        "sources": [
            proportions("web", 0.9, 0.5, 0.501, 0.1, 0.3, 0.3),
            proportions("books", 0.1, 0.5, 0.499, None, None, None),
        ],
        "shortages": ["books\x1b is short"],
    }
    table = data_tables.mixture_table(mixture)
    assert table.rows[0] == ("web", "90.00 %", "50.00 %", "50.10 %", "10.00 %", "30.00 %", "30.00 %")
    assert table.rows[1][-3:] == ("–", "–", "–")
    assert table.rows[2][0] == "all"
    assert table.header[4] == "before, 4k or longer"
    assert table.notes[0] == "998 tokens of 1,000 asked for; 2,000 before"
    assert table.notes[-1] == "books\\x1b is short"
    short = data_tables.mixture_table({**mixture, "long_from": None})
    assert short.header == ("source", "before", "asked", "achieved")
    assert len(short.notes) == 2
