"""Figures of RoPE theory hold the numbers they are given, holes included, and refuse what cannot be drawn."""

import math
import re
from typing import Any

import numpy as np
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import rope
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.style import base_text
from tests.reporting.axes_cases import (
    areas,
    bars,
    bold,
    boxes,
    close,
    ends,
    every_line,
    lines,
    names,
    notes,
    only,
    panels,
    points,
    rules,
    scale,
    spans,
    ticks,
    whiskers,
    words,
)

M = np.arange(1, 8193)
PAIRS = np.arange(64)
BANDS = [[(4206, 4400), (4506, 4700), (6018, 1e9)], [(2e4, 2.1e4), (3e4, 1e9)], []]


def frequencies(base: float) -> np.ndarray:
    return base ** (-PAIRS / 64)


def margin(base: float) -> np.ndarray:
    return np.cos(np.outer(M, frequencies(base))).sum(1)


def bases_of(**changes: Any) -> Figure:
    given = {
        "lengths": [1024, 2048, 4096],
        "feasible": BANDS,
        "safe_bases": [6018.0, 3e4, None],
        "published": {1024: 4.3e3},
        "ceiling": 1e9,
    }
    return rope.feasible_bases_figure(**{**given, **changes})


def margins(**changes: Any) -> Figure:
    given = {"series": {"1e4": (M, margin(1e4), 1706), "5e5": (M, margin(5e5), None)}}
    return rope.margin_figure(**{**given, **changes})


def decay(**changes: Any) -> Figure:
    return rope.decay_figure(**{"series": {"1e4": (M, 30 / M), "5e5": (M, 40 / M)}, **changes})


def slowest(**changes: Any) -> Figure:
    position = np.arange(8193)
    series = {
        name: (position, position * frequencies(base)[-1]) for name, base in (("old", 1e4), ("new", 1e5))
    }
    given = {"series": series, "trained_length": 2048, "target_length": 8192}
    return rope.slowest_pair_figure(**{**given, **changes})


def periods(**changes: Any) -> Figure:
    series = {name: 2 * np.pi / frequencies(base) for name, base in (("old", 1e4), ("new", 1e5))}
    given = {"series": series, "trained_length": 2048, "target_length": 8192}
    return rope.periods_figure(**{**given, **changes})


def probe(**changes: Any) -> Figure:
    rows = [("YaRN", 2.41, 2.39, 2.43), ("NTK", 2.39, 2.37, 2.41), ("as trained", 6.9, 6.8, 7.0)]
    return rope.probe_figure(**{"rows": rows, **changes})


FIGURES = [bases_of, margins, decay, slowest, periods, probe]


@pytest.mark.parametrize("make", FIGURES)
def test_a_figure_explains_itself_and_takes_a_title(make: Any) -> None:
    figure = make(title="costs $1 or $2")
    assert figure.caption.endswith(".")
    assert figure.alternative().startswith("costs $1 or $2. ")


def test_a_caption_of_the_caller_takes_the_place_of_the_own_one() -> None:
    assert probe(caption="What to see.").caption == "What to see."


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (bases_of, {"feasible": [[], [], []]}, "no feasible base"),
        (bases_of, {"lengths": [], "feasible": [], "safe_bases": []}, "no feasible base"),
        (margins, {"series": {}}, "no margin"),
        (margins, {"series": {"a": ([1, 2], [1.0, math.nan], None)}}, "not finite"),
        (margins, {"series": dict.fromkeys("abcde", (M, M, None))}, "at most 4 series, got 5"),
        (decay, {"series": {}}, "no bound"),
        (slowest, {"series": {}}, "no angle"),
        (slowest, {"trained_length": 9000}, "trained length must be between 1 and .* got 9000"),
        (periods, {"series": {}}, "no period"),
        (periods, {"series": {"a": [1.0, math.inf]}}, "not finite"),
        (periods, {"trained_length": 0}, "trained length must be between 1 and .* got 0"),
        (probe, {"rows": []}, "no loss"),
        (probe, {"rows": [("a", 1.0, math.nan, 2.0)]}, "not finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    make: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message) as refusal:
        make(**changes)
    assert "\n" not in str(refusal.value)


def test_feasible_bands_are_boxes_that_leave_holes_blank() -> None:
    panel = only(bases_of())
    bands = boxes(panel)
    assert [band[2:] for band in bands] == [*BANDS[0], *BANDS[1]]
    # As far to the left as to the right of their length, on a logarithmic axis.
    assert [math.sqrt(left * right) for left, right, _, _ in bands] == pytest.approx([1024] * 3 + [2048] * 2)
    assert bands[0][1] < bands[3][0]
    found = lines(panel)
    assert found["infimum"].y == (4206, 2e4)
    assert found["published"].y == (4.3e3,)
    assert math.isnan(found["safe base"].y[2])
    assert ticks(panel.xaxis) == ["1k", "2k", "4k"]
    assert (scale(panel.xaxis), scale(panel.yaxis)) == ("log2", "log")
    assert panel.yaxis.get_major_formatter()(12_500) == base_text(12_500) == "1.25e4"
    assert list(rules(panel).values()) == [1e9]
    assert names(panel) == ["feasible bases", "safe base", "infimum", "published"]
    assert "published" not in names(only(bases_of(published={})))


def test_bands_too_thin_for_a_pixel_are_said_to_be_pale_and_thousands_are_an_image() -> None:
    many = [(low, low * 1.0005) for low in np.geomspace(1e4, 1e7, 4000)]
    figure = bases_of(feasible=[many, many, []])
    assert "paler where bands" in figure.caption
    assert bars(only(figure))[0].get_rasterized()
    one = bases_of(lengths=[8192], feasible=[[(1e5, 1e9)]], safe_bases=[1e5], published={})
    assert "paler" not in one.caption
    assert not bars(only(one))[0].get_rasterized()


def test_margin_panels_show_the_lowest_values_and_the_bound() -> None:
    figure = margins()
    first, second = panels(figure)
    assert [panel.get_title("left") for panel in (first, second)] == ["1e4", "5e5"]
    assert first.get_shared_x_axes().joined(first, second)
    assert first.get_shared_y_axes().joined(first, second)
    assert min(lines(first)["lowest"].y) == margin(1e4).min()
    hatched = areas(first)[1].values()
    assert min(low for low, _ in hatched) == margin(1e4).min()
    assert {high for _, high in hatched} == {0}
    assert first.collections[1].get_hatch()
    assert rules(first) == {"": 0, "B(m) ≥ 0 up to 1,706": 1706}
    assert rules(second) == {"": 0}
    assert first.get_xlim() == second.get_xlim()
    assert (first.get_xlim(), ticks(first.xaxis)[0]) == ((1, 8192), "1")
    beyond = margins(series={"a": ([0, *M], [64, *margin(1e4)], 10**6)})
    assert rules(only(beyond)) == {"": 0}


def test_decay_is_logarithmic_where_it_spans_much() -> None:
    panel = only(decay())
    assert (scale(panel.xaxis), scale(panel.yaxis)) == ("log2", "log")
    assert (names(panel), ends(panel)) == ([], ["1e4", "5e5"])
    assert len({line.dash for line in lines(panel).values()}) == 2
    assert len(lines(panel)["1e4"].x) <= 100
    for values in (5 + 1 / M, -1 / M):
        assert scale(only(decay(series={"a": (M, values)})).yaxis) == "linear"


def test_slowest_pair_bands_what_training_showed() -> None:
    panel = only(slowest())
    window, seen = spans(panel)
    assert window == (0, 2048)
    assert seen == (0, pytest.approx(2048 * frequencies(1e4)[-1] / (2 * math.pi)))
    assert ticks(panel.xaxis) == ["0", *(f"{n}k" for n in range(1, 9))]
    assert rules(panel) == {"trained length 2k": 2048}
    assert names(panel) == ["trained positions", "angles seen in training"]
    assert ends(panel) == ["old", "new"]
    assert set(rules(only(slowest(target_length=4096)))) == {"trained length 2k", "target length 4k"}


def test_pairs_without_a_full_turn_in_training_are_hollow() -> None:
    figure = periods()
    panel = only(figure)
    expected = 2 * math.pi / frequencies(1e4)
    hollow = points(panel, hollow=True, marker="s")
    assert hollow == [(n, period) for n, period in enumerate(expected) if period > 2048]
    every = lines(panel)["old"]
    assert list(zip(every.x, every.y, strict=True)) == list(enumerate(expected))
    # The hollow markers cover the filled ones of the same pairs.
    (unseen,) = [line for line in every_line(panel) if line.hollow and line.marker == "s"]
    assert unseen.order > every.order
    assert unseen.size > every.size
    assert rules(panel) == {"trained length 2k": 2048, "target length 8k": 8192}
    assert all(re.fullmatch(r"\d+[kM]?", text) for text in ticks(panel.yaxis))
    assert f"old: {len(hollow)} of 64" in figure.caption


@pytest.mark.parametrize(
    ("others", "kind", "count", "label"),
    [
        ([("b", 6.9, 6.8, 7.0)], "linear", 2, "loss (nats per token)"),
        ([("b", 2.5, 2.4, 2.6)], "linear", 0, "loss (nats per token; the axis does not start at 0)"),
        ([("b", 42.0, 40.0, 44.0)], "log", 0, "loss (nats per token; logarithmic)"),
    ],
)
def test_probe_axis_fits_and_the_best_is_bold(others: list[Any], kind: str, count: int, label: str) -> None:
    rows = [*others, ("a", 2.41, 2.39, 2.43)]
    panel = only(probe(rows=rows))
    assert (scale(panel.xaxis), words(panel.xaxis)) == (kind, label)
    assert [box[1] for box in boxes(panel)] == [row[1] for row in rows][:count]
    assert (ticks(panel.yaxis), bold(panel.yaxis)) == (["b", "a"], ["a"])
    low, high = panel.get_ylim()
    assert low > high
    assert close(whiskers(panel), [(n, row[2], row[3]) for n, row in enumerate(rows)])
    assert notes(panel) == [f"{row[1]:.3f}" for row in rows]
    if kind == "linear":
        assert (panel.get_xlim()[0] == 0) == bool(count)


def test_the_text_alternative_of_periods_tells_of_all_pairs_and_both_lengths() -> None:
    figure = rope.periods_figure({"old": [10.0, 100.0, 5000.0], "new": [10.0, 300.0, 9000.0]}, 2048, 8192)
    assert figure.alternative() == (
        "old: periods from 10 to 5,000 tokens, of which 1 of 3 are longer than the trained 2,048 tokens; new: periods "
        "from 10 to 9,000 tokens, of which 1 of 3 are longer than the trained 2,048 tokens; "
        "target length: 8,192 tokens."
    )


def test_the_text_alternative_of_a_probe_tells_every_loss() -> None:
    assert probe().alternative() == (
        "YaRN: loss 2.410, interval 2.390 to 2.430; NTK: loss 2.390, interval 2.370 to 2.410; as trained: loss 6.900, "
        "interval 6.800 to 7.000."
    )


def test_the_text_alternative_of_bases_tells_each_length() -> None:
    assert bases_of().alternative() == (
        "1k tokens: feasible from 4.21e3, without gaps from 6.02e3, published 4.3e3; 2k tokens: feasible from 2e4, "
        "without gaps from 3e4; 4k tokens: no feasible base."
    )
