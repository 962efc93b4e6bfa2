"""Printing: results on stdout, everything else on stderr, JSON as strict JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, Field
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ropewalk.errors import RunFailure, Stopped
from ropewalk.io.results import plain_json
from ropewalk.io.settings import Option, OutputFile
from ropewalk.io.signals import Ended, ended_by_signals
from ropewalk.reporting.shown_text import between_words, harmless, shown

if TYPE_CHECKING:
    from ropewalk.io.results import Result
    from ropewalk.parallel import World
    from ropewalk.parallel.context import RunContext
    from ropewalk.reporting.figures.drawing import Figure
    from ropewalk.reporting.tables import Part

R = TypeVar("R", bound="Result")

_REMARK = re.compile(r"(note|warning|stage \d+): |- ")
"""Beginning of a line that is a sentence even without a full stop."""

JsonFlag = Annotated[
    bool, Field(description="Print only the result, as JSON, to stdout."), Option(name="--json")
]


def _can_be_drawn(path: Path | None) -> Path | None:
    """Reject a figure that could not be written, before the work starts."""
    if path is not None and path.suffix not in (".png", ".svg"):
        raise ValueError(f"a figure is written as .png or .svg, got {path}")
    return path


PlotFile = Annotated[OutputFile | None, AfterValidator(_can_be_drawn)]


def figure_of(content: str) -> Any:
    """Declare an option for a figure, with a description that says what the figure shows."""
    return Field(description=f"File for a figure (.png or .svg) of {content}.")


class Terminal(Console):
    """A console on which text from elsewhere has no effect: it prints no markup and no control characters.

    Names of files, fields, sources, models and tasks, and messages of libraries, may contain any character. Everything
    printed here passes through :meth:`render`, so no caller can forget to escape it. The program's own colours and
    progress bars are not affected.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments to write, with all control characters except line breaks and tabs escaped."""
        for segment in super().render(renderable, options):
            # Control segments are rich's own, such as the cursor movements of a progress bar.
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    def put(self, part: RenderableType) -> None:
        """Print a part of a result, folded at the width of the terminal or of COLUMNS; files and pipes have none."""
        self.print(part, soft_wrap=not self.is_terminal and "COLUMNS" not in os.environ)

    def prose(self, text: str) -> None:
        """Print a sentence; on a terminal, lines end between words, and a word longer than a line is not cut."""
        self.print(between_words(shown(text, max(2, len(text))), self), soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line, never truncated; line breaks within it, for example in a file name, are escaped."""
        # The limit is the text's own length, and at least the 2 that `shown` demands, so nothing is cut.
        self.print(shown(text, max(2, len(text))), soft_wrap=True)


notes = Terminal(stderr=True)
"""Progress and notes go to stderr, so that stdout contains only the result."""


class Interrupted(Exception):
    """Ctrl-C; the message says where the work so far is stored and how to resume it."""


@contextmanager
def on_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C end the program with a message from the command.

    Args:
        describe: called after Ctrl-C; says where the work is stored and how to resume it, without a full stop.

    Raises:
        Interrupted: instead of KeyboardInterrupt; the program prints it and exits with status 130.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(describe()) from error


@contextmanager
def ended_by_sigterm(what: str) -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 close pools and scratch folders that are open in the block, as Ctrl-C does.

    Args:
        what: name of the command, for the message.

    Raises:
        RunFailure: if SIGTERM or SIGUSR1 arrived.
    """
    try:
        with ended_by_signals(restore=True):
            yield
    except Ended as error:
        raise RunFailure(f"{what} was ended by {error.name}, and left nothing behind") from None


@contextmanager
def resumable(describe: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 end work that can be resumed, with a message from the command.

    Args:
        describe: says where the work is stored and how to resume it, without a full stop.

    Raises:
        Interrupted: after Ctrl-C, as :func:`on_interrupt`.
        Stopped: after SIGTERM or SIGUSR1.
    """
    with on_interrupt(describe):
        try:
            with ended_by_signals(restore=True):
                yield
        except Ended as error:
            raise Stopped(f"stopped by {error.name}: {describe()}") from None


def run_context(world: World | None = None, output: Path | None = None, device: str = "auto") -> RunContext:
    """The context of a job whose notes and progress go to stderr; without ``world``, that of a single process."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext

    context = RunContext(output=output, reporter=ConsoleReporter(notes), device=device)
    return context if world is None else replace(context, world=world)


def results() -> Terminal:
    """A console for the result on stdout, created at each call so that it follows a redirected stdout."""
    return Terminal()


def print_json(value: Any) -> None:
    """Print a value as one JSON document; NaN and infinity become null, because JSON has neither."""
    # Not through rich, which would wrap long lines at the width of the terminal.
    sys.stdout.write(json.dumps(plain_json(value), indent=2, allow_nan=False) + "\n")


def print_whole(table: Any) -> None:
    """Print a table without truncating its numbers, however narrow the terminal is."""
    from rich.measure import Measurement

    console = results()
    # Measured on a wide page, because rich limits the width it reports to that of the page.
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.put(table)


def show(parts: Iterable[Part]) -> None:
    """Print the parts that the reporting package makes of a result, on stdout."""
    from ropewalk.reporting.tables import ResultTable

    console = results()
    for part in parts:
        if isinstance(part, str):
            # A line that is a path or a command stays whole, to be copied.
            (console.prose if part.endswith(".") or _REMARK.match(part) else console.say)(part)
        elif isinstance(part, ResultTable):
            print_whole(part.rich())
        else:
            console.put(part)


def show_result(result: R, as_json: bool, describe: Callable[[R], Iterable[Part]]) -> None:
    """Print a result on stdout: as JSON, or as the parts that the reporting package makes of it."""
    if as_json:
        print_json(result.to_json())
    else:
        show(describe(result))


def draw_figure(figure: Figure, file: Path, as_json: bool) -> None:
    """Write a figure, and name its file below the result unless that is JSON.

    Call it after the result is printed, so that a figure that cannot be written does not lose the result.
    """
    from ropewalk.reporting import draw

    draw(figure, file)
    if not as_json:
        results().say(f"picture {file}")
