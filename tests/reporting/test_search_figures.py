"""Pictures of a search show the numbers they are given, say what is beyond the axes, and refuse what is none."""

import math
from pathlib import Path

import numpy as np
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting import search_figures
from ropewalk.reporting.search_figures import FactorLines, SearchCurve, search_figure

POINTS = [(5, 3.4), (10, None), (14, 3.0), (20, 5.0), (25, 2.9), (31, 3.2), (40, 2.95)]
CURVE = SearchCurve(POINTS, {"pi": 20.9, "ntk": 3.03, "yarn": 3.42}, 2048)


def lines(pairs=4, original=512):
    periods = 2 * np.pi * 1e4 ** (np.arange(pairs) / pairs)
    found = {"found": np.linspace(1, 3, pairs).tolist()}
    rules = {"PI": [4.0] * pairs, "NTK": np.geomspace(1, 4, pairs).tolist()}
    return FactorLines(found, rules, periods.tolist(), original)


@pytest.fixture
def drawn(monkeypatch):
    """Draws and returns the figure in place of writing it."""
    kept = []
    monkeypatch.setattr(search_figures, "save_figure", lambda figure, _: kept.append(figure))

    def draw(*arguments, **options):
        search_figure(Path("unused.png"), *arguments, **options)
        kept[-1].draw_without_rendering()
        return kept[-1]

    return draw


def by_label(axes):
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.mark.parametrize(("pairs", "suffix"), [(1, ".svg"), (4, ".png"), (64, ".svg")])
def test_both_side_by_side_are_written_and_the_same_twice(tmp_path, pairs, suffix):
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        search_figure(path, CURVE, lines(pairs), "a title")
    assert first.stat().st_size > 5000
    assert first.read_bytes() == second.read_bytes()


def test_every_finite_candidate_is_drawn_once_inside_or_at_the_edge(drawn):
    (axes,) = drawn(CURVE).axes
    found = by_label(axes)
    top = axes.get_ylim()[1]
    inside = list(zip(*found["a candidate"].get_data(), strict=True))
    edge = list(zip(*found["↑ above the axes"].get_data(), strict=True))
    assert inside == [(x, y) for x, y in POINTS if y is not None and y < 4]
    assert edge == [(20, top)]
    assert top < 5


def test_the_line_is_the_best_so_far(drawn):
    (axes,) = drawn(CURVE).axes
    x, y = by_label(axes)["best so far"].get_data()
    assert list(zip(x, y, strict=True)) == [
        (5, 3.4), (14, 3.0), (20, 3.0), (25, 2.9), (31, 2.9), (40, 2.9), (40, 2.9)
    ]  # fmt: skip


def test_baselines_are_lines_with_their_values_and_the_caption_tells_the_best(drawn):
    figure = drawn(CURVE)
    labels = by_label(figure.axes[0])
    assert {"PI 20.90 ↑", "NTK 3.030", "YaRN 3.420"} < set(labels)
    assert set(labels["NTK 3.030"].get_ydata()) == {3.03}
    assert "the best, 2.900, came after 25 forwards" in figure._supxlabel.get_text().replace("\n", " ")


def test_an_infinite_baseline_is_named_and_not_drawn(drawn):
    figure = drawn(SearchCurve(POINTS, {"pi": None, "ntk": 3.0}, 2048))
    assert not any("PI" in label for label in by_label(figure.axes[0]))
    assert "Infinite, and not shown: PI." in figure._supxlabel.get_text().replace("\n", " ")


def test_factors_are_drawn_by_pair_and_the_unseen_ones_marked(drawn):
    given = lines(64, 8192)
    (axes,) = drawn(None, given).axes
    found = by_label(axes)
    assert list(found["found"].get_ydata()) == given.found["found"]
    assert list(found["NTK"].get_xdata()) == list(range(64))
    (mark,) = (line for line in axes.get_lines() if len(set(line.get_xdata())) == 1)
    unseen = next(pair for pair, period in enumerate(given.periods) if period > 8192)
    assert mark.get_xdata()[0] == unseen - 0.5
    assert [text.get_text() for text in axes.texts] == ["period > 8k →"]


def test_without_unseen_pairs_there_is_no_mark(drawn):
    (axes,) = drawn(None, lines(4, 10**6)).axes
    assert not axes.texts


def test_a_wide_range_is_logarithmic_and_a_narrow_one_is_not(drawn):
    wide = FactorLines({"long": [1.0, 2.0, 60.0]}, {}, [6.0, 60.0, 600.0], 100)
    assert drawn(None, wide).axes[0].get_yscale() == "log"
    assert drawn(None, lines()).axes[0].get_yscale() == "linear"


def test_what_is_inside_the_axes_lies_within_their_limits(drawn):
    for figure in (drawn(CURVE, lines()), drawn(None, lines(64, 8192))):
        for axes in figure.axes:
            low, high = axes.get_ylim()
            for line in axes.get_lines():
                if line.get_label() in ("found", "PI", "NTK", "a candidate"):
                    assert low <= min(line.get_ydata())
                    assert max(line.get_ydata()) <= high


def test_legends_and_captions_stay_inside_the_picture(drawn):
    figure = drawn(CURVE, lines(64, 8192), title="stories: rescale factors for 2,048 tokens")
    boxes = [
        figure._supxlabel.get_window_extent(),
        *(axes.get_legend().get_window_extent() for axes in figure.axes),
    ]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
    first, second = (axes.get_legend().get_window_extent() for axes in figure.axes)
    assert first.x1 < second.x0


@pytest.mark.parametrize(
    ("curve", "factors", "message"),
    [
        (None, None, "there is no search and no factors to draw"),
        (SearchCurve([(1, None)], {}, 8), None, "no candidate with a finite perplexity"),
        (SearchCurve([(1, math.nan)], {}, 8), None, "not finite"),
        (SearchCurve([(1, 2.0)], dict.fromkeys("abcd", 2.0), 8), None, "at most 3 baselines, got 4"),
        (None, FactorLines({}, {}, [6.0], 8), "one or two lists of factors .* got 0"),
        (None, FactorLines({"a": [1.0, 2.0]}, {}, [6.0], 8), "'a' has 2 factors for 1 pairs"),
        (None, FactorLines({"a": [math.inf]}, {}, [6.0], 8), "rescale factor of 'a' has a value that is not"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, curve, factors, message):
    with pytest.raises(RopewalkError, match=message):
        search_figure(tmp_path / "search.png", curve, factors)
    assert list(tmp_path.iterdir()) == []
