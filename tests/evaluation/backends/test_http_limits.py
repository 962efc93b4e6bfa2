"""A response takes neither more time nor more bytes than allowed, whatever the server sends."""

import gzip
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import http_limits
from ropewalk.evaluation.backends.http_limits import limited, within
from ropewalk.evaluation.backends.responses import FaultError
from tests.completion_server import CompletionServer, Reply, completion
from tests.evaluation.backends.server_cases import KEY, always, backend, backend_at, requests_of

TIMEOUT = 0.3


class Raw:
    """Sends bytes to whoever connects and asks for a path that ends in ``path``; answers others with 404."""

    def __init__(self, path: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        self.path, self.pieces, self.ended = path, pieces, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def __enter__(self) -> "Raw":
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                asked = connection.recv(1 << 16).split(b" ")[1].decode()
                if not asked.endswith(self.path):
                    body = b'{"data": [{"id": "m"}]}' if asked.endswith("/models") else b"{}"
                    status = b"200 OK" if asked.endswith("/models") else b"404 Not Found"
                    connection.sendall(
                        b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
                    )
                    return
                for piece in self.pieces():
                    if self.ended.is_set():
                        return
                    connection.sendall(piece)
            except OSError:
                # The client has closed the connection, as it should.
                return


def drip(start: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield start
        while True:
            time.sleep(0.05)
            yield piece

    return pieces


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
DRIPS = {"headers": drip(b"HTTP/1.1 200 OK\r\n", b"X: 1\r\n"), "body": drip(HEAD, b" ")}


@pytest.mark.parametrize("what", DRIPS)
@pytest.mark.parametrize("path", ["/models", "/completions"])
def test_a_response_that_drips_ends_after_the_timeout(what: str, path: str) -> None:
    with Raw(path, DRIPS[what]) as server:
        start = time.monotonic()
        with pytest.raises(RopewalkError, match=r"no response within 0\.3 s"):
            backend_at(server.url, timeout=TIMEOUT, retries=0).check()
        # Against a drip without end; a busy machine needs seconds to start.
        assert time.monotonic() - start < 10.0


def test_a_page_that_drips_says_nothing_about_the_model() -> None:
    with Raw("/props", DRIPS["body"]) as server, pytest.raises(RopewalkError, match="no endpoint"):
        backend_at(server.url, timeout=TIMEOUT, retries=0).check()


def test_a_body_that_drips_ends_the_attempt_that_nobody_waits_for() -> None:
    def chunks() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b" "

    with pytest.raises(FaultError, match=r"no response within 0\.05 s"):
        list(limited(chunks(), "", 0.05))


def test_a_body_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "LARGEST_BODY", 1 << 20)
    whole = b"x" * (1 << 20)
    for encoding, body in (
        ("", whole),
        ("identity", whole),
        ("gzip", gzip.compress(whole)),
        ("deflate", zlib.compress(whole)),
    ):
        pieces = [body[start : start + 1000] for start in range(0, len(body), 1000)]
        assert b"".join(limited(pieces, encoding, 60.0)) == whole
        longer = body + b"x" if encoding in ("", "identity") else gzip.compress(whole + b"x")
        with pytest.raises(FaultError, match="longer than 1 MiB"):
            list(limited([longer], encoding, 60.0))
    # A thousand times as long as what was sent.
    bomb = gzip.compress(bytes(100 << 20))
    with pytest.raises(FaultError, match="longer than 1 MiB"):
        list(limited([bomb], "gzip", 60.0))


def test_encodings_that_were_not_asked_for_or_are_damaged_are_faults() -> None:
    for body, encoding, reason in (
        (b"x", "br", "encoding 'br', which was not asked for"),
        (b"x", "gzip, gzip", "not asked for"),
        (b"not gzip", "gzip", "is not gzip"),
        (gzip.compress(b"x" * 1000)[:-20], "gzip", "not complete gzip"),
    ):
        with pytest.raises(FaultError, match=reason):
            list(limited([body], encoding, 60.0))


def test_a_body_of_any_status_and_path_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "LARGEST_BODY", 1 << 16)
    large = b" " * (1 << 17)
    for reply in (
        Reply(body=large),
        Reply(400, large),
        Reply(body=gzip.compress(large), headers={"Content-Encoding": "gzip"}),
        # The body of a redirect is read too.
        Reply(307, large, {"Location": "/v1/completions"}),
    ):
        with CompletionServer(always(reply)) as server, pytest.raises(RunFailure, match="longer than 0 MiB"):
            list(backend(server, retries=0).answers(requests_of(1)))
    with (
        CompletionServer(always(completion("x")), models_reply=Reply(body=large)) as server,
        pytest.raises(RopewalkError, match="longer than 0 MiB"),
    ):
        backend(server).check()


def test_a_key_in_what_is_no_http_is_not_repeated() -> None:
    with Raw("/completions", lambda: iter([f"{KEY} is no status line\r\n\r\n".encode()])) as server:
        asked = backend_at(server.url, api_key=KEY, retries=0, backoff=0.0)
        with pytest.raises(RopewalkError, match=r"\*\*\* is no status line") as caught:
            asked.check()
    assert KEY not in str(caught.value)


def test_a_call_returns_or_raises_in_time() -> None:
    assert within(10.0, lambda: 5, ValueError) == 5

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        within(10.0, fail, ValueError)
    done = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, done.wait, ValueError)
    done.set()
