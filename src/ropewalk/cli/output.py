"""Printing: results on stdout, everything else on stderr, JSON as strict JSON."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ropewalk.errors import RunFailure
from ropewalk.io.settings import Option, OutputFile
from ropewalk.reporting.shown_text import harmless, shown

if TYPE_CHECKING:
    from ropewalk.reporting.tables import Part


JsonFlag = Annotated[
    bool, Field(description="Print only the result, as JSON, to stdout."), Option(name="--json")
]


def _can_be_drawn(path: Path | None) -> Path | None:
    """Refuse a picture that could not be written, before the work."""
    if path is not None and path.suffix not in (".png", ".svg"):
        raise ValueError(f"a figure is written as .png or .svg, got {path}")
    return path


PlotFile = Annotated[
    OutputFile | None,
    AfterValidator(_can_be_drawn),
    Field(description="Write a figure to FILE (.png or .svg)."),
]


class Terminal(Console):
    """A console on which text that others wrote does nothing: no markup, and no control character reaches it.

    Names of files, fields, sources, models and tasks, and what libraries say, may hold any character. Whatever is
    printed here goes through :meth:`render`, so that no caller can forget it; colours and the moves of a progress bar
    are the program's own and pass.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is to be written, with all control characters of its text written out but line breaks and tabs."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    def say(self, text: str) -> None:
        """One line, never cut: a line break within it, such as a file's name may hold, is written out too."""
        self.print(shown(text, max(2, len(text))), soft_wrap=True)


notes = Terminal(stderr=True)
"""Progress and remarks: stderr, so that stdout holds the result alone."""


class Interrupted(Exception):
    """Ctrl-C; the message says where the work so far lies and how to go on with it."""


@contextmanager
def on_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C end the program with a sentence of the command's own.

    Args:
        describe: called after Ctrl-C; where the work so far lies and which command goes on, without a full stop.

    Raises:
        Interrupted: in place of the KeyboardInterrupt; the program prints it and exits with status 130.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(describe()) from error


class _Terminated(BaseException):
    """SIGTERM came; not an Exception, so that nothing on the way mistakes it for its own failure."""


@contextmanager
def ended_by_sigterm(what: str) -> Iterator[None]:
    """Let SIGTERM close what is open inside, pools and scratch folders, as Ctrl-C does.

    Args:
        what: the command's name, for the message.

    Raises:
        RunFailure: if it came.
    """

    def end(*_: Any) -> None:
        # Once is enough: what is being closed is to be closed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:
        # Only the main thread may; elsewhere whoever started the thread decides.
        yield
        return
    try:
        yield
    except _Terminated:
        raise RunFailure(f"{what} was told to end by SIGTERM, and left nothing behind") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def results() -> Terminal:
    """A console for the result on stdout, made late so that it follows a redirected stdout."""
    return Terminal()


def print_json(value: Any) -> None:
    """Print a value as one JSON document; NaN and infinity become null, as JSON has neither."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def print_whole(table: Any) -> None:
    """A table whose numbers are never cut off, however narrow the terminal is."""
    from rich.measure import Measurement

    console = results()
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)


def show(parts: Iterable[Part]) -> None:
    """Print what reporting makes of a result, on stdout."""
    from ropewalk.reporting.tables import ResultTable

    console = results()
    for part in parts:
        if isinstance(part, str):
            console.say(part)
        elif isinstance(part, ResultTable):
            print_whole(part.rich())
        else:
            console.print(part)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
