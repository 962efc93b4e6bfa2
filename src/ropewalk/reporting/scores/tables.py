"""Build tables of evaluation results: by position, length, depth and task, of two evaluations, over checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

from ropewalk.evaluation.results import PositionBin, TaskResult
from ropewalk.evaluation.statistics import Interval
from ropewalk.io.lengths import format_length
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import (
    ResultTable,
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

Series = Mapping[str, Sequence[TaskResult]]
"""Results by model name, such as ``{"before": …, "after": …}``."""

OVERALL = "overall"
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
HAYSTACKS = {
    "noise": " in repeated noise",
    "essay": " in essays",
    "embedded": " in the embedded corpus",
    "text": " in given text",
}
PROTOCOLS = {
    "base": "base-model protocol: the prompt starts the answer, and the first integer in 15 new tokens is scored",
    "chat": "chat-model protocol: the last integer in 100 new tokens is scored",
}
"""Descriptions of LongEval protocols by their name in a result's details."""


Count = tuple[str, Callable[[TaskResult], Any]]
"""Heading of a column of counts, and the count of a result; None for none."""
SAMPLES: Count = "samples", lambda result: result.n


def list_table(
    title: str,
    series: Series,
    heads: Sequence[str],
    rows: Mapping[tuple[str, ...], Sequence[TaskResult | None]],
    score: str,
    style: Callable[[float], str] | None = None,
    counts: Sequence[Count] = (SAMPLES,),
    notes: Sequence[str] = (),
    text_columns: int = 1,
) -> ResultTable:
    """Build a table of scores with their intervals, one row per key of ``rows``, models side by side.

    Args:
        title: title of the table.
        series: results by model name; only the names are read.
        heads: headings of the leading columns, which hold the keys of ``rows``.
        rows: one result per model and row; None if a model lacks it.
        score: heading of the score of a single model.
        style: formats scores. None writes each with its unit, for tables that mix percentages and perplexities.
        counts: columns between the leading ones and the scores: one number if all models agree, otherwise all.
        notes: lines below those on the results.
        text_columns: number of leading text columns.
    """
    marks = note_marks(chain(*rows.values()))
    body = []
    for lead, results in rows.items():
        measured = [result for result in results if ran(result)]
        found = ([get(result) for result in measured] for _, get in counts)
        numbers = (counts_text(each for each in some if each is not None) for some in found)
        body.append((*lead, *numbers, *chain(*(score_cells(result, style, marks) for result in results))))
    header = (*heads, *(heading for heading, _ in counts), *headings(list(series), score))
    return ResultTable(title, header, tuple(body), text_columns, (*note_lines(marks), *notes))


def perplexity_tables(series: Series) -> list[ResultTable]:
    """Perplexity by position: one table per length, with models side by side."""
    by_length = side_by_side(series, "perplexity", "perplexity")
    return [_perplexity_table(list(series), length, columns) for length, columns in by_length.items()]


def side_by_side(series: Series, suite: str, task: str) -> dict[int | None, list[TaskResult | None]]:
    """Results of a task by length, shortest first: one result per model in order, None if a model lacks it."""
    found = {
        name: {r.length: r for r in results if (r.suite, r.task) == (suite, task)}
        for name, results in series.items()
    }
    lengths = sorted({length for each in found.values() for length in each}, key=by_size)
    return {length: [each.get(length) for each in found.values()] for length in lengths}


def _by_length_words(
    by_length: Mapping[int | None, list[TaskResult | None]],
) -> dict[tuple[str, ...], list[TaskResult | None]]:
    return {(length_words(length),): results for length, results in by_length.items()}


def by_size(length: int | None) -> float:
    """Sort key of lengths. Results without a length come last."""
    return math.inf if length is None else length


def _perplexity_table(names: list[str], length: int | None, columns: list[TaskResult | None]) -> ResultTable:
    marks = note_marks(columns)
    # Models may have been measured with different bins, so each distinct bin gets a row.
    edges = sorted({(p.start, p.end) for result in columns if result for p in result.positions})
    rows: list[tuple[str, ...]] = []
    for edge in edges:
        found = [_bin_at(result, edge) for result in columns]
        scores = [(number(p.perplexity), interval(p.ci95)) if p else (MISSING, MISSING) for p in found]
        counts = counts_text([p.n_tokens for p in found if p])
        rows.append((f"{edge[0]:,} to {edge[1] - 1:,}", counts, *chain(*scores)))
    measured = [result for result in columns if ran(result)]
    counts = counts_text([result.details["n_tokens"] for result in measured if "n_tokens" in result.details])
    rows.append(("all", counts, *chain(*(score_cells(result, number, marks) for result in columns))))
    windows = f" in {counts_text([result.n for result in measured])} sequences" if measured else ""
    tokens = "" if length is None else f" of {length:,} tokens"
    return ResultTable(
        f"Perplexity by position{windows}{tokens}, with 95 % interval over sequences",
        ("position", "tokens", *headings(names, "perplexity")),
        tuple(rows),
        notes=(*note_lines(marks), *_draw_notes(measured)),
    )


def _draw_notes(results: Iterable[TaskResult]) -> list[str]:
    """Say how many documents of which sources perplexities were measured on; each draw once."""
    lines = []
    for result in results:
        sources = result.details.get("sources")
        # Results of version 0.1.0 do not name sources.
        if not isinstance(sources, Mapping) or not sources:
            continue
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


def _bin_at(result: TaskResult | None, edge: tuple[int, int]) -> PositionBin | None:
    positions = result.positions if result else ()
    return next((p for p in positions if (p.start, p.end) == edge), None)


def ran(result: TaskResult | None) -> TypeGuard[TaskResult]:
    """Whether there is a result and it has a score."""
    return result is not None and result.status == "ok"


def headings(names: Sequence[str], score: str) -> list[str]:
    """Headings of score and interval: the score's name for a single model, otherwise the models' names."""
    return list(chain(*((score if len(names) == 1 else name, "95 %") for name in names)))


def of_model(name: str, series: Series) -> str:
    """Model name for the title of a table; empty if there is only one model."""
    return f" of {name}" if len(series) > 1 else ""


def score_cells(
    result: TaskResult | None, style: Callable[[float], str] | None, marks: Mapping[str, str]
) -> tuple[str, str]:
    """Cells of score and interval, with the mark of the result's note; with their unit if ``style`` is None."""
    if result is None:
        return MISSING, MISSING
    mark = marks.get(note_of(result), "")
    if not ran(result):
        return result.status + mark, MISSING
    style = style or ("{:.1f} %".format if result.unit == "percent" else number)
    return style(result.score) + mark, interval(result.ci95, style)


def length_words(length: int | None) -> str:
    """Format a length as ``8,192``, or ``all lengths`` for a result without one."""
    return "all lengths" if length is None else f"{length:,}"


def note_of(result: TaskResult) -> str:
    """Why a task did not run, or a remark on its score; empty if there is neither."""
    reason = shown(result.reason or "", MOST_IN_NOTE)
    return f"not run: {reason}" if result.status == "not run" else reason


def note_marks(results: Iterable[TaskResult | None]) -> dict[str, str]:
    """Assign a superscript to each distinct note of these results, in order."""
    return marks_of(note_of(result) for result in results if result)


def haystack_words(results: Iterable[TaskResult | None]) -> str:
    """Haystack source, such as `` in essays``, if all results that ran share one; otherwise empty."""
    named = {str(r.details.get("haystack")) for r in results if ran(r)}
    return HAYSTACKS.get(named.pop(), "") if len(named) == 1 else ""


def _with_haystack(title: str, results: Iterable[TaskResult | None]) -> str:
    return title.replace("{haystack}", haystack_words(results))


def _protocol_notes(results: Iterable[TaskResult | None]) -> list[str]:
    """Describe how LongEval prompted and scored; empty for other suites."""
    named = dict.fromkeys(r.details.get("protocol") for r in results if ran(r))
    return [PROTOCOLS[each] for each in named if each in PROTOCOLS]


def task_tables(series: Series, title: str) -> list[ResultTable]:
    """Tables of a suite of tasks: one row per task with the overall score last, one column per length."""
    tables = []
    for name, results in series.items():
        if not results:
            continue
        lengths = _columns(results)
        found = {(r.task, r.length): r for r in results}
        # The overall score goes last: False sorts before True.
        tasks = sorted(dict.fromkeys(r.task for r in results), key=lambda task: task == OVERALL)
        grid = {task: [_at(found, task, length) for length in lengths] for task in tasks}
        overall = grid.pop(OVERALL, None)
        # An overall score that was computed has lines of its own below the table, and no mark.
        marks = note_marks(chain(*grid.values(), (r for r in overall or () if not ran(r))))
        rows = {task: [cell_of(result, marks) for result in row] for task, row in grid.items()}
        if overall:
            # Its n is the sum over all tasks and would look inconsistent; the notes give it instead.
            rows[OVERALL] = [replace(cell_of(result, marks), n=None) for result in overall]
        named = f"{title}{of_model(name, series)}: correct answers in percent with 95 % interval"
        notes = [*note_lines(marks), *_overall_notes(overall or [], set(grid))]
        tables += grid_tables(named, "task", rows, _heads(lengths), "task and length", notes)
    return tables


def _overall_notes(overall: Sequence[TaskResult | None], rows: Collection[str]) -> list[str]:
    """Notes on the overall score: the tasks it averages at each length, and why tasks without a row are missing."""
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
    # Lengths are named only if the overall scores at different lengths average different tasks.
    several = len(means) > 1
    lines = [f"overall{f' at {_and(at)}' if several else ''}: {words}" for words, at in means.items()]
    return [*lines, *(f"left out: {', '.join(tasks)} ({reason})" for reason, tasks in reasons.items())]


def length_tables(series: Series, suite: str, task: str, title: str) -> list[ResultTable]:
    """Tables of one task: correct answers by length with models side by side, then by depth if results have depths.

    Args:
        series: results by model name.
        suite, task: names of suite and task.
        title: title of the task. ``{haystack}`` in it stands for the haystack source of the run.
    """
    by_length = side_by_side(series, suite, task)
    flat = [result for results in by_length.values() for result in results]
    named = f"{_with_haystack(title, flat)}: correct answers in percent with 95 % interval"
    table = list_table(
        named,
        series,
        ["length in tokens"],
        _by_length_words(by_length),
        "correct (%)",
        one_decimal,
        notes=_protocol_notes(flat),
    )
    return [table, *_depth_tables(series, suite, task, title)]


def _depth_tables(series: Series, suite: str, task: str, title: str) -> list[ResultTable]:
    """Tables of correct answers with one row per depth and one column per length, one table per model."""
    tables = []
    for name, results in series.items():
        by_length = side_by_side({name: results}, suite, task)
        # There is one model, so each length has one result.
        columns = {length: found[0] for length, found in by_length.items()}
        depths = sorted({d["depth"] for r in columns.values() if r for d in r.details.get("depths", ())})
        marks = note_marks(columns.values())
        rows = {
            depth_words(depth): [_depth_cell(result, depth, marks) for result in columns.values()]
            for depth in depths
        }
        named = f"{_with_haystack(title, columns.values())}{of_model(name, series)}"
        named += ", by depth: correct answers in percent with 95 % interval"
        if rows:
            heads = _heads(columns)
            tables += grid_tables(named, "depth", rows, heads, "depth and length", note_lines(marks))
    return tables


def _depth_cell(result: TaskResult | None, depth: float, marks: Mapping[str, str]) -> Cell:
    if not ran(result):
        return cell_of(result, marks)
    at = next((each for each in result.details.get("depths", ()) if each["depth"] == depth), None)
    if at is None or at["score"] is None:
        return Cell()
    return Cell(at["score"], _ends(at["ci95"]), at["n"], mark=marks.get(note_of(result), ""))


def document_tables(series: Series) -> list[ResultTable]:
    """Tables of document perplexity, in sliding windows or truncated, with both ways of averaging; one per model."""
    tables = []
    for name, results in series.items():
        # Perplexity by position has tables of its own.
        whole = [r for r in results if r.task != "perplexity"]
        if not whole:
            continue
        marks = note_marks(whole)
        rows = []
        # Sliding windows first, truncated documents last.
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
            "by token: average over all tokens; published: mean of the windows' mean losses, as in the YaRN repository",
            *note_lines(marks),
            *_draw_notes(whole),
        )
        tables.append(ResultTable(title, header, tuple(rows), notes=notes))
    return tables


def _published(result: TaskResult) -> tuple[str, str]:
    value = result.details.get("published")
    ends = _ends(result.details.get("published_ci95", (None, None)))
    return (MISSING if value is None else number(value)), interval(ends)


def key_token_table(series: Series) -> ResultTable:
    """LongPPL by length, with models side by side."""
    by_length = side_by_side(series, "longppl", "longppl")
    return list_table(
        "LongPPL: perplexity of key tokens, which depend on the long context, with 95 % interval over documents",
        series,
        ["length in tokens"],
        _by_length_words(by_length),
        "LongPPL",
        number,
        # Results of another program may lack these details, so a missing count leaves the cell empty.
        [("documents", SAMPLES[1]), ("key tokens", lambda result: result.details.get("n_key_tokens"))],
        _draw_notes(result for results in by_length.values() for result in results if ran(result)),
    )


def plain_table(series: Series, title: str) -> ResultTable:
    """Table of tasks of any kind: one row per task, models side by side, units in the cells."""
    # Without repeats, in the order of the results.
    keys = dict.fromkeys((r.task, r.length) for results in series.values() for r in results)
    found = [{(r.task, r.length): r for r in results} for results in series.values()]
    with_length = any(length is not None for _, length in keys)
    rows = {}
    for task, length in keys:
        results = [each.get((task, length)) for each in found]
        metrics = dict.fromkeys(str(r.details["metric"]) for r in results if ran(r) and "metric" in r.details)
        own = [length_words(length)] if with_length else []
        rows[task, *own, " / ".join(metrics) or MISSING] = results
    return list_table(
        f"{title}, with 95 % interval",
        series,
        ["task", *(["length"] if with_length else []), "metric"],
        rows,
        "score",
        counts=[("shots", lambda result: result.details.get("num_fewshot")), SAMPLES],
        text_columns=1 if with_length else 2,
    )


def _columns(results: Sequence[TaskResult]) -> list[int | None]:
    """Lengths of the columns, or a single None if no result has a length."""
    lengths = sorted({result.length for result in results if result.length is not None})
    return [*lengths] or [None]


def _at(
    found: Mapping[tuple[str, int | None], TaskResult], task: str, length: int | None
) -> TaskResult | None:
    """Result at a length. A task that did not run at all has one result without a length, used for all columns."""
    return found.get((task, length)) or found.get((task, None))


def _heads(lengths: Iterable[int | None]) -> list[str]:
    return ["all lengths" if length is None else format_length(length) for length in lengths]


def depth_words(depth: float) -> str:
    """Format a depth, a share of the text, as ``11.1 %``."""
    return f"{100 * depth:.3g} %"


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ends(ends: Sequence[float | None]) -> tuple[float, float]:
    # JSON has no NaN, so a result on disk states a missing end as null.
    low, high = (math.nan if end is None else float(end) for end in ends)
    return low, high


def _count(value: Any) -> str:
    return MISSING if value is None else f"{value:,}"


@dataclass(frozen=True)
class Cell:
    """A score, or a word instead of it.

    Attributes:
        score: score in percent. NaN if there is none.
        ci95: 95 % interval in percent.
        n: number of samples. None excludes the cell from the table's sample counts.
        word: shown if the score is missing.
        mark: mark of the cell's note.
    """

    score: float = math.nan
    ci95: Interval = (math.nan, math.nan)
    n: int | None = None
    word: str = MISSING
    mark: str = ""

    def text(self, wide: bool) -> str:
        """Format as ``93.8 (88 to 97)``, or ``93.8 (88–97)`` if not wide. The interval is rounded outwards."""
        if math.isnan(self.score):
            return self.word + self.mark
        score = "100" if self.score >= 100 else f"{self.score:.1f}"
        if any(map(math.isnan, self.ci95)):
            return score + self.mark
        # ROUNDING keeps 88.0000001 from becoming 89 through floating-point error.
        low = math.floor(self.ci95[0] + ROUNDING)
        high = math.ceil(self.ci95[1] - ROUNDING)
        return f"{score} ({low}{' to ' if wide else '–'}{high}){self.mark}"


def cell_of(result: TaskResult | None, marks: Mapping[str, str]) -> Cell:
    """Convert a result to a cell."""
    if result is None:
        return Cell()
    mark = marks.get(note_of(result), "")
    if not ran(result):
        return Cell(word=result.status, mark=mark)
    return Cell(result.score, result.ci95, result.n, mark=mark)


def grid_tables(
    title: str,
    corner: str,
    rows: Mapping[str, Sequence[Cell]],
    columns: Sequence[str],
    each: str,
    notes: Sequence[str] = (),
) -> list[ResultTable]:
    """Build a table of cells. A table wider than a terminal is split into several by columns.

    Args:
        title: title of the table.
        corner: heading of the first column.
        rows: cells by row name, as many as there are columns.
        columns: headings of the columns.
        each: unit that n counts samples of, such as ``task and length``.
        notes: lines below the title.
    """
    # Prefer few tables; for the same number of tables, prefer the wide notation of intervals.
    for count in range(1, len(columns) + 1):
        for wide in (True, False):
            tables = []
            for block in _blocks(len(columns), count):
                part = {name: [cells[at] for at in block] for name, cells in rows.items()}
                shown = f", {columns[block[0]]} to {columns[block[-1]]}" if count > 1 else ""
                heads = [columns[at] for at in block]
                tables.append(_table(title + shown, corner, part, heads, each, notes, wide))
            if max(map(_width, tables)) <= MOST_CHARACTERS:
                return tables
    # Tables of one column may still be too wide, but cannot be split further.
    return tables


def _blocks(columns: int, count: int) -> list[range]:
    """Split columns into ``count`` consecutive blocks of nearly equal size."""
    edges = [columns * block // count for block in range(count + 1)]
    return [range(start, end) for start, end in pairwise(edges)]


def _width(table: ResultTable) -> int:
    widths = (max(map(len, column)) for column in zip(table.header, *table.rows, strict=True))
    return sum(widths) + GAP * (len(table.header) - 1)


def _table(
    title: str,
    corner: str,
    rows: Mapping[str, Sequence[Cell]],
    columns: Sequence[str],
    each: str,
    notes: Sequence[str],
    wide: bool,
) -> ResultTable:
    """Build a table that states n as compactly as possible: in the title, in the headings, or in a separate column."""
    texts = {name: [cell.text(wide) for cell in cells] for name, cells in rows.items()}
    counts = {name: [cell.n for cell in cells if cell.n is not None] for name, cells in rows.items()}
    # The number of samples is said once if it is the same everywhere, else per column, else per row.
    by_column = [{c.n for c in cells if c.n is not None} for cells in zip(*rows.values(), strict=True)]
    everywhere = set().union(*by_column)
    header = [corner, *columns]
    body = [(name, *cells) for name, cells in texts.items()]
    if len(everywhere) == 1:
        title += f"; {everywhere.pop():,} samples per {each}"
    elif all(len(found) <= 1 for found in by_column):
        heads = zip(columns, by_column, strict=True)
        header = [corner, *(f"{name}, n {min(found):,}" if found else name for name, found in heads)]
    else:
        header.insert(1, "samples")
        body = [(name, _by_length(counts[name]), *cells) for name, cells in texts.items()]
    return ResultTable(title, tuple(header), tuple(body), notes=tuple(notes))


def _by_length(counts: Sequence[int]) -> str:
    """Format sample counts: one number if all lengths have the same, otherwise all numbers in order."""
    return " / ".join(f"{n:,}" for n in (counts[:1] if len(set(counts)) == 1 else counts)) or MISSING


def comparison_table(
    differences: Sequence[ScoreDifference], names: tuple[str, str] = ("A", "B")
) -> ResultTable:
    """Table of paired differences between two evaluations, B minus A.

    Args:
        differences: differences from ``ropewalk.evaluation.comparison.compare``, in percentage points or in percent of
            A's perplexity.
        names: names of A and B.
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
    return ResultTable(
        f"Change from {names[0]} to {names[1]}{f' {measure}' if measure else ''}, paired by sample, 95 % interval",
        ("task", "length", "samples", *names, "change", "95 %", "p", "adjusted", "sig."),
        tuple(_comparison_row(each, marks) for each in differences),
        notes=(corrected, *([methods] if units else []), *note_lines(marks)),
    )


def _comparison_row(each: ScoreDifference, marks: Mapping[str, str]) -> tuple[str, ...]:
    style: Callable[[float], str] = one_decimal if each.unit == "percent" else number
    # A pair that was not tested is neither significant nor insignificant.
    real = MISSING if each.reason or math.isnan(each.p_adjusted) else "yes" if each.real else "no"
    return (
        task_words(each.suite, each.task),
        MISSING if each.length is None else format_length(each.length),
        f"{each.n:,}" if each.n else MISSING,
        style(each.score_a),
        style(each.score_b),
        difference_words(each),
        interval(each.ci95, signed),
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


def checkpoint_tables(series: Series) -> list[ResultTable]:
    """Tables of means over checkpoints with their spread, one per model."""
    tables = []
    for name, results in series.items():
        averaged = [result for result in results if result.details.get("checkpoints")]
        if not averaged:
            continue
        # Checkpoints are named after folders, whose names may hold any character.
        names = dict.fromkeys(shown(each["name"]) for r in averaged for each in r.details["checkpoints"])
        tables.append(
            ResultTable(
                f"Means over {len(names)} checkpoints{of_model(name, series)}, each evaluated on all samples",
                ("task", "length", "samples", "unit", "mean", "std dev", "lowest to highest"),
                tuple(map(_checkpoint_row, averaged)),
                notes=(f"checkpoints: {', '.join(names)}",),
            )
        )
    return tables


def _checkpoint_row(result: TaskResult) -> tuple[str, ...]:
    style: Callable[[float], str] = one_decimal if result.unit == "percent" else number
    spread = result.details.get("spread", {})
    return (
        task_words(result.suite, result.task),
        MISSING if result.length is None else format_length(result.length),
        f"{result.n:,}",
        "%" if result.unit == "percent" else result.unit,
        style(result.score),
        style(_or_nan(spread.get("sd"))),
        interval((_or_nan(spread.get("min")), _or_nan(spread.get("max"))), style),
    )


def task_words(suite: str, task: str) -> str:
    """Name of a task, preceded by its suite unless the suite is obvious."""
    # RULER's tasks are known by their own names, but "overall" says nothing without its suite.
    return task if task == suite or (suite == "ruler" and task != "overall") else f"{suite} {task}"


def _p_words(value: float) -> str:
    if math.isnan(value):
        return MISSING
    return f"<{SMALLEST_P:g}" if value < SMALLEST_P else f"{value:.3f}"


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)
