"""Evolution in LongRoPE2's space: the critical pair stays, only the pairs from it on change, the others follow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.search import Candidate, Space, Strategy, algorithm_named, crossover, evolve, minimise, mutate
from tests.search.test_space_critical import critical_spaces, is_critical_member
from tests.search.toy_objective import ToyEvaluator

SPACE = Space(6, 8.0, smallest=4.0, critical_pairs=(1, 2, 3, 4))


def at(pair, *free):
    """The candidate with these factors from its critical pair on."""
    return SPACE.of_levels([0] * pair + [SPACE.level(factor) for factor in free], critical_pair=pair)


@given(critical_spaces(), st.lists(st.booleans(), max_size=12), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_no_sequence_of_operators_leaves_the_space(space, mutations, probability, seed):
    random = np.random.default_rng(seed)
    pool = space.start(random)
    for is_mutation in mutations:
        first, second = (pool[int(place)] for place in random.integers(len(pool), size=2))
        made = (
            mutate(space, first, probability, random)
            if is_mutation
            else crossover(space, first, second, probability, random)
        )
        if made is not None:
            assert is_critical_member(space, made)
            assert space.contains(made)
            assert made.critical_pair == first.critical_pair
            pool.append(made)


def test_a_mutation_draws_from_the_critical_pair_on_with_its_probability():
    random = np.random.default_rng(0)
    parent = at(3, 5.0, 5.0, 6.0)
    found = [mutate(SPACE, parent, 0.3, random) for _ in range(4000)]
    assert {each.critical_pair for each in found} == {3}
    # The critical pair between s and its neighbour, the last pair between its neighbour and 2s.
    critical = {each.rescale_factors[3] for each in found if each.rescale_factors[4:] == (5.0, 6.0)}
    assert (min(critical), max(critical)) == (4.0, 5.0)
    last = {each.rescale_factors[5] for each in found if each.rescale_factors[3:5] == (5.0, 5.0)}
    # Of 301 values, some 840 draws have one of the ten lowest and one of the ten highest.
    assert 5.0 <= min(last) < 5.1
    assert 7.9 < max(last) <= 8.0
    # Down to s also where the pair before it, which follows, has more: 8^(3/4) is 4.76.
    high = at(4, 8.0, 8.0)
    assert min(mutate(SPACE, high, 0.3, random).rescale_factors[4] for _ in range(4000)) < 4.05
    # A redrawn factor keeps its value with a probability of 1/101; 0.036 is five standard deviations of 4000 draws.
    moved = np.mean([each.rescale_factors[3] != 5.0 for each in found])
    assert abs(moved - 0.3 * 100 / 101) < 0.036
    # The lower part follows the new factor of the critical pair.
    for each in found:
        assert each.rescale_factors[:3] == tuple(each.rescale_factors[3] ** (i / 3) for i in range(3))


def test_parents_with_one_critical_pair_exchange_all_free_factors():
    first, second = at(3, 4.0, 5.0, 6.0), at(3, 4.5, 5.5, 6.5)
    random = np.random.default_rng(0)
    assert crossover(SPACE, first, second, 1.0, random) == second
    assert crossover(SPACE, first, second, 0.0, random) == first


def test_parents_with_different_critical_pairs_exchange_what_is_free_in_both():
    low, high = at(2, 4.0, 4.5, 5.0, 5.5), at(4, 6.0, 7.0)
    random = np.random.default_rng(0)
    # Pairs 4 and 5 are free in both. The child has the critical pair of its first parent.
    assert crossover(SPACE, low, high, 1.0, random) == at(2, 4.0, 4.5, 6.0, 7.0)
    assert crossover(SPACE, high, low, 1.0, random) == at(4, 5.0, 5.5)
    # Pair 3 of the first has 7, and pair 4 of the second less.
    assert crossover(SPACE, at(2, 7.0, 7.0, 7.0, 7.0), high, 1.0, random) is None


@pytest.mark.parametrize("racing", [True, False])
def test_evolution_finds_a_known_optimum_and_its_critical_pair(racing):
    optimum = at(2, 4.6, 5.2, 5.2, 7.1)
    start = SPACE.start(np.random.default_rng(1))
    seeds = {str(each.critical_pair): each for each in start}
    strategy = Strategy(algorithm_named("evolution"), 2500, 0, racing)
    result = minimise(SPACE, ToyEvaluator(optimum), strategy, seeds)
    # The objective is 1 + the mean squared distance: 0.02 is a root mean square of 0.14 in factors that range over 4.
    assert result.best.objective - 1 < 0.02
    assert result.best.candidate.critical_pair == 2
    assert all(SPACE.contains(trace.measured.candidate) for trace in result.traces)


def test_the_first_generation_begins_with_the_start_and_is_filled_by_mutation():
    start = SPACE.start(np.random.default_rng(1))
    first = next(evolve()(SPACE, start, np.random.default_rng(0)))
    assert list(first.candidates[:4]) == start
    assert (len(first.candidates), len(set(first.candidates)), first.keep) == (64, 64, 32)
    assert {each.critical_pair for each in first.candidates} == {1, 2, 3, 4}


def test_equal_factors_with_other_critical_pairs_are_two_candidates():
    factors = (1.0, 1.0, 1.0)
    assert Candidate(factors, 0, 1) != Candidate(factors, 0, 2)
