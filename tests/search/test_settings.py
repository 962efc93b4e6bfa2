"""Settings of a search: start tokens as people write them, what cannot be searched, and where the log lies."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ropewalk.search import SearchConfig
from ropewalk.search.settings import ALGORITHMS, SearchSettings
from ropewalk.search.space import SMALLEST, START_TOKENS


@pytest.mark.parametrize(
    ("written", "meant"),
    [("0", (0,)), ("64", (64,)), (8, (8,)), ("search", START_TOKENS), ((0, 4), (0, 4))],
)
def test_start_tokens_are_one_choice_or_all_of_the_papers(written, meant):
    found = SearchSettings(start_tokens=written)
    assert found.start_tokens == meant
    assert SearchSettings(**found.model_dump(mode="json")) == found


@pytest.mark.parametrize("written", ["-1", "four", "", "1.5", "٣"])
def test_what_is_no_number_of_start_tokens_is_refused(written):
    with pytest.raises(
        ValidationError, match=r"must be a number of tokens \(0 or more\) or the word 'search'"
    ):
        SearchSettings(start_tokens=written)


def test_a_choice_of_start_tokens_leaves_something_to_scale_and_one_that_is_named_stays():
    every = SearchSettings(start_tokens="search")
    for length in (8, 64, 10**6):
        left = every.within(length).start_tokens
        assert left == tuple(each for each in START_TOKENS if each < length)
        assert left
    named = SearchSettings(start_tokens=64)
    assert named.within(8) is named


@pytest.mark.parametrize(
    "values",
    [
        {"budget": 0},
        {"documents": 0},
        {"batch": 0},
        {"held_out": -1},
        {"short_penalty": -0.1},
        {"largest": SMALLEST / 2},
        {"algorithm": "random"},
        {"objective": "passkey"},
        {"budgets": 5},
    ],
)
def test_what_cannot_be_searched_is_refused_by_its_name(values):
    with pytest.raises(ValidationError) as refused:
        SearchSettings(**values)
    assert {str(each["loc"][0]) for each in refused.value.errors()} == set(values)


def test_every_algorithm_may_be_asked_for():
    assert {SearchSettings(algorithm=name).algorithm for name in ALGORITHMS} == set(ALGORITHMS)


def test_the_log_lies_beside_the_table_and_without_one_there_is_none():
    assert SearchConfig(model="embedded", target_length="2k", out="a/factors.json").log == Path(
        "a/factors.jsonl"
    )
    assert SearchConfig(model="embedded", target_length="2k").log is None


def test_the_critical_space_takes_evolution_which_is_its_default():
    assert SearchSettings(space="critical-dimension").algorithm == "evolution"
    assert SearchSettings().algorithm == "cma-es"
    with pytest.raises(
        ValidationError, match="algorithm cma-es cannot search the space critical-dimension, because"
    ):
        SearchSettings(space="critical-dimension", algorithm="cma-es")


@pytest.mark.parametrize("written", ["4", "search"])
def test_the_critical_space_has_no_start_tokens(written):
    with pytest.raises(ValidationError, match="the space critical-dimension has no start tokens, got"):
        SearchSettings(space="critical-dimension", start_tokens=written)
