"""What is shown of a search."""

from ropewalk.reporting.search import describe_factors, factors_figure, objectives_table
from ropewalk.reporting.tables import ResultTable
from tests.reporting.axes_cases import only
from tests.search.factor_table_cases import searched


def test_the_table_of_objectives():
    table = objectives_table(searched(objective="needle", short_penalty=0.5))
    assert table.title == (
        "Needle perplexity at 2,048 tokens, before training; on search sequences, plus 0.5 times the loss increase at "
        "the trained length"
    )
    assert table.header == (
        "RoPE",
        "1 search sequences and their beginnings",
        "1 held-out sequences, no penalty",
    )
    assert objectives_table(searched()).header == ("RoPE", "2 search sequences", "1 held-out sequences")
    assert table.rows[0] == ("factors found", "7.0000", "7.5000")
    assert table.rows[1] == ("PI", "∞", "∞")


def test_a_table_is_shown_with_what_it_reaches_and_its_cautions():
    table = searched(held_out=None)
    parts = list(describe_factors(table))
    assert "model         tiny" in parts
    factors, objectives = (part for part in parts if isinstance(part, ResultTable))
    assert factors.header == ("pair", "period", "found", "PI", "NTK", "YaRN")
    assert [row[2] for row in factors.rows] == ["1", "2"]
    assert objectives == objectives_table(table)
    said = [each for sentence in (*table.cautions(), *table.remarks()) for each in ("", sentence)]
    assert len(said) >= 2
    assert parts[-len(said) :] == said


def test_a_table_without_losses_is_drawn_without_a_search():
    assert only(factors_figure(searched()))
