"""Limits on what a server may take for one response: time in total, and bytes.

The HTTP client limits only the time between two bytes, and neither the length of a body nor what it expands to.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

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


def limited_client(openai: Any, seconds: float) -> Any:
    """An HTTP client for the openai package that reads each response, redirects included, with :func:`limited`."""
    kind = openai.DefaultHttpxClient
    # Either httpx or httpx2, depending on the version of the package; the client accepts only its own streams.
    stream_kind: Any = sys.modules[kind.__base__.__module__.partition(".")[0]].SyncByteStream

    class LimitedStream(stream_kind):  # type: ignore[misc]
        def __init__(self, stream: Any, encoding: str) -> None:
            self._stream, self._encoding = stream, encoding

        def __iter__(self) -> Iterator[bytes]:
            return limited(self._stream, self._encoding, seconds)

        def close(self) -> None:
            self._stream.close()

    def limit(response: Any) -> None:
        # Without the header, the client does not expand the body a second time.
        encoding = response.headers.pop("content-encoding", "")
        response.stream = LimitedStream(response.stream, encoding.strip().lower())

    return kind(event_hooks={"response": [limit]}, headers={"Accept-Encoding": ENCODINGS})
