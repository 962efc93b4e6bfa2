"""Draw RoPE theory: feasible bases, margins, decay, angles, periods, and the losses of a probe.

All functions take plain numbers and a ``title`` above the panels. Each raises RopewalkError if there is nothing to draw
or a value is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    Axes,
    Figure,
    area,
    beside,
    boxes,
    canvas,
    complete,
    end_label,
    label,
    look,
    note,
    panel_title,
    row_scale,
    rule,
    scale,
    series_look,
    value_scale,
    whiskers,
)
from ropewalk.reporting.figures.prepare import (
    Envelope,
    Floats,
    check_count,
    check_finite,
    envelope,
    is_spread,
    length_ticks,
    linear_length_ticks,
    power_ticks,
    tell,
)
from ropewalk.reporting.style import (
    BLUE,
    FILLS,
    GREY,
    INK,
    SHADE,
    VERMILION,
    base_text,
    length_text,
    tokens_text,
)

DECAY_BINS = 100
"""Number of bins of a decay curve: few enough to keep dash patterns visible."""
PIXELS = 500
"""Approximate height of the axes in pixels."""
RASTERISED_BANDS = 1000
"""Number of intervals above which an SVG stores the bands as an image."""


def margin_figure(series: Mapping[str, tuple[ArrayLike, ArrayLike, int | None]], title: str = "") -> Figure:
    """Draw the similarity margin ``B(m)`` against distance, one panel per series.

    Args:
        series: ``(m, B, context_bound)`` by name: increasing distances in tokens (those below 1 are not drawn), their
            margins, and the distance up to which no margin is negative (None if unknown or beyond the last distance).
    """
    values = _checked_series("margin", {name: each[:2] for name, each in series.items()}, 1)
    longest = max(float(m[-1]) for m, _ in values.values())
    several = len(values) > 1
    curves = {name: envelope(*each) for name, each in values.items()}
    panels = canvas(len(values), height=1.0 + 1.75 * len(values) if several else 4.0, shared=True)
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        scale(axes.xaxis, "distance m (tokens)", "log2", (1, longest), power_ticks(1, longest))
        scale(axes.yaxis, "margin B(m)")
        _draw_margin(axes, curve, series[name][2], longest)
        if several or not title:
            panel_title(axes, fill(name, style.TITLE_CHARACTERS))
    caption = (
        "The band spans the lowest to the highest margin of neighbouring distances. The line is the lowest margin, "
        "hatched where negative. Up to the dashed line, similar tokens get more attention than random ones at every "
        "distance."
    )
    told = (
        tell(f"lowest margin of {name}", curve.x, curve.low, tokens_text) for name, curve in curves.items()
    )
    return complete(panels, title, caption, told)


def _draw_margin(axes: Axes, curve: Envelope, bound: int | None, longest: float) -> None:
    axes.fill_between(curve.x, curve.low, curve.high, **area(FILLS[1]), zorder=1)
    axes.plot(curve.x, curve.low, label="lowest", **look(width=1))
    # Hatch only the part of the band below zero.
    below = {**area(edge=VERMILION, hatch="////"), "linewidth": 0, "zorder": 2.5}
    axes.fill_between(curve.x, np.minimum(curve.low, 0), 0, **below)
    rule(axes, 0, across=True, dash="-")
    if bound is not None and 1 <= bound <= longest:
        # longest**0.72 lies at 72 % of a logarithmic axis from 1.
        rule(axes, bound, f"B(m) ≥ 0 up to {length_text(bound)}", beside(bound > longest**0.72))


def decay_figure(series: Mapping[str, tuple[ArrayLike, ArrayLike]], title: str = "") -> Figure:
    """Draw the upper bound of attention against relative distance, one line per series.

    Args:
        series: ``(m, bound)`` by name: increasing distances in tokens (those below 1 are not drawn) and their bounds.
    """
    values = _checked_series("bound", series, 1)
    curves = [envelope(*each, DECAY_BINS) for each in values.values()]
    longest = max(float(m[-1]) for m, _ in values.values())
    (axes,) = canvas()
    scale(axes.xaxis, "relative distance (tokens)", "log2", (1, longest), power_ticks(1, longest))
    low, high = min(each.low.min() for each in curves), max(each.high.max() for each in curves)
    value_scale(axes.yaxis, "upper bound of attention", low, high)
    for number, (name, curve) in enumerate(zip(values, curves, strict=True)):
        options = series_look(number, len(curves), marker="")
        axes.fill_between(curve.x, curve.low, curve.high, **area(options["color"], alpha=0.13), zorder=1)
        axes.plot(curve.x, curve.mean, label=label(name), **options)
        if len(curves) > 1:
            end_label(axes, name, curve.x, curve.mean, options["color"])
    caption = (
        "Upper bound of the attention between two tokens at a distance; a line that stays higher means slower decay. "
        "Lines are means over neighbouring distances, and bands span their lowest to highest values."
    )
    told = (
        tell(f"upper bound of {name}", curve.x, curve.mean, tokens_text)
        for name, curve in zip(values, curves, strict=True)
    )
    return complete([axes], title, caption, told)


def slowest_pair_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    trained_length: int,
    target_length: int,
    title: str = "",
) -> Figure:
    """Draw the angle of the slowest rotary pair against position, with the positions and angles seen in training.

    Args:
        series: ``(position, angle)`` by name: increasing positions in tokens and unwrapped angles in radians. The first
            series is the model as trained; its angles within the trained length are those seen in training.
        trained_length, target_length: tokens, ``1 <= trained_length <= target_length``.
    """
    _check_lengths(trained_length, target_length)
    curves = {name: (x, y / (2 * np.pi)) for name, (x, y) in _checked_series("angle", series, 0).items()}
    x, y = next(iter(curves.values()))
    # Only the unchanged model was trained, so its angles alone are the ones seen in training.
    seen = y[x <= trained_length]
    end = max(target_length, *(int(x[-1]) for x, _ in curves.values()))
    lowest, highest = min(y.min() for _, y in curves.values()), max(y.max() for _, y in curves.values())
    (axes,) = canvas()
    scale(axes.xaxis, "position (tokens)", limits=(0, end), ticks=linear_length_ticks(end))
    # Leave room above the lines for the labels of the marked lengths.
    limits = min(0.0, 1.05 * lowest), 1.15 * highest or 1.0
    scale(axes.yaxis, "angle of the slowest pair (turns of 2π)", limits=limits)
    axes.axvspan(0, trained_length, label="trained positions", **area(SHADE), zorder=0)
    hatched = {**area(edge="#8fa3b5", hatch="///"), "linewidth": 0, "zorder": 0.5}
    axes.axhspan(seen.min(), seen.max(), label="angles seen in training", **hatched)
    for number, (name, (x, y)) in enumerate(curves.items()):
        options = series_look(number, len(curves), width=2)
        axes.plot(x, y, **{**options, "marker": "none"})
        axes.plot(x[-1:], y[-1:], clip_on=False, **options)
        end_label(axes, name, x, y, options["color"])
    for length, name in ((trained_length, "trained"), (target_length, "target")):
        # A line at the very end of the axis would coincide with the frame.
        if length < end:
            rule(axes, length, f"{name} length {length_text(length)}", beside(length > 0.7 * end))
    caption = (
        f"Training covered positions up to {length_text(trained_length)} (shaded), which gave the slowest rotary pair "
        f"only the hatched angles. A line that leaves the hatched band before {length_text(target_length)} reaches "
        "angles not seen in training."
    )
    told = (
        f"{name}: the angle of the slowest pair reaches {style.number_text(y[-1])} turns at {tokens_text(x[-1])}"
        for name, (x, y) in curves.items()
    )
    training = (
        f"angles seen in training: {style.number_text(seen.min())} to {style.number_text(seen.max())} turns"
    )
    return complete([axes], title, caption, (*told, training), keys=[axes])


def periods_figure(
    series: Mapping[str, ArrayLike],
    trained_length: int,
    target_length: int,
    title: str = "",
) -> Figure:
    """Draw the period of every rotary pair against its index. Pairs that complete no turn in training are hollow.

    Args:
        series: periods ``[pairs]`` in tokens by name, positive.
        trained_length, target_length: tokens, ``1 <= trained_length <= target_length``.
    """
    check_count("period", len(series))
    _check_lengths(trained_length, target_length)
    periods = {name: np.asarray(each, dtype=np.float64) for name, each in series.items()}
    for name, each in periods.items():
        check_finite(f"period of {name!r}", each)
    low = min(each.min() for each in periods.values()) / 1.5
    high = max(target_length, *(each.max() for each in periods.values())) * 1.5
    most = max(len(each) for each in periods.values())
    (axes,) = canvas()
    x_limits = -0.5 - 0.01 * most, most - 0.5 + 0.01 * most
    scale(axes.xaxis, "rotary pair (0 turns fastest)", limits=x_limits)
    scale(axes.yaxis, "period (tokens)", "log2", (low, high), power_ticks(low, high))
    axes.axhspan(trained_length, target_length, **area(SHADE), zorder=0)
    rule(axes, trained_length, f"trained length {length_text(trained_length)}", "below", across=True)
    rule(axes, target_length, f"target length {length_text(target_length)}", "above", across=True)
    for number, (name, each) in enumerate(periods.items()):
        hollow, pair = each > trained_length, np.arange(len(each))
        options = series_look(number, len(periods), dash="-", width=0.8, size=4, order=1.5)
        axes.plot(pair, each, label=label(name), **options)
        # Hollow markers cover the filled ones of the same pairs.
        unseen = series_look(number, len(periods), dash="", size=5, hollow=True)
        axes.plot(pair[hollow], each[hollow], **unseen)
    counts = "; ".join(f"{name}: {(p > trained_length).sum()} of {len(p)}" for name, p in periods.items())
    caption = (
        "Period of each rotary pair: the tokens it takes for a full turn. Hollow markers are pairs that do not "
        f"complete a turn within the trained length ({counts})."
    )
    told = (
        f"{name}: periods from {style.number_text(each.min())} to {style.number_text(each.max())} tokens, of which "
        f"{(each > trained_length).sum()} of {len(each)} are longer than the trained {trained_length:,} tokens"
        for name, each in periods.items()
    )
    target = f"target length: {target_length:,} tokens"
    keys = [axes] if len(periods) > 1 else []
    return complete([axes], title, caption, (*told, target), keys=keys)


def feasible_bases_figure(
    lengths: Sequence[int],
    feasible: Sequence[Sequence[tuple[float, float]]],
    safe_bases: Sequence[float | None],
    published: Mapping[int, float],
    ceiling: float,
    title: str = "",
) -> Figure:
    """Draw the feasible bases of each context length as a column of bands, with gaps for infeasible bases.

    Args:
        lengths: ``[n]`` increasing context lengths in tokens.
        feasible: ``[n]`` lists of intervals ``(low, high)`` of bases in increasing order; a list may be empty.
        safe_bases: ``[n]`` bases above which all bases up to the ceiling are feasible; None if there is none.
        published: published bases by length, marked with a cross; may be empty.
        ceiling: largest base searched.
    """
    if not any(len(bands) for bands in feasible):
        raise RopewalkError("there is no feasible base to draw")
    at = np.log2([*lengths])
    # Narrow enough for columns of neighbouring lengths not to touch; a share of an octave to either side.
    sides = 2.0 ** (min(0.3, 0.36 * float(np.diff(at).min())) if len(at) > 1 else 0.3)
    ends = np.array([each for bands in feasible for each in bands])
    columns = np.repeat(np.array(lengths, np.float64), [len(bands) for bands in feasible])
    lowest = min([*ends[:, 0], *published.values()]) / 3
    highest = 2 * max([ceiling, *published.values()])
    longest, shortest = max([*lengths, *published]), min([*lengths, *published])
    # A single column gets wide margins; otherwise it would fill the figure.
    room = 2.0 ** (0.6 if longest > shortest else 2)
    ticks = length_ticks(lengths) if len(lengths) <= 11 else power_ticks(shortest, longest)
    (axes,) = canvas(height=4.6)
    scale(axes.xaxis, "context length (tokens)", "log2", (shortest / room, longest * room), ticks)
    scale(axes.yaxis, "RoPE base", "log", (lowest, highest), text=base_text)
    raster = len(ends) > RASTERISED_BANDS
    boxes(*(axes, columns / sides, columns * sides, *ends.T, area(FILLS[1]), "feasible bases"), raster=raster)
    rule(axes, ceiling, across=True)
    safe = [np.nan if base is None else base for base in safe_bases]
    axes.plot(lengths, safe, label="safe base", **look(BLUE, "-", "D", width=1.4, size=5))
    # Intervals are in increasing order, so the first low end is the infimum.
    infima = {length: each[0][0] for length, each in zip(lengths, feasible, strict=True) if each}
    caret = look(INK, "", style.CARET_UP, size=7, order=4)
    axes.plot([*infima], [*infima.values()], label="infimum", **caret)
    if published:
        cross = look(VERMILION, "", "x", size=8, stroke=2, order=5)
        axes.plot([*published], [*published.values()], label="published", **cross)
    # Ratio of two bases that are one pixel apart.
    thin = (highest / lowest) ** (1 / PIXELS)
    narrow = bool((ends[:, 1] < ends[:, 0] * thin).any())
    pale = " (paler where bands and gaps are too narrow to distinguish)" if narrow else ""
    caption = (
        "Filled: feasible bases, with which similar tokens get at least as much attention as random ones at every "
        f"distance up to the context length{pale}. Gaps in a column are infeasible bases. There are no gaps from the "
        f"safe base up to {base_text(ceiling)} (dashed), the largest base searched."
    )
    told = (
        f"{tokens_text(length)}: "
        + (f"feasible from {base_text(each[0][0])}" if each else "no feasible base")
        + ("" if base is None else f", without gaps from {base_text(base)}")
        + (f", published {base_text(published[length])}" if length in published else "")
        for length, each, base in zip(lengths, feasible, safe_bases, strict=True)
    )
    return complete([axes], title, caption, told, keys=[axes])


def probe_figure(
    rows: Sequence[tuple[str, float, float, float]], title: str = "", caption: str | None = None
) -> Figure:
    """Draw losses with 95 % intervals, one row per setting, with the lowest loss emphasised.

    Losses are bars if the axis can start at 0. They are points if they lie too close together for that, or so far
    apart that the axis is logarithmic.

    Args:
        rows: ``(name, loss, low, high)`` in nats per token, in display order.
        caption: caption below the panel. None or an empty string means the default one.
    """
    # Rows are told apart by their names, so their number has no limit.
    check_count("loss", len(rows), len(rows))
    loss, low, high = np.array([row[1:] for row in rows], dtype=np.float64).T
    check_finite("loss", loss, low, high)
    best = int(loss.argmin())
    (axes,) = canvas(height=max(1.6, 0.9 + 0.32 * len(rows)), grid="x")
    is_bars = _loss_scale(axes, float(low.min()), float(high.max()))
    row_scale(axes, [row[0] for row in rows], [best])
    for row in range(len(rows)):
        is_best, one = row == best, loss[row : row + 1]
        options = (
            look(BLUE, "", "D", order=4) if is_best else look(INK, "", "o", hollow=True, size=5, order=4)
        )
        if is_bars:
            strong = area(FILLS[1], BLUE, "///", width=1.4) if is_best else area("white", GREY)
            boxes(axes, 0, one, row - 0.33, row + 0.33, strong)
        ends = low[row : row + 1], high[row : row + 1]
        whiskers(axes, [row], one, *ends, colour=options["color"], lying=True)
        axes.plot(one, [row], **options)
        note(axes, f"{loss[row]:.3f}", (None, row), (6, 0), weight="bold" if is_best else "normal")
    words = (
        f"Mean loss with 95 % interval; lower is better. {rows[best][0]} has the lowest loss. Settings whose intervals "
        "overlap cannot be ranked by these losses alone."
    )
    told = (
        f"{name}: loss {value:.3f}, interval {least:.3f} to {most:.3f}" for name, value, least, most in rows
    )
    return complete([axes], title, caption or words, told)


def _loss_scale(axes: Axes, low: float, high: float) -> bool:
    """Set an axis for losses, and say whether it can carry bars: only if it is linear and starts at 0."""
    words = "loss (nats per token{})"
    if is_spread(low, high):
        limits = low / 1.15, high * 1.15
        scale(axes.xaxis, words.format("; logarithmic"), "log", limits, text=style.tick_text)
        return False
    # Equal losses would give an axis of zero length.
    room = 0.06 * ((high - low) or high or 1)
    # Bars from 0 would all look equally long.
    is_bars = low <= 0.7 * high
    limits = (min(0, low) if is_bars else low - room), high + room
    scale(axes.xaxis, words.format("" if is_bars else "; the axis does not start at 0"), limits=limits)
    return is_bars


def _checked_series(
    what: str, series: Mapping[str, Sequence[ArrayLike]], smallest_x: float
) -> dict[str, tuple[Floats, Floats]]:
    """Convert the series to float64 and drop the points below ``smallest_x``.

    Raises:
        RopewalkError: if there are none or too many, or one is not finite.
    """
    check_count(what, len(series))
    checked = {}
    for name, (x, values) in series.items():
        at, value = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
        check_finite(f"{what} of {name!r}", at, value)
        # A logarithmic axis cannot show a distance of 0.
        checked[name] = at[at >= smallest_x], value[at >= smallest_x]
    return checked


def _check_lengths(trained: int, target: int) -> None:
    """Raise RopewalkError unless ``1 <= trained <= target``."""
    if not 1 <= trained <= target:
        raise RopewalkError(
            f"the trained length must be between 1 and the target length of {target} tokens, got {trained}"
        )
