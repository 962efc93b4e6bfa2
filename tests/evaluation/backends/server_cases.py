"""Backends, prompts and replies for the tests of servers."""

from collections.abc import Callable
from typing import Any

from ropewalk.evaluation.backends import GenerationRequest, Rejection, ServerBackend
from ropewalk.evaluation.backends.serving import Serving
from tests.completion_server import (
    CompletionServer,
    Reply,
    completion,
)

KEY = "sk-secret-123"


HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


def backend(server: CompletionServer, **settings: Any) -> ServerBackend:
    return backend_at(server.url, **{"backoff": 0.01, "timeout": 10.0, **settings})


def backend_at(url: str, **settings: Any) -> ServerBackend:
    own = {name: settings.pop(name) for name in ("tokenizer", "api_key", "backoff") if name in settings}
    return ServerBackend(Serving(url=url, **settings), **own)


def requests_of(count: int) -> list[GenerationRequest]:
    """Prompts that name themselves."""
    return [GenerationRequest((1, 7, index), 4, 100) for index in range(count)]


def rejection(server: CompletionServer, **settings: Any) -> str:
    """Why the server rejects the only prompt."""
    (found,) = backend(server, **settings).answers(requests_of(1))
    assert isinstance(found, Rejection)
    return found.reason


def echo(value: dict[str, Any], number: int) -> Reply:
    return completion(f"answer to {value['prompt'][-1]}")


def echo_slowly(value: dict[str, Any], number: int) -> Reply:
    return completion(f"answer to {value['prompt'][-1]}", delay=0.01)


def always(reply: Reply) -> Callable[[dict[str, Any], int], Reply]:
    return lambda value, number: reply


def first_then_echo(*replies: Reply) -> Callable[[dict[str, Any], int], Reply]:
    """What goes wrong first, one request after the other; then good answers."""
    return lambda value, number: replies[number] if number < len(replies) else echo(value, number)
