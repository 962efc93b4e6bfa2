"""LongRoPE2's space: a grid from the critical pair on, and before it factors that follow from its factor."""

import json
import math
from decimal import Decimal, localcontext
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.search import Candidate, Space, goal_of, rescale_factors
from ropewalk.search.factor_table import checkpoint
from ropewalk.search.goal import CRITICAL_DIMENSION
from ropewalk.search.imported_table import from_config
from ropewalk.search.space import factors_below
from tests.places import CONFIGS

LLAMA_3 = CONFIGS / "llama-3-8b.json"
RELEASED = CONFIGS / "longrope2" / "llama-3-8b.json"
"""Keys of microsoft/nnscaler's examples/longrope2/llama3_8b_longrope2_config.json."""


@st.composite
def critical_spaces(draw):
    """A space of LongRoPE2, for a ratio of lengths that may be no whole number."""
    pairs = draw(st.integers(2, 12))
    scale = draw(st.integers(1, 64) | st.floats(1.0, 64.0))
    first = draw(st.integers(1, pairs - 1))
    last = draw(st.integers(first, pairs - 1))
    return Space(pairs, 2 * scale, smallest=scale, critical_pairs=tuple(range(first, last + 1)))


def is_critical_member(space, candidate):
    """The space by its definition, in exact decimals and without the code under test."""
    pair = candidate.critical_pair
    factors = [Decimal(repr(factor)) for factor in candidate.rescale_factors]
    free = factors[pair:]
    with localcontext(prec=50):
        # λ_i = r^(i/c), in 50 digits; float64's power errs by one unit in the last place, its exponent by another that
        # grows with the logarithm of r, which is at most ln(128) = 4.9.
        derived = [free[0] ** (Decimal(i) / Decimal(pair)) for i in range(pair)]
        close = all(abs(a - b) <= 8 * Decimal(2) ** -53 * b for a, b in zip(factors, derived, strict=False))
    slack = Decimal("1e-8")
    return (
        len(factors) == space.pairs
        and pair in space.critical_pairs
        and all(factor % Decimal("0.01") == 0 for factor in free)
        and all(
            Decimal(space.smallest) - slack <= factor <= Decimal(space.largest) + slack for factor in free
        )
        and all(b >= a for a, b in pairwise(factors))
        and factors[0] == 1
        and close
        and candidate.start_tokens == 0
    )


@given(critical_spaces(), st.integers(0, 2**32 - 1))
def test_a_start_has_each_critical_pair_once_with_one_whole_factor(space, seed):
    start = space.start(np.random.default_rng(seed))
    assert tuple(each.critical_pair for each in start) == space.critical_pairs
    for each in start:
        assert is_critical_member(space, each)
        assert space.contains(each)
        # Algorithm 1: r, an integer of [s, 2s], for every pair from the critical one on.
        assert set(each.rescale_factors[each.critical_pair :]) == {each.rescale_factors[each.critical_pair]}
        assert each.rescale_factors[each.critical_pair].is_integer()


def test_every_whole_factor_from_s_to_2s_is_drawn():
    space = Space(4, 2 * 2.5, smallest=2.5, critical_pairs=(2,))
    random = np.random.default_rng(0)
    assert {space.start(random)[0].rescale_factors[2] for _ in range(200)} == {3, 4, 5}


@given(critical_spaces(), st.integers(0, 2**32 - 1))
def test_a_candidate_survives_json_and_its_levels(space, seed):
    for candidate in space.start(np.random.default_rng(seed)):
        again = Candidate(
            tuple(json.loads(json.dumps(candidate.rescale_factors))), 0, candidate.critical_pair
        )
        assert again == candidate
        levels = space.levels_of(candidate)
        assert space.of_levels(levels, critical_pair=candidate.critical_pair) == candidate


GOOD = (1.0, 5**0.5, 5.0, 5.0, 6.25)


@pytest.mark.parametrize(
    ("factors", "pair"),
    [
        # Another critical pair than the one that the factors follow.
        (GOOD, 1),
        # Not allowed.
        (GOOD, 0),
        ((*(6.25 ** (i / 4) for i in range(4)), 6.25), 4),
        # Rounded to the grid, as 1.0979 would become 1.10.
        ((1.0, 2.24, 5.0, 5.0, 6.25), 2),
        # Below s, above 2s, off the grid, descending.
        ((1.0, 3.99**0.5, 3.99, 5.0, 6.25), 2),
        ((1.0, 5**0.5, 5.0, 5.0, 8.01), 2),
        ((1.0, 5**0.5, 5.0, 5.005, 6.25), 2),
        ((1.0, 5**0.5, 5.0, 6.0, 5.5), 2),
    ],
)
def test_what_is_no_candidate(factors, pair):
    space = Space(5, 8.0, smallest=4.0, critical_pairs=(1, 2, 3))
    assert space.contains(Candidate(GOOD, 0, 2))
    assert not space.contains(Candidate(factors, 0, pair))


def test_a_largest_factor_below_every_whole_one_is_refused():
    with pytest.raises(RopewalkError, match=r"between 2.5 .* and the largest factor 2.9, .* to 3 or more"):
        Space(4, 2.9, smallest=2.5, critical_pairs=(2,))


@pytest.fixture(scope="module")
def released_table(tmp_path_factory):
    """The table, with the original length where transformers reads it for a Llama."""
    values = json.loads(RELEASED.read_text())
    values["rope_scaling"]["original_max_position_embeddings"] = values.pop(
        "original_max_position_embeddings"
    )
    path = tmp_path_factory.mktemp("released") / "config.json"
    path.write_text(json.dumps(values))
    return from_config(checkpoint(str(path))).factors


def test_the_released_config_states_its_original_length_where_no_llama_reads_it():
    with pytest.raises(RopewalkError, match="original_max_position_embeddings 8192 stands at the top level"):
        checkpoint(str(RELEASED))


def test_33_is_the_largest_critical_pair_that_the_released_table_of_llama_3_fits(released_table):
    table = released_table.long_factor
    assert [table[at] for at in (1, 33, 63)] == [1.097906416, 21.81, 26.05]

    def misfit(pair):
        derived = factors_below(table[pair], pair)
        return max(abs(a / b - 1) for a, b in zip(table[:pair], derived, strict=True))

    # The file has ten digits: half a unit of the last of 1.097906416 is 4.6e-10.
    assert misfit(33) < 4e-10
    assert all(misfit(pair) < 4.6e-10 for pair in (30, 31, 32))
    # The pair before it alone is 8 % too large: 21.87^(33/34) is 19.97, and the table has 21.81.
    assert table[33] / table[34] ** (33 / 34) - 1 > 0.08
    assert all(misfit(pair) > 0.08 for pair in range(34, 64))


def test_the_released_table_lies_in_the_space_of_its_goal(released_table):
    model = checkpoint(str(LLAMA_3))
    goal = goal_of(model.full_attention_rope, model.trained_length, 131072)
    space = goal.space(name=CRITICAL_DIMENSION)
    assert space == Space(64, 32.0, smallest=16.0, critical_pairs=tuple(range(24, 36)))
    table = released_table.long_factor
    levels = [space.level(factor) for factor in table]
    candidate = space.of_levels(levels, critical_pair=33)
    assert space.contains(candidate)
    assert candidate.rescale_factors[33:] == table[33:]
    assert candidate.rescale_factors == pytest.approx(table, rel=4e-10)
    assert goal.method(candidate).attention_factor == pytest.approx(
        math.sqrt(1 + math.log(16) / math.log(8192)), rel=1e-15
    )


def test_the_part_before_the_critical_pair_is_ntk_at_that_pair():
    from ropewalk.rope import Default, method_for_target

    candidate = Space(64, 32.0, smallest=16.0, critical_pairs=(30,)).of_levels([1500] * 64, critical_pair=30)
    ntk = method_for_target(
        "ntk", Default(128, 5e5), 8192, 131072, parameters={"critical_pair": 30, "factor": 16.0}
    )
    assert candidate.rescale_factors[:31] == pytest.approx(rescale_factors(_on(5e5, ntk))[:31], rel=1e-12)


def _on(rope_theta, method):
    """A method whose factors count from another base, as those of a larger base do."""
    from ropewalk.rope import LongRope, unscaled_inv_freq

    factors = unscaled_inv_freq(method.rotary_dim, rope_theta) / method.frequencies().inv_freq
    return LongRope(
        method.rotary_dim, rope_theta, tuple(factors.tolist()), tuple(factors.tolist()), 1.0, 8192
    )


@pytest.mark.parametrize(("target", "smallest"), [(2048, 4.0), (1280, 2.5)])
def test_seeds_are_a_start_that_depends_on_the_seed_alone(target, smallest):
    model = checkpoint(str(LLAMA_3))
    goal = goal_of(model.full_attention_rope, 512, target)
    space = goal.space(name=CRITICAL_DIMENSION)
    assert (space.smallest, space.largest) == (smallest, 2 * smallest)
    assert goal.space(largest=20.0, name=CRITICAL_DIMENSION).largest == 20.0
    seeds = goal.seeds(space, 3)
    assert list(seeds) == [f"critical pair {pair}" for pair in space.critical_pairs]
    assert all(map(space.contains, seeds.values()))
    assert goal.seeds(space, 3) == seeds != goal.seeds(space, 4)
    # PI, NTK and YaRN are measured beside the search, and are no candidates of it.
    assert list(goal.baselines()) == ["pi", "ntk", "yarn"]
    assert not any(
        space.contains(Candidate(factors, 0, pair))
        for factors in goal.baseline_factors().values()
        for pair in space.critical_pairs
    )
