"""Pictures of a precision audit show what they are given, say what they leave out, and stay readable."""

import math
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.text import Text

from ropewalk.errors import RopewalkError
from ropewalk.reporting import precision_axes, precision_bars, precision_figures, precision_tokens
from ropewalk.reporting.precision_axes import alone, number_text, shift_text, spread
from tests.reporting.reporting_cases import drawing

SHIFTS = (0, 16, 100, 1000, 10_000, 100_000, 1_000_000)
SAME = 16
NAN = math.nan
WIDE = "a title of many words that goes on and on " * 8


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
RUNGS = [
    ("none", [1e-12, 1.2e-12]),
    ("angles", [0.0006, 0.9]),
    ("cos and sin", [5.2, 5.3]),
    ("rotation", [3.1, 3.2]),
    ("q·k product", [9.5, 9.4]),
    ("softmax", [0.8, 0.8]),
    ("rest of the model", [0.02, 0.02]),
    ("all together", [11.4, 13.0]),
]
MENDS = [
    ("bfloat16 (as is)", 11.4, 13.0, 1.0),
    ("float32 rotation", 4.4, 4.5, 1.123),
    ("float32 attention", 0.02, 1.1, 3.1),
    ("the first token keeps its position everywhere", 2.4, 2.5, None),
    ("positions start at 0", 0.0, 0.0, 1.0),
    ("float64", 1e-12, 2e-12, None),
]
EFFECTS = [("first token", 10.9, 9.2, 2.4), ("all others", 11.0, 9.2, 2.5), ("whole row", 11.4, 1e-12, 11.4)]


def tokens(length: int, first: float = 7.1) -> list[float]:
    parts = 0.004 * np.arange(1, length + 1) ** -0.35 * np.random.default_rng(0).lognormal(0, 0.6, length)
    return [first, *parts[1:].tolist()]


def grid(layers: int, heads: int, spread: float = 0.5) -> list[list[float]]:
    return np.random.default_rng(0).lognormal(1, spread, (layers, heads)).tolist()


LENGTHS = {
    name: [(2**n, scale * 2**n, 0.1 * scale) for n in range(6, 14)]
    for name, scale in (("bfloat16", 0.004), ("float16", 0.0005), ("float32", 3e-7))
}


def draw_drift(path: Path, **changes: Any) -> None:
    precision_figures.drift_figure(path=path, **{"series": DRIFT, **changes})


def draw_samples(path: Path, **changes: Any) -> None:
    precision_figures.samples_figure(path=path, **{"curves": CURVES, "sweep": SWEEP, **changes})


def draw_tokens(path: Path, **changes: Any) -> None:
    precision_figures.tokens_figure(path=path, **{"per_token": tokens(4096), "sink": 0, **changes})


def draw_lengths(path: Path, **changes: Any) -> None:
    precision_figures.lengths_figure(path=path, **{"series": LENGTHS, **changes})


def draw_heads(path: Path, **changes: Any) -> None:
    precision_figures.heads_figure(path=path, **{"heads": grid(24, 14), **changes})


def draw_ladder(path: Path, **changes: Any) -> None:
    precision_figures.ladder_figure(
        path=path, **{"rungs": RUNGS, "shifts": ["shift 0", "shift 1M"], **changes}
    )


def draw_mends(path: Path, **changes: Any) -> None:
    precision_figures.mends_figure(path=path, **{"mends": MENDS, **changes})


def draw_first(path: Path, **changes: Any) -> None:
    precision_figures.first_token_figure(path=path, **{"effects": EFFECTS, **changes})


DRAWERS = [
    draw_drift,
    draw_samples,
    draw_tokens,
    draw_lengths,
    draw_heads,
    draw_ladder,
    draw_mends,
    draw_first,
]
EDGES = [
    (draw_drift, {"series": {"bfloat16": DRIFT["bfloat16"]}}),
    (draw_drift, {"series": {"bfloat16": [(0, 11.4, NAN, NAN)]}}),
    (draw_drift, {"series": {"bfloat16": [(5, 11.4, 0.0, 12.0), (7, NAN, NAN, NAN)]}}),
    (draw_drift, {"series": {f"a rather long name of series {n}": DRIFT["bfloat16"] for n in range(8)}}),
    (draw_samples, {"curves": CURVES[:1]}),
    (draw_samples, {"curves": [[(0, 1.0)]], "sweep": [(0, 16, 1.0)]}),
    (draw_samples, {"curves": [[(0, 0.001), (100, 50.0), (1000, NAN)]]}),
    (draw_tokens, {"per_token": tokens(8192, 1.0), "sink": 4000}),
    (draw_tokens, {"per_token": [5.0, 4.6, *tokens(800)[2:]], "sink": 1}),
    (draw_tokens, {"per_token": [0.0, 1.0, NAN], "sink": 0}),
    (draw_tokens, {"per_token": [1.0]}),
    (draw_lengths, {"series": {"a": [(1, 0.0, 0.1), (2048, 3.0, 0.2)], "b": [(64, 1.0, NAN)]}}),
    (draw_lengths, {"series": {"bfloat16": [(8192, 3.0, 0.2)]}}),
    (draw_heads, {"heads": [[3.25]]}),
    (draw_heads, {"heads": grid(32, 32, 1.2)}),
    (draw_heads, {"heads": grid(4, 16, 3.0)}),
    (draw_heads, {"heads": [[0.0, NAN], [0.0, 0.0]]}),
    (draw_heads, {"heads": grid(80, 64)}),
    (draw_ladder, {"rungs": [(name, values[:1]) for name, values in RUNGS], "shifts": ["0"]}),
    (draw_ladder, {"rungs": [("none", [0.01, 0.02]), ("a", [1.0, NAN]), ("all", [0.0, 3.0])]}),
    (draw_mends, {"mends": MENDS[:1]}),
    (
        draw_mends,
        {"mends": [*MENDS, ("half", 0.0, 3.0, 1.1), ("no", NAN, NAN, None), ("odd", NAN, 1e-14, 1.0)]},
    ),
    (draw_first, {"effects": [("first token", 0.02, 0.0, NAN), ("whole row", 11.4, 1e-12, 11.4)]}),
    (draw_first, {"effects": [("whole row", 0.0, 0.0, 0.0)]}),
]
Draw = Callable[..., None]


@pytest.fixture(scope="module")
def plain() -> dict[Any, Any]:
    return {}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, plain: dict[Any, Any]) -> Callable[..., Any]:
    """Draws and returns the figure in place of writing it."""
    return drawing(monkeypatch, plain, precision_figures, precision_bars, precision_tokens)


def said(svg: Path) -> str:
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


def ticks(axis: Any) -> list[str]:
    """Labels of the ticks within the axis, which alone are drawn."""
    low, high = sorted(axis.get_view_interval())
    held = [low - 1e-9 <= tick <= high + 1e-9 for tick in axis.get_majorticklocs()]
    return [text.get_text() for text, inside in zip(axis.get_ticklabels(), held, strict=True) if inside]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def words(figure: Any) -> list[tuple[str, Any]]:
    """Every text of the picture, with the box that its letters fill."""
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for shown in [ticks(axis)]
        for label in axis.get_ticklabels(which="both")
        if label.get_text() not in shown
    }
    renderer = figure.canvas.get_renderer()
    return [(each.get_text(), Text.get_window_extent(each, renderer)) for each in found if each not in hidden]


def is_readable(figure: Any) -> None:
    """No text lies on another one, and none leaves the picture."""
    boxes = words(figure)
    page = figure.bbox
    for text, box in boxes:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= page.x1 + 1, text
        assert box.y1 <= page.y1 + 1, text
    for (one, a), (two, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        # Boxes reach above and below the letters: lines that touch do not lie on one another.
        assert across <= 1 or along <= 4, (one, two)


@pytest.mark.parametrize("draw", DRAWERS)
@pytest.mark.parametrize(("title", "caption"), [("", None), (WIDE, "WIDE WORDS " * 30)])
def test_every_picture_is_readable(
    draw: Draw, title: str, caption: str | None, drawn: Callable[..., Any]
) -> None:
    is_readable(drawn(draw, title=title, caption=caption))


@pytest.mark.parametrize(("draw", "changes"), EDGES)
def test_pictures_of_edge_cases_are_readable(
    draw: Draw, changes: dict[str, Any], drawn: Callable[..., Any]
) -> None:
    is_readable(drawn(draw, **changes, title=WIDE))


@pytest.mark.parametrize("draw", DRAWERS)
def test_same_numbers_give_the_same_file_with_caption_and_title(draw: Draw, tmp_path: Path) -> None:
    one, two = tmp_path / "1.svg", tmp_path / "new" / "2.svg"
    for path in (one, two):
        draw(path, title="costs $1 or $2", caption="What to see: $x$ rises. " * 8)
    assert one.read_bytes() == two.read_bytes()
    assert [path.name for path in two.parent.iterdir()] == [two.name]
    assert "costs $1 or $2" in said(one)
    assert said(one).count("What to see: $x$ rises.") >= 7


@pytest.mark.parametrize("draw", DRAWERS)
def test_a_picture_explains_itself(draw: Draw, drawn: Callable[..., Any]) -> None:
    assert drawn(draw).get_supxlabel().endswith(".")


def test_same_numbers_give_the_same_pixels(tmp_path: Path) -> None:
    """What is drawn, and in which order, is in the SVG of each; this is how a PNG is written."""
    one, two = tmp_path / "1.png", tmp_path / "2.png"
    for path in (one, two):
        draw_mends(path)
    assert one.read_bytes() == two.read_bytes()
    draw_mends(tmp_path / "made.svg")
    assert said(tmp_path / "made.svg").rstrip().endswith(".")


@pytest.mark.parametrize("draw", DRAWERS)
def test_other_suffixes_are_refused(draw: Draw, tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"\.png or \.svg, got a\.pdf"):
        draw(tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draw", "changes", "message"),
    [
        (draw_drift, {"series": {}}, "no attention difference to draw"),
        (draw_drift, {"series": {"a": []}}, "no attention difference to draw"),
        (draw_drift, {"series": {"a": [(0, NAN, NAN, NAN)]}}, "no finite attention difference"),
        (draw_drift, {"series": {"a": [(16, 0.0, 0.0, 0.0)]}}, "above 0"),
        (draw_drift, {"series": {"a": [(0, math.inf, NAN, NAN)]}}, "negative or infinite"),
        (draw_drift, {"series": {"a": [(0, -1.0, NAN, NAN)]}}, "negative or infinite"),
        (draw_drift, {"series": {"a": [(-1, 1.0, NAN, NAN)]}}, "-1 tokens is negative"),
        (draw_drift, {"series": {"a": [(0, 1.0)]}}, "points of 4 values"),
        (draw_drift, {"series": dict.fromkeys("abcdefghi", DRIFT["float16"])}, "at most 8 series, got 9"),
        (draw_samples, {"curves": []}, "no attention difference to draw"),
        (draw_samples, {"sweep": []}, "no sweep of shifts to draw"),
        (draw_tokens, {"per_token": []}, "no finite part of D"),
        (draw_tokens, {"per_token": [0.0, 0.0]}, "above 0"),
        (draw_tokens, {"per_token": [1.0], "sink": 1}, "sink 1 is none of 1 tokens"),
        (draw_lengths, {"series": {}}, "no attention difference by length"),
        (draw_lengths, {"series": {"a": [(0, 1.0, 1.0)]}}, "at least 1 token"),
        (draw_heads, {"heads": []}, "no D of heads"),
        (draw_heads, {"heads": [[]]}, "no finite"),
        (draw_heads, {"heads": [[NAN]]}, "no finite"),
        (draw_heads, {"heads": [[1.0], [1.0, 2.0]]}, "as many heads"),
        (draw_heads, {"heads": [[-1.0]]}, "negative"),
        (draw_ladder, {"rungs": []}, "no step to draw"),
        (draw_ladder, {"shifts": []}, "no step to draw"),
        (draw_ladder, {"shifts": ["0"]}, "has not 1 values"),
        (draw_ladder, {"rungs": [("a", [0.0, 0.0])]}, "above 0"),
        (draw_mends, {"mends": []}, "no mend to draw"),
        (draw_mends, {"mends": [("a", math.inf, 1.0, None)]}, "infinite"),
        (draw_first, {"effects": []}, "no moved token"),
        (draw_first, {"effects": [("a", NAN, NAN, NAN)]}, "no finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(
    draw: Draw, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=message) as refusal:
        draw(tmp_path / "a.png", **changes)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_drift_leaves_out_zeros_and_says_so(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_drift)
    (axes,) = figure.axes
    found = lines(axes)
    assert list(found) == list(DRIFT)
    for name, each in found.items():
        shown = np.isfinite(each.get_ydata())
        assert each.get_xdata()[shown].tolist() == [shift for shift in SHIFTS if shift != SAME]
        assert each.get_ydata()[shown].tolist() == [d for _, d, _, _ in DRIFT[name] if d > 0]
    assert axes.get_yscale() == "log"
    assert ticks(axes.xaxis) == ["0", "16", "100", "1k", "10k", "100k", "1M"]
    assert "Δ₁ = Δ₂: D = 0" in texts(axes)
    caption = figure.get_supxlabel().replace("\n", " ")
    assert "D = 0 exactly, as at Δ₁ = Δ₂, are left out" in caption
    whole = drawn(draw_drift, series={"a": [(0, 1.0, 0.9, 1.1), (100, 2.0, NAN, NAN)]})
    assert "left out" not in whole.get_supxlabel()
    assert "random" not in whole.get_supxlabel()
    holed = drawn(draw_drift, series={"a": [(0, 1.0, 0.9, 1.1), (100, NAN, NAN, NAN)]})
    assert "points with no value are left out" in holed.get_supxlabel().replace("\n", " ")


def test_drift_series_can_be_told_apart_without_colour(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_drift).axes
    found = lines(axes)
    looks = {
        (each.get_marker(), each.get_linestyle(), each.get_markerfacecolor() == "white")
        for each in found.values()
    }
    assert len(looks) == len(DRIFT)
    for name, each in found.items():
        is_random = "random" in name
        assert (each.get_linestyle() == "--") == is_random
        assert (each.get_markerfacecolor() == "white") == is_random
        if is_random:
            pretrained = found[name.split(", random")[0]]
            assert (each.get_marker(), each.get_color()) == (pretrained.get_marker(), pretrained.get_color())


def test_drift_names_stand_at_the_ends_of_their_lines_in_order(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_drift).axes
    labels = {text.get_text(): text for text in axes.texts if text.get_text() in DRIFT}
    folded = [
        text for text in axes.texts if text.get_text().replace("\n", " ") == "float32, exact angles, random"
    ]
    assert len(labels) + len(folded) == len(DRIFT)
    by_height = sorted(labels, key=lambda name: labels[name].xyann[1])
    assert by_height == sorted(labels, key=lambda name: DRIFT[name][-1][1])
    assert [labels[name].xy for name in by_height] == [(1_000_000, DRIFT[name][-1][1]) for name in by_height]


def test_drift_intervals_are_drawn_where_they_are_known(drawn: Callable[..., Any]) -> None:
    rows = [(0, 10.0, 8.0, 12.0), (100, 11.0, NAN, NAN), (1000, 12.0, 0.0, 14.0)]
    (axes,) = drawn(draw_drift, series={"a": rows}).axes
    (bars,) = axes.collections
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    # An end at 0 has no place: the bar reaches the lower edge.
    assert ends[0] == pytest.approx([8, 12])
    assert ends[1] == pytest.approx([axes.get_ylim()[0], 14])
    assert len(ends) == 2


def test_samples_show_each_row_the_mean_and_a_line_for_each_second_shift(drawn: Callable[..., Any]) -> None:
    left, right = drawn(draw_samples).axes
    mean = lines(left)["mean"]
    shown = np.isfinite(mean.get_ydata())
    assert mean.get_xdata().tolist() == sorted(SHIFTS)
    expected = [np.mean([dict(row)[s] for row in CURVES]) for s in SHIFTS if s != SAME]
    assert np.array(mean.get_ydata())[shown] == pytest.approx(expected)
    thin = [each for each in left.lines if each.get_linewidth() < 1 and each.get_linestyle() == "-"]
    assert len(thin) == len(CURVES)
    assert mean.get_linewidth() > 3 * thin[0].get_linewidth()
    assert list(lines(right)) == [shift_text(shift) for shift in SHIFTS]
    for shift, each in zip(SHIFTS, lines(right).values(), strict=True):
        assert each.get_xdata()[np.isnan(each.get_ydata())].tolist() == [shift]
        assert len(each.get_xdata()) == len(SHIFTS)
    assert len({(each.get_marker(), each.get_linestyle()) for each in lines(right).values()}) == len(SHIFTS)
    assert {f"Δ₂ = {shift_text(shift)}" for shift in SHIFTS} == set(texts(right))


def test_samples_axes_do_not_make_much_of_little(drawn: Callable[..., Any]) -> None:
    left, right = drawn(draw_samples).axes
    assert left.get_ylim()[0] == 0
    low, high = right.get_ylim()
    assert low > 0
    assert "does not begin at 0" in right.get_ylabel()
    assert high - low > 0.2 * high
    spread_out = drawn(draw_samples, curves=[[(0, 0.001), (100, 50.0)]]).axes[0]
    assert spread_out.get_yscale() == "log"


def test_samples_draw_some_of_many_second_shifts(drawn: Callable[..., Any]) -> None:
    many = [(a, b, 1.0 + a) for b in range(0, 40, 2) for a in (1, 3)]
    figure = drawn(draw_samples, sweep=many)
    # Each pair stands for both orders: 1 and 3 are second shifts too.
    assert "(8 of 22)" in figure.get_supxlabel()
    assert len(lines(figure.axes[1])) == 8
    assert "0" in lines(figure.axes[1])
    assert "38" in lines(figure.axes[1])


@pytest.mark.parametrize("sink", [0, 5])
def test_tokens_mark_the_first_and_the_sink_with_their_share(sink: int, drawn: Callable[..., Any]) -> None:
    parts = [6.0, 0.5, NAN, 0.0, 0.5, 3.0]
    (axes,) = drawn(draw_tokens, per_token=parts, sink=sink).axes
    expected = ["first token, most attended: 60 % of D"]
    if sink:
        expected = ["first token: 60 % of D", "token 6, most attended: 30 % of D"]
    assert texts(axes) == expected
    found = lines(axes)
    assert found["tokens"].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert np.isfinite(found["tokens"].get_ydata()).tolist() == [True, True, False, False, True, True]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_thousands_of_tokens_stay_readable(drawn: Callable[..., Any]) -> None:
    parts = tokens(8192)
    parts[100] = 0.0
    figure = drawn(draw_tokens, per_token=parts)
    (axes,) = figure.axes
    assert "1 of 8,192 tokens" in figure.get_supxlabel()
    median = lines(axes)["median"]
    assert 20 < len(median.get_xdata()) < 60
    last = np.array(parts[7000:])
    assert median.get_ydata()[-1] == pytest.approx(np.median(last), rel=0.2)
    assert lines(axes)["tokens"].get_markersize() < 2


def test_median_of_tokens_leaves_out_the_marked_ones(drawn: Callable[..., Any]) -> None:
    def points(sink: int) -> int:
        (axes,) = drawn(draw_tokens, per_token=[1.0] * 26, sink=sink).axes
        return sum(len(each.get_xdata()) for name, each in lines(axes).items() if name == "median")

    # With 12 bins a decade, tokens 22 to 26 are one, and have the five that a median needs.
    assert points(0) == points(23) + 1


def test_ladder_axis_reaches_down_to_a_millionth(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_ladder, rungs=[("a", [1.0, 1.1e-6]), ("b", [1e-7, 1e-3])]).axes
    assert axes.get_xlim()[0] == pytest.approx(1e-6)
    assert len(axes.patches) == 3
    assert "1e-7" in texts(axes)


def test_thousands_of_tokens_stay_small(tmp_path: Path) -> None:
    draw_tokens(tmp_path / "many.svg", per_token=tokens(8192))
    assert (tmp_path / "many.svg").stat().st_size < 300_000


def test_tokens_axis_does_not_reach_down_to_rounding(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_tokens, per_token=[1.0, 0.1, 1e-12, 0.2])
    assert figure.axes[0].get_ylim()[0] > 1e-3
    assert "1 of 4 tokens" in figure.get_supxlabel()


def test_lengths_are_two_logarithmic_panels(drawn: Callable[..., Any]) -> None:
    left, right = drawn(draw_lengths).axes
    for column, axes in ((1, left), (2, right)):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert ticks(axes.xaxis) == ["128", "512", "2k", "8k"]
        for name, each in lines(axes).items():
            assert each.get_ydata().tolist() == [row[column] for row in LENGTHS[name]]
    assert set(texts(right)) == set(LENGTHS)
    assert not left.texts
    odd = {"a": [(1, 0.0, 0.1), (2048, 3.0, 0.2)], "b": [(64, 1.0, NAN)]}
    figure = drawn(draw_lengths, series=odd)
    left, right = figure.axes
    assert np.isnan(lines(left)["a"].get_ydata()).tolist() == [True, False]
    assert (texts(left), texts(right)) == (["b"], ["a"])
    assert "a difference of exactly 0 or no value" in figure.get_supxlabel().replace("\n", " ")


def test_heads_are_darker_the_larger(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_heads)
    axes, bar = figure.axes
    mesh = axes.collections[0]
    assert mesh.get_array().reshape(24, 14).tolist() == grid(24, 14)
    shades = mesh.get_cmap()(np.linspace(0, 1, 100))[:, :3] @ (0.299, 0.587, 0.114)
    assert (np.diff(shades) < 0).all()
    assert shades[0] - shades[-1] > 0.7
    assert "0 at the bottom" in axes.get_ylabel()
    assert not axes.yaxis_inverted()
    assert bar.get_ylabel() == "D"
    assert not axes.texts
    assert ticks(axes.xaxis)[:3] == ["0", "1", "2"]
    top = np.unravel_index(np.argmax(grid(24, 14)), (24, 14))
    assert f"head {top[1]} of layer {top[0]}" in figure.get_supxlabel().replace("\n", " ")


def test_few_heads_have_numbers_and_unknown_ones_are_hatched(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_heads, heads=[[1.5, NAN], [0.0, 2.0]])
    axes = figure.axes[0]
    assert {(text.get_position(), text.get_text()) for text in axes.texts} == {
        ((0, 0), "1.5"),
        ((0, 1), "0"),
        ((1, 1), "2"),
    }
    _, hatched = axes.collections
    assert hatched.get_hatch()
    (cell,) = hatched.get_paths()
    assert cell.vertices.min(0).tolist() == [0.5, -0.5]
    assert "hatched: no value" in figure.get_supxlabel().replace("\n", " ")
    whole = drawn(draw_heads, heads=grid(32, 32))
    assert len(whole.axes[0].collections) == 1
    assert ticks(whole.axes[0].xaxis) == [str(n) for n in range(0, 32, 2)]


def test_heads_that_differ_much_are_logarithmic_and_zero_is_the_palest(drawn: Callable[..., Any]) -> None:
    axes, bar = drawn(draw_heads, heads=[[0.01, 0.02, 0.0, 5.0]]).axes
    mesh = axes.collections[0]
    assert isinstance(mesh.norm, LogNorm)
    assert bar.get_ylabel() == "D (logarithmic)"
    assert mesh.to_rgba([0.0])[0].tolist() == list(to_rgba("white"))


def test_ladder_emphasises_the_largest_single_step_and_clips_the_floor(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_ladder)
    (axes,) = figure.axes
    order = ticks(axes.yaxis)
    assert order == [name for name, _ in RUNGS if name != "none"] + ["none"]
    bold = [label.get_text() for label in axes.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == ["q·k product"]
    assert "“q·k product”" in figure.get_supxlabel().replace("\n", " ")
    low = axes.get_xlim()[0]
    assert low == pytest.approx(1e-4)
    # Every value has a bar from the left edge, but for the two beyond it.
    ends = sorted(patch.get_x() + patch.get_width() for patch in axes.patches)
    assert ends == pytest.approx(sorted(d for name, values in RUNGS for d in values if name != "none"))
    assert {patch.get_x() for patch in axes.patches} == {low}
    heads = [each for each in axes.lines if len(each.get_xdata()) == 1]
    assert [each.get_xdata()[0] for each in heads] == [low, low]
    assert {"1e-12", "1.2e-12", "0.0006", "11.4"} <= set(texts(axes))
    assert "arrow heads" in figure.get_supxlabel()
    hatches = {patch.get_hatch() for patch in axes.patches}
    assert len(hatches) == 2
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["shift 0", "shift 1M"]
    assert len({handle.get_hatch() for handle in legend.legend_handles}) == 2


def test_ladder_draws_a_floor_within_the_axis_as_a_line(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_ladder, rungs=[("none", [0.01, 0.02]), ("a", [1.0, NAN]), ("all", [0.0, 3.0])])
    (axes,) = figure.axes
    (floor,) = [each for each in axes.lines if each.get_linestyle() == "--"]
    assert floor.get_xdata() == [0.02, 0.02]
    assert "dashed" in figure.get_supxlabel()
    assert {"not finite", "0"} <= set(texts(axes))
    assert "arrow heads" not in drawn(draw_ladder, rungs=RUNGS[1:]).get_supxlabel()


def test_mends_compare_two_shifts_with_the_first_row(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_mends).axes
    assert axes.get_xscale() == "log"
    low = axes.get_xlim()[0]
    assert low >= 13e-6
    baseline = [each for each in axes.lines if each.get_linestyle() == "--"]
    assert [each.get_xdata() for each in baseline] == [[11.4, 11.4]]
    for marker, column in (("o", 1), ("D", 2)):
        points = {
            each.get_ydata()[0]: each.get_xdata()[0] for each in axes.lines if each.get_marker() == marker
        }
        assert points == {row: each[column] for row, each in enumerate(MENDS) if each[column] > 1e-9}
    said = texts(axes)
    times = [text for text in said if text.endswith("time") or text == "–"]
    assert times == ["1.00x time", "1.12x time", "3.10x time", "–", "1.00x time", "–"]
    (zero,) = [text for text in axes.texts if text.get_text() == "0"]
    assert zero.xy == (low, 4)
    assert "near 1e-12, far 2e-12" in said
    assert ticks(axes.yaxis)[0] == "bfloat16 (as is)"
    assert axes.yaxis_inverted()


def test_mends_say_which_shift_has_no_point(drawn: Callable[..., Any]) -> None:
    rows = [*MENDS[:1], ("half", 0.0, 3.0, 1.1), ("no", NAN, NAN, None), ("odd", NAN, 1e-14, 1.0)]
    (axes,) = drawn(draw_mends, mends=rows).axes
    assert {"near 0", "not finite", "near not finite, far 1e-14"} <= set(texts(axes))
    assert len([each for each in axes.lines if each.get_marker() == "o"]) == 1


def test_first_token_bars_are_linear_unless_they_spread(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_first).axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    widths = [patch.get_width() for patch in axes.patches]
    assert sorted(widths) == pytest.approx(sorted(d for each in EFFECTS for d in each[1:]))
    assert len({patch.get_hatch() for patch in axes.patches}) == 3
    assert "1e-12" in texts(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "in low precision",
        "in float64",
        "caused by arithmetic",
    ]
    (axes,) = drawn(
        draw_first, effects=[("first token", 0.02, 0.0, NAN), ("whole row", 11.4, 1e-12, 11.4)]
    ).axes
    assert axes.get_xscale() == "log"
    assert {"0", "1e-12", "not finite", "0.02", "11.4"} <= set(texts(axes))
    assert "(logarithmic)" in axes.get_xlabel()
    assert axes.get_xlim()[0] < 0.02


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([10, 50], [10, 50]),
        ([50, 50], [45, 55]),
        ([50, 50, 80], [45, 55, 80]),
        ([52, 50, 54], [52, 42, 62]),
        ([0, 0], [5, 15]),
        ([100, 100, 99], [85, 95, 75]),
    ],
)
def test_labels_move_apart_no_further_than_they_must(wanted: list[float], placed: list[float]) -> None:
    assert spread(wanted, [10] * len(wanted), 0, 100) == pytest.approx(placed)


def test_labels_of_several_lines_take_more_room() -> None:
    assert spread([50, 50], [10, 30], 0, 100) == pytest.approx([40, 60])


def test_texts_of_numbers_and_shifts() -> None:
    numbers = (0, 2.6e-4, 11.4, 12.849, 1234.5, 1e-12, 3.21e-5, 2e6)
    shown = ["0", "0.00026", "11.4", "12.8", "1,234", "1e-12", "3.2e-5", "2e6"]
    assert [number_text(number) for number in numbers] == shown
    shifts = (0, 16, 999, 1000, 1500, 131_072, 100_000, 1_000_000, 2**20, 10_000_000)
    shown = ["0", "16", "999", "1k", "1.5k", "131,072", "100k", "1M", "1,048,576", "10M"]
    assert [shift_text(shift) for shift in shifts] == shown


def test_points_without_neighbours_are_known() -> None:
    assert alone(np.array([1.0, NAN, 1.0, 2.0, NAN, NAN, 3.0])).tolist() == [True, *[False] * 5, True]


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
    _, (axes,) = precision_axes.audit_figure("", [("", "")])
    precision_axes.shift_axis(axes, shifts)
    assert ticks(axes.xaxis) == expected
