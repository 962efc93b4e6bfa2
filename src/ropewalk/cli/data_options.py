"""Options that several commands of ``ropewalk data`` share, and those that hold several values in one word."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer

from ropewalk.cli.output import notes
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import parse_length

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATHS",
        help="JSON lines (.jsonl, also .gz and .zst), Parquet, text and source files, folders of them, "
        r"hf:owner/name\[:config]\[@split], or embedded; records may hold text, or token ids already.",
    ),
]
TextFieldOption = Annotated[str, typer.Option(help="Field of a record that holds the text.")]
SourceFieldOption = Annotated[
    str, typer.Option(help='Field that names the source, where there is one; "" reads none.')
]
MaxDocumentsOption = Annotated[
    int, typer.Option(help="Read no more documents than this of each of PATHS; 0 reads all.")
]
WorkersOption = Annotated[int, typer.Option(help="Tokenisation processes; 0 takes one for each core.")]
Number = TypeVar("Number", int, float)


def numbers(text: str, kind: Callable[[str], Number], option: str, count: int | None = None) -> list[Number]:
    """Numbers with commas between them.

    Raises:
        RopewalkError: if one is none, or there are not ``count`` of them.
    """
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise RopewalkError(f"--{option} takes numbers with commas between them, got {text!r}") from error
    if count is not None and len(values) != count:
        raise RopewalkError(f"--{option} takes {count} numbers with a comma between them, got {text!r}")
    return values


def shares_by_name(text: str | None, option: str) -> dict[str, float] | None:
    """``books=0.3,web=0.7`` as a mapping.

    Raises:
        RopewalkError: if a part is no name and number, or a name comes twice.
    """
    if text is None:
        return None
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        name = name.strip()
        try:
            value = float(number)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise RopewalkError(f"--{option} takes name=number with commas between them, got {part!r}")
        if name in values:
            raise RopewalkError(f"--{option} names {name!r} twice")
        values[name] = value
    return values


def shares_by_length(text: str | None) -> tuple[tuple[int, float], ...] | None:
    """``0=0.3,4k=0.3,32k=0.4`` as (first length of the bin, share) pairs.

    Raises:
        RopewalkError: if a part is no length and number.
    """
    named = shares_by_name(text, "length-shares")
    if named is None:
        return None
    return tuple((0 if name == "0" else parse_length(name), share) for name, share in named.items())


def shard_of(text: str) -> tuple[int, int]:
    """``1/4`` as (1, 4).

    Raises:
        RopewalkError: if it is no number of a part and number of parts.
    """
    number, slash, parts = text.partition("/")
    if not slash or not number.isdecimal() or not parts.isdecimal() or not int(number) < int(parts):
        raise RopewalkError(f"--shard takes i/n with i from 0 to n-1, such as 0/4, got {text!r}")
    return int(number), int(parts)


def source_specs(paths: list[str], text_field: str, source_field: str, max_documents: int = 0) -> list[Any]:
    """The sources that a command's arguments name."""
    from ropewalk.data import SourceSpec

    if max_documents < 0:
        raise RopewalkError(f"--max-documents must be 0 or more, got {max_documents}")
    return [
        SourceSpec(
            path,
            text_field=text_field,
            source_field=source_field or None,
            max_documents=max_documents or None,
        )
        for path in paths
    ]


def processes(workers: int) -> int:
    """Tokenisation processes for the option ``--workers``."""
    if workers:
        return workers
    return os.cpu_count() or 1


@contextmanager
def packing_progress() -> Iterator[tuple[Callable[[int, int], None], Callable[[int, int], None]]]:
    """A line on stderr that shows documents, tokens and speed, then rows, and goes away at the end."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("reading")

        def read(documents: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            speed = f", {tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            bar.update(task, description=f"{documents:,} documents, {tokens:,} tokens{speed}")

        def written(rows: int, total: int) -> None:
            bar.update(task, description=f"{rows:,} of {total:,} rows written")

        yield read, written
