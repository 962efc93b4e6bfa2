"""The exceptions that a user meets are one family, which a caller without ropewalk's names catches too."""

import os

import pytest
from huggingface_hub.errors import HfHubHTTPError

from ropewalk.errors import Echo, EngineError, RopewalkError, RunFailure, Stopped, http_errors


@pytest.mark.parametrize("kind", [RopewalkError, EngineError, RunFailure, Stopped, Echo])
def test_every_refusal_is_a_value_error_and_says_its_one_sentence(kind):
    error = kind("no such engine: 'flash9'")
    assert isinstance(error, RopewalkError)
    assert isinstance(error, ValueError)
    assert str(error) == "no such engine: 'flash9'"


def test_an_echo_carries_the_status_of_what_rank_0_raised():
    assert Echo("said there").status == RopewalkError("here").status == 2
    assert Echo("said there", RunFailure.status).status == 1
    assert Stopped("later").status == os.EX_TEMPFAIL
    # An echo is no failure of its own: it ends in silence.
    assert not isinstance(Echo("said there", 1), RunFailure)


def test_errors_of_the_hubs_client_are_known_whichever_it_uses():
    # Its own errors are some of its HTTP client's.
    assert issubclass(HfHubHTTPError, http_errors())
