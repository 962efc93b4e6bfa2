"""A small OpenAI-compatible completion server on a port of its own, which fails when it is told to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


def few_certificates(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Clients of a server on this machine trust nobody else: to read whom they could trust takes 30 ms each time."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(folder))


@dataclass(frozen=True)
class Reply:
    """What the server does with one request.

    Attributes:
        status: HTTP status.
        body: as it is sent.
        headers: besides Content-Length.
        delay: seconds before it answers.
        hang_up: close the connection after this many bytes of the body; None sends it whole.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    delay: float = 0.0
    hang_up: int | None = None


def completion(
    text: Any, finish_reason: Any = "stop", tokens: Any = 3, read: Any = None, **reply: Any
) -> Reply:
    """An answer as vLLM writes it, of a server that ``read`` so many tokens of the prompt."""
    value = {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {"prompt_tokens": read, "completion_tokens": tokens},
    }
    return Reply(body=json.dumps(value).encode(), **reply)


def message(
    content: Any, finish_reason: Any = "stop", tokens: Any = 3, read: Any = None, **more: Any
) -> Reply:
    """A chat's answer as vLLM writes it; ``more`` are further keys of the message."""
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **more},
                "finish_reason": finish_reason,
            }
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": tokens},
    }
    return Reply(body=json.dumps(value).encode())


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Reply:
    """An error as OpenAI and vLLM write it."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": status}}).encode()
    return Reply(status, body, {"Content-Type": "application/json", **(headers or {})})


class CompletionServer:
    """Serves until the context ends.

    Requests of one token are trials: they are kept in ``trials``, are no part of the numbers that ``reply`` gets, and
    are answered where nothing speaks against it.

    Args:
        reply: from a request's JSON and its number, counted from 0, to what is done with it.
        models: names of the models that it lists.
        key: the API key that it asks for.
        models_reply: what it says in place of the list of models.
        refuses: from a request's JSON, trials included, to the refusal of it, or None.
        reads: from a trial's prompt, which for a chat is the text of its turns, to the tokens that it says it has read;
            None says nothing.
        unlisted: names of models that it serves and does not list.
        pages: JSON values of further paths, such as ``/props``.
        posts: for further paths to which JSON is posted, from it to what is said: a JSON value, or a reply.
        named: name of the model in the answers to trials.
        trial_reply: the answer to trials, in place of one token.
    """

    def __init__(
        self,
        reply: Callable[[dict[str, Any], int], Reply],
        models: Sequence[str] = ("tiny",),
        key: str | None = None,
        models_reply: Reply | None = None,
        refuses: Callable[[dict[str, Any]], Reply | None] = lambda value: None,
        reads: Callable[[Any], int | None] = lambda prompt: len(prompt) if isinstance(prompt, list) else None,
        unlisted: Sequence[str] = (),
        pages: Mapping[str, Any] | None = None,
        posts: Mapping[str, Callable[[dict[str, Any]], Any]] | None = None,
        named: str | None = None,
        trial_reply: Reply | None = None,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.trials: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._alive = True
        outer = self
        listed = Reply(body=json.dumps({"data": [{"id": name} for name in models]}).encode())

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path in (pages or {}):
                    self._send(Reply(body=json.dumps((pages or {})[self.path]).encode()))
                elif self.path != "/v1/models":
                    self._send(refusal(404, "Not Found"))
                elif self._allowed():
                    self._send(models_reply or listed)

            def do_POST(self) -> None:
                value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path in (posts or {}):
                    if self._allowed():
                        found = (posts or {})[self.path](value)
                        said = found if isinstance(found, Reply) else Reply(body=json.dumps(found).encode())
                        self._send(said)
                elif self.path not in ("/v1/completions", "/v1/chat/completions"):
                    self._send(refusal(404, "Not Found"))
                elif self._allowed() and not self._refused(value):
                    with outer._lock:
                        number = len(outer.requests)
                        outer.requests.append(value)
                        outer.under_way += 1
                        outer.most_under_way = max(outer.most_under_way, outer.under_way)
                    said = reply(value, number)
                    # A server that hangs is let go when the test is over.
                    outer.released.wait(said.delay)
                    # Before the answer is out: whoever has it may send the next request at once.
                    with outer._lock:
                        outer.under_way -= 1
                    self._send(said)

            def _refused(self, value: dict[str, Any]) -> bool:
                """Answer what is a trial or refused, and say so."""
                trial = value.get("max_tokens") == 1
                if trial:
                    outer.trials.append(value)
                said = refuses(value)
                if said is None and value["model"] not in (*models, *unlisted):
                    said = refusal(404, f"The model `{value['model']}` does not exist.")
                if said is None and trial:
                    made = message if "messages" in value else completion
                    turns = "\n".join(each["content"] for each in value.get("messages", ()))
                    prompt = value.get("prompt", turns)
                    said = trial_reply or made("x", "length", 1, reads(prompt))
                    if named is not None:
                        said = Reply(body=json.dumps({**json.loads(said.body), "model": named}).encode())
                if said is not None:
                    self._send(said)
                return said is not None

            def _allowed(self) -> bool:
                if key is None or self.headers["Authorization"] == f"Bearer {key}":
                    return True
                given = (self.headers["Authorization"] or "").removeprefix("Bearer ")
                self._send(refusal(401, f"Incorrect API key provided: {given}."))
                return False

            def _send(self, said: Reply) -> None:
                self.send_response(said.status)
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said.body)))
                self.end_headers()
                self.wfile.write(said.body if said.hang_up is None else said.body[: said.hang_up])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def die(self) -> None:
        """Refuse connections from now on."""
        with self._lock:
            alive, self._alive = self._alive, False
        if alive:
            self._server.shutdown()
            self._server.server_close()

    def __enter__(self) -> CompletionServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.die()


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()
