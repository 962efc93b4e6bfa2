"""Tables of scores over lengths: one cell a length, with its interval where it is known, and n never unsaid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.statistics import Interval
from ropewalk.reporting.tables import MISSING, ResultTable, note_of, ran

MOST_CHARACTERS = 100
"""Width of a terminal that a table should fit."""
GAP = 2
ROUNDING = 1e-6


@dataclass(frozen=True)
class Cell:
    """A score, or a word in its place.

    Attributes:
        score: percent; NaN where there is none.
        ci95: percent.
        n: samples; None where n is not to be said with the other cells'.
        word: stands in place of a missing score.
        mark: of a note.
    """

    score: float = math.nan
    ci95: Interval = (math.nan, math.nan)
    n: int | None = None
    word: str = MISSING
    mark: str = ""

    def text(self, wide: bool) -> str:
        """``93.8 (88 to 97)``, or ``93.8 (88–97)`` if not wide. The interval is rounded outwards."""
        if math.isnan(self.score):
            return self.word + self.mark
        score = "100" if self.score >= 100 else f"{self.score:.1f}"
        if any(map(math.isnan, self.ci95)):
            return score + self.mark
        low = math.floor(self.ci95[0] + ROUNDING)
        high = math.ceil(self.ci95[1] - ROUNDING)
        return f"{score} ({low}{' to ' if wide else '–'}{high}){self.mark}"


def cell_of(result: TaskResult | None, marks: Mapping[str, str]) -> Cell:
    """A result as a cell."""
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
    """Cells in rows and columns; what is wider than a terminal goes on in a further table.

    Args:
        title: what is shown.
        corner: heading of the first column.
        rows: as many cells as columns, by the row's name.
        columns: headings.
        each: what n counts the samples of, such as ``task and length``.
        notes: lines below the title.
    """
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
    return tables


def _blocks(columns: int, count: int) -> list[range]:
    """``count`` runs of columns, as even as they can be."""
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
    """n is said once for all, or at the head of each column, or in a column of its own."""
    texts = {name: [cell.text(wide) for cell in cells] for name, cells in rows.items()}
    counts = {name: [cell.n for cell in cells if cell.n is not None] for name, cells in rows.items()}
    by_column = [{c.n for c in cells if c.n is not None} for cells in zip(*rows.values(), strict=True)]
    everywhere = set().union(*by_column)
    header = [corner, *columns]
    body = [(name, *cells) for name, cells in texts.items()]
    if len(everywhere) == 1:
        title += f"; {everywhere.pop():,} samples of each {each}"
    elif all(len(found) <= 1 for found in by_column):
        heads = zip(columns, by_column, strict=True)
        header = [corner, *(f"{name}, n {min(found):,}" if found else name for name, found in heads)]
    else:
        header.insert(1, "samples")
        body = [(name, _by_length(counts[name]), *cells) for name, cells in texts.items()]
    return ResultTable(title, tuple(header), tuple(body), notes=tuple(notes))


def _by_length(counts: Sequence[int]) -> str:
    """One number where all lengths have as many, else all of them in order."""
    return " / ".join(f"{n:,}" for n in (counts[:1] if len(set(counts)) == 1 else counts)) or MISSING
