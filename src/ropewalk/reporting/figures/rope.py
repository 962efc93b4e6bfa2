"""Figures of RoPE theory: feasible bases, margins, decay, angles, periods, and the losses of a probe.

Nothing here knows how the values come about: every function takes plain numbers. All take ``title``, above the
panels, and ``caption``, one or two sentences below them (a fitting one is made where it is None or empty), and raise
RopewalkError if there is nothing to draw or a value is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style
from ropewalk.reporting.primitives import (
    Area,
    Axis,
    Boxes,
    Envelope,
    Figure,
    Fill,
    Floats,
    Line,
    Look,
    Mark,
    Note,
    Panel,
    Rule,
    Span,
    beside,
    check_count,
    check_finite,
    envelope,
    is_spread,
    length_ticks,
    linear_length_ticks,
    named,
    power_ticks,
    row_axis,
    series_look,
    value_axis,
    whiskers,
)
from ropewalk.reporting.style import BLUE, FILLS, GREY, INK, SHADE, VERMILION, base_text, length_text

DECAY_BINS = 100
"""Few enough for the patterns of several lines to be seen."""
PIXELS = 500
"""About the height of the axes."""
RASTERISED_BANDS = 1000
"""Intervals from which the bands of an SVG are an image inside it."""


def margin_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike, int | None]], title: str = "", caption: str | None = None
) -> Figure:
    """Similarity margin ``B(m)`` against distance, lowest to highest in narrow bins, one panel a series.

    Args:
        series: by name ``(m, B, context_bound)``: distances in tokens, rising, those below 1 not drawn; their
            margins; and the tokens up to which no margin is negative, None where that is all or not known.
    """
    values = _checked_series("margin", {name: each[:2] for name, each in series.items()}, 1)
    longest = max(float(m[-1]) for m, _ in values.values())
    several = len(values) > 1
    x = Axis("distance m (tokens)", "log2", (1, longest), power_ticks(1, longest))
    panels = []
    for name, each in values.items():
        marks = _margin_marks(envelope(*each), series[name][2], longest)
        heading = fill(name, style.TITLE_CHARACTERS) if several or not title else ""
        panels.append(Panel(tuple(marks), x, Axis("margin B(m)"), heading))
    words = (
        "Band: lowest to highest margin among neighbouring distances; line: the lowest, hatched where it is "
        "negative. Up to the dashed length, similar tokens get more attention than random ones at every distance."
    )
    return Figure(
        tuple(panels), caption or words, title, 1.0 + 1.75 * len(panels) if several else 4.0, shared=True
    )


def _margin_marks(curve: Envelope, bound: int | None, longest: float) -> list[Mark]:
    below = np.minimum(curve.low, 0)
    marks: list[Mark] = [
        Area(curve.x, curve.low, curve.high, Fill(FILLS[1])),
        Line(curve.x, curve.low, Look(width=1), name="lowest"),
        Area(curve.x, below, 0 * below, Fill(edge=VERMILION, hatch="////"), order=2.5),
        Rule(0, "y", dash="-"),
    ]
    if bound is not None and 1 <= bound <= longest:
        side = beside(bound > longest**0.72)
        marks.append(Rule(bound, words=f"B(m) ≥ 0 up to {length_text(bound)}", side=side))
    return marks


def decay_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]], title: str = "", caption: str | None = None
) -> Figure:
    """Upper bound of attention against relative distance, one line a series.

    Args:
        series: by name ``(m, bound)``: distances in tokens, rising, those below 1 not drawn; and their bounds.
    """
    values = _checked_series("bound", series, 1)
    curves = [envelope(*each, DECAY_BINS) for each in values.values()]
    longest = max(float(m[-1]) for m, _ in values.values())
    marks: list[Mark] = []
    for number, curve in enumerate(curves):
        look = series_look(number, len(curves), marker="")
        marks += [
            Area(curve.x, curve.low, curve.high, Fill(look.colour, alpha=0.13)),
            Line(curve.x, curve.mean, look, named(values, number)),
        ]
    x = Axis("relative distance (tokens)", "log2", (1, longest), power_ticks(1, longest))
    y = value_axis(
        "upper bound of attention", min(c.low.min() for c in curves), max(c.high.max() for c in curves)
    )
    words = (
        "How much attention a pair of tokens can get at most, by its distance: the higher a line stays, the "
        "slower attention decays. Line: mean of neighbouring distances; band: their lowest to highest."
    )
    return Figure((Panel(tuple(marks), x, y, key=True),), caption or words, title)


def slowest_pair_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    trained_length: int,
    target_length: int,
    title: str = "",
    caption: str | None = None,
) -> Figure:
    """Angle of the slowest pair against position, with the positions and the angles that training showed.

    Args:
        series: by name ``(position, angle)``: tokens, rising, and radians, unwrapped. The first series is the
            model as trained; its angles within the trained length are those that training showed.
        trained_length, target_length: tokens, ``1 <= trained_length <= target_length``.
    """
    _check_lengths(trained_length, target_length)
    curves = {name: (x, y / (2 * np.pi)) for name, (x, y) in _checked_series("angle", series, 0).items()}
    x, y = next(iter(curves.values()))
    seen = y[x <= trained_length]
    if not len(seen):
        raise RopewalkError(f"the first series has no position up to the trained length of {trained_length}")
    marks: list[Mark] = [
        Span(0, trained_length, Fill(SHADE), name="trained positions"),
        Span(
            seen.min(),
            seen.max(),
            Fill(edge="#8fa3b5", hatch="///"),
            "y",
            "angles seen in training",
            order=0.5,
        ),
    ]
    for number, (name, (x, y)) in enumerate(curves.items()):
        look = series_look(number, len(curves), width=2)
        marks += [
            Line(x, y, series_look(number, len(curves), width=2, marker=""), name),
            Line(x[-1:], y[-1:], look, clip=False),
        ]
    end = max(target_length, *(int(x[-1]) for x, _ in curves.values()))
    marks += [
        Rule(
            length,
            words=f"{name} length {length_text(length)}",
            side=beside(length > 0.7 * end),
        )
        for length, name in ((trained_length, "trained"), (target_length, "target"))
        if length < end
    ]
    lowest, highest = min(y.min() for _, y in curves.values()), max(y.max() for _, y in curves.values())
    # Room above for the words of the marked length.
    limits = min(0.0, 1.05 * lowest), 1.15 * highest or 1.0
    panel = Panel(
        tuple(marks),
        Axis("position (tokens)", limits=(0, end), ticks=linear_length_ticks(end)),
        Axis("angle of the slowest pair (turns of 2π)", limits=limits),
        key=True,
    )
    words = (
        f"Training showed positions up to {length_text(trained_length)} (shaded) and so only the hatched angles "
        f"of the slowest pair. A line that leaves the hatched band before {length_text(target_length)} asks the "
        "model for angles it has never seen."
    )
    return Figure((panel,), caption or words, title)


def periods_figure(
    series: Mapping[str, ArrayLike],
    trained_length: int,
    target_length: int,
    title: str = "",
    caption: str | None = None,
) -> Figure:
    """Period of every pair against its index; pairs with no full turn in training are hollow.

    Args:
        series: by name ``[pairs]`` periods in tokens, positive.
        trained_length, target_length: tokens, ``1 <= trained_length <= target_length``.
    """
    check_count("period", len(series))
    _check_lengths(trained_length, target_length)
    periods = {name: np.asarray(each, dtype=np.float64) for name, each in series.items()}
    for name, each in periods.items():
        check_finite(f"period of {name!r}", each)
        if each.ndim != 1 or not len(each) or (each <= 0).any():
            raise RopewalkError(f"period of {name!r}: a row of positive numbers of tokens is needed")
    marks: list[Mark] = [
        Span(trained_length, target_length, Fill(SHADE), "y"),
        Rule(trained_length, "y", f"trained length {length_text(trained_length)}", "below"),
        Rule(target_length, "y", f"target length {length_text(target_length)}", "above"),
    ]
    for number, each in enumerate(periods.values()):
        hollow, pair = each > trained_length, np.arange(len(each))
        look = series_look(number, len(periods), dash="", size=4)
        unseen = series_look(number, len(periods), dash="", size=5, hollow=True)
        marks += [
            Line(pair, each, Look(look.colour, width=0.8), order=1.5),
            Line(pair[~hollow], each[~hollow], look, named(periods, number)),
            Line(pair[hollow], each[hollow], unseen),
        ]
    low = min(each.min() for each in periods.values()) / 1.5
    high = max(target_length, *(each.max() for each in periods.values())) * 1.5
    most = max(len(each) for each in periods.values())
    panel = Panel(
        tuple(marks),
        Axis("pair of dimensions (0 turns fastest)", limits=(-0.5 - 0.01 * most, most - 0.5 + 0.01 * most)),
        Axis("period (tokens)", "log2", (low, high), power_ticks(low, high)),
        key=True,
    )
    counts = "; ".join(f"{name}: {(p > trained_length).sum()} of {len(p)}" for name, p in periods.items())
    words = (
        "Tokens that each pair of dimensions takes for a full turn. Hollow: pairs that never complete one within "
        f"the trained length ({counts})."
    )
    return Figure((panel,), caption or words, title)


def feasible_bases_figure(
    lengths: Sequence[int],
    feasible: Sequence[Sequence[tuple[float, float]]],
    safe_bases: Sequence[float | None],
    published: Mapping[int, float],
    ceiling: float,
    title: str = "",
) -> Figure:
    """Base against context length: a column of feasible bands a length, with the holes left blank.

    Args:
        lengths: ``[n]`` tokens, rising.
        feasible: ``[n]`` lists of intervals ``(low, high)`` of bases in rising order; a list may be empty.
        safe_bases: ``[n]`` bases from which all are feasible up to the ceiling; None where there is none.
        published: bases by length, marked with a cross; may be empty.
        ceiling: largest base that was looked at.
    """
    _check_bands(lengths, feasible, safe_bases, published, ceiling)
    at = np.log2([*lengths])
    bands = _bands(lengths, feasible, min(0.3, 0.36 * float(np.diff(at).min())) if len(at) > 1 else 0.3)
    lowest = min([*bands.low, *published.values()]) / 3
    highest = 2 * max([ceiling, *published.values()])
    longest, shortest = max([*lengths, *published]), min([*lengths, *published])
    # Room beside a single column, or it would be as wide as the figure.
    room = 2.0 ** (0.6 if longest > shortest else 2)
    ticks = length_ticks(lengths) if len(lengths) <= 11 else power_ticks(shortest, longest)
    infima = {length: each[0][0] for length, each in zip(lengths, feasible, strict=True) if each}
    safe = [np.nan if base is None else base for base in safe_bases]
    marks: list[Mark] = [
        bands,
        Rule(ceiling, "y"),
        Line(lengths, safe, Look(BLUE, "-", "D", width=1.4, size=5), "safe base"),
        Line([*infima], [*infima.values()], Look(INK, "", style.CARET_UP, size=7), "infimum", order=4),
    ]
    if published:
        cross = Look(VERMILION, "", "x", size=8, stroke=2)
        marks.append(Line([*published], [*published.values()], cross, "published", order=5))
    panel = Panel(
        tuple(marks),
        Axis("context length (tokens)", "log2", (shortest / room, longest * room), ticks),
        Axis("RoPE base", "log", (lowest, highest), text=base_text),
        key=True,
    )
    thin = (highest / lowest) ** (1 / PIXELS)
    narrow = any(high < low * thin for low, high in zip(bands.low, bands.high, strict=True))
    pale = " (paler where bands and holes are too narrow to tell apart)" if narrow else ""
    words = (
        f"Filled: bases whose margin B(m) is nowhere negative up to the context length{pale}; blank gaps in a "
        f"column are holes. From the safe base up to {base_text(ceiling)} (dashed), the largest base examined, "
        "there is no hole."
    )
    return Figure((panel,), words, title, 4.6)


def _bands(
    lengths: Sequence[int], feasible: Sequence[Sequence[tuple[float, float]]], half_octaves: float
) -> Boxes:
    """One box an interval, ``half_octaves`` to either side of its length."""
    sides = 2.0**half_octaves
    corners = np.array(
        [
            (length / sides, length * sides, *ends)
            for length, bands in zip(lengths, feasible, strict=True)
            for ends in bands
        ]
    )
    left, right, low, high = corners.T
    raster = len(corners) > RASTERISED_BANDS
    return Boxes(left, right, low, high, Fill(FILLS[1]), "feasible bases", raster)


def _check_bands(
    lengths: Sequence[int],
    feasible: Sequence[Sequence[tuple[float, float]]],
    safe_bases: Sequence[float | None],
    published: Mapping[int, float],
    ceiling: float,
) -> None:
    if not any(len(bands) for bands in feasible):
        raise RopewalkError("there is no feasible base to draw")
    if not len(lengths) == len(feasible) == len(safe_bases):
        raise RopewalkError(
            f"{len(lengths)} lengths, {len(feasible)} lists of intervals and {len(safe_bases)} safe bases do not match"
        )
    safe = [base for base in safe_bases if base is not None]
    ends = np.array([ends for bands in feasible for ends in bands], dtype=np.float64)
    numbers = [*published.values(), *published, *safe, ceiling]
    check_finite("the set of feasible bases", lengths, ends, numbers)
    if min(lengths) < 1 or (np.diff(lengths) <= 0).any():
        raise RopewalkError("lengths of feasible bases must be positive and rise")
    if (ends[:, 0] > ends[:, 1]).any() or min(ends.min(), *numbers) <= 0:
        raise RopewalkError("feasible bases must be intervals (low, high) of positive numbers")


def probe_figure(
    rows: Sequence[tuple[str, float, float, float]], title: str = "", caption: str | None = None
) -> Figure:
    """Losses with 95 % intervals, one row each from the top, the lowest loss emphasised.

    Bars where they can begin at 0; points where the losses lie too close together for that, or so far apart
    that the axis is logarithmic.

    Args:
        rows: ``(name, loss, low, high)`` in nats a token, in the order to show.
    """
    check_count("loss", len(rows), len(rows))
    loss, low, high = np.array([row[1:] for row in rows], dtype=np.float64).T
    check_finite("loss", loss, low, high)
    axis, is_bars = _loss_axis(float(low.min()), float(high.max()))
    best = int(loss.argmin())
    marks: list[Mark] = []
    for row in range(len(rows)):
        is_best = row == best
        one = loss[row : row + 1], [row]
        look = Look(BLUE, "", "D", size=6) if is_best else Look(INK, "", "o", hollow=True, size=5)
        if is_bars:
            strong = Fill(FILLS[1], BLUE, "///", 1.4) if is_best else Fill("white", GREY)
            marks.append(Boxes([0], one[0], [row - 0.33], [row + 0.33], strong))
        marks += [
            whiskers([row], one[0], low[row : row + 1], high[row : row + 1], colour=look.colour, lying=True),
            Line(*one, look, order=4),
            Note(f"{loss[row]:.3f}", None, row, 6, bold=is_best),
        ]
    panel = Panel(tuple(marks), axis, row_axis([row[0] for row in rows], [best]), grid="x")
    words = (
        f"Mean loss with its 95 % interval; lower is better, lowest: {rows[best][0]}. Where intervals overlap, "
        "these losses alone do not decide the order."
    )
    return Figure((panel,), caption or words, title, max(1.6, 0.9 + 0.32 * len(rows)))


def _loss_axis(low: float, high: float) -> tuple[Axis, bool]:
    """An axis of losses, and whether bars can stand on it: logarithmic, from 0, or where 0 would hide differences."""
    label = "loss (nats a token{})"
    if is_spread(low, high):
        limits = low / 1.15, high * 1.15
        return Axis(label.format("; logarithmic"), "log", limits, text=style.tick_text), False
    room = 0.06 * ((high - low) or high or 1)
    if low > 0.7 * high:
        return Axis(label.format("; the axis does not begin at 0"), limits=(low - room, high + room)), False
    return Axis(label.format(""), limits=(min(0, low), high + room)), True


def _checked_series(
    what: str, series: Mapping[str, Sequence[ArrayLike]], smallest_x: float
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
        checked[name] = at, value
    return checked


def _check_lengths(trained: int, target: int) -> None:
    """Raise RopewalkError unless ``1 <= trained <= target``."""
    if not 1 <= trained <= target:
        raise RopewalkError(f"a trained length of {trained} and a target of {target} cannot be drawn")
