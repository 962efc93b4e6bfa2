"""Pictures of an evaluation: what was measured is drawn, what was not is said, and every word can be read."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.text import Text

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.reporting import evaluation_bars, evaluation_figures, needle_grid
from ropewalk.reporting.evaluation_figures import spaced
from tests.reporting.evaluation_results import (
    DIFFERENCES,
    LENGTHS,
    NO_QUESTIONS,
    RULER_TASKS,
    difference,
    needle,
    not_compared,
    retrieval,
    ruler,
    scored,
    short,
)
from tests.reporting.reporting_cases import drawing

LONG = "meta-llama/Llama-3.1-8B-Instruct extended to 128k by YaRN, checkpoint 500"
WIDE = "a title of many words that goes on and on " * 8
MEMORY = "out of memory at batch 1 with a prefill chunk of 256"
FALLING = retrieval("passkey", "passkey", {n: max(0, 20 - 3 * i * i) for i, n in enumerate(LENGTHS)})
HOLED = [
    *retrieval("passkey", "passkey", {4096: 20, 8192: 20}),
    TaskResult.not_run("passkey", "passkey", 16384, MEMORY),
    *retrieval("passkey", "passkey", {32768: 17}),
    TaskResult.not_run("passkey", "passkey", 65536, MEMORY),
    *retrieval("passkey", "passkey", {131072: 9}),
]
KEY_TOKENS = [TaskResult("longppl", "longppl", n, 7, 3.3, (3.1, 3.6), unit="perplexity") for n in LENGTHS[:3]]
HALF_NEEDLE = [*needle(LENGTHS[:4]), TaskResult.not_run("needle", "generated", 65536, MEMORY)]
CHANCE = {"hellaswag": 25.0, "mmlu": 25.0}
Draw = Callable[..., None]


def draw_score(path: Path, **changes: Any) -> None:
    settings = {"series": {"before": FALLING, "after": HOLED}, "trained_length": 8192, "threshold": 85.6}
    evaluation_figures.score_figure(path=path, **{**settings, **changes})


def draw_tasks(path: Path, **changes: Any) -> None:
    some = [r for r in ruler() if r.task in ("niah_single_2", "vt", "qa_1", "qa_2", "overall")]
    settings = {"results": some, "trained_length": 8192, "threshold": 85.6}
    evaluation_figures.tasks_figure(path=path, **{**settings, **changes})


def draw_needle(path: Path, **changes: Any) -> None:
    needle_grid.needle_figure(path=path, **{"results": needle(), **changes})


def draw_retention(path: Path, **changes: Any) -> None:
    settings = {"series": {"before": short(), "after": short(0.07)}, "chance": CHANCE}
    evaluation_bars.retention_figure(path=path, **{**settings, **changes})


def draw_differences(path: Path, **changes: Any) -> None:
    evaluation_bars.difference_figure(path=path, **{"differences": DIFFERENCES, **changes})


DRAWERS = [draw_score, draw_tasks, draw_needle, draw_retention, draw_differences]
EDGES = [
    (draw_score, {"series": {"m": FALLING[:1]}, "trained_length": 4096}),
    (draw_score, {"series": {"m": HOLED}, "trained_length": 131072}),
    (draw_score, {"series": {f"{LONG} {n}": FALLING for n in range(8)}}),
    (draw_score, {"series": {"m": KEY_TOKENS}, "threshold": None}),
    (draw_score, {"series": {"m": retrieval("passkey", "passkey", {1000 + n: n for n in range(20)})}}),
    (draw_tasks, {"results": [r for r in ruler(LENGTHS[:1]) if r.task in ("vt", "overall")]}),
    (draw_tasks, {"results": [r for r in ruler() if r.task == "cwe"]}),
    (draw_tasks, {"results": [scored("lm_eval", f"{LONG} {n}", 4096, 1, 2) for n in range(3)]}),
    (draw_needle, {"results": needle(LENGTHS[:1], 1)}),
    (draw_needle, {"results": needle(LENGTHS[:1], 3)}),
    (draw_needle, {"results": HALF_NEEDLE}),
    (draw_needle, {"results": [*needle(LENGTHS[:1], 1), *HALF_NEEDLE[-1:]]}),
    (draw_needle, {"results": needle(tuple(range(1024, 41 * 1024, 1024)), 40, 1)}),
    (draw_retention, {"series": {"m": short()[:1]}, "chance": None}),
    (draw_retention, {"series": {f"{LONG} {n}": short() for n in range(4)}}),
    (
        draw_retention,
        {"series": {"m": [scored("longbench", f"{LONG} {n}", None, n, 200 + n) for n in range(21)]}},
    ),
    (draw_differences, {"differences": DIFFERENCES[:1]}),
    (draw_differences, {"differences": [difference(LONG, n - 20, 3) for n in range(40)]}),
    (draw_differences, {"names": ("base", "extended to 128k")}),
]


@pytest.fixture(scope="module")
def plain() -> dict[Any, Any]:
    return {}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, plain: dict[Any, Any]) -> Callable[..., Any]:
    """Draws and returns the figure in place of writing it."""
    return drawing(monkeypatch, plain, evaluation_figures, evaluation_bars, needle_grid)


def said(svg: Path) -> str:
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


def caption_of(figure: Any) -> str:
    return figure.get_supxlabel().replace("\n", " ")


def ticks(axis: Any) -> list[str]:
    """Labels of the ticks within the axis that are drawn."""
    low, high = sorted(axis.get_view_interval())
    held = [low - 1e-9 <= tick <= high + 1e-9 for tick in axis.get_majorticklocs()]
    labels = zip(axis.get_ticklabels(), held, strict=True)
    return [label.get_text() for label, inside in labels if inside]


def words(figure: Any) -> list[tuple[str, Any]]:
    """Every text of the picture, with the box that its letters fill."""
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label in axis.get_ticklabels(which="both")
        if label.get_text() not in ticks(axis)
    }
    renderer = figure.canvas.get_renderer()
    return [(each.get_text(), Text.get_window_extent(each, renderer)) for each in found if each not in hidden]


def is_readable(figure: Any) -> None:
    """No text lies on another one, and none leaves the picture."""
    boxes, page = words(figure), figure.bbox
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


def line_of(axes: Any, name: str) -> Any:
    (line,) = [each for each in axes.lines if each.get_label() == name]
    return line


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
    is_readable(drawn(draw, **changes, title=LONG))


@pytest.mark.parametrize("draw", DRAWERS)
def test_same_results_give_the_same_file(draw: Draw, tmp_path: Path) -> None:
    one, two = tmp_path / "1.svg", tmp_path / "new" / "2.svg"
    draw(one, title="costs $1 or $2")
    draw(two, title="costs $1 or $2")
    assert one.read_bytes() == two.read_bytes()
    assert "costs $1 or $2" in said(one)
    assert [path.name for path in two.parent.iterdir()] == [two.name]


@pytest.mark.parametrize("draw", DRAWERS)
def test_other_suffixes_are_refused(draw: Draw, tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"\.png or \.svg, got a\.pdf"):
        draw(tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draw", "changes", "message"),
    [
        (draw_score, {"series": {}}, "no score to draw"),
        (draw_score, {"series": {"m": HOLED[2:3]}}, "no score to draw"),
        (draw_score, {"series": {"m": [scored("short", "mmlu", None, 1, 2)]}}, "no score to draw"),
        (draw_score, {"series": {"m": ruler()}}, "one task, got ruler niah_single_1, ruler niah_single_2"),
        (draw_score, {"series": dict.fromkeys("abcdefghi", FALLING)}, "at most 8 series, got 9"),
        (draw_tasks, {"results": []}, "no score to draw"),
        (draw_tasks, {"results": short()}, "no score to draw"),
        (draw_needle, {"results": []}, "no score by depth"),
        (draw_needle, {"results": HALF_NEEDLE[-1:]}, "no score by depth"),
        (draw_needle, {"results": FALLING}, "no score by depth"),
        (draw_retention, {"series": {"m": short()[-1:]}}, "no score in percent"),
        (draw_retention, {"series": {"m": KEY_TOKENS}}, "no score in percent"),
        (draw_retention, {"series": dict.fromkeys("abcde", short())}, "at most 4 series, got 5"),
        (draw_differences, {"differences": []}, "no difference to draw"),
        (draw_differences, {"differences": [not_compared("qa_1", "x")]}, "no difference to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(
    draw: Draw, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=message) as refusal:
        draw(tmp_path / "a.png", **changes)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_scores_have_bands_on_a_log_axis_of_lengths(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_score).axes
    assert axes.get_xscale() == "log"
    assert ticks(axes.xaxis) == ["4k", "8k", "16k", "32k", "64k", "128k"]
    assert line_of(axes, "before").get_ydata().tolist() == [100, 85, 40, 0, 0, 0]
    band = axes.collections[0].get_paths()[0].vertices
    at_8k = sorted({y for x, y in band if x == 8192})
    assert at_8k == pytest.approx(list(FALLING[1].ci95))
    looks = [(each.get_linestyle(), each.get_marker()) for each in axes.lines[:2]]
    assert len(set(looks)) == 2
    assert {"threshold\n85.6", "trained length 8k"} <= {text.get_text() for text in axes.texts}


def test_a_line_is_broken_where_nothing_was_run_and_the_reason_is_said(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_score)
    (axes,) = figure.axes
    y = line_of(axes, "after").get_ydata()
    assert np.isnan(y).tolist() == [False, False, True, False, True, False]
    assert f"Not run: after at 16k, 64k ({MEMORY})." in caption_of(figure)
    # Alone, the lengths that nobody ran keep their place on the axis.
    figure = drawn(draw_score, series={"m": HOLED})
    (axes,) = figure.axes
    y = line_of(axes, "m").get_ydata()
    assert np.isnan(y).tolist() == [False, False, True, False, True, False]
    assert [text.xy[0] for text in axes.texts if text.get_text() == "not run"] == [16384, 65536]
    # Points without neighbours have no band; they get bars.
    (bars,) = [each for each in axes.collections if hasattr(each, "get_segments")]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert np.array(ends) == pytest.approx(np.array([HOLED[3].ci95, HOLED[5].ci95]))


def test_scores_that_are_no_number_are_gaps(drawn: Callable[..., Any]) -> None:
    infinite = replace(KEY_TOKENS[1], score=math.inf, ci95=(3.0, math.inf))
    (axes,) = drawn(draw_score, series={"m": [KEY_TOKENS[0], infinite, KEY_TOKENS[2]]}, threshold=None).axes
    assert np.isnan(line_of(axes, "m").get_ydata()).tolist() == [False, True, False]
    assert axes.get_ylabel() == "perplexity"


def test_a_trained_length_beyond_the_axis_is_not_marked(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_score, trained_length=2**20, threshold=None).axes
    assert not axes.texts


def test_eight_models_can_be_told_apart_without_colour(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_score, series={str(n): FALLING for n in range(8)}).axes
    lines = axes.lines[:8]
    assert len({each.get_marker() for each in lines}) == 8
    assert len({each.get_color() for each in lines}) == 8


@pytest.mark.parametrize(
    ("lengths", "most", "kept"),
    [
        ([4096], 11, [4096]),
        (list(LENGTHS), 11, list(LENGTHS)),
        (list(LENGTHS), 4, [8192, 32768, 131072]),
        ([1024, 1025, 2048], 11, [1025, 2048]),
    ],
)
def test_ticks_lie_apart_and_the_longest_is_among_them(
    lengths: list[int], most: int, kept: list[int]
) -> None:
    assert spaced(lengths, most) == kept


def test_each_task_has_a_panel_and_the_overall_score_the_last(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_tasks, results=ruler())
    is_readable(figure)
    assert [axes.get_title() for axes in figure.axes] == [*RULER_TASKS, "overall"]
    assert figure.axes[-1].title.get_fontweight() == "bold"
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    by_task = dict(zip(RULER_TASKS, figure.axes, strict=False))
    score = [r.score for r in ruler() if r.task == "vt"]
    assert by_task["vt"].lines[0].get_ydata() == pytest.approx(score)
    (reason,) = [text.get_text().replace("\n", " ") for text in by_task["qa_1"].texts]
    assert reason == f"not run: {NO_QUESTIONS}"
    assert [text.get_text() for text in by_task["niah_single_2"].texts] == ["not run"]
    labelled = [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes]
    assert labelled == [False] * 10 + [True] * 4
    assert "100 samples a point" in caption_of(figure)


def test_needle_has_lengths_across_and_the_beginning_at_the_top(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_needle, results=needle()[::-1])
    axes, bar = figure.axes
    assert ticks(axes.xaxis) == ["4k", "8k", "16k", "32k", "64k", "128k"]
    assert ticks(axes.yaxis) == [str(depth) for depth in range(0, 101, 10)]
    assert axes.yaxis_inverted()
    values = axes.collections[0].get_array().reshape(11, 6)
    cells = needle()[4].details["depths"]
    assert values[:, 4].tolist() == [cell["score"] for cell in cells]
    written = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axes.texts}
    assert written[3, 4] == f"{cells[3]['score']:.0f}"
    assert bar.get_ylabel() == "right answers (%)"
    # The same colours for the same scores, whatever the scores are.
    perfect = drawn(draw_needle, results=needle(LENGTHS[:2])).axes[0]
    assert perfect.collections[0].get_clim() == axes.collections[0].get_clim() == (0, 100)


def test_the_colours_of_the_needle_are_as_many_greys() -> None:
    red, green, blue, _ = colormaps["cividis"](np.linspace(0, 1, 101)).T
    assert (np.diff(0.299 * red + 0.587 * green + 0.114 * blue) > 0).all()


def test_numbers_of_the_needle_stand_out_from_their_cells(drawn: Callable[..., Any]) -> None:
    """At least 4.5 to 1, as WCAG 2 asks of text; white on black has 21."""
    assert needle_grid.luminance((1, 1, 1)) == pytest.approx(1)
    assert needle_grid.luminance((0, 0, 0)) == 0
    # WCAG's own example of a grey that is just dark enough on white.
    assert 1.05 / (needle_grid.luminance([0x76 / 255] * 3) + 0.05) == pytest.approx(4.54, abs=0.005)
    (whole,) = needle((4096,), 101, 100)
    cells = [{**cell, "score": float(n)} for n, cell in enumerate(whole.details["depths"])]
    for part in (cells[:25], cells[25:50], cells[50:75], cells[75:100]):
        axes = drawn(draw_needle, results=[replace(whole, details={"depths": part})]).axes[0]
        for text, cell in zip(axes.texts, part, strict=True):
            paper = needle_grid.luminance(colormaps["cividis"](cell["score"] / 100))
            ink = {"white": 1.0, "black": 0.0}[text.get_color()]
            assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5, cell["score"]


def test_needle_cells_that_were_not_run_are_hatched_and_named(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_needle, results=HALF_NEEDLE)
    axes = figure.axes[0]
    assert ticks(axes.xaxis)[-1] == "64k"
    assert [text.get_position()[0] for text in axes.texts if text.get_text() == "not run"] == [4]
    assert axes.collections[1].get_hatch() == "////"
    assert np.ma.count(axes.collections[1].get_array()) == 11
    assert f"Hatched: not run ({MEMORY})." in caption_of(figure)
    assert "without words" not in caption_of(figure)
    odd = drawn(draw_needle, results=[*needle(LENGTHS[:1], 3), *needle(LENGTHS[1:2], 5)])
    assert "not asked at this depth" in caption_of(odd)


def test_retention_has_a_bar_a_model_and_marks_chance_only_where_it_is_known(
    drawn: Callable[..., Any],
) -> None:
    axes = drawn(draw_retention).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([79, 63, 54, 72, 56, 47])
    middles = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert middles == pytest.approx([-0.2, 0.8, 1.8, 0.2, 1.2, 2.2])
    assert len({bar.get_hatch() for bar in axes.patches}) == 2
    assert ticks(axes.yaxis) == ["hellaswag", "mmlu", "arc_challenge", "truthfulqa_mc2"]
    assert [text.get_text() for text in axes.texts] == ["not run"] * 2
    assert sum(list(each.get_xdata()) == [25, 25] for each in axes.lines) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["before", "after", "chance"]
    axes = drawn(draw_retention, chance=None).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["before", "after"]


def test_retention_names_samples_and_what_has_no_bar(drawn: Callable[..., Any]) -> None:
    assert "; 1,000 samples of each task." in caption_of(drawn(draw_retention))
    word = TaskResult("lm_eval", "wikitext", None, 62, 12.0, (11.0, 13.0), unit="perplexity")
    other = scored("short", "hellaswag", None, 5, 10042)
    figure = drawn(draw_retention, series={"a": [*short(), word], "b": [other]})
    assert ticks(figure.axes[0].yaxis) == [
        "hellaswag, n 1,000 / 10,042",
        "mmlu, n 1,000",
        "arc_challenge, n 1,000",
        "truthfulqa_mc2",
    ]
    assert "No percentage, and no bar: wikitext." in caption_of(figure)


def test_real_differences_are_filled_and_units_have_axes_of_their_own(drawn: Callable[..., Any]) -> None:
    points, perplexities = drawn(draw_differences).axes
    assert points.get_xlabel() == "B less A (percentage points)"
    assert perplexities.get_xlabel() == "B less A (percent of the perplexity)"
    assert ticks(points.yaxis)[1] == "niah_multikey_2, 128k"
    marked = {
        round(float(line.get_xdata()[0]), 1): line.get_markerfacecolor() != "white"
        for line in points.lines
        if len(line.get_xdata()) == 1
    }
    assert marked == {0.5: False, -12.3: True, 25.0: True, -2.0: True, 40.0: True, -0.4: False}
    assert [t.get_text().strip() for t in points.texts if "not" in t.get_text()] == ["not compared"]
    assert "-3.4 %" in [text.get_text() for text in perplexities.texts]
    for axes in (points, perplexities):
        assert list(axes.lines[0].get_xdata()) == [0, 0]
        low, high = axes.get_xlim()
        assert low < 0 < high
