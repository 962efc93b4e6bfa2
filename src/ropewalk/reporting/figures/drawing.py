"""Draw a :class:`Figure` into a file. The only module that imports matplotlib; it avoids matplotlib's global state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import singledispatch
from io import BytesIO
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as Page
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from ropewalk.errors import RopewalkError
from ropewalk.io.files import replacing
from ropewalk.reporting import style
from ropewalk.reporting.figures.primitives import (
    Area,
    Axis,
    Boxes,
    Figure,
    Fill,
    HeatMap,
    Line,
    Look,
    Mark,
    Note,
    Panel,
    Rule,
    Span,
    Steps,
    Whiskers,
)
from ropewalk.reporting.page import Picture
from ropewalk.reporting.shown_text import harmless

FORMATS = (".png", ".svg")
SETTINGS = {"svg.hashsalt": "ropewalk", "text.parse_math": False}
"""Fixed ids in SVG files, and no mathematics mode for dollar signs in names of models and tasks."""
MARGIN = 0.014
"""Margin left of title and caption, as a share of the width."""
CAPTION_SIZE = 8.5
LINE_INCHES = 0.15
"""Height of one line of the caption."""
TITLE_INCHES = 0.19
"""Height of one line of the title."""
KEY_SHARE = 0.85
"""Largest width of a key as a share of its panel's width; tick labels need the rest."""
HEADING_SHARE = 0.75
BOXES = "A box stands for a character that the font of this figure lacks."
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
"""Light background of labels that cross lines."""
EVEN_LUMINANCE = 0.179
"""Luminance below which white text has more contrast than black text (WCAG 2)."""
DARKER = LinearSegmentedColormap.from_list("pale to dark", ["#eef4fa", style.FILLS[1], style.BLUE, "#062a4d"])


def draw(figure: Figure, path: Path) -> Picture:
    """Write a figure to a file atomically. Equal figures give equal bytes.

    Raises:
        RopewalkError: if the suffix is not in ``FORMATS``, or the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise RopewalkError(f"a figure is written as .png or .svg, got {path.name}")
    # An SVG's date would make equal figures differ.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context(SETTINGS), warnings.catch_warnings():
        # The caption mentions missing characters; matplotlib's warning would print lines of code.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        page = render(figure)
        with replacing(path) as temporary:
            page.savefig(temporary, metadata=metadata)
    return Picture(path, figure.alternative(), _caption_of(figure))


def draw_for_page(figure: Figure, path: Path) -> Picture:
    """Write a figure to a file as :func:`draw` does, and also draw it for a page, which has the caption as text."""
    content = BytesIO()
    with rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        render(figure, with_caption=False).savefig(content, format="svg", metadata={"Date": None})
    return replace(draw(figure, path), svg=content.getvalue())


def _caption_of(figure: Figure) -> str:
    """The caption, with a sentence on characters that no font can draw."""
    texts: list[str] = []
    _harmless(figure, texts)
    return f"{figure.caption} {BOXES}".strip() if _font_lacks("".join(texts)) else figure.caption


def render(figure: Figure, with_caption: bool = True) -> Page:
    """Convert to a matplotlib figure with its final size and layout."""
    with rc_context(SETTINGS):
        caption = _caption_of(figure) if with_caption else ""
        figure = _harmless(replace(figure, caption=caption), [])
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        page = Page(figsize=(figure.width, figure.height), dpi=style.DPI, layout=layout)
        # Attaches itself to the page, which needs a renderer to measure text.
        FigureCanvasAgg(page)
        every = _panels(page, figure)
        # Measured first, then added: the panels keep their height whatever the text around them takes.
        height = figure.height + TITLE_INCHES * _title(page, figure)
        height += max((_key(page, axes, panel, figure) for axes, panel in every if panel.key), default=0.0)
        page.set_size_inches(figure.width, height)
        if figure.caption:
            height += 0.1 + LINE_INCHES * _caption(page, figure)
        page.set_size_inches(figure.width, height)
        if figure.y_label:
            # Centred on the panels: title and caption shift them away from the figure's centre.
            layout.execute(page)
            ends = [end for axes, _ in every for end in (axes.get_position().y0, axes.get_position().y1)]
            page.supylabel(figure.y_label, y=(min(ends) + max(ends)) / 2, fontsize=10, color=style.INK)
        labels = [(axes, _end_labels(axes, panel)) for axes, panel in every]
        if any(found for _, found in labels):
            # Positions of labels need the layout, but no drawing.
            layout.execute(page)
            for axes, found in labels:
                _settle(page, axes, found)
            # Moving labels vertically cannot change the layout, which takes longer than drawing.
            page.set_layout_engine("none")
    return page


def _harmless(value: Any, texts: list[str]) -> Any:
    """Copy a value with every text in it made safe to show, and append those texts to ``texts``."""
    if isinstance(value, str):
        texts.append(harmless(value))
        return texts[-1]
    # Tuples of floats hold data, up to many thousands of points, and no text.
    if isinstance(value, tuple) and value and not isinstance(value[-1], float):
        return tuple(_harmless(each, texts) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        safe = {each.name: _harmless(getattr(value, each.name), texts) for each in fields(value)}
        return replace(value, **safe)
    return value


def _font_lacks(text: str) -> bool:
    """Whether none of matplotlib's fonts can draw a character of the text."""
    # The entries of font.family are fallbacks for one another.
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams["font.family"]]
    drawable = {code for font in fonts for code in font.get_charmap()} | {ord("\n")}
    return not drawable.issuperset(map(ord, text))


def _panels(page: Page, figure: Figure) -> list[tuple[Any, Panel]]:
    """Draw the panels with their marks; returns each panel with its axes."""
    count, columns = len(figure.panels), figure.columns
    rows = -(-count // columns)
    shared: dict[str, Any] = {"sharex": True, "sharey": True} if figure.shared else {}
    grid = page.subplots(rows, columns, squeeze=False, height_ratios=figure.heights, **shared)
    # Not strict: the last row of the grid may be incomplete.
    every = list(zip(grid.flat, figure.panels, strict=False))
    for axes in grid.flat[count:]:
        axes.remove()
    for number, (axes, panel) in enumerate(every):
        _dress(axes, panel)
        for mark in panel.marks:
            _add(mark, axes)
        for axis, wanted in ((axes.xaxis, panel.x), (axes.yaxis, panel.y)):
            _ticks(axis, wanted)
        if figure.shared:
            # The last panel of each column has tick labels, even above an incomplete last row.
            axes.tick_params(labelbottom=number + columns >= count)
            axes.set_xlabel(panel.x.label if number + columns >= count else "", color=style.INK)
    # Set before anything is measured, because it narrows the panels; `render` moves it to their middle.
    if figure.y_label:
        page.supylabel(figure.y_label, fontsize=10, color=style.INK)
    for axes, panel in every:
        if panel.heading is not None:
            _heading(page, axes, panel.heading, HEADING_SHARE * figure.width / columns)
    return every


def _dress(axes: Any, panel: Panel) -> None:
    """Set labels, scales, spines and grid of a panel."""
    axes.set_xlabel(panel.x.label, color=style.INK)
    axes.set_ylabel(panel.y.label, color=style.INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        # Spines lie inside the area of ticks and labels, and measuring one would rebuild all ticks.
        spine.set_in_layout(False)
    axes.tick_params(labelsize=8 if panel.small else 9, colors=style.INK)
    axes.grid(False)
    if panel.grid:
        axes.grid(True, axis=panel.grid, color=style.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    if panel.title:
        size, place = (9, "center") if panel.small else (10, "left")
        weight = "bold" if panel.bold else "normal"
        axes.set_title(panel.title, loc=place, fontsize=size, color=style.INK, fontweight=weight, pad=4)
    for axis, set_scale, set_limits in (
        (panel.x, axes.set_xscale, axes.set_xlim),
        (panel.y, axes.set_yscale, axes.set_ylim),
    ):
        scale: dict[str, dict[str, Any]] = {
            "log2": {"value": "log", "base": 2},
            "symlog": {"value": "symlog", "linthresh": axis.linear_to, "linscale": 0.75},
        }
        set_scale(**scale.get(axis.scale, {"value": axis.scale}))
        if axis.limits is not None:
            set_limits(axis.limits)


def _ticks(axis: Any, wanted: Axis) -> None:
    """Set ticks and their labels. Round-number ticks depend on the axis limits, so marks must be drawn first."""
    if wanted.ticks is not None:
        axis.set_minor_locator(NullLocator())
        axis.set_major_locator(FixedLocator([place for place, _ in wanted.ticks]))
        axis.set_major_formatter(FixedFormatter([words for _, words in wanted.ticks]))
        for row in wanted.bold:
            axis.get_ticklabels()[row].set_fontweight("bold")
        if wanted.rows:
            axis.set_tick_params(length=0, pad=6)
        return
    if wanted.scale == "log":
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    elif wanted.most_ticks:
        steps = None if wanted.whole else (1, 2, 2.5, 5, 10)
        axis.set_major_locator(MaxNLocator(wanted.most_ticks, integer=wanted.whole, steps=steps))
    if wanted.text is not None:
        text = wanted.text
        axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _colour(look: Look) -> dict[str, Any]:
    return {
        "color": look.colour,
        "linestyle": look.dash or "none",
        "linewidth": look.width,
        "marker": "none" if look.marker == "" else look.marker,
        "markersize": look.size,
        "markerfacecolor": "white" if look.hollow else look.colour,
        "markeredgecolor": look.edge or look.colour,
        "markeredgewidth": look.stroke,
    }


def _area(fill: Fill) -> dict[str, Any]:
    return {
        "facecolor": fill.face or "none",
        "edgecolor": fill.edge or "none",
        "hatch": fill.hatch or None,
        "linewidth": fill.width if fill.edge else 0,
        "alpha": None if fill.alpha == 1 else fill.alpha,
    }


@singledispatch
def _add(mark: Mark, axes: Any) -> None:
    """Draw a mark into axes."""
    raise TypeError(f"no way to draw a {type(mark).__name__}")


@_add.register
def _(mark: Line, axes: Any) -> None:
    axes.plot(
        mark.x, mark.y, clip_on=mark.clip, rasterized=mark.raster, zorder=mark.order, **_colour(mark.look)
    )


@_add.register
def _(mark: Steps, axes: Any) -> None:
    look = {key: _colour(mark.look)[key] for key in ("color", "linestyle", "linewidth")}
    # Without a baseline, no vertical lines run down to 0 at the two ends.
    axes.stairs(mark.y, mark.edges, baseline=None, zorder=mark.order, **look)


@_add.register
def _(mark: Area, axes: Any) -> None:
    look = {**_area(mark.fill), "linewidth": 0}
    axes.fill_between(mark.x, mark.low, mark.high, zorder=mark.order, **look)


@_add.register
def _(mark: Whiskers, axes: Any) -> None:
    at, low, high = (np.array(each) for each in (mark.at, mark.low, mark.high))
    # errorbar takes a centre and distances from it, so uneven ends become even around their middle.
    middle, half = (low + high) / 2, (high - low) / 2
    along = {"xerr": half} if mark.lying else {"yerr": half}
    x, y = (middle, at) if mark.lying else (at, middle)
    look = {"ecolor": mark.colour, "elinewidth": 1.2, "capsize": mark.caps}
    axes.errorbar(x, y, fmt="none", zorder=mark.order, **along, **look)


@_add.register
def _(mark: Boxes, axes: Any) -> None:
    sides = zip(mark.left, mark.right, mark.low, mark.high, strict=True)
    corners = [[(a, c), (b, c), (b, d), (a, d)] for a, b, c, d in sides]
    # Snapping to pixels would make a box thinner than a pixel vanish; without it, the box is pale.
    boxes = PolyCollection(corners, zorder=mark.order, snap=bool(mark.fill.edge), **_area(mark.fill))
    boxes.set_rasterized(mark.raster)
    axes.add_collection(boxes)
    # add_collection does not update the limits of the axes.
    if corners:
        axes.autoscale_view()


@_add.register
def _(mark: Rule, axes: Any) -> None:
    look = {"color": mark.colour, "linestyle": mark.dash, "linewidth": mark.width, "zorder": mark.order}
    upright = mark.axis == "x"
    place: tuple[float, float]
    (axes.axvline if upright else axes.axhline)(mark.at, **look)
    if not mark.words:
        return
    side = mark.side
    if upright:
        place, coordinates = (mark.at, 0 if mark.foot else 1), ("data", "axes fraction")
        offset = (-5 if side == "left" else 5, 4 if mark.foot else -4)
        align = {"ha": "right" if side == "left" else "left", "va": "bottom" if mark.foot else "top"}
    else:
        place, coordinates = (1 if side == "outside" else 0, mark.at), ("axes fraction", "data")
        offset = {"outside": (5, 0), "above": (6, 3), "below": (6, -3)}[side]
        align = {"ha": "left", "va": {"outside": "center", "above": "bottom", "below": "top"}[side]}
    _annotate(axes, mark.words, place, coordinates, offset, bbox=PAPER, **align)


@_add.register
def _(mark: Span, axes: Any) -> None:
    across = axes.axvspan if mark.axis == "x" else axes.axhspan
    across(mark.low, mark.high, zorder=mark.order, **{**_area(mark.fill), "linewidth": 0})


@_add.register
def _(mark: Note, axes: Any) -> None:
    place = (1 if mark.x is None else mark.x, 0 if mark.y is None else mark.y)
    coordinates = (
        "axes fraction" if mark.x is None else "data",
        "axes fraction" if mark.y is None else "data",
    )
    across = {"left": "left", "right": "right", "centre": "center", "foot": "center"}[mark.anchor]
    along = {"foot": "bottom", "centre": "center"}.get(mark.anchor, "center_baseline")
    look: dict[str, Any] = {"ha": across, "va": along, "fontsize": mark.size, "color": mark.colour}
    look |= {
        "fontweight": "bold" if mark.bold else "normal",
        "rotation": 90 if mark.upright else 0,
        "zorder": 6,
    }
    if mark.paper:
        look["bbox"] = PAPER
    _annotate(axes, mark.text, place, coordinates, (mark.dx, mark.dy), **look)


def _annotate(
    axes: Any,
    text: str,
    place: tuple[float, float],
    coordinates: tuple[str, str],
    offset: tuple[float, float],
    **look: Any,
) -> Any:
    look = {"color": style.INK, "fontsize": 9, **look}
    return axes.annotate(
        text,
        place,
        xycoords=coordinates,
        xytext=offset,
        textcoords="offset points",
        annotation_clip=False,
        **look,
    )


@_add.register
def _(mark: HeatMap, axes: Any) -> None:
    values = np.array(mark.values, dtype=np.float64)
    rows, columns = values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    norm = LogNorm(mark.low, mark.high) if mark.logarithmic else Normalize(mark.low, mark.high)
    # Cividis looks alike with any colour vision and varies in lightness. A logarithmic colour scale cannot show 0, so
    # 0 is white.
    colours = (
        colormaps["cividis"] if mark.colours == "even" else DARKER.with_extremes(under="white", bad="white")
    )
    gaps = {"edgecolor": "white", "linewidth": 0.8} if mark.numbers else {}
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=colours, norm=norm, **gaps)
    if np.isnan(values).any():
        # The cells of pcolormesh cannot be hatched, so those without a value are drawn by pcolor.
        empty = np.ma.masked_where(np.isfinite(values), np.zeros_like(values))
        axes.pcolor(*edges, empty, facecolor="none", edgecolor="#8a8a8a", hatch="////", linewidth=0)
    if mark.numbers:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                paper = mesh.to_rgba([value])[0] if value > 0 or not mark.logarithmic else (1.0, 1.0, 1.0)
                ink = "white" if luminance(paper) < EVEN_LUMINANCE else "black"
                words = mark.text(float(value))
                axes.text(column, row, words, ha="center", va="center", fontsize=mark.numbers, color=ink)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=2)
    _colour_bar(axes, mesh, mark)


def _colour_bar(axes: Any, mesh: Any, mark: HeatMap) -> None:
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05, aspect=18)
    bar.set_label(mark.label, color=style.INK, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, colors=style.INK, length=2)
    subs = (1, 2, 5) if mark.high < 300 * mark.low else (1,)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=subs) if mark.logarithmic else MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: mark.text(value)))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of an sRGB colour, 0 to 1 (WCAG 2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _fit(page: Page, text: Any, words: Callable[[int], str], most: int, step: int) -> int:
    """Wrap text into the longest lines that fit the page; returns the number of lines."""
    # Characters differ in width, so the wrapped text is measured rather than computed.
    for characters in range(most, most // 3, -step):
        text.set_text(words(characters))
        if text.get_window_extent(_renderer(page)).width <= (1 - 2 * MARGIN) * page.bbox.width:
            break
    return int(text.get_text().count("\n")) + 1


def _renderer(page: Page) -> Any:
    return page.canvas.get_renderer()  # type: ignore[attr-defined]


def _title(page: Page, figure: Figure) -> int:
    """Draw the title above all panels; returns the number of its lines."""
    if not figure.title:
        return 0
    text = page.suptitle("", x=MARGIN, ha="left", multialignment="left", fontsize=11, color=style.INK)
    most = round(style.TITLE_CHARACTERS * figure.width / style.WIDTH_INCHES)
    return _fit(page, text, lambda characters: "\n".join(wrap(figure.title, characters)), most, 4)


def _caption(page: Page, figure: Figure) -> int:
    """Draw the caption below all panels; returns the number of its lines."""
    text = page.supxlabel(
        "",
        x=MARGIN,
        ha="left",
        multialignment="left",
        linespacing=1.25,
        fontsize=CAPTION_SIZE,
        color=style.INK,
    )
    most = round(style.CAPTION_CHARACTERS * figure.width / style.WIDTH_INCHES)
    return _fit(page, text, lambda characters: fill(figure.caption, characters), most, 5)


def _key(page: Page, axes: Any, panel: Panel, figure: Figure) -> float:
    """Draw a key above the panel in as many columns as fit; returns its height in inches."""
    entries: dict[str, Any] = {}
    for mark in panel.marks:
        name = getattr(mark, "name", "")
        if name and name not in entries:
            entries[name] = _handle(mark)
    if not entries:
        return 0.0
    # If several panels have a key, each may only be as wide as its column.
    beside = figure.columns if sum(each.key for each in figure.panels) > 1 else 1
    for columns in range(min(4, len(entries)), 0, -1):
        # matplotlib cannot wrap a legend to a width, so the number of columns is found by trying.
        legend = axes.legend(
            handles=list(entries.values()),
            # matplotlib omits labels that start with an underscore.
            labels=[fill(f" {n}" if n.startswith("_") else n, style.KEY_CHARACTERS) for n in entries],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            borderaxespad=0.2,
            frameon=False,
            fontsize=9,
            handlelength=3 if figure.columns == 1 else 2.6,
            columnspacing=1.4,
        )
        box = legend.get_window_extent(_renderer(page))
        if box.width <= KEY_SHARE * page.bbox.width / beside:
            break
    return float(box.height / page.dpi)


def _handle(mark: Mark) -> Any:
    """Build the symbol of a mark in the key."""
    if isinstance(mark, Line | Steps):
        return Line2D([], [], **_colour(mark.look))
    if isinstance(mark, Rule):
        return Line2D([], [], color=mark.colour, linestyle=mark.dash, linewidth=mark.width)
    if isinstance(mark, Boxes | Area | Span):
        return Patch(**_area(mark.fill))
    raise TypeError(f"a {type(mark).__name__} has no place in a key")


def _heading(page: Page, axes: Any, lines: tuple[str, str], room_inches: float) -> None:
    """Draw two lines at the top of a panel, separate so that a right-to-left name cannot reorder the other one."""
    name, below = lines
    text = _annotate(axes, name, (0, 1), ("axes fraction", "axes fraction"), (5, -3), va="top", bbox=PAPER)
    # The layout would narrow the panels to make room for wide text.
    text.set_in_layout(False)
    renderer = _renderer(page)
    for kept in range(len(name) - 1, 1, -1):
        if text.get_window_extent(renderer).width <= room_inches * page.dpi:
            break
        # Shortened in the middle: names of sources often differ at their ends.
        text.set_text(f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}")
    text.set_text(f"{text.get_text()}\n{below}")


def _end_labels(axes: Any, panel: Panel) -> list[Any]:
    """Draw labels to the right of a panel at the height of each line's last point, connected by a thin line."""
    labels = []
    for mark in panel.marks:
        if not isinstance(mark, Line) or not mark.end:
            continue
        last = max(n for n, value in enumerate(mark.y) if not math.isnan(value))
        thread = {
            "arrowstyle": "-",
            "color": mark.look.colour,
            "linewidth": 0.9,
            # Dotted, so that a long connector does not look like part of the data.
            "linestyle": (0, (1, 1.5)),
            "shrinkA": 1,
            "shrinkB": 4,
            "relpos": (0, 0.5),
        }
        labels.append(
            axes.annotate(
                fill(mark.end, style.PANEL_CHARACTERS),
                (mark.x[last], mark.y[last]),
                xytext=(1.05, mark.y[last]),
                textcoords=axes.get_yaxis_transform(),
                va="center",
                color=style.INK,
                fontsize=9,
                annotation_clip=False,
                arrowprops=thread,
            )
        )
    return labels


def _settle(page: Page, axes: Any, labels: Sequence[Any]) -> None:
    """Move overlapping labels apart."""
    # An annotation's own extent includes its connector, so measure the text alone.
    heights = [Text.get_window_extent(each).height + 2 * page.dpi / 72 for each in labels]
    wanted = [float(axes.transData.transform((0, each.xyann[1]))[1]) for each in labels]
    box = axes.get_window_extent()
    for label, y in zip(labels, spread(wanted, heights, box.y0, box.y1), strict=True):
        label.xyann = (label.xyann[0], axes.transData.inverted().transform((0, y))[1])


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Positions of boxes as close to the wanted centres as possible without overlap.

    Least-squares positions by pooling adjacent violators (isotonic regression), then clipped to ``low`` and ``high`` as
    far as the boxes fit.
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    # Subtracting the heights of the boxes below turns each box into a point; points need only stay in order.
    below, offsets = 0.0, []
    for number in order:
        offsets.append(below + heights[number] / 2)
        below += heights[number]
    pools: list[tuple[float, int]] = []
    for number, offset in zip(order, offsets, strict=True):
        # Isotonic regression by pooling: labels that would overlap share their mean place, so all move as
        # little as possible.
        mean, count = wanted[number] - offset, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, count = (mean * count + before * others) / (count + others), count + others
        pools.append((mean, count))
    points = [mean for mean, count in pools for _ in range(count)]
    placed = [0.0] * len(wanted)
    for number, offset, point in zip(order, offsets, points, strict=True):
        placed[number] = max(min(point, high - below), low) + offset
    return placed
