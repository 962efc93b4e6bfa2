"""Angles that training has not shown, against angles laid out one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.rope import Default, Linear
from ropewalk.rope.theory.exposure import exposure, slowest_angles

TURN = 2 * math.pi
ANGLES = 20_000
"""Laid out on a line each time; a share of them is that of the line to 1 in 20,000 at each of its few ends."""


def naive_share(seen, reach):
    """Of angles evenly spread over ``0 … reach``, the share that lies beyond all that were seen."""
    if seen >= TURN:
        return 0.0
    angles = (np.arange(ANGLES) + 0.5) / ANGLES * reach
    return float((angles % TURN > seen).mean())


@given(
    old=st.floats(1e-4, 0.5),
    trained=st.integers(1, 4000),
    new=st.floats(1e-4, 0.5),
    target=st.integers(1, 4000),
)
def test_the_share_of_new_angles_is_that_of_angles_laid_out(old, trained, new, target):
    (pair,) = exposure([old], trained, [new], target)
    seen, reach = old * trained, new * target
    turns = math.ceil(reach / TURN)
    assert pair.new_angles == pytest.approx(naive_share(seen, reach), abs=2 * (turns + 1) / ANGLES)
    assert pair.complete == (seen >= TURN)
    assert pair.trained_turns == pytest.approx(seen / TURN)
    assert pair.target_turns == pytest.approx(reach / TURN)
    assert pair.period == pytest.approx(TURN / new)
    assert pair.trained_period == pytest.approx(TURN / old)


def test_interpolation_shows_nothing_new_and_extrapolation_what_lies_beyond():
    trained, target = 4096, 16384
    before = Default(128, 1e4).frequencies(target).inv_freq
    after = Linear(128, 1e4, target / trained).frequencies(target).inv_freq
    assert {pair.new_angles for pair in exposure(before, trained, after, target)} == {0.0}
    beyond = exposure(before, trained, before, target)
    assert [pair.pair for pair in beyond] == list(range(64))
    # The slowest pair has gone through less than a turn at four times the length: three quarters are new.
    assert beyond[-1].target_turns < 1
    assert beyond[-1].new_angles == pytest.approx(0.75)
    complete = [pair.complete for pair in beyond]
    assert complete == sorted(complete, reverse=True)
    assert [pair.new_angles == 0 for pair in beyond] == complete


def test_a_pair_that_does_not_turn_has_no_period_and_no_new_angle():
    (pair,) = exposure([0.0], 10, [0.0], 100)
    assert pair.period == pair.trained_period == math.inf
    assert pair.new_angles == pair.target_turns == 0


def test_settings_that_cannot_be_compared_are_refused():
    with pytest.raises(RopewalkError, match="equally long, got 2 and 1"):
        exposure([1.0, 0.1], 10, [1.0], 10)
    with pytest.raises(RopewalkError, match="trained_length must be at least 1 token, got 0"):
        exposure([1.0], 0, [1.0], 10)
    with pytest.raises(RopewalkError, match="target_length must be at least 1 token, got -1"):
        exposure([1.0], 1, [1.0], -1)


def test_the_slowest_pair_is_the_one_of_the_least_frequency():
    assert slowest_angles([0.5, 0.001, 1.0], [0, 10, 1000]).tolist() == pytest.approx([0, 0.01, 1.0])
