"""The figure of a corpus says what was counted, whoever named the sources."""

from itertools import pairwise
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures.data import SourceLengths, length_figure, source_lengths
from ropewalk.reporting.figures.drawing import Figure
from tests.reporting.axes_cases import bars, boxes, heading, names, only, panels, ticks
from tests.reporting.data_reports import AFTER, BEFORE, report


def headings(figure: Figure) -> list[Any]:
    return [heading(panel) for panel in panels(figure)]


def test_two_states_stand_side_by_side_and_are_named() -> None:
    figure = length_figure(
        {"before": source_lengths(BEFORE), "after": source_lengths(AFTER)}, "Title", "Caption."
    )
    assert headings(figure) == [
        ("books", "83.0 % → 85.3 % of tokens"),
        ("web", "17.0 % → 14.4 % of tokens"),
        ("ev[red]il\\x1b[31m $x$", "0.0 % → 0.3 % of tokens"),
    ]
    assert names(panels(figure)[0]) == ["before", "after"]
    assert (figure.title, figure.caption) == ("Title", "Caption.")
    # Told apart without colour: what was before is hatched.
    assert [each.get_hatch() for each in bars(panels(figure)[0])] == ["///", None]
    assert figure.page.get_supylabel() == "share of the source's tokens"


def test_bars_are_shares_of_the_source_and_lie_in_their_bins() -> None:
    books, web = panels(length_figure({"documents": source_lengths(BEFORE)}))
    assert ticks(web.xaxis) == ticks(books.xaxis)
    assert books.get_shared_y_axes().joined(books, web)
    assert web.get_xlim() == (1, 7)
    # 3 lies in [2, 4), 5 and 6 in [4, 8), 20 in [16, 32).
    assert [high for *_, high in boxes(web)] == pytest.approx([3 / 34, 11 / 34, 0, 20 / 34, 0, 0])
    for power, (left, right, _, _) in enumerate(boxes(web), start=1):
        assert power < left < right < power + 1
    assert sum(high for *_, high in boxes(books)) == pytest.approx(1)
    assert names(books) == []


def test_bars_of_two_states_do_not_cover_each_other() -> None:
    panel = panels(length_figure({"a": source_lengths(BEFORE), "b": source_lengths(AFTER)}))[0]
    sides = sorted((left, right) for left, right, _, _ in boxes(panel))
    assert all(left[1] <= right[0] + 1e-9 for left, right in pairwise(sides))
    low, high = panel.get_xlim()
    assert len(sides) == 2 * (high - low)


def test_many_sources_share_the_last_panel() -> None:
    sources = {f"s{n}": SourceLengths([(4, 8, n), (8, 16, 1)], n / 78) for n in range(1, 13)}
    figure = length_figure({"documents": sources})
    assert len(panels(figure)) == 8
    assert headings(figure)[0] == ("s12", "15.4 % of tokens")
    assert headings(figure)[-1] == ("5 other sources", "19.2 % of tokens")
    assert [high for *_, high in boxes(panels(figure)[-1])] == pytest.approx([15 / 20, 5 / 20])


def test_the_largest_length_has_a_tick() -> None:
    panel = only(length_figure({"documents": {"a": SourceLengths([(64, 128, 1)], 1.0)}}))
    assert (ticks(panel.xaxis), panel.get_xticks().tolist()) == (["128", "64"], [7, 6])


def test_what_cannot_be_drawn_is_refused() -> None:
    drawn = source_lengths(BEFORE)
    with pytest.raises(RopewalkError, match=r"sources have no tokens"):
        length_figure({"documents": source_lengths(report({"web": [0, 0]}))})
    with pytest.raises(RopewalkError, match=r"one or two states, .*, got 3"):
        length_figure({"a": drawn, "b": drawn, "c": drawn})
