"""Pictures of RoPE theory show the numbers they are given, holes included, and refuse what cannot be drawn."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from ropewalk.errors import RopewalkError
from ropewalk.reporting import rope_bases, rope_figures, rope_probe
from ropewalk.reporting.figures import new_figure
from ropewalk.reporting.rope_axes import envelope, length_axis, length_text, shown_name
from ropewalk.reporting.rope_bases import band_polygons, base_text
from tests.reporting.reporting_cases import drawing

M = np.arange(1, 8193)
PAIRS = np.arange(64)
BANDS = [[(4206, 4400), (4506, 4700), (6018, 1e9)], [(2e4, 2.1e4), (3e4, 1e9)], []]


def frequencies(base: float) -> np.ndarray:
    return base ** (-PAIRS / 64)


def margin(base: float) -> np.ndarray:
    return np.cos(np.outer(M, frequencies(base))).sum(1)


def draw_bases(path: Path, **changes: Any) -> None:
    given = {
        "lengths": [1024, 2048, 4096],
        "feasible": BANDS,
        "safe_bases": [6018.0, 3e4, None],
        "published": {1024: 4.3e3},
        "ceiling": 1e9,
    }
    rope_figures.feasible_bases_figure(path=path, **{**given, **changes})


def draw_margin(path: Path, **changes: Any) -> None:
    given = {"series": {"1e4": (M, margin(1e4), 1706), "5e5": (M, margin(5e5), None)}}
    rope_figures.margin_figure(path=path, **{**given, **changes})


def draw_decay(path: Path, **changes: Any) -> None:
    rope_figures.decay_figure(path=path, **{"series": {"1e4": (M, 30 / M), "5e5": (M, 40 / M)}, **changes})


def draw_slowest(path: Path, **changes: Any) -> None:
    position = np.arange(8193)
    series = {
        name: (position, position * frequencies(base)[-1]) for name, base in (("old", 1e4), ("new", 1e5))
    }
    given = {"series": series, "trained_length": 2048, "target_length": 8192}
    rope_figures.slowest_pair_figure(path=path, **{**given, **changes})


def draw_periods(path: Path, **changes: Any) -> None:
    series = {name: 2 * np.pi / frequencies(base) for name, base in (("old", 1e4), ("new", 1e5))}
    given = {"series": series, "trained_length": 2048, "target_length": 8192}
    rope_figures.periods_figure(path=path, **{**given, **changes})


def draw_probe(path: Path, **changes: Any) -> None:
    rows = [("YaRN", 2.41, 2.39, 2.43), ("NTK", 2.39, 2.37, 2.41), ("as trained", 6.9, 6.8, 7.0)]
    rope_figures.probe_figure(path=path, **{"rows": rows, **changes})


DRAWERS = [draw_bases, draw_margin, draw_decay, draw_slowest, draw_periods, draw_probe]
Draw = Callable[..., None]


@pytest.fixture(scope="module")
def plain() -> dict[Any, Any]:
    return {}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, plain: dict[Any, Any]) -> Callable[..., Any]:
    """Draws and returns the figure in place of writing it."""
    return drawing(monkeypatch, plain, rope_figures, rope_bases, rope_probe)


def said(svg: Path) -> str:
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


def ticks(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


@pytest.mark.parametrize("draw", DRAWERS)
def test_same_numbers_give_the_same_file_with_caption_and_title(draw: Draw, tmp_path: Path) -> None:
    one, two = tmp_path / "1.svg", tmp_path / "new" / "2.svg"
    for path in (one, two):
        draw(path, title="costs $1 or $2", caption="What to see: $x$ rises. " * 8)
    assert one.read_bytes() == two.read_bytes()
    assert [path.name for path in two.parent.iterdir()] == [two.name]
    assert "costs $1 or $2" in said(one)
    assert said(one).count("What to see: $x$ rises.") >= 7


def test_same_numbers_give_the_same_pixels(tmp_path: Path) -> None:
    """What is drawn, and in which order, is in the SVG of each; this is how a PNG is written."""
    one, two = tmp_path / "1.png", tmp_path / "2.png"
    for path in (one, two):
        draw_probe(path)
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("draw", DRAWERS)
@pytest.mark.parametrize("caption", [None, "WIDE WORDS " * 30])
def test_nothing_leaves_the_picture_or_lies_on_the_caption(
    draw: Draw, caption: str | None, drawn: Callable[..., Any]
) -> None:
    figure = drawn(draw, caption=caption, title="Some title")
    page, text = figure.bbox, figure._supxlabel.get_window_extent()
    assert text.x0 >= 0
    assert text.x1 <= page.x1
    assert text.y0 >= 0
    for each in [
        *(axes.get_tightbbox() for axes in figure.axes),
        *(k.get_window_extent() for k in figure.legends),
    ]:
        assert each.x0 >= 0
        assert each.x1 <= page.x1 + 1
        assert each.y1 <= page.y1 + 1
        assert each.y0 >= text.y1


@pytest.mark.parametrize(
    ("draw", "changes", "words"),
    [
        (draw_bases, {"feasible": [[], [], []]}, "no feasible base"),
        (draw_bases, {"lengths": [], "feasible": [], "safe_bases": []}, "no feasible base"),
        (draw_bases, {"safe_bases": [1.0]}, "do not match"),
        (draw_bases, {"ceiling": math.inf}, "not finite"),
        (draw_bases, {"feasible": [[(1.0, math.nan)], [], []]}, "not finite"),
        (draw_bases, {"feasible": [[(5.0, 4.0)], [], []]}, "intervals"),
        (draw_bases, {"lengths": [2048, 1024, 4096]}, "rise"),
        (draw_bases, {"published": {1024: 0.0}}, "positive"),
        (draw_margin, {"series": {}}, "no margin"),
        (draw_margin, {"series": {"a": ([], [], None)}}, "no point"),
        (draw_margin, {"series": {"a": ([1, 2], [1.0, math.nan], None)}}, "not finite"),
        (draw_margin, {"series": {"a": ([2, 1], [1.0, 1.0], None)}}, "must rise"),
        (draw_margin, {"series": {"a": ([1, 2], [1.0], None)}}, "do not match"),
        (draw_margin, {"series": dict.fromkeys("abcde", (M, M, None))}, "at most 4 series, got 5"),
        (draw_decay, {"series": {}}, "no bound"),
        (draw_decay, {"series": {"a": ([0], [1.0])}}, "no point from 1"),
        (draw_slowest, {"series": {}}, "no angle"),
        (draw_slowest, {"series": {"a": ([3000, 4000], [1.0, 2.0])}}, "no position up to"),
        (draw_slowest, {"trained_length": 9000}, "trained length of 9000"),
        (draw_periods, {"series": {}}, "no period"),
        (draw_periods, {"series": {"a": [1.0, math.inf]}}, "not finite"),
        (draw_periods, {"series": {"a": []}}, "positive"),
        (draw_periods, {"series": {"a": [0.0]}}, "positive"),
        (draw_periods, {"trained_length": 0}, "trained length of 0"),
        (draw_probe, {"rows": []}, "no loss"),
        (draw_probe, {"rows": [("a", 1.0, math.nan, 2.0)]}, "not finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(
    draw: Draw, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=words) as refusal:
        draw(tmp_path / "a.png", **changes)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("draw", DRAWERS)
def test_other_suffixes_are_refused(draw: Draw, tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"\.png or \.svg, got a\.pdf"):
        draw(tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []


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


def test_band_polygons_leave_holes_blank() -> None:
    polygons = band_polygons([1024, 2048, 4096], BANDS, 0.5)
    assert polygons.shape == (5, 4, 2)
    assert [(p[:, 1].min(), p[:, 1].max()) for p in polygons] == [*BANDS[0], *BANDS[1]]
    assert polygons[0, :, 0] == pytest.approx(1024 * 2 ** np.array([-0.5, 0.5, 0.5, -0.5]))


def test_texts_of_lengths_and_bases() -> None:
    assert [length_text(n) for n in (8, 8192, 131072, 2**20, 1536, 5437)] == [
        "8",
        "8k",
        "128k",
        "1M",
        "1.5k",
        "5,437",
    ]
    assert [base_text(b) for b in (1e4, 5e5, 1e6, 1.25e6)] == ["1e4", "5e5", "1e6", "1.25e6"]


def test_feasible_columns_are_one_collection_with_blank_holes(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_bases)
    (axes,) = figure.axes
    (bands,) = [each for each in axes.collections if isinstance(each, PolyCollection)]
    assert len(bands.get_paths()) == 5
    figure.canvas.draw()
    image = np.asarray(figure.canvas.buffer_rgba())

    def pixel(length: float, base: float) -> np.ndarray:
        x, y = axes.transData.transform((length, base))
        return image[image.shape[0] - 1 - round(y), round(x), :3] / 255

    filled = to_rgba("#9cc3e4")[:3]
    beside = 1024 * 2**0.2
    assert pixel(beside, 1e7) == pytest.approx(filled, abs=0.01)
    assert pixel(beside, 5200) == pytest.approx((1, 1, 1), abs=0.01)
    assert pixel(4096, 2e7) == pytest.approx((1, 1, 1), abs=0.01)
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["infimum"].get_ydata().tolist() == [4206, 2e4]
    assert lines["published"].get_ydata().tolist() == [4.3e3]
    assert np.isnan(lines["safe base"].get_ydata()[2])
    assert ticks(axes.xaxis) == ["1k", "2k", "4k"]
    assert {"1e4", "1e6", "1e9"} <= set(ticks(axes.yaxis))
    assert "published" not in [line.get_label() for line in drawn(draw_bases, published={}).axes[0].lines]


def test_thousands_of_intervals_stay_small(tmp_path: Path) -> None:
    bands = [(low, low * 1.0005) for low in np.geomspace(1e4, 1e7, 4000)]
    draw_bases(tmp_path / "many.svg", feasible=[bands, bands, []], caption=None)
    assert (tmp_path / "many.svg").stat().st_size < 300_000
    assert "paler where bands" in said(tmp_path / "many.svg")
    draw_bases(tmp_path / "one.svg", lengths=[8192], feasible=[[(1e5, 1e9)]], safe_bases=[1e5], published={})
    assert "paler" not in said(tmp_path / "one.svg")


def test_margin_panels_show_the_lowest_values_and_the_bound(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_margin)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["1e4", "5e5"]
    first, second = figure.axes
    assert first.lines[0].get_ydata().min() == margin(1e4).min()
    assert [text.get_text() for text in first.texts] == ["B(m) ≥ 0 up to 1,706"]
    assert not second.texts
    assert first.get_xlim() == second.get_xlim() == (1, 8192)
    assert {"1", "64", "1k", "4k"} <= set(ticks(second.xaxis))
    beyond = drawn(draw_margin, series={"a": ([0, *M], [64, *margin(1e4)], 10**6)})
    assert not beyond.axes[0].texts


def test_decay_is_logarithmic_where_it_spans_much(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_decay).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len({line.get_linestyle() for line in axes.lines}) == 2
    (axes,) = drawn(draw_decay, series={"a": (M, 5 + 1 / M)}).axes
    assert axes.get_yscale() == "linear"
    assert drawn(draw_decay, series={"a": (M, -1 / M)}).axes[0].get_yscale() == "linear"


def test_slowest_pair_bands_what_training_showed(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_slowest).axes
    window, seen = axes.patches
    assert (window.get_x(), window.get_width()) == (0, 2048)
    assert seen.get_y() == 0
    assert seen.get_height() == pytest.approx(2048 * frequencies(1e4)[-1] / (2 * math.pi))
    assert ticks(axes.xaxis) == ["0", *(f"{n}k" for n in range(1, 9))]
    assert [text.get_text() for text in axes.texts] == ["trained length 2k"]
    longer = drawn(draw_slowest, target_length=4096).axes[0]
    assert [text.get_text() for text in longer.texts] == ["trained length 2k", "target length 4k"]


def test_pairs_without_a_full_turn_in_training_are_hollow(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_periods).axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    periods = 2 * math.pi / frequencies(1e4)
    assert hollow[0].get_xdata().tolist() == np.flatnonzero(periods > 2048).tolist()
    assert (hollow[0].get_ydata() > 2048).all()
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["trained length 2k", "target length 8k"]
    assert all(re.fullmatch(r"\d+[kM]?", text) for text in ticks(axes.yaxis))


@pytest.mark.parametrize(
    ("others", "scale", "bars", "words"),
    [
        ([("b", 6.9, 6.8, 7.0)], "linear", 2, "loss (nats a token)"),
        ([("b", 2.5, 2.4, 2.6)], "linear", 0, "loss (nats a token; the axis does not begin at 0)"),
        ([("b", 42.0, 40.0, 44.0)], "log", 0, "loss (nats a token; logarithmic)"),
    ],
)
def test_probe_axis_fits_and_the_best_is_bold(
    others: list[Any], scale: str, bars: int, words: str, drawn: Callable[..., Any]
) -> None:
    (axes,) = drawn(draw_probe, rows=[*others, ("a", 2.41, 2.39, 2.43)]).axes
    assert axes.get_xscale() == scale
    assert len(axes.patches) == bars
    assert axes.get_xlabel() == words
    assert ticks(axes.yaxis) == ["b", "a"]
    assert [label.get_fontweight() for label in axes.get_yticklabels()] == ["normal", "bold"]
    assert axes.yaxis_inverted()
    if scale == "linear":
        assert (axes.get_xlim()[0] == 0) == bool(bars)


def test_names_that_begin_with_an_underscore_are_drawn_and_in_the_key(tmp_path):
    m = np.arange(1, 100)
    rope_figures.margin_figure({"_a": (m, 10.0 - m, 10), "b": (m, 20.0 - m, 20)}, tmp_path / "margin.svg")
    rope_figures.decay_figure({"_a": (m, 100.0 / m), "b": (m, 50.0 / m)}, tmp_path / "decay.svg")
    assert (tmp_path / "margin.svg").is_file()
    assert "_a" in shown_name("_a")
    assert not shown_name("_a").startswith("_")


@pytest.mark.parametrize(("low", "high"), [(1000, 1001), (5, 7), (1025, 2047)])
def test_an_axis_between_two_powers_of_two_has_its_ends_as_ticks(low, high):
    _, axes = new_figure("", "", "")
    length_axis(axes.xaxis, low, high)
    assert list(axes.xaxis.get_major_locator()()) == [low, high]
