"""The search loop: it passes candidates from an algorithm to an evaluator, within a budget and with racing.

The ledger stores the loss of every evaluation as a line of a file, so an interrupted search can resume.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.errors import RunFailure
from ropewalk.runs import Lines, Log, opened_log
from ropewalk.search.algorithms import Algorithm, Ask, Evaluator, Job, Measured
from ropewalk.search.settings import check_budget
from ropewalk.search.space import Candidate, Space


class Ledger:
    """The known losses, one per job.

    All random choices of a search come from one seed. A restarted search therefore asks for the same jobs in the same
    order, and the ledger answers those measured before. No other state is stored.

    Args:
        known: losses of an earlier run.
        log: log for new losses; its own losses are known too. None writes no file.
    """

    def __init__(
        self, known: Mapping[Job, float] | None = None, log: Log[Job, tuple[Job, float]] | None = None
    ) -> None:
        self.known = {**(known or {}), **dict(() if log is None else log.known.values())}
        self._log = log
        self.losses: dict[Job, float] = {}
        """Losses of the jobs that this run has asked for, in the order of their completion."""

    @property
    def forwards(self) -> int:
        """Number of forwards so far, including those of an interrupted run that this one resumes."""
        return len(self.losses)

    def recall(self, job: Job) -> bool:
        """Whether the loss of a job is known; if so, it counts as a forward of this run."""
        if job not in self.losses and job in self.known:
            self.losses[job] = self.known[job]
        return job in self.losses

    def add(self, job: Job, loss: float) -> None:
        """Record the loss of a job.

        Raises:
            RunFailure: if its line cannot be written to the log; earlier lines are kept.
        """
        if self._log is not None:
            self._log.add((job, loss))
        self.losses[job] = loss


def lines_of(n_documents: int | None = None) -> Lines[Job, tuple[Job, float]]:
    """How the log of a search holds its losses, one line each.

    Args:
        n_documents: number of documents of the search, to check the entries; None skips this check.
    """
    return Lines(
        key=lambda entry: entry[0],
        write=lambda entry: {
            "rescale_factors": entry[0].candidate.rescale_factors,
            "start_tokens": entry[0].candidate.start_tokens,
            # Without the key where every pair has a factor of its own, as in all logs of earlier versions.
            **({"critical_pair": pair} if (pair := entry[0].candidate.critical_pair) else {}),
            "document": entry[0].document,
            "loss": entry[1] if math.isfinite(entry[1]) else None,
        },
        read=lambda values: _entry(values, n_documents),
        # A repeated line is harmless, but two losses of one job mean that the file was edited or mixed.
        repeated=lambda old, new: (
            None
            if old == new
            else f"it has a loss of {new[1]:g}, but an earlier line has {old[1]:g} for the same factors and document"
        ),
    )


@contextmanager
def search_log(
    path: Path, header: Mapping[str, Any], resume: bool, n_documents: int | None = None
) -> Iterator[Ledger]:
    """Open the log of a search as a ledger; the log stays locked for other processes until the block ends.

    Args:
        path: log file. Its first line is the header, each other line a loss.
        header: all inputs that determine the search; a log with a different header belongs to another search.
        resume: continue an existing log. Without it, the log must be missing or empty.
        n_documents: see :func:`lines_of`.

    Raises:
        RopewalkError: if the log exists although ``resume`` is false, or is missing although it is true; if a line is
            damaged, the log belongs to another search (the message names the difference), another process has it
            open, or it cannot be written.
    """
    with opened_log(path, lines_of(n_documents), header, resume, "search") as log:
        yield Ledger(log=log)


def _entry(line: Mapping[str, Any], n_documents: int | None) -> tuple[Job, float]:
    """Job and loss of a line.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: if the ledger cannot have written the line.
    """
    factors, loss, document = line["rescale_factors"], line["loss"], line["document"]
    if not (isinstance(factors, list) and factors):
        raise TypeError(f"rescale_factors {factors!r} is not a list of numbers")
    candidate = Candidate(
        tuple(_finite("rescale_factors", each) for each in factors),
        _count("start_tokens", line["start_tokens"]),
        _count("critical_pair", line.get("critical_pair", 0)),
    )
    if n_documents is not None and _count("document", document) >= n_documents:
        raise ValueError(
            f"document {document} does not exist; the search has documents 0 to {n_documents - 1}"
        )
    return Job(candidate, _count("document", document)), math.inf if loss is None else _finite("loss", loss)


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} {value!r} is not a finite number")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r} is not a whole number of 0 or more")
    return value


BLOCK = 16
"""Candidates measured together: enough to fill the batches of several processes."""
MARGIN = 1.5
"""Racing drops a candidate that is behind by this many standard deviations; chosen by measurement, see docs/log.md."""
RECENT = 16
"""Number of recent complete candidates that the standard deviation is estimated from; older ones lie elsewhere."""
FEWEST = 4
"""Complete candidates needed for that estimate; with fewer, racing keeps the better half."""
SQRT_2 = math.sqrt(2)

Progress = Callable[[int, float], None]
"""Called with the number of forwards so far and the best objective, which is infinite at first."""


@dataclass(frozen=True)
class Trace:
    """A candidate that was measured on all documents.

    Attributes:
        forwards: number of forwards when its measurement was complete.
        measured: the candidate and its objective.
    """

    forwards: int
    measured: Measured


@dataclass(frozen=True)
class Minimum:
    """Result of the search loop.

    Attributes:
        best: candidate with the lowest objective among those measured on all documents; the first of equals.
        traces: all candidates measured on all documents, in order.
        forwards: number of forwards.
        candidates: number of candidates, including those that racing dropped.
        spent: whether the search ended because the budget was used up, rather than by its algorithm.
    """

    best: Measured
    traces: tuple[Trace, ...]
    forwards: int
    candidates: int
    spent: bool

    def improvements(self) -> list[Trace]:
        """The ``traces`` that were the best so far."""
        found: list[Trace] = []
        for trace in self.traces:
            if not found or trace.measured.objective < found[-1].measured.objective:
                found.append(trace)
        return found

    def forwards_to(self, objective: float) -> int | None:
        """Number of forwards needed to reach an objective; None if it was not reached."""
        reached = (trace.forwards for trace in self.traces if trace.measured.objective <= objective)
        return next(reached, None)


class _Spent(Exception):
    """Raised when the budget is used up."""


@dataclass(frozen=True)
class Strategy:
    """Algorithm, budget, seed and racing of a search.

    Attributes:
        algorithm: algorithm that proposes candidates.
        budget: maximum number of forwards; at least enough for the initial candidates on all documents.
        seed: random seed; the same seed gives the same search.
        racing: drop candidates that are clearly behind after their first documents.
    """

    algorithm: Algorithm
    budget: int
    seed: int = 0
    racing: bool = True


def minimise(
    space: Space,
    evaluator: Evaluator,
    strategy: Strategy,
    seeds: Mapping[str, Candidate],
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> Minimum:
    """Find the candidate with the lowest objective.

    Args:
        space: search space; a candidate outside it is a bug of the algorithm.
        evaluator: computes losses. With several processes, every rank must call this function.
        strategy: algorithm, budget and seed.
        seeds: initial candidates by name.
        ledger: records losses; None for a new one.
        progress: called after each forward.

    Raises:
        RopewalkError: if the budget is too small for the initial candidates.
        RunFailure: if no candidate has a finite objective.
    """
    check_budget(strategy.budget, len(set(seeds.values())), evaluator.n_documents)
    run = _Run(space, evaluator, strategy, ledger or Ledger(), progress)
    first = Ask(tuple(seeds.values()), len(seeds))
    asking = strategy.algorithm(space, list(seeds.values()), np.random.default_rng(strategy.seed))
    spent = False
    try:
        # Measure the seeds first and in full: the result is then never worse than the baselines they come from.
        run.answer(first)
        ask = next(asking)
        while True:
            ask = asking.send(run.answer(ask))
    except StopIteration:
        pass
    except _Spent:
        spent = True
    if run.best is None:
        raise RunFailure("the loss of every candidate is NaN or infinite; check the model and the documents")
    return Minimum(run.best, tuple(run.traces), run.ledger.forwards, len(run.candidates), spent)


class _Run:
    """State of one search."""

    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        strategy: Strategy,
        ledger: Ledger,
        progress: Progress | None,
    ) -> None:
        self.space, self.evaluator, self.ledger = space, evaluator, ledger
        self.budget, self.racing, self.progress = strategy.budget, strategy.racing, progress
        self.best: Measured | None = None
        self.traces: list[Trace] = []
        self.candidates: dict[Candidate, int] = {}
        """Number of documents that each candidate was measured on."""

    def answer(self, ask: Ask) -> list[Measured]:
        """Measure the candidates that an algorithm asks for.

        Raises:
            _Spent: if the budget runs out, after measuring as much as it allows.
        """
        for candidate in ask.candidates:
            assert self.space.contains(candidate), candidate
        # An algorithm may ask for a candidate twice; the order matters, because budgets end in it.
        alive = list(dict.fromkeys(ask.candidates))
        # Racing measures one document at a time, to drop candidates in between.
        rounds = range(1, self.evaluator.n_documents + 1) if self.racing else [self.evaluator.n_documents]
        for documents in rounds:
            self._measure(alive, documents)
            if documents < self.evaluator.n_documents:
                alive = self._racing(alive, documents, ask.keep)
        return [self._measured(candidate) for candidate in ask.candidates]

    def _measure(self, candidates: Sequence[Candidate], documents: int) -> None:
        """Measure candidates on their first ``documents`` documents, as far as not yet done."""
        # Document by document within a block: candidates that share a document can share a forward pass.
        blocks = (candidates[start : start + BLOCK] for start in range(0, len(candidates), BLOCK))
        wanted = [
            Job(candidate, document)
            for block in blocks
            for document in range(documents)
            for candidate in block
        ]
        todo: list[Job] = []
        spent = False
        for job in wanted:
            if job in self.ledger.losses:
                continue
            if spent := self.ledger.forwards + len(todo) >= self.budget:
                break
            # A resumed search asks in the same order, so the known losses come first.
            if self.ledger.recall(job):
                self._note(job.candidate)
            else:
                todo.append(job)
        for job, loss in self.evaluator.losses(todo):
            self.ledger.add(job, loss)
            self._note(job.candidate)
            if self.progress is not None:
                self.progress(self.ledger.forwards, self.best.objective if self.best else math.inf)
        if spent:
            # Raised after the measured jobs are recorded, so that nothing that was paid for is lost.
            raise _Spent

    def _note(self, candidate: Candidate) -> None:
        """Update a candidate's number of documents, and record the candidate once it is complete."""
        before = self.candidates.get(candidate, 0)
        documents = before
        while documents < self.evaluator.n_documents and Job(candidate, documents) in self.ledger.losses:
            documents += 1
        self.candidates[candidate] = documents
        # Only complete candidates can become the best: objectives on fewer documents are not comparable.
        if before < documents == self.evaluator.n_documents:
            measured = self._measured(candidate)
            self.traces.append(Trace(self.ledger.forwards, measured))
            if math.isfinite(measured.objective) and (
                self.best is None or measured.objective < self.best.objective
            ):
                self.best = measured

    def _racing(self, alive: list[Candidate], documents: int, keep: int) -> list[Candidate]:
        """Candidates to measure on the next document; at least ``keep`` of them."""
        ranked = sorted(alive, key=lambda each: self._objective(each, documents))
        error = self._error(documents)
        if error is None:
            continued = set(ranked[: max(keep, math.ceil(len(alive) / 2))])
        else:
            # The difference of two candidates has the errors of both: sqrt(2) times one error.
            limit = self._objective(ranked[min(keep, len(ranked)) - 1], documents) + MARGIN * SQRT_2 * error
            # An infinite limit says nothing about the others, so then only the first ``keep`` continue.
            continued = {
                each
                for place, each in enumerate(ranked)
                if place < keep or self._objective(each, documents) <= limit < math.inf
            }
        return [candidate for candidate in alive if candidate in continued]

    def _error(self, documents: int) -> float | None:
        """Standard error of an objective on the first documents, as an estimate of the one on all; None if unknown.

        It is the standard deviation, over recent complete candidates, of the change from the first documents to all of
        them. Two or three documents of one candidate are too few for a variance, and the change cancels what the
        documents contribute to every candidate.
        """
        added = [
            trace.measured.objective - self._objective(trace.measured.candidate, documents)
            for trace in self.traces[-RECENT:]
            if math.isfinite(trace.measured.objective)
        ]
        return statistics.stdev(added) if len(added) >= FEWEST else None

    def _measured(self, candidate: Candidate) -> Measured:
        documents = self.candidates[candidate]
        return Measured(candidate, self._objective(candidate, documents), documents)

    def _objective(self, candidate: Candidate, documents: int) -> float:
        losses = [self.ledger.losses[Job(candidate, document)] for document in range(documents)]
        return self.evaluator.objective(losses)
