"""Results as text in rows and columns, for the terminal and the page alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ropewalk.evaluation.statistics import Interval
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MISSING

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


Part = ResultTable | RenderableType
"""Of what a terminal shows of a result: a text is one line, however long; a table is never cut off; what else rich
renders is folded at the terminal's width."""


def _text(text: str, style: str = "") -> Text:
    """One line for the terminal, no markup, whoever wrote it."""
    return Text(shown(text, max(2, len(text))), style)


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


def one_decimal(value: float) -> str:
    """As ``93.8``; a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:.1f}"


def signed(value: float) -> str:
    """As ``+3.2``; a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:+.1f}"


def counts_text(counts: Iterable[int]) -> str:
    """One count where all models agree."""
    return " / ".join(f"{count:,}" for count in dict.fromkeys(counts)) or MISSING
