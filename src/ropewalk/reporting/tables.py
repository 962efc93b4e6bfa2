"""Results as text in rows and columns, for the terminal and the page alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeGuard

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ropewalk.evaluation.results import PositionBin, TaskResult
from ropewalk.evaluation.statistics import Interval

Series = Mapping[str, Sequence[TaskResult]]
"""Results by the name of the model that gave them, as ``{"before": …, "after": …}``."""

MISSING = "–"


@dataclass(frozen=True)
class ResultTable:
    """A table as plain text.

    Attributes:
        title: what it shows, units included.
        header: a heading a column.
        rows: as many cells as the header has.
        text_columns: leading columns that hold text; the others hold numbers and are flushed right.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1

    def rich(self) -> Group:
        """The table for the terminal, below its title."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, heading in enumerate(self.header):
            table.add_column(
                escape(heading), justify="left" if number < self.text_columns else "right", no_wrap=True
            )
        for row in self.rows:
            table.add_row(*map(escape, row))
        # Not the table's own title, which would be folded at the table's width.
        return Group(Text(self.title, style="bold"), table)


def result_tables(series: Series) -> list[ResultTable]:
    """The tables that show these results: perplexity by position for each length, then passkey.

    Args:
        series: results by model name; the first one's lengths come first. A result that another model lacks
            leaves its cells empty.

    Returns:
        No table for a suite that nobody ran.
    """
    names = list(series)
    by_name = {name: {(r.suite, r.length): r for r in series[name]} for name in names}
    tables = []
    for length in _lengths(series, "perplexity"):
        tables.append(
            _perplexity_table(names, length, [by_name[n].get(("perplexity", length)) for n in names])
        )
    lengths = _lengths(series, "passkey")
    if lengths:
        results = {length: [by_name[n].get(("passkey", length)) for n in names] for length in lengths}
        rows = []
        for length, columns in results.items():
            scores = [_score_cells(result, percent) for result in columns]
            rows.append((f"{length:,}", _counts([r.n for r in columns if _ran(r)]), *chain(*scores)))
        title = "Passkey retrieval: right answers with 95 % interval"
        header = ("length in tokens", "samples", *_headings(names, "right"))
        tables.append(ResultTable(title + _remarks(chain(*results.values())), header, tuple(rows)))
    return tables


def _perplexity_table(names: list[str], length: int, columns: list[TaskResult | None]) -> ResultTable:
    edges = sorted({(p.start, p.end) for result in columns if result for p in result.positions})
    rows: list[tuple[str, ...]] = []
    for edge in edges:
        found = [_bin_at(result, edge) for result in columns]
        scores = [(number(p.perplexity), interval(p.ci95)) if p else (MISSING, MISSING) for p in found]
        counts = _counts([p.n_tokens for p in found if p])
        rows.append((f"{edge[0]:,} to {edge[1] - 1:,}", counts, *chain(*scores)))
    ran = [result for result in columns if _ran(result)]
    counts = _counts([result.details["n_tokens"] for result in ran if "n_tokens" in result.details])
    rows.append(("all", counts, *chain(*(_score_cells(result, number) for result in columns))))
    windows = f" in {_counts([result.n for result in ran])} rows" if ran else ""
    return ResultTable(
        f"Perplexity by position{windows} of {length:,} tokens, with 95 % interval over rows"
        + _remarks(columns),
        ("position", "tokens", *_headings(names, "perplexity")),
        tuple(rows),
    )


def _bin_at(result: TaskResult | None, edge: tuple[int, int]) -> PositionBin | None:
    positions = result.positions if result else ()
    return next((p for p in positions if (p.start, p.end) == edge), None)


def _ran(result: TaskResult | None) -> TypeGuard[TaskResult]:
    return result is not None and result.status == "ok"


def _lengths(series: Series, suite: str) -> list[int]:
    return sorted(
        {result.length for results in series.values() for result in results if result.suite == suite}
    )


def _headings(names: list[str], score: str) -> list[str]:
    """One model's column says what it holds; of several, whose it is, as the title says the rest."""
    return list(chain(*((score if len(names) == 1 else name, "95 %") for name in names)))


def _score_cells(result: TaskResult | None, style: Callable[[float], str]) -> tuple[str, str]:
    if result is None:
        return MISSING, MISSING
    if not _ran(result):
        return result.status, MISSING
    return style(result.score), interval(result.ci95, style)


def _counts(counts: Iterable[int]) -> str:
    """One count where all models agree."""
    return " / ".join(f"{count:,}" for count in dict.fromkeys(counts)) or MISSING


def _remarks(results: Iterable[TaskResult | None]) -> str:
    told = [f"not run: {r.reason}" if not _ran(r) else r.reason for r in results if r and r.reason]
    return "".join(f"; {remark}" for remark in dict.fromkeys(told))


def number(value: float) -> str:
    """Three or four digits, or the magnitude from 10,000 on; a dash where there is none."""
    if math.isnan(value):
        return MISSING
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e4 else f"{value:.0e}"


def percent(value: float) -> str:
    """As ``95 %``; a dash where there is none."""
    return MISSING if math.isnan(value) else f"{100 * value:.0f} %"


def interval(ends: Interval, style: Callable[[float], str] = number) -> str:
    """Both ends, or a dash."""
    low, high = ends
    if math.isnan(low) or math.isnan(high):
        return MISSING
    return f"{style(low).removesuffix(' %')} to {style(high)}"
