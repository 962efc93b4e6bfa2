"""Series are reduced without losing an extreme, and helpers of axes choose ticks that can be read."""

import math

import numpy as np
import pytest

from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    Figure,
    log_scale,
    mark_length,
    row_scale,
    value_scale,
    whiskers,
)
from ropewalk.reporting.figures.prepare import (
    alone,
    envelope,
    index_ticks,
    linear_length_ticks,
    power_ticks,
    spaced,
    tell,
)
from tests.reporting import axes_cases
from tests.reporting.axes_cases import blank, bold, rules, scale, side, ticks
from tests.reporting.evaluation_results import LENGTHS

NAN = math.nan


def test_whiskers_end_at_their_value_where_rounding_put_an_end_past_it() -> None:
    axes = blank()
    whiskers(axes, [1, 2], [5, 5], [5.1, NAN], [6, NAN])
    assert axes_cases.whiskers(axes) == [(1, 5, 6), (2, 5, 5)]


def test_a_figure_says_what_it_shows() -> None:
    assert Figure(None, "Loss", "It falls.", ("a: 1", "", "b: 2")).alternative() == "Loss. a: 1; b: 2."
    assert Figure(None, "Loss.").alternative() == "Loss."


def test_a_series_is_told_with_the_place_of_each_value_or_of_its_ends_and_extremes() -> None:
    def at(x: float) -> str:
        return f"step {x:g}"

    assert tell("loss", [1, 2, 3], [4.0, NAN, 2.5], at) == "loss: 4 at step 1, 2.5 at step 3"
    assert tell("", [1], [0.25], at, style.percent_text) == "25 % at step 1"
    assert tell("loss", [1], [NAN], at) == "loss: no value"
    x = np.arange(100)
    words = tell("loss", x, np.where(x == 40, 0.0, np.where(x == 60, 9.0, 5.0)), at)
    assert words == "loss: from 5 at step 0 to 5 at step 99, lowest 0 at step 40, highest 9 at step 60"


def test_envelope_keeps_every_extreme() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    x = np.arange(1, 100_001)
    reduced = envelope(x, values, 600)
    assert len(reduced.x) <= 600
    assert reduced.low.min() == values.min()
    assert reduced.high.max() == values.max()
    assert (reduced.low <= reduced.mean).all()
    assert (reduced.mean <= reduced.high).all()
    assert (np.diff(reduced.x) > 0).all()
    # Short distances have a bin each and stay what they are.
    assert reduced.x[:10].tolist() == list(range(1, 11))
    assert (reduced.low[:10] == values[:10]).all()


def test_envelope_of_one_point() -> None:
    assert [each.tolist() for each in envelope([7], [2.0])] == [[7.0], [2.0], [2.0], [2.0]]


def test_points_without_neighbours_are_known() -> None:
    assert alone(np.array([1.0, NAN, 1.0, 2.0, NAN, NAN, 3.0])).tolist() == [True, *[False] * 5, True]


@pytest.mark.parametrize(
    ("lengths", "most", "kept"),
    [
        ([4096], 11, [4096]),
        (list(LENGTHS), 11, list(LENGTHS)),
        (list(LENGTHS), 4, [8192, 32768, 131072]),
        ([1024, 1025, 2048], 11, [1025, 2048]),
    ],
)
def test_ticks_lie_apart_and_the_longest_is_among_them(lengths, most, kept) -> None:
    assert spaced(lengths, most) == kept


@pytest.mark.parametrize(("low", "high"), [(1000, 1001), (5, 7), (1025, 2047)])
def test_an_axis_between_two_powers_of_two_has_its_ends_as_ticks(low, high) -> None:
    assert [place for place, _ in power_ticks(low, high)] == [low, high]


def test_powers_of_two_are_thinned_to_what_fits() -> None:
    assert [words for _, words in power_ticks(1, 8192)][:3] == ["1", "4", "16"]
    assert len(power_ticks(1, 2**40)) <= 11
    assert [words for _, words in linear_length_ticks(8192)] == ["0", *(f"{n}k" for n in range(1, 9))]


def test_labels_at_even_steps_end_with_the_last() -> None:
    names = [str(n) for n in range(42)]
    assert [words for _, words in index_ticks(names[:40], 14)] == names[:40:3]
    assert [words for _, words in index_ticks(names, 14)] == [*names[:40:4], "41"]
    assert index_ticks(["a"], 14) == ((0.0, "a"),)


@pytest.mark.parametrize(
    ("low", "high", "kind"), [(1, 7.9, "linear"), (1, 8, "log"), (-1, 8, "linear"), (0, 8, "linear")]
)
def test_an_axis_of_values_is_logarithmic_where_positive_ones_spread(low, high, kind) -> None:
    axes = blank()
    value_scale(axes.yaxis, "x", low, high)
    assert scale(axes.yaxis) == kind


def test_a_logarithmic_axis_is_wide_enough_for_ticks() -> None:
    axes = blank()
    log_scale(axes.yaxis, "", 5, 5)
    low, high = axes.get_ylim()
    assert high / low >= 10
    assert math.sqrt(low * high) == pytest.approx(5)


def test_rows_are_named_from_the_top_and_long_names_folded() -> None:
    axes = blank()
    row_scale(axes, ["a", "b " * 30], [1])
    assert axes.get_ylim() == (1.55, -0.55)
    assert ticks(axes.yaxis)[1].count("\n") == 1
    assert bold(axes.yaxis) == ticks(axes.yaxis)[1:]


def test_a_length_is_marked_where_it_is_on_the_axis_and_its_words_have_room() -> None:
    axes = blank()
    for length in (2048, 2**16, 1024):
        mark_length(axes, length, "trained length", 1024, 2**17)
    assert rules(axes) == {"trained length 2k": 2048, "trained length 64k": 2**16}
    assert [side(axes, rule) for rule in rules(axes)] == ["right", "left"]
