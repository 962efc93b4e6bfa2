"""Limits on what a server may take for one response: time in total, and bytes.

The HTTP client limits only the time between two bytes, and neither the length of a body nor what it expands to.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

import httpx2

from ropewalk.evaluation.backends.responses import FaultError

LARGEST_BODY = 32 << 20
"""Maximum bytes of a response: a rejection may quote a prompt of a million token ids, which takes 8 MB."""

ENCODINGS = "gzip, deflate"
"""Compressions that are asked for and read; both expand piece by piece, within any limit."""

T = TypeVar("T")


def in_thread(call: Callable[[], T], *kinds: type[Exception]) -> Future[T]:
    """Make a call in a thread of its own, which does not keep the program from ending.

    Args:
        call: the call.
        kinds: the errors that the call may raise. The thread prints any other, and the future is cancelled.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except kinds as error:
            outcome.set_exception(error)
        except BaseException as error:
            # Printed before those who wait go on and say that it was.
            hook_arguments = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(hook_arguments))
            outcome.cancel()
            # Only this ends the waiting for several futures.
            outcome.set_running_or_notify_cancel()

    threading.Thread(target=work, daemon=True).start()
    return outcome


def within(seconds: float, call: Callable[[], T], *kinds: type[Exception]) -> T:
    """Return what a call returns, or raise what it raises.

    Args:
        seconds: time that the call may take.
        call: the call. It goes on in a thread of its own when the time is over; nobody waits for that thread.
        kinds: the errors that the call may raise.

    Raises:
        TimeoutError: if the call takes longer.
    """
    return in_thread(call, *kinds).result(seconds)


def limited(chunks: Iterable[bytes], encoding: str, seconds: float) -> Iterator[bytes]:
    """Expand a body and yield its pieces.

    Args:
        chunks: the body as it arrives.
        encoding: value of Content-Encoding; empty for none.
        seconds: time that the body may take.

    Raises:
        FaultError: if the body takes longer, has more than :data:`LARGEST_BODY` bytes, or has an encoding that was not
            asked for.
    """
    if encoding not in ("", "identity", "gzip", "deflate"):
        raise FaultError(f"the response has the content encoding {encoding!r}, which was not asked for")
    # 32 more than the largest window: zlib finds out itself whether it reads gzip or deflate.
    expand = None if encoding in ("", "identity") else zlib.decompressobj(zlib.MAX_WBITS + 32)
    room, end = LARGEST_BODY, time.monotonic() + seconds
    for chunk in chunks:
        try:
            piece = chunk if expand is None else expand.decompress(chunk, room + 1)
        except zlib.error as error:
            raise FaultError(f"the response is not {encoding}: {error}") from error
        room -= len(piece)
        if room < 0:
            raise FaultError(f"the response is longer than {LARGEST_BODY >> 20} MiB")
        # A body that drips ends here, although nobody waits for it any more.
        if time.monotonic() > end:
            raise FaultError(f"no response within {seconds:g} s")
        yield piece
    if expand is not None and not expand.eof:
        raise FaultError(f"the response is not complete {encoding}")


class _LimitedStream(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream, encoding: str, seconds: float) -> None:
        self._stream, self._encoding, self._seconds = stream, encoding, seconds

    def __iter__(self) -> Iterator[bytes]:
        return limited(self._stream, self._encoding, self._seconds)

    def close(self) -> None:
        self._stream.close()


def limited_client(seconds: float, connect: float, headers: Mapping[str, str]) -> httpx2.Client:
    """An HTTP client that reads each response, redirects included, with :func:`limited`.

    Args:
        seconds: time that a response may take.
        connect: seconds to wait for a connection.
        headers: headers of every request; a redirect to another server is followed without Authorization.
    """

    def limit(response: httpx2.Response) -> None:
        # Without the header, the client does not expand the body a second time.
        encoding = response.headers.pop("content-encoding", "").strip().lower()
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _LimitedStream(response.stream, encoding, seconds)

    return httpx2.Client(
        event_hooks={"response": [limit]},
        headers={**headers, "Accept-Encoding": ENCODINGS},
        timeout=httpx2.Timeout(seconds, connect=connect),
        # As many connections as there are requests at a time.
        limits=httpx2.Limits(),
        follow_redirects=True,
    )
