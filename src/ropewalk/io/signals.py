"""Signals by which a scheduler or launcher asks a process to end: SIGTERM, and SIGUSR1, which Slurm can send."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


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
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    before = _set(end)
    try:
        yield
    except BaseException:
        if not restore:
            for each in before:
                signal.signal(each, signal.SIG_IGN)
            before = {}
        raise
    finally:
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


def _set(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Set a handler for all signals and return the earlier ones; nothing outside the main thread, which alone may."""
    try:
        return {each: signal.signal(each, handler) for each in ENDING}
    except ValueError:
        return {}
