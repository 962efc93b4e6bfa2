"""The feasible bases: every interval against the definition, inside and just outside."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.rope.theory import FeasibleBases, bases, feasible_bases, safe_base, smallest_base
from ropewalk.rope.theory.bases import DIGITS, RESOLUTION
from tests.rope.theory.theory_cases import reaches

# Ends are rounded inward to nine digits: by less than 1e-8 of their value.
OUTSIDE = 2 * 10.0 ** (1 - DIGITS)


def in_some(found: FeasibleBases, base: float) -> bool:
    return any(low <= base <= high for low, high in found.feasible)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 3000),
    st.sampled_from([2, 4, 6, 8, 32, 64, 80, 96, 128, 256]),
    st.floats(1.5, 1e9),
    st.randoms(use_true_random=False),
)
def test_intervals_are_feasible_inside_and_infeasible_just_outside(
    length: int, rotary_dim: int, ceiling: float, random
) -> None:
    found = feasible_bases(length, rotary_dim, ceiling)
    for low, high in found.feasible:
        for base in (low, high, *(math.exp(random.uniform(math.log(low), math.log(high))) for _ in range(3))):
            assert reaches(base, rotary_dim, length), base
    ends = [(None, 1.0), *found.feasible, (ceiling, None)]
    assert all(low < high for low, high in found.feasible)
    for (_, high), (low, _) in pairwise(ends):
        # A hole may be narrower than the step outside, and then its middle is outside both.
        step = min(OUTSIDE, (low / high - 1) / 2)
        if high not in (1.0, ceiling) and step:
            assert not reaches(high * (1 + step), rotary_dim, length), high
        if low not in (1.0, ceiling) and step:
            assert not reaches(low * (1 - step), rotary_dim, length), low


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(1, 4500), st.sampled_from([2, 8, 32, 64, 80, 128, 256]))
def test_the_smallest_base_is_the_infimum_of_the_map(length: int, rotary_dim: int) -> None:
    ceiling = 1e7
    assert (
        smallest_base(length, rotary_dim, ceiling=ceiling)
        == feasible_bases(length, rotary_dim, ceiling).infimum
    )


@pytest.mark.parametrize("step", [0.001, 0.02, 0.3])
def test_where_a_search_for_the_smallest_base_pauses_changes_nothing(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interval that the end of a step cuts is found all the same, and nothing between two steps is left out."""
    monkeypatch.setattr(bases, "_FIRST_STEP", step)
    monkeypatch.setattr(bases, "_LARGEST_STEP", step)
    assert smallest_base(1000, 128, at_least=4100.0) == feasible_bases(1000, 128, 1e6).infimum


@pytest.mark.parametrize(("length", "rotary_dim"), [(500, 128), (1000, 64), (2000, 128)])
def test_a_dense_scan_finds_nothing_else(length: int, rotary_dim: int) -> None:
    found = feasible_bases(length, rotary_dim, 1e6)
    for base in np.geomspace(2, 1e6, 700):
        near_an_end = any(abs(base / end - 1) < 2 * RESOLUTION for ends in found.feasible for end in ends)
        if not near_an_end:
            assert reaches(base, rotary_dim, length) == in_some(found, base), base


@pytest.mark.parametrize(
    ("length", "infimum"), [(1000, 4.21e3), (2000, 1.16e4), (4000, 2.71e4), (8000, 8.37e4), (32000, 6.3e5)]
)
def test_infimum_agrees_with_a_scan_in_steps_of_0_6_percent(length: int, infimum: float) -> None:
    # The scan's first feasible base lies up to one step above the infimum, and is printed with three digits.
    found = feasible_bases(length, 128, 1e6).infimum
    assert found is not None
    assert found * 0.998 <= infimum <= found * 1.011


@pytest.mark.slow
@pytest.mark.parametrize("rotary_dim", [64, 128])
@pytest.mark.parametrize("length", [7, 300, 4096])
def test_safe_base_alone_is_that_of_the_whole_map(length: int, rotary_dim: int) -> None:
    # Ends are resolved to 1e-12; nine digits may then differ in the last.
    whole = feasible_bases(length, rotary_dim, 1e9).safe_base
    assert safe_base(length, rotary_dim, 1e9) == pytest.approx(whole, rel=10.0 ** (1 - DIGITS))
    assert safe_base(length, rotary_dim) == pytest.approx(whole, rel=10.0 ** (1 - DIGITS))


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=20)
def test_a_longer_context_takes_bases_away_and_adds_none(first: int, second: int) -> None:
    short, long = sorted((first, second))
    few, many = feasible_bases(long, 32, 1e5), feasible_bases(short, 32, 1e5)
    for low, high in few.feasible:
        assert in_some(many, math.sqrt(low * high))


def test_where_nothing_reaches_there_is_no_infimum_and_no_safe_base() -> None:
    found = feasible_bases(100_000, 128, 1000.0)
    assert (found.infimum, found.feasible, found.safe_base) == (None, (), None)
    assert safe_base(100_000, 128, 1000.0) is None


def test_one_token_is_reached_by_every_base() -> None:
    assert feasible_bases(1, 128, 1e6).feasible == ((1.0, 1e6),)
    assert safe_base(1, 128) == 1.0


def test_a_ceiling_inside_a_hole_has_no_safe_base() -> None:
    whole = feasible_bases(1000, 128, 1e6)
    (_, high), (low, _) = whole.feasible[-2:]
    cut = feasible_bases(1000, 128, math.sqrt(high * low))
    assert cut.safe_base is None
    assert cut.infimum == pytest.approx(whole.infimum, rel=10.0 ** (1 - DIGITS))


def test_the_test_notices_a_search_that_skips_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: looking at cell ends alone, without the bound between them, merges intervals."""
    exact = feasible_bases(2000, 128, 1e6)

    def nothing(*arguments):
        return np.empty((0, 2))

    monkeypatch.setattr(bases, "_negative", nothing)
    wrong = feasible_bases(2000, 128, 1e6)
    assert wrong.feasible != exact.feasible
    # The last interval of the exact map is one with its neighbour now, over a hole that is there.
    middle = math.sqrt(exact.feasible[-2][1] * exact.feasible[-1][0])
    assert not reaches(middle, 128, 2000)
    assert in_some(wrong, middle) or wrong.infimum != exact.infimum


def test_errors_of_the_screen_within_their_bound_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen may err either way in every value: the allowance for it keeps the map exact."""
    exact = feasible_bases(1500, 64, 1e7)
    rng, large = np.random.default_rng(0), 0.3
    screened = bases.screen

    def noisy(*arguments):
        values = screened(*arguments)
        return values + rng.choice([-large, large], values.shape)

    monkeypatch.setattr(bases, "screen", noisy)
    monkeypatch.setattr(bases, "screen_error", lambda pairs: large * 1.001)
    found = feasible_bases(1500, 64, 1e7)
    assert len(found.feasible) == len(exact.feasible)
    np.testing.assert_allclose(found.feasible, exact.feasible, rtol=10.0 ** (1 - DIGITS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((100, 2050), "at most 2048 rotated dimensions, got 2050"),
        ((0, 128), "length must be at least 1 token, got 0"),
        ((100, 127), "rotary_dim must be an even whole number, at least 2, got 127"),
        ((100, 128, 1.0), "the ceiling must be above 1 and at most 1e\\+15, got 1.0"),
        ((100, 128, float("nan")), "the ceiling must be above 1"),
        ((100, 128, 1e16), "the ceiling must be above 1 and at most"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple, said: str) -> None:
    for function in (feasible_bases, safe_base):
        with pytest.raises(RopewalkError, match=said):
            function(*arguments)


def test_progress_goes_from_nothing_to_all() -> None:
    seen: list[tuple[int, int]] = []
    feasible_bases(1000, 128, 1e6, lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 1000)
    assert seen[-1] == (1000, 1000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
