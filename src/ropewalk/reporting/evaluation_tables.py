"""The tables of an evaluation, suite by suite, for the terminal and the page alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ropewalk.evaluation.results import TaskResult
from ropewalk.io.lengths import format_length
from ropewalk.reporting.comparison_tables import checkpoint_tables, one_decimal
from ropewalk.reporting.grid_table import Cell, cell_of, grid_tables
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import (
    MISSING,
    ResultTable,
    Series,
    by_size,
    counts_text,
    headings,
    interval,
    length_words,
    note_lines,
    note_marks,
    note_of,
    number,
    of_model,
    perplexity_tables,
    ran,
    score_cells,
    side_by_side,
)

ORDER = ("ruler", "passkey", "longeval", "needle", "perplexity", "longppl", "short", "longbench")
"""Suites as they are shown; others follow."""
OVERALL = "overall"
TITLES = {
    ("passkey", "passkey"): "Passkey retrieval",
    ("passkey", "forced"): "Passkey retrieval, teacher-forced",
    ("longeval", "lines"): "LongEval lines",
    ("needle", "generated"): "Needle{haystack}, generated answers",
    ("needle", "forced"): "Needle{haystack}, teacher-forced",
}
HAYSTACKS = {
    "noise": " in repeated noise",
    "essay": " in essays",
    "embedded": " in the embedded corpus",
    "text": " in given text",
}
PROTOCOLS = {
    "base": "base-model protocol: the prompt begins the answer, and the first integer of 15 new tokens counts",
    "chat": "chat-model protocol: the last integer of 100 new tokens counts",
}
"""Of LongEval, by the name in a result's details."""
PLAIN_TITLES = {"short": "Short context", "longbench": "LongBench", "lm_eval": "lm_eval tasks"}


def evaluation_tables(series: Series) -> list[ResultTable]:
    """Every table that shows these results.

    Args:
        series: results by model name. Where a table holds one model, several follow one another; otherwise they
            stand side by side.

    Returns:
        No table for a suite that nobody ran, at least one for every other suite.
    """
    present = dict.fromkeys(result.suite for results in series.values() for result in results)
    tables = []
    for suite in [*(s for s in ORDER if s in present), *(s for s in present if s not in ORDER)]:
        part = {name: [r for r in results if r.suite == suite] for name, results in series.items()}
        tables += _suite_tables(suite, part)
    return [*tables, *checkpoint_tables(series)]


def _title(suite: str, task: str, results: Iterable[TaskResult | None] = ()) -> str | None:
    """What a task by length is called, with the haystack of its results; None for tasks without lengths."""
    if suite == "longeval" and task.startswith("lines_"):
        return f"LongEval, records of {task.removeprefix('lines_')} lines"
    title = TITLES.get((suite, task))
    return None if title is None else title.format(haystack=haystack_words(results))


def haystack_words(results: Iterable[TaskResult | None]) -> str:
    """`` in essays``, where all results that ran name one haystack; else nothing."""
    named = {str(r.details.get("haystack")) for r in results if ran(r)}
    return HAYSTACKS.get(named.pop(), "") if len(named) == 1 else ""


def _protocol_notes(results: Iterable[TaskResult | None]) -> list[str]:
    """How LongEval asked and judged; nothing for other suites."""
    named = dict.fromkeys(r.details.get("protocol") for r in results if ran(r))
    return [PROTOCOLS[each] for each in named if each in PROTOCOLS]


def _suite_tables(suite: str, part: Series) -> list[ResultTable]:
    if suite == "ruler":
        return ruler_tables(part)
    if suite == "perplexity":
        return [*perplexity_tables(part), *document_tables(part)]
    if suite == "longppl":
        return [_key_token_table(part)]
    tasks = dict.fromkeys(result.task for results in part.values() for result in results)
    if all(_title(suite, task) for task in tasks):
        return list(chain(*(_length_tables(part, suite, task) for task in tasks)))
    return [plain_table(suite, part)]


def ruler_tables(series: Series) -> list[ResultTable]:
    """RULER: a row a task and the overall score last, a column a length; a table a model."""
    tables = []
    for name, results in series.items():
        if not results:
            continue
        lengths = _columns(results)
        found = {(r.task, r.length): r for r in results}
        tasks = sorted(dict.fromkeys(r.task for r in results), key=lambda task: task == OVERALL)
        grid = {task: [_at(found, task, length) for length in lengths] for task in tasks}
        overall = grid.pop(OVERALL, None)
        marks = note_marks(chain(*grid.values(), (r for r in overall or () if not ran(r))))
        rows = {task: [cell_of(result, marks) for result in row] for task, row in grid.items()}
        if overall:
            # Its n is the sum of the others', and what it is a mean of is said at length.
            rows[OVERALL] = [replace(cell_of(result, marks), n=None) for result in overall]
        title = f"RULER{of_model(name, series)}: right answers in percent with 95 % interval"
        notes = [*note_lines(marks), *_overall_notes(overall or [], set(grid))]
        tables += grid_tables(title, "task", rows, _heads(lengths), "task and length", notes)
    return tables


def _overall_notes(overall: Sequence[TaskResult | None], rows: Collection[str]) -> list[str]:
    """What the overall score is a mean of at each length, and why it lacks tasks that have no row."""
    means: dict[str, list[str]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for result in overall:
        if not ran(result):
            continue
        tasks, left_out = result.details.get("tasks", ()), dict(result.details.get("left_out", {}))
        words = f"unweighted mean of {len(tasks)} tasks ({result.n:,} samples)" if tasks else "mean of tasks"
        words += f" without {', '.join(left_out)}" if left_out else ""
        means.setdefault(words, []).extend(_heads([result.length]))
        for task, reason in left_out.items():
            if task not in rows:
                reasons.setdefault(shown(str(reason)), {})[task] = None
    several = len(means) > 1
    said = [f"overall{f' at {_and(at)}' if several else ''}: {words}" for words, at in means.items()]
    return [*said, *(f"left out: {', '.join(tasks)} ({reason})" for reason, tasks in reasons.items())]


def _length_tables(series: Series, suite: str, task: str) -> list[ResultTable]:
    """Right answers by length, models side by side; then by depth, where a result has depths."""
    by_length = side_by_side(series, suite, task)
    marks = note_marks(chain(*by_length.values()))
    rows = [
        (
            length_words(length),
            counts_text(r.n for r in results if ran(r)),
            *chain(*(score_cells(result, one_decimal, marks) for result in results)),
        )
        for length, results in by_length.items()
    ]
    header = ("length in tokens", "samples", *headings(list(series), "right (%)"))
    flat = [result for results in by_length.values() for result in results]
    title = f"{_title(suite, task, flat)}: right answers in percent with 95 % interval"
    table = ResultTable(title, header, tuple(rows), notes=(*note_lines(marks), *_protocol_notes(flat)))
    return [table, *depth_tables(series, suite, task)]


def depth_tables(series: Series, suite: str, task: str) -> list[ResultTable]:
    """Right answers by depth and length: a row a depth, a column a length; a table a model."""
    tables = []
    for name, results in series.items():
        by_length = side_by_side({name: results}, suite, task)
        columns = {length: found[0] for length, found in by_length.items()}
        depths = sorted({d["depth"] for r in columns.values() if r for d in r.details.get("depths", ())})
        marks = note_marks(columns.values())
        rows = {
            depth_words(depth): [_depth_cell(result, depth, marks) for result in columns.values()]
            for depth in depths
        }
        named = f"{_title(suite, task, columns.values())}{of_model(name, series)}"
        title = f"{named}, by depth: right answers in percent with 95 % interval"
        if rows:
            heads = _heads(columns)
            tables += grid_tables(title, "depth", rows, heads, "depth and length", note_lines(marks))
    return tables


def _depth_cell(result: TaskResult | None, depth: float, marks: Mapping[str, str]) -> Cell:
    if not ran(result):
        return cell_of(result, marks)
    at = next((each for each in result.details.get("depths", ()) if each["depth"] == depth), None)
    if at is None or at["score"] is None:
        return Cell()
    return Cell(at["score"], _ends(at["ci95"]), at["n"], mark=marks.get(note_of(result), ""))


def document_tables(series: Series) -> list[ResultTable]:
    """Perplexity of whole documents, in sliding windows or cut to one: both averages; a table a model."""
    tables = []
    for name, results in series.items():
        whole = [r for r in results if r.task != "perplexity"]
        if not whole:
            continue
        marks = note_marks(whole)
        rows = []
        for r in sorted(whole, key=lambda r: (r.task == "truncated", r.task, by_size(r.length))):
            stride = r.details.get("stride")
            published = _published(r)
            rows.append(
                (
                    r.task if stride is None else f"{r.task}, stride {stride:,}",
                    length_words(r.length),
                    f"{r.n:,}" if ran(r) else MISSING,
                    _count(r.details.get("n_windows")),
                    *score_cells(r, number, marks),
                    *published,
                )
            )
        title = f"Perplexity of documents{of_model(name, series)}, with 95 % interval over documents"
        header = ("protocol", "length", "documents", "windows", "by token", "95 %", "published", "95 %")
        notes = (
            "by token: every token weighs the same; published: the mean of the windows' mean losses, as the YaRN "
            "repository takes it",
            *note_lines(marks),
        )
        tables.append(ResultTable(title, header, tuple(rows), notes=notes))
    return tables


def _published(result: TaskResult) -> tuple[str, str]:
    value = result.details.get("published")
    ends = _ends(result.details.get("published_ci95", (None, None)))
    return (MISSING if value is None else number(value)), interval(ends)


def _key_token_table(series: Series) -> ResultTable:
    by_length = side_by_side(series, "longppl", "longppl")
    marks = note_marks(chain(*by_length.values()))
    rows = []
    for length, results in by_length.items():
        measured = [result for result in results if ran(result)]
        keys = [r.details["n_key_tokens"] for r in measured if "n_key_tokens" in r.details]
        rows.append(
            (
                length_words(length),
                counts_text(result.n for result in measured),
                counts_text(keys),
                *chain(*(score_cells(result, number, marks) for result in results)),
            )
        )
    return ResultTable(
        "LongPPL: perplexity of the tokens that need the long context, with 95 % interval over documents",
        ("length in tokens", "documents", "key tokens", *headings(list(series), "LongPPL")),
        tuple(rows),
        notes=note_lines(marks),
    )


def plain_table(suite: str, series: Series) -> ResultTable:
    """Any other suite: a row a task, models side by side, units in the cells."""
    keys = dict.fromkeys((r.task, r.length) for results in series.values() for r in results)
    found = [{(r.task, r.length): r for r in results} for results in series.values()]
    columns = {key: [each.get(key) for each in found] for key in keys}
    marks = note_marks(chain(*columns.values()))
    with_length = any(length is not None for _, length in keys)
    rows = []
    for (task, length), results in columns.items():
        details = [result.details for result in results if ran(result)]
        metrics = dict.fromkeys(str(each["metric"]) for each in details if "metric" in each)
        shots = dict.fromkeys(each["num_fewshot"] for each in details if each.get("num_fewshot") is not None)
        rows.append(
            (
                task,
                *([length_words(length)] if with_length else []),
                " / ".join(metrics) or MISSING,
                counts_text(shots),
                counts_text(result.n for result in results if ran(result)),
                *chain(*(_unit_cells(result, marks) for result in results)),
            )
        )
    title = f"{PLAIN_TITLES.get(suite, suite)}, with 95 % interval"
    header = ("task", *(["length"] if with_length else []), "metric", "shots", "samples")
    header += tuple(headings(list(series), "score"))
    return ResultTable(
        title, header, tuple(rows), text_columns=1 if with_length else 2, notes=note_lines(marks)
    )


def _unit_cells(result: TaskResult | None, marks: Mapping[str, str]) -> tuple[str, str]:
    """Score and interval with their unit, as a table may hold both."""
    in_percent = result is not None and result.unit == "percent"
    return score_cells(result, "{:.1f} %".format if in_percent else number, marks)


def _columns(results: Sequence[TaskResult]) -> list[int | None]:
    """The lengths, or the one column that is left where no result has one."""
    lengths = sorted({result.length for result in results if result.length is not None})
    return [*lengths] or [None]


def _at(
    found: Mapping[tuple[str, int | None], TaskResult], task: str, length: int | None
) -> TaskResult | None:
    """A result at a length; what was not run at any length has no length, and stands for all."""
    return found.get((task, length)) or found.get((task, None))


def _heads(lengths: Iterable[int | None]) -> list[str]:
    return ["all lengths" if length is None else format_length(length) for length in lengths]


def depth_words(depth: float) -> str:
    """A share of the text as ``11.1 %``."""
    return f"{100 * depth:.3g} %"


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ends(ends: Sequence[float | None]) -> tuple[float, float]:
    low, high = (math.nan if end is None else float(end) for end in ends)
    return low, high


def _count(value: Any) -> str:
    return MISSING if value is None else f"{value:,}"
