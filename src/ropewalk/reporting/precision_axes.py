"""What the pictures of a precision audit share: axes of shifts and of D, and labels at line ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill, wrap
from typing import Any

import numpy as np
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import COLOURS, INK, LINE_STYLES, TITLE_CHARACTERS, dress_axes, new_figure
from ropewalk.reporting.rope_axes import MARKERS, add_caption

Floats = NDArray[np.float64]

GREY, BLUE, VERMILION, GREEN = COLOURS
LINE_COLOURS = (BLUE, VERMILION, GREEN, GREY, "#8a4b8f", "#111111", "#a6761d", "#3f7f93")
LINE_MARKERS = (*MARKERS[1:], MARKERS[0], "v", "P", "X", "*")
MOST_LINES = len(LINE_MARKERS)
D_LABEL = "attention difference D"
CLIP = 1e-6
"""Values below this part of the largest are not worth an axis that reaches them."""
TITLE_INCHES = 0.19
"""Height of one line of a title."""
LABEL_CHARACTERS = 24
"""Width of a label at a line's end."""
NARROWEST_LOG = 10.0
"""Highest over lowest end of a logarithmic axis, so that it has ticks."""
LINEAR_DECADES = 0.75
"""Length of the stretch from shift 0 to the smallest positive one."""
UNIT = "1k = 1,000"
"""Shifts are round numbers of tokens; in lengths, ``1k`` is 1024."""


def audit_figure(title: str, panels: Sequence[tuple[str, str]]) -> tuple[Any, list[Any]]:
    """A figure in the house style with panels ``(x label, y label)`` side by side and a title over all of them."""
    figure, first = new_figure("", *panels[0])
    axes = [first]
    if len(panels) > 1:
        first.remove()
        axes = list(figure.subplots(1, len(panels)))
        for each, labels in zip(axes, panels, strict=True):
            dress_axes(each, *labels)
    if title:
        text = figure.suptitle(
            "", x=0.014, ha="left", multialignment="left", fontsize=11, color=INK, parse_math=False
        )
        for characters in range(TITLE_CHARACTERS, TITLE_CHARACTERS // 3, -4):
            text.set_text("\n".join(wrap(title, characters)))
            if text.get_window_extent(figure.canvas.get_renderer()).width <= 0.972 * figure.bbox.width:
                break
    return figure, axes


def finish(figure: Any, caption: str, axes_inches: float) -> None:
    """Put the caption below; a title of several lines makes the figure higher, not the axes lower."""
    lines = figure.get_suptitle().count("\n") + bool(figure.get_suptitle())
    add_caption(figure, caption, axes_inches + TITLE_INCHES * lines)


def checked(what: str, values: ArrayLike) -> Floats:
    """Values as float64, NaN allowed.

    Raises:
        RopewalkError: if one is negative or infinite, or there is none but NaN.
    """
    value = np.asarray(values, dtype=np.float64)
    if np.isinf(value).any() or (value < 0).any():
        raise RopewalkError(f"{what} has a value that is negative or infinite")
    if not np.isfinite(value).any():
        raise RopewalkError(f"there is no finite {what} to draw")
    return value


def some_positive(what: str, values: Floats) -> Floats:
    """The positive values, which alone have a place on a logarithmic axis; RopewalkError if there is none."""
    positive = values[values > 0]
    if not len(positive):
        raise RopewalkError(f"there is no {what} above 0 to draw")
    return positive


def on_log(values: Floats) -> Floats:
    """NaN in place of 0, so that a line is broken there and not drawn through."""
    return np.where(values > 0, values, np.nan)


def alone(values: Floats) -> NDArray[np.bool_]:
    """Which values have no finite neighbour and so no line: they need a mark of their own."""
    gap = np.isnan(np.concatenate([[np.nan], values, [np.nan]]))
    alone: NDArray[np.bool_] = ~gap[1:-1] & gap[:-2] & gap[2:]
    return alone


def number_text(value: float) -> str:
    """Three digits: ``0``, ``0.00026``, ``11.4``, ``1,234``, ``1e-12``."""
    if value == 0 or 1e-4 <= value < 1000:
        return f"{value:.3g}"
    if 1000 <= value < 1e6:
        return f"{value:,.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def shift_text(tokens: float) -> str:
    """``16``, ``1k`` for 1000, ``2.5M``; what is not short so is written out."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if tokens >= unit and len(text := f"{tokens / unit:.10g}") <= 4:
            return f"{text}{name}"
    return f"{tokens:,.0f}"


def shift_axis(axes: Any, shifts: ArrayLike, most: int = 9) -> None:
    """A horizontal axis of shifts, logarithmic from the smallest positive one on and linear from 0 to it.

    Args:
        shifts: all that are drawn, tokens, none negative.
        most: ticks at powers of ten that fit.
    """
    at = np.unique(np.asarray(shifts, dtype=np.float64))
    positive = at[at > 0]
    smallest = float(positive[0]) if len(positive) else 1.0
    largest = float(positive[-1]) if len(positive) else 1.0
    axes.set_xscale("symlog", linthresh=smallest, linscale=LINEAR_DECADES)
    if at[0] == 0:
        axes.set_xlim(-0.15 * smallest, largest * (largest / smallest) ** 0.03 * 1.1)
    else:
        room = max(1.3, (largest / smallest) ** 0.05)
        axes.set_xlim(smallest / room, largest * room)
    low, high = math.ceil(math.log10(2.5 * smallest)), math.floor(math.log10(largest) + 1e-9)
    # Counted from the largest, which a reader looks for.
    powers = range(high, low - 1, -max(1, math.ceil((high - low + 1) / most)))
    ends = [smallest, *([largest] if not powers else [])] if len(positive) else []
    axes.xaxis.set_major_locator(FixedLocator(sorted({0.0, *ends, *(10.0**power for power in powers)})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shift_text(value)))


def log_axis(axis: Any, low: float, high: float, room: tuple[float, float] = (0.06, 0.06)) -> None:
    """A logarithmic axis around positive values, with numbers at its ticks.

    Args:
        low, high: ends of the values; the axis is widened where they are closer than ``NARROWEST_LOG``.
        room: below and above them, in parts of the axis.
    """
    if high < NARROWEST_LOG * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(NARROWEST_LOG), middle * math.sqrt(NARROWEST_LOG)
    ratio = high / low
    set_scale, set_limits = (
        (axis.axes.set_xscale, axis.axes.set_xlim)
        if axis.axis_name == "x"
        else (axis.axes.set_yscale, axis.axes.set_ylim)
    )
    set_scale("log")
    set_limits(low / ratio ** room[0], high * ratio ** room[1])
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 300 else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axis.set_minor_formatter(NullFormatter())


def line_style(number: int, is_open: bool = False) -> dict[str, Any]:
    """Colour, marker and line of a series: closed and solid, or open and dashed."""
    colour = LINE_COLOURS[number % MOST_LINES]
    return {
        "color": colour,
        "marker": LINE_MARKERS[number % MOST_LINES],
        "markerfacecolor": "white" if is_open else colour,
        "linestyle": LINE_STYLES[0 if is_open else 1],
        "linewidth": 1.5,
        "markersize": 6,
    }


def label_ends(axes: Any, ends: Sequence[tuple[str, float, float, str]]) -> list[Any]:
    """Names at the right of the axes, each tied to the last point ``(name, x, y, colour)`` of its line.

    They lie at the heights of their points until :func:`settle_ends` moves them apart.
    """
    return [
        axes.annotate(
            fill(name, LABEL_CHARACTERS),
            (x, y),
            xytext=(1.05, y),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            color=INK,
            fontsize=9,
            parse_math=False,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.9,
                # Dotted: a long one must not be taken for the line itself.
                "linestyle": (0, (1, 1.5)),
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )
        for name, x, y, colour in ends
    ]


def settle_ends(figure: Any, axes: Any, labels: Sequence[Any]) -> None:
    """Move labels apart that would lie on one another; to be called last, when the figure has its size."""
    if not labels:
        return
    # The layout alone: to draw as well would move nothing.
    figure.get_layout_engine().execute(figure)
    # The box of an annotation holds its line too; that of the words alone is needed.
    heights = [Text.get_window_extent(each).height + 2 * figure.dpi / 72 for each in labels]
    wanted = [float(axes.transData.transform((0, each.xyann[1]))[1]) for each in labels]
    box = axes.get_window_extent()
    for label, y in zip(labels, spread(wanted, heights, box.y0, box.y1), strict=True):
        label.xyann = (label.xyann[0], axes.transData.inverted().transform((0, y))[1])
    # Labels are as wide at any height, and a layout takes longer than all the drawing.
    figure.set_layout_engine("none")


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Middles of boxes, as near to the wanted ones as they can be without lying on one another.

    Least squares by pooling neighbours; then moved between ``low`` and ``high`` as far as they fit there.
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    # With the boxes below it taken off, each box is a point, and the points need only be in order.
    below, offsets = 0.0, []
    for number in order:
        offsets.append(below + heights[number] / 2)
        below += heights[number]
    pools: list[tuple[float, int]] = []
    for number, offset in zip(order, offsets, strict=True):
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
