"""Ledger: what each candidate has cost and given, kept in a file line by line, so that a search can go on."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.files import writing
from ropewalk.search.algorithm import Job
from ropewalk.search.space import Candidate

try:
    import fcntl
except ImportError:
    # Windows, where a log has no lock.
    fcntl = None  # type: ignore[assignment]


class Ledger:
    """The losses that are known, each job's once.

    A search that is started again asks the same questions in the same order, as all of its chance comes from one
    seed; what was measured before is answered from here. So a ledger is all the state that there is.

    Args:
        known: losses of an earlier run.
        file: where new ones go, a JSON line each; nowhere if None.
    """

    def __init__(self, known: Mapping[Job, float] | None = None, file: IO[str] | None = None) -> None:
        self._known = dict(known or {})
        self._file = file
        self.losses: dict[Job, float] = {}
        """Of the jobs that this run has asked for, in the order of their answers."""

    @property
    def forwards(self) -> int:
        """What the run has cost, counting what an earlier run of it had measured."""
        return len(self.losses)

    def recall(self, job: Job) -> bool:
        """Whether the loss of a job is known; from now on it counts."""
        if job not in self.losses and job in self._known:
            self.losses[job] = self._known[job]
        return job in self.losses

    def add(self, job: Job, loss: float) -> None:
        """Keep the loss of a job."""
        self.losses[job] = loss
        if self._file is not None:
            line = {
                "rescale_factors": job.candidate.rescale_factors,
                "start_tokens": job.candidate.start_tokens,
                "document": job.document,
                "loss": loss if math.isfinite(loss) else None,
            }
            with writing(Path(self._file.name)):
                print(json.dumps(line, allow_nan=False), file=self._file, flush=True)


class LogFile(io.TextIOWrapper):
    """A log that is open for one writer: no other process can open it for writing, or read it to go on with it.

    Args:
        path: of the log.
        mode: ``x`` for a new file, ``a`` for one that is there.

    Raises:
        RopewalkError: if the file cannot be written, or another process writes it; also, on closing, if what is left
            cannot be written.
    """

    def __init__(self, path: Path, mode: Literal["x", "a"]) -> None:
        self.path = path
        with writing(path):
            file = path.open("xb" if mode == "x" else "ab")
        super().__init__(file, encoding="utf-8")
        try:
            _lock(path, file.fileno(), shared=False)
        except RopewalkError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; it is closed whether or not this raises."""
        with writing(self.path):
            super().close()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            self.close()
        except RopewalkError:
            # After a failed write closing fails the same way: what is under way says it already.
            if kind is None:
                raise


def begin_log(path: Path, header: Mapping[str, Any]) -> LogFile:
    """A new log whose first line says what is searched.

    Raises:
        RopewalkError: if the file exists or cannot be written.
    """
    if path.exists():
        raise RopewalkError(
            f"{path} holds a search already; go on with it by --resume, or give another --out"
        )
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    file = LogFile(path, "x")
    try:
        with writing(path):
            print(json.dumps(header, allow_nan=False), file=file, flush=True)
            os.fsync(file.fileno())
    except RopewalkError as error:
        file.__exit__(type(error), error, None)
        # Without its first line it would be a damaged log to whoever goes on.
        with suppress(OSError):
            path.unlink()
        raise
    return file


def continue_log(
    path: Path, header: Mapping[str, Any], n_documents: int | None = None
) -> tuple[dict[Job, float], LogFile]:
    """The losses in a log, and the log to add to.

    Args:
        path, header, n_documents: as for :func:`read_log`.

    Raises:
        RopewalkError: as :func:`read_log`, and if the file cannot be written.
    """
    if not path.is_file():
        raise RopewalkError(f"nothing to resume: there is no log {path}")
    file = LogFile(path, "a")
    try:
        return _read(path, header, n_documents), file
    except BaseException:
        file.close()
        raise


def read_log(path: Path, header: Mapping[str, Any], n_documents: int | None = None) -> dict[Job, float]:
    """The losses in a log; a last line that the end of a process has cut off is left out, and cut off the file.

    Args:
        path: of the log.
        header: what is searched now; it must be what was searched then.
        n_documents: how many there are; not checked if None.

    Raises:
        RopewalkError: if there is no log, it is damaged, it is of another search, or another process writes it; the
            message says in what.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RopewalkError(f"nothing to resume: cannot read {path} ({error})") from error
    with file:
        _lock(path, file.fileno(), shared=True)
        return _read(path, header, n_documents)


def _lock(path: Path, file: int, shared: bool) -> None:
    """Keep a log as long as its file is open, where the file system has locks.

    Raises:
        RopewalkError: if another process has it.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RopewalkError(
            f"another process writes {path}; wait until it is done, or end it if it was left behind"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise RopewalkError(f"cannot lock {path}: {error.strerror or error}") from error


def _read(path: Path, header: Mapping[str, Any], n_documents: int | None) -> dict[Job, float]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"nothing to resume: cannot read {path} ({error})") from error
    whole = text[: text.rfind("\n") + 1]
    first, *lines = whole.split("\n")[:-1] or [""]
    found: dict[Job, float] = {}
    number = 1
    try:
        then = _json(first)
        if not isinstance(then, dict):
            raise TypeError("it does not say what was searched")
        for line in lines:
            number += 1
            job, loss = _entry(_json(line), n_documents)
            if found.setdefault(job, loss) != loss:
                raise ValueError(f"a loss of {loss:g} where an earlier line has {found[job]:g}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RopewalkError(
            f"the log {path} is damaged (line {number}: {_reason(error)}); remove it to start again"
        ) from error
    now = json.loads(json.dumps(header))
    different = [key for key in {**now, **then} if now.get(key) != then.get(key)]
    if different:
        key = different[0]
        raise RopewalkError(
            f"{path} is the log of another search: its {key} is {then.get(key)!r}, and here it is {now.get(key)!r}; "
            "restore the options, or give another --out"
        )
    if whole != text:
        with writing(path), path.open("r+", encoding="utf-8") as file:
            file.truncate(len(whole.encode("utf-8")))
    return found


def _json(line: str) -> Any:
    def refused(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refused)


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _entry(line: Any, n_documents: int | None) -> tuple[Job, float]:
    """The job and the loss of a line.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: if it is none that a ledger writes.
    """
    if not isinstance(line, dict):
        raise TypeError("it is no loss of a candidate")
    factors, loss, document = line["rescale_factors"], line["loss"], line["document"]
    if not (isinstance(factors, list) and factors):
        raise TypeError(f"rescale_factors {factors!r} are no list of numbers")
    candidate = Candidate(
        tuple(_finite("rescale_factors", each) for each in factors),
        _count("start_tokens", line["start_tokens"]),
    )
    if n_documents is not None and _count("document", document) >= n_documents:
        raise ValueError(f"document {document}, where there are {n_documents} from 0 on")
    return Job(candidate, _count("document", document)), math.inf if loss is None else _finite("loss", loss)


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} {value!r} is no finite number")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r} is no whole number from 0 on")
    return value
