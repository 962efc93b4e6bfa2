"""Logs of JSON objects, one a line, that a killed run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.files import parse_json

T = TypeVar("T")

BLOCK = 1 << 16
"""Bytes that are read at once when the last line's end is looked for."""


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append an object as one line, or nothing of it; the line is on the disk when this returns.

    An unfinished last line, which a process that was killed while it wrote has left behind, is cut off first.

    Args:
        path: of the log; it and its folder are made if need be.
        values: JSON values; numbers are finite.

    Raises:
        RunFailure: if the line cannot be written (no space, no permission); the lines before it stay.
        ValueError: for NaN or infinity, which JSON does not have.
    """
    # ASCII, as json.dumps escapes the rest: so half a character is never written.
    line = memoryview((json.dumps(values, allow_nan=False) + "\n").encode("ascii"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            end = _cut_unfinished(file)
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                # Where this fails too, the next line that is appended cuts the rest off.
                with suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise RunFailure(
            f"cannot write {path}: {error.strerror or error}; the lines before it are kept, and can be gone on from"
        ) from error


def read_lines(path: Path, parse: Callable[[int, dict[str, Any]], T], advice: str) -> Iterator[T]:
    """The entries of a log, in order; none where there is no file. The file is left as it is.

    A last line without its end is what a killed process leaves behind: it is passed over. Whatever else is wrong
    with a line (no UTF-8, no JSON, no object, NaN, what ``parse`` refuses) is damage, and nothing is read around it.

    Args:
        path: of the log.
        parse: makes an entry of a line's number, from 1, and its values; it raises ValueError, TypeError, KeyError or
            OverflowError where they are not what was written.
        advice: what the user can do about a damaged line, for the message.

    Raises:
        RopewalkError: if the file cannot be read, or naming the line that is damaged.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    values = parse_json(line, strict=True)
                    if not isinstance(values, dict):
                        raise TypeError("it is not a JSON object")
                    entry = parse(number, values)
                except (ValueError, TypeError, KeyError, OverflowError) as error:
                    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                    raise RopewalkError(f"line {number} of {path} is damaged: {reason}; {advice}") from error
                yield entry
    except FileNotFoundError:
        return
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


def check_types(values: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise unless every named value is there and of one of its types; True and False are not numbers.

    Raises:
        KeyError, TypeError: with the name, and the value where there is one.
    """
    for name, kinds in types.items():
        value = values[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} is {value!r}")


def _cut_unfinished(file: FileIO) -> int:
    """Cut off what follows the last end of a line; the size of the file then."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        # As a rule the last byte is the end of a line.
        start = max(0, end - (1 if end == size else BLOCK))
        file.seek(start)
        block = file.read(end - start)
        if (newline := block.rfind(b"\n")) >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    return end
