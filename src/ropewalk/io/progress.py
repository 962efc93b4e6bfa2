"""Reporter: where a run's remarks and progress go. The command line draws it, a library caller may ignore it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int, str], None]
"""Takes the number of units done so far and a short text beside the bar."""


class Reporter(Protocol):
    """Where a run's remarks and progress go."""

    def note(self, text: str) -> None:
        """One line, one fact."""

    def bar(self, label: str, total: int | None) -> AbstractContextManager[Advance]:
        """A progress bar of ``total`` units, unknown if None."""


class Silent:
    """A reporter that says nothing."""

    def note(self, text: str) -> None:
        return None

    @contextmanager
    def bar(self, label: str, total: int | None) -> Iterator[Advance]:
        yield lambda done, text: None


@contextmanager
def counted(
    reporter: Reporter, label: str, total: int | None, unit: str
) -> Iterator[Callable[[int, int], None]]:
    """A bar for a loop that tells how much is done and how much there is; it yields what takes the two."""
    with reporter.bar(label, total) as advance:
        yield lambda done, _: advance(done, unit)
