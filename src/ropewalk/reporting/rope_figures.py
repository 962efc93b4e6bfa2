"""Pictures of RoPE theory: feasible bases, margins, decay, angles, periods, and the losses of a probe.

Nothing here knows how the values come about: every function takes plain numbers and draws them. Each figure
has a caption inside the picture. All functions take

* ``path``: ``.png`` or ``.svg``; complete or not written at all,
* ``title``: above the axes,
* ``caption``: one or two sentences below the axes; a fitting one is made where it is None or empty,

and raise RopewalkError if there is nothing to draw, a value is not finite, or the suffix is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import (
    COLOURS,
    FILLS,
    INK,
    LINE_STYLES,
    TITLE_CHARACTERS,
    dress_axes,
    new_figure,
    save_figure,
    series_style,
    value_axis,
)
from ropewalk.reporting.rope_axes import (
    MARKERS,
    PAPER,
    SHADE,
    Envelope,
    Floats,
    add_caption,
    add_key,
    check_count,
    check_finite,
    check_lengths,
    checked_series,
    envelope,
    length_axis,
    length_text,
    linear_length_axis,
    mark_length,
)
from ropewalk.reporting.rope_bases import feasible_bases_figure
from ropewalk.reporting.rope_probe import probe_figure

__all__ = [
    "decay_figure",
    "feasible_bases_figure",
    "margin_figure",
    "periods_figure",
    "probe_figure",
    "slowest_pair_figure",
]

BLUE, VERMILION = COLOURS[1], COLOURS[2]
DECAY_BINS = 100
"""Few enough for the patterns of several lines to be seen."""


def margin_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike, int | None]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Similarity margin ``B(m)`` against distance, lowest to highest in narrow bins, one panel a series.

    Args:
        series: by name ``(m, B, context_bound)``: distances in tokens, rising, those below 1 not drawn; their
            margins; and the tokens up to which no margin is negative, None where that is all or not known.
    """
    what = "margin"
    values = checked_series(what, {name: each[:2] for name, each in series.items()}, 1)
    curves = {name: envelope(*each) for name, each in values.items()}
    bounds = [each[2] for each in series.values()]
    figure, first = new_figure("", "distance m (tokens)", "margin B(m)")
    panels = [first]
    if len(curves) > 1:
        first.remove()
        panels = list(figure.subplots(len(curves), sharex=True, sharey=True))
        for number, axes in enumerate(panels, start=1):
            dress_axes(axes, "distance m (tokens)" if number == len(panels) else "", "margin B(m)")
    if title:
        figure.suptitle(
            fill(title, TITLE_CHARACTERS), x=0.014, ha="left", fontsize=11, color=INK, parse_math=False
        )
    longest = max(float(m[-1]) for m, _ in values.values())
    length_axis(panels[0].xaxis, 1, longest)
    panels[0].set_xlim(1, longest)
    for axes, (name, curve), bound in zip(panels, curves.items(), bounds, strict=True):
        _margin_panel(axes, curve, bound, longest)
        if len(panels) > 1 or not title:
            axes.set_title(fill(name, TITLE_CHARACTERS), loc="left", fontsize=10, color=INK, parse_math=False)
    add_caption(
        figure,
        caption
        or "Band: lowest to highest margin among neighbouring distances; line: the lowest, hatched where it is "
        "negative. Up to the dashed length, similar tokens get more attention than random ones at every distance.",
        4.0 if len(panels) == 1 else 1.0 + 1.75 * len(panels),
    )
    save_figure(figure, path)


def decay_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Upper bound of attention against relative distance, one line a series.

    Args:
        series: by name ``(m, bound)``: distances in tokens, rising, those below 1 not drawn; and their bounds.
    """
    values = checked_series("bound", series, 1)
    curves = {name: envelope(*each, DECAY_BINS) for name, each in values.items()}
    figure, axes = new_figure(title, "relative distance (tokens)", "upper bound of attention")
    longest = max(float(m[-1]) for m, _ in values.values())
    length_axis(axes.xaxis, 1, longest)
    axes.set_xlim(1, longest)
    for number, (name, curve) in enumerate(curves.items()):
        colour, line_style = series_style(number, len(curves), LINE_STYLES)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(curve.x, curve.mean, color=colour, linestyle=line_style, linewidth=1.8, label=name)
    low, high = (
        min(each.low.min() for each in curves.values()),
        max(each.high.max() for each in curves.values()),
    )
    if low > 0:
        value_axis(axes, low, high)
    if len(curves) > 1:
        add_key(figure, *axes.get_legend_handles_labels())
    add_caption(
        figure,
        caption
        or "How much attention a pair of tokens can get at most, by its distance: the higher a line stays, the "
        "slower attention decays. Line: mean of neighbouring distances; band: their lowest to highest.",
    )
    save_figure(figure, path)


def slowest_pair_figure(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    path: Path,
    trained_length: int,
    target_length: int,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Angle of the slowest pair against position, with the positions and the angles that training showed.

    Args:
        series: by name ``(position, angle)``: tokens, rising, and radians, unwrapped. The first series is the
            model as trained; its angles within the trained length are those that training showed.
        trained_length, target_length: tokens, ``1 <= trained_length <= target_length``.
    """
    check_lengths(trained_length, target_length)
    curves = {name: (x, y / (2 * np.pi)) for name, (x, y) in checked_series("angle", series, 0).items()}
    x, y = next(iter(curves.values()))
    seen = y[x <= trained_length]
    if not len(seen):
        raise RopewalkError(f"the first series has no position up to the trained length of {trained_length}")
    figure, axes = new_figure(title, "position (tokens)", "angle of the slowest pair (turns of 2π)")
    axes.axvspan(0, trained_length, facecolor=SHADE, linewidth=0, label="trained positions", zorder=0)
    axes.axhspan(
        seen.min(),
        seen.max(),
        facecolor="none",
        edgecolor="#8fa3b5",
        hatch="///",
        linewidth=0,
        label="angles seen in training",
        zorder=0.5,
    )
    for number, (name, (x, y)) in enumerate(curves.items()):
        colour, line_style = series_style(number, len(curves), LINE_STYLES)
        axes.plot(x, y, color=colour, linestyle=line_style, linewidth=2, label=name)
        _, marker = series_style(number, len(curves), MARKERS)
        axes.plot(x[-1:], y[-1:], marker, color=colour, markersize=6, clip_on=False)
    end = max(target_length, *(int(x[-1]) for x, _ in curves.values()))
    linear_length_axis(axes.xaxis, end)
    axes.set_xlim(0, end)
    lowest, highest = min(y.min() for _, y in curves.values()), max(y.max() for _, y in curves.values())
    # Room above for the words of the marked length.
    axes.set_ylim(min(0, 1.05 * lowest), 1.15 * highest or 1)
    for length, name in ((trained_length, "trained"), (target_length, "target")):
        if length < end:
            mark_length(axes, length, f"{name} length {length_text(length)}", left=length > 0.7 * end)
    add_key(figure, *axes.get_legend_handles_labels())
    add_caption(
        figure,
        caption
        or f"Training showed positions up to {length_text(trained_length)} (shaded) and so only the hatched angles "
        f"of the slowest pair. A line that leaves the hatched band before {length_text(target_length)} asks the "
        "model for angles it has never seen.",
    )
    save_figure(figure, path)


def periods_figure(
    series: Mapping[str, ArrayLike],
    path: Path,
    trained_length: int,
    target_length: int,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Period of every pair against its index; pairs with no full turn in training are hollow.

    Args:
        series: by name ``[pairs]`` periods in tokens, positive.
        trained_length, target_length: tokens, ``1 <= trained_length <= target_length``.
    """
    check_count("period", len(series))
    check_lengths(trained_length, target_length)
    periods = {name: np.asarray(each, dtype=np.float64) for name, each in series.items()}
    for name, each in periods.items():
        check_finite(f"period of {name!r}", each)
        if each.ndim != 1 or not len(each) or (each <= 0).any():
            raise RopewalkError(f"period of {name!r}: a row of positive numbers of tokens is needed")
    figure, axes = new_figure(title, "pair of dimensions (0 turns fastest)", "period (tokens)")
    low = min(each.min() for each in periods.values()) / 1.5
    high = max(target_length, *(each.max() for each in periods.values())) * 1.5
    length_axis(axes.yaxis, low, high)
    axes.set_ylim(low, high)
    most = max(len(each) for each in periods.values())
    axes.set_xlim(-0.5 - 0.01 * most, most - 0.5 + 0.01 * most)
    axes.axhspan(trained_length, target_length, facecolor=SHADE, linewidth=0, zorder=0)
    for length, name in ((trained_length, "trained"), (target_length, "target")):
        axes.axhline(length, color=INK, linestyle=(0, (2, 2)), linewidth=1)
        axes.annotate(
            f"{name} length {length_text(length)}",
            (0, length),
            xycoords=("axes fraction", "data"),
            xytext=(6, -3 if name == "trained" else 3),
            textcoords="offset points",
            va="top" if name == "trained" else "bottom",
            color=INK,
            fontsize=9,
            bbox=PAPER,
        )
    for number, (name, each) in enumerate(periods.items()):
        _period_marks(axes, each, each > trained_length, name, number, len(periods))
    if len(periods) > 1:
        add_key(figure, *axes.get_legend_handles_labels())
    counts = "; ".join(f"{name}: {(p > trained_length).sum()} of {len(p)}" for name, p in periods.items())
    add_caption(
        figure,
        caption
        or "Tokens that each pair of dimensions takes for a full turn. Hollow: pairs that never complete one within "
        f"the trained length ({counts}).",
    )
    save_figure(figure, path)


def _margin_panel(axes: Any, curve: Envelope, bound: int | None, longest: float) -> None:
    axes.fill_between(curve.x, curve.low, curve.high, color=FILLS[1], linewidth=0)
    axes.plot(curve.x, curve.low, color=BLUE, linewidth=1)
    below = np.minimum(curve.low, 0)
    axes.fill_between(
        curve.x, below, 0, facecolor="none", edgecolor=VERMILION, hatch="////", linewidth=0, zorder=2.5
    )
    axes.axhline(0, color=INK, linewidth=1)
    if bound is not None and 1 <= bound <= longest:
        mark_length(axes, bound, f"B(m) ≥ 0 up to {length_text(bound)}", left=bound > longest**0.72)


def _period_marks(axes: Any, periods: Floats, hollow: Any, name: str, number: int, count: int) -> None:
    colour, marker = series_style(number, count, MARKERS)
    pair = np.arange(len(periods))
    axes.plot(pair, periods, color=colour, linewidth=0.8, zorder=1.5)
    style = {"color": colour, "linestyle": "none", "marker": marker}
    axes.plot(pair[~hollow], periods[~hollow], markersize=4, **style)
    axes.plot(pair[hollow], periods[hollow], markersize=5, markerfacecolor="white", **style)
    axes.plot([], [], markersize=5, label=name, **style)
