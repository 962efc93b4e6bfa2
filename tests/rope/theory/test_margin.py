"""B(m), its first violation and their number against the definition and the paper's numbers."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, Llama3, LongRope, Yarn, unscaled_inv_freq
from ropewalk.rope.theory import (
    attention_upper_bound,
    context_bound,
    feasible_bases,
    inv_freq_of_base,
    similarity_margin,
    violations,
)
from ropewalk.rope.theory.margin import screen, screen_error
from tests.rope.rope_cases import examples, methods
from tests.rope.theory.theory_cases import inv_freq, margins

# The paper's table 4: one base of 5e6, and its "method 2", piecewise with interpolated slow pairs.
PAIR = np.arange(64)
METHOD_1 = 5e6 ** (-2 * PAIR / 128)
METHOD_2 = np.where(PAIR >= 44, 1e4 ** (-2 * PAIR / 128) / 8, (1e4 * 8 ** (128 / 88)) ** (-2 * PAIR / 128))


@pytest.mark.parametrize(
    ("theta", "length", "count"),
    [
        (METHOD_1, 15 * 1024, 0),
        (METHOD_1, 30 * 1024, 0),
        (METHOD_2, 15 * 1024, 97),
        (METHOD_2, 30 * 1024, 2554),
    ],
)
def test_table_4_of_the_paper(theta: np.ndarray, length: int, count: int) -> None:
    assert len(violations(theta, length)) == count


@pytest.mark.parametrize(("base", "first"), [(100, 59), (500, 171), (1e4, 1707), (5e5, 18438), (1e6, 27115)])
def test_first_violations(base: float, first: int) -> None:
    theta = Default(128, base).frequencies().inv_freq
    assert context_bound(theta) == first - 1
    assert violations(theta, first)[0] == first
    # The definition itself: nothing below zero before, and the next distance is.
    by_definition = margins(inv_freq(128, base), first)
    assert by_definition[:-1].min() >= 0 > by_definition[-1]


@examples
@given(methods, st.integers(0, 3000))
def test_every_method_goes_through_the_same_function(method, length: int) -> None:
    theta = method.frequencies(length + 1).inv_freq
    by_definition = margins(theta.numpy(), length)
    # A margin of zero to within rounding may count either way.
    sure = np.abs(by_definition) > 1e-9
    expected = np.flatnonzero((by_definition < 0) & sure)
    found = violations(theta, length)
    assert set(expected) <= set(found)
    assert not (set(found) - set(expected)) & set(np.flatnonzero(sure))
    bound = context_bound(theta, limit=length)
    assert bound == (None if not len(found) else found[0] - 1)


@pytest.mark.parametrize(
    "method",
    [
        Default(64, 1e5),
        Default(80, 1e4),
        Default(96, 1e4),
        Default(256, 1e6),
        Yarn(128, 1e6, 4.0, 32768),
        Llama3(128, 5e5, 8.0, 1.0, 4.0, 8192),
        LongRope(96, 1e4, (1.0,) * 48, tuple(1 + i for i in range(48)), 1.19, 4096),
    ],
    ids=lambda method: f"{method.name}-{method.rotary_dim}",
)
def test_context_bound_of_models_that_people_have(method) -> None:
    theta = method.frequencies(131072).inv_freq
    by_definition = margins(theta.numpy(), 131072)
    below = np.flatnonzero(by_definition < 0)
    assert context_bound(theta, limit=131072) == (below[0] - 1 if len(below) else None)


@examples
@given(
    st.integers(1, 128),
    st.lists(st.floats(1.1, 1e12), min_size=1, max_size=3),
    st.integers(1, 2**26),
    st.integers(1, 5000),
)
def test_screen_stays_within_its_error(pairs: int, bases: list[float], first: int, count: int) -> None:
    theta = np.array([inv_freq(2 * pairs, base) for base in bases])
    screened = screen(theta, first, count)
    assert screened.shape == (len(bases), count)
    exact = np.array([margins(each, first + count - 1, first) for each in theta])
    # cos of m·θ itself is off by half an ulp of the angle, up to 2^26 · 1.1e-16 a pair.
    assert np.abs(screened - exact).max() <= screen_error(pairs)


def test_a_context_bound_needs_no_torch() -> None:
    program = (
        "import sys; from ropewalk.rope.theory import context_bound, inv_freq_of_base\n"
        "print(context_bound(inv_freq_of_base(128, 1e4)), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1706", "False"]


def test_frequencies_of_a_base_are_those_of_the_method() -> None:
    for dim, base in ((128, 1e4), (64, 5e5), (80, 283461213.5)):
        assert inv_freq_of_base(dim, base) == pytest.approx(unscaled_inv_freq(dim, base).numpy(), rel=1e-15)


def test_autocast_around_it_changes_nothing() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert context_bound(inv_freq(128, 1e6)) == 27114
        # Many bases at once are torch's product.
        within = feasible_bases(2000, 128, 1e5).feasible
    assert within == feasible_bases(2000, 128, 1e5).feasible


def test_more_pairs_than_any_head_has_are_refused() -> None:
    with pytest.raises(RopewalkError, match="at most 2048 rotated dimensions, got 2050"):
        context_bound(np.ones(1025))


def test_a_margin_of_exactly_zero_counts_as_reached() -> None:
    # cos(0) + cos(π) to the last bit: a pair that does not turn, and one that is half a turn a token.
    theta = [0.0, math.pi]
    assert similarity_margin(theta, 1) == 0
    assert context_bound(theta, limit=1000) is None


def test_pairs_that_stand_still_outweigh_as_many_that_rotate() -> None:
    rotate = [1.0, 0.9, 0.8, 0.7]
    assert context_bound([*rotate, 0, 0, 0, 0]) is None
    theta = np.array([*rotate, 0, 0, 0])
    below = np.flatnonzero(margins(theta, 1000) < 0)
    assert context_bound(theta) == below[0] - 1


def test_a_bound_beyond_the_limit_is_none_and_far_ones_are_found() -> None:
    theta = inv_freq(128, 1e9)
    assert context_bound(theta, limit=10**6) is None
    bound = context_bound(theta)
    assert bound is not None
    around = margins(theta, bound + 1, bound - 2000)
    assert around[:-1].min() >= 0 > around[-1]


def test_slower_frequencies_reach_further() -> None:
    """Position interpolation stretches the distances: B(m) at θ/s is B(m/s) at θ."""
    theta = inv_freq(128, 1e4)
    m = np.arange(0, 8000, 4)
    np.testing.assert_allclose(similarity_margin(theta / 4, m), similarity_margin(theta, m / 4), atol=1e-9)
    assert context_bound(theta / 4) >= 4 * 1706


def test_margin_has_the_shape_of_its_positions_and_the_pairs_at_zero() -> None:
    margin = similarity_margin(torch.tensor([1.0, 0.1], dtype=torch.float64), [[0, 1], [2, 3]])
    expected = [[2.0, np.cos(1) + np.cos(0.1)], [np.cos(2) + np.cos(0.2), np.cos(3) + np.cos(0.3)]]
    np.testing.assert_allclose(margin, expected, rtol=1e-14)


@examples
@given(st.integers(1, 20), st.floats(2, 1e6), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_attention_upper_bound_is_the_sum_of_partial_sums(pairs: int, base: float, m: list[int]) -> None:
    theta = inv_freq(2 * pairs, base)
    expected = [
        sum(abs(sum(np.exp(1j * at * theta[i]) for i in range(n))) for n in range(1, pairs + 1)) for at in m
    ]
    np.testing.assert_allclose(attention_upper_bound(theta, m), expected, rtol=1e-9)


def test_attention_upper_bound_really_bounds() -> None:
    """Abel summation: |Σ h_i·e^(imθ_i)| <= max|h_(i+1) - h_i| · bound, with h beyond the last pair 0."""
    rng = np.random.default_rng(0)
    theta, m = inv_freq(64, 1e4), np.arange(0, 5000, 7)
    for _ in range(20):
        h = rng.normal(size=32) + 1j * rng.normal(size=32)
        logit = np.abs((h * np.exp(1j * np.outer(m, theta))).sum(1))
        step = np.abs(np.diff([*h, 0])).max()
        assert (logit <= step * attention_upper_bound(theta, m) * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], r"inv_freq must be a non-empty list of frequencies, got shape \(0,\)"),
        ([[1.0]], r"got shape \(1, 1\)"),
        ([1.0, -1.0], "frequencies in inv_freq must be finite numbers, 0 or more rad/token, got -1"),
        ([float("nan")], "got nan"),
    ],
)
def test_bad_frequencies_are_refused(bad: list, said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        context_bound(bad)
