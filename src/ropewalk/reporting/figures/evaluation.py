"""Draw an evaluation: scores by length, depth and task, and differences between two evaluations.

All functions take a ``title`` above the panels. Each raises RopewalkError if there is nothing to draw. A task or length
that did not run is labelled "not run", never drawn as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval
from ropewalk.io.lengths import format_length
from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    PAPER,
    Axes,
    Figure,
    Options,
    area,
    band,
    beside,
    boxes,
    canvas,
    complete,
    end_label,
    heat_map,
    label,
    look,
    mark_length,
    note,
    panel_title,
    percent_scale,
    row_scale,
    rule,
    scale,
    series_area,
    series_look,
    value_scale,
    whiskers,
)
from ropewalk.reporting.figures.prepare import (
    alone,
    check_count,
    folded,
    index_ticks,
    length_ticks,
    linear_length_ticks,
    named,
    power_ticks,
    spaced,
    tell,
)
from ropewalk.reporting.scores.tables import OVERALL, difference_words, task_words
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import BLUE, GREY, INK, length_text, tokens_text

if TYPE_CHECKING:
    from ropewalk.evaluation.comparison import ScoreDifference

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
    (axes,) = canvas()
    left_end = _position_scale(axes, edges)
    values = [value for each in bins for value in (each.perplexity, *each.ci95) if math.isfinite(value)]
    value_scale(axes.yaxis, "perplexity", min(values), max(values))
    for number, (name, result) in enumerate(series.items()):
        found = result.positions
        if not found:
            continue
        # The first bin starts at position 0, which a logarithmic axis cannot show.
        own = [max(left_end, found[0].start), *(each.end for each in found)]
        options = series_look(number, len(series), marker="", width=2)
        colour = options["color"]
        ends = [(*sides, *each.ci95) for sides, each in zip(pairwise(own), found, strict=True)]
        # reshape gives four columns even if there is no row.
        left, right, low, high = np.array([each for each in ends if _is_finite(each)]).reshape(-1, 4).T
        boxes(axes, left, right, low, high, area(colour, alpha=style.BAND_ALPHA), order=1)
        y = [_finite(each.perplexity) for each in found]
        steps = {key: options[key] for key in ("color", "linestyle", "linewidth", "zorder")}
        # Without a baseline, no vertical lines run down to 0 at the two ends.
        axes.stairs(y, own, baseline=None, label=label(named(series, number)), **steps)
        if _has_end_labels(series):
            end_label(axes, name, own[1:], y, colour)
    if trained_length is not None and edges[0] < trained_length <= edges[-1]:
        # At the right edge of the axis there is room on the left only.
        side = beside(trained_length == edges[-1])
        rule(axes, trained_length, f"trained length {length_text(trained_length)}", side)
    counts = sorted({result.n for result in series.values()})
    caption = (
        f"Perplexity of the tokens in each range of positions, over {_range(counts)} sequences. Bands are 95 % "
        "intervals over sequences."
    )
    told = (_told_positions(name, result) for name, result in series.items())
    return complete([axes], title, caption, told, keys=[] if _has_end_labels(series) else [axes])


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


def _position_scale(axes: Axes, edges: Sequence[int]) -> float:
    """Set an axis with ticks at bin edges, or at round lengths if there are many edges; returns its left end.

    The axis is logarithmic if bins grow, because the first would vanish.
    """
    widths = np.diff(edges)
    grows = edges[0] == 0 and len(edges) > 2 and bool(widths.max() >= style.LOG_RATIO * widths.min())
    # Half of the first edge stands for position 0.
    left = edges[1] / 2 if grows else edges[0]
    ticks = length_ticks(edges[1:] if grows else edges)
    if len(ticks) > MOST_EDGES:
        ticks = power_ticks(edges[1], edges[-1]) if grows else linear_length_ticks(edges[-1])
    kind: Literal["log2", "linear"] = "log2" if grows else "linear"
    scale(axes.xaxis, "position in the sequence (tokens)", kind, (left, edges[-1]), ticks)
    return left


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
) -> Figure:
    """Draw the score of one task by length as lines with 95 % bands, one line per model.

    Args:
        series: results of one task by model name. A length that did not run breaks the line and is labelled.
        trained_length: trained length in tokens, marked if it lies within the axis.
        threshold: score to mark, such as the threshold of the effective length.
    """
    (axes,) = canvas()
    caption, told, keys = draw_scores(axes, series, trained_length, threshold)
    return complete([axes], title, caption, told, keys=keys)


def draw_scores(
    axes: Axes, series: Series, trained_length: int | None = None, threshold: float | None = None
) -> tuple[str, tuple[str, ...], list[Axes]]:
    """Draw the panel of :func:`score_figure`.

    Returns:
        its caption, the parts of its text alternative, and the axes if they need a key.
    """
    plotted = _one_task(series)
    check_count("scores", len(series), style.MOST_LINES)
    lengths = _lengths([result for results in series.values() for result in results])
    # Leave room above 100 % for the label of the trained length.
    limits = _score_scales(axes, lengths, plotted, MOST_LENGTHS, "length (tokens)", PERCENT, 110)
    # The threshold is labelled at the right edge, where the ends of lines would be.
    direct = threshold is None and _has_end_labels(series)
    for number, results in enumerate(series.values()):
        options = _line_look(number, len(series))
        _draw_line(axes, results, lengths, options, named(series, number), direct)
        # With several series, a note could not say whose score is missing; the caption does.
        if len(series) == 1:
            _note_not_run(axes, results, 9)
    if threshold is not None:
        words = f"threshold\n{threshold:g}"
        rule(axes, threshold, words, "outside", across=True, dash=THRESHOLD_DASH, order=1)
    if trained_length is not None:
        mark_length(axes, trained_length, "trained length", *limits)
    told = tuple(_told_scores(name, results) for name, results in series.items())
    return " ".join([_samples_words(plotted), *_missing_words(series)]), told, [] if direct else [axes]


def tasks_figure(
    results: Sequence[TaskResult],
    trained_length: int | None = None,
    title: str = "",
    threshold: float | None = None,
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
    columns = min(PANEL_COLUMNS, len(tasks))
    height = 0.25 + PANEL_INCHES * -(-len(tasks) // columns)
    panels = canvas(len(tasks), columns, height=height, shared=True, small=True)
    for axes, task in zip(panels, tasks, strict=True):
        own = [each for each in results if each.task == task]
        limits = _score_scales(axes, lengths, plotted, PANEL_LENGTHS)
        _draw_task(axes, own, lengths, limits)
        panel_title(axes, fill(task, style.PANEL_CHARACTERS), small=True, bold=task == OVERALL)
        if trained_length is not None and limits[0] < trained_length < limits[1]:
            rule(axes, trained_length, width=0.8, order=1)
        if threshold is not None:
            rule(axes, threshold, across=True, dash=THRESHOLD_DASH, width=0.8, order=1)
    # The overall score counts the samples of all tasks.
    words = ["Score of each task by length in tokens."]
    words.append(_samples_words([r for r in plotted if r.task != OVERALL] or plotted))
    if trained_length is not None and limits[0] < trained_length < limits[1]:
        words.append(f"The vertical line is the trained length, {length_text(trained_length)}.")
    if threshold is not None:
        words.append(f"The horizontal line is the threshold of the effective length, {threshold:g} %.")
    told = (_told_scores(task, [each for each in results if each.task == task]) for task in tasks)
    return complete(panels, title, " ".join(words), told, y_label=PERCENT)


def _draw_task(
    axes: Axes, results: Sequence[TaskResult], lengths: Sequence[int], limits: tuple[float, float]
) -> None:
    """Draw one task's line in a small panel, or write why it did not run."""
    missing = [each for each in results if each.status != "ok"]
    if len(missing) == len(results):
        reasons = dict.fromkeys(shown(each.reason or "", 90) for each in missing)
        words = fill(f"not run: {'; '.join(reasons)}", style.PANEL_CHARACTERS)
        # The geometric mean is the middle of a logarithmic axis.
        middle = (math.sqrt(limits[0] * limits[1]), 52)
        note(axes, words, middle, size=7, ha="center", va="center", bbox=PAPER)
        return
    _draw_line(axes, results, lengths, look(BLUE, "-", "o", width=1.6, size=4), "")
    _note_not_run(axes, results, 7)


def needle_figure(results: Sequence[TaskResult], title: str = "") -> Figure:
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
    height = 1.1 + (0.25 * len(depths) if len(depths) <= NUMBERED_ROWS else 5)
    (axes,) = canvas(height=max(2.4, height), grid="")
    names = index_ticks([length_text(each.length or 0) for each in columns], NUMBERED_COLUMNS)
    scale(axes.xaxis, "length (tokens)", limits=(-0.5, len(columns) - 0.5), ticks=names)
    names = index_ticks([f"{100 * depth:.3g}" for depth in depths], MOST_DEPTHS)
    scale(axes.yaxis, "depth (%)", limits=(len(depths) - 0.5, -0.5), ticks=names)
    # From 0 to 100 whatever the scores, so that a colour means the same in every figure.
    heat_map(axes, values, "even", 0, 100, PERCENT, lambda value: f"{value:.0f}", numbers=size)
    # Fewer rows are too low for upright words.
    flat = len(depths) < 4
    for column, result in enumerate(columns):
        if result.status != "ok":
            options: Options = {"ha": "center", "va": "center", "rotation": 0 if flat else 90, "bbox": PAPER}
            place = (column, (len(depths) - 1) / 2)
            note(axes, "not run", place, size=7 if flat else 9, **options)
    told = (
        f"{tokens_text(result.length or 0)}: "
        + ("not run" if result.status != "ok" else _told_depths(depths, [row[column] for row in values]))
        for column, result in enumerate(columns)
    )
    return complete([axes], title, _depth_words(columns, cells, values), told)


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


def retention_figure(series: Series, title: str = "") -> Figure:
    """Draw short-context tasks as bars with 95 % intervals, one bar per task and model.

    Args:
        series: results in percent by model name, such as ``before`` and ``after``. Results in other units have no bar;
            the caption names them.
    """
    if len(series) > style.MOST_SERIES:
        check_count("scores", len(series))
    every = [result for results in series.values() for result in results]
    tasks = list(dict.fromkeys(each.task for each in every if each.unit == "percent"))
    plotted = [r for r in every if r.unit == "percent" and r.status == "ok" and math.isfinite(r.score)]
    if not plotted:
        raise RopewalkError("no result has a score in percent, so there is nothing to draw")
    sizes = _sizes(plotted)
    alike = set(sizes.values())
    names = [task if len(alike) == 1 or task not in sizes else f"{task}, n {sizes[task]}" for task in tasks]
    (axes,) = canvas(height=_rows_height(names, len(series)), grid="x")
    scale(axes.xaxis, "score (%)", limits=(0, 104))
    row_scale(axes, names)
    height = 0.8 / len(series)
    for number, results in enumerate(series.values()):
        found = {each.task: each for each in results if each.unit == "percent"}
        # Bars of one task are centred on its row, whatever the number of models.
        at = {task: row + (number - (len(series) - 1) / 2) * height for row, task in enumerate(tasks)}
        ran = [task for task in tasks if task in found and found[task].status == "ok"]
        y = np.array([at[task] for task in ran])
        score, low, high = _columns(found[task] for task in ran)
        bars = series_area(number, len(series))
        boxes(axes, 0, score, y - 0.45 * height, y + 0.45 * height, bars, named(series, number))
        axes.plot(score, y, **look(INK, "", "o", size=3, order=4))
        whiskers(axes, y, score, low, high, lying=True, caps=3)
        for task in (task for task in tasks if task in found and task not in ran):
            note(axes, "not run", (1, at[task]), size=8)
    counted = f"{alike.pop()} samples per task" if len(alike) == 1 else "n is the number of samples"
    others = dict.fromkeys(each.task for each in every if each.unit != "percent")
    left_out = f" Not shown because not in percent: {', '.join(others)}." if others else ""
    words = f"Scores with 95 % intervals; {counted}.{left_out}"
    told = (
        f"{name}: {', '.join(f'{each.task} {_score_words(each)}' for each in results if each.unit == 'percent')}"
        for name, results in series.items()
    )
    return complete([axes], title, words, told, keys=[axes])


def difference_figure(
    differences: Sequence[ScoreDifference],
    title: str = "",
    names: tuple[str, str] = ("A", "B"),
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
    groups = [[each for each in differences if each.unit == unit] for unit in units]
    heights = [_rows_height(list(map(_row_name, group)), 1) for group in groups]
    panels = canvas(
        len(units),
        height=sum(heights) + 0.35 * (len(units) - 1),
        heights=[len(group) + 1.0 for group in groups],
        grid="x",
    )
    for axes, unit, group in zip(panels, units, groups, strict=True):
        _draw_forest(axes, group, f"{names[1]} minus {names[0]} ({UNITS[unit]})")
    # Only the first panel has a key, because filled points mean the same in every panel.
    for real, words in ((True, "significant"), (False, "not significant")):
        if any(each.real == real for each in plotted):
            panels[0].plot([], [], label=words, **_point(real))
    without = sum(each.unit not in units for each in differences)
    text = "Differences on the same samples with 95 % intervals. Filled points are significant (adjusted p below 0.05)."
    text += f" {without} other results could not be compared." if without else ""
    told = (
        f"{_row_name(each)}: "
        + (difference_words(each) if math.isfinite(each.difference) else "not compared")
        + (", significant" if each.real else "")
        for each in differences
    )
    return complete(panels, title, text, told, keys=panels[:1])


def _draw_forest(axes: Axes, group: Sequence[ScoreDifference], words: str) -> None:
    """Draw points in rows, on an axis that covers them and 0."""
    ends = [end for each in group for end in (each.difference, *each.ci95) if math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = 0.06 * ((high - low) or 1)
    scale(axes.xaxis, words, limits=(low - room, high + room))
    row_scale(axes, list(map(_row_name, group)))
    rule(axes, 0, dash="-", order=1)
    for row, each in enumerate(group):
        if not math.isfinite(each.difference):
            note(axes, " not compared", (0, row), size=8)
            continue
        options, at = _point(each.real), each.ci95 if _is_finite(each.ci95) else (each.difference,) * 2
        axes.plot(at, [row, row], **look(options["color"], width=1.4, order=2))
        axes.plot([each.difference], [row], **options)
        weight = "bold" if each.real else "normal"
        note(axes, difference_words(each), (None, row), (6, 0), size=8.5, weight=weight)


def _row_name(each: ScoreDifference) -> str:
    name = task_words(each.suite, each.task)
    return name if each.length is None else f"{name}, {format_length(each.length)}"


def _point(is_real: bool) -> Options:
    return look(BLUE, "", "D") if is_real else look(GREY, "", "o", hollow=True)


def _rows_height(names: Sequence[str], bars: int) -> float:
    """Height in inches of rows with this many bars each and names of one or more lines."""
    lines = max(1 + folded(name).count("\n") for name in names)
    return max(1.6, 0.75 + len(names) * max(BAR_INCHES * bars, NAME_INCHES * (lines + 0.3)))


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


def _score_scales(
    axes: Axes,
    lengths: Sequence[int],
    drawn: Sequence[TaskResult],
    most: int,
    x_words: str = "",
    percent: str = "",
    top: float = 104,
) -> tuple[float, float]:
    """Set axes of lengths, with ticks at measured ones, and of percent or perplexity; returns the limits of x."""
    # A single length spans no axis of which to take a share.
    room = (lengths[-1] / lengths[0]) ** 0.06 if len(lengths) > 1 else 2
    limits = lengths[0] / room, lengths[-1] * room
    scale(axes.xaxis, x_words, "log2", limits, length_ticks(spaced(lengths, most)))
    if drawn[0].unit == "percent":
        percent_scale(axes.yaxis, percent, top)
    else:
        values = [value for each in drawn for value in (each.score, *each.ci95) if math.isfinite(value)]
        value_scale(axes.yaxis, "perplexity", min(values), max(values))
    return limits


def _draw_line(
    axes: Axes,
    results: Sequence[TaskResult],
    lengths: Sequence[int],
    options: Options,
    name: str,
    direct: bool = False,
) -> None:
    """Draw a line with gaps for missing scores, its band, and error bars for isolated points."""
    found = {each.length: each for each in results if math.isfinite(each.score)}
    # A length that was requested and did not run stays as NaN, which interrupts the line.
    at = np.array([length for length in lengths if any(each.length == length for each in results)])
    score = np.array([found[n].score if n in found else math.nan for n in at])
    low, high = (
        np.array([_finite(_band_of(found[n])[end]) if n in found else math.nan for n in at]) for end in (0, 1)
    )
    axes.plot(at, score, label=label(name), clip_on=False, **options)
    band(axes, at, low, high, options["color"])
    if direct:
        end_label(axes, name, at, score, options["color"])
    single = alone(score)
    if single.any():
        bars = [each[single] for each in (at, score, low, high)]
        whiskers(axes, *bars, colour=options["color"], caps=4)


def _band_of(result: TaskResult) -> Interval:
    """The interval to draw; none if it is the whole scale, because a band from 0 to 100 looks like a score of 100."""
    low, high = result.ci95
    return NO_INTERVAL if result.unit == "percent" and low <= 0 and high >= 100 else result.ci95


def _line_look(number: int, count: int) -> Options:
    """Options of one of up to eight lines, each with its own marker."""
    if number < style.MOST_SERIES:
        return series_look(number, count, **({"marker": "o"} if count == 1 else {}))
    dash = style.DASHES[number % len(style.DASHES)]
    return look(style.LINE_COLOURS[number], dash, style.LINE_MARKERS[number])


def _note_not_run(axes: Axes, results: Sequence[TaskResult], size: float) -> None:
    """Label lengths that did not run, which would otherwise look as if nobody had requested them."""
    for each in results:
        if each.status != "ok" and each.length is not None:
            place = (each.length, None)
            note(axes, "not run", place, (0, 4), size=size, ha="center", va="bottom", rotation=90)


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
