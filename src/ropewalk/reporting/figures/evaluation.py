"""Draw scores: by length, by depth, by position and as bars, and differences between two evaluations.

All functions take rows of :mod:`~ropewalk.evaluation.score_rows` and a ``title`` above the panels. Each raises
RopewalkError if there is nothing to draw. A task or length that did not run is labelled "not run", never drawn as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.score_rows import OVERALL, ScoreRow, by_task, or_nan, task_words
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
from ropewalk.reporting.scores.tables import difference_words
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import BLUE, GREY, INK, length_text, tokens_text

if TYPE_CHECKING:
    from ropewalk.evaluation.comparison import ScoreDifference

Rows = Sequence[ScoreRow]
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
MOST_IN_AXIS = 50
"""Largest number of characters of two names in the label of an axis."""


FIFTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Middles of the fifths of a text."""


def score_figure(
    rows: Rows, trained_length: int | None = None, title: str = "", threshold: float | None = None
) -> Figure:
    """Draw scores by length as lines with 95 % bands: one panel per task, and one line per model.

    Args:
        rows: scores of one suite. A length that did not run breaks the line and is labelled.
        trained_length: trained length in tokens, marked if it lies within the axis.
        threshold: score to mark, such as the threshold of the effective length.
    """
    rows, plotted, lengths = _at_lengths(rows)
    models, tasks = _by_model(rows), by_task(rows)
    check_count("scores", len(models), style.MOST_LINES)
    several = len(tasks) > 1
    panels = canvas(len(tasks), height=style.HEIGHT_INCHES * len(tasks))
    # The threshold is labelled at the right edge, where the ends of lines would be.
    direct = threshold is None and _has_end_labels(models)
    for axes, own in zip(panels, tasks.values(), strict=True):
        # Leave room above 100 % for the label of the trained length.
        limits = _score_scales(axes, lengths, own, MOST_LENGTHS, "length (tokens)", PERCENT, 110)
        for number, (name, scores) in enumerate(_by_model(own, models).items()):
            key = name if len(models) > 1 else ""
            _draw_line(axes, _by_length(scores), series_look(number, len(models)), key, direct)
        # With several series, a note could not say whose score is missing; the caption does.
        if len(models) == 1:
            _note_not_run(axes, own, 9)
        if threshold is not None:
            words = f"threshold\n{threshold:g}"
            rule(axes, threshold, words, "outside", across=True, dash=THRESHOLD_DASH, order=1)
        if trained_length is not None:
            mark_length(axes, trained_length, "trained length", *limits)
        if several:
            panel_title(axes, own[0].name)
    told = (
        _told_scores(f"{own[0].name} {name}" if several else name, scores)
        for own in tasks.values()
        for name, scores in _by_model(own).items()
    )
    caption = " ".join([_samples_words(plotted), *_missing_words(rows, len(models) > 1, several)])
    return complete(panels, title, caption, told, keys=[] if direct else panels)


def tasks_figure(
    rows: Rows, trained_length: int | None = None, title: str = "", threshold: float | None = None
) -> Figure:
    """Draw all tasks of one model by length in small panels with shared axes; ``overall`` comes last, in bold.

    Args:
        rows: scores of one suite, in percent. The panel of a task that did not run says why.
        trained_length, threshold: as in :func:`score_figure`.
    """
    rows, plotted, lengths = _at_lengths(rows)
    tasks = by_task(rows)
    columns = min(PANEL_COLUMNS, len(tasks))
    height = 0.25 + PANEL_INCHES * -(-len(tasks) // columns)
    panels = canvas(len(tasks), columns, height=height, shared=True, small=True)
    for axes, (task, own) in zip(panels, tasks.items(), strict=True):
        limits = _score_scales(axes, lengths, plotted, PANEL_LENGTHS)
        if any(row.ran for row in own):
            _draw_line(axes, _by_length(own), look(BLUE, "-", "o", width=1.6, size=4))
            _note_not_run(axes, own, 7)
        else:
            reasons = dict.fromkeys(shown(row.note, 90) for row in own)
            words = fill(f"not run: {'; '.join(reasons)}", style.PANEL_CHARACTERS)
            # The geometric mean is the middle of a logarithmic axis.
            middle = (math.sqrt(limits[0] * limits[1]), 52)
            note(axes, words, middle, size=7, ha="center", va="center", bbox=PAPER)
        panel_title(axes, fill(task, style.PANEL_CHARACTERS), small=True, bold=task == OVERALL)
        if trained_length is not None and limits[0] < trained_length < limits[1]:
            rule(axes, trained_length, width=0.8, order=1)
        if threshold is not None:
            rule(axes, threshold, across=True, dash=THRESHOLD_DASH, width=0.8, order=1)
    # The overall score counts the samples of all tasks.
    caption = ["Score of each task by length in tokens."]
    caption.append(_samples_words([row for row in plotted if row.task != OVERALL] or plotted))
    if trained_length is not None and limits[0] < trained_length < limits[1]:
        caption.append(f"The vertical line is the trained length, {length_text(trained_length)}.")
    if threshold is not None:
        caption.append(f"The horizontal line is the threshold of the effective length, {threshold:g} %.")
    told = (_told_scores(task, own) for task, own in tasks.items())
    return complete(panels, title, " ".join(caption), told, y_label=PERCENT)


def curve_figure(scores: Mapping[int, Rows], title: str = "") -> Figure:
    """Draw the scores of one suite over the steps of a run, one line with its 95 % band for each task and length.

    Args:
        scores: rows by optimizer step. More than eight lines are reduced to the mean over tasks at each length, for
            the longest lengths. A score that is not finite leaves a gap.
        title: title above the panel.
    """
    every = [row for rows in scores.values() for row in rows]
    if not any(map(_is_known, every)):
        raise RopewalkError("there is no score from an evaluation during training to draw")
    caption = f"95 % bands, {_counted(sorted({row.n for row in every}), 'sample')} per point."
    if len({(row.task, row.length) for row in every}) > style.MOST_LINES:
        scores, caption = {step: _means(rows) for step, rows in scores.items()}, "Mean over all tasks."
        # Where there are too many, the longest lengths are what a run is watched for.
        longest = sorted({row.length or 0 for row in every})[-style.MOST_LINES :]
        scores = {
            step: [row for row in rows if (row.length or 0) in longest] for step, rows in scores.items()
        }
    lines: dict[str, dict[float, ScoreRow]] = {}
    for step, rows in scores.items():
        for row in rows:
            lines.setdefault(_line_name(row), {})[step] = row
    (axes,) = canvas()
    scale(axes.xaxis, "optimizer step", text=lambda value: f"{value:,.10g}")
    _value_axis(axes, every, "score (%)")
    for number, (name, points) in enumerate(lines.items()):
        options = series_look(number, len(lines), marker="o", size=4.0)
        _draw_line(axes, points, options, name)
    told = (
        tell(name, [*points], [row.value for row in points.values()], lambda at: f"step {at:,.0f}")
        for name, points in lines.items()
    )
    return complete([axes], title, f"Scores during training, by step. {caption}", told, keys=[axes])


def _means(rows: Rows) -> list[ScoreRow]:
    """Mean over the tasks at each length, without intervals."""
    found: dict[int | None, list[ScoreRow]] = {}
    for row in rows:
        found.setdefault(row.length, []).append(row)
    return [
        replace(own[0], task=own[0].suite, value=float(np.mean([row.value for row in own])), ci95=NO_INTERVAL)
        for own in found.values()
    ]


def _line_name(row: ScoreRow) -> str:
    task = "" if row.task == row.suite else row.task
    length = "" if row.length is None else f"{format_length(row.length)} tokens"
    return " at ".join(filter(None, (task, length))) or row.suite


def perplexity_figure(rows: Rows, trained_length: int | None = None, title: str = "") -> Figure:
    """Draw perplexity by position as step lines with bands, one line per model.

    Bands are 95 % intervals; for a mean over seeds, which few seeds give a very wide interval, they reach from the
    lowest to the highest seed.

    Args:
        rows: scores of sequences of one length; those by position are drawn.
        trained_length: trained length in tokens, marked if given.
    """
    sequences = sorted({row.n for row in rows if row.ran and row.is_whole})
    series = _by_model(_with_spread(row) for row in rows if row.cell is not None)
    cells = [row for own in series.values() for row in own]
    if not any(map(_is_known, cells)):
        raise RopewalkError("there is no finite perplexity to draw")
    check_count("perplexity", len(series), style.MOST_LINES)
    edges = sorted({edge for row in cells for edge in row.cell or ()})
    (axes,) = canvas()
    left_end = _position_scale(axes, edges)
    _value_axis(axes, cells)
    for number, (name, found) in enumerate(series.items()):
        ranges = [row.cell for row in found if row.cell is not None]
        # The first bin starts at position 0, which a logarithmic axis cannot show.
        own = [max(left_end, ranges[0][0]), *(end for _, end in ranges)]
        options = series_look(number, len(series), marker="", width=2)
        colour = options["color"]
        ends = [(*sides, *row.ci95) for sides, row in zip(pairwise(own), found, strict=True)]
        # reshape gives four columns even if there is no row.
        left, right, low, high = np.array([each for each in ends if _is_finite(each)]).reshape(-1, 4).T
        boxes(axes, left, right, low, high, area(colour, alpha=style.BAND_ALPHA), order=1)
        y = [_finite(row.value) for row in found]
        steps = {key: options[key] for key in ("color", "linestyle", "linewidth", "zorder")}
        # Without a baseline, no vertical lines run down to 0 at the two ends.
        axes.stairs(y, own, baseline=None, label=label(named(series, number)), **steps)
        if _has_end_labels(series):
            end_label(axes, name, own[1:], y, colour)
    if trained_length is not None and edges[0] < trained_length <= edges[-1]:
        # At the right edge of the axis there is room on the left only.
        side = beside(trained_length == edges[-1])
        rule(axes, trained_length, f"trained length {length_text(trained_length)}", side)
    caption = (
        f"Perplexity of the tokens in each range of positions, over {_counted(sequences, 'sequence')}. "
        f"{_bands_words(['spread' in row.facts for row in cells])}"
    )
    told = (_told_positions(name, found) for name, found in series.items())
    return complete([axes], title, caption, told, keys=[] if _has_end_labels(series) else [axes])


def _with_spread(row: ScoreRow) -> ScoreRow:
    """The row with the range of the seeds as its band, if it is a mean over seeds."""
    spread = row.facts.get("spread")
    return row if spread is None else replace(row, ci95=(or_nan(spread["min"]), or_nan(spread["max"])))


def _bands_words(are_means: Sequence[bool]) -> str:
    intervals, seeds = "95 % intervals over sequences", "from the lowest to the highest seed"
    if not any(are_means):
        return f"Bands are {intervals}."
    others = "" if all(are_means) else f"; with one seed, they are {intervals}"
    return f"Lines are means over seeds, and bands reach {seeds}{others}."


def _told_positions(name: str, rows: Rows) -> str:
    """Perplexity by range of positions, for a text alternative."""
    ends = dict(row.cell for row in rows if row.cell is not None)

    def place(start: float) -> str:
        return f"positions {start:,.0f} to {ends[int(start)] - 1:,}"

    return tell(f"perplexity {name}", [*ends], [_finite(row.value) for row in rows], place)


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


def difficulty_figure(rows: Rows, title: str = "") -> Figure:
    """Draw scores by length and difficulty as a heat map, with the easiest at the top.

    Args:
        rows: scores of one task, or of tasks that each have one difficulty, at one or more lengths; those by difficulty
            are drawn.
    """
    rows = [row for row in rows if row.difficulty is not None and row.length is not None]
    found = {(row.difficulty, row.length): row for row in rows}
    levels = sorted({row.difficulty for row in rows if row.difficulty is not None})
    lengths = sorted({row.length for row in rows if row.length is not None})
    if not found:
        raise RopewalkError("no result has scores by difficulty, so there is nothing to draw")
    values = [[_value(found.get((level, length))) for length in lengths] for level in levels]
    (axes,) = canvas(height=max(2.4, 1.1 + 0.3 * len(levels)), grid="")
    names = index_ticks([*map(length_text, lengths)], NUMBERED_COLUMNS)
    scale(axes.xaxis, "length (tokens)", limits=(-0.5, len(lengths) - 0.5), ticks=names)
    names = index_ticks([f"{level:g}" for level in levels], MOST_DEPTHS)
    scale(axes.yaxis, "difficulty", limits=(len(levels) - 0.5, -0.5), ticks=names)
    size = 8.5 if len(lengths) <= NUMBERED_COLUMNS and len(levels) <= NUMBERED_ROWS else 0.0
    heat_map(axes, values, "even", 0, 100, PERCENT, lambda value: f"{value:.0f}", numbers=size)
    words = f"Score in percent, over {_range(sorted({row.n for row in rows}))} samples per cell."
    told = (
        f"{tokens_text(length)}: "
        + ", ".join(f"{line[column]:.0f} % at {level:g}" for level, line in zip(levels, values, strict=True))
        for column, length in enumerate(lengths)
    )
    return complete([axes], title, words, told)


def depth_curve_figure(rows: Rows, title: str = "") -> Figure:
    """Draw scores by the fifth of the text in which the answer stands, one line for each length.

    Args:
        rows: scores of one task of one model; those by fifths are drawn, of the longest lengths if lines of all could
            not be told apart.
    """
    by_length: dict[int, list[ScoreRow]] = {}
    for row in sorted(rows, key=lambda row: row.depth or 0):
        if row.depth is not None and row.facts.get("fifths") and row.length is not None:
            by_length.setdefault(row.length, []).append(row)
    if not by_length:
        raise RopewalkError("no result has scores by depth, so there is nothing to draw")
    lengths = sorted(sorted(by_length, reverse=True)[: style.MOST_LINES])
    (axes,) = canvas(height=style.HEIGHT_INCHES)
    names = [(depth, f"{100 * depth - 10:.0f} to {100 * depth + 10:.0f}") for depth in FIFTHS]
    scale(axes.xaxis, "depth of the answer in the text (%)", limits=(0, 1), ticks=names)
    percent_scale(axes.yaxis, PERCENT)
    direct = _has_end_labels({tokens_text(length): None for length in lengths})
    for number, length in enumerate(lengths):
        points = {row.depth: row for row in by_length[length]}
        _draw_line(axes, points, series_look(number, len(lengths)), tokens_text(length), direct)
    drawn = [row for length in lengths for row in by_length[length]]
    told = (
        f"{tokens_text(length)}: {_told_depths([row.depth or 0 for row in own], [row.value for row in own])}"
        for length, own in sorted(by_length.items())
    )
    return complete([axes], title, _samples_words(drawn), told, keys=[] if direct else [axes])


def needle_figure(rows: Rows, title: str = "") -> Figure:
    """Draw correct answers by length and depth as a heat map, with a depth of 0 % at the top.

    Args:
        rows: scores of one task at one or more lengths; those by depth are drawn. Lengths that did not run are hatched
            and labelled.
    """
    rows = [row for row in rows if row.difficulty is None]
    found = {(row.depth, row.length): row for row in rows if row.length is not None}
    lengths = sorted({row.length for row in rows if row.length is not None})
    depths = sorted({row.depth for row in rows if row.depth is not None})
    missing = {row.length: row for row in rows if not row.ran}
    values = [[_value(found.get((depth, length))) for length in lengths] for depth in depths]
    if not any(math.isfinite(value) for line in values for value in line):
        raise RopewalkError(
            "no result has scores by depth, so there is nothing to draw; pass results of a needle task"
        )
    is_numbered = len(depths) <= NUMBERED_ROWS and len(lengths) <= NUMBERED_COLUMNS
    size = (8.5 if len(lengths) <= 8 else 7.0) if is_numbered else 0.0
    height = 1.1 + (0.25 * len(depths) if len(depths) <= NUMBERED_ROWS else 5)
    (axes,) = canvas(height=max(2.4, height), grid="")
    names = index_ticks([*map(length_text, lengths)], NUMBERED_COLUMNS)
    scale(axes.xaxis, "length (tokens)", limits=(-0.5, len(lengths) - 0.5), ticks=names)
    names = index_ticks([f"{100 * depth:.3g}" for depth in depths], MOST_DEPTHS)
    scale(axes.yaxis, "depth (%)", limits=(len(depths) - 0.5, -0.5), ticks=names)
    # From 0 to 100 whatever the scores, so that a colour means the same in every figure.
    heat_map(axes, values, "even", 0, 100, PERCENT, lambda value: f"{value:.0f}", numbers=size)
    # Fewer rows are too low for upright words.
    flat = len(depths) < 4
    for column, length in enumerate(lengths):
        if length in missing:
            options: Options = {"ha": "center", "va": "center", "rotation": 0 if flat else 90, "bbox": PAPER}
            note(axes, "not run", (column, (len(depths) - 1) / 2), size=7 if flat else 9, **options)
    words = [
        f"Correct answers in percent, over {_range(sorted({row.n for row in rows if row.depth is not None}))} samples "
        "per cell. A depth of 0 % is the beginning of the text."
    ]
    reasons = dict.fromkeys(shown(row.note, 120) for row in missing.values())
    words += [f"Hatched columns did not run ({reason})." for reason in reasons]
    if any(
        math.isnan(value)
        for line in values
        for value, at in zip(line, lengths, strict=True)
        if at not in missing
    ):
        words.append("Hatched cells have no sample at this depth and length.")
    told = (
        f"{tokens_text(length)}: "
        + ("not run" if length in missing else _told_depths(depths, [line[column] for line in values]))
        for column, length in enumerate(lengths)
    )
    return complete([axes], title, " ".join(words), told)


def _told_depths(depths: Sequence[float], scores: Sequence[float]) -> str:
    known = [(score, depth) for depth, score in zip(depths, scores, strict=True) if math.isfinite(score)]
    if not known:
        return "no sample"
    low, high = min(known), max(known)
    if low[0] == high[0]:
        return f"{low[0]:.0f} % at every depth"
    least, most = (f"{score:.0f} % at depth {100 * depth:.3g} %" for score, depth in (low, high))
    return f"lowest {least}, highest {most}"


def retention_figure(rows: Rows, title: str = "") -> Figure:
    """Draw short-context tasks as bars with 95 % intervals, one bar per task and model.

    Args:
        rows: scores in percent. Scores in other units have no bar; the caption names them.
    """
    rows = [row for row in rows if row.is_whole]
    others = dict.fromkeys(row.task for row in rows if row.unit != "percent")
    models = _by_model(rows)
    if len(models) > style.MOST_SERIES:
        check_count("scores", len(models))
    percent = [row for row in rows if row.unit == "percent"]
    plotted = [row for row in percent if _is_known(row)]
    if not plotted:
        raise RopewalkError("no result has a score in percent, so there is nothing to draw")
    tasks = list(dict.fromkeys(row.task for row in percent))
    # The number of samples of each task, or one number per model if they differ.
    counts = {task: dict.fromkeys(f"{row.n:,}" for row in plotted if row.task == task) for task in tasks}
    sizes = {task: " / ".join(found) for task, found in counts.items() if found}
    alike = set(sizes.values())
    names = [task if len(alike) == 1 or task not in sizes else f"{task}, n {sizes[task]}" for task in tasks]
    (axes,) = canvas(height=_rows_height(names, len(models)), grid="x")
    scale(axes.xaxis, "score (%)", limits=(0, 104))
    row_scale(axes, names)
    height = 0.8 / len(models)
    series = _by_model(percent, models)
    for number, own in enumerate(series.values()):
        # Bars of one task are centred on its row, whatever the number of models.
        at = {task: place + (number - (len(models) - 1) / 2) * height for place, task in enumerate(tasks)}
        ran = [row for row in own if row.ran]
        y = np.array([at[row.task] for row in ran])
        score, low, high = _columns(ran, lambda row: row.ci95)
        bars = series_area(number, len(models))
        boxes(axes, 0, score, y - 0.45 * height, y + 0.45 * height, bars, named(models, number))
        axes.plot(score, y, **look(INK, "", "o", size=3, order=4))
        whiskers(axes, y, score, low, high, lying=True, caps=3)
        for row in own:
            if not row.ran:
                note(axes, "not run", (1, at[row.task]), size=8)
    counted = f"{alike.pop()} samples per task" if len(alike) == 1 else "n is the number of samples"
    left_out = f" Not shown because not in percent: {', '.join(others)}." if others else ""
    told = (
        f"{name}: {', '.join(f'{row.task} {_score_words(row)}' for row in own)}"
        for name, own in series.items()
    )
    return complete([axes], title, f"Scores with 95 % intervals; {counted}.{left_out}", told, keys=[axes])


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
        words = f"{names[1]} minus {names[0]}"
        # The title names both; here, long names would be cut off at the edges of the figure.
        words = words if len(words) <= MOST_IN_AXIS else "difference"
        _draw_forest(axes, group, f"{words} ({UNITS[unit]})")
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


def _at_lengths(rows: Rows) -> tuple[list[ScoreRow], list[ScoreRow], list[int]]:
    """Whole scores, those to draw, and all lengths, including those that did not run; RopewalkError without scores."""
    whole = [row for row in rows if row.is_whole]
    plotted = [row for row in whole if row.length is not None and _is_known(row)]
    if not plotted:
        raise RopewalkError("no result has both a finite score and a length, so there is nothing to draw")
    # No line may pass over a length that did not run.
    return whole, plotted, sorted({row.length for row in whole if row.length is not None})


def _by_model(rows: Iterable[ScoreRow], models: Iterable[str] = ()) -> dict[str, list[ScoreRow]]:
    """Rows of each model, in the order given or of their first row."""
    found: dict[str, list[ScoreRow]] = {model: [] for model in models}
    for row in rows:
        found.setdefault(row.when, []).append(row)
    return found


def _score_scales(
    axes: Axes,
    lengths: Sequence[int],
    rows: Rows,
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
    _value_axis(axes, rows, percent, top)
    return limits


def _value_axis(axes: Axes, rows: Rows, percent: str = "", top: float = 104) -> None:
    """Set the axis of the scores, which all have the same unit."""
    if rows[0].unit == "percent":
        percent_scale(axes.yaxis, percent, top)
        return
    values = [value for row in rows for value in (row.value, *row.ci95) if math.isfinite(value)]
    value_scale(axes.yaxis, "perplexity", min(values, default=1), max(values, default=1))


def _draw_line(
    axes: Axes, points: Mapping[Any, ScoreRow], options: Options, name: str = "", direct: bool = False
) -> None:
    """Draw scores by length or step as a line with its band, a gap for each missing one, and bars for isolated ones."""
    at = np.array([*points], dtype=np.float64)
    score, low, high = _columns(points.values())
    axes.plot(at, score, label=label(name), clip_on=False, **options)
    band(axes, at, low, high, options["color"])
    if direct:
        end_label(axes, name, at, score, options["color"])
    single = alone(score)
    if single.any():
        bars = [each[single] for each in (at, score, low, high)]
        whiskers(axes, *bars, colour=options["color"], caps=4)


def _by_length(rows: Rows) -> dict[int, ScoreRow]:
    """Scores of one task of one model by length. One that did not run keeps its place, and interrupts the line."""
    return {
        row.length: row for row in sorted(rows, key=lambda row: row.length or 0) if row.length is not None
    }


def _columns(rows: Iterable[ScoreRow], ends: Callable[[ScoreRow], Interval] | None = None) -> Any:
    """Scores and both ends of their intervals to draw, as three arrays; NaN for what is missing or infinite."""
    ends = ends or _band_of
    table = [(row.value, *ends(row)) if _is_known(row) else (math.nan,) * 3 for row in rows]
    found = np.array(table, dtype=np.float64).reshape(-1, 3).T
    return np.where(np.isfinite(found), found, np.nan)


def _band_of(row: ScoreRow) -> Interval:
    """The interval to draw; none if it is the whole scale, because a band from 0 to 100 looks like a score of 100."""
    low, high = row.ci95
    return NO_INTERVAL if row.unit == "percent" and low <= 0 and high >= 100 else row.ci95


def _note_not_run(axes: Axes, rows: Rows, size: float) -> None:
    """Label lengths that did not run, which would otherwise look as if nobody had requested them."""
    for row in rows:
        if not row.ran and row.length is not None:
            place = (row.length, None)
            note(axes, "not run", place, (0, 4), size=size, ha="center", va="bottom", rotation=90)


def _samples_words(rows: Rows) -> str:
    words = f"{_counted(sorted({row.n for row in rows}), 'sample')} per point, with 95 % intervals."
    if any(_band_of(row) != row.ci95 for row in rows if _is_finite(row.ci95)):
        words += " No interval is drawn where it is 0 to 100 %, because there are too few samples or seeds."
    return words


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _counted(counts: Sequence[int], thing: str) -> str:
    return f"{_range(counts)} {thing}{'' if list(counts) == [1] else 's'}"


def _missing_words(rows: Rows, models: bool, tasks: bool) -> list[str]:
    """One sentence for each group of lengths that did not run, with the reason; names models or tasks if several."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for row in sorted(rows, key=lambda row: row.length or 0):
        if not row.ran:
            at = "any length" if row.length is None else length_text(row.length)
            whose = (*([row.when] if models else []), *([row.name] if tasks else []))
            found.setdefault((*whose, "at", shown(row.note, 120)), {})[at] = None
    return [
        f"Not run: {' '.join(whose)} {', '.join(at)} ({reason})." for (*whose, reason), at in found.items()
    ]


def _told_scores(name: str, rows: Rows) -> str:
    """Scores by length, for a text alternative."""
    words = [f"{_score_words(row)} at {tokens_text(length)}" for length, row in _by_length(rows).items()]
    return f"{name}: {', '.join(words or ['not run'])}"


def _score_words(row: ScoreRow) -> str:
    if not _is_known(row):
        return "no value" if row.ran else "not run"
    return f"{style.number_text(row.value)}{' %' if row.unit == 'percent' else ''}"


def _value(row: ScoreRow | None) -> float:
    return math.nan if row is None else row.value


def _is_known(row: ScoreRow) -> bool:
    return row.ran and math.isfinite(row.value)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _is_finite(ends: Sequence[float]) -> bool:
    return all(map(math.isfinite, ends))
