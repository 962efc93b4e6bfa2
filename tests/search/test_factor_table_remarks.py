"""What a factor table says of the search that made it."""

import pytest

from ropewalk.search.factor_table import perplexity_text
from tests.search.factor_table_cases import searched


def test_factors_that_are_better_everywhere_need_no_caution():
    assert searched().cautions() == []


def test_held_out_rows_that_say_otherwise_are_told():
    (said,) = searched(held_out=9.0).cautions()
    assert "on held-out rows, NTK has perplexity 8.0000 and the factors found 9.0000" in said


@pytest.mark.parametrize("held_out", [7.5, 9.0])
def test_a_baseline_that_wins_on_the_search_rows_is_told_once(held_out):
    (said,) = searched(9.0, held_out).cautions()
    assert "on the search rows themselves, NTK is better" in said


def test_that_nothing_was_held_out_is_told():
    (said,) = searched(held_out=None).cautions()
    assert "no text was held out" in said


def test_the_baselines_shown_are_those_that_were_measured():
    table = searched()
    assert table.rule_factors()["PI"] == (4.0, 4.0)
    kept = {"pi": (8.0, 9.0), "ntk": (1.0, 9.0)}
    assert table.model_copy(update={"baseline_factors": kept}).rule_factors() == {
        "PI": kept["pi"],
        "NTK": kept["ntk"],
    }


@pytest.mark.parametrize(
    ("value", "text"), [(None, "∞"), (2.8164123, "2.8164"), (20.9, "20.900"), (3.2e7, "3.20e+07")]
)
def test_perplexities_have_five_digits(value, text):
    assert perplexity_text(value) == text
