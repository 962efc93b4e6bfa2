"""Logs of JSON lines that a run resumes from. A log needs neither a step nor a store: it can stand alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ropewalk.errors import RopewalkError
from ropewalk.io.files import replacing
from ropewalk.io.json_lines import append_line, read_lines
from ropewalk.io.lock import locked
from ropewalk.runs.identity import refuse_other

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Lines(Generic[K, V]):
    """How a log is written and read.

    Attributes:
        key: what an entry is an entry of; a log has one entry for each key.
        write: JSON values of an entry, with finite numbers.
        read: an entry from its JSON values; raises ValueError, TypeError, KeyError or OverflowError for values that
            ``write`` cannot have returned.
        repeated: what a second entry of one key means, given the earlier and the later one: a sentence on the damage,
            or None if it is harmless, and the later one counts.
        advice: what the user can do about a damaged line, for the message.
        sync_seconds: seconds of entries that a power cut may lose, for entries that come faster than a disk takes them
            one by one; what ended with this process alone is on the disk.
    """

    key: Callable[[V], K]
    write: Callable[[V], Mapping[str, Any]]
    read: Callable[[Mapping[str, Any]], V]
    repeated: Callable[[V, V], str | None]
    advice: str = "restore the file, or remove it to start again"
    sync_seconds: float = 0.0


class Log(Generic[K, V]):
    """Entries by key; each is a line of a file, and on the disk when :meth:`add` returns (see ``sync_seconds``).

    The file grows by whole lines. An incomplete last line, of a process that was killed, is dropped; any other damage
    is an error that names the line.

    Args:
        path: the file; None keeps the entries in memory.
        lines: how entries are written and read.
        header: values of the first line, which say what the log is of; None for a log without such a line.
        what: what the log is of, for the message, such as ``search``.

    Raises:
        RopewalkError: if the file cannot be read, a line is damaged, or the header is that of another log; the message
            names the line, or the first key that differs with both values.
    """

    def __init__(
        self,
        path: Path | None,
        lines: Lines[K, V],
        header: Mapping[str, Any] | None = None,
        what: str = "run",
    ) -> None:
        self.path, self.lines, self._header = path, lines, header
        self._synced = -math.inf
        self.known: dict[K, V] = {}
        """Entries by key, in the order in which their keys came first."""
        found: list[Mapping[str, Any]] = []

        def parse(number: int, values: dict[str, Any]) -> None:
            if header is not None and number == 1:
                found.append(values)
                return
            entry = lines.read(values)
            key = lines.key(entry)
            if key in self.known and (damage := lines.repeated(self.known[key], entry)) is not None:
                raise ValueError(damage)
            self.known[key] = entry

        if path is not None:
            for _ in read_lines(path, parse, lines.advice):
                pass
        # A process that was killed before its first line was whole has begun nothing.
        self._begun = bool(found) or header is None
        if found:
            refuse_other(
                found[0],
                header,
                lambda first: (
                    f"{path} is the log of another {what}, with {first.key} {first.was!r} instead of {first.now!r}; "
                    f"either repeat the settings of that {what}, or choose another output (--out)"
                ),
            )

    def begin(self) -> None:
        """Write the header, if the log has one and the file does not contain it yet.

        Raises:
            RunFailure: if it cannot be written.
        """
        if self.path is not None and not self._begun:
            append_line(self.path, self._header or {})
        self._begun = True

    def add(self, entry: V) -> None:
        """Append an entry.

        Raises:
            RopewalkError: if the key has an entry, and ``lines.repeated`` objects to another.
            RunFailure: if the line cannot be written; earlier lines are kept.
        """
        key = self.lines.key(entry)
        if key in self.known and (damage := self.lines.repeated(self.known[key], entry)) is not None:
            raise RopewalkError(damage)
        self.begin()
        if self.path is not None:
            now = time.monotonic()
            due = now - self._synced >= self.lines.sync_seconds
            append_line(self.path, self.lines.write(entry), sync=due)
            self._synced = now if due else self._synced
        self.known[key] = entry

    def rewind(self, keep: Callable[[V], bool]) -> list[V]:
        """Remove the entries that a run will make again, and return them; the file is replaced as a whole.

        Args:
            keep: whether an entry stays, such as those of steps up to a checkpoint.

        Raises:
            RopewalkError: if the file cannot be written.
        """
        lost = [entry for entry in self.known.values() if not keep(entry)]
        if not lost:
            return []
        kept = {key: entry for key, entry in self.known.items() if keep(entry)}
        if self.path is not None:
            rows = [self._header] if self._header is not None else []
            with replacing(self.path) as temporary, temporary.open("w", encoding="ascii") as file:
                for values in [*rows, *(self.lines.write(entry) for entry in kept.values())]:
                    file.write(json.dumps(values, allow_nan=False) + "\n")
        self.known = kept
        return lost


def missing_log(path: Path, what: str) -> RopewalkError:
    """Error for a log to resume that does not exist."""
    return RopewalkError(f"nothing to resume: the log {path} does not exist; omit --resume to start a {what}")


def existing_log(path: Path, what: str) -> RopewalkError:
    """Error for a new log that exists already."""
    return RopewalkError(
        f"{path} already holds a {what}; either resume this {what} with --resume, or give another --out"
    )


@contextmanager
def opened_log(
    path: Path, lines: Lines[K, V], header: Mapping[str, Any], resume: bool, what: str
) -> Iterator[Log[K, V]]:
    """Open a log that stands alone; it is locked for other processes until the block ends.

    Args:
        path: the file.
        lines: how entries are written and read.
        header: everything that determines the entries; a log with another header belongs to something else.
        resume: continue an existing log. Without it, the log must be missing or empty.
        what: what the log is of, for messages, such as ``search``.

    Raises:
        RopewalkError: if the log exists although ``resume`` is false, or is missing although it is true; if it is
            damaged or another one; or if another process has it open.
        RunFailure: if it cannot be written.
    """
    # Before the lock, which would leave its folder behind.
    if resume and not path.is_file():
        raise missing_log(path, what)
    with locked(path.parent, "give another --out", file=path.name):
        # Under the lock, so that two processes cannot both find the log empty.
        if not resume and path.exists() and path.stat().st_size:
            raise existing_log(path, what)
        log = Log(path, lines, header, what)
        log.begin()
        yield log
