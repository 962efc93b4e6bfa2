"""Figures of a precision audit hold what they are given, and say what they leave out."""

import math
from typing import Any

import numpy as np
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import audit
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.style import LONG_DASHED, number_text, shift_text
from tests.reporting.axes_cases import (
    NAN,
    blank,
    bold,
    boxes,
    cells,
    close,
    drawn,
    ends,
    every_line,
    lines,
    names,
    note_texts,
    notes,
    only,
    panels,
    points,
    rule_dashes,
    rules,
    scale,
    ticks,
    whiskers,
    words,
)

SHIFTS = (0, 16, 100, 1000, 10_000, 100_000, 1_000_000)
SAME = 16


def line(*values: float) -> list[tuple[int, float, float, float]]:
    """D at every shift but the one that is compared with, where it is 0."""
    given = iter(values)
    rows = [(shift, 0.0 if shift == SAME else next(given)) for shift in SHIFTS]
    return [(shift, d, 0.9 * d, 1.1 * d) for shift, d in rows]


DRIFT = {
    "bfloat16": line(11.4, 12.9, 12.4, 12.35, 12.3, 13),
    "float16": line(1.4, 1.5, 1.48, 1.5, 1.55, 1.9),
    "float32": line(0.0007, 0.0007, 0.0018, 0.016, 0.15, 1.05),
    "float32, exact angles": line(0.00026, 0.00026, 0.00027, 0.00026, 0.00027, 0.00026),
    "bfloat16, random weights": line(0.0094, 0.0095, 0.0094, 0.0093, 0.0094, 0.0095),
    "float16, random": line(0.0013, 0.0013, 0.0013, 0.0013, 0.0013, 0.0013),
    "float32, random": [
        (shift, d, NAN, NAN) for shift, d, _, _ in line(2e-6, 2e-6, 3e-6, 2e-5, 2e-4, 1.6e-3)
    ],
    "float32, exact angles, random": line(1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6),
}
MEAN = {shift: d for shift, d, _, _ in DRIFT["bfloat16"]}
CURVES = [[(s, factor * d) for s, d in MEAN.items()] for factor in np.linspace(0.7, 1.35, 8)]
SWEEP = [
    (a, b, 0.0 if a == b else 12 + 0.1 * a**0.1 - 0.05 * b**0.1) for b in SHIFTS for a in SHIFTS if a <= b
]
OPERATIONS = [
    ("none", [1e-12, 1.2e-12]),
    ("angles", [0.0006, 0.9]),
    ("cos and sin", [5.2, 5.3]),
    ("rotation", [3.1, 3.2]),
    ("q·k product", [9.5, 9.4]),
    ("softmax", [0.8, 0.8]),
    ("rest of the model", [0.02, 0.02]),
    ("all together", [11.4, 13.0]),
]
MITIGATIONS = [
    ("bfloat16 (as is)", 11.4, 13.0),
    ("float32 rotation", 4.4, 4.5),
    ("float32 attention", 0.02, 1.1),
    ("the first token keeps its position everywhere", 2.4, 2.5),
    ("positions start at 0", 0.0, 0.0),
    ("float64", 1e-12, 2e-12),
]
EFFECTS = [("first token", 10.9, 9.2, 2.4), ("all others", 11.0, 9.2, 2.5), ("whole row", 11.4, 1e-12, 11.4)]
LENGTHS = {
    name: [(2**n, scale * 2**n, 0.1 * scale) for n in range(6, 14)]
    for name, scale in (("bfloat16", 0.004), ("float16", 0.0005), ("float32", 3e-7))
}


def tokens_of(length: int, first: float = 7.1) -> list[float]:
    parts = 0.004 * np.arange(1, length + 1) ** -0.35 * np.random.default_rng(0).lognormal(0, 0.6, length)
    return [first, *parts[1:].tolist()]


def grid(layers: int, heads: int, spread: float = 0.5) -> list[list[float]]:
    return np.random.default_rng(0).lognormal(1, spread, (layers, heads)).tolist()


def drift(**changes: Any) -> Figure:
    return audit.drift_figure(**{"series": DRIFT, **changes})


def samples(**changes: Any) -> Figure:
    return audit.samples_figure(**{"curves": CURVES, "sweep": SWEEP, **changes})


def tokens(**changes: Any) -> Figure:
    return audit.tokens_figure(**{"per_token": tokens_of(4096), "sink": 0, **changes})


def lengths(**changes: Any) -> Figure:
    return audit.lengths_figure(**{"series": LENGTHS, **changes})


def heads(**changes: Any) -> Figure:
    return audit.heads_figure(**{"heads": grid(24, 14), **changes})


def ablation(**changes: Any) -> Figure:
    given = {"operations": OPERATIONS, "shifts": ["shift 0", "shift 1M"]}
    return audit.ablation_figure(**{**given, **changes})


def mitigations(**changes: Any) -> Figure:
    return audit.mitigations_figure(**{"mitigations": MITIGATIONS, **changes})


def first_token(**changes: Any) -> Figure:
    return audit.first_token_figure(**{"effects": EFFECTS, **changes})


FIGURES = [drift, samples, tokens, lengths, heads, ablation, mitigations, first_token]
EDGES = [
    (drift, {"series": {"bfloat16": DRIFT["bfloat16"]}}),
    (drift, {"series": {"bfloat16": [(0, 11.4, NAN, NAN)]}}),
    (drift, {"series": {"bfloat16": [(5, 11.4, 0.0, 12.0), (7, NAN, NAN, NAN)]}}),
    (drift, {"series": {f"a rather long name of series {n}": DRIFT["bfloat16"] for n in range(8)}}),
    (samples, {"curves": CURVES[:1]}),
    (samples, {"curves": [[(0, 1.0)]], "sweep": [(0, 16, 1.0)]}),
    (samples, {"curves": [[(0, 0.001), (100, 50.0), (1000, NAN)]]}),
    (tokens, {"per_token": tokens_of(8192, 1.0), "sink": 4000}),
    (tokens, {"per_token": [5.0, 4.6, *tokens_of(800)[2:]], "sink": 1}),
    (tokens, {"per_token": [0.0, 1.0, NAN], "sink": 0}),
    (tokens, {"per_token": [1.0]}),
    (lengths, {"series": {"a": [(1, 0.0, 0.1), (2048, 3.0, 0.2)], "b": [(64, 1.0, NAN)]}}),
    (lengths, {"series": {"bfloat16": [(8192, 3.0, 0.2)]}}),
    (heads, {"heads": [[3.25]]}),
    (heads, {"heads": grid(32, 32, 1.2)}),
    (heads, {"heads": grid(4, 16, 3.0)}),
    (heads, {"heads": [[0.0, NAN], [0.0, 0.0]]}),
    (heads, {"heads": grid(80, 64)}),
    (ablation, {"operations": [(name, values[:1]) for name, values in OPERATIONS], "shifts": ["0"]}),
    (ablation, {"operations": [("none", [0.01, 0.02]), ("a", [1.0, NAN]), ("all", [0.0, 3.0])]}),
    (mitigations, {"mitigations": MITIGATIONS[:1]}),
    (
        mitigations,
        {
            "mitigations": [
                *MITIGATIONS,
                ("half", 0.0, 3.0),
                ("no", NAN, NAN),
                ("odd", NAN, 1e-14),
            ]
        },
    ),
    (first_token, {"effects": [("first token", 0.02, 0.0, NAN), ("whole row", 11.4, 1e-12, 11.4)]}),
    (first_token, {"effects": [("whole row", 0.0, 0.0, 0.0)]}),
]


@pytest.mark.parametrize("make", FIGURES)
def test_a_figure_explains_itself(make: Any) -> None:
    assert make().caption.endswith(".")


def test_a_caption_of_the_caller_takes_the_place_of_the_own_one() -> None:
    assert heads(caption="What to see.").caption == "What to see."


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (drift, {"series": {}}, "no attention difference to draw"),
        (drift, {"series": {"a": [(0, NAN, NAN, NAN)]}}, "no finite attention difference to draw"),
        (drift, {"series": {"a": [(16, 0.0, 0.0, 0.0)]}}, "above 0"),
        (drift, {"series": {"a": [(0, math.inf, NAN, NAN)]}}, "must be finite and 0 or more"),
        (drift, {"series": {"a": [(0, -1.0, NAN, NAN)]}}, "must be finite and 0 or more"),
        (drift, {"series": dict.fromkeys("abcdefghi", DRIFT["float16"])}, "at most 8 series, got 9"),
        (samples, {"curves": []}, "no attention difference to draw"),
        (samples, {"sweep": []}, "no attention difference between two shifts to draw"),
        (tokens, {"per_token": [0.0, 0.0]}, "above 0"),
        (lengths, {"series": {}}, "no attention difference by length"),
        (heads, {"heads": [[]]}, "no finite attention difference .* to draw"),
        (heads, {"heads": [[NAN]]}, "no finite attention difference .* to draw"),
        (heads, {"heads": [[-1.0]]}, "must be finite and 0 or more, got -1"),
        (ablation, {"operations": [("a", [0.0, 0.0])]}, "above 0"),
        (mitigations, {"mitigations": [("a", math.inf, 1.0)]}, "must be finite and 0 or more, got inf"),
        (first_token, {"effects": [("a", NAN, NAN, NAN)]}, "no finite attention difference .* to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    make: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message) as refusal:
        make(**changes)
    assert "\n" not in str(refusal.value)


def test_drift_leaves_out_zeros_and_says_so() -> None:
    figure = drift()
    panel = only(figure)
    found = lines(panel)
    assert list(found) == list(DRIFT)
    for name, each in found.items():
        assert drawn(each) == [(shift, d) for shift, d, _, _ in DRIFT[name] if d > 0]
        assert len(each.x) == len(SHIFTS)
    assert scale(panel.yaxis) == "log"
    assert ticks(panel.xaxis) == ["0", "16", "100", "1k", "10k", "100k", "1M"]
    assert rules(panel) == {"Δ₁ = Δ₂: D = 0": SAME}
    assert "points with D = 0 (as at Δ₁ = Δ₂) are left out" in figure.caption
    whole = drift(series={"a": [(0, 1.0, 0.9, 1.1), (100, 2.0, NAN, NAN)]}).caption
    assert "left out" not in whole
    assert "random" not in whole
    holed = drift(series={"a": [(0, 1.0, 0.9, 1.1), (100, NAN, NAN, NAN)]}).caption
    assert "points with no value are left out" in holed


def test_drift_series_can_be_told_apart_without_colour_and_stand_at_their_ends() -> None:
    panel = only(drift())
    found = lines(panel)
    assert len({(each.marker, each.dash, each.hollow) for each in found.values()}) == len(DRIFT)
    for name, each in found.items():
        is_random = "random" in name
        assert (each.dash == "--", each.hollow) == (is_random, is_random)
        if is_random:
            trained = found[name.split(", random")[0]]
            assert (each.marker, each.colour) == (trained.marker, trained.colour)
    assert ends(panel) == list(DRIFT)
    assert names(panel) == []


def test_drift_intervals_are_drawn_where_they_are_known() -> None:
    rows = [(0, 10.0, 8.0, 12.0), (100, 11.0, NAN, NAN), (1000, 12.0, 0.0, 14.0), (2000, 9.0, 9.1, 8.9)]
    panel = only(drift(series={"a": rows}))
    # An end at 0 has no place: the bar reaches the lower edge. Rounding may put an end past its D.
    assert close(whiskers(panel), [(0, 8, 12), (1000, panel.get_ylim()[0], 14), (2000, 9, 9)])


def test_samples_show_each_row_the_mean_and_a_line_for_each_second_shift() -> None:
    left, right = panels(samples())
    mean = lines(left)["mean"]
    assert mean.x == tuple(sorted(SHIFTS))
    expected = [np.mean([dict(row)[s] for row in CURVES]) for s in SHIFTS if s != SAME]
    assert [y for _, y in drawn(mean)] == pytest.approx(expected)
    thin = [each for each in every_line(left) if each.dash and each.name != "mean"]
    assert len(thin) == len(CURVES)
    assert mean.width > 3 * thin[0].width
    # Points without neighbours have no line: the shift 0, beside the one without a D.
    assert len(points(left, marker="_")) == len(CURVES)
    assert list(lines(right)) == [shift_text(shift) for shift in SHIFTS]
    for shift, each in zip(SHIFTS, lines(right).values(), strict=True):
        assert set(each.x) - {x for x, _ in drawn(each)} == {shift}
    looks = {(each.marker, each.dash) for each in lines(right).values()}
    assert len(looks) == len(SHIFTS)
    assert ends(right) == [f"Δ₂ = {shift_text(shift)}" for shift in SHIFTS]


def test_samples_axes_do_not_make_much_of_little() -> None:
    left, right = panels(samples())
    assert left.get_ylim()[0] == 0
    low, high = right.get_ylim()
    assert low > 0
    assert "does not start at 0" in words(right.yaxis)
    assert high - low > 0.2 * high
    assert scale(panels(samples(curves=[[(0, 0.001), (100, 50.0)]]))[0].yaxis) == "log"


def test_samples_draw_some_of_many_second_shifts() -> None:
    figure = samples(sweep=[(a, b, 1.0 + a) for b in range(0, 40, 2) for a in (1, 3)])
    # Each pair stands for both orders: 1 and 3 are second shifts too.
    assert "(8 of 22)" in figure.caption
    found = lines(panels(figure)[1])
    assert len(found) == 8
    assert {"0", "38"} <= set(found)


@pytest.mark.parametrize("sink", [0, 5])
def test_tokens_mark_the_first_and_the_sink_with_their_share(sink: int) -> None:
    panel = only(tokens(per_token=[6.0, 0.5, NAN, 0.0, 0.5, 3.0], sink=sink))
    expected = ["first token, most attended: 60 % of D"]
    if sink:
        expected = ["first token: 60 % of D", "token 6, most attended: 30 % of D"]
    assert notes(panel) == expected
    assert [x for x, _ in drawn(lines(panel)["tokens"])] == [1, 2, 5, 6]
    assert (scale(panel.xaxis), scale(panel.yaxis)) == ("log", "log")


def test_a_marked_token_without_a_value_or_a_small_share_is_said_to_be_so() -> None:
    panel = only(tokens(per_token=[0.0, 1.0, NAN], sink=2))
    assert notes(panel) == ["first token: 0 % of D", "token 3, most attended: no value"]
    assert [note.xycoords for note in note_texts(panel)] == [("data", "axes fraction")] * 2
    assert [note.xy for note in note_texts(panel)] == [(1, 0), (3, 0)]
    assert notes(only(tokens(per_token=[0.005, 9.0, 1.0], sink=1)))[0] == "first token: 0.05 % of D"


def test_thousands_of_tokens_stay_readable_and_an_image() -> None:
    parts = tokens_of(8192)
    parts[100] = 0.0
    figure = tokens(per_token=parts)
    found = lines(only(figure))
    assert "1 of 8,192 tokens" in figure.caption
    assert 20 < len(found["median"].x) < 60
    assert found["median"].y[-1] == pytest.approx(np.median(parts[7000:]), rel=0.2)
    assert found["tokens"].size < 2
    assert found["tokens"].raster


def test_median_of_tokens_leaves_out_the_marked_ones() -> None:
    def bins(sink: int) -> int:
        found = lines(only(tokens(per_token=[1.0] * 26, sink=sink)))
        return len(found["median"].x) if "median" in found else 0

    # With 12 bins a decade, tokens 22 to 26 are one, and have the five that a median needs.
    assert bins(0) == bins(23) + 1


def test_tokens_axis_does_not_reach_down_to_rounding() -> None:
    figure = tokens(per_token=[1.0, 0.1, 1e-12, 0.2])
    assert only(figure).get_ylim()[0] > 1e-3
    assert "1 of 4 tokens" in figure.caption


def test_lengths_are_two_logarithmic_panels() -> None:
    figure = lengths()
    for column, panel in enumerate(panels(figure), start=1):
        assert (scale(panel.xaxis), scale(panel.yaxis)) == ("log2", "log")
        assert ticks(panel.xaxis) == ["128", "512", "2k", "8k"]
        for name, each in lines(panel).items():
            assert each.y == tuple(row[column] for row in LENGTHS[name])
    left, right = panels(figure)
    assert (ends(left), ends(right)) == ([], list(LENGTHS))
    odd = lengths(series={"a": [(1, 0.0, 0.1), (2048, 3.0, 0.2)], "b": [(64, 1.0, NAN)]})
    left, right = panels(odd)
    assert drawn(lines(left)["a"]) == [(2048, 3)]
    assert (ends(left), ends(right)) == (["b"], ["a"])
    assert "a difference of 0 or no value" in odd.caption


def test_heads_are_cells_with_the_first_layer_at_the_bottom() -> None:
    figure = heads()
    panel = only(figure)
    found = cells(panel)
    assert found.values == grid(24, 14)
    assert (found.colours, found.low, found.high) == ("pale to dark", 0, max(map(max, grid(24, 14))))
    assert (found.words, found.numbers) == ("D", [])
    assert "0 at the bottom" in words(panel.yaxis)
    assert panel.get_ylim() == (-0.5, 23.5)
    assert ticks(panel.xaxis)[:3] == ["0", "1", "2"]
    top = np.unravel_index(np.argmax(grid(24, 14)), (24, 14))
    assert f"head {top[1]} of layer {top[0]}" in figure.caption
    assert ticks(only(heads(heads=grid(32, 32))).xaxis) == [str(n) for n in range(0, 32, 2)]


def test_few_heads_have_numbers_and_unknown_ones_are_said_to_be_hatched() -> None:
    figure = heads(heads=[[1.5, NAN], [0.0, 2.0]])
    assert cells(only(figure)).numbers == [number_text(value) for value in (1.5, 0.0, 2.0)]
    assert "hatched: no value" in figure.caption
    assert "hatched" not in heads().caption


def test_heads_that_differ_much_are_logarithmic() -> None:
    found = cells(only(heads(heads=[[0.01, 0.02, 0.0, 5.0]])))
    assert (found.logarithmic, found.low, found.words) == (True, 0.01, "D (logarithmic)")


def bars(figure: Figure) -> list[float]:
    return sorted(right for _, right, _, _ in boxes(only(figure)))


def test_ablation_emphasises_the_largest_single_operation_and_clips_the_floor() -> None:
    figure = ablation()
    panel = only(figure)
    assert ticks(panel.yaxis) == [name for name, _ in OPERATIONS if name != "none"] + ["none"]
    assert bold(panel.yaxis) == ["q·k product"]
    assert "“q·k product”" in figure.caption
    low = panel.get_xlim()[0]
    assert low == pytest.approx(1e-4)
    # Every value has a bar from the left edge, but for the two beyond it.
    assert bars(figure) == sorted(d for name, values in OPERATIONS for d in values if name != "none")
    assert {left for left, *_ in boxes(panel)} == {low}
    assert [x for x, _ in points(panel)] == [low, low]
    assert {"1e-12", "1.2e-12", "0.0006", "11.4"} <= set(notes(panel))
    assert "Arrow heads" in figure.caption
    assert names(panel) == ["shift 0", "shift 1M"]


def test_ablation_axis_reaches_down_to_a_millionth() -> None:
    figure = ablation(operations=[("a", [1.0, 1.1e-6]), ("b", [1e-7, 1e-3])])
    assert only(figure).get_xlim()[0] == pytest.approx(1e-6)
    assert len(bars(figure)) == 3
    assert "1e-7" in notes(only(figure))


def test_ablation_draws_a_floor_within_the_axis_as_a_line() -> None:
    figure = ablation(operations=[("none", [0.01, 0.02]), ("a", [1.0, NAN]), ("all", [0.0, 3.0])])
    assert list(rules(only(figure)).values()) == [0.02]
    assert "dashed" in figure.caption
    assert {"not finite", "0"} <= set(notes(only(figure)))
    assert "arrow heads" not in ablation(operations=OPERATIONS[1:]).caption


def test_mitigations_compare_two_shifts_with_the_first_row() -> None:
    panel = only(mitigations())
    assert scale(panel.xaxis) == "log"
    low = panel.get_xlim()[0]
    assert low >= 13e-6
    assert rules(panel) == {"baseline, near shift": 11.4}
    assert rule_dashes(panel)[0] == LONG_DASHED
    for marker, column in (("o", 1), ("D", 2)):
        found = {row: value for value, row in points(panel, marker=marker)}
        assert found == {row: each[column] for row, each in enumerate(MITIGATIONS) if each[column] > 1e-9}
    said = notes(panel)
    (zero,) = [note for note in note_texts(panel) if note.get_text() == "0"]
    assert zero.xy == (low, 4)
    assert "near 1e-12, far 2e-12" in said
    assert ticks(panel.yaxis)[0] == "bfloat16 (as is)"
    assert names(panel) == ["near shift", "far shift", "baseline, near shift"]


def test_mitigations_say_which_shift_has_no_point() -> None:
    rows = [*MITIGATIONS[:1], ("half", 0.0, 3.0), ("no", NAN, NAN), ("odd", NAN, 1e-14)]
    panel = only(mitigations(mitigations=rows))
    assert {"near 0", "not finite", "near not finite, far 1e-14"} <= set(notes(panel))
    assert len(points(panel, marker="o")) == 1


def test_first_token_bars_are_linear_unless_they_spread() -> None:
    panel = only(first_token())
    assert (scale(panel.xaxis), panel.get_xlim()[0]) == ("linear", 0)
    # One of the nine, 1e-12, has a bar too thin to see and its number.
    assert bars(first_token()) == sorted(d for each in EFFECTS for d in each[1:])
    assert "1e-12" in notes(panel)
    assert names(panel) == ["in low precision", "in float64", "caused by rounding"]
    wide = first_token(effects=[("first token", 0.02, 0.0, NAN), ("whole row", 11.4, 1e-12, 11.4)])
    panel = only(wide)
    assert scale(panel.xaxis) == "log"
    assert {"0", "1e-12", "not finite", "0.02", "11.4"} <= set(notes(panel))
    assert "(logarithmic)" in words(panel.xaxis)
    assert panel.get_xlim()[0] < 0.02


@pytest.mark.parametrize(
    ("shifts", "expected"),
    [
        ([0, 16, 1_000_000], ["0", "16", "100", "1k", "10k", "100k", "1M"]),
        ([0], ["0"]),
        ([16, 20], ["16", "20"]),
        ([0, 1, 10_000_000], ["0", "1", "10", "100", "1k", "10k", "100k", "1M", "10M"]),
        ([100, 4000], ["100", "1k"]),
    ],
)
def test_ticks_of_shifts(shifts: list[int], expected: list[str]) -> None:
    axis = blank().xaxis
    audit.shift_scale(axis, "", [shifts])
    assert ticks(axis) == expected
