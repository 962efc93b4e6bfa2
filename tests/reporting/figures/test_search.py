"""Figures of a search hold the numbers they are given, say what is beyond the axes, and refuse what is none."""

import math
from typing import Any

import numpy as np
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures.search import FactorLines, SearchCurve, search_figure
from tests.reporting.axes_cases import lines, names, only, panels, rules, scale

POINTS = [(5, 3.4), (10, None), (14, 3.0), (20, 5.0), (25, 2.9), (31, 3.2), (40, 2.95)]
CURVE = SearchCurve(POINTS, {"pi": 20.9, "ntk": 3.03, "yarn": 3.42}, 2048)


def factors(pairs: int = 4, original: int = 512) -> FactorLines:
    periods = 2 * np.pi * 1e4 ** (np.arange(pairs) / pairs)
    found = {"found": np.linspace(1, 3, pairs).tolist()}
    rules = {"PI": [4.0] * pairs, "NTK": np.geomspace(1, 4, pairs).tolist()}
    return FactorLines(found, rules, periods.tolist(), original)


def places(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.x, line.y, strict=True))


def test_every_finite_candidate_is_drawn_once_inside_or_at_the_edge() -> None:
    panel = only(search_figure(CURVE))
    found = lines(panel)
    top = panel.get_ylim()[1]
    assert places(found["candidate"]) == [(x, y) for x, y in POINTS if y is not None and y < 4]
    assert places(found["↑ candidate above the axis"]) == [(20, top)]
    assert top < 5


def test_the_line_is_the_best_so_far() -> None:
    best = lines(only(search_figure(CURVE)))["best so far"]
    assert best.edges == (5, 14, 20, 25, 31, 40, 40)
    assert best.y == (3.4, 3.0, 3.0, 2.9, 2.9, 2.9)


def test_baselines_are_lines_with_their_values_and_the_caption_tells_the_best() -> None:
    figure = search_figure(CURVE)
    panel = only(figure)
    assert rules(panel) == {"NTK 3.030": 3.03, "YaRN 3.420": 3.42}
    # Beyond the axes: in the key alone.
    assert places(lines(panel)["PI 20.90 ↑"]) == []
    assert {"PI 20.90 ↑", "NTK 3.030", "YaRN 3.420"} < set(names(panel))
    assert "The best, 2.900, was found after 25 forward passes" in figure.caption


def test_an_infinite_baseline_is_named_and_not_drawn() -> None:
    figure = search_figure(SearchCurve(POINTS, {"pi": None, "ntk": 3.0}, 2048))
    assert not any("PI" in name for name in names(only(figure)))
    assert "Not shown because infinite: PI." in figure.caption


def test_factors_are_drawn_by_pair_and_the_unseen_ones_marked() -> None:
    given = factors(64, 8192)
    panel = only(search_figure(None, given))
    found = lines(panel)
    assert list(found["found"].y) == given.found["found"]
    assert list(found["NTK"].x) == list(range(64))
    unseen = next(pair for pair, period in enumerate(given.periods) if period > 8192)
    assert rules(panel) == {"period > 8k →": unseen - 0.5}
    assert rules(only(search_figure(None, factors(4, 10**6)))) == {}


def test_a_wide_range_is_logarithmic_and_a_narrow_one_is_not() -> None:
    wide = FactorLines({"long": [1.0, 2.0, 60.0]}, {}, [6.0, 60.0, 600.0], 100)
    assert scale(only(search_figure(None, wide)).yaxis) == "log"
    assert scale(only(search_figure(None, factors())).yaxis) == "linear"


def test_both_stand_side_by_side_with_both_captions() -> None:
    both = search_figure(CURVE, factors(), "a title")
    alone = only(search_figure(CURVE)), only(search_figure(None, factors()))
    for panel, one in zip(panels(both), alone, strict=True):
        assert (lines(panel), rules(panel)) == (lines(one), rules(one))
    assert [panel.get_gridspec().ncols for panel in panels(both)] == [2, 2]
    assert both.page.get_figwidth() > search_figure(CURVE).page.get_figwidth()
    assert "found after 25 forward passes" in both.caption
    assert "do not complete a turn within the original 512 tokens" in both.caption


@pytest.mark.parametrize(
    ("curve", "given", "message"),
    [
        (None, None, "a search figure needs curve, lines, or both, got neither"),
        (SearchCurve([(1, None)], {}, 8), None, "no candidate with a finite perplexity"),
        (SearchCurve([(1, math.nan)], {}, 8), None, "not finite"),
        (SearchCurve([(1, 2.0)], dict.fromkeys("abcd", 2.0), 8), None, "at most 3 baselines, got 4"),
        (None, FactorLines({}, {}, [6.0], 8), "one or two lists of searched factors .* got 0"),
        (
            None,
            FactorLines({"a": [1.0, 2.0]}, {}, [6.0], 8),
            "'a' must have one factor for each of 1 rotary pairs, got 2",
        ),
        (None, FactorLines({"a": [math.inf]}, {}, [6.0], 8), "rescale factor of 'a' has a value that is not"),
    ],
)
def test_what_cannot_be_drawn_is_refused(curve: Any, given: Any, message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        search_figure(curve, given)
