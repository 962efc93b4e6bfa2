"""The exceptions that a user meets are one family, which a caller without ropewalk's names catches too."""

import pytest

from ropewalk.errors import Echo, EngineError, RopewalkError, RunFailure


@pytest.mark.parametrize("kind", [RopewalkError, EngineError, RunFailure, Echo])
def test_every_refusal_is_a_value_error_and_says_its_one_sentence(kind):
    error = kind("no such engine: 'flash9'")
    assert isinstance(error, RopewalkError)
    assert isinstance(error, ValueError)
    assert str(error) == "no such engine: 'flash9'"


def test_an_echo_carries_the_status_of_what_rank_0_raised():
    assert Echo("said there").failed is False
    assert Echo("said there", failed=True).failed is True
    # An echo is no failure of its own: it ends in silence.
    assert not isinstance(Echo("said there", failed=True), RunFailure)
