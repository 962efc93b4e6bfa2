"""Signals by which a scheduler or launcher asks a process to end: SIGTERM, and SIGUSR1, which Slurm can send."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))

_AGAIN_SECONDS = 0.01


class Ended(BaseException):
    """A signal asked this process to end. Not an Exception, so no ``except Exception`` on the way up swallows it.

    Attributes:
        name: name of the signal, such as ``SIGTERM``.
    """

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(self.name)


@contextmanager
def ended_by_signals(restore: bool = False) -> Iterator[None]:
    """Raise :class:`Ended` in the block when a signal arrives, so that files are closed and the user is told.

    Args:
        restore: set the earlier handlers again after an error too. Otherwise further signals are ignored from then on,
            while the error is reported; torchrun kills a process that does not exit.
    """

    def end(number: int, _: Any) -> None:
        # A second signal must not interrupt the cleanup.
        ignore_signals()
        raise Ended(number)

    def lost(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Ended):
            print_lost(unraisable)
            return
        # Raised in a finaliser or a callback of C code, which pass no exception on: let the signal arrive again.
        _set(end)
        again = signal.Signals[unraisable.exc_value.name]
        threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, again)).start()

    before, print_lost = _set(end), sys.unraisablehook
    if before:
        sys.unraisablehook = lost
    try:
        yield
    except BaseException:
        if not restore:
            ignore_signals()
            before = {}
        raise
    finally:
        if sys.unraisablehook is lost:
            sys.unraisablehook = print_lost
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def noted_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of a signal that arrived in the block, and 0 before.

    Only the first signal is noted. The second does what it would have done before the block, so that a process that
    does not come to its end can still be ended.
    """
    noted = 0

    def note(number: int, _: Any) -> None:
        nonlocal noted
        noted = number
        for each, handler in before.items():
            signal.signal(each, handler)

    before = _set(note)
    try:
        yield lambda: noted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def ignore_signals() -> None:
    """Ignore the signals from now on, in a process that is about to exit."""
    _set(signal.SIG_IGN)


def _set(handler: Any) -> dict[int, Any]:
    """Set a handler for all signals and return the earlier ones; nothing outside the main thread, which alone may."""
    try:
        return {each: signal.signal(each, handler) for each in ENDING}
    except ValueError:
        return {}
