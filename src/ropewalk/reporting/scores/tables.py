"""Tables of scores: one list form and one grid form of :class:`~ropewalk.evaluation.score_rows.ScoreRow`.

A list has a line per score with its interval and counts, and models side by side. A grid has tasks or depths down and
lengths across, for one model. Differences between two evaluations and means over checkpoints have tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from ropewalk.evaluation.score_rows import (
    OVERALL,
    PUBLISHED,
    ScoreRow,
    Series,
    by_suite,
    by_task,
    haystack_words,
    is_by_length,
    or_nan,
    score_rows,
    task_words,
)
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import (
    ResultTable,
    counted,
    counts_text,
    interval,
    marks_of,
    note_lines,
    number,
    one_decimal,
    signed,
)

if TYPE_CHECKING:
    from ropewalk.evaluation.comparison import ScoreDifference

MOST_IN_NOTE = 300
"""Largest number of characters of a reason, which may quote a server's message."""
SMALLEST_P = 0.001
MOST_SOURCES = 6
MOST_IN_SOURCE = 40
"""Largest number of sources in the note on what was drawn, and of characters in the name of one."""
MOST_CHARACTERS = 100
"""Width of a terminal in characters that a table should fit."""
GAP = 2
ROUNDING = 1e-6
ENDLESS = (math.inf, math.inf)
HEADS = {"task": "task", "metric": "metric", "length": "length in tokens", "cell": "position"}
"""Columns that name a score in a list, and their headings; text columns first."""
COUNTS = {
    "num_fewshot": "shots",
    "n": "samples",
    "stride": "stride",
    "n_windows": "windows",
    "n_key_tokens": "key tokens",
    "n_tokens": "tokens",
}
"""Counts of a score in a list, from its facts, and their headings; a list has those that any of its scores has."""
PERCENT = "correct answers in percent with 95 % interval"
PROTOCOLS = {
    "base": "base-model protocol: the prompt starts the answer, and the first integer in 15 new tokens is scored",
    "chat": "chat-model protocol: the last integer in 100 new tokens is scored",
}
"""Descriptions of LongEval protocols by their name in a result's details."""
AVERAGES = "by token: average over all tokens; published: mean of the windows' mean losses, as in the YaRN repository"


def evaluation_tables(series: Series) -> list[ResultTable]:
    """Build all tables of these results.

    :data:`~ropewalk.evaluation.tasks.registry.SUITES` names the benchmarks in their order, with their titles and their
    kind of table. Any other benchmark gets a table per task if its scores are percentages at several lengths (also by
    depth, if there are depths), and otherwise one table.

    Args:
        series: results by model name. Models are columns of a table, or have one table each if a table shows a single
            model.

    Returns:
        At least one table for each benchmark that ran, and none for the others.
    """
    models, rows = list(series), score_rows(series)
    tables = [table for suite, own in by_suite(rows).items() for table in _suite_tables(suite, models, own)]
    return [*tables, *_for_each(models, rows, checkpoint_tables)]


def _suite_tables(name: str, models: Sequence[str], rows: Sequence[ScoreRow]) -> list[ResultTable]:
    suite = BY_NAME.get(name)
    kind = suite and suite.figure
    title = (suite and suite.title) or name
    tasks = by_task(rows)
    if kind == "by position":
        documents = [row for row in rows if row.task != name]
        tables = position_tables(models, tasks.get(name, ()))
        if documents:
            words = "Perplexity of documents, with 95 % interval over documents"
            tables.append(list_table(words, models, documents, ("task", "metric", "length"), "documents"))
        return tables
    if name == "longppl":
        words = "LongPPL: perplexity of key tokens, which depend on the long context, with 95 % interval over documents"
        return [list_table(words, models, rows, counted="documents")]
    # Tasks with an overall score share one table.
    if kind == "tasks" or (kind != "bars" and OVERALL in tasks):
        return _for_each(models, rows, lambda own, of: task_tables(own, f"{title}{of}: {PERCENT}"))
    titles = suite.titles if suite else {}
    if kind == "bars" or not (titles or is_by_length(rows)):
        return [list_table(f"{title}, with 95 % interval", models, rows, ("task", "metric", "length"))]
    tables = []
    for task, own in tasks.items():
        words = (_task_title(titles, task) or task_words(title, task)).replace(
            "{haystack}", haystack_words(own)
        )
        tables.append(list_table(f"{words}: {PERCENT}", models, [row for row in own if row.is_whole]))
        tables += _for_each(models, own, partial(_depth_tables, words))
        tables += _for_each(models, own, partial(_group_tables, words))
    return tables


def _for_each(
    models: Sequence[str],
    rows: Sequence[ScoreRow],
    build: Callable[[Sequence[ScoreRow], str], Sequence[ResultTable]],
) -> list[ResultTable]:
    """Tables of a single model each. ``build`` gets the model's rows, and words for the title if there are several."""
    found = {model: [row for row in rows if row.when == model] for model in models}
    return [
        table
        for model, own in found.items()
        if own
        for table in build(own, f" of {model}" if len(models) > 1 else "")
    ]


def _task_title(titles: Mapping[str, str], task: str) -> str:
    """Title of a task in the heading of a table; empty if its suite gives it none."""
    for name, title in titles.items():
        start, star, _ = name.partition("*")
        if task == name or (star and task.startswith(start)):
            return title.replace("*", task.removeprefix(start))
    return ""


def list_table(
    title: str,
    models: Sequence[str],
    rows: Sequence[ScoreRow],
    heads: Sequence[str] = ("length",),
    counted: str = "samples",
) -> ResultTable:
    """Table with a line per score: what it is of, its counts, and the score of each model with its interval.

    Args:
        title: title of the table.
        models: names of the models, side by side.
        rows: scores, of any unit.
        heads: keys of ``HEADS`` that tell the lines apart. Metrics and lengths have no column if no score has one.
        counted: what ``n`` counts; empty for no column of it.
    """
    known = {"metric": any(row.metric for row in rows), "length": any(row.length for row in rows)}
    heads = [head for head in heads if known.get(head, True)] or list(heads)
    # A score that did not run has no metric, and belongs into the line of those that did.
    metrics = {(row.suite, row.task): row.metric for row in reversed(rows) if row.metric}
    tasks = {task: place for place, task in enumerate(dict.fromkeys((row.suite, row.task) for row in rows))}
    suites = {row.suite for row in rows}
    lines: dict[tuple[int, float, tuple[float, float], str], dict[str, ScoreRow]] = {}
    for row in rows:
        task = row.suite, row.task
        metric = row.metric or metrics.get(task, "")
        place = (tasks[task], math.inf if row.length is None else row.length, row.cell or ENDLESS, metric)
        lines.setdefault(place, {})[row.when] = row
    # Metrics stay in the order of the scores.
    ordered = sorted(lines.items(), key=lambda pair: pair[0][:3])
    counts = {
        key: heading for key, heading in COUNTS.items() if any(_count(row, key) is not None for row in rows)
    }
    counts = {key: heading for key, heading in {**counts, "n": counted}.items() if heading}
    marks = _marks(rows)
    with_unit = "task" in heads
    body = []
    for (*_, metric), line in ordered:
        first = next(iter(line.values()))
        named = {
            "task": first.task if len(suites) == 1 else first.name,
            "metric": metric or MISSING,
            "length": length_words(first.length),
            "cell": "all" if first.cell is None else f"{first.cell[0]:,} to {first.cell[1] - 1:,}",
        }
        found = ([_count(row, key) for row in line.values()] for key in counts)
        scores = (_score_cells(line.get(model), with_unit, marks) for model in models)
        numbers = (counts_text(each for each in some if each is not None) for some in found)
        body.append((*(named[head] for head in heads), *numbers, *chain(*scores)))
    units = {row.unit for row in rows}
    score = "perplexity" if units == {"perplexity"} else "score" if with_unit else "correct (%)"
    names = [score] if len(models) == 1 else models
    header = (*(HEADS[head] for head in heads), *counts.values(), *chain(*((name, "95 %") for name in names)))
    notes = (*note_lines(marks), *_fact_notes(rows))
    return ResultTable(title, header, tuple(body), max(1, len({"task", "metric"} & {*heads})), notes)


def _count(row: ScoreRow, key: str) -> int | None:
    """A count of a score that ran; None if it is not known."""
    if not row.ran:
        return None
    return row.n if key == "n" else row.facts.get(key)


def _score_cells(row: ScoreRow | None, with_unit: bool, marks: Mapping[str, str]) -> tuple[str, str]:
    """Cells of score and interval, with the mark of the score's note."""
    if row is None:
        return MISSING, MISSING
    mark = marks.get(_note_of(row), "")
    if not row.ran:
        return f"not run{mark}", MISSING
    percent = "{:.1f} %".format if with_unit and not math.isnan(row.value) else one_decimal
    style: Callable[[float], str] = number if row.unit == "perplexity" else percent
    return style(row.value) + mark, interval(row.ci95, style)


def position_tables(models: Sequence[str], rows: Sequence[ScoreRow]) -> list[ResultTable]:
    """Perplexity by position: one table per length, with models side by side."""
    tables = []
    lengths = sorted({row.length for row in rows}, key=lambda length: math.inf if length is None else length)
    for length in lengths:
        own = [row for row in rows if row.length == length]
        counts = [row.n for row in own if row.ran and row.cell is None]
        sequences = f" in {counted(counts, 'sequence')}" if counts else ""
        tokens = "" if length is None else f" of {length:,} tokens"
        over = "seeds and sequences" if any("spread" in row.facts for row in own) else "sequences"
        title = f"Perplexity by position{sequences}{tokens}, with 95 % interval over {over}"
        tables.append(list_table(title, models, own, ("cell",), counted=""))
    return tables


def length_words(length: int | None) -> str:
    """Format a length as ``8,192``, or ``all lengths`` for a result without one."""
    return "all lengths" if length is None else f"{length:,}"


def _note_of(row: ScoreRow) -> str:
    reason = shown(row.note, MOST_IN_NOTE)
    return reason if row.ran else f"not run: {reason}"


def _marks(rows: Iterable[ScoreRow]) -> dict[str, str]:
    """Assign a superscript to each distinct note of these scores, in order."""
    return marks_of(map(_note_of, rows))


def _fact_notes(rows: Iterable[ScoreRow]) -> list[str]:
    """Lines on how scores were averaged, how LongEval prompted, and which documents were drawn; each once."""
    lines = []
    for row in (row for row in rows if row.ran):
        if row.metric == PUBLISHED:
            lines.append(AVERAGES)
        if row.facts.get("protocol") in PROTOCOLS:
            lines.append(PROTOCOLS[row.facts["protocol"]])
        sources = row.facts.get("sources")
        if isinstance(sources, Mapping) and sources:
            by_count = sorted(sources.items(), key=lambda pair: -pair[1])
            named = ", ".join(
                f"{shown(str(name), MOST_IN_SOURCE)} {count:,}" for name, count in by_count[:MOST_SOURCES]
            )
            more = len(sources) - MOST_SOURCES
            documents = sum(sources.values())
            lines.append(
                f"text drawn at random: {documents:,} document{'s' * (documents != 1)} ({named}"
                f"{f' and {more:,} more sources' if more > 0 else ''})"
            )
    return list(dict.fromkeys(lines))


def task_tables(rows: Sequence[ScoreRow], title: str) -> list[ResultTable]:
    """Grid of one model: one line per task with the overall score last, one column per length."""
    found, lengths = {(row.task, row.length): row for row in rows}, _lengths(rows)
    # A task that did not run at all has one result without a length, which fills its line.
    grid = {
        task: [found.get((task, length)) or found.get((task, None)) for length in lengths]
        for task in by_task(rows)
    }
    return grid_tables(title, "task", grid, lengths, _overall_notes(grid.get(OVERALL, ()), grid))


def _group_tables(title: str, rows: Sequence[ScoreRow], of: str) -> list[ResultTable]:
    """Grid of one task of one model: one line per group of questions, one column per length; none without groups."""
    grouped, lengths = [row for row in rows if row.group], _lengths(rows)
    found = {(row.group, row.length): row for row in grouped}
    names = dict.fromkeys(row.group for row in grouped)
    grid = {shown(name, MOST_IN_SOURCE): [found.get((name, length)) for length in lengths] for name in names}
    return grid_tables(f"{title}{of}, by group: {PERCENT}", "group", grid, lengths) if grid else []


def _depth_tables(title: str, rows: Sequence[ScoreRow], of: str) -> list[ResultTable]:
    """Grid of one task of one model: one line per depth, one column per length; none if nothing has a depth."""
    found, lengths = {(row.depth, row.length): row for row in rows}, _lengths(rows)
    # A length that did not run has no depths.
    missing = {row.length: row for row in rows if not row.ran}
    depths = sorted({row.depth for row in rows if row.depth is not None})
    grid = {
        depth_words(depth): [found.get((depth, length)) or missing.get(length) for length in lengths]
        for depth in depths
    }
    return grid_tables(f"{title}{of}, by depth: {PERCENT}", "depth", grid, lengths) if grid else []


def _lengths(rows: Sequence[ScoreRow]) -> list[int | None]:
    """Lengths of the columns of a grid, or a single None if no score has a length."""
    return [*sorted({row.length for row in rows if row.length is not None})] or [None]


def grid_tables(
    title: str,
    corner: str,
    lines: Mapping[str, Sequence[ScoreRow | None]],
    lengths: Sequence[int | None],
    notes: Sequence[str] = (),
) -> list[ResultTable]:
    """Table of scores in percent, in lines of tasks or depths. One wider than a terminal is split by its columns.

    Args:
        title: title of the table.
        corner: heading of the first column.
        lines: scores by name, as many as there are lengths; None for none.
        lengths: lengths of the columns.
        notes: lines below those on the scores.
    """
    # An overall score that was computed has lines of its own among the notes.
    marks = _marks(row for line in lines.values() for row in line if row and not _is_mean(row))
    notes = (*note_lines(marks), *notes)
    heads = _heads(lengths)
    # Prefer few tables; for the same number of tables, prefer the wide notation of intervals.
    for count in range(1, len(heads) + 1):
        for wide in (True, False):
            edges = [len(heads) * block // count for block in range(count + 1)]
            tables = []
            for start, end in pairwise(edges):
                part = {name: line[start:end] for name, line in lines.items()}
                where = f", {heads[start]} to {heads[end - 1]}" if count > 1 else ""
                tables.append(_grid(title + where, corner, part, heads[start:end], marks, wide, notes))
            if max(map(_width, tables)) <= MOST_CHARACTERS:
                return tables
    # Tables of one column may still be too wide, but cannot be split further.
    return tables


def _width(table: ResultTable) -> int:
    widths = (max(map(len, column)) for column in zip(table.header, *table.rows, strict=True))
    return sum(widths) + GAP * (len(table.header) - 1)


def _grid(
    title: str,
    corner: str,
    lines: Mapping[str, Sequence[ScoreRow | None]],
    heads: Sequence[str],
    marks: Mapping[str, str],
    wide: bool,
    notes: tuple[str, ...],
) -> ResultTable:
    """Build a grid that states n as compactly as possible: in the title, in the headings, or in a separate column."""
    body = [(name, *(_cell(row, marks, wide) for row in line)) for name, line in lines.items()]
    counts = {name: [_cell_count(row) for row in line] for name, line in lines.items()}
    # The number of samples is said once if it is the same everywhere, else per column, else per line.
    by_column = [{n for n in column if n is not None} for column in zip(*counts.values(), strict=True)]
    everywhere = set().union(*by_column)
    header = [corner, *heads]
    if len(everywhere) == 1:
        title += f"; {counted(everywhere, 'sample')} per {corner} and length"
    elif all(len(found) <= 1 for found in by_column):
        named = zip(heads, by_column, strict=True)
        header = [corner, *(f"{name} (n {min(found):,})" if found else name for name, found in named)]
    else:
        header.insert(1, "samples")
        # One number if all lengths have the same, otherwise all numbers in order.
        own = {name: [n for n in line if n is not None] for name, line in counts.items()}
        texts = {name: [*own[name][:1]] if len(set(own[name])) == 1 else own[name] for name in own}
        body = [(n, " / ".join(f"{each:,}" for each in texts[n]) or MISSING, *cells) for n, *cells in body]
    return ResultTable(title, tuple(header), tuple(body), notes=notes)


def _is_mean(row: ScoreRow) -> bool:
    """Whether this is an overall score that was computed."""
    return row.task == OVERALL and row.ran


def _cell_count(row: ScoreRow | None) -> int | None:
    # An overall score's n is the sum over all tasks and would look inconsistent; the notes give it instead.
    return None if row is None or not row.ran or math.isnan(row.value) or _is_mean(row) else row.n


def _cell(row: ScoreRow | None, marks: Mapping[str, str], wide: bool) -> str:
    """Format as ``93.8 (88 to 97)``, or ``93.8 (88–97)`` if not wide. The interval is rounded outwards."""
    if row is None:
        return MISSING
    mark = marks.get(_note_of(row), "")
    if not row.ran or math.isnan(row.value):
        return (MISSING if row.ran else "not run") + mark
    score = "100" if row.value >= 100 else f"{row.value:.1f}"
    if any(map(math.isnan, row.ci95)):
        return score + mark
    # ROUNDING keeps 88.0000001 from becoming 89 through floating-point error.
    low, high = math.floor(row.ci95[0] + ROUNDING), math.ceil(row.ci95[1] - ROUNDING)
    return f"{score} ({low}{' to ' if wide else '–'}{high}){mark}"


def _overall_notes(overall: Sequence[ScoreRow | None], tasks: Collection[str]) -> list[str]:
    """Notes on the overall score: the tasks it averages at each length, and why tasks without a line are missing."""
    means: dict[str, list[str]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for row in overall:
        if row is None or not row.ran:
            continue
        averaged, left_out = row.facts.get("tasks", ()), dict(row.facts.get("left_out", {}))
        words = (
            f"unweighted mean of {len(averaged)} tasks ({row.n:,} samples)" if averaged else "mean of tasks"
        )
        words += f" without {', '.join(left_out)}" if left_out else ""
        means.setdefault(words, []).extend(_heads([row.length]))
        for task, reason in left_out.items():
            if task not in tasks:
                reasons.setdefault(shown(str(reason)), {})[task] = None
    # Lengths are named only if the overall scores at different lengths average different tasks.
    several = len(means) > 1
    lines = [f"overall{f' at {listed(at)}' if several else ''}: {words}" for words, at in means.items()]
    return [*lines, *(f"left out: {', '.join(tasks)} ({reason})" for reason, tasks in reasons.items())]


def _heads(lengths: Iterable[int | None]) -> list[str]:
    return [length_words(length) for length in lengths]


def depth_words(depth: float) -> str:
    """Format a depth, a share of the text, as ``11.1 %``."""
    return f"{100 * depth:.3g} %"


def listed(parts: Sequence[str]) -> str:
    """Format as ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def comparison_table(
    differences: Sequence[ScoreDifference], names: tuple[str, str] = ("A", "B"), over_seeds: bool = False
) -> ResultTable:
    """Table of paired differences between two evaluations, B minus A.

    Args:
        differences: differences from ``ropewalk.evaluation.comparison.compare``, in percentage points or in percent of
            A's perplexity.
        names: names of A and B.
        over_seeds: whether they are differences between cells of a comparison, which are tested in another way.
    """
    marks = marks_of(map(_note, differences))
    # The notes explain only the units that occur.
    units = dict.fromkeys(each.unit for each in differences)
    words = {"percent": "in percentage points", "perplexity": "in percent of the perplexity"}
    measure = " or ".join(words[unit] for unit in units)
    corrected = "sig.: significant, p below 0.05 after Holm's correction for all differences tested together"
    intervals = {
        "percent": "a paired interval after Bonett and Price for scores",
        "perplexity": "Student's interval of the paired losses for perplexities",
    }
    methods = (
        f"95 %: {', '.join(intervals[unit] for unit in units)}; p: permutation test that exchanges {names[0]} and "
        f"{names[1]} within samples"
    )
    paired = "paired by sample"
    if over_seeds:
        paired = "paired by seed and sample"
        methods = (
            "95 % and p: Student's t distribution with df degrees of freedom, with the variation between seeds and "
            "between samples; all cells share the estimate of how much seeds vary, so other cells change df and p"
        )
    return ResultTable(
        f"Change from {names[0]} to {names[1]}{f' {measure}' if measure else ''}, {paired}, 95 % interval",
        (
            *("task", "length", "samples", *names, "change", "95 %"),
            *(["df"] if over_seeds else []),
            *("p", "adjusted", "sig."),
        ),
        tuple(_comparison_row(each, marks, over_seeds) for each in differences),
        notes=(corrected, *([methods] if units else []), *note_lines(marks)),
    )


def _comparison_row(each: ScoreDifference, marks: Mapping[str, str], over_seeds: bool) -> tuple[str, ...]:
    style: Callable[[float], str] = one_decimal if each.unit == "percent" else number
    # A pair that was not tested is neither significant nor insignificant.
    real = MISSING if each.reason or math.isnan(each.p_adjusted) else "yes" if each.real else "no"
    return (
        task_words(each.suite, each.task),
        MISSING if each.length is None else f"{each.length:,}",
        f"{each.n:,}" if each.n else MISSING,
        style(each.score_a),
        style(each.score_b),
        difference_words(each),
        interval(each.ci95, signed),
        *([MISSING if each.freedom is None else f"{each.freedom:.3g}"] if over_seeds else []),
        _p_words(each.p_value),
        _p_words(each.p_adjusted),
        real + marks.get(_note(each), ""),
    )


def _note(each: ScoreDifference) -> str:
    return f"not compared: {shown(each.reason)}" if each.reason else ""


def difference_words(each: ScoreDifference) -> str:
    """Format a difference as ``+3.2``, or for a perplexity in percent as ``-1.4 %``."""
    ending = " %" if each.unit == "perplexity" and not math.isnan(each.difference) else ""
    return signed(each.difference) + ending


def checkpoint_tables(rows: Sequence[ScoreRow], of: str) -> list[ResultTable]:
    """The table of one model's means over checkpoints with their spread, if there are any."""
    averaged = [row for row in rows if row.is_whole and row.facts.get("checkpoints")]
    if not averaged:
        return []
    # Checkpoints are named after folders, whose names may hold any character.
    names = dict.fromkeys(shown(each["name"]) for row in averaged for each in row.facts["checkpoints"])
    return [
        ResultTable(
            f"Means over {len(names)} checkpoints{of}, each evaluated on all samples",
            ("task", "length", "samples", "unit", "mean", "std dev", "lowest to highest"),
            tuple(map(_checkpoint_row, averaged)),
            notes=(f"checkpoints: {', '.join(names)}",),
        )
    ]


def _checkpoint_row(row: ScoreRow) -> tuple[str, ...]:
    style: Callable[[float], str] = one_decimal if row.unit == "percent" else number
    spread = row.facts.get("spread", {})
    return (
        row.name,
        MISSING if row.length is None else f"{row.length:,}",
        f"{row.n:,}",
        "%" if row.unit == "percent" else row.unit,
        style(row.value),
        style(or_nan(spread.get("sd"))),
        interval((or_nan(spread.get("min")), or_nan(spread.get("max"))), style),
    )


def _p_words(value: float) -> str:
    if math.isnan(value):
        return MISSING
    return f"<{SMALLEST_P:g}" if value < SMALLEST_P else f"{value:.3f}"
