"""Figures are written whole or not at all, the same each time, and every word in them can be read."""

import ast
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.text import Text

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.score_rows import score_rows
from ropewalk.reporting.figures.data import SourceLengths, length_figure
from ropewalk.reporting.figures.drawing import (
    DARKER,
    Figure,
    area,
    boxes,
    canvas,
    captioned,
    complete,
    draw,
    end_label,
    heading,
    heat_map,
    label,
    look,
    luminance,
    note,
    panel_title,
    rule,
    scale,
    spread,
    whiskers,
)
from ropewalk.reporting.figures.evaluation import needle_figure, perplexity_figure
from ropewalk.reporting.figures.search import search_figure
from ropewalk.reporting.figures.training import training_figure
from tests.marks import slow_after
from tests.places import ROOT
from tests.reporting.axes_cases import blank
from tests.reporting.evaluation_results import needle
from tests.reporting.figures import test_audit, test_evaluation, test_rope, test_search
from tests.reporting.figures.test_training import METRICS
from tests.reporting.reporting_cases import BEFORE

NASTY = ("$^$ a\x1b[31m", "$x_1$ b\u202e", "c \udcff", "_d")
SHOWN = ("$^$ a\\x1b[31m", "$x_1$ b\\u202e", "c \\udcff", "_d")
NAN = float("nan")


def line(axes: Any) -> None:
    axes.plot([0, 1, NAN, 3], [0, 1, 2, 1], label="series", **look(marker="o"))


MARKS: dict[str, Callable[[Any], Any]] = {
    "line": line,
    "end label": lambda axes: end_label(axes, "at the end", [0, 1, 3], [0, 1, NAN], "red"),
    "whiskers": lambda axes: whiskers(axes, [0, 1], [1, 1], [0, 1], [2, 3]),
    "boxes": lambda axes: boxes(axes, [0, 2], [1, 3], 0, [2, 3], area("white", "#0b4f8a", "///"), "series"),
    "rule": lambda axes: rule(axes, 1.5, "a mark", name="series"),
    "note": lambda axes: note(axes, "words", (1, 1)),
    "heading": lambda axes: heading(axes, "a name", "words"),
    "heat map": lambda axes: heat_map(axes, [[0.0, 1.0], [NAN, 3.0]], "dark", 0, 3, "values", str, numbers=9),
}
CASES: list[Any] = [
    *(make for room in (test_rope, test_audit, test_evaluation) for make in room.FIGURES),
    lambda **changes: search_figure(test_search.CURVE, test_search.factors(64, 8192), **changes),
    lambda **changes: training_figure(METRICS, **changes),
]
WIDE = "a title of many words that goes on and on " * 8
CAPTION = "WIDE WORDS " * 30


def said(svg: Path) -> list[str]:
    """matplotlib writes every text of a figure as a comment before its outlines."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def ticks(axis: Any) -> list[str]:
    """Labels of the ticks within the axis, which alone are drawn; none in an inner panel of several."""
    low, high = sorted(axis.get_view_interval())
    held = [low - 1e-9 <= tick <= high + 1e-9 for tick in axis.get_majorticklocs()]
    labels = zip(axis.get_ticklabels() or [Text()] * len(held), held, strict=True)
    return [text.get_text() for text, inside in labels if inside]


def words(page: Any) -> list[tuple[str, Any]]:
    """Every text of the picture, with the box that its letters fill."""
    found = [text for text in page.findobj(Text) if text.get_visible() and text.get_text().strip()]
    hidden = {
        label
        for axes in page.axes
        for axis in (axes.xaxis, axes.yaxis)
        for shown in [ticks(axis)]
        for label in axis.get_ticklabels(which="both")
        if label.get_text() not in shown
    }
    renderer = page.canvas.get_renderer()
    return [(each.get_text(), Text.get_window_extent(each, renderer)) for each in found if each not in hidden]


def is_readable(figure: Figure) -> None:
    """No text lies on another one, and none leaves the picture."""
    page = figure.page
    with captioned(figure) as box:
        page.draw_without_rendering()
        boxes = words(page)
    edge = box.extents * page.dpi
    for text, found in boxes:
        assert found.x0 >= edge[0] - 1, text
        assert found.y0 >= edge[1] - 1, text
        assert found.x1 <= edge[2] + 1, text
        assert found.y1 <= edge[3] + 1, text
    for (one, a), (two, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        # Boxes reach above and below the letters: lines that touch do not lie on one another.
        assert across <= 1 or along <= 4, (one, two)


@pytest.mark.parametrize("make", CASES)
def test_every_figure_is_readable(make: Any) -> None:
    is_readable(replace(make(title=WIDE), caption=CAPTION))


@pytest.mark.parametrize(("make", "changes"), slow_after(8, [*test_audit.EDGES, *test_evaluation.EDGES]))
def test_edge_cases_are_readable(make: Any, changes: dict[str, Any]) -> None:
    is_readable(make(**changes, title=WIDE))


def marked(*names: str) -> Figure:
    axes = blank()
    for axis in (axes.xaxis, axes.yaxis):
        scale(axis, limits=(-1, 4))
    for name in names:
        MARKS[name](axes)
    return complete([axes])


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_all_helpers_together_make_the_same_file_twice(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.{suffix}" for n in range(3)]
    figure = marked(*MARKS)
    for path in paths[:2]:
        draw(figure, path)
    draw(marked(*MARKS), paths[2])
    assert len({path.read_bytes() for path in paths}) == 1


def pixels(figure: Figure) -> np.ndarray:
    figure.page.canvas.draw()
    return np.asarray(figure.page.canvas.buffer_rgba())[:, :, :3].astype(int)


@pytest.fixture(scope="module")
def bare() -> np.ndarray:
    return pixels(marked())


@pytest.mark.parametrize("name", slow_after(3, MARKS))
def test_every_helper_draws_something(name: str, bare: np.ndarray) -> None:
    full = pixels(marked(name))
    assert bare.shape != full.shape or np.abs(bare - full).sum() > 1000


def test_a_file_of_a_known_size_is_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.png"
    picture = draw(marked("line"), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1152, 672)
    assert [each.name for each in path.parent.iterdir()] == ["a.png"]
    assert picture.path == path


def test_bad_paths_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    figure = marked("line")
    with pytest.raises(RopewalkError, match=r"\.png or \.svg, got a\.pdf"):
        draw(figure, tmp_path / "a.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(RopewalkError, match="cannot write"):
        draw(figure, tmp_path / "file" / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_text_of_others_is_text_and_does_no_harm_wherever_it_stands(tmp_path: Path) -> None:
    # The first is no formula that matplotlib can read, and the second would be drawn as one.
    axes = blank()
    for n, axis in enumerate((axes.xaxis, axes.yaxis)):
        scale(axis, NASTY[n], ticks=list(enumerate(NASTY)))
    for n, name in enumerate(NASTY):
        axes.plot([0, 1], [n, n], label=label(name))
        end_label(axes, name, [0, 1], [n, n], "red")
    note(axes, NASTY[0], (0, 0))
    rule(axes, 0, NASTY[0])
    panel_title(axes, NASTY[0])
    heading(axes, NASTY[0], NASTY[1])
    figure = complete([axes], NASTY[1], f"{NASTY[0]}.", keys=[axes], y_label=NASTY[2])
    draw(figure, tmp_path / "a.svg")
    texts = [text.strip() for text in said(tmp_path / "a.svg")]
    # The key, the ends and two axes; and the panel's title, its heading, note, rule and label of an axis.
    assert texts.count(SHOWN[0]) == 4 + 5
    for text in SHOWN:
        assert texts.count(text) >= 3
    assert f"{SHOWN[0]}." in texts
    ElementTree.parse(tmp_path / "a.svg")
    plain = set("".join(texts))
    assert not plain & set("\x1b\u202e")


def test_title_caption_and_costs_in_dollars_are_written(tmp_path: Path) -> None:
    figure = complete([blank()], "costs $1 or $2", "What to see: $x$ rises. " * 8)
    draw(figure, tmp_path / "a.svg")
    texts = "\n".join(said(tmp_path / "a.svg"))
    assert "costs $1 or $2" in texts
    assert texts.count("What to see: $x$ rises.") >= 7
    assert draw(figure, tmp_path / "a.png").caption.startswith("What to see: $x$ rises.")


def test_a_long_caption_makes_the_figure_higher_and_not_the_panel_lower(tmp_path: Path) -> None:
    heights, panels = [], []
    for title, caption in (("T", "Words."), (WIDE, CAPTION)):
        figure = complete([blank()], title, caption)
        panels.append(figure.page.axes[0].get_window_extent().height)
        draw(figure, tmp_path / "a.png")
        heights.append(struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])[1])
        # The caption is there only while it is drawn.
        assert caption not in [text.get_text() for text in figure.page.findobj(Text)]
    assert panels[0] == panels[1]
    assert heights[1] > heights[0] + 50


def test_a_key_makes_the_figure_higher_and_not_the_panel_lower() -> None:
    heights = []
    for keyed in (False, True):
        (axes,) = canvas()
        line(axes)
        complete([axes], keys=[axes] if keyed else [])
        heights.append(axes.get_window_extent().height)
    assert heights[0] == pytest.approx(heights[1], rel=0.05)


@pytest.mark.slow
def test_thousands_of_points_and_boxes_are_an_image_in_an_svg(tmp_path: Path) -> None:
    draw(test_audit.tokens(per_token=test_audit.tokens_of(8192)), tmp_path / "points.svg")
    bands = [(low, low * 1.0005) for low in np.geomspace(1e4, 1e7, 4000)]
    draw(test_rope.bases_of(feasible=[bands, bands, []]), tmp_path / "boxes.svg")
    for name in ("points", "boxes"):
        assert (tmp_path / f"{name}.svg").stat().st_size < 300_000


def test_holes_between_boxes_are_blank() -> None:
    page = test_rope.bases_of().page
    page.canvas.draw()
    image, (axes,) = np.asarray(page.canvas.buffer_rgba()), page.axes

    def pixel(length: float, base: float) -> np.ndarray:
        x, y = axes.transData.transform((length, base))
        return image[image.shape[0] - 1 - round(y), round(x), :3] / 255

    filled = to_rgba("#9cc3e4")[:3]
    beside = 1024 * 2**0.2
    assert pixel(beside, 1e7) == pytest.approx(filled, abs=0.01)
    assert pixel(beside, 5200) == pytest.approx((1, 1, 1), abs=0.01)
    assert pixel(4096, 2e7) == pytest.approx((1, 1, 1), abs=0.01)


def test_heat_maps_are_as_many_greys_and_what_has_no_value_is_hatched() -> None:
    darker = LinearSegmentedColormap.from_list("", DARKER)
    for colours, falls in ((colormaps["cividis"], False), (darker, True)):
        red, green, blue, _ = colours(np.linspace(0, 1, 101)).T
        grey = 0.299 * red + 0.587 * green + 0.114 * blue
        assert (np.diff(-grey if falls else grey) > 0).all()
    axes = blank()
    heat_map(axes, [[0.0, 0.01, NAN, 5.0]], "dark", 0.01, 5, "", str, logarithmic=True)
    cells, hatched = axes.collections
    assert cells.to_rgba([0.0])[0].tolist() == list(to_rgba("white"))
    (cell,) = hatched.get_paths()
    assert hatched.get_hatch()
    assert cell.vertices.min(0).tolist() == [1.5, -0.5]


def test_numbers_in_cells_stand_out() -> None:
    """At least 4.5 to 1, as WCAG 2 asks of text; white on black has 21."""
    assert luminance((1, 1, 1)) == pytest.approx(1)
    assert luminance((0, 0, 0)) == 0
    # WCAG's own example of a grey that is just dark enough on white.
    assert 1.05 / (luminance([0x76 / 255] * 3) + 0.05) == pytest.approx(4.54, abs=0.005)
    (whole,) = needle((4096,), 101, 100)
    cells = [{**cell, "score": float(n)} for n, cell in enumerate(whole.details["depths"])]
    for part in (cells[:25], cells[25:50], cells[50:75], cells[75:100]):
        axes = needle_figure(score_rows({"m": [replace(whole, details={"depths": part})]})).page.axes[0]
        for text, cell in zip(axes.texts, part, strict=True):
            paper = luminance(colormaps["cividis"](cell["score"] / 100))
            ink = {"white": 1.0, "black": 0.0}[text.get_color()]
            assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5, cell["score"]


def test_words_at_the_ends_of_lines_stand_in_the_order_of_the_lines() -> None:
    page = test_audit.drift().page
    (axes,) = page.axes
    last = {name.replace("\n", " "): points[-1][1] for name, points in test_audit.DRIFT.items()}
    labels = {text.get_text().replace("\n", " "): text for text in axes.texts}
    placed = sorted((name for name in labels if name in last), key=lambda name: labels[name].xyann[1])
    assert placed == sorted(last, key=lambda name: last[name])
    assert [labels[name].xy for name in placed] == [(1_000_000, last[name]) for name in placed]


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


def test_small_panels_share_axes_and_the_last_of_each_column_has_numbers() -> None:
    figure = test_evaluation.tasks(results=test_evaluation.ruler())
    is_readable(figure)
    page = figure.page
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in page.axes}) == 1
    labelled = [axes.xaxis.get_tick_params()["labelbottom"] for axes in page.axes]
    assert labelled == [False] * 10 + [True] * 4


def test_keys_side_by_side_keep_to_their_panels() -> None:
    page = search_figure(test_search.CURVE, test_search.factors(64, 8192), "stories").page
    page.draw_without_rendering()
    first, second = (axes.get_legend().get_window_extent() for axes in page.axes)
    assert page.bbox.x0 <= first.x0 < first.x1 < second.x0 < second.x1 <= page.bbox.x1


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
        pytest.param(count, longest, 1 + (m + n) % 2, marks=[] if (n - m) % 5 < 2 else [pytest.mark.slow])
        for m, count in enumerate((1, 2, 3, 7, 12))
        for n, longest in enumerate((3, 8, 13, 20, 24))
        if (n - m) % 5 < 2 or (m == 4 and n in (0, 4))
    ],
)
def test_headings_and_numbers_keep_to_their_panels(count: int, longest: int, many: int) -> None:
    states = {name: state(NAMES[:count], longest, n) for n, name in enumerate(("before", "after")[:many], 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page = length_figure(states, "Title", "Caption.").page
        page.draw_without_rendering()
    renderer = page.canvas.get_renderer()
    columns = min(2, len(page.axes))
    for axes in page.axes:
        box, (heading,) = axes.get_window_extent(renderer), axes.texts
        # A quarter is enough for the numbers and the label of the vertical axis.
        assert box.width > 0.75 * page.bbox.width / columns
        assert not heading.get_in_layout()
        found = Text.get_window_extent(heading, renderer)
        assert box.x0 <= found.x0 < found.x1 <= box.x1
        assert found.y1 <= box.y1
        highest = max(
            axes.transData.transform(path.vertices)[:, 1].max()
            for bars in axes.collections
            for path in bars.get_paths()
        )
        assert highest <= found.y0
        low, high = axes.get_xlim()
        labels = sorted(axes.get_xticklabels(), key=lambda label: label.get_position()[0])
        assert all(low <= label.get_position()[0] <= high for label in labels)
        numbers = [label.get_window_extent(renderer) for label in labels if label.get_visible()]
        assert len(numbers) in (0, len(labels))
        assert all(left.x1 < right.x0 for left, right in pairwise(numbers))


def test_a_long_heading_loses_its_middle() -> None:
    page = length_figure({"documents": state(NAMES[:2], 9, 2)}).page
    second, first = (axes.texts[0].get_text().split("\n")[0] for axes in page.axes)
    assert re.fullmatch(r"common-crawl-2023.*….*-part-1", first)
    assert re.fullmatch(r"common-crawl-2023.*….*-part-2", second)
    page = length_figure({"documents": state(["a-short-name"], 9, 2)}).page
    assert page.axes[0].texts[0].get_text() == "a-short-name\n1.3 % of tokens"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_name_in_another_script_warns_of_nothing_and_turns_nothing_around(
    tmp_path: Path, suffix: str
) -> None:
    """Warnings are errors here. Each line of a heading is laid out by itself."""
    path = tmp_path / f"a.{suffix}"
    states = {"before": state([HEBREW, CJK], 9, 2), "after": state([HEBREW, CJK], 9, 3)}
    draw(length_figure(states, "Title", "Caption."), path)
    assert path.stat().st_size
    if suffix == "svg":
        texts = said(path)
        assert "1.3 % → 1.3 % of tokens" in texts
        assert any(text.startswith("Caption. A box stands for a character") for text in texts)
    draw(length_figure({"before": state([HEBREW], 9, 2)}, "Title", "Caption."), tmp_path / "b.svg")
    assert "Caption." in said(tmp_path / "b.svg")


def modules() -> Iterator[Path]:
    yield from sorted((ROOT / "src" / "ropewalk" / "reporting").rglob("*.py"))


def test_only_drawing_imports_matplotlib() -> None:
    importers = []
    for path in modules():
        names = [
            alias.name if isinstance(node, ast.Import) else node.module or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        if any(name.split(".")[0] == "matplotlib" for name in names):
            importers.append(path.name)
    assert importers == ["drawing.py"]


def test_drawing_leaves_global_state_and_torch_alone() -> None:
    code = (
        "import sys; from ropewalk.reporting import draw, perplexity_figure, evaluation_tables, write_page;"
        "assert 'matplotlib.pyplot' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gaps_do_not_hide_a_figure(tmp_path: Path) -> None:
    draw(perplexity_figure(score_rows({"a": [BEFORE]}), 512, "x"), tmp_path / "a.svg")
    assert {"trained length 512", "perplexity", "1.5k"} <= set(said(tmp_path / "a.svg"))
