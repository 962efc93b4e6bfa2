"""Describe figures as values: panels, axes and marks. Imports no plotting library.

The modules beside this one build a :class:`Figure` from plain results, tests compare it, and only
:func:`ropewalk.reporting.figures.drawing.draw` turns it into a file. Numbers are in the units of the axes; NaN is a
gap.
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
"""Numbers given as any sequence or array and stored as a tuple of floats."""
Dash = str | tuple[int, tuple[float, ...]]
Ticks = tuple[tuple[float, str], ...]
Side = Literal["right", "left", "above", "below", "outside"]
ENVELOPE_BINS = 600
MOST_LENGTH_TICKS = 11
MOST_TOLD = 12
"""Largest number of points of a series that a text alternative lists."""
NARROWEST_LOG = 10.0
"""Smallest ratio between the ends of a logarithmic axis; a narrower one may contain no tick."""


@dataclass(frozen=True)
class Look:
    """Style of a line or of its markers.

    Attributes:
        colour: colour of the line and the markers.
        dash: dash pattern of the line; empty draws markers without a line.
        marker: marker shape; empty draws a line without markers.
        hollow: whether markers are white inside.
        width: line width in points.
        size: marker size in points.
        edge: colour of marker edges; empty for the marker's colour.
        stroke: width of marker edges in points.
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
    """Style of an area. ``face`` and ``edge`` are colours, empty for none; ``width`` is the edge's width in points."""

    face: str = ""
    edge: str = ""
    hatch: str = ""
    width: float = 1.0
    alpha: float = 1.0


def _numbers(mark: Any, *names: str) -> None:
    """Convert fields to tuples of floats.

    Raises:
        RopewalkError: if their lengths differ, or a number is infinite.
    """
    for name in names:
        values = tuple(np.asarray(getattr(mark, name), dtype=np.float64).tolist())
        if any(map(math.isinf, values)):
            raise RopewalkError(f"{mark.name or 'a mark'} has an infinite value; use NaN for a missing value")
        if len(values) != len(getattr(mark, names[0])):
            raise RopewalkError(
                f"{mark.name or 'a mark'} has {len(getattr(mark, names[0]))} values of {names[0]!r}, but "
                f"{len(values)} of {name!r}; give equally many"
            )
        # The marks are frozen dataclasses, so a plain assignment would raise.
        object.__setattr__(mark, name, values)


@dataclass(frozen=True)
class Line:
    """A line through points ``[n]``, or the points alone. NaN breaks the line.

    Attributes:
        name: name of the series in the panel's key.
        end: label to the right of the panel, at the height of the last point.
        clip: whether markers are clipped at the edge of the panel.
        raster: whether an SVG stores the points as an image.
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
    """A step line: value ``i`` of ``[n]`` spans from edge ``i`` to edge ``i + 1`` of ``[n + 1]``."""

    edges: Numbers
    y: Numbers
    look: Look = Look()
    name: str = ""
    order: float = 3

    def __post_init__(self) -> None:
        _numbers(self, "y")
        _numbers(self, "edges")
        if len(self.edges) != len(self.y) + 1:
            raise RopewalkError(
                f"edges must have {len(self.y) + 1} values, one more than y, got {len(self.edges)}"
            )


@dataclass(frozen=True)
class Area:
    """A filled band between ``low`` and ``high``, ``[n]`` each, over ``x``."""

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
    """Error bars from ``low`` to ``high`` at positions ``[n]``; vertical, or horizontal if ``lying`` is true."""

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
    """Rectangles ``[n]``, drawn as bars or as bands with gaps between them."""

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
    """A line across the whole panel at a value of one axis, with an optional label.

    Attributes:
        at: value on the axis ``axis``.
        words: label of the line.
        side: position of the label. For a vertical line: ``right`` or ``left`` of it, at the top, or at the bottom if
            ``foot``. For a horizontal line: ``above`` or ``below`` its left end, or ``outside`` the panel.
        name: name in the key.
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
    """A filled band across the panel between two values of one axis."""

    low: float
    high: float
    fill: Fill
    axis: Literal["x", "y"] = "x"
    name: str = ""
    order: float = 0


@dataclass(frozen=True)
class Note:
    """Text at a position.

    Attributes:
        x, y: position. None for x is the panel's right edge, None for y its lower edge.
        dx, dy: offset from there in points.
        anchor: the side of the text that is aligned with the position.
        paper: whether the text has a light background.
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
    """Cells ``[rows][columns]`` centred on the integers of both axes and coloured by value; NaN cells are hatched.

    Attributes:
        colours: ``even`` for cividis (dark to light), or ``dark`` for darker colours at larger values.
        low, high: values at the ends of the colour scale.
        logarithmic: whether the colour scale is logarithmic; values below ``low`` are white.
        label: label of the colour bar.
        text: formats the numbers at the colour bar and in the cells.
        numbers: font size in points of the number in each cell; 0 for no numbers.
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
        label: quantity and unit.
        scale: ``symlog`` is linear from 0 to ``linear_to`` and logarithmic beyond.
        limits: both ends; the axis is inverted if the first is larger. None fits the marks.
        ticks: all ticks with their labels. None for round numbers.
        text: formats round numbers. None for as many decimals as they need.
        most_ticks: largest number of ticks at round numbers; 0 for as many as fit.
        whole: whether ticks at round numbers are integers.
        bold: indices in ``ticks`` of the labels set in bold.
        rows: whether the ticks are names of rows, drawn without tick marks.
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
        title: text above the panel, in bold if ``bold``.
        heading: two lines inside the panel at the top. The first is shortened in the middle if it is too wide.
        key: whether named marks are listed in a key above the panel.
        grid: axis that has grid lines.
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
    """A complete figure.

    Attributes:
        panels: panels in row-major order.
        caption: one or two sentences below the panels.
        title: text above the panels.
        height, width: inches. The height excludes title, key and caption.
        columns: number of panels side by side.
        shared: whether all panels share their axes, so that only the outer ones have tick labels.
        y_label: common label of all vertical axes.
        heights: relative heights of the rows of panels.
        told: what each series shows, as parts of the sentence that is the text alternative.
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
    told: tuple[str, ...] = ()

    def alternative(self) -> str:
        """Text alternative for readers who cannot see the figure: its title, and what the panels show."""
        told = "; ".join(filter(None, self.told))
        title = self.title and f"{self.title.rstrip('.')}."
        return " ".join(filter(None, (title, told and f"{told}.")))


def tell(
    name: str,
    x: ArrayLike,
    y: ArrayLike,
    place: Callable[[float], str],
    value: Callable[[float], str] = style.number_text,
) -> str:
    """Say the values of a series for a text alternative, or only the ends and extremes of a long one.

    Args:
        name: name of the series; empty for a single one.
        x, y: ``[n]``; points whose y is NaN are left out.
        place, value: format an x and a y.
    """
    known = [
        (float(a), float(b)) for a, b in zip(np.asarray(x), np.asarray(y), strict=True) if math.isfinite(b)
    ]
    if not known:
        return f"{name}: no value".removeprefix(": ")
    words = [f"{value(b)} at {place(a)}" for a, b in known]
    if len(known) > MOST_TOLD:
        low, high = (known.index(end(known, key=lambda each: each[1])) for end in (min, max))
        ends = (0, len(known) - 1)
        extremes = [f"{name} {words[n]}" for name, n in (("lowest", low), ("highest", high)) if n not in ends]
        words = [f"from {words[0]} to {words[-1]}", *extremes]
    return f"{name}: {', '.join(words)}".removeprefix(": ")


class Envelope(NamedTuple):
    """Lowest, mean and highest value in bins of equal width in ``log2 x``. Empty bins are left out.

    Attributes:
        x: ``[n]``, geometric mean of the first and last x of each bin; exact for a bin with one point.
        low, mean, high: ``[n]``, over the values in each bin.
    """

    x: Floats
    low: Floats
    mean: Floats
    high: Floats


def envelope(x: ArrayLike, values: ArrayLike, bins: int = ENVELOPE_BINS) -> Envelope:
    """Reduce a long series to at most ``bins`` points, keeping every extreme.

    Args:
        x: ``[n]``, positive and increasing.
        values: ``[n]``, finite.
        bins: largest number of points in the result.
    """
    at, value = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    log = np.log2(at)
    # A series with a single x has no width to divide by.
    width = (log[-1] - log[0]) / bins or 1.0
    # The last point falls on the upper edge of the last bin, which belongs to that bin.
    number = np.minimum(((log - log[0]) / width).astype(np.int64), bins - 1)
    # Bins are numbered from 0, so -1 in front makes the first point begin a bin.
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(at)) - 1
    return Envelope(
        np.where(first == last, at[first], np.sqrt(at[first] * at[last])),
        np.minimum.reduceat(value, first),
        # reduceat sums each bin in one pass; a loop over bins would dominate at millions of distances.
        np.add.reduceat(value, first) / (last - first + 1),
        np.maximum.reduceat(value, first),
    )


def check_count(what: str, count: int, most: int = style.MOST_SERIES, things: str = "series") -> None:
    """Raise RopewalkError if there is nothing to draw, or more than a reader can tell apart."""
    if not count:
        raise RopewalkError(f"there is no {what} to draw")
    if count > most:
        raise RopewalkError(f"{what}: a figure shows at most {most} {things}, got {count}")


def check_finite(what: str, *values: ArrayLike) -> None:
    """Raise RopewalkError if a value is NaN or infinite."""
    if not all(np.isfinite(np.asarray(each, dtype=np.float64)).all() for each in values):
        raise RopewalkError(f"{what} has a value that is not finite")


def check_amounts(what: str, values: ArrayLike) -> Floats:
    """Convert values to float64. NaN is allowed.

    Raises:
        RopewalkError: if a value is negative or infinite, or all are NaN.
    """
    value = np.asarray(values, dtype=np.float64)
    if np.isinf(value).any() or (value < 0).any():
        raise RopewalkError(
            f"{what} must be finite and 0 or more, got {value[np.isinf(value) | (value < 0)][0]:g}"
        )
    if not np.isfinite(value).any():
        raise RopewalkError(f"there is no finite {what} to draw")
    return value


def positive(what: str, values: Floats) -> Floats:
    """Select the positive values, the only ones that a logarithmic axis can show; RopewalkError if there are none."""
    found: Floats = values[values > 0]
    if not len(found):
        raise RopewalkError(f"there is no {what} above 0 to draw on a logarithmic axis")
    return found


def alone(values: ArrayLike) -> NDArray[np.bool_]:
    """Which values have no finite neighbour. No line reaches them, so they need a marker."""
    # Padding with NaN makes the first and last value lack a neighbour on the outside.
    gap = np.isnan(np.concatenate([[np.nan], np.asarray(values, dtype=np.float64), [np.nan]]))
    found: NDArray[np.bool_] = ~gap[1:-1] & gap[:-2] & gap[2:]
    return found


def series_look(number: int, count: int, **changes: Any) -> Look:
    """Style of one of up to four series. A single series gets the strong colour and a solid line."""
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
    """Build error bars around values. If rounding put an end past its value, the value becomes the end."""
    return Whiskers(at, np.fmin(low, value), np.fmax(high, value), **look)


def is_spread(low: float, high: float) -> bool:
    """Whether values are positive and spread far enough for a logarithmic axis."""
    return low > 0 and high >= style.LOG_RATIO * low


def value_axis(label: str, low: float, high: float, limits: tuple[float, float] | None = None) -> Axis:
    """Build an axis for values from ``low`` to ``high``, logarithmic if they are positive and spread far."""
    if not is_spread(low, high):
        return Axis(label, limits=limits)
    return Axis(label, "log", limits, text=style.tick_text)


def log_axis(label: str, low: float, high: float, room: tuple[float, float] = (0.06, 0.06)) -> Axis:
    """Build a logarithmic axis around positive values.

    Args:
        low, high: smallest and largest value. The axis is widened if their ratio is below ``NARROWEST_LOG``.
        room: margins below and above, as shares of the axis.
    """
    if high < NARROWEST_LOG * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(NARROWEST_LOG), middle * math.sqrt(NARROWEST_LOG)
    # On a logarithmic axis, a power of the ratio of its ends is a share of its length.
    ratio = high / low
    return Axis(label, "log", (low / ratio ** room[0], high * ratio ** room[1]), text=style.number_text)


def length_ticks(lengths: Iterable[float]) -> Ticks:
    """Build a tick at each length, labelled in the style of lengths (``128k``)."""
    return tuple((float(each), style.length_text(each)) for each in lengths)


def power_ticks(low: float, high: float, most: int = MOST_LENGTH_TICKS) -> Ticks:
    """Build ticks at powers of two between two lengths, or at both ends if no power of two lies between them."""
    # The tolerance keeps ends that are powers of two despite rounding in log2.
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    powers = range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))
    return length_ticks([2.0**power for power in powers] or [low, high])


def linear_length_ticks(high: int) -> Ticks:
    """Build ticks at multiples of a power of two from 0 to a length."""
    # Steps of an eighth or more give nine ticks at most.
    step = 2 ** max(0, math.ceil(math.log2(high / 8)))
    return length_ticks(range(0, high + 1, step))


def spaced(lengths: Sequence[int], most: int) -> list[float]:
    """Select lengths, starting from the longest, that leave room for ``most`` labels on a logarithmic axis."""
    gap = math.log2(lengths[-1] / lengths[0]) / most
    kept = [float(lengths[-1])]
    for length in reversed(lengths[:-1]):
        # The tolerance keeps lengths at equal ratios despite rounding in log2.
        if math.log2(kept[-1] / length) >= gap * (1 - 1e-9):
            kept.append(float(length))
    return kept[::-1]


def row_axis(names: Sequence[str], bold: Sequence[int] = (), label: str = "") -> Axis:
    """Build a vertical axis of names with the first at the top; row ``n`` is at y = ``n``."""
    ticks = tuple(
        (float(row), fill(name, style.NAME_CHARACTERS, break_on_hyphens=False))
        for row, name in enumerate(names)
    )
    return Axis(label, limits=(len(names) - 0.45, -0.55), ticks=ticks, bold=tuple(bold), rows=True)


def index_ticks(labels: Sequence[str], most: int) -> Ticks:
    """Build at most ``most`` ticks at integers: evenly spaced from the first label, and the last one."""
    last = len(labels) - 1
    places = list(range(0, last + 1, max(1, -(-last // (most - 1)))))
    # The last label replaces the tick before it, with which it could overlap.
    places[-1:] = [last] if last else [0]
    return tuple((float(place), labels[place]) for place in places)


def mark_length(length: float, name: str, low: float, high: float, late: float = 0.7) -> tuple[Rule, ...]:
    """Build a labelled line at a length on a logarithmic axis; empty if the length is outside the axis."""
    if not low < length < high:
        return ()
    is_late = math.log(length / low) > late * math.log(high / low)
    words = f"{name} {style.length_text(length)}"
    return (Rule(length, words=words, side=beside(is_late)),)


def beside(is_late: bool) -> Side:
    """The side of a vertical line that has room for a label: left if the line is far to the right."""
    return "left" if is_late else "right"


def named(series: Mapping[str, Any], number: int) -> str:
    """Name of a series for the key; empty for a single series, which needs no key."""
    return list(series)[number] if len(series) > 1 else ""
