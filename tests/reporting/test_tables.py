"""Tables show every bin and length, with samples and intervals, and never a number for what is missing."""

import io
import math

from rich.console import Console

from ropewalk.evaluation import TaskResult
from ropewalk.reporting import ResultTable, result_tables
from ropewalk.reporting.tables import interval, marks_of, number, percent
from tests.reporting.reporting_cases import AFTER, BEFORE, passkey, perplexity

SKIPPED = TaskResult.not_run("passkey", "passkey", 2048, "the model has no tokenizer")


def test_before_and_after_stand_side_by_side() -> None:
    tables = result_tables(
        {
            "before": [BEFORE, passkey(512, 19), SKIPPED],
            "after": [AFTER, passkey(512, 20), passkey(2048, 3, 30)],
        }
    )
    by_position, retrieval = tables
    assert (
        by_position.title == "Perplexity by position in 16 rows of 2,048 tokens, with 95 % interval over rows"
    )
    assert by_position.header == ("position", "tokens", "before", "95 %", "after", "95 %")
    assert by_position.rows[1] == ("512 to 1,023", "8,000", "2.79", "2.51 to 3.07", "2.50", "2.25 to 2.75")
    assert by_position.rows[-1][:3] == ("all", "32,000", f"{BEFORE.score:.2f}")
    assert retrieval.header == ("length in tokens", "samples", "before", "95 %", "after", "95 %")
    assert retrieval.rows == (
        ("512", "20", "95 %", "76 to 99 %", "100 %", "84 to 100 %"),
        ("2,048", "30", "not run¹", "–", "10 %", "3 to 26 %"),
    )
    assert retrieval.notes == ("¹ not run: the model has no tokenizer",)


def test_lengths_and_bins_that_one_model_lacks_leave_dashes() -> None:
    other = perplexity([3.0, 2.0], [0, 1024, 2048])
    (table,) = result_tables({"a": [BEFORE], "b": [other]})
    assert table.rows[0] == ("0 to 511", "8,000", "2.64", "2.38 to 2.90", "–", "–")
    assert table.rows[1] == ("0 to 1,023", "8,000", "–", "–", "3.00", "2.70 to 3.30")
    (table,) = result_tables({"a": [], "b": [passkey(512, 1, 10), passkey(256, 1, 20)]})
    assert [row[:4] for row in table.rows] == [("256", "20", "–", "–"), ("512", "10", "–", "–")]


def test_one_model_and_no_model() -> None:
    (table,) = result_tables({"some/model": [AFTER]})
    assert table.header == ("position", "tokens", "perplexity", "95 %")
    assert result_tables({}) == []
    not_run = TaskResult.not_run("perplexity", "perplexity", 64, "no text was given")
    (table,) = result_tables({"a": [not_run]})
    assert table.rows == (("all", "–", "not run¹", "–"),)
    assert table.notes == ("¹ not run: no text was given",)


def test_results_without_a_length_have_a_row_of_their_own() -> None:
    nowhere = TaskResult.not_run("passkey", "passkey", None, "no chat template")
    (table,) = result_tables({"a": [nowhere, passkey(512, 1, 10)]})
    assert [row[:3] for row in table.rows] == [("512", "10", "10 %"), ("all lengths", "–", "not run¹")]
    (table,) = result_tables({"a": [TaskResult.not_run("perplexity", "perplexity", None, "no text")]})
    assert table.title == "Perplexity by position, with 95 % interval over rows"


def test_other_perplexities_are_not_taken_for_those_by_position() -> None:
    sliding = TaskResult("perplexity", "sliding", 2048, 3, 99.0, (90.0, 110.0), unit="perplexity")
    (table,) = result_tables({"a": [sliding, AFTER, sliding]})
    assert table.rows[-1][2] == f"{AFTER.score:.2f}"
    assert result_tables({"a": [sliding]}) == []


def test_equal_notes_share_a_mark_and_empty_ones_have_none() -> None:
    marks = marks_of(["b", "", "a", "b", *map(str, range(10))])
    assert list(marks.items())[:2] == [("b", "¹"), ("a", "²")]
    assert (marks["8"], marks["9"]) == ("¹¹", "¹²")
    assert "" not in marks


def test_numbers_are_short_and_missing_ones_are_dashes() -> None:
    assert [number(v) for v in (2.345, 99.99, 150.4, 1234.6, 3.2e9, math.inf, math.nan)] == [
        "2.35",
        "99.99",
        "150",
        "1,235",
        "3e+09",
        "inf",
        "–",
    ]
    assert percent(95.4) == "95 %"
    assert interval((math.nan, math.nan)) == "–"
    assert interval((50.0, 100.0), percent) == "50 to 100 %"


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
    (table,) = result_tables({"before": [wide], "after": [wide]})
    console.print(table.rich())
    assert "524,288 to 1,048,575" in out.getvalue()
    assert "9e+04 to 1e+05" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
