"""Figures as values: panels with axes, and a few kinds of marks in them. No library for drawing is imported.

A function of ``figures`` makes a :class:`Figure` of plain results, a test compares it, and
:func:`ropewalk.reporting.drawing.draw` alone turns it into a file. Numbers are in the units of the axes; NaN is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style

Floats = NDArray[np.float64]
Numbers = Any
"""A row of numbers: given as any sequence or array, kept as a tuple of floats."""
Dash = str | tuple[int, tuple[float, ...]]
Ticks = tuple[tuple[float, str], ...]
Side = Literal["right", "left", "above", "below", "outside"]
ENVELOPE_BINS = 600
MOST_LENGTH_TICKS = 11
NARROWEST_LOG = 10.0
"""Highest over lowest end of a logarithmic axis, so that it has ticks."""


@dataclass(frozen=True)
class Look:
    """How a line or its points look.

    Attributes:
        colour: of line and marks.
        dash: of the line; empty for points alone.
        marker: of the points; empty for a line alone.
        hollow: whether marks are white inside.
        width: of the line, points.
        size: of the marks, points.
        edge: colour of the marks' edges, where it is not theirs.
        stroke: width of the marks' edges, points.
    """

    colour: str = style.BLUE
    dash: Dash = "-"
    marker: str | int = ""
    hollow: bool = False
    width: float = 1.8
    size: float = 6.0
    edge: str = ""
    stroke: float = 1.0


@dataclass(frozen=True)
class Fill:
    """How an area looks: ``face`` and ``edge`` are colours, none where empty; ``width`` is that of the edge."""

    face: str = ""
    edge: str = ""
    hatch: str = ""
    width: float = 1.0
    alpha: float = 1.0


def _numbers(mark: Any, *names: str) -> None:
    """Make fields tuples of floats.

    Raises:
        RopewalkError: if they are not all as long as the first, or a number is infinite.
    """
    for name in names:
        values = tuple(np.asarray(getattr(mark, name), dtype=np.float64).tolist())
        if any(map(math.isinf, values)):
            raise RopewalkError(f"{mark.name or 'a mark'} has a value that is not finite")
        if len(values) != len(getattr(mark, names[0])):
            raise RopewalkError(f"{mark.name or 'a mark'}: {names[0]} and {name} are not of one length")
        object.__setattr__(mark, name, values)


@dataclass(frozen=True)
class Line:
    """A line through points ``[n]``, or the points alone; NaN breaks it.

    Attributes:
        name: of the series, for the key of its panel.
        end: words beside the panel at the height of the last point.
        clip: whether marks at the edge are cut off there.
        raster: whether an SVG holds its points as an image.
    """

    x: Numbers
    y: Numbers
    look: Look = Look()
    name: str = ""
    end: str = ""
    clip: bool = True
    raster: bool = False
    order: float = 3

    def __post_init__(self) -> None:
        _numbers(self, "x", "y")


@dataclass(frozen=True)
class Steps:
    """Values ``[n]`` that hold from one of the edges ``[n + 1]`` to the next."""

    edges: Numbers
    y: Numbers
    look: Look = Look()
    name: str = ""
    order: float = 3

    def __post_init__(self) -> None:
        _numbers(self, "y")
        _numbers(self, "edges")
        if len(self.edges) != len(self.y) + 1:
            raise RopewalkError(f"{len(self.y)} steps need one edge more, got {len(self.edges)}")


@dataclass(frozen=True)
class Area:
    """What lies between ``low`` and ``high``, ``[n]`` each, over ``x``: a band of intervals."""

    x: Numbers
    low: Numbers
    high: Numbers
    fill: Fill
    name: str = ""
    order: float = 1

    def __post_init__(self) -> None:
        _numbers(self, "x", "low", "high")


@dataclass(frozen=True)
class Whiskers:
    """Intervals from ``low`` to ``high`` at places ``[n]``, upright, or lying where ``lying`` is true."""

    at: Numbers
    low: Numbers
    high: Numbers
    colour: str = style.INK
    lying: bool = False
    caps: float = 3.5
    name: str = ""
    order: float = 3

    def __post_init__(self) -> None:
        _numbers(self, "at", "low", "high")


@dataclass(frozen=True)
class Boxes:
    """Rectangles ``[n]``: bars, bands, holes left blank between them."""

    left: Numbers
    right: Numbers
    low: Numbers
    high: Numbers
    fill: Fill
    name: str = ""
    raster: bool = False
    order: float = 2

    def __post_init__(self) -> None:
        _numbers(self, "left", "right", "low", "high")


@dataclass(frozen=True)
class Rule:
    """A line across the whole panel at a value of one axis, with words beside it.

    Attributes:
        at: on the axis ``axis``.
        words: at the line.
        side: where the words stand: of a value of x ``right`` or ``left`` of the line at the top or (``foot``) at
            the bottom; of a value of y ``above`` or ``below`` the line at its left, or ``outside`` the panel.
        name: for the key.
    """

    at: float
    axis: Literal["x", "y"] = "x"
    words: str = ""
    side: Side = "right"
    foot: bool = False
    colour: str = style.INK
    dash: Dash = style.DOTTED
    width: float = 1.0
    name: str = ""
    order: float = 2


@dataclass(frozen=True)
class Span:
    """Everything between two values of one axis."""

    low: float
    high: float
    fill: Fill
    axis: Literal["x", "y"] = "x"
    name: str = ""
    order: float = 0


@dataclass(frozen=True)
class Note:
    """Words at a place.

    Attributes:
        x, y: where; None stands for the panel's edge: of x the right one, of y the lower one.
        dx, dy: from there, points.
        anchor: the side of the words that stands there.
        paper: whether something light lies behind the words.
    """

    text: str
    x: float | None
    y: float | None
    dx: float = 0.0
    dy: float = 0.0
    anchor: Literal["left", "centre", "right", "foot"] = "left"
    upright: bool = False
    size: float = 9.0
    bold: bool = False
    paper: bool = False
    colour: str = style.INK


@dataclass(frozen=True)
class HeatMap:
    """Cells ``[rows][columns]`` around whole numbers of both axes, coloured by value; those without one are hatched.

    Attributes:
        colours: ``even`` (cividis, dark to light), or ``dark`` for the darker the larger.
        low, high: values of the outermost colours.
        logarithmic: of the colours; what is below ``low`` is white.
        label: of the bar that says which colour is what.
        text: how its numbers are written, and those in the cells where there are any.
        numbers: size in points of a number in each cell; 0 for none.
    """

    values: tuple[Numbers, ...]
    colours: Literal["even", "dark"]
    low: float
    high: float
    label: str
    text: Callable[[float], str]
    logarithmic: bool = False
    numbers: float = 0.0


Mark = Line | Steps | Area | Whiskers | Boxes | Rule | Span | Note | HeatMap


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: what it shows, with the unit.
        scale: ``symlog`` is linear from 0 to ``linear_to``, and logarithmic beyond.
        limits: both ends, turned around where the first is the larger; None for what the marks need.
        ticks: all of them with their labels; None for round numbers.
        text: how round numbers are written; None for as many decimals as they need.
        most_ticks: of round numbers; 0 for as many as fit.
        whole: whether round numbers are whole ones.
        bold: places of ticks in ``ticks`` that are emphasised.
        rows: whether the ticks name rows, and need no marks beside them.
    """

    label: str = ""
    scale: Literal["linear", "log", "log2", "symlog"] = "linear"
    limits: tuple[float, float] | None = None
    ticks: Ticks | None = None
    text: Callable[[float], str] | None = None
    most_ticks: int = 0
    whole: bool = False
    bold: tuple[int, ...] = ()
    rows: bool = False
    linear_to: float = 1.0


@dataclass(frozen=True)
class Panel:
    """Marks in one pair of axes.

    Attributes:
        title: above the panel; emphasised where ``bold``.
        heading: two lines inside the panel at the top; the first loses its middle where it is too wide.
        key: whether marks with names stand in a key above the panel.
        grid: the axis whose ticks have lines.
    """

    marks: tuple[Mark, ...]
    x: Axis = Axis()
    y: Axis = Axis()
    title: str = ""
    bold: bool = False
    heading: tuple[str, str] | None = None
    key: bool = False
    grid: Literal["x", "y", ""] = "y"
    small: bool = False


@dataclass(frozen=True)
class Figure:
    """A whole picture.

    Attributes:
        panels: row by row.
        caption: a sentence or two below the panels.
        title: above them.
        height, width: inches; the height without title, key and caption.
        columns: panels beside each other.
        shared: whether all panels have the same axes, and only the outer ones numbers.
        y_label: of all panels together.
        heights: of the rows of panels, in relation to each other.
    """

    panels: tuple[Panel, ...]
    caption: str = ""
    title: str = ""
    height: float = style.HEIGHT_INCHES
    width: float = style.WIDTH_INCHES
    columns: int = 1
    shared: bool = False
    y_label: str = ""
    heights: tuple[float, ...] | None = None

    def alternative(self) -> str:
        """What the picture shows, for readers who do not see it."""
        return " ".join(filter(None, (self.title and f"{self.title.rstrip('.')}.", self.caption)))


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


def check_count(what: str, count: int, most: int = style.MOST_SERIES, things: str = "series") -> None:
    """Raise RopewalkError unless there is something to draw, and no more than can be told apart."""
    if not count:
        raise RopewalkError(f"there is no {what} to draw")
    if count > most:
        raise RopewalkError(f"a figure shows at most {most} {things}, got {count} of {what}")


def check_finite(what: str, *values: ArrayLike) -> None:
    """Raise RopewalkError if a value is NaN or infinite."""
    if not all(np.isfinite(np.asarray(each, dtype=np.float64)).all() for each in values):
        raise RopewalkError(f"{what} has a value that is not finite")


def check_amounts(what: str, values: ArrayLike) -> Floats:
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


def positive(what: str, values: Floats) -> Floats:
    """The positive values, which alone have a place on a logarithmic axis; RopewalkError if there is none."""
    found: Floats = values[values > 0]
    if not len(found):
        raise RopewalkError(f"there is no {what} above 0 to draw")
    return found


def alone(values: ArrayLike) -> NDArray[np.bool_]:
    """Which values have no finite neighbour and so no line: they need a mark of their own."""
    gap = np.isnan(np.concatenate([[np.nan], np.asarray(values, dtype=np.float64), [np.nan]]))
    found: NDArray[np.bool_] = ~gap[1:-1] & gap[:-2] & gap[2:]
    return found


def series_look(number: int, count: int, **changes: Any) -> Look:
    """Colour, dash and marker of one of up to four series; a single one takes the strong colour and a solid line."""
    number = 1 if count == 1 else number
    given = {
        "colour": style.COLOURS[number % 4],
        "dash": style.DASHES[number % 4],
        "marker": style.MARKERS[number % 4],
    }
    return Look(**{**given, **changes})


def series_fill(number: int, count: int) -> Fill:
    """Colour and hatch of the bars of one of up to four series; a single one is plain blue."""
    number = (1 if count == 1 else number) % 4
    return Fill(style.FILLS[number], style.COLOURS[number], style.HATCHES[number])


def band(x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: str) -> Area:
    """The band of a line of this colour."""
    return Area(x, low, high, Fill(colour, alpha=style.BAND_ALPHA))


def whiskers(at: ArrayLike, value: ArrayLike, low: ArrayLike, high: ArrayLike, **look: Any) -> Whiskers:
    """Intervals around values: rounding may have put an end past its value, which is then the end."""
    return Whiskers(at, np.fmin(low, value), np.fmax(high, value), **look)


def is_spread(low: float, high: float) -> bool:
    """Whether positive values spread so far that their axis is logarithmic."""
    return low > 0 and high >= style.LOG_RATIO * low


def value_axis(label: str, low: float, high: float, limits: tuple[float, float] | None = None) -> Axis:
    """An axis of values from ``low`` to ``high``, logarithmic where they are positive and spread far."""
    if not is_spread(low, high):
        return Axis(label, limits=limits)
    return Axis(label, "log", limits, text=style.tick_text)


def log_axis(label: str, low: float, high: float, room: tuple[float, float] = (0.06, 0.06)) -> Axis:
    """A logarithmic axis around positive values.

    Args:
        low, high: ends of the values; the axis is widened where they are closer than ``NARROWEST_LOG``.
        room: below and above them, in parts of the axis.
    """
    if high < NARROWEST_LOG * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(NARROWEST_LOG), middle * math.sqrt(NARROWEST_LOG)
    ratio = high / low
    return Axis(label, "log", (low / ratio ** room[0], high * ratio ** room[1]), text=style.number_text)


def length_ticks(lengths: Iterable[float]) -> Ticks:
    """These lengths, written as lengths are."""
    return tuple((float(each), style.length_text(each)) for each in lengths)


def power_ticks(low: float, high: float, most: int = MOST_LENGTH_TICKS) -> Ticks:
    """Powers of two between two lengths; between two powers of two the ends themselves."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    powers = range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))
    return length_ticks([2.0**power for power in powers] or [low, high])


def linear_length_ticks(high: int) -> Ticks:
    """Multiples of a power of two from 0 to a length."""
    step = 2 ** max(0, math.ceil(math.log2(high / 8)))
    return length_ticks(range(0, high + 1, step))


def spaced(lengths: Sequence[int], most: int) -> list[float]:
    """The lengths from the longest down that lie far enough apart on a logarithmic axis for ``most`` labels."""
    gap = math.log2(lengths[-1] / lengths[0]) / most
    kept = [float(lengths[-1])]
    for length in reversed(lengths[:-1]):
        if math.log2(kept[-1] / length) >= gap * (1 - 1e-9):
            kept.append(float(length))
    return kept[::-1]


def row_axis(names: Sequence[str], bold: Sequence[int] = (), label: str = "") -> Axis:
    """Names down the left side, the first at the top, row ``n`` at the height ``n``."""
    ticks = tuple(
        (float(row), fill(name, style.NAME_CHARACTERS, break_on_hyphens=False))
        for row, name in enumerate(names)
    )
    return Axis(label, limits=(len(names) - 0.45, -0.55), ticks=ticks, bold=tuple(bold), rows=True)


def index_ticks(labels: Sequence[str], most: int) -> Ticks:
    """Labels at whole numbers, at even steps from the first on, and at the last."""
    last = len(labels) - 1
    places = list(range(0, last + 1, max(1, -(-last // (most - 1)))))
    places[-1:] = [last] if last else [0]
    return tuple((float(place), labels[place]) for place in places)


def mark_length(length: float, name: str, low: float, high: float, late: float = 0.7) -> tuple[Rule, ...]:
    """A marked length on a logarithmic axis with its words, or nothing where it is not on the axis."""
    if not low < length < high:
        return ()
    is_late = math.log(length / low) > late * math.log(high / low)
    words = f"{name} {style.length_text(length)}"
    return (Rule(length, words=words, side=beside(is_late)),)


def beside(is_late: bool) -> Side:
    """The side of an upright line that has room for words: the left one of a line far to the right."""
    return "left" if is_late else "right"


def named(series: Mapping[str, Any], number: int) -> str:
    """The name of a series for the key; a single one needs none."""
    return list(series)[number] if len(series) > 1 else ""
