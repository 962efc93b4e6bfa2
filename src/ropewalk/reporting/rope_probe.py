"""The picture of a probe: losses of settings with their intervals, in rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import COLOURS, FILLS, INK, LOG_RATIO, new_figure, save_figure
from ropewalk.reporting.rope_axes import Floats, add_caption, check_finite

BLUE = COLOURS[1]


def probe_figure(
    rows: Sequence[tuple[str, float, float, float]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Losses with 95 % intervals, one row each from the top, the lowest loss emphasised.

    Bars where they can begin at 0; points where the losses lie too close together for that, or so far apart
    that the axis is logarithmic.

    Args:
        rows: ``(name, loss, low, high)`` in nats a token, in the order to show.
    """
    if not rows:
        raise RopewalkError("there is no loss to draw")
    loss, low, high = np.array([row[1:] for row in rows], dtype=np.float64).T
    check_finite("loss", loss, low, high)
    scale = _probe_scale(float(low.min()), float(high.max()))
    where = {"zero": "", "cut": "; the axis does not begin at 0", "log": "; logarithmic"}[scale]
    figure, axes = new_figure(title, f"loss (nats a token{where})", "")
    best = int(loss.argmin())
    if scale == "zero":
        bars = axes.barh(range(len(rows)), loss, 0.66, facecolor="white", edgecolor=COLOURS[0], linewidth=1)
        bars[best].set(facecolor=FILLS[1], edgecolor=BLUE, hatch="///", linewidth=1.4)
    _probe_points(axes, loss, np.maximum(0, [loss - low, high - loss]), best)
    _probe_axes(
        axes, [fill(row[0], 32) for row in rows], loss, best, (float(low.min()), float(high.max())), scale
    )
    add_caption(
        figure,
        caption
        or f"Mean loss with its 95 % interval; lower is better, lowest: {rows[best][0]}. Where intervals overlap, "
        "these losses alone do not decide the order.",
        max(2.2, 1.3 + 0.32 * len(rows)),
    )
    save_figure(figure, path)


def _probe_scale(low: float, high: float) -> str:
    """``log``, ``zero`` (linear from 0), or ``cut`` (linear, where 0 would hide the differences)."""
    if low > 0 and high >= LOG_RATIO * low:
        return "log"
    return "cut" if low > 0.7 * high else "zero"


def _probe_points(axes: Any, loss: Floats, errors: Floats, best: int) -> None:
    for row in range(len(loss)):
        colour = BLUE if row == best else INK
        axes.errorbar(
            loss[row],
            row,
            xerr=errors[:, row : row + 1],
            fmt="D" if row == best else "o",
            color=colour,
            markerfacecolor=colour if row == best else "white",
            markersize=6 if row == best else 5,
            elinewidth=1.3,
            capsize=3.5,
        )


def _probe_axes(
    axes: Any, names: Sequence[str], loss: Floats, best: int, ends: tuple[float, float], scale: str
) -> None:
    low, high = ends
    if scale == "log":
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        room = 0.06 * ((high - low) or high or 1)
        axes.set_xlim(low - room if scale == "cut" else min(0, low), high + room)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    for row, (label, value) in enumerate(zip(axes.get_yticklabels(), loss, strict=True)):
        weight = "bold" if row == best else "normal"
        label.set(fontweight=weight, parse_math=False)
        axes.annotate(
            f"{value:.3f}",
            (1, row),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center_baseline",
            color=INK,
            fontsize=9,
            fontweight=weight,
        )
