"""Results as text in rows and columns, for the terminal and the page alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeGuard

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ropewalk.evaluation.results import PositionBin, TaskResult
from ropewalk.evaluation.statistics import Interval
from ropewalk.reporting.shown_text import shown

Series = Mapping[str, Sequence[TaskResult]]
"""Results by the name of the model that gave them, as ``{"before": …, "after": …}``."""

MISSING = "–"
MOST_IN_NOTE = 300
"""Characters of a reason: some quote what a server said."""
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class ResultTable:
    """A table as plain text.

    Attributes:
        title: what it shows, units included.
        header: a heading a column.
        rows: as many cells as the header has.
        text_columns: leading columns that hold text; the others hold numbers and are flushed right.
        bars: whether the last column holds bars, which begin at the left.
        notes: lines between title and table: what a mark in a cell stands for.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    notes: tuple[str, ...] = ()
    bars: bool = False

    def is_text(self, column: int) -> bool:
        """Whether a column is flushed left."""
        return column < self.text_columns or (self.bars and column == len(self.header) - 1)

    def rich(self) -> Group:
        """The table for the terminal, below its title and notes."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column, heading in enumerate(self.header):
            table.add_column(
                _text(heading), justify="left" if self.is_text(column) else "right", no_wrap=True
            )
        for row in self.rows:
            table.add_row(*map(_text, row))
        # Not the table's own title, which would be folded at the table's width.
        return Group(_text(self.title, "bold"), *(_text(note, "dim") for note in self.notes), table)


def _text(text: str, style: str = "") -> Text:
    """One line for the terminal, no markup, whoever wrote it."""
    return Text(shown(text, max(2, len(text))), style)


def result_tables(series: Series) -> list[ResultTable]:
    """The tables of a training run: perplexity by position for each length, then passkey.

    Args:
        series: results by model name; the first one's lengths come first. A result that another model lacks
            leaves its cells empty.

    Returns:
        No table for a suite that nobody ran.
    """
    names = list(series)
    tables = perplexity_tables(series)
    for task, how in (("passkey", ""), ("forced", ", teacher-forced")):
        by_length = side_by_side(series, "passkey", task)
        if not by_length:
            continue
        marks = note_marks(chain(*by_length.values()))
        rows = []
        for length, columns in by_length.items():
            scores = [score_cells(result, percent, marks) for result in columns]
            rows.append(
                (length_words(length), counts_text([r.n for r in columns if ran(r)]), *chain(*scores))
            )
        title = f"Passkey retrieval{how}: right answers with 95 % interval"
        header = ("length in tokens", "samples", *headings(names, "right"))
        tables.append(ResultTable(title, header, tuple(rows), notes=note_lines(marks)))
    return tables


def perplexity_tables(series: Series) -> list[ResultTable]:
    """Perplexity by position, a table a length; several models side by side."""
    by_length = side_by_side(series, "perplexity", "perplexity")
    return [_perplexity_table(list(series), length, columns) for length, columns in by_length.items()]


def side_by_side(series: Series, suite: str, task: str) -> dict[int | None, list[TaskResult | None]]:
    """Results of a task by length, shortest first, one a model in their order; None where a model has none."""
    found = {
        name: {r.length: r for r in results if (r.suite, r.task) == (suite, task)}
        for name, results in series.items()
    }
    lengths = sorted({length for each in found.values() for length in each}, key=by_size)
    return {length: [each.get(length) for each in found.values()] for length in lengths}


def by_size(length: int | None) -> float:
    """Key that sorts lengths, and what has none behind them."""
    return math.inf if length is None else length


def _perplexity_table(names: list[str], length: int | None, columns: list[TaskResult | None]) -> ResultTable:
    marks = note_marks(columns)
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
    windows = f" in {counts_text([result.n for result in measured])} rows" if measured else ""
    tokens = "" if length is None else f" of {length:,} tokens"
    return ResultTable(
        f"Perplexity by position{windows}{tokens}, with 95 % interval over rows",
        ("position", "tokens", *headings(names, "perplexity")),
        tuple(rows),
        notes=note_lines(marks),
    )


def _bin_at(result: TaskResult | None, edge: tuple[int, int]) -> PositionBin | None:
    positions = result.positions if result else ()
    return next((p for p in positions if (p.start, p.end) == edge), None)


def ran(result: TaskResult | None) -> TypeGuard[TaskResult]:
    """Whether there is a result, and a score in it."""
    return result is not None and result.status == "ok"


def headings(names: Sequence[str], score: str) -> list[str]:
    """One model's column says what it holds; of several, whose it is, as the title says the rest."""
    return list(chain(*((score if len(names) == 1 else name, "95 %") for name in names)))


def of_model(name: str, series: Series) -> str:
    """Whose table it is, for its title; nothing where there is one model."""
    return f" of {name}" if len(series) > 1 else ""


def score_cells(
    result: TaskResult | None, style: Callable[[float], str], marks: Mapping[str, str]
) -> tuple[str, str]:
    """Score and interval, with the mark of the result's note."""
    if result is None:
        return MISSING, MISSING
    mark = marks.get(note_of(result), "")
    if not ran(result):
        return result.status + mark, MISSING
    return style(result.score) + mark, interval(result.ci95, style)


def length_words(length: int | None) -> str:
    """``8,192``, or words where a result has no length."""
    return "all lengths" if length is None else f"{length:,}"


def counts_text(counts: Iterable[int]) -> str:
    """One count where all models agree."""
    return " / ".join(f"{count:,}" for count in dict.fromkeys(counts)) or MISSING


def note_of(result: TaskResult) -> str:
    """Why a task was not run, or the remark on its score; empty where there is none."""
    reason = shown(result.reason or "", MOST_IN_NOTE)
    return f"not run: {reason}" if result.status == "not run" else reason


def note_marks(results: Iterable[TaskResult | None]) -> dict[str, str]:
    """A superscript for each note of these results, in their order; equal notes have one."""
    return marks_of(note_of(result) for result in results if result)


def marks_of(notes: Iterable[str]) -> dict[str, str]:
    """A superscript for each note that is not empty, in their order; equal notes have one."""
    distinct = dict.fromkeys(note for note in notes if note)
    return {note: str(mark).translate(_SUPERSCRIPT) for mark, note in enumerate(distinct, start=1)}


def note_lines(marks: Mapping[str, str]) -> tuple[str, ...]:
    """The lines that say what the marks stand for."""
    return tuple(f"{mark} {note}" for note, mark in marks.items())


def number(value: float) -> str:
    """Three or four digits, or the magnitude from 10,000 on; a dash where there is none."""
    if math.isnan(value):
        return MISSING
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e4 else f"{value:.0e}"


def percent(value: float) -> str:
    """A number of percent as ``95 %``; a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:.0f} %"


def interval(ends: Interval, style: Callable[[float], str] = number) -> str:
    """Both ends, or a dash."""
    low, high = ends
    if math.isnan(low) or math.isnan(high):
        return MISSING
    return f"{style(low).removesuffix(' %')} to {style(high)}"
