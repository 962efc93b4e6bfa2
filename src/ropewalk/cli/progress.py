"""Progress as bars on a terminal, and as occasional lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ropewalk.io.progress import Advance
from ropewalk.io.urls import masked
from ropewalk.reporting.shown_text import between_words, shown

SECONDS_BETWEEN_LINES = 10.0
"""Seconds between lines of progress if stderr is not a terminal."""


class ConsoleReporter:
    """Draws a run's progress on stderr."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        text = masked(text)
        line = between_words(shown(text, max(2, len(text))), self.console)
        self.console.print(Text(line), soft_wrap=True)

    @contextmanager
    def bar(self, label: str, total: int | None) -> Iterator[Advance]:
        if self.console.is_terminal:
            with self._drawn(label, total) as advance:
                yield advance
        else:
            yield self._lines(label, total)

    @contextmanager
    def _drawn(self, label: str, total: int | None) -> Iterator[Advance]:
        counted = (
            [BarColumn(), MofNCompleteColumn()]
            if total is not None
            else [SpinnerColumn(finished_text="done")]
        )
        ends = [TimeElapsedColumn(), TimeRemainingColumn()] if total is not None else [TimeElapsedColumn()]
        # Labels may contain names from elsewhere, so they must be escaped.
        described, stated = (
            TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[text]}")
        )
        columns = [described, *counted, *ends, stated]
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(shown(label), total=total, text="")
            try:
                yield lambda done, text: progress.update(task, completed=done, text=shown(text))
            except BaseException:
                # Nothing that still seems to turn is left above the error.
                progress.remove_task(task)
                raise
            if total is None:
                progress.update(task, total=1, completed=1)

    def _lines(self, label: str, total: int | None) -> Advance:
        started = last = time.monotonic()

        def advance(done: int, text: str) -> None:
            nonlocal last
            now = time.monotonic()
            # Without a terminal, for example in a job's log, one line per step would bury everything else.
            if now - last >= SECONDS_BETWEEN_LINES or (total is not None and done == total):
                last = now
                # Nothing to extrapolate from before the first unit, and nothing left after the last.
                left = (
                    f", {(now - started) / done * (total - done):.0f} s left"
                    if total and 0 < done < total
                    else ""
                )
                of = f"/{total}" if total is not None else ""
                self.note(f"{label}: {done}{of}  {text}{left}")

        return advance
