"""Goals: what a candidate means for a checkpoint and a length, and the methods that it has to beat."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, Ntk, Yarn
from ropewalk.search import Candidate, goal_of, rescale_factors

DIM, THETA, TRAINED = 16, 10000.0, 512
PLAIN = Default(DIM, THETA)
SHORT = tuple(1 + i / 100 for i in range(8))
LONG = tuple(1.0 + i / 2 for i in range(8))
EXTENDED = LongRope(DIM, THETA, SHORT, LONG, 1.15, TRAINED, 4)
# transformers computes in float32: one rounding of the exponent (relative to ln b = 9.2) and a few of the value.
FLOAT32 = 9.2 * 2**-23


def theirs(rope_type, target, **parameters):
    """inv_freq and attention factor as transformers has them."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=target,
        rope_parameters={"rope_type": rope_type, "rope_theta": THETA, **parameters},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=target)
    return inv_freq.double(), attention_factor


def assert_same(method, expected):
    inv_freq, attention_factor = method.frequencies(2048)
    torch.testing.assert_close(inv_freq, expected[0], rtol=FLOAT32, atol=0)
    assert attention_factor == pytest.approx(expected[1], rel=1e-12)


def unscaled():
    return [THETA ** (-2 * i / DIM) for i in range(DIM // 2)]


def test_baselines_by_hand_formulas():
    goal = goal_of(PLAIN, TRAINED, 2048)
    named = goal.baselines()
    assert list(named) == ["pi", "ntk", "yarn"]
    assert rescale_factors(named["pi"]) == pytest.approx([4.0] * 8, rel=1e-12)
    # b' = b·s^(d/(d-2)), so pair i is divided by s^(2i/(d-2)).
    assert rescale_factors(named["ntk"]) == pytest.approx([4 ** (2 * i / 14) for i in range(8)], rel=1e-12)
    low, high = (DIM * math.log(TRAINED / (2 * math.pi * turns)) / (2 * math.log(THETA)) for turns in (32, 1))
    low, high = math.floor(low), math.ceil(high)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(8)]
    # Fast pairs are kept, slow ones divided by 4: swapped, the first factor would be 4.
    assert ramp[0] == 0
    assert ramp[-1] == 1
    assert rescale_factors(named["yarn"]) == pytest.approx(
        [1 / (1 - part + part / 4) for part in ramp], rel=1e-12
    )


def test_baselines_as_transformers_has_them():
    named = goal_of(PLAIN, TRAINED, 2048).baselines()
    assert_same(named["pi"], theirs("linear", 2048, factor=4.0))
    assert_same(named["yarn"], theirs("yarn", 2048, factor=4.0, original_max_position_embeddings=TRAINED))


def test_a_candidate_as_transformers_has_it():
    goal = goal_of(PLAIN, TRAINED, 2048)
    method = goal.method(Candidate(LONG))
    expected = theirs(
        "longrope",
        2048,
        short_factor=list(LONG),
        long_factor=list(LONG),
        factor=4.0,
        original_max_position_embeddings=TRAINED,
    )
    assert_same(method, expected)
    assert goal.attention_factor == math.sqrt(1 + math.log(4) / math.log(512))


def test_a_candidate_has_its_factors_at_every_length_and_its_start_tokens():
    method = goal_of(PLAIN, TRAINED, 2048).method(Candidate(LONG, 8))
    assert torch.equal(method.frequencies(100).inv_freq, method.frequencies(2048).inv_freq)
    assert (method.start_tokens, method.original_max_position_embeddings) == (8, TRAINED)


def test_the_space_of_a_goal():
    goal = goal_of(PLAIN, TRAINED, 2048)
    assert goal.scale == 4
    assert (goal.space().pairs, goal.space().largest, goal.space().start_tokens) == (8, 5.0, (0,))
    assert goal.space((0, 4), largest=3.0) == replace(goal.space(), largest=3.0, start_tokens=(0, 4))
    # A second search is relative to the unscaled frequencies: to 4096 from 2048 it is 8 times the original 512.
    assert goal_of(EXTENDED, 2048, 4096).space().largest == 10.0
    # Short factors: half of the largest long one, 4.5; at least the cap of a search that extends nothing.
    assert goal_of(EXTENDED, 2048, 512).space().largest == 2.25
    little = replace(EXTENDED, long_factor=(1.0,) * 8)
    assert goal_of(little, 2048, 512).space().largest == 1.25


@pytest.mark.parametrize("current", [PLAIN, EXTENDED], ids=["plain", "longrope"])
@pytest.mark.parametrize("target", [256, 512, 4096])
def test_seeds_are_candidates_of_the_space(current, target):
    if isinstance(current, Default) and target <= TRAINED:
        return
    goal = goal_of(current, TRAINED if isinstance(current, Default) else 2048, target)
    space = goal.space((0, 4))
    seeds = goal.seeds(space)
    assert list(seeds) == list(goal.baselines())
    for name, seed in seeds.items():
        assert space.contains(seed)
        assert seed.start_tokens == 0
        method = goal.baselines()[name]
        wanted = method.long_factor if isinstance(method, LongRope) else rescale_factors(method)
        capped = [min(factor, space.largest) for factor in wanted]
        # Half a step of the grid; what descends in the middle would be raised, and these do not.
        assert seed.rescale_factors == pytest.approx(capped, abs=0.005 + 1e-9)


def test_baselines_on_top_of_longrope_multiply_its_factors():
    goal = goal_of(EXTENDED, 2048, 4096)
    assert not goal.short
    named = goal.baselines()
    assert all(isinstance(method, LongRope) for method in named.values())
    assert {method.attention_factor for method in named.values()} == {
        math.sqrt(1 + math.log(8) / math.log(512))
    }
    assert {method.original_max_position_embeddings for method in named.values()} == {512}
    plain = goal_of(PLAIN, 2048, 4096).baselines()
    for name, method in named.items():
        # λ of the checkpoint times λ of the method for what is still to be extended, 2 times.
        expected = [a * b for a, b in zip(LONG, rescale_factors(plain[name]), strict=True)]
        assert method.long_factor == pytest.approx(expected, rel=1e-12)
        assert method.short_factor == method.long_factor
    assert named["pi"].long_factor == pytest.approx([2 * factor for factor in LONG], rel=1e-12)


def test_short_goals_have_the_original_and_the_long_factors_to_beat():
    goal = goal_of(EXTENDED, 2048, 512)
    assert goal.short
    assert goal.scale == 1
    assert goal.attention_factor == EXTENDED.attention_factor
    named = goal.baselines()
    assert {name: method.short_factor for name, method in named.items()} == {
        "original": (1.0,) * 8,
        "long": LONG,
    }
    assert goal_of(EXTENDED, 2048, 300, attention_factor=1.0).attention_factor == 1.0


def test_an_extended_checkpoint_keeps_the_other_lengths_factors():
    found = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)
    first = goal_of(PLAIN, TRAINED, 2048).extended(Candidate(found, 8))
    assert (first.short_factor, first.long_factor, first.start_tokens) == ((1.0,) * 8, found, 8)
    second = goal_of(EXTENDED, 2048, 4096).extended(Candidate(found, 2))
    assert (second.short_factor, second.long_factor, second.start_tokens) == (SHORT, found, 2)
    assert second.original_max_position_embeddings == 512
    short = goal_of(EXTENDED, 2048, 512).extended(Candidate(found))
    assert short == replace(EXTENDED, short_factor=found)


def test_start_tokens_of_short_factors_are_refused():
    with pytest.raises(RopewalkError, match="a search for short factors cannot have start tokens, got 4"):
        goal_of(EXTENDED, 2048, 512).extended(Candidate((1.0,) * 8, 4))


def test_ntk_is_plain_rope_with_another_base_and_dynamic_ntk_with_its_own():
    ntk = Ntk(DIM, THETA, 4.0)
    assert goal_of(ntk, 2048, 4096).current == ntk.as_default()
    dynamic = DynamicNtk(DIM, THETA, 4.0, TRAINED)
    assert goal_of(dynamic, TRAINED, 2048).current == PLAIN


@pytest.mark.parametrize(
    ("current", "target", "said"),
    [
        (Yarn(DIM, THETA, 4.0, TRAINED), 4096, "the checkpoint uses yarn scaling"),
        (Linear(DIM, THETA, 4.0), 4096, "the checkpoint uses linear scaling"),
        (Llama3(DIM, THETA, 8.0, 1.0, 4.0, TRAINED), 4096, "the checkpoint uses llama3 scaling"),
        (
            PLAIN,
            2048,
            "for 2048 tokens has nothing to extend, .* trained for 2048 tokens; give a target length above 2048 "
            "tokens$",
        ),
        (PLAIN, 512, "nothing to extend"),
        (EXTENDED, 2048, "either above 2048 tokens for long factors, or up to 512 tokens for short factors"),
        (EXTENDED, 513, "up to 512 tokens for short factors"),
        (EXTENDED, 0, "1 token or more, got 0"),
        (PLAIN, -5, "1 token or more, got -5"),
    ],
)
def test_goals_that_make_no_sense_are_refused(current, target, said):
    with pytest.raises(RopewalkError, match=said):
        goal_of(current, 2048, target)
