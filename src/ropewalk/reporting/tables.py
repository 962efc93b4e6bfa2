"""Tables of results as plain text, shown in the terminal and on report pages."""

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
        title: what the table shows, with units.
        header: one heading per column.
        rows: cells, as many per row as the header has.
        text_columns: number of leading text columns, which are left-aligned; number columns are right-aligned.
        bars: whether the last column holds bars, which are left-aligned.
        notes: lines between title and table, such as the meaning of marks in cells.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    notes: tuple[str, ...] = ()
    bars: bool = False

    def is_text(self, column: int) -> bool:
        """Whether a column is left-aligned."""
        return column < self.text_columns or (self.bars and column == len(self.header) - 1)

    def rich(self) -> Group:
        """Render title, notes and table for the terminal."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column, heading in enumerate(self.header):
            table.add_column(
                _text(heading), justify="left" if self.is_text(column) else "right", no_wrap=True
            )
        for row in self.rows:
            table.add_row(*map(_text, row))
        # rich would fold the table's own title at the table's width.
        return Group(_text(self.title, "bold"), *(_text(note, "dim") for note in self.notes), table)


Part = ResultTable | RenderableType
"""A part of a result in the terminal. Text is one line of any length, and a ResultTable is never truncated; other
renderables are folded at the terminal's width."""


def _text(text: str, style: str = "") -> Text:
    """Convert untrusted text to one line for the terminal, without interpreting markup."""
    # The limit is the text's own length, and at least the 2 that `shown` demands, so nothing is cut.
    return Text(shown(text, max(2, len(text))), style)


def marks_of(notes: Iterable[str]) -> dict[str, str]:
    """Assign a superscript to each distinct note, in order. Empty notes get none."""
    distinct = dict.fromkeys(note for note in notes if note)
    return {note: str(mark).translate(_SUPERSCRIPT) for mark, note in enumerate(distinct, start=1)}


def note_lines(marks: Mapping[str, str]) -> tuple[str, ...]:
    """One line per note, preceded by its mark."""
    return tuple(f"{mark} {note}" for note, mark in marks.items())


def number(value: float) -> str:
    """Format a number with three or four digits, or as a power of ten from 100,000. NaN is a dash."""
    if math.isnan(value):
        return MISSING
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e5 else f"{value:.0e}"


def interval(ends: Interval, style: Callable[[float], str] = number) -> str:
    """Format an interval as ``low to high``, or a dash if an end is NaN."""
    low, high = ends
    if math.isnan(low) or math.isnan(high):
        return MISSING
    # The unit is written once, after the upper end.
    return f"{style(low).removesuffix(' %')} to {style(high)}"


def one_decimal(value: float) -> str:
    """Format as ``93.8``. NaN is a dash."""
    return MISSING if math.isnan(value) else f"{value:.1f}"


def signed(value: float) -> str:
    """Format as ``+3.2``. NaN is a dash."""
    return MISSING if math.isnan(value) else f"{value:+.1f}"


def counts_text(counts: Iterable[int]) -> str:
    """Format sample counts: one number if all models agree, otherwise all distinct numbers."""
    return " / ".join(f"{count:,}" for count in dict.fromkeys(counts)) or MISSING


def counted(counts: Iterable[int], thing: str) -> str:
    """Format sample counts with their noun: ``1 sample``, ``2,000 samples``, ``20 / 40 samples``."""
    text = counts_text(counts)
    return f"{text} {thing}{'' if text == '1' else 's'}"
