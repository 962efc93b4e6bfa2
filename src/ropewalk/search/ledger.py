"""Ledger: what each candidate has cost and given, kept in a file line by line, so that a search can go on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.json_lines import append_line, read_lines
from ropewalk.io.lock import locked
from ropewalk.search.algorithm import Job
from ropewalk.search.space import Candidate


class Ledger:
    """The losses that are known, each job's once.

    A search that is started again asks the same questions in the same order, as all of its chance comes from one
    seed; what was measured before is answered from here. So a ledger is all the state that there is.

    Args:
        known: losses of an earlier run.
        log: file that new ones go to, a JSON line each; nowhere if None.
    """

    def __init__(self, known: Mapping[Job, float] | None = None, log: Path | None = None) -> None:
        self.known = dict(known or {})
        self._log = log
        self.losses: dict[Job, float] = {}
        """Of the jobs that this run has asked for, in the order of their answers."""

    @property
    def forwards(self) -> int:
        """What the run has cost, counting what an earlier run of it had measured."""
        return len(self.losses)

    def recall(self, job: Job) -> bool:
        """Whether the loss of a job is known; from now on it counts."""
        if job not in self.losses and job in self.known:
            self.losses[job] = self.known[job]
        return job in self.losses

    def add(self, job: Job, loss: float) -> None:
        """Keep the loss of a job.

        Raises:
            RunFailure: if its line cannot be written; the lines before it stay.
        """
        self.losses[job] = loss
        if self._log is not None:
            line = {
                "rescale_factors": job.candidate.rescale_factors,
                "start_tokens": job.candidate.start_tokens,
                "document": job.document,
                "loss": loss if math.isfinite(loss) else None,
            }
            append_line(self._log, line)


@contextmanager
def search_log(
    path: Path, header: Mapping[str, Any], resume: bool, n_documents: int | None = None
) -> Iterator[Ledger]:
    """The ledger of a search that is kept in a log; no other process can open the log until the block ends.

    Args:
        path: of the log. Its first line is the header, each further one a loss.
        header: what decides the search; a log with another header is another search's.
        resume: go on with the log that is there; otherwise there must be none, or an empty one.
        n_documents: how many documents losses may be of; not checked if None.

    Raises:
        RopewalkError: if there is a log, or with ``resume`` none; if a line of it is damaged; if it is of another
            search (the message says in what); if another process has it open, or it cannot be written.
    """
    if resume and not path.is_file():
        raise RopewalkError(f"nothing to resume: there is no log {path}")
    with locked(path.parent, "give another --out", file=path.name):
        if not resume and path.exists() and path.stat().st_size:
            raise RopewalkError(
                f"{path} holds a search already; go on with it by --resume, or give another --out"
            )
        known = read_log(path, header, n_documents)
        # One that was killed before its first line was whole has not begun.
        if known is None:
            append_line(path, header)
        yield Ledger(known, path)


def read_log(
    path: Path, header: Mapping[str, Any], n_documents: int | None = None
) -> dict[Job, float] | None:
    """The losses in a log; None where not even its first line is whole.

    Args:
        path, header, n_documents: as for :func:`search_log`.

    Raises:
        RopewalkError: if a line is damaged, or the log is of another search; the message says in what.
    """
    found: dict[Job, float] = {}

    def parse(number: int, values: dict[str, Any]) -> dict[str, Any]:
        if number > 1:
            job, loss = _entry(values, n_documents)
            if found.setdefault(job, loss) != loss:
                raise ValueError(f"a loss of {loss:g} where an earlier line has {found[job]:g}")
        return values

    lines = list(read_lines(path, parse, "restore the file, or remove it to start again"))
    if not lines:
        return None
    then, now = lines[0], json.loads(json.dumps(header))
    different = [key for key in {**now, **then} if now.get(key) != then.get(key)]
    if different:
        key = different[0]
        raise RopewalkError(
            f"{path} is the log of another search: its {key} is {then.get(key)!r}, and here it is {now.get(key)!r}; "
            "restore the options, or give another --out"
        )
    return found


def _entry(line: Mapping[str, Any], n_documents: int | None) -> tuple[Job, float]:
    """The job and the loss of a line.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: if it is none that a ledger writes.
    """
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
