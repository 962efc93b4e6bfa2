"""Ledger: what each candidate has cost and given, kept in a file line by line, so that a search can go on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ropewalk.errors import RopewalkError
from ropewalk.files import writing
from ropewalk.search.algorithm import Job
from ropewalk.search.space import Candidate


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


def begin_log(path: Path, header: Mapping[str, Any]) -> IO[str]:
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
        file = path.open("x", encoding="utf-8")
        print(json.dumps(header, allow_nan=False), file=file, flush=True)
        os.fsync(file.fileno())
    return file


def read_log(path: Path, header: Mapping[str, Any]) -> dict[Job, float]:
    """The losses in a log; a last line that the end of a process has cut off is left out, and cut off the file.

    Args:
        path: of the log.
        header: what is searched now; it must be what was searched then.

    Raises:
        RopewalkError: if there is no log, it is damaged, or it is of another search; the message says in what.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"nothing to resume: cannot read {path} ({error})") from error
    whole = text[: text.rfind("\n") + 1]
    first, *lines = whole.splitlines() or [""]
    try:
        then = json.loads(first)
        if not isinstance(then, dict):
            raise TypeError("its first line does not say what was searched")
        found = dict(_entry(json.loads(line)) for line in lines)
    except (ValueError, KeyError, TypeError) as error:
        raise RopewalkError(f"the log {path} is damaged ({error}); remove it to start again") from error
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


def _entry(line: Mapping[str, Any]) -> tuple[Job, float]:
    candidate = Candidate(tuple(map(float, line["rescale_factors"])), int(line["start_tokens"]))
    loss = line["loss"]
    return Job(candidate, int(line["document"])), math.inf if loss is None else float(loss)
