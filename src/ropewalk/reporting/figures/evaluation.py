"""Draw an evaluation: scores by length, depth and task, and differences between two evaluations.

All functions take a ``title`` above the panels, and most take a ``caption`` that replaces the default one. Each raises
RopewalkError if there is nothing to draw. A task or length that did not run is labelled "not run", never drawn as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval
from ropewalk.io.lengths import format_length
from ropewalk.reporting import style
from ropewalk.reporting.figures.primitives import (
    Axis,
    Boxes,
    Figure,
    Fill,
    HeatMap,
    Line,
    Look,
    Mark,
    Note,
    Panel,
    Rule,
    Steps,
    Ticks,
    alone,
    band,
    beside,
    check_count,
    index_ticks,
    length_ticks,
    linear_length_ticks,
    mark_length,
    named,
    power_ticks,
    row_axis,
    series_fill,
    series_look,
    spaced,
    tell,
    value_axis,
    whiskers,
)
from ropewalk.reporting.scores.tables import OVERALL, difference_words, task_words
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import BLUE, GREY, INK, VERMILION, length_text, tokens_text

if TYPE_CHECKING:
    from ropewalk.evaluation.comparison import ScoreDifference

    pass

Series = Mapping[str, Sequence[TaskResult]]
PERCENT = "correct (%)"
UNITS = {"percent": "percentage points", "perplexity": "percent of the perplexity"}
THRESHOLD_DASH = (0, (6, 3))
MOST_LENGTHS = 11
MOST_EDGES = 11
"""Largest number of edges of position bins that are all labelled."""
PANEL_COLUMNS, PANEL_INCHES, PANEL_LENGTHS = 4, 1.42, 4
BAR_INCHES = 0.24
NAME_INCHES = 0.16
"""Height of one line of a name."""
NUMBERED_COLUMNS, NUMBERED_ROWS = 14, 25
MOST_DEPTHS = 21


def perplexity_figure(
    series: Mapping[str, TaskResult], trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw perplexity by position as step lines with 95 % bands, one line per model.

    Args:
        series: perplexity results by model name, such as ``before`` and ``after``.
        trained_length: trained length in tokens, marked if given.
    """
    bins = [each for result in series.values() for each in result.positions]
    if not any(math.isfinite(each.perplexity) for each in bins):
        raise RopewalkError("there is no finite perplexity to draw")
    edges = sorted({edge for each in bins for edge in (each.start, each.end)})
    x = _position_axis(edges)
    assert x.limits is not None
    marks: list[Mark] = []
    for number, result in enumerate(series.values()):
        found = result.positions
        look = series_look(number, len(series), marker="", width=2)
        # The first bin starts at position 0, which a logarithmic axis cannot show.
        own = [max(x.limits[0], found[0].start), *(each.end for each in found)] if found else [0]
        banded = [
            (ends, each) for ends, each in zip(pairwise(own), found, strict=True) if _is_finite(each.ci95)
        ]
        # reshape gives four columns even if there is no row.
        left, right, low, high = np.array([(*ends, *each.ci95) for ends, each in banded]).reshape(-1, 4).T
        marks.append(Boxes(left, right, low, high, Fill(look.colour, alpha=style.BAND_ALPHA), order=1))
        if found:
            steps = Steps(own, [_finite(each.perplexity) for each in found], look, named(series, number))
            marks += [steps, *_end_label(steps, series)]
    if trained_length is not None and edges[0] < trained_length <= edges[-1]:
        # At the right edge of the axis there is room on the left only.
        side = beside(trained_length == edges[-1])
        marks.append(Rule(trained_length, words=f"trained length {length_text(trained_length)}", side=side))
    values = [value for each in bins for value in (each.perplexity, *each.ci95) if math.isfinite(value)]
    axis = value_axis("perplexity", min(values), max(values))
    panel = Panel(tuple(marks), x, axis, key=not _has_end_labels(series))
    counts = sorted({result.n for result in series.values()})
    caption = (
        f"Perplexity of the tokens in each range of positions, over {_range(counts)} sequences. Bands are 95 % "
        "intervals over sequences."
    )
    told = tuple(_told_positions(name, result) for name, result in series.items())
    return Figure((panel,), caption, title, told=told)


def _told_positions(name: str, result: TaskResult) -> str:
    """Perplexity by range of positions, for a text alternative."""
    starts = {each.start: each for each in result.positions}
    y = [_finite(each.perplexity) for each in result.positions]

    def place(start: float) -> str:
        return f"positions {start:,.0f} to {starts[int(start)].end - 1:,}"

    return tell(f"perplexity {name}", [*starts], y, place)


def _has_end_labels(series: Mapping[str, Any]) -> bool:
    """Whether lines are few enough for labels at their ends, which a reader finds faster than a key."""
    return 1 < len(series) <= style.MOST_SERIES


def _end_label(steps: Steps, series: Mapping[str, Any]) -> list[Mark]:
    """Label a step line at its last value; steps carry no label of their own."""
    known = [at for at, value in enumerate(steps.y) if math.isfinite(value)]
    if not known or not _has_end_labels(series):
        return []
    invisible = replace(steps.look, dash="", marker="")
    return [Line([steps.edges[known[-1] + 1]], [steps.y[known[-1]]], invisible, end=steps.name)]


def _position_axis(edges: Sequence[int]) -> Axis:
    """Build an axis with ticks at bin edges, or at round lengths if there are many edges.

    The axis is logarithmic if bins grow, because the first would vanish.
    """
    widths = np.diff(edges)
    grows = edges[0] == 0 and len(edges) > 2 and widths.max() >= style.LOG_RATIO * widths.min()
    # Half of the first edge stands for position 0.
    left = edges[1] / 2 if grows else edges[0]
    ticks = length_ticks(edges[1:] if grows else edges)
    if len(ticks) > MOST_EDGES:
        ticks = power_ticks(edges[1], edges[-1]) if grows else linear_length_ticks(edges[-1])
    return Axis("position in the sequence (tokens)", "log2" if grows else "linear", (left, edges[-1]), ticks)


def _told_scores(name: str, results: Sequence[TaskResult]) -> str:
    """Scores by length, for a text alternative."""
    words = [
        f"{_score_words(each)} at {tokens_text(each.length)}"
        for each in sorted(results, key=lambda each: each.length or 0)
        if each.length is not None
    ]
    return f"{name}: {', '.join(words or ['not run'])}"


def _score_words(result: TaskResult) -> str:
    if result.status != "ok" or not math.isfinite(result.score):
        return "not run" if result.status != "ok" else "no value"
    return f"{style.number_text(result.score)}{' %' if result.unit == 'percent' else ''}"


def score_figure(
    series: Series,
    trained_length: int | None = None,
    title: str = "",
    threshold: float | None = None,
    caption: str | None = None,
) -> Figure:
    """Draw the score of one task by length as lines with 95 % bands, one line per model.

    Args:
        series: results of one task by model name. A length that did not run breaks the line and is labelled.
        trained_length: trained length in tokens, marked if it lies within the axis.
        threshold: score to mark, such as the threshold of the effective length.
    """
    plotted = _one_task(series)
    check_count("scores", len(series), style.MOST_LINES)
    lengths = _lengths([result for results in series.values() for result in results])
    x, y = _score_axes(lengths, plotted, MOST_LENGTHS)
    x = replace(x, label="length (tokens)")
    if plotted[0].unit == "percent":
        # Leave room above 100 % for the label of the trained length.
        y = replace(y, label=PERCENT, limits=(0, 110))
    marks: list[Mark] = []
    # The threshold is labelled at the right edge, where the ends of lines would be.
    direct = threshold is None and _has_end_labels(series)
    for number, results in enumerate(series.values()):
        look = _line_look(number, len(series))
        marks += _score_line(results, lengths, look, named(series, number), direct)
        # With several series, a note could not say whose score is missing; the caption does.
        if len(series) == 1:
            marks += _not_run_notes(results, 9)
    if threshold is not None:
        marks.append(
            Rule(threshold, "y", f"threshold\n{threshold:g}", "outside", dash=THRESHOLD_DASH, order=1)
        )
    if trained_length is not None and x.limits is not None:
        marks += mark_length(trained_length, "trained length", *x.limits)
    words = caption or " ".join([_samples_words(plotted), *_missing_words(series)])
    told = tuple(_told_scores(name, results) for name, results in series.items())
    return Figure((Panel(tuple(marks), x, y, key=not direct),), words, title, told=told)


def tasks_figure(
    results: Sequence[TaskResult],
    trained_length: int | None = None,
    title: str = "",
    threshold: float | None = None,
    caption: str | None = None,
) -> Figure:
    """Draw all tasks of one model by length in small panels with shared axes; ``overall`` comes last, in bold.

    Args:
        results: tasks of one suite, in percent, at one or more lengths. The panel of a task that did not run says why.
        trained_length: trained length in tokens, marked if it lies within the axis.
        threshold: score to mark, such as the threshold of the effective length.
    """
    tasks = sorted(dict.fromkeys(each.task for each in results), key=lambda task: task == OVERALL)
    plotted = _measured(results)
    lengths = _lengths(results)
    x, y = _score_axes(lengths, plotted, PANEL_LENGTHS)
    assert x.limits is not None
    rules, notes = [], []
    if trained_length is not None and x.limits[0] < trained_length < x.limits[1]:
        rules.append(Rule(trained_length, width=0.8, order=1))
        notes.append(f"The vertical line is the trained length, {length_text(trained_length)}.")
    if threshold is not None:
        rules.append(Rule(threshold, "y", dash=THRESHOLD_DASH, width=0.8, order=1))
        notes.append(f"The horizontal line is the threshold of the effective length, {threshold:g} %.")
    panels = []
    for task in tasks:
        marks = _task_marks([each for each in results if each.task == task], lengths, x.limits)
        heading = fill(task, style.PANEL_CHARACTERS)
        panels.append(Panel((*marks, *rules), x, y, heading, bold=task == OVERALL, small=True))
    columns = min(PANEL_COLUMNS, len(tasks))
    # The overall score counts the samples of all tasks.
    samples = _samples_words([r for r in plotted if r.task != OVERALL] or plotted)
    words = " ".join(["Score of each task by length in tokens.", samples, *notes])
    height = 0.25 + PANEL_INCHES * -(-len(tasks) // columns)
    told = (_told_scores(task, [each for each in results if each.task == task]) for task in tasks)
    return Figure(
        *(tuple(panels), caption or words, title, height),
        columns=columns,
        shared=True,
        y_label=PERCENT,
        told=tuple(told),
    )


def _task_marks(
    results: Sequence[TaskResult], lengths: Sequence[int], ends: tuple[float, float]
) -> list[Mark]:
    """Draw one task's line in a small panel, or write why it did not run."""
    missing = [each for each in results if each.status != "ok"]
    if len(missing) == len(results):
        reasons = dict.fromkeys(shown(each.reason or "", 90) for each in missing)
        words = fill(f"not run: {'; '.join(reasons)}", style.PANEL_CHARACTERS)
        # The geometric mean is the middle of a logarithmic axis.
        return [Note(words, math.sqrt(ends[0] * ends[1]), 52, anchor="centre", size=7, paper=True)]
    look = Look(BLUE, "-", "o", width=1.6, size=4)
    return [*_score_line(results, lengths, look, ""), *_not_run_notes(results, 7)]


def needle_figure(results: Sequence[TaskResult], title: str = "", caption: str | None = None) -> Figure:
    """Draw correct answers by length and depth as a heat map, with a depth of 0 % at the top.

    Args:
        results: results of one task at one or more lengths, with ``depths`` in their details. Lengths that did not run
            are hatched and labelled.
    """
    columns = sorted((r for r in results if r.length is not None), key=lambda r: r.length or 0)
    cells = [_depths(each) for each in columns]
    depths = sorted({depth for column in cells for depth in column})
    values = [[_depth_score(column.get(depth)) for column in cells] for depth in depths]
    if not any(math.isfinite(value) for row in values for value in row):
        raise RopewalkError(
            "no result has scores by depth, so there is nothing to draw; pass results of a needle task"
        )
    is_numbered = len(depths) <= NUMBERED_ROWS and len(columns) <= NUMBERED_COLUMNS
    size = (8.5 if len(columns) <= 8 else 7.0) if is_numbered else 0.0
    rows = tuple(map(tuple, values))
    # From 0 to 100 whatever the scores, so that a colour means the same in every figure.
    marks: list[Mark] = [HeatMap(rows, "even", 0, 100, PERCENT, lambda value: f"{value:.0f}", numbers=size)]
    # Fewer rows are too low for upright words.
    flat = len(depths) < 4
    marks += [
        Note(
            *("not run", column, (len(depths) - 1) / 2),
            anchor="centre",
            upright=not flat,
            size=7 if flat else 9,
            paper=True,
        )
        for column, result in enumerate(columns)
        if result.status != "ok"
    ]
    panel = Panel(
        tuple(marks),
        Axis(
            "length (tokens)",
            limits=(-0.5, len(columns) - 0.5),
            ticks=index_ticks([length_text(each.length or 0) for each in columns], NUMBERED_COLUMNS),
        ),
        Axis(
            "depth (%)",
            limits=(len(depths) - 0.5, -0.5),
            ticks=index_ticks([f"{100 * depth:.3g}" for depth in depths], MOST_DEPTHS),
        ),
        grid="",
    )
    told = tuple(
        f"{tokens_text(result.length or 0)}: "
        + ("not run" if result.status != "ok" else _told_depths(depths, [row[column] for row in values]))
        for column, result in enumerate(columns)
    )
    height = 1.1 + (0.25 * len(depths) if len(depths) <= NUMBERED_ROWS else 5)
    return Figure(
        (panel,), caption or _depth_words(columns, cells, values), title, max(2.4, height), told=told
    )


def _told_depths(depths: Sequence[float], scores: Sequence[float]) -> str:
    known = [(score, depth) for depth, score in zip(depths, scores, strict=True) if math.isfinite(score)]
    if not known:
        return "no sample"
    low, high = min(known), max(known)
    if low[0] == high[0]:
        return f"{low[0]:.0f} % at every depth"
    least, most = (f"{score:.0f} % at depth {100 * depth:.3g} %" for score, depth in (low, high))
    return f"lowest {least}, highest {most}"


def _depths(result: TaskResult) -> dict[float, Mapping[str, Any]]:
    if result.status != "ok":
        return {}
    return {float(each["depth"]): each for each in result.details.get("depths", ())}


def _depth_score(cell: Mapping[str, Any] | None) -> float:
    return math.nan if cell is None or cell["score"] is None else float(cell["score"])


def _depth_words(
    columns: Sequence[TaskResult],
    cells: Sequence[Mapping[float, Mapping[str, Any]]],
    values: Sequence[Sequence[float]],
) -> str:
    counts = sorted({int(each["n"]) for column in cells for each in column.values()})
    words = [
        f"Correct answers in percent, over {_range(counts)} samples per cell. A depth of 0 % is the beginning of the "
        "text."
    ]
    reasons = dict.fromkeys(shown(r.reason or "", 120) for r in columns if r.status != "ok")
    words += [f"Hatched columns did not run ({reason})." for reason in reasons]
    ran = [column for column, result in enumerate(columns) if result.status == "ok"]
    if any(math.isnan(row[column]) for row in values for column in ran):
        words.append("Hatched cells have no sample at this depth and length.")
    return " ".join(words)


def retention_figure(
    series: Series,
    title: str = "",
    chance: Mapping[str, float] | None = None,
    caption: str | None = None,
) -> Figure:
    """Draw short-context tasks as bars with 95 % intervals, one bar per task and model.

    Args:
        series: results in percent by model name, such as ``before`` and ``after``. Results in other units have no bar;
            the caption names them.
        chance: accuracy of random guessing in percent, by task; marked if given.
    """
    if len(series) > style.MOST_SERIES:
        check_count("scores", len(series))
    every = [result for results in series.values() for result in results]
    tasks = list(dict.fromkeys(each.task for each in every if each.unit == "percent"))
    plotted = [r for r in every if r.unit == "percent" and r.status == "ok" and math.isfinite(r.score)]
    if not plotted:
        raise RopewalkError("no result has a score in percent, so there is nothing to draw")
    height = 0.8 / len(series)
    marks: list[Mark] = []
    for number, results in enumerate(series.values()):
        found = {each.task: each for each in results if each.unit == "percent"}
        # Bars of one task are centred on its row, whatever the number of models.
        at = {task: row + (number - (len(series) - 1) / 2) * height for row, task in enumerate(tasks)}
        ran = [task for task in tasks if task in found and found[task].status == "ok"]
        y = np.array([at[task] for task in ran])
        score, low, high = _columns(found[task] for task in ran)
        sides = y - 0.45 * height, y + 0.45 * height
        marks += [
            Boxes(0 * score, score, *sides, series_fill(number, len(series)), named(series, number)),
            Line(score, y, Look(INK, "", "o", size=3), order=4),
            whiskers(y, score, low, high, lying=True, caps=3),
        ]
        marks += [Note("not run", 1, at[task], size=8) for task in tasks if task in found and task not in ran]
    for row, task in enumerate(tasks):
        if chance and task in chance:
            mark = Look(VERMILION, "-", width=2)
            marks.append(Line([chance[task]] * 2, [row - 0.46, row + 0.46], mark, "chance", order=4))
    sizes = _sizes(plotted)
    alike = set(sizes.values())
    names = [task if len(alike) == 1 or task not in sizes else f"{task}, n {sizes[task]}" for task in tasks]
    axis = row_axis(names)
    panel = Panel(tuple(marks), Axis("score (%)", limits=(0, 104)), axis, key=True, grid="x")
    counted = f"{alike.pop()} samples per task" if len(alike) == 1 else "n is the number of samples"
    others = dict.fromkeys(each.task for each in every if each.unit != "percent")
    left_out = f" Not shown because not in percent: {', '.join(others)}." if others else ""
    words = f"Scores with 95 % intervals; {counted}.{left_out}"
    told = tuple(
        f"{name}: {', '.join(f'{each.task} {_score_words(each)}' for each in results if each.unit == 'percent')}"
        for name, results in series.items()
    )
    return Figure((panel,), caption or words, title, _rows_height(axis.ticks, len(series)), told=told)


def difference_figure(
    differences: Sequence[ScoreDifference],
    title: str = "",
    names: tuple[str, str] = ("A", "B"),
    caption: str | None = None,
) -> Figure:
    """Draw paired differences with 95 % intervals as points in rows, against a line at 0.

    Args:
        differences: differences from ``ropewalk.evaluation.comparison.compare``. Percentage points and perplexities
            have separate axes. Significant differences are filled; pairs that could not be compared are labelled.
        names: names of A and B.
    """
    plotted = [each for each in differences if math.isfinite(each.difference)]
    if not plotted:
        raise RopewalkError("there is no finite score difference to draw")
    units = [unit for unit in UNITS if any(each.unit == unit for each in plotted)]
    panels: list[Panel] = []
    heights, inches = [], 0.35 * (len(units) - 1)
    for unit in units:
        group = [each for each in differences if each.unit == unit]
        marks, axis = _forest(group)
        label = f"{names[1]} minus {names[0]} ({UNITS[unit]})"
        rows = row_axis([_row_name(each) for each in group])
        # Only the first panel has a key, because filled points mean the same in every panel.
        kinds = {each.real for each in plotted} if not panels else set()
        words = {True: "significant", False: "not significant"}
        key = [Line([], [], _point(real), text) for real, text in words.items() if real in kinds]
        panels.append(Panel((*key, *marks), replace(axis, label=label), rows, key=not panels, grid="x"))
        heights.append(len(group) + 1.0)
        inches += _rows_height(rows.ticks, 1)
    without = sum(each.unit not in units for each in differences)
    text = "Differences on the same samples with 95 % intervals. Filled points are significant (adjusted p below 0.05)."
    text += f" {without} other results could not be compared." if without else ""
    told = (
        f"{_row_name(each)}: "
        + (difference_words(each) if math.isfinite(each.difference) else "not compared")
        + (", significant" if each.real else "")
        for each in differences
    )
    return Figure(tuple(panels), caption or text, title, inches, heights=tuple(heights), told=tuple(told))


def _forest(group: Sequence[ScoreDifference]) -> tuple[list[Mark], Axis]:
    """Build the points in rows and an axis that covers them."""
    marks: list[Mark] = [Rule(0, dash="-", order=1)]
    values = [0.0]
    for row, each in enumerate(group):
        if not math.isfinite(each.difference):
            marks.append(Note(" not compared", 0, row, size=8))
            continue
        low, high = each.ci95 if _is_finite(each.ci95) else (each.difference,) * 2
        values += [each.difference, low, high]
        look = _point(each.real)
        marks += [
            Line([low, high], [row, row], Look(look.colour, width=1.4), order=2),
            Line([each.difference], [row], look),
            Note(difference_words(each), None, row, 6, size=8.5, bold=each.real),
        ]
    room = 0.06 * ((max(values) - min(values)) or 1)
    return marks, Axis(limits=(min(values) - room, max(values) + room))


def _row_name(each: ScoreDifference) -> str:
    name = task_words(each.suite, each.task)
    return name if each.length is None else f"{name}, {format_length(each.length)}"


def _point(is_real: bool) -> Look:
    return Look(BLUE, "", "D") if is_real else Look(GREY, "", "o", hollow=True)


def _rows_height(names: Ticks | None, bars: int) -> float:
    """Height in inches of rows with this many bars each and names of one or more lines."""
    lines = 1 + max(name.count("\n") for _, name in names or [(0, "")])
    return max(1.6, 0.75 + len(names or ()) * max(BAR_INCHES * bars, NAME_INCHES * (lines + 0.3)))


def _measured(results: Sequence[TaskResult]) -> list[TaskResult]:
    """Results with a score and a length; RopewalkError if there are none."""
    plotted = [r for r in results if r.status == "ok" and r.length is not None and math.isfinite(r.score)]
    if not plotted:
        raise RopewalkError("no result has both a finite score and a length, so there is nothing to draw")
    return plotted


def _one_task(series: Series) -> list[TaskResult]:
    """Results with a score and a length.

    Raises:
        RopewalkError: if there are none, or they belong to several tasks or units.
    """
    kinds = dict.fromkeys((r.suite, r.task, r.unit) for results in series.values() for r in results)
    if len(kinds) > 1:
        names = ", ".join(f"{suite} {task}" for suite, task, _ in kinds)
        raise RopewalkError(
            f"a figure of scores by length shows only one task, got {len(kinds)}; give the results of one of these "
            f"tasks: {names}"
        )
    return _measured([result for results in series.values() for result in results])


def _lengths(results: Sequence[TaskResult]) -> list[int]:
    """All lengths, including those that did not run, so that no line passes over them."""
    return sorted({each.length for each in results if each.length is not None})


def _score_axes(lengths: Sequence[int], drawn: Sequence[TaskResult], most: int) -> tuple[Axis, Axis]:
    """Build an axis of lengths with ticks at the measured ones, and an axis of percent or perplexity."""
    # A single length spans no axis of which to take a share.
    room = (lengths[-1] / lengths[0]) ** 0.06 if len(lengths) > 1 else 2
    limits = lengths[0] / room, lengths[-1] * room
    x = Axis("", "log2", limits, length_ticks(spaced(lengths, most)))
    if drawn[0].unit == "percent":
        return x, Axis(limits=(0, 104), ticks=tuple((float(n), str(n)) for n in range(0, 101, 20)))
    values = [value for each in drawn for value in (each.score, *each.ci95) if math.isfinite(value)]
    return x, value_axis("perplexity", min(values), max(values))


def _score_line(
    results: Sequence[TaskResult], lengths: Sequence[int], look: Look, name: str, direct: bool = False
) -> list[Mark]:
    """Build a line with gaps for missing scores, its band, and error bars for isolated points."""
    found = {each.length: each for each in results if math.isfinite(each.score)}
    # A length that was requested and did not run stays as NaN, which interrupts the line.
    at = np.array([length for length in lengths if any(each.length == length for each in results)])
    score = np.array([found[n].score if n in found else math.nan for n in at])
    low, high = (
        np.array([_finite(_band_of(found[n])[end]) if n in found else math.nan for n in at]) for end in (0, 1)
    )
    end = name if direct and np.isfinite(score).any() else ""
    marks: list[Mark] = [Line(at, score, look, name, end, clip=False), band(at, low, high, look.colour)]
    single = alone(score)
    if single.any():
        bars = [each[single] for each in (at, score, low, high)]
        marks.append(whiskers(*bars, colour=look.colour, caps=4))
    return marks


def _band_of(result: TaskResult) -> Interval:
    """The interval to draw; none if it is the whole scale, because a band from 0 to 100 looks like a score of 100."""
    low, high = result.ci95
    return NO_INTERVAL if result.unit == "percent" and low <= 0 and high >= 100 else result.ci95


def _line_look(number: int, count: int) -> Look:
    """Style of one of up to eight lines, each with its own marker."""
    if number < style.MOST_SERIES:
        return series_look(number, count, **({"marker": "o"} if count == 1 else {}))
    dash = style.DASHES[number % len(style.DASHES)]
    return Look(style.LINE_COLOURS[number], dash, style.LINE_MARKERS[number])


def _not_run_notes(results: Sequence[TaskResult], size: float) -> list[Note]:
    """Label lengths that did not run, which would otherwise look as if nobody had requested them."""
    return [
        Note("not run", each.length, None, 0, 4, "foot", upright=True, size=size)
        for each in results
        if each.status != "ok" and each.length is not None
    ]


def _samples_words(drawn: Sequence[TaskResult]) -> str:
    words = f"{_range(sorted({result.n for result in drawn}))} samples per point, with 95 % intervals."
    if any(_band_of(result) != result.ci95 for result in drawn if _is_finite(result.ci95)):
        words += " No interval is drawn where it is 0 to 100 %, because there are too few samples or seeds."
    return words


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _missing_words(series: Series) -> list[str]:
    """One sentence for each group of lengths that did not run, with the reason."""
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


def _columns(results: Any) -> tuple[Any, Any, Any]:
    """Scores and both ends of their intervals, as three arrays."""
    rows = np.array([(each.score, *map(_finite, each.ci95)) for each in results], dtype=np.float64)
    score, low, high = rows.reshape(-1, 3).T
    return score, low, high


def _sizes(drawn: Sequence[TaskResult]) -> dict[str, str]:
    """Number of samples of each task, such as ``1,000``, or one number per model if they differ."""
    counts: dict[str, dict[str, None]] = {}
    for each in drawn:
        counts.setdefault(each.task, {})[f"{each.n:,}"] = None
    return {task: " / ".join(found) for task, found in counts.items()}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _is_finite(ends: Sequence[float]) -> bool:
    return all(map(math.isfinite, ends))
