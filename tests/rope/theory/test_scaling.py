"""Critical dimension and theta scaling against the published numbers and their own definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.rope import critical_dimension, scaled_theta, unscaled_inv_freq
from ropewalk.rope.theory import critical_pairs


@pytest.mark.parametrize(
    ("rope_theta", "trained_length", "expected"),
    [(5e5, 8192, 70), (1e4, 4096, 92)],
    ids=["Llama 3", "Llama 2"],
)
def test_critical_dimension_of_published_models(
    rope_theta: float, trained_length: int, expected: int
) -> None:
    assert critical_dimension(128, rope_theta, trained_length) == expected


def test_scaled_theta_is_the_base_that_gradient_published() -> None:
    # The published value is written with one decimal.
    assert round(scaled_theta(500000.0, 8192, 262144), 1) == 283461213.5


@given(st.integers(1, 128), st.floats(100, 1e9), st.integers(7, 2**20))
def test_critical_dimension_counts_the_pairs_that_complete_a_period(
    pairs: int, rope_theta: float, trained_length: int
) -> None:
    turns = trained_length * unscaled_inv_freq(2 * pairs, rope_theta) / (2 * math.pi)
    # A pair that turns once to within rounding may count either way.
    assume(bool(((turns - 1).abs() > 1e-9).all()))
    assert critical_dimension(2 * pairs, rope_theta, trained_length) == 2 * int((turns > 1).sum())


@given(st.floats(100, 1e7), st.integers(512, 65536), st.integers(1, 64))
def test_scaled_theta_keeps_the_turns_that_bound_the_critical_dimension(
    rope_theta: float, trained_length: int, stretch: int
) -> None:
    target_length = trained_length * stretch
    new = scaled_theta(rope_theta, trained_length, target_length)
    before = math.log(trained_length / (2 * math.pi)) / math.log(rope_theta)
    after = math.log(target_length / (2 * math.pi)) / math.log(new)
    assert after == pytest.approx(before, rel=1e-14)
    assert new >= rope_theta * (1 - 1e-14)


def test_scaled_theta_of_the_same_length_is_the_same() -> None:
    assert scaled_theta(10000.0, 4096, 4096) == 10000.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((127, 1e4, 4096), "rotary_dim must be an even whole number, at least 2, got 127"),
        ((128, 1.0, 4096), "rope_theta must be a finite number above 1, got 1.0"),
        ((128, 1e4, 6), "trained_length must be at least 7 tokens, got 6"),
    ],
)
def test_critical_dimension_refuses(arguments: tuple[int, float, int], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        critical_dimension(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1e4, 4096, 2048), "the target length must be at least the trained length of 4096 tokens, got 2048"),
        ((0.5, 4096, 8192), "rope_theta must be a finite number above 1, got 0.5"),
        (
            (1e4, 7, 10**6),
            r"a base too large for float64 \(10000 to the power 110\.9\); choose a shorter target",
        ),
    ],
)
def test_scaled_theta_refuses(arguments: tuple[float, int, int], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        scaled_theta(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Llama 3 8B, and Phi-3 mini as in the LongRoPE2 paper, whose theoretical critical pairs are 35 and 31.
        ((128, 5e5, 8192), range(24, 36)),
        ((96, 1e4, 2048), range(19, 32)),
        # No pair turns ten times within 32 tokens, and within 10 million every pair turns once.
        ((32, 1e4, 32), range(1, 4)),
        ((32, 1e4, 10**7), range(15, 16)),
    ],
)
def test_critical_pairs_lie_between_ten_turns_and_one(
    arguments: tuple[int, float, int], expected: range
) -> None:
    found = critical_pairs(*arguments)
    assert found == expected
    dim, base, length = arguments
    turns = [length * base ** (-2 * pair / dim) / (2 * math.pi) for pair in range(dim // 2)]
    # By counting turns instead of solving for the pair; where the clamps do not bind.
    if found[0] > 1 and found[-1] < dim // 2 - 1:
        assert found == range(sum(each > 10 for each in turns), sum(each > 1 for each in turns) + 1)
        assert critical_dimension(*arguments) == 2 * found[-1]


def test_one_pair_has_no_critical_pair() -> None:
    with pytest.raises(RopewalkError, match="rotary_dim 2 has 1 pair"):
        critical_pairs(2, 1e4, 512)
