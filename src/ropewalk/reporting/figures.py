"""Figures as PNG or SVG, drawn without matplotlib's global state and readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import PositionBin, TaskResult
from ropewalk.io.files import replacing
from ropewalk.io.lengths import format_length, parse_length
from ropewalk.reporting.shown_text import harmless

FORMATS = (".png", ".svg")
SIZE_INCHES = (7.2, 4.2)
DPI = 160
TITLE_CHARACTERS = 80
LOG_RATIO = 8
"""Largest over smallest from which an axis is logarithmic."""
SMOOTHED_POINTS = 50
"""Steps from which a training curve also shows its running mean."""

# Okabe and Ito's palette: told apart by readers with any colour vision, and by lightness in grey.
COLOURS = ("#7a7a7a", "#0b4f8a", "#d55e00", "#009e73")
LINE_STYLES = ("--", "-", "-.", ":")
HATCHES = ("///", "", "...", "xxx")
FILLS = ("white", "#9cc3e4", "white", "white")
"""Light enough for an interval to be seen on a bar."""
BAND_ALPHA = 0.18
INK = "#333333"


def perplexity_figure(
    series: Mapping[str, TaskResult], path: Path, trained_length: int | None = None, title: str = ""
) -> None:
    """Perplexity by position as steps with 95 % bands, one line a model.

    Args:
        series: a perplexity result by the model's name, such as ``before`` and ``after``.
        path: ``.png`` or ``.svg``; complete or not written at all.
        trained_length: tokens; marked where given.
        title: above the axes.

    Raises:
        RopewalkError: if no result has a finite perplexity, or the suffix is another.
    """
    drawn = [each for result in series.values() for each in result.positions]
    if not any(math.isfinite(each.perplexity) for each in drawn):
        raise RopewalkError("there is no finite perplexity to draw")
    figure, axes = new_figure(title, "position in the row (tokens)", "perplexity")
    edges = sorted({edge for each in drawn for edge in (each.start, each.end)})
    left = _position_axis(axes, edges)
    for number, (name, result) in enumerate(series.items()):
        if result.positions:
            _steps(axes, result.positions, left, name, *series_style(number, len(series), LINE_STYLES))
    values = [value for each in drawn for value in (each.perplexity, *each.ci95) if math.isfinite(value)]
    value_axis(axes, min(values), max(values))
    if trained_length is not None and edges[0] < trained_length <= edges[-1]:
        axes.axvline(trained_length, color=INK, linestyle=(0, (2, 2)), linewidth=1)
        at_the_end = trained_length == edges[-1]
        axes.annotate(
            f"trained length {short_length(trained_length)}",
            (trained_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if at_the_end else 5, -5),
            textcoords="offset points",
            ha="right" if at_the_end else "left",
            va="top",
            color=INK,
            fontsize=9,
        )
    if len(series) > 1:
        add_legend(figure, axes)
    save_figure(figure, path)


def passkey_figure(series: Mapping[str, Sequence[TaskResult]], path: Path, title: str = "") -> None:
    """Right passkeys in percent by length as bars with 95 % intervals, one bar a model at each length.

    Args:
        series: passkey results by the model's name; those that were not run leave a gap, and those without a
            length have no place.
        path, title: as in :func:`perplexity_figure`.

    Raises:
        RopewalkError: if nothing was run, or the suffix is none of the two.
    """
    scores = {
        name: {r.length: r for r in results if r.status == "ok" and r.length is not None}
        for name, results in series.items()
    }
    lengths = sorted({length for by_length in scores.values() for length in by_length})
    if not lengths:
        raise RopewalkError("there is no passkey score to draw")
    figure, axes = new_figure(title, "length (tokens)", "right answers (%)")
    width = 0.8 / len(scores)
    for number, (name, by_length) in enumerate(scores.items()):
        at = {n: lengths.index(n) + (number - (len(scores) - 1) / 2) * width for n in lengths}
        _bars(axes, at, by_length, 0.92 * width, name, number, len(scores))
        asked = {result.length for result in series[name]}
        for length in [n for n in lengths if n in asked and n not in by_length]:
            axes.text(at[length], 2, "not run", rotation=90, ha="center", va="bottom", color=INK, fontsize=9)
    # Room for at least three groups, or a single bar would be as wide as the figure.
    middle, half = (len(lengths) - 1) / 2, max(len(lengths), 3) / 2
    axes.set_xlim(middle - half, middle + half)
    axes.set_xticks(range(len(lengths)), [short_length(length) for length in lengths])
    axes.set_ylim(0, 104)
    axes.grid(False, axis="x")
    if len(series) > 1:
        add_legend(figure, axes)
    save_figure(figure, path)


def training_figure(
    metrics: Sequence[Mapping[str, Any]], path: Path, title: str = "", x_key: str | None = None
) -> None:
    """Training loss over steps or over another running quantity, with its running mean where there are many.

    Args:
        metrics: one mapping a step in order, with ``loss`` in nats a token (None or NaN leaves a gap) and
            perhaps ``stage``; a change of stage is marked.
        path, title: as in :func:`perplexity_figure`.
        x_key: key of the horizontal axis, such as a running count of tokens; steps from 1 if None.

    Raises:
        RopewalkError: if no step has a finite loss, or the suffix is none of the two.
    """
    loss = np.array([math.nan if line.get("loss") is None else float(line["loss"]) for line in metrics])
    if not np.isfinite(loss).any():
        raise RopewalkError("there is no finite training loss to draw")
    x = np.array(
        [n if x_key is None else line[x_key] for n, line in enumerate(metrics, start=1)], dtype=float
    )
    figure, axes = new_figure(title, "optimiser step" if x_key is None else x_key, "loss (nats a token)")
    many = len(loss) >= SMOOTHED_POINTS
    axes.plot(
        x,
        loss,
        color=COLOURS[0] if many else COLOURS[1],
        linewidth=0.8 if many else 1.6,
        marker="o" if len(loss) < SMOOTHED_POINTS else None,
        markersize=3,
        label="each step",
    )
    if many:
        window = max(5, len(loss) // 25)
        axes.plot(x, _running_mean(loss, window), color=COLOURS[1], linewidth=2, label=f"mean of {window}")
        add_legend(figure, axes)
    stages = [line.get("stage") for line in metrics]
    for at in range(1, len(stages)):
        if stages[at] != stages[at - 1]:
            axes.axvline((x[at - 1] + x[at]) / 2, color=INK, linestyle=(0, (2, 2)), linewidth=1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    save_figure(figure, path)


def new_figure(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    """A figure of ``SIZE_INCHES`` with one axes in the house style, outside matplotlib's global state."""
    margins = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout=margins)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    dress_axes(axes, x_label, y_label)
    if title:
        lines = "\n".join(wrap(title, TITLE_CHARACTERS))
        axes.set_title(lines, loc="left", fontsize=11, color=INK, pad=10, parse_math=False)
    return figure, axes


def dress_axes(axes: Any, x_label: str, y_label: str) -> None:
    """Labels, ticks, spines and grid in the house style."""
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        # They lie within what ticks and labels take, and measuring one makes all ticks again.
        spine.set_in_layout(False)
    axes.tick_params(labelsize=9, colors=INK)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def series_style(number: int, count: int, patterns: Sequence[str]) -> tuple[str, str]:
    """Colour and pattern of a series; a single one takes the strong colour and no pattern."""
    number = 1 if count == 1 else number
    return COLOURS[number % len(COLOURS)], patterns[number % len(patterns)]


def _steps(
    axes: Any, bins: Sequence[PositionBin], left: float, name: str, colour: str, line_style: str
) -> None:
    edges = [max(left, bins[0].start), *(each.end for each in bins)]
    axes.stairs(
        [each.perplexity if math.isfinite(each.perplexity) else math.nan for each in bins],
        edges,
        baseline=None,
        color=colour,
        linestyle=line_style,
        linewidth=2,
        label=name,
    )
    for each, (start, end) in zip(bins, pairwise(edges), strict=True):
        if math.isfinite(each.ci95[0]) and math.isfinite(each.ci95[1]):
            axes.fill_between([start, end], *each.ci95, color=colour, alpha=BAND_ALPHA, linewidth=0)


def _bars(
    axes: Any,
    at: Mapping[int, float],
    by_length: Mapping[int, TaskResult],
    width: float,
    name: str,
    number: int,
    count: int,
) -> None:
    colour, hatch = series_style(number, count, HATCHES)
    x = [at[length] for length in by_length]
    y = np.array([result.score for result in by_length.values()])
    ends = np.array([result.ci95 for result in by_length.values()]).reshape(-1, 2)
    fill = series_style(number, count, FILLS)[1]
    axes.bar(x, y, width, label=name, facecolor=fill, edgecolor=colour, hatch=hatch)
    # The dot shows a score of 0, where the bar has no height; rounding may put an end past the score.
    errors = np.maximum(0, [y - ends[:, 0], ends[:, 1] - y])
    axes.errorbar(x, y, errors, fmt="o", color=INK, markersize=4, elinewidth=1.2, capsize=4)


def _position_axis(axes: Any, edges: Sequence[int]) -> float:
    """Ticks at bin edges, logarithmic where bins grow, or the first would vanish; returns the left end."""
    widths = np.diff(edges)
    logarithmic = edges[0] == 0 and len(edges) > 2 and widths.max() >= LOG_RATIO * widths.min()
    left = edges[1] / 2 if logarithmic else edges[0]
    ticks = edges[1:] if logarithmic else edges
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xlim(left, edges[-1])
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_length(int(value)) if value else "0"))
    return left


def short_length(tokens: int) -> str:
    """As format_length, and 1.5k in place of 1536."""
    halves = f"{tokens / 1024:g}k"
    exact = 1024 <= tokens < 2**20 and len(halves) <= 5 and parse_length(halves) == tokens
    return halves if exact else format_length(tokens)


def value_axis(axes: Any, low: float, high: float) -> None:
    """Make the vertical axis logarithmic where positive values spread by ``LOG_RATIO`` or more."""
    if high < LOG_RATIO * low:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.6g}" if value < 1e6 else f"{value:.0e}")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last ``window`` finite values up to each point, fewer at the beginning."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    with np.errstate(invalid="ignore"):
        means: np.ndarray = sums / counts
    return means


def add_legend(figure: Any, axes: Any) -> None:
    """What is labelled in the axes, in one line above them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=4, frameon=False, fontsize=9, handlelength=3
    )


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all; equal figures give equal bytes.

    Raises:
        RopewalkError: if the suffix is none of ``FORMATS``, or the place cannot be written.
    """
    if path.suffix not in FORMATS:
        raise RopewalkError(f"a figure is written as .png or .svg, got {path.name}")
    # No date and no random ids: the same results give the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    for text in figure.findobj(Text):
        # Names of models and tasks are no mathematics, whatever dollars they hold.
        text.set_parse_math(False)
        text.set_text(harmless(text.get_text()))
    # The same for labels of ticks, which are made while it is drawn.
    settings = {"svg.hashsalt": "ropewalk", "text.parse_math": False}
    with replacing(path) as temporary, rc_context(settings):
        figure.savefig(temporary, metadata=metadata)
