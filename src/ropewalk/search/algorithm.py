"""What a search algorithm and an objective say to each other; neither knows what is behind the other.

An algorithm is a generator: it yields an :class:`Ask`, gets a :class:`Measured` for each candidate of it, in order,
and ends when it has nothing more to ask. An evaluator gives the loss of one candidate on one document, which is the
unit of cost: a *forward*.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ropewalk.search.space import Candidate, Space


class Job(NamedTuple):
    """One forward: a candidate on a document, by the document's index."""

    candidate: Candidate
    document: int


@dataclass(frozen=True)
class Ask:
    """Candidates that an algorithm wants measured.

    Attributes:
        candidates: at least one; some may have been measured before, which costs nothing.
        keep: how many of the best matter for what follows. Racing may leave the others with fewer documents.
    """

    candidates: tuple[Candidate, ...]
    keep: int


@dataclass(frozen=True)
class Measured:
    """What was found of a candidate.

    Attributes:
        candidate: which.
        objective: nats a token, the lower the better; infinite where a loss is no finite number.
        documents: on how many it was measured, the first ones.
    """

    candidate: Candidate
    objective: float
    documents: int

    @property
    def rank(self) -> tuple[int, float]:
        """What to sort by: those with more documents first, as an objective of fewer says less."""
        return -self.documents, self.objective


Algorithm = Callable[[Space, Sequence[Candidate], np.random.Generator], Generator[Ask, list[Measured], None]]
"""From a space, candidates to begin with and random numbers to what it asks."""


class Evaluator(Protocol):
    """Gives the loss of candidates on documents. Under several processes all call it alike, and get the same."""

    @property
    def n_documents(self) -> int:
        """Documents that a candidate is measured on."""

    def losses(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, float]]:
        """The loss of each job, as they are done; infinite where it is no finite number."""

    def objective(self, losses: Sequence[float]) -> float:
        """What the losses of the first documents amount to, in nats a token."""
