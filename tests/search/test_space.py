"""The space: a grid of exact two-decimal doubles, non-decreasing, that nothing put into it can leave."""

import json
import math
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.search import START_TOKENS, Candidate, Space

spaces = st.builds(
    Space,
    pairs=st.integers(1, 12),
    largest=st.floats(1.0, 80.0),
    start_tokens=st.sampled_from([(0,), START_TOKENS, (4, 8), (0, 256)]),
)


@st.composite
def placed(draw):
    """A space and any factors for it."""
    space = draw(spaces)
    factors = st.floats(-5.0, 200.0, allow_nan=False)
    return space, draw(st.lists(factors, min_size=space.pairs, max_size=space.pairs))


def is_member(space, candidate):
    """The space by its definition, in exact decimals and without the code under test."""
    factors = [Decimal(repr(factor)) for factor in candidate.rescale_factors]
    # A cap that rounding took a little below the grid means the grid point.
    cap = Fraction(repr(space.largest)) + Fraction(1, 10**8)
    return (
        len(factors) == space.pairs
        and all(factor % Decimal("0.01") == 0 and 1 <= factor <= cap for factor in factors)
        and all(b >= a for a, b in pairwise(factors))
        and candidate.start_tokens in space.start_tokens
    )


def test_the_papers_start_tokens_and_sizes():
    assert START_TOKENS == (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
    # 1.25 · s in steps of 0.01 from 1.0: s = 4 has 1.00 … 5.00.
    assert Space(4, 1.25 * 4).levels == 401
    assert Space(4, 1.25 * 2).levels == 151
    assert Space(4, 1.0).levels == 1


@given(st.integers(101, 100_000))
def test_the_cap_is_on_the_grid_whatever_its_rounding(hundredths):
    # 1.25 · s can come out a unit in the last place below the grid point that it stands for.
    for largest in (hundredths / 100, math.nextafter(hundredths / 100, 0)):
        space = Space(1, largest)
        assert space.levels == hundredths - 100 + 1
        assert space.value(space.levels - 1) == hundredths / 100


@given(spaces)
def test_every_level_is_the_double_of_its_two_decimals_and_comes_back(space):
    for level in range(0, space.levels, 7):
        value = space.value(level)
        assert value == float(Decimal(100 + level) / 100)
        assert space.level(value) == level
        assert json.loads(json.dumps(value)) == value
        assert len(repr(value).partition(".")[2]) <= 2


@given(placed())
def test_the_nearest_candidate_is_in_the_space_and_survives_json(drawn):
    space, factors = drawn
    candidate = space.nearest(factors, 7)
    assert is_member(space, candidate)
    assert space.contains(candidate)
    text = json.dumps([candidate.rescale_factors, candidate.start_tokens])
    again, tokens = json.loads(text)
    assert Candidate(tuple(again), tokens) == candidate
    assert space.of_levels(space.levels_of(candidate), candidate.start_tokens) == candidate
    assert space.nearest(candidate.rescale_factors, candidate.start_tokens) == candidate


@given(placed())
def test_factors_that_ascend_within_the_bounds_move_by_half_a_step_at_most(drawn):
    space, factors = drawn
    cap = space.value(space.levels - 1)
    factors = sorted(min(max(factor, 1.0), cap) for factor in factors)
    found = space.nearest(factors).rescale_factors
    # 200 has doubles 3e-14 apart, and a difference of two of them errs by as much.
    assert all(abs(a - b) <= 0.005 + 1e-13 for a, b in zip(factors, found, strict=True))


def test_a_factor_below_the_one_before_it_is_raised_to_it():
    assert Space(4, 5.0).nearest([1.0, 3.004, 2.0, 9.0]).rescale_factors == (1.0, 3.0, 3.0, 5.0)


def test_the_nearest_start_tokens_are_the_smaller_of_two():
    space = Space(1, 2.0, START_TOKENS)
    found = [space.nearest([1.0], tokens).start_tokens for tokens in (0, 3, 6, 10, 48, 96, 97, 1000)]
    assert found == [0, 2, 4, 8, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("factors", "tokens"),
    [
        ((1.0, 1.5), 0),
        ((1.0, 1.5, 1.4), 0),
        ((1.0, 1.5, 2.51), 0),
        ((0.99, 1.5, 2.5), 0),
        ((1.0, 1.505, 2.5), 0),
        ((1.0, 1.5, math.nextafter(2.0, 3)), 0),
        ((1.0, 1.5, math.nan), 0),
        ((1.0, 1.5, math.inf), 0),
        ((1.0, 1.5, 2.5), 3),
    ],
)
def test_what_is_no_candidate_of_a_space(factors, tokens):
    space = Space(3, 2.5, START_TOKENS)
    assert space.contains(Candidate((1.0, 1.5, 2.5), 4))
    assert not space.contains(Candidate(factors, tokens))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 2.0), "at least one rotary pair, got 0"),
        ((4, 0.99), "must be a finite number, 1 or more, got 0.99"),
        ((4, math.nan), "must be a finite number, 1 or more, got nan"),
        ((4, math.inf), "must be a finite number, 1 or more, got inf"),
        ((4, 2.0, ()), r"in ascending order, each 0 or more, got \[\]"),
        ((4, 2.0, (4, 0)), r"in ascending order, each 0 or more, got \[4, 0\]"),
        ((4, 2.0, (0, 0)), r"in ascending order, each 0 or more, got \[0, 0\]"),
        ((4, 2.0, (-1, 0)), r"in ascending order, each 0 or more, got \[-1, 0\]"),
    ],
)
def test_a_space_that_would_be_empty_is_refused(arguments, said):
    with pytest.raises(RopewalkError, match=said):
        Space(*arguments)


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(RopewalkError, match="needs 3 rescale factors, one per rotary pair, got 2"):
        Space(3, 2.0).nearest([1.0, 1.0])
    with pytest.raises(RopewalkError, match=r"must be finite numbers, got \[1.0, nan\]"):
        Space(2, 2.0).nearest([1.0, math.nan])
