"""What the pictures of RoPE theory share: captions, axes of lengths and bases, checks, and reduced data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import COLOURS, INK, SIZE_INCHES, short_length

Floats = NDArray[np.float64]

MARKERS = ("s", "o", "^", "D")
MOST_SERIES = len(COLOURS)
CAPTION_CHARACTERS = 110
CAPTION_SIZE = 8.5
KEY_CHARACTERS = 44
LINE_INCHES = 0.15
"""Height of one line of a caption."""
ENVELOPE_BINS = 600
MOST_LENGTH_TICKS = 11
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
"""Behind words that lie on grid lines."""
SHADE = "#e9eef3"
"""Lighter than every line and mark that may lie on it."""


class Envelope(NamedTuple):
    """Lowest, mean and highest value in bins of equal width in ``log2 x``; bins without a point are left out.

    Attributes:
        x: ``[n]``, middle of each bin's points, geometrically; exact where a bin holds one point.
        low, mean, high: ``[n]``, of the values in each bin.
    """

    x: Floats
    low: Floats
    mean: Floats
    high: Floats


def envelope(x: ArrayLike, values: ArrayLike, bins: int = ENVELOPE_BINS) -> Envelope:
    """Reduce a long series to what a picture can show, without losing an extreme.

    Args:
        x: ``[n]``, positive, rising.
        values: ``[n]``, finite.
        bins: most points of the result.
    """
    at, value = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    log = np.log2(at)
    width = (log[-1] - log[0]) / bins or 1.0
    number = np.minimum(((log - log[0]) / width).astype(np.int64), bins - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(at)) - 1
    return Envelope(
        np.where(first == last, at[first], np.sqrt(at[first] * at[last])),
        np.minimum.reduceat(value, first),
        np.add.reduceat(value, first) / (last - first + 1),
        np.maximum.reduceat(value, first),
    )


def checked_series(
    what: str, series: Mapping[str, tuple[ArrayLike, ArrayLike]], smallest_x: float
) -> dict[str, tuple[Floats, Floats]]:
    """The series as float64 from ``smallest_x`` on.

    Raises:
        RopewalkError: if there are none or too many, or one is empty, not finite, of two lengths, or its x
            do not rise.
    """
    check_count(what, len(series))
    checked = {}
    for name, (x, values) in series.items():
        at, value = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if at.ndim != 1 or at.shape != value.shape:
            raise RopewalkError(
                f"{what} of {name!r}: {at.shape} points and {value.shape} values do not match"
            )
        check_finite(f"{what} of {name!r}", at, value)
        if not (np.diff(at) > 0).all():
            raise RopewalkError(f"{what} of {name!r}: its points must rise")
        value, at = value[at >= smallest_x], at[at >= smallest_x]
        if not len(at):
            raise RopewalkError(f"{what} of {name!r}: there is no point from {smallest_x:g} on to draw")
        checked[shown_name(name)] = at, value
    return checked


def shown_name(name: str) -> str:
    """A name as a legend shows it: matplotlib leaves out what begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def check_count(what: str, count: int) -> None:
    """Raise RopewalkError unless there is something to draw, and no more than can be told apart."""
    if not count:
        raise RopewalkError(f"there is no {what} to draw")
    if count > MOST_SERIES:
        raise RopewalkError(f"a figure shows at most {MOST_SERIES} series, got {count} of {what}")


def check_finite(what: str, *values: ArrayLike) -> None:
    """Raise RopewalkError if a value is NaN or infinite."""
    if not all(np.isfinite(np.asarray(each, dtype=np.float64)).all() for each in values):
        raise RopewalkError(f"{what} has a value that is not finite")


def check_lengths(trained: int, target: int) -> None:
    """Raise RopewalkError unless ``1 <= trained <= target``."""
    if not 1 <= trained <= target:
        raise RopewalkError(f"a trained length of {trained} and a target of {target} cannot be drawn")


def add_caption(figure: Any, caption: str, axes_inches: float = SIZE_INCHES[1]) -> None:
    """Put a wrapped caption below the axes; the figure grows by it."""
    figure.set_size_inches(SIZE_INCHES[0], axes_inches)
    text = figure.supxlabel(
        "",
        x=0.014,
        ha="left",
        multialignment="left",
        linespacing=1.25,
        fontsize=CAPTION_SIZE,
        color=INK,
        parse_math=False,
    )
    for characters in range(CAPTION_CHARACTERS, CAPTION_CHARACTERS // 3, -5):
        text.set_text(fill(caption, characters))
        if text.get_window_extent(figure.canvas.get_renderer()).width <= 0.972 * figure.bbox.width:
            break
    lines = text.get_text().count("\n") + 1
    figure.set_size_inches(SIZE_INCHES[0], axes_inches + 0.1 + LINE_INCHES * lines)


def add_key(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend above the axes, in as many columns as fit the width of the figure."""
    for columns in range(min(4, len(labels)), 0, -1):
        legend = figure.legend(
            handles,
            [fill(label, KEY_CHARACTERS) for label in labels],
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            fontsize=9,
            handlelength=3,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        if legend.get_window_extent(figure.canvas.get_renderer()).width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def length_text(tokens: float) -> str:
    """``128k`` or ``1M`` where that is short and exact, ``5,437`` otherwise."""
    short = short_length(round(tokens))
    return f"{round(tokens):,}" if short.isdigit() else short


def length_axis(axis: Any, low: float, high: float) -> None:
    """A log2 axis from ``low`` to ``high`` tokens with ticks at powers of two."""
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", base=2)
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    powers = range(first, last + 1, max(1, math.ceil((last - first + 1) / MOST_LENGTH_TICKS)))
    # Between two powers of two the ends themselves are the ticks.
    fix_ticks(axis, [2.0**power for power in powers] or [low, high])


def linear_length_axis(axis: Any, high: int) -> None:
    """A linear axis from 0 to ``high`` tokens with ticks at multiples of a power of two."""
    step = 2 ** max(0, math.ceil(math.log2(high / 8)))
    fix_ticks(axis, [float(tick) for tick in range(0, high + 1, step)])


def fix_ticks(axis: Any, ticks: Iterable[float]) -> None:
    """Ticks at these lengths alone."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: length_text(value) if value else "0"))


def mark_length(axes: Any, length: float, text: str, left: bool = False) -> None:
    """A dashed vertical line at a length with its words at the top, to its right or left."""
    axes.axvline(length, color=INK, linestyle=(0, (2, 2)), linewidth=1)
    axes.annotate(
        text,
        (length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if left else 5, -4),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        color=INK,
        fontsize=9,
        bbox=PAPER,
    )
