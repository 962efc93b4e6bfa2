"""Bars and points in rows: what a model kept of its short context, and how two evaluations differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.io.lengths import format_length
from ropewalk.reporting.comparison_tables import difference_words, task_words
from ropewalk.reporting.evaluation_figures import key_above
from ropewalk.reporting.figures import COLOURS, FILLS, HATCHES, INK, dress_axes, save_figure, series_style
from ropewalk.reporting.precision_axes import audit_figure, finish
from ropewalk.reporting.rope_axes import MOST_SERIES, shown_name

if TYPE_CHECKING:
    from ropewalk.evaluation.comparison import Difference

NAME_CHARACTERS = 30
BAR_INCHES = 0.24
NAME_INCHES = 0.16
"""Height of one line of a name."""
UNITS = {"percent": "percentage points", "perplexity": "percent of the perplexity"}
VERMILION = COLOURS[2]


def retention_figure(
    series: Mapping[str, Sequence[TaskResult]],
    path: Path,
    title: str = "",
    chance: Mapping[str, float] | None = None,
    caption: str | None = None,
) -> None:
    """Tasks of the short context as bars with 95 % intervals, one bar a model.

    Args:
        series: results in percent by the model's name, such as ``before`` and ``after``. Results in another
            unit have no bar and are named.
        path: ``.png`` or ``.svg``; complete or not written at all.
        title: above the axes.
        chance: percent that guessing gets, by task; marked where it is given.
        caption: in place of the one that is made from the results.

    Raises:
        RopewalkError: if there is no score in percent, there are more than four models, or the suffix is
            another.
    """
    if len(series) > MOST_SERIES:
        raise RopewalkError(f"a figure shows at most {MOST_SERIES} series, got {len(series)} of scores")
    every = [result for results in series.values() for result in results]
    tasks = list(dict.fromkeys(each.task for each in every if each.unit == "percent"))
    drawn = [r for r in every if r.unit == "percent" and r.status == "ok" and math.isfinite(r.score)]
    if not drawn:
        raise RopewalkError("there is no score in percent to draw")
    figure, (axes,) = audit_figure(title, [("score (%)", "")])
    sizes = _sizes(drawn)
    alike = set(sizes.values())
    lines = _rows(axes, [t if len(alike) == 1 or t not in sizes else f"{t}, n {sizes[t]}" for t in tasks])
    axes.set_xlim(0, 104)
    height = 0.8 / len(series)
    for number, (name, results) in enumerate(series.items()):
        by_task = {each.task: each for each in results if each.unit == "percent"}
        at = {task: row + (number - (len(series) - 1) / 2) * height for row, task in enumerate(tasks)}
        _task_bars(axes, by_task, at, height, name, number, len(series))
    marks = {task: chance[task] for task in tasks if chance and task in chance}
    for task, percent in marks.items():
        row = tasks.index(task)
        axes.plot([percent] * 2, [row - 0.46, row + 0.46], color=VERMILION, linewidth=2, zorder=4)
    handles = list(axes.get_legend_handles_labels()[0]) if len(series) > 1 else []
    if marks:
        handles.append(Line2D([], [], color=VERMILION, linewidth=2, label="chance"))
    key_inches = key_above(figure, axes, handles) if handles else 0.0
    counted = f"; {alike.pop()} samples of each task" if len(alike) == 1 else "; n: samples"
    others = dict.fromkeys(each.task for each in every if each.unit != "percent")
    left_out = f" No percentage, and no bar: {', '.join(others)}." if others else ""
    words = f"With 95 % intervals{counted}.{left_out}"
    finish(figure, caption or words, _height(len(tasks), len(series), lines) + key_inches)
    save_figure(figure, path)


def difference_figure(
    differences: Sequence[Difference],
    path: Path,
    title: str = "",
    names: tuple[str, str] = ("A", "B"),
    caption: str | None = None,
) -> None:
    """Paired differences with their 95 % intervals as points in rows, against a line at 0.

    Args:
        differences: from ``ropewalk.evaluation.comparison.compare``. Percentage points and perplexities have
            axes of their own; real ones are filled, and what could not be compared says so.
        path: ``.png`` or ``.svg``; complete or not written at all.
        title: above the axes.
        names: of A and B.
        caption: in place of the one that is made from the differences.

    Raises:
        RopewalkError: if there is no difference to draw, or the suffix is another.
    """
    drawn = [each for each in differences if math.isfinite(each.difference)]
    if not drawn:
        raise RopewalkError("there is no difference to draw")
    units = [unit for unit in UNITS if any(each.unit == unit for each in drawn)]
    groups = [[each for each in differences if each.unit == unit] for unit in units]
    figure, (first,) = audit_figure(title, [("", "")])
    first.remove()
    heights = [len(group) + 1.0 for group in groups]
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    inches = 0.35 * (len(groups) - 1)
    for axes, unit, group in zip(panels, units, groups, strict=True):
        dress_axes(axes, f"{names[1]} less {names[0]} ({UNITS[unit]})", "")
        inches += _forest(axes, group)
    key_inches = key_above(figure, panels[0], _forest_key(drawn))
    without = sum(each.unit not in units for each in differences)
    words = "Differences of the same samples with 95 % intervals; filled: more than chance (p below 0.05, adjusted)."
    if without:
        words += f" {without} others could not be compared."
    finish(figure, caption or words, inches + key_inches)
    save_figure(figure, path)


def _rows(axes: Any, names: Sequence[str]) -> int:
    """Names down the left side, the first at the top; returns the most lines that a name takes."""
    folded = [fill(name, NAME_CHARACTERS, break_on_hyphens=False) for name in names]
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), folded)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    return 1 + max(name.count("\n") for name in folded)


def _height(rows: int, bars: int, lines: int) -> float:
    """Inches that rows of so many bars take, with names of so many lines."""
    return max(1.8, 0.9 + rows * max(BAR_INCHES * bars, NAME_INCHES * (lines + 0.3)))


def _task_bars(
    axes: Any,
    by_task: Mapping[str, TaskResult],
    at: Mapping[str, float],
    height: float,
    name: str,
    number: int,
    count: int,
) -> None:
    colour, hatch = series_style(number, count, HATCHES)
    fill_colour = series_style(number, count, FILLS)[1]
    ran = [task for task in at if task in by_task and by_task[task].status == "ok"]
    y = [at[task] for task in ran]
    score = np.array([by_task[task].score for task in ran])
    ends = np.array([by_task[task].ci95 for task in ran]).reshape(-1, 2)
    axes.barh(
        y, score, 0.9 * height, label=shown_name(name), facecolor=fill_colour, edgecolor=colour, hatch=hatch
    )
    # Rounding may put an end past the score.
    errors = np.maximum(0, [score - ends[:, 0], ends[:, 1] - score])
    axes.errorbar(score, y, xerr=errors, fmt="o", color=INK, markersize=3, elinewidth=1.1, capsize=3)
    for task in at:
        if task in by_task and task not in ran:
            axes.text(1, at[task], "not run", va="center", fontsize=8, color=INK)


def _sizes(drawn: Sequence[TaskResult]) -> dict[str, str]:
    """n of each task, as ``1,000``, or of each model where they differ."""
    counts: dict[str, dict[str, None]] = {}
    for each in drawn:
        counts.setdefault(each.task, {})[f"{each.n:,}"] = None
    return {task: " / ".join(found) for task, found in counts.items()}


def _forest(axes: Any, group: Sequence[Difference]) -> float:
    """Points in rows; returns the inches that they take."""
    lines = _rows(axes, [_row_name(each) for each in group])
    axes.axvline(0, color=INK, linewidth=1, zorder=1)
    values = [0.0]
    for row, each in enumerate(group):
        if not math.isfinite(each.difference):
            axes.text(0, row, " not compared", va="center_baseline", fontsize=8, color=INK)
            continue
        finite = all(map(math.isfinite, each.ci95))
        low, high = each.ci95 if finite else (each.difference,) * 2
        values += [each.difference, low, high]
        look = _point(each.real)
        axes.plot([low, high], [row, row], color=look["color"], linewidth=1.4, zorder=2)
        axes.plot(each.difference, row, zorder=3, **look)
        axes.annotate(
            difference_words(each),
            (1, row),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center_baseline",
            color=INK,
            fontsize=8.5,
            fontweight="bold" if each.real else "normal",
        )
    room = 0.06 * ((max(values) - min(values)) or 1)
    axes.set_xlim(min(values) - room, max(values) + room)
    return _height(len(group), 1, lines)


def _row_name(each: Difference) -> str:
    name = task_words(each.suite, each.task)
    return name if each.length is None else f"{name}, {format_length(each.length)}"


def _point(real: bool) -> dict[str, Any]:
    colour = COLOURS[1] if real else COLOURS[0]
    return {
        "color": colour,
        "marker": "D" if real else "o",
        "markerfacecolor": colour if real else "white",
        "markersize": 6,
        "linestyle": "none",
    }


def _forest_key(drawn: Sequence[Difference]) -> list[Any]:
    words = {True: "real difference", False: "may be chance"}
    present = {each.real for each in drawn}
    return [Line2D([], [], label=text, **_point(real)) for real, text in words.items() if real in present]
