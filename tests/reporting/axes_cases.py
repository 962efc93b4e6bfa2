"""Reading figures: what stands on matplotlib's axes, by name."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.collections import FillBetweenPolyCollection, PolyCollection, QuadMesh
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.text import Annotation
from matplotlib.ticker import FixedFormatter

from ropewalk.reporting.figures.drawing import Figure, canvas

NAN = math.nan


def panels(figure: Figure) -> list[Any]:
    """Axes of the panels, without those of colour bars."""
    return [axes for axes in figure.page.axes if axes.get_label() != "<colorbar>"]


def only(figure: Figure) -> Any:
    (axes,) = panels(figure)
    return axes


def blank() -> Any:
    (axes,) = canvas()
    return axes


def scale(axis: Any) -> str:
    """Kind of an axis; ``log2`` if it is logarithmic with powers of two."""
    kind = axis.get_scale()
    return "log2" if kind == "log" and axis.get_transform().base == 2 else str(kind)


def words(axis: Any) -> str:
    return str(axis.get_label_text())


def ticks(axis: Any) -> list[str]:
    formatter = axis.get_major_formatter()
    assert isinstance(formatter, FixedFormatter)
    return list(formatter.seq)


def bold(axis: Any) -> list[str]:
    """Labels of the ticks that are set in bold."""
    return [name for name, text in zip(ticks(axis), axis.get_ticklabels(), strict=True) if is_bold(text)]


def is_bold(text: Any) -> bool:
    return bool(text.get_fontweight() == "bold")


def _rule_lines(axes: Any) -> list[tuple[Any, int]]:
    """Lines across the whole panel, each with the dimension of its place."""
    both = (axes.get_xaxis_transform("grid"), axes.get_yaxis_transform("grid"))
    return [(line, both.index(line.get_transform())) for line in axes.lines if line.get_transform() in both]


def _caps(axes: Any) -> set[Any]:
    return {cap for container in axes.containers for cap in container.lines[1]}


def every_line(axes: Any) -> list[Any]:
    """Lines and points with their data and look, in the order drawn."""
    left_out = {line for line, _ in _rule_lines(axes)} | _caps(axes)
    return [_line(line) for line in axes.lines if line not in left_out]


def _line(line: Any) -> Any:
    x, y = (tuple(np.asarray(each, float).tolist()) for each in (line.get_xdata(), line.get_ydata()))
    dash, marker = line.get_linestyle(), line.get_marker()
    return SimpleNamespace(
        name=line.get_label(),
        x=x,
        y=y,
        dash="" if dash == "None" else dash,
        marker="" if marker == "none" else marker,
        hollow=line.get_markerfacecolor() == "white",
        colour=line.get_color(),
        width=line.get_linewidth(),
        size=line.get_markersize(),
        order=line.get_zorder(),
        raster=line.get_rasterized(),
    )


def lines(axes: Any) -> dict[str, Any]:
    """Lines and steps with a name."""
    found = [line for line in every_line(axes) if not line.name.startswith("_")]
    return {line.name: line for line in [*found, *steps(axes)] if line.name}


def steps(axes: Any) -> list[Any]:
    """Step lines: values, edges and look."""
    return [
        SimpleNamespace(
            name=patch.get_label(),
            y=tuple(patch.get_data().values.tolist()),
            edges=tuple(patch.get_data().edges.tolist()),
            dash=patch.get_linestyle(),
        )
        for patch in axes.patches
        if isinstance(patch, StepPatch)
    ]


def points(axes: Any, **look: Any) -> list[tuple[float, float]]:
    """Places of the markers without a line that look so."""
    return [
        place
        for line in every_line(axes)
        if not line.dash and all(getattr(line, key) == value for key, value in look.items())
        for place in zip(line.x, line.y, strict=True)
    ]


def drawn(line: Any) -> list[tuple[float, float]]:
    """Points of a line that are not gaps."""
    return [(x, y) for x, y in zip(line.x, line.y, strict=True) if not math.isnan(y)]


def gaps(line: Any) -> list[bool]:
    return [math.isnan(value) for value in line.y]


def _annotations(axes: Any) -> list[Any]:
    return [text for text in axes.texts if isinstance(text, Annotation)]


def ends(axes: Any) -> list[str]:
    """Words at the ends of lines."""
    return [text.get_text().replace("\n", " ") for text in _annotations(axes) if text.arrow_patch]


def heading(axes: Any) -> tuple[str, ...]:
    """Lines of the text inside a panel at its top."""
    inside = ("axes fraction", "axes fraction")
    found = [text.get_text() for text in _annotations(axes) if text.xycoords == inside]
    return tuple(found[0].split("\n")) if found else ()


def _words_of(axes: Any, line: Any, dimension: int) -> list[Any]:
    """Texts whose place on the axis of a line across the panel is that of the line."""
    place = (line.get_xdata, line.get_ydata)[dimension]()[0]
    coordinates = (("data", "axes fraction"), ("axes fraction", "data"))[dimension]
    return [
        text
        for text in _annotations(axes)
        if text.xycoords == coordinates and text.xy[dimension] == place and text.get_bbox_patch()
    ]


def rules(axes: Any) -> dict[str, float]:
    """Where the lines across a panel lie, by their words or their name."""
    found = {}
    for line, dimension in _rule_lines(axes):
        said = [text.get_text() for text in _words_of(axes, line, dimension)]
        name = line.get_label()
        found[said[0] if said else "" if name.startswith("_") else name] = float(
            (line.get_xdata, line.get_ydata)[dimension]()[0]
        )
    return found


def rule_dashes(axes: Any) -> list[Any]:
    return [line._unscaled_dash_pattern for line, _ in _rule_lines(axes)]


def side(axes: Any, rule: str) -> str:
    """Side of a vertical line on which its words stand."""
    (text,) = (text for text in _annotations(axes) if text.get_text() == rule)
    return {"left": "right", "right": "left"}[text.get_ha()]


def note_texts(axes: Any) -> list[Any]:
    """Texts at positions, without those at the ends of lines, of lines across the panel, and headings."""
    rule_words = [text for each in _rule_lines(axes) for text in _words_of(axes, *each)]
    return [
        text
        for text in _annotations(axes)
        if not text.arrow_patch
        and text not in rule_words
        and text.xycoords != ("axes fraction", "axes fraction")
    ]


def notes(axes: Any) -> list[str]:
    return [text.get_text() for text in note_texts(axes)]


def names(axes: Any) -> list[str]:
    """What stands in the key, if the panel has one."""
    key = axes.get_legend()
    return [text.get_text().replace("\n", " ") for text in key.get_texts()] if key else []


def whiskers(axes: Any) -> list[tuple[float, float, float]]:
    """Place, low and high end of every interval."""
    found = []
    for container in axes.containers:
        for (x0, y0), (x1, y1) in container.lines[2][0].get_segments():
            at, low, high = (x0, y0, y1) if container.has_yerr else (y0, x0, x1)
            found.append((float(at), round(float(low), 9), round(float(high), 9)))
    return found


def bars(axes: Any) -> list[Any]:
    """Collections of boxes, of which each has one look."""
    return [each for each in axes.collections if type(each) is PolyCollection]


def boxes(axes: Any) -> list[tuple[float, float, float, float]]:
    """Left, right, low and high of every box."""
    return [
        (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
        for each in bars(axes)
        for path in each.get_paths()
        for low, high in [(path.vertices.min(0), path.vertices.max(0))]
    ]


def areas(axes: Any) -> list[dict[float, tuple[float, float]]]:
    """Lowest and highest y by x, of every area between two lines; an x in a gap is left out."""
    found = []
    for each in axes.collections:
        if isinstance(each, FillBetweenPolyCollection):
            by: dict[float, list[float]] = {}
            for path in each.get_paths():
                for x, y in path.vertices:
                    by.setdefault(float(x), []).append(float(y))
            found.append({x: (min(y), max(y)) for x, y in sorted(by.items())})
    return found


def spans(axes: Any) -> list[tuple[float, float]]:
    """Ends of the filled bands across the panel."""
    found = [each for each in axes.patches if isinstance(each, Rectangle)]
    return [
        (each.get_x(), each.get_x() + each.get_width())
        if (each.get_y(), each.get_height()) == (0, 1)
        else (each.get_y(), each.get_y() + each.get_height())
        for each in found
    ]


def cells(axes: Any) -> Any:
    """The heat map of a panel: values (NaN for none), ends of its colours, and the words of its colour bar."""
    (mesh,) = (each for each in axes.collections if isinstance(each, QuadMesh))
    values = np.ma.filled(mesh.get_array(), NAN)
    return SimpleNamespace(
        values=values.tolist(),
        low=mesh.norm.vmin,
        high=mesh.norm.vmax,
        colours=mesh.get_cmap().name,
        logarithmic=type(mesh.norm).__name__ == "LogNorm",
        words=mesh.colorbar.ax.get_ylabel(),
        numbers=[text.get_text() for text in axes.texts if not isinstance(text, Annotation)],
    )


def close(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    """Whether rows of numbers are equal up to rounding; NaN equals NaN."""
    one, two = np.array(found, float), np.array(expected, float)
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=1e-9, equal_nan=True))
