"""Printing: results on stdout, everything else on stderr, JSON as strict JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, nothing else.")]

notes = Console(stderr=True, highlight=False)
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


def results() -> Console:
    """A console for the result on stdout, made late so that it follows a redirected stdout."""
    return Console(highlight=False)


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


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextmanager
def searching(label: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """A bar for a search that takes seconds to a minute; what it yields takes the done and the total."""
    from ropewalk.cli.progress import ConsoleReporter

    with ConsoleReporter(notes).bar(label, total) as advance:
        yield lambda done, _: advance(done, "distances")
