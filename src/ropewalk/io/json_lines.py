"""Logs with one JSON object per line, from which a killed run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.files import field_fault, parse_json

T = TypeVar("T")

BLOCK = 1 << 16
"""Bytes read at a time when searching for the end of the last line."""


def append_line(path: Path, values: Mapping[str, Any], sync: bool = True) -> None:
    """Append an object as one line, completely or not at all; the line is on the disk when this returns.

    An incomplete last line, left behind by a process that was killed while writing, is removed first.

    Args:
        path: path of the log; it and its folder are created if needed.
        values: JSON values; numbers must be finite.
        sync: wait for the disk. Otherwise a power cut may lose the line, unlike the end of this process; a later line
            that waits brings it to the disk, too.

    Raises:
        RunFailure: if the line cannot be written (no space, no permission); earlier lines are kept.
        ValueError: for NaN or infinity, which JSON does not have.
    """
    # ASCII, since json.dumps escapes everything else: a write can then never end inside a character.
    line = memoryview((json.dumps(values, allow_nan=False) + "\n").encode("ascii"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readable too, because the end of the file is searched for an incomplete line.
        with path.open("a+b", buffering=0) as file:
            end = _cut_unfinished(file)
            try:
                # An unbuffered write may accept only part of the line.
                while line:
                    line = line[file.write(line) :]
                # A line counts as done once it is here, so it must survive a power cut.
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                # If this fails too, the next append removes the incomplete line.
                with suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise RunFailure(
            f"cannot write {path}: {error.strerror or error}; earlier lines are kept, and the run can resume from them"
        ) from error


def read_lines(path: Path, parse: Callable[[int, dict[str, Any]], T], advice: str) -> Iterator[T]:
    """Read the entries of a log in order; none if the file does not exist. The file is not changed.

    An incomplete last line is left behind by a killed process and is skipped. Any other defect of a line (invalid
    UTF-8 or JSON, not an object, NaN, rejected by ``parse``) is damage, and raises an error instead of being skipped.

    Args:
        path: of the log.
        parse: makes an entry from a line's number, counted from 1, and its values; raises ValueError, TypeError,
            KeyError or OverflowError for values that were not written by this program.
        advice: what the user can do about a damaged line, for the message.

    Raises:
        RopewalkError: if the file cannot be read, or a line is damaged; the message gives its number.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Only the last line can lack its end, so this also ends the loop.
                if not line.endswith(b"\n"):
                    return
                try:
                    values = parse_json(line, strict=True)
                    if not isinstance(values, dict):
                        raise TypeError("it is not a JSON object")
                    entry = parse(number, values)
                except (ValueError, TypeError, KeyError, OverflowError) as error:
                    raise RopewalkError(
                        f"line {number} of {path} is damaged: {field_fault(error)}; {advice}"
                    ) from error
                yield entry
    except FileNotFoundError:
        return
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


def check_types(values: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise unless every named value is present and has one of its types; True and False do not count as numbers.

    Raises:
        KeyError, TypeError: with the name, and the value if there is one.
    """
    for name, kinds in types.items():
        value = values[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} has the wrong type: {value!r}")


def _cut_unfinished(file: FileIO) -> int:
    """Remove what follows the last line break, and return the new size of the file."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        # Usually the last byte is a line break, so try it alone first.
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
