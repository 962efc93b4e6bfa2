"""Where drift falls: on which tokens of a row, and on which heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import COLOURS, INK, save_figure
from ropewalk.reporting.precision_axes import (
    BLUE,
    CLIP,
    D_LABEL,
    VERMILION,
    Floats,
    audit_figure,
    checked,
    finish,
    log_axis,
    number_text,
    some_positive,
)
from ropewalk.reporting.rope_axes import PAPER

EACH_POINT = 300
"""Tokens up to which each has a mark that can be told from its neighbours."""
RASTERISED_POINTS = 1000
"""Tokens from which the points of an SVG are an image inside it."""
MEDIAN_BINS_A_DECADE = 12
FEWEST_FOR_MEDIAN = 5
NUMBERED_CELLS = 64
MOST_TICKS = 16
BROADEST_LINEAR = 30
"""Largest over median head up to which the colours are linear."""
PALE, DARK = "#eef4fa", "#062a4d"


def tokens_figure(
    per_token: Sequence[float],
    sink: int,
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Each token's part of D against its place in the row, with the first token's and the sink's share.

    Args:
        per_token: ``[length]`` parts of D.
        sink: index, from 0, of the token that receives most attention.
    """
    parts = checked("part of D of a token", per_token)
    if not 0 <= sink < len(parts):
        raise RopewalkError(f"the sink {sink} is none of {len(parts)} tokens")
    positive = some_positive("part of D of a token", parts)
    floor = float(positive[positive >= CLIP * positive.max()].min())
    figure, (axes,) = audit_figure(title, [("token of the row (1 is the first)", "token’s part of D")])
    place = np.arange(1, len(parts) + 1, dtype=np.float64)
    # What is too small for the axis is left out, zeros with it.
    shown = np.where(parts >= floor, parts, np.nan)
    log_axis(axes.yaxis, floor, float(positive.max()), (0.05, 0.1))
    axes.set_xscale("log")
    axes.set_xlim(0.8, max(1.25 * len(parts), 10))
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.plot(
        place,
        shown,
        "o",
        color="#9a9a9a",
        markersize=3 if len(parts) <= EACH_POINT else 1.3,
        markeredgewidth=0,
        zorder=2,
        label="tokens",
        rasterized=len(parts) > RASTERISED_POINTS,
    )
    marked = list(dict.fromkeys((0, sink)))
    median = _running_median(np.where(np.isin(np.arange(len(parts)), marked), np.nan, shown))
    if len(median):
        axes.plot(median[:, 0], median[:, 1], color=BLUE, linewidth=2, zorder=3, label="median")
    total = float(np.nansum(parts))
    for at in marked:
        # Two labels point away from each other, or one would lie on the other's mark.
        lower = len(marked) == 2 and not parts[at] >= np.nanmax(parts[marked])
        _mark_token(
            axes, at, shown[at], parts[at] / total, sink, 0 if len(marked) == 1 else -10 if lower else 10
        )
    left_out = int(len(parts) - np.isfinite(shown).sum())
    missing = f"; {left_out:,} of {len(parts):,} tokens with less than {number_text(floor)} or no value are left out"
    finish(
        figure,
        caption
        or "Each point is the part of D that one token loses or wins (line: median of neighbours), and the marked "
        f"tokens have the named share of the whole{missing if left_out else ''}.",
        3.9,
    )
    save_figure(figure, path)


def heads_figure(
    heads: Sequence[Sequence[float]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """D of each head as a heat map, the darker the larger; heads without a value are hatched.

    Args:
        heads: ``[layers][heads]`` D; as many heads in each layer.
    """
    if not heads or any(len(layer) != len(heads[0]) for layer in heads):
        raise RopewalkError("there is no D of heads to draw, or not as many heads in each layer")
    values = checked(f"{D_LABEL} by head", heads)
    layers, count = values.shape
    axis_words = ("head", "layer (0 at the bottom)")
    figure, (axes,) = audit_figure(title, [axis_words])
    norm = _norm(values)
    shades = LinearSegmentedColormap.from_list("pale to dark", [PALE, "#9cc3e4", COLOURS[1], DARK])
    # Zero has no place among logarithmic colours; it is paler than the palest.
    colours = shades.with_extremes(under="white", bad="white")
    edges = np.arange(count + 1) - 0.5, np.arange(layers + 1) - 0.5
    few = layers * count <= NUMBERED_CELLS
    mesh = axes.pcolormesh(
        *edges,
        np.ma.masked_invalid(values),
        cmap=colours,
        norm=norm,
        edgecolor="white" if few else "none",
        linewidth=1 if few else 0,
    )
    if np.isnan(values).any():
        axes.pcolor(
            *edges,
            np.ma.masked_where(np.isfinite(values), np.zeros_like(values)),
            facecolor="none",
            edgecolor="#8a8a8a",
            hatch="////",
            linewidth=0,
        )
    if few:
        _numbers(axes, values, norm)
    for axis, length in ((axes.xaxis, count), (axes.yaxis, layers)):
        axis.set_major_locator(FixedLocator(_ticks(length)))
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=2)
    _colour_bar(figure, axes, mesh, norm)
    hatched = "; hatched: no value" if np.isnan(values).any() else ""
    top = np.unravel_index(int(np.nanargmax(values)), values.shape)
    finish(
        figure,
        caption
        or f"How far attention drifts in each head, the darker the further; furthest in head {top[1]} of layer "
        f"{top[0]} (D = {number_text(float(values[top]))}){hatched}.",
        min(6.4, max(2.9, 1.2 + 0.15 * layers if not few else 1.2 + 0.34 * layers)),
    )
    save_figure(figure, path)


def _running_median(values: Floats) -> Floats:
    """``[n, 2]`` (place, median) of bins of equal width in log place, where they hold enough tokens."""
    place = np.arange(1, len(values) + 1)
    finite = np.isfinite(values)
    number = np.floor(np.log10(place) * MEDIAN_BINS_A_DECADE).astype(np.int64)
    found = []
    for each in np.unique(number[finite]):
        held = finite & (number == each)
        if held.sum() >= FEWEST_FOR_MEDIAN:
            found.append((float(np.exp(np.log(place[held]).mean())), float(np.median(values[held]))))
    return np.array(found).reshape(-1, 2)


def _mark_token(axes: Any, at: int, value: float, share: float, sink: int, rise: float) -> None:
    name = "first token" if at == 0 else f"token {at + 1:,}, most attended"
    if at == sink == 0:
        name = "first token, most attended"
    far = at > 0.3 * axes.get_xlim()[1]
    known = np.isfinite(value)
    if known:
        axes.plot(
            at + 1,
            value,
            "D" if at == 0 else "s",
            color=VERMILION if at == 0 else BLUE,
            markeredgecolor=INK,
            markersize=7,
            zorder=5,
            label=name,
        )
    share_text = f"{100 * share:.2g} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"
    words = f"{name}: {share_text if np.isfinite(share) else 'no value'}" + (
        " of D" if np.isfinite(share) else ""
    )
    axes.annotate(
        words,
        (at + 1, value if known else axes.get_ylim()[0]),
        xytext=(-8 if far else 8, rise if known else 8),
        textcoords="offset points",
        ha="right" if far else "left",
        va="center",
        color=INK,
        fontsize=9,
        zorder=6,
        bbox=PAPER,
    )


def _norm(values: Floats) -> Any:
    """Linear colours from 0, or logarithmic ones where heads differ much; nothing below ``CLIP`` of the largest."""
    high = float(np.nanmax(values))
    positive = values[values > 0]
    if len(positive) and high > BROADEST_LINEAR * np.median(positive):
        return LogNorm(max(float(positive.min()), CLIP * high), high)
    return Normalize(0, high or 1)


def _numbers(axes: Any, values: Floats, norm: Any) -> None:
    for layer, row in enumerate(values):
        for head, value in enumerate(row):
            if np.isfinite(value):
                dark = value > 0 and float(norm(value)) > 0.5
                axes.text(
                    head,
                    layer,
                    number_text(float(value)),
                    ha="center",
                    va="center",
                    fontsize=8 if values.shape[1] <= 10 else 6.5,
                    color="white" if dark else INK,
                )


def _ticks(count: int) -> list[int]:
    """0 and multiples of a power of two."""
    step = 1
    while count > MOST_TICKS * step:
        step *= 2
    return list(range(0, count, step))


def _colour_bar(figure: Any, axes: Any, mesh: Any, norm: Any) -> None:
    logarithmic = isinstance(norm, LogNorm)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05, aspect=18)
    bar.set_label(f"D{' (logarithmic)' if logarithmic else ''}", color=INK, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, colors=INK, length=2)
    bar.ax.yaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if norm.vmax < 300 * norm.vmin else (1,)) if logarithmic else MaxNLocator(5)
    )
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
