"""Tables show every bin and length, with samples and intervals, and never a number for what is missing."""

import io
import math

from rich.console import Console

from ropewalk.reporting import ResultTable, evaluation_tables
from ropewalk.reporting.tables import interval, marks_of, number
from tests.reporting.reporting_cases import perplexity


def test_equal_notes_share_a_mark_and_empty_ones_have_none() -> None:
    marks = marks_of(["b", "", "a", "b", *map(str, range(10))])
    assert list(marks.items())[:2] == [("b", "¹"), ("a", "²")]
    assert (marks["8"], marks["9"]) == ("¹¹", "¹²")
    assert "" not in marks


def test_numbers_are_short_and_missing_ones_are_dashes() -> None:
    assert [number(v) for v in (2.345, 99.99, 150.4, 1234.6, 10_490, 3.2e9, math.inf, math.nan)] == [
        "2.35",
        "99.99",
        "150",
        "1,235",
        "10,490",
        "3e+09",
        "inf",
        "–",
    ]
    assert interval((math.nan, math.nan)) == "–"
    assert interval((50.0, 100.0), "{:.0f} %".format) == "50 to 100 %"


def test_terminal_shows_text_as_it_is_and_fits_80_columns() -> None:
    table = ResultTable(
        "rows of [bold]2,048[/bold]", ("[red]a", "b"), (("[link]x", "1"),), notes=("¹ [blue]why[/blue]",)
    )
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(table.rich())
    for text in ("rows of [bold]2,048[/bold]", "[red]a", "[link]x", "¹ [blue]why[/blue]"):
        assert text in out.getvalue()
    wide = perplexity([1234.5, 99_999.0], [0, 524_288, 1_048_576])
    (table,) = evaluation_tables({"before": [wide], "after": [wide]})
    console.print(table.rich())
    assert "524,288 to 1,048,575" in out.getvalue()
    assert "89,999 to 1e+05" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
