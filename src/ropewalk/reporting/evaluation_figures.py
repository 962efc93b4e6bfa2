"""Scores by length: of one task and several models, or of all tasks of one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.reporting.figures import (
    BAND_ALPHA,
    COLOURS,
    INK,
    LINE_STYLES,
    SIZE_INCHES,
    dress_axes,
    save_figure,
    series_style,
    value_axis,
)
from ropewalk.reporting.precision_axes import (
    LINE_COLOURS,
    LINE_MARKERS,
    MOST_LINES,
    alone,
    audit_figure,
    finish,
)
from ropewalk.reporting.rope_axes import (
    KEY_CHARACTERS,
    MARKERS,
    PAPER,
    check_finite,
    fix_ticks,
    length_text,
    mark_length,
    shown_name,
)
from ropewalk.reporting.shown_text import shown

PERCENT = "right answers (%)"
OVERALL = "overall"
MOST_TICKS = 11
KEY_SHARE = 0.85
"""Of the figure's width: the rest is left of the axes."""
PANEL_COLUMNS = 4
PANEL_INCHES = 1.42
PANEL_TICKS = 4
PANEL_CHARACTERS = 24


def score_figure(
    series: Mapping[str, Sequence[TaskResult]],
    path: Path,
    trained_length: int | None = None,
    title: str = "",
    threshold: float | None = None,
    caption: str | None = None,
) -> None:
    """Score of one task by length as lines with 95 % bands, one line a model.

    Args:
        series: results of one task by the model's name; a length that was not run breaks the line and is named.
        path: ``.png`` or ``.svg``; complete or not written at all.
        trained_length: tokens; marked where it lies on the axis.
        title: above the axes.
        threshold: a score to mark, such as the one of an effective length.
        caption: in place of the one that is made from the results.

    Raises:
        RopewalkError: if there is no score, the results are of several tasks, or the suffix is another.
    """
    drawn = check_one_task(series)
    if len(series) > MOST_LINES:
        raise RopewalkError(f"a figure shows at most {MOST_LINES} series, got {len(series)} of scores")
    in_percent = drawn[0].unit == "percent"
    figure, (axes,) = audit_figure(title, [("length (tokens)", PERCENT if in_percent else "perplexity")])
    lengths = _lengths([result for results in series.values() for result in results])
    score_axes(axes, lengths, drawn, MOST_TICKS)
    for number, (name, results) in enumerate(series.items()):
        score_line(axes, results, lengths, _look(number, len(series)), shown_name(name))
        if len(series) == 1:
            _say_not_run(axes, results, 9)
    if in_percent:
        # Room above 100 % for words at the line of the trained length.
        axes.set_ylim(0, 110)
    if threshold is not None:
        axes.axhline(threshold, color=INK, linestyle=(0, (6, 3)), linewidth=1, zorder=1)
        axes.annotate(
            f"threshold\n{threshold:g}",
            (1, threshold),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    low, high = axes.get_xlim()
    if trained_length is not None and low < trained_length < high:
        late = math.log(trained_length / low) > 0.7 * math.log(high / low)
        mark_length(axes, trained_length, f"trained length {length_text(trained_length)}", left=late)
    key_inches = key_above(figure, axes) if len(series) > 1 else 0.0
    words = caption or " ".join([_samples_words(drawn), *_missing_words(series)])
    finish(figure, words, SIZE_INCHES[1] + key_inches)
    save_figure(figure, path)


def tasks_figure(
    results: Sequence[TaskResult],
    path: Path,
    trained_length: int | None = None,
    title: str = "",
    threshold: float | None = None,
    caption: str | None = None,
) -> None:
    """All tasks of one model by length, a small panel each with shared axes; ``overall`` last, in bold.

    Args:
        results: tasks of one suite, in percent, at one or more lengths. A task that was not run has a panel
            that says so.
        path, trained_length, title, threshold, caption: as in :func:`score_figure`.

    Raises:
        RopewalkError: if no task has a score at a length, or the suffix is another.
    """
    tasks = sorted(dict.fromkeys(each.task for each in results), key=lambda task: task == OVERALL)
    drawn = [r for r in results if r.status == "ok" and r.length is not None and math.isfinite(r.score)]
    if not drawn:
        raise RopewalkError("there is no score to draw")
    lengths = _lengths(results)
    columns = min(PANEL_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, (first,) = audit_figure(title, [("", "")])
    first.remove()
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for number, axes in enumerate(panels.flat):
        if number >= len(tasks):
            axes.remove()
            continue
        of_task = [each for each in results if each.task == tasks[number]]
        _panel(axes, tasks[number], of_task, lengths, drawn)
        if threshold is not None:
            axes.axhline(threshold, color=INK, linestyle=(0, (6, 3)), linewidth=0.8, zorder=1)
        low, high = axes.get_xlim()
        if trained_length is not None and low < trained_length < high:
            axes.axvline(trained_length, color=INK, linestyle=(0, (2, 2)), linewidth=0.8, zorder=1)
        # The last of a column has its lengths below it, also where the row below is shorter.
        axes.tick_params(labelbottom=number + columns >= len(tasks), labelsize=8)
    figure.supylabel(PERCENT, fontsize=10, color=INK)
    marked = trained_length if trained_length is not None and low < trained_length < high else None
    lines = [
        *([f"Vertical line: trained length {length_text(marked)}."] if marked is not None else []),
        *([f"Horizontal line: {threshold:g} %."] if threshold is not None else []),
    ]
    words = " ".join(
        [
            "Score by length in tokens.",
            _samples_words([r for r in drawn if r.task != OVERALL] or drawn),
            *lines,
        ]
    )
    finish(figure, caption or words, 0.45 + PANEL_INCHES * rows)
    save_figure(figure, path)


def check_one_task(series: Mapping[str, Sequence[TaskResult]]) -> list[TaskResult]:
    """The results with a score and a length.

    Raises:
        RopewalkError: if there are none, or they are of several tasks or units.
    """
    kinds = dict.fromkeys((r.suite, r.task, r.unit) for results in series.values() for r in results)
    if len(kinds) > 1:
        named = ", ".join(f"{suite} {task}" for suite, task, _ in kinds)
        raise RopewalkError(f"a figure of scores by length shows one task, got {named}")
    every = [result for results in series.values() for result in results]
    drawn = [r for r in every if r.status == "ok" and r.length is not None and math.isfinite(r.score)]
    if not drawn:
        raise RopewalkError("there is no score to draw")
    return drawn


def _lengths(results: Sequence[TaskResult]) -> list[int]:
    """Also those that were not run: a line must not lead past them."""
    return sorted({each.length for each in results if each.length is not None})


def score_axes(axes: Any, lengths: Sequence[int], drawn: Sequence[TaskResult], most_ticks: int) -> None:
    """Lengths on a log2 axis with ticks where something was measured; percent from 0 to 100, or perplexity."""
    axes.set_xscale("log", base=2)
    room = (lengths[-1] / lengths[0]) ** 0.06 if len(lengths) > 1 else 2
    axes.set_xlim(lengths[0] / room, lengths[-1] * room)
    fix_ticks(axes.xaxis, spaced(lengths, most_ticks))
    if drawn[0].unit == "percent":
        axes.set_ylim(0, 104)
        axes.set_yticks(range(0, 101, 20))
        return
    values = [value for each in drawn for value in (each.score, *each.ci95) if math.isfinite(value)]
    check_finite("score", values)
    value_axis(axes, min(values), max(values))


def key_above(figure: Any, axes: Any, handles: Sequence[Any] | None = None) -> float:
    """A legend just above the axes, in as many columns as the figure is wide; returns its height in inches."""
    handles = handles or axes.get_legend_handles_labels()[0]
    for columns in range(min(4, len(handles)), 0, -1):
        legend = axes.legend(
            handles=handles,
            labels=[fill(each.get_label(), KEY_CHARACTERS) for each in handles],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            borderaxespad=0.2,
            frameon=False,
            fontsize=9,
            handlelength=3,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        box = legend.get_window_extent(figure.canvas.get_renderer())
        if box.width <= KEY_SHARE * figure.bbox.width:
            break
    return float(box.height / figure.dpi)


def spaced(lengths: Sequence[int], most: int) -> list[float]:
    """The lengths from the longest down that lie far enough apart on a logarithmic axis for ``most`` labels."""
    gap = math.log2(lengths[-1] / lengths[0]) / most
    kept = [float(lengths[-1])]
    for length in reversed(lengths[:-1]):
        if math.log2(kept[-1] / length) >= gap * (1 - 1e-9):
            kept.append(float(length))
    return kept[::-1]


def score_line(
    axes: Any, results: Sequence[TaskResult], lengths: Sequence[int], look: Mapping[str, Any], name: str
) -> None:
    """A line broken where there is no score, its band, and error bars where a point stands alone."""
    by_length = {each.length: each for each in results if math.isfinite(each.score)}
    at = [length for length in lengths if any(each.length == length for each in results)]
    score = np.array([by_length[n].score if n in by_length else math.nan for n in at])
    ends = np.array([by_length[n].ci95 if n in by_length else (math.nan,) * 2 for n in at]).reshape(-1, 2)
    axes.plot(at, score, label=name, clip_on=False, zorder=3, **look)
    axes.fill_between(at, ends[:, 0], ends[:, 1], color=look["color"], alpha=BAND_ALPHA, linewidth=0)
    single = alone(score)
    if single.any():
        # Rounding may put an end past the score.
        errors = np.maximum(0, [score - ends[:, 0], ends[:, 1] - score])[:, single]
        x = np.array(at)[single]
        axes.errorbar(x, score[single], errors, fmt="none", color=look["color"], elinewidth=1.2, capsize=4)


def _look(number: int, count: int) -> dict[str, Any]:
    colour, line = series_style(number, count, LINE_STYLES)
    if number >= len(COLOURS):
        colour = LINE_COLOURS[number]
    marker = "o" if count == 1 else (*MARKERS, *LINE_MARKERS[len(MARKERS) :])[number]
    return {"color": colour, "linestyle": line, "marker": marker, "linewidth": 1.8, "markersize": 6}


def _panel(
    axes: Any, task: str, results: Sequence[TaskResult], lengths: Sequence[int], drawn: Sequence[TaskResult]
) -> None:
    dress_axes(axes, "", "")
    score_axes(axes, lengths, drawn, PANEL_TICKS)
    weight = "bold" if task == OVERALL else "normal"
    heading = axes.set_title(fill(task, PANEL_CHARACTERS), fontsize=9, color=INK, fontweight=weight, pad=4)
    heading.set_parse_math(False)
    missing = [each for each in results if each.status != "ok"]
    if len(missing) == len(results):
        reasons = dict.fromkeys(shown(each.reason or "", 90) for each in missing)
        words = fill(f"not run: {'; '.join(reasons)}", PANEL_CHARACTERS)
        axes.text(
            0.5,
            0.5,
            words,
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=7,
            color=INK,
            parse_math=False,
            bbox=PAPER,
        )
        return
    look = {"color": COLOURS[1], "marker": "o", "linewidth": 1.6, "markersize": 4}
    score_line(axes, results, lengths, look, "")
    _say_not_run(axes, results, 7)


def _say_not_run(axes: Any, results: Sequence[TaskResult], size: float) -> None:
    """Words at the lengths that have no point, which else would look as if nobody had asked for them."""
    for each in results:
        if each.status != "ok" and each.length is not None:
            axes.annotate(
                "not run",
                (each.length, 0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 4),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=size,
                color=INK,
            )


def _samples_words(drawn: Sequence[TaskResult]) -> str:
    counts = sorted({each.n for each in drawn})
    n = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{n} samples a point, with 95 % intervals."


def _missing_words(series: Mapping[str, Sequence[TaskResult]]) -> list[str]:
    """What has no point, and why."""
    found = []
    for name, results in series.items():
        reasons: dict[str, list[str]] = {}
        for each in sorted(results, key=lambda each: each.length or 0):
            if each.status != "ok":
                at = "any length" if each.length is None else length_text(each.length)
                reasons.setdefault(shown(each.reason or "", 120), []).append(at)
        whose = f"{name} " if len(series) > 1 else ""
        found += [f"Not run: {whose}at {', '.join(at)} ({reason})." for reason, at in reasons.items()]
    return found
