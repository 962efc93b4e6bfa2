"""Reporter: receives a run's notes and progress. The command line draws them; library callers may ignore them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int, str], None]
"""A function of the number of units done so far and a short text beside the bar."""


class Reporter(Protocol):
    """Receives a run's notes and progress."""

    def note(self, text: str) -> None:
        """Report one fact in one line."""

    def bar(self, label: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show a progress bar of ``total`` units; None if the total is unknown."""


class Silent:
    """A reporter that discards everything."""

    def note(self, text: str) -> None:
        return None

    @contextmanager
    def bar(self, label: str, total: int | None) -> Iterator[Advance]:
        yield lambda done, text: None


@contextmanager
def counted(
    reporter: Reporter, label: str, total: int | None, unit: str
) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for a loop; yields a function of the number of units done and their total."""
    with reporter.bar(label, total) as advance:
        yield lambda done, _: advance(done, unit)


class Sparing:
    """Reports at most one sentence in so many seconds, of many threads together; the others are left out.

    Args:
        report: called with a sentence.
        seconds: between two sentences.
        at_once: whether the first sentence is reported at once; otherwise the seconds begin now.
    """

    def __init__(self, report: Callable[[str], None], seconds: float, at_once: bool = True) -> None:
        self._report, self._seconds, self._lock = report, seconds, threading.Lock()
        self._next = -float("inf") if at_once else time.monotonic() + seconds

    def __call__(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._seconds
        self._report(text)
