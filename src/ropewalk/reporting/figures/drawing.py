"""Draw on matplotlib's axes, and write figures into files. The only module that imports matplotlib.

A builder gets axes from :func:`canvas`, draws on them with matplotlib's own methods and the functions of this module,
and ends with :func:`complete`. matplotlib's global state is left alone. It takes a second to import, so the functions
that need it import it themselves. Numbers are in the units of the axes; NaN is a gap.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.errors import RopewalkError
from ropewalk.io.files import replacing
from ropewalk.reporting import style
from ropewalk.reporting.figures.prepare import folded, is_spread
from ropewalk.reporting.page import Picture
from ropewalk.reporting.shown_text import harmless

Axes = Any
"""matplotlib's axes; importing their type would import matplotlib."""
Options = dict[str, Any]
"""Options of matplotlib's methods."""
Dash = str | tuple[int, tuple[float, ...]]
Ticks = Sequence[tuple[float, str]]
Side = Literal["right", "left", "above", "below", "outside"]
FORMATS = (".png", ".svg")
SETTINGS = {"svg.hashsalt": "ropewalk", "text.parse_math": False}
"""Fixed ids in SVG files, and no mathematics mode for dollar signs in names of models and tasks."""
MARGIN = 0.014
"""Margin left of title and caption, as a share of the width."""
PAD_INCHES, GAP_INCHES = 0.08, 0.04
"""Space around the panels and at the edges of the figure, and between the panels and the caption."""
KEY_SHARE = 0.85
"""Largest width of a key as a share of its panel's width; tick labels need the rest."""
HEADING_SHARE = 0.75
BOXES = "A box stands for a character that the font of this figure lacks."
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
"""Light background of labels that cross lines."""
EVEN_LUMINANCE = 0.179
"""Luminance below which white text has more contrast than black text (WCAG 2)."""
DARKER = ("#eef4fa", style.FILLS[1], style.BLUE, "#062a4d")
"""Colours of a heat map that is darker at larger values."""
NARROWEST_LOG = 10.0
"""Smallest ratio between the ends of a logarithmic axis; a narrower one may contain no tick."""


@dataclass(frozen=True)
class Figure:
    """A complete figure.

    Attributes:
        page: matplotlib's figure, laid out. Title and caption lie outside of it, above and below.
        title: text above the panels.
        caption: one or two sentences below the panels.
        told: what each series shows, as parts of the sentence that is the text alternative.
        title_inches: height of the title.
    """

    page: Any
    title: str = ""
    caption: str = ""
    told: tuple[str, ...] = ()
    title_inches: float = 0.0

    def alternative(self) -> str:
        """Text alternative for readers who cannot see the figure: its title, and what the panels show."""
        told = "; ".join(filter(None, self.told))
        title = self.title and f"{self.title.rstrip('.')}."
        return " ".join(filter(None, (title, told and f"{told}.")))


def draw(figure: Figure, path: Path) -> Picture:
    """Write a figure to a file atomically. Equal figures give equal bytes.

    Raises:
        RopewalkError: if the suffix is not in ``FORMATS``, or the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise RopewalkError(f"a figure is written as .png or .svg, got {path.name}")
    with replacing(path) as temporary:
        _save(figure, temporary, path.suffix[1:])
    return Picture(path, figure.alternative(), _caption(figure))


def draw_for_page(figure: Figure, path: Path) -> Picture:
    """Write a figure to a file as :func:`draw` does, and also draw it for a page, which has the caption as text."""
    content = BytesIO()
    _save(replace(figure, caption=""), content, "svg")
    return replace(draw(figure, path), svg=content.getvalue())


def _save(figure: Figure, target: Any, kind: str) -> None:
    # An SVG's date would make equal figures differ.
    metadata = {"Date": None} if kind == "svg" else None
    with captioned(figure) as box:
        figure.page.savefig(target, format=kind, bbox_inches=box, metadata=metadata)


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's settings for figures, without warnings of missing characters."""
    from matplotlib import rc_context

    with rc_context(SETTINGS), warnings.catch_warnings():
        # The caption mentions missing characters; matplotlib's warning would print lines of code.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        yield


@contextmanager
def captioned(figure: Figure) -> Iterator[Any]:
    """Give a figure its caption below the page for a while; yields the box of page, title and caption in inches."""
    from matplotlib.transforms import Bbox

    page, caption, below = figure.page, harmless(_caption(figure)), 0.0
    width, height = page.get_size_inches()
    with _settings():
        place = (MARGIN, -GAP_INCHES / height)
        text = page.text(*place, "", va="top", linespacing=1.25, fontsize=8.5, color=style.INK)
        if caption:
            _fit(text, lambda characters: fill(caption, characters), style.CAPTION_CHARACTERS, 5)
            below = text.get_window_extent().height / page.dpi + GAP_INCHES + PAD_INCHES
        try:
            yield Bbox([[0, -below], [width, height + figure.title_inches]])
        finally:
            text.remove()


def _caption(figure: Figure) -> str:
    """The caption, with a sentence on characters that no font can draw."""
    from matplotlib.text import Text

    shown = [each.get_text() for each in figure.page.findobj(Text)]
    # A figure for a page has no caption of its own.
    lacks = bool(figure.caption) and _font_lacks("".join([*shown, harmless(figure.caption)]))
    return f"{figure.caption} {BOXES}" if lacks else figure.caption


def _font_lacks(text: str) -> bool:
    """Whether none of matplotlib's fonts can draw a character of the text."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, get_font

    # The entries of font.family are fallbacks for one another.
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams["font.family"]]
    drawable = {code for font in fonts for code in font.get_charmap()} | {ord("\n")}
    return not drawable.issuperset(map(ord, text))


def canvas(
    count: int = 1,
    columns: int = 1,
    *,
    height: float = style.HEIGHT_INCHES,
    width: float = style.WIDTH_INCHES,
    shared: bool = False,
    heights: Sequence[float] | None = None,
    grid: Literal["x", "y", ""] = "y",
    small: bool = False,
) -> list[Axes]:
    """Make the axes of a figure, in row-major order.

    Args:
        count: number of panels.
        columns: number of panels side by side.
        height, width: inches. The height excludes title, key and caption.
        shared: whether all panels share their axes, so that only the outer ones have tick labels.
        heights: relative heights of the rows of panels.
        grid: axis that has grid lines.
        small: whether tick labels are small.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=PAD_INCHES)
    page = Page(figsize=(width, height), dpi=style.DPI, layout=layout)
    # Attaches itself to the page, which needs a renderer to measure text.
    FigureCanvasAgg(page)
    rows = -(-count // columns)
    cells = page.subplots(rows, columns, squeeze=False, height_ratios=heights, sharex=shared, sharey=shared)
    panels, rest = list(cells.flat[:count]), cells.flat[count:]
    for axes in rest:
        axes.remove()
    for number, axes in enumerate(panels):
        axes.spines[["top", "right"]].set_visible(False)
        for spine in axes.spines.values():
            # Spines lie inside the area of ticks and labels, and measuring one would rebuild all ticks.
            spine.set_in_layout(False)
        axes.tick_params(labelsize=8 if small else 9, colors=style.INK)
        if grid:
            axes.grid(True, axis=grid, color=style.FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        if shared:
            # The last panel of each column has tick labels, even above an incomplete last row.
            axes.tick_params(labelbottom=number + columns >= count)
    return panels


def complete(
    panels: Sequence[Axes],
    title: str = "",
    caption: str = "",
    told: Iterable[str] = (),
    *,
    keys: Sequence[Axes] = (),
    y_label: str = "",
) -> Figure:
    """Add keys and a title, make all text harmless, and lay the panels out.

    Args:
        panels: axes of :func:`canvas`.
        title, caption, told: see :class:`Figure`.
        keys: panels with a key above them, which lists what has a label.
        y_label: common label of all vertical axes.
    """
    from matplotlib.text import Text

    page, rise = panels[0].figure, 0.0
    with _settings():
        grown = max((_key(axes, len(keys) > 1) for axes in keys), default=0.0)
        # The panels keep their height whatever the key above them takes.
        page.set_figheight(page.get_figheight() + grown)
        # Set before the layout, because it narrows the panels; below, it moves to their middle.
        beside = page.supylabel(y_label, fontsize=10, color=style.INK) if y_label else None
        for text in page.findobj(Text):
            # Text made before has the mathematics mode of matplotlib's own settings.
            text.set_parse_math(False)
            text.set_text(harmless(text.get_text()))
        layout = page.get_layout_engine()
        layout.execute(page)
        if beside is not None:
            ends = [end for axes in panels for end in axes.get_position().intervaly]
            beside.set_y((min(ends) + max(ends)) / 2)
        for axes in panels:
            # Only labels at the ends of lines have a connector.
            _settle(axes, [each for each in axes.texts if getattr(each, "arrow_patch", None)])
        # Nothing changes the layout from here on, and it takes longer than drawing.
        page.set_layout_engine("none")
        if title:
            text = page.text(MARGIN, 1, "", va="bottom", fontsize=11, color=style.INK)
            words = harmless(title)
            _fit(text, lambda characters: "\n".join(wrap(words, characters)), style.TITLE_CHARACTERS, 4)
            rise = text.get_window_extent().height / page.dpi + PAD_INCHES
    return Figure(page, title, caption, tuple(told), rise)


def _fit(text: Any, words: Callable[[int], str], most: int, step: int) -> None:
    """Wrap text into the longest lines that fit the page; ``most`` characters are for a figure of the usual width."""
    page = text.figure
    most = round(most * page.get_figwidth() / style.WIDTH_INCHES)
    # Characters differ in width, so the wrapped text is measured rather than computed.
    for characters in range(most, most // 3, -step):
        text.set_text(words(characters))
        if text.get_window_extent().width <= (1 - 2 * MARGIN) * page.bbox.width:
            break


def _key(axes: Axes, several: bool) -> float:
    """Draw a key above a panel in as many columns as fit; returns its height in inches."""
    page, columns = axes.figure, axes.get_gridspec().ncols
    entries: dict[str, Any] = {}
    for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
        entries.setdefault(fill(harmless(name), style.KEY_CHARACTERS), handle)
    if not entries:
        return 0.0
    # If several panels have a key, each may only be as wide as its column.
    most = KEY_SHARE * page.bbox.width / (columns if several else 1)
    for across in range(min(4, len(entries)), 0, -1):
        # matplotlib cannot wrap a legend to a width, so the number of columns is found by trying.
        key = axes.legend(
            handles=list(entries.values()),
            labels=list(entries),
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=across,
            borderaxespad=0.2,
            frameon=False,
            fontsize=9,
            handlelength=3 if columns == 1 else 2.6,
            columnspacing=1.4,
        )
        box = key.get_window_extent(page.canvas.get_renderer())
        if box.width <= most:
            break
    return float(box.height / page.dpi)


def label(name: str) -> str:
    """A series' name as matplotlib's label; matplotlib omits labels that start with an underscore from keys."""
    return f" {name}" if name.startswith("_") else name


def scale(
    axis: Any,
    words: str = "",
    kind: Literal["linear", "log", "log2", "symlog"] = "linear",
    limits: tuple[float, float] | None = None,
    ticks: Ticks | None = None,
    text: Callable[[float], str] | None = None,
    *,
    most: int = 0,
    whole: bool = False,
    span: tuple[float, float] = (1.0, 1.0),
    linear_to: float = 1.0,
) -> None:
    """Set one axis of a panel, before anything is drawn on it.

    Args:
        axis: ``xaxis`` or ``yaxis`` of the axes.
        words: quantity and unit.
        kind: ``symlog`` is linear from 0 to ``linear_to`` and logarithmic beyond.
        limits: both ends; the axis is inverted if the first is larger. None fits what is drawn.
        ticks: all ticks with their labels. None for round numbers.
        text: formats round numbers. None for as many decimals as they need.
        most: largest number of ticks at round numbers; 0 for as many as fit.
        whole: whether ticks at round numbers are integers.
        span: smallest and largest value drawn, of a logarithmic axis without limits.
    """
    from matplotlib import ticker

    axes, name = axis.axes, axis.axis_name
    # An inner panel of several that share their axes has no label.
    inner = name == "x" and not axis.get_tick_params().get("labelbottom", True)
    axis.set_label_text("" if inner else words, color=style.INK)
    own: dict[str, Options] = {
        "log2": {"value": "log", "base": 2},
        "symlog": {"value": "symlog", "linthresh": linear_to, "linscale": 0.75},
    }
    getattr(axes, f"set_{name}scale")(**own.get(kind, {"value": kind}))
    if limits is not None:
        getattr(axes, f"set_{name}lim")(limits)
    if ticks is not None:
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_locator(ticker.FixedLocator([place for place, _ in ticks]))
        axis.set_major_formatter(ticker.FixedFormatter([harmless(each) for _, each in ticks]))
        return
    if kind == "log":
        low, high = sorted(limits or span)
        subs = (1, 2, 5) if high < 300 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif most:
        steps = None if whole else (1, 2, 2.5, 5, 10)
        axis.set_major_locator(ticker.MaxNLocator(most, integer=whole, steps=steps))
    if text is not None:
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def value_scale(
    axis: Any, words: str, low: float, high: float, limits: tuple[float, float] | None = None
) -> None:
    """Set an axis for values from ``low`` to ``high``, logarithmic if they are positive and spread far."""
    if is_spread(low, high):
        scale(axis, words, "log", limits, text=style.tick_text, span=(low, high))
    else:
        scale(axis, words, limits=limits)


def percent_scale(axis: Any, words: str, high: float = 104) -> None:
    """Set an axis of scores in percent, with room above 100."""
    scale(axis, words, limits=(0, high), ticks=[(float(n), str(n)) for n in range(0, 101, 20)])


def log_scale(
    axis: Any, words: str, low: float, high: float, room: tuple[float, float] = (0.06, 0.06)
) -> None:
    """Set a logarithmic axis around positive values.

    Args:
        low, high: smallest and largest value. The axis is widened if their ratio is below ``NARROWEST_LOG``.
        room: margins below and above, as shares of the axis.
    """
    if high < NARROWEST_LOG * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(NARROWEST_LOG), middle * math.sqrt(NARROWEST_LOG)
    # On a logarithmic axis, a power of the ratio of its ends is a share of its length.
    ratio = high / low
    scale(axis, words, "log", (low / ratio ** room[0], high * ratio ** room[1]), text=style.number_text)


def row_scale(axes: Axes, names: Sequence[str], bold: Sequence[int] = (), words: str = "") -> None:
    """Make the vertical axis one of names with the first at the top; row ``n`` is at y = ``n``."""
    ticks = list(enumerate(map(folded, names)))
    scale(axes.yaxis, words, limits=(len(names) - 0.45, -0.55), ticks=ticks)
    for row in bold:
        axes.get_yticklabels()[row].set_fontweight("bold")
    axes.tick_params(axis="y", length=0, pad=6)


def look(
    colour: str = style.BLUE,
    dash: Dash = "-",
    marker: str | int = "",
    *,
    hollow: bool = False,
    width: float = 1.8,
    size: float = 6.0,
    edge: str = "",
    stroke: float = 1.0,
    order: float = 3,
) -> Options:
    """Options of a line and its markers.

    Args:
        colour: colour of the line and the markers.
        dash: dash pattern of the line; empty draws markers without a line.
        marker: marker shape; empty draws a line without markers.
        hollow: whether markers are white inside.
        width, size, stroke: width of the line, size of the markers and width of their edges, in points.
        edge: colour of marker edges; empty for the marker's colour.
    """
    return {
        "color": colour,
        "linestyle": dash or "none",
        "linewidth": width,
        "marker": "none" if marker == "" else marker,
        "markersize": size,
        "markerfacecolor": "white" if hollow else colour,
        "markeredgecolor": edge or colour,
        "markeredgewidth": stroke,
        "zorder": order,
    }


def area(
    face: str = "", edge: str = "", hatch: str = "", *, width: float = 1.0, alpha: float | None = None
) -> Options:
    """Options of a filled area. ``face`` and ``edge`` are colours, empty for none; ``width`` is that of the edge."""
    return {
        "facecolor": face or "none",
        "edgecolor": edge or "none",
        "hatch": hatch or None,
        "linewidth": width if edge else 0,
        "alpha": alpha,
    }


def series_look(number: int, count: int, **changes: Any) -> Options:
    """Options of one of up to eight lines. A single one gets the strong colour and is solid."""
    colour, dash, marker = style.SERIES[1 if count == 1 else number]
    return look(**{"colour": colour, "dash": dash, "marker": marker, **changes})


def series_area(number: int, count: int) -> Options:
    """Colour and hatch of the bars of one of up to four series; a single one is plain blue."""
    number = (1 if count == 1 else number) % 4
    return area(style.FILLS[number], style.COLOURS[number], style.HATCHES[number])


def band(axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: str) -> None:
    """Draw the band of a line of this colour."""
    axes.fill_between(x, low, high, **area(colour, alpha=style.BAND_ALPHA), zorder=1)


def whiskers(
    axes: Axes,
    at: ArrayLike,
    value: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    *,
    colour: str = style.INK,
    lying: bool = False,
    caps: float = 3.5,
    order: float = 3,
) -> None:
    """Draw error bars around values ``[n]``. If rounding put an end past its value, the value becomes the end."""
    low, high = np.fmin(low, value), np.fmax(high, value)
    # errorbar takes a centre and distances from it, so uneven ends become even around their middle.
    middle, half = (low + high) / 2, (high - low) / 2
    x, y = (middle, at) if lying else (at, middle)
    options = {"ecolor": colour, "elinewidth": 1.2, "capsize": caps, "zorder": order}
    axes.errorbar(x, y, **{"xerr" if lying else "yerr": half}, fmt="none", **options)


def boxes(
    axes: Axes,
    left: ArrayLike,
    right: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    options: Options,
    name: str = "",
    *,
    raster: bool = False,
    order: float = 2,
) -> None:
    """Draw rectangles ``[n]``, as bars or as bands with gaps. ``raster`` stores them as an image in an SVG."""
    from matplotlib.collections import PolyCollection

    sides = np.broadcast_arrays(left, right, low, high)
    corners = [[(a, c), (b, c), (b, d), (a, d)] for a, b, c, d in zip(*sides, strict=True)]
    # Snapping to pixels would make a box thinner than a pixel vanish; without it, the box is pale.
    snap = options["linewidth"] > 0
    found = PolyCollection(corners, zorder=order, snap=snap, label=label(name), **options)
    found.set_rasterized(raster)
    axes.add_collection(found)
    # add_collection does not update the limits of the axes.
    if corners:
        axes.autoscale_view()


def rule(
    axes: Axes,
    at: float,
    words: str = "",
    side: Side = "right",
    *,
    across: bool = False,
    foot: bool = False,
    colour: str = style.INK,
    dash: Dash = style.DOTTED,
    width: float = 1.0,
    name: str = "",
    order: float = 2,
) -> None:
    """Draw a line through the whole panel, with an optional label.

    Args:
        at: its x, or its y if it goes ``across``.
        words: label of the line.
        side: position of the label. For a vertical line: ``right`` or ``left`` of it, at the top, or at the bottom if
            ``foot``. For a horizontal line: ``above`` or ``below`` its left end, or ``outside`` the panel.
        name: name in the key.
    """
    options: Options = {"color": colour, "linestyle": dash, "linewidth": width, "zorder": order}
    (axes.axhline if across else axes.axvline)(at, label=label(name) if name else "_rule", **options)
    if not words:
        return
    if across:
        offset = {"outside": (5, 0), "above": (6, 3), "below": (6, -3)}[side]
        upright = {"outside": "center", "above": "bottom", "below": "top"}[side]
        options = {"coordinates": ("axes fraction", "data"), "va": upright, "bbox": PAPER}
        note(axes, words, (1 if side == "outside" else 0, at), offset, **options)
    else:
        offset = (-5 if side == "left" else 5, 4 if foot else -4)
        options = {"ha": "right" if side == "left" else "left", "va": "bottom" if foot else "top"}
        coordinates = ("data", "axes fraction")
        note(axes, words, (at, 0 if foot else 1), offset, coordinates=coordinates, bbox=PAPER, **options)


def mark_length(axes: Axes, length: float, name: str, low: float, high: float) -> None:
    """Draw a labelled line at a length on a logarithmic axis from ``low`` to ``high``, if it lies within."""
    if low < length < high:
        is_late = math.log(length / low) > 0.7 * math.log(high / low)
        rule(axes, length, f"{name} {style.length_text(length)}", beside(is_late))


def beside(is_late: bool) -> Side:
    """The side of a vertical line that has room for a label: left if the line is far to the right."""
    return "left" if is_late else "right"


def note(
    axes: Axes,
    text: str,
    place: tuple[float | None, float | None],
    offset: tuple[float, float] = (0, 0),
    *,
    coordinates: tuple[str, str] | None = None,
    size: float = 9.0,
    **options: Any,
) -> Any:
    """Write text at a position.

    Args:
        place: position. None for x is the panel's right edge, None for y its lower edge.
        offset: distance from there in points.
        options: of matplotlib's text, such as ``ha``, ``va`` and ``bbox``.
    """
    x, y = place
    own = tuple("axes fraction" if each is None else "data" for each in place)
    given = {"color": style.INK, "ha": "left", "va": "center_baseline", "zorder": 6, "annotation_clip": False}
    return axes.annotate(
        text,
        (1 if x is None else x, 0 if y is None else y),
        offset,
        xycoords=coordinates or own,
        textcoords="offset points",
        fontsize=size,
        parse_math=False,
        **{**given, **options},
    )


def heading(axes: Axes, name: str, below: str) -> None:
    """Write two lines at the top inside a panel. The first is shortened in the middle if it is too wide."""
    page, name = axes.figure, harmless(name)
    room = HEADING_SHARE * page.bbox.width / axes.get_gridspec().ncols
    inside = ("axes fraction", "axes fraction")
    text = note(axes, name, (0, 1), (5, -3), coordinates=inside, va="top", bbox=PAPER)
    # The layout would narrow the panels to make room for wide text.
    text.set_in_layout(False)
    with _settings():
        for kept in range(len(name) - 1, 1, -1):
            if text.get_window_extent(page.canvas.get_renderer()).width <= room:
                break
            # Shortened in the middle: names of sources often differ at their ends.
            text.set_text(f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}")
    text.set_text(f"{text.get_text()}\n{below}")


def panel_title(axes: Axes, words: str, *, small: bool = False, bold: bool = False) -> None:
    """Write text above a panel: in the middle if ``small``, else at the left."""
    size, place = (9, "center") if small else (10, "left")
    weight = "bold" if bold else "normal"
    axes.set_title(words, loc=place, fontsize=size, color=style.INK, fontweight=weight, pad=4)


def heat_map(
    axes: Axes,
    values: ArrayLike,
    colours: Literal["even", "dark"],
    low: float,
    high: float,
    words: str,
    text: Callable[[float], str],
    *,
    logarithmic: bool = False,
    numbers: float = 0.0,
) -> None:
    """Draw cells ``[rows][columns]`` centred on the integers of both axes and coloured by value; NaN is hatched.

    Args:
        colours: ``even`` for cividis (dark to light), or ``dark`` for darker colours at larger values.
        low, high: values at the ends of the colour scale.
        words: label of the colour bar.
        text: formats the numbers at the colour bar and in the cells.
        logarithmic: whether the colour scale is logarithmic; values below ``low`` are white.
        numbers: font size in points of the number in each cell; 0 for no numbers.
    """
    from matplotlib import colormaps, colors, ticker

    values = np.asarray(values, dtype=np.float64)
    rows, columns = values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    norm = colors.LogNorm(low, high) if logarithmic else colors.Normalize(low, high)
    # Cividis looks alike with any colour vision and varies in lightness. A logarithmic colour scale cannot show 0, so
    # 0 is white.
    darker = colors.LinearSegmentedColormap.from_list("pale to dark", DARKER)
    map_ = colormaps["cividis"] if colours == "even" else darker.with_extremes(under="white", bad="white")
    gaps = {"edgecolor": "white", "linewidth": 0.8} if numbers else {}
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=map_, norm=norm, **gaps)
    if np.isnan(values).any():
        # The cells of pcolormesh cannot be hatched, so those without a value are drawn by pcolor.
        empty = np.ma.masked_where(np.isfinite(values), np.zeros_like(values))
        axes.pcolor(*edges, empty, facecolor="none", edgecolor="#8a8a8a", hatch="////", linewidth=0)
    for (row, column), value in np.ndenumerate(values if numbers else np.empty(0)):
        if math.isfinite(value):
            paper = mesh.to_rgba([value])[0] if value > 0 or not logarithmic else (1.0, 1.0, 1.0)
            ink = "white" if luminance(paper) < EVEN_LUMINANCE else "black"
            axes.text(column, row, text(float(value)), ha="center", va="center", fontsize=numbers, color=ink)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=2)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05, aspect=18)
    bar.set_label(words, color=style.INK, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, colors=style.INK, length=2)
    subs = (1, 2, 5) if high < 300 * low else (1,)
    bar.ax.yaxis.set_major_locator(ticker.LogLocator(subs=subs) if logarithmic else ticker.MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))
    bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of an sRGB colour, 0 to 1 (WCAG 2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def end_label(axes: Axes, words: str, x: ArrayLike, y: ArrayLike, colour: str) -> None:
    """Label a line ``[n]`` right of the panel, at the height of its last finite y, connected by a thin line."""
    known = np.flatnonzero(np.isfinite(np.asarray(y, dtype=np.float64)))
    if not len(known):
        return
    last = known[-1]
    place = float(np.asarray(x)[last]), float(np.asarray(y)[last])
    thread = {
        "arrowstyle": "-",
        "color": colour,
        "linewidth": 0.9,
        # Dotted, so that a long connector does not look like part of the data.
        "linestyle": (0, (1, 1.5)),
        "shrinkA": 1,
        "shrinkB": 4,
        "relpos": (0, 0.5),
    }
    axes.annotate(
        fill(harmless(words), style.PANEL_CHARACTERS),
        place,
        xytext=(1.05, place[1]),
        textcoords=axes.get_yaxis_transform(),
        va="center",
        color=style.INK,
        fontsize=9,
        annotation_clip=False,
        arrowprops=thread,
    )


def _settle(axes: Axes, labels: Sequence[Any]) -> None:
    """Move overlapping labels at the ends of lines apart."""
    from matplotlib.text import Text

    # An annotation's own extent includes its connector, so measure the text alone.
    gap = 2 * axes.figure.dpi / 72
    heights = [Text.get_window_extent(each).height + gap for each in labels]
    wanted = [float(axes.transData.transform((0, each.xyann[1]))[1]) for each in labels]
    box = axes.get_window_extent()
    for each, y in zip(labels, spread(wanted, heights, box.y0, box.y1), strict=True):
        each.xyann = (each.xyann[0], axes.transData.inverted().transform((0, y))[1])


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
