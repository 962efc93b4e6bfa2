"""The default algorithm: inside the space, from one seed, silent, and quick to a known optimum."""

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.search import START_TOKENS, Candidate, Measured, Space, Strategy, evolve, minimise
from ropewalk.search.algorithms import CovarianceSettings, _decoder, covariance
from tests.search.toy_objective import ToyEvaluator

SPACE = Space(4, 5.0)
OPTIMUM = Candidate((1.0, 1.5, 2.25, 3.0))
SEEDS = {"pi": Candidate((4.0,) * 4), "ntk": Candidate((1.0, 1.59, 2.52, 4.0))}


def run(evaluator=None, space=SPACE, seeds=SEEDS, algorithm=None, **options):
    strategy = Strategy(algorithm or covariance(), **{"budget": 400, "seed": 3, **options})
    return minimise(space, evaluator or ToyEvaluator(OPTIMUM), strategy, seeds)


def asks(space, seeds, objective, seed=0, most=200):
    """What the algorithm asks where nothing is raced, and what it was told."""
    asking = covariance()(space, seeds, np.random.default_rng(seed))
    found = []
    try:
        ask = next(asking)
        while len(found) < most:
            found.append(ask)
            ask = asking.send([Measured(each, objective(each), 1) for each in ask.candidates])
    except StopIteration:
        pass
    return found


def bumpy(candidate):
    """Without any shape, and sometimes infinite."""
    number = hash(candidate) % 1000
    return math.inf if number < 300 else number / 1000


@st.composite
def spaces(draw):
    pairs = draw(st.sampled_from([1, 2, 3, 4, 5, 16, 64]))
    largest = draw(st.one_of(st.just(1.0), st.floats(1.0, 1.1), st.floats(1.1, 200.0)))
    tokens = draw(st.sampled_from([(0,), (0, 1), (4, 64), START_TOKENS]))
    return Space(pairs, largest, tokens)


@settings(max_examples=15)
@given(spaces(), st.integers(0, 2**32))
def test_every_candidate_is_one_of_the_space_whatever_the_objective(space, seed):
    start = space.nearest(np.sort(np.random.default_rng(seed).uniform(1, 200, space.pairs)).tolist())
    for ask in asks(space, [start], bumpy, seed, most=12):
        assert all(space.contains(candidate) for candidate in ask.candidates)
        assert 1 <= ask.keep <= len(ask.candidates)


def test_one_seed_is_one_search_and_another_seed_another():
    assert run() == run()
    assert run().traces != run(seed=4).traces


def test_numpys_own_random_numbers_are_neither_read_nor_changed():
    np.random.seed(271828)
    before = np.random.get_state()
    first = run()
    after = np.random.get_state()
    assert before[0] == after[0]
    assert before[2:] == after[2:]
    assert (before[1] == after[1]).all()
    np.random.seed(2)
    assert run() == first


def test_nothing_is_printed_and_no_file_written(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run()
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("racing", [True, False])
def test_a_known_optimum_is_found(racing):
    result = run(racing=racing, budget=1500)
    pairs = zip(result.best.candidate.rescale_factors, OPTIMUM.rescale_factors, strict=True)
    # One step of the grid.
    assert all(abs(a - b) <= 0.01 + 1e-9 for a, b in pairs)


def test_start_tokens_are_found_too():
    space = Space(4, 5.0, START_TOKENS)
    optimum = Candidate(OPTIMUM.rescale_factors, 28)
    result = run(ToyEvaluator(optimum), space, budget=1500)
    assert result.best.candidate.start_tokens == 28


@pytest.mark.parametrize("pairs", [16, 64])
def test_what_evolution_finds_is_found_with_a_quarter_of_its_forwards(pairs):
    ratio = np.linspace(0, 1, pairs)
    space = Space(pairs, 10.0)
    optimum = space.nearest((1 + 6 * ratio**2).tolist())
    seeds = {"pi": space.nearest([8.0] * pairs), "ntk": space.nearest((8**ratio).tolist())}
    shared = {"space": space, "seeds": seeds, "budget": 500}
    for seed in range(2):
        goal = run(ToyEvaluator(optimum), algorithm=evolve(), seed=seed, **shared).best.objective
        reached = run(ToyEvaluator(optimum), seed=seed, **shared).forwards_to(goal)
        assert reached is not None
        assert reached <= 125


@pytest.mark.parametrize(
    "space",
    [
        Space(1, 1.0),
        Space(4, 1.004),
        Space(4, 1.02),
        Space(16, 1.01),
        Space(1, 1.0, (0, 1, 2)),
        Space(2, 1.1),
    ],
)
def test_a_small_space_ends_the_search_before_the_budget_does(space):
    seed = space.nearest([space.largest] * space.pairs)
    result = run(ToyEvaluator(space.nearest([1.05] * space.pairs)), space, {"one": seed}, budget=10**6)
    assert not result.spent
    assert result.candidates <= math.comb(space.levels + space.pairs - 1, space.pairs) * len(
        space.start_tokens
    )


def test_each_ask_has_something_new():
    known = set()
    for ask in asks(Space(2, 1.2), [Candidate((1.0, 1.0))], lambda each: sum(each.rescale_factors)):
        assert not known.issuperset(ask.candidates)
        known.update(ask.candidates)


def test_only_the_order_of_objectives_counts():
    def square(candidate):
        return sum((factor - 2) ** 2 for factor in candidate.rescale_factors)

    seeds = list(SEEDS.values())
    plain = asks(SPACE, seeds, square, most=30)
    assert plain == asks(SPACE, seeds, lambda each: math.exp(square(each) / 10) - 5, most=30)
    assert plain != asks(SPACE, seeds, lambda each: -square(each), most=30)


def test_it_begins_at_the_best_seed():
    worse, better = SEEDS["pi"], SEEDS["ntk"]
    first, second = asks(SPACE, [worse, better], lambda each: 0.0 if each == better else 1.0, most=2)
    assert first.candidates == (worse, better)
    logs = np.log([each.rescale_factors for each in second.candidates])
    # A standard deviation of 0.2: six of them.
    assert np.abs(logs - np.log(better.rescale_factors)).max() < 1.2


def test_objectives_that_are_mostly_infinite_do_not_stop_it():
    evaluator = ToyEvaluator(OPTIMUM)
    finite = evaluator.loss
    evaluator.loss = lambda job: math.inf if job.candidate.rescale_factors[1] > 1.7 else finite(job)
    seeds = {"only": Candidate((1.0, 1.0, 4.0, 4.0))}
    result = run(evaluator, seeds=seeds, budget=1500)
    assert result.best.objective < 1.01


def test_zeros_are_the_start_and_knots_are_joined_by_lines_in_log():
    space = Space(5, 100.0)
    start = space.nearest([1.0, 1.3, 2.0, 7.0, 8.0])
    decode = _decoder(space, start, 3)
    assert decode(np.zeros(3)) == start
    moved = decode(np.array([0.1, 0.3, 0.7]))
    # The knots lie at pairs 0, 2 and 4; the two others are half way between.
    by_hand = [a * math.exp(b) for a, b in zip(start.rescale_factors, [0.1, 0.2, 0.3, 0.5, 0.7], strict=True)]
    assert moved.rescale_factors == tuple(round(each, 2) for each in by_hand)


def test_a_fall_is_levelled_from_both_sides_and_the_ends_are_cut():
    decode = _decoder(Space(2, 5.0), Candidate((2.0, 2.0)), 2)
    assert decode(np.array([0.3, -0.3])).rescale_factors == (2.0, 2.0)
    assert decode(np.array([-9.0, 9.0])).rescale_factors == (1.0, 5.0)


def test_the_last_coordinate_walks_the_list_of_start_tokens():
    space = Space(2, 5.0, (0, 8, 64))
    decode = _decoder(space, Candidate((1.0, 2.0), 8), 2)
    assert [decode(np.array([0, 0, at])).start_tokens for at in (-1, -0.05, 0, 0.05, 1)] == [0, 0, 8, 64, 64]


def test_restarts_have_more_knots_down_to_one_a_pair():
    """An optimum that few knots cannot express is found all the same."""
    space = Space(6, 10.0)
    optimum = Candidate((1.0, 1.0, 4.0, 4.0, 9.0, 9.0))
    seeds = {"one": Candidate((1.0,) * 6)}
    few = covariance(CovarianceSettings(knots=2))
    result = run(ToyEvaluator(optimum), space, seeds, few, budget=3000)
    assert result.best.objective < 1.01
