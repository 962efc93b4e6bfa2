"""Settings of a server that cannot be used are refused before anything is sent."""

from typing import Any

import pytest
from pydantic import ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.serving import Serving, public_address
from ropewalk.io.settings import explain
from tests.evaluation.backends.server_cases import KEY, backend_at


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/v1",
        "http://",
        "http:///v1",
        "http://host:port/v1",
        "http://[::1/v1",
        "http://ho st/v1",
        "http://host..x/v1",
        "",
        "me:secret@host",
    ],
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(RopewalkError, match="is not a server address; write an address like") as caught:
        backend_at(url)
    assert "secret" not in str(caught.value)


def test_addresses_with_a_query_are_refused_without_repeating_it() -> None:
    with pytest.raises(
        RopewalkError, match=r"the server address http://host/v1 has a query or fragment"
    ) as caught:
        backend_at(f"http://host/v1?key={KEY}")
    assert KEY not in str(caught.value)
    assert public_address("https://[::1]:8000/v1/") == "https://[::1]:8000/v1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency must be 1 or more, got 0"),
        ({"retries": -1}, "retries must be 0 or more, got -1"),
        ({"timeout": 0.0}, "timeout must be more than 0, got 0.0"),
        ({"timeout": float("nan")}, "timeout must be a finite number, got nan"),
        ({"backoff": -1.0}, "backoff must be 0 or more seconds, got -1.0"),
        ({"send": "chat"}, "unknown send 'chat'; choose from auto, ids, text"),
        (
            {"extra": {"max_tokens": 1}},
            "the request field max_tokens cannot be set, because ropewalk sets it; remove the field",
        ),
        (
            {"extra": {"stream": True}},
            "the request field stream cannot be set, because ropewalk cannot read the responses that it causes",
        ),
        ({"extra": {"top k": 1}}, "'top k' is not a valid name of a request field"),
        ({"extra": {"top_p": float("nan")}}, "the request field top_p must be a JSON value, got nan"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((RopewalkError, ValidationError)) as caught:
        backend_at("http://localhost:1/v1", **settings)
    error = caught.value
    assert message in (explain(error, Serving) if isinstance(error, ValidationError) else str(error))
