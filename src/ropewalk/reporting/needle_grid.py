"""The needle grid: a heat map of right answers, length across and depth down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.reporting.figures import INK, save_figure
from ropewalk.reporting.precision_axes import Floats, audit_figure, finish
from ropewalk.reporting.rope_axes import PAPER, length_text
from ropewalk.reporting.shown_text import shown

NUMBERED_COLUMNS = 14
NUMBERED_ROWS = 25
EVEN_LUMINANCE = 0.179
"""Below it white stands out better than black, by WCAG 2's contrast."""
MOST_DEPTH_TICKS = 21
MOST_LENGTH_TICKS = 14


def needle_figure(
    results: Sequence[TaskResult], path: Path, title: str = "", caption: str | None = None
) -> None:
    """Right answers by length and depth as a heat map; 0 % of the depth at the top.

    Args:
        results: of one task, at one or more lengths, with ``depths`` in their details. Lengths that were not
            run are hatched and say so.
        path: ``.png`` or ``.svg``; complete or not written at all.
        title: above the axes.
        caption: in place of the one that is made from the results.

    Raises:
        RopewalkError: if no result has a score by depth, or the suffix is another.
    """
    columns = sorted((r for r in results if r.length is not None), key=lambda r: r.length or 0)
    cells = [_cells(each) for each in columns]
    depths = sorted({depth for column in cells for depth in column})
    if not depths:
        raise RopewalkError("there is no score by depth to draw")
    values = np.array([[_value(column.get(depth)) for column in cells] for depth in depths])
    if not np.isfinite(values).any():
        raise RopewalkError("there is no score by depth to draw")
    figure, (axes,) = audit_figure(title, [("length (tokens)", "depth (%)")])
    mesh = _mesh(axes, values)
    numbered = len(depths) <= NUMBERED_ROWS and len(columns) <= NUMBERED_COLUMNS
    if numbered:
        _numbers(axes, values)
    _not_run(axes, columns, len(depths))
    _ticks(axes.xaxis, [length_text(each.length or 0) for each in columns], MOST_LENGTH_TICKS)
    _ticks(axes.yaxis, [f"{100 * depth:.3g}" for depth in depths], MOST_DEPTH_TICKS)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05, aspect=18)
    bar.set_label("right answers (%)", color=INK, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, colors=INK, length=2)
    height = 1.3 + (0.25 * len(depths) if len(depths) <= NUMBERED_ROWS else 5)
    finish(figure, caption or _caption(columns, cells, values), max(2.6, height))
    save_figure(figure, path)


def _cells(result: TaskResult) -> dict[float, Mapping[str, Any]]:
    if result.status != "ok":
        return {}
    return {float(each["depth"]): each for each in result.details.get("depths", ())}


def _value(cell: Mapping[str, Any] | None) -> float:
    return math.nan if cell is None or cell["score"] is None else float(cell["score"])


def _mesh(axes: Any, values: Floats) -> Any:
    rows, columns = values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    line = {"edgecolor": "white", "linewidth": 0.8 if values.size <= 2000 else 0}
    # Cividis: the same to readers with any colour vision, and lightness alone in grey.
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(values), cmap="cividis", vmin=0, vmax=100, **line)
    if np.isnan(values).any():
        empty = np.ma.masked_where(np.isfinite(values), np.zeros_like(values))
        axes.pcolor(*edges, empty, facecolor="none", edgecolor="#8a8a8a", hatch="////", linewidth=0)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=2)
    return mesh


def _numbers(axes: Any, values: Floats) -> None:
    colours, norm = colormaps["cividis"], Normalize(0, 100)
    size = 8.5 if values.shape[1] <= 8 else 7
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            ink = "white" if luminance(colours(norm(value))) < EVEN_LUMINANCE else "black"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=size, color=ink)


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of an sRGB colour, 0 to 1 (WCAG 2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _not_run(axes: Any, columns: Sequence[TaskResult], rows: int) -> None:
    for column, result in enumerate(columns):
        if result.status != "ok":
            flat = rows < 4
            axes.text(
                column,
                (rows - 1) / 2,
                "not run",
                rotation=0 if flat else 90,
                ha="center",
                va="center",
                fontsize=7 if flat else 9,
                color=INK,
                bbox={**PAPER, "alpha": 1},
            )


def _ticks(axis: Any, labels: Sequence[str], most: int) -> None:
    """Labels at even steps from the first on, and at the last."""
    last = len(labels) - 1
    places = list(range(0, last + 1, max(1, -(-last // (most - 1)))))
    places[-1:] = [last] if last else [0]
    axis.set_ticks(places, [labels[place] for place in places])


def _caption(
    columns: Sequence[TaskResult], cells: Sequence[Mapping[float, Mapping[str, Any]]], values: Floats
) -> str:
    counts = sorted({int(each["n"]) for column in cells for each in column.values()})
    n = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    words = [f"{n} samples a cell; a depth of 0 % is the beginning of the text."]
    reasons = dict.fromkeys(shown(r.reason or "", 120) for r in columns if r.status != "ok")
    words += [f"Hatched: not run ({reason})." for reason in reasons]
    ran = [column for column, result in enumerate(columns) if result.status == "ok"]
    if np.isnan(values[:, ran]).any():
        words.append("Hatched without words: not asked at this depth and length.")
    return " ".join(words)
