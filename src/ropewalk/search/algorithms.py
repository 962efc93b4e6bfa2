"""The search algorithms, and what they and an objective say to each other; neither knows what is behind the other.

An algorithm is a generator: it yields an :class:`Ask`, gets a :class:`Measured` for each candidate of it, in order,
and ends when it has nothing more to ask. An evaluator gives the loss of one candidate on one document, which is the
unit of cost: a *forward*.

``evolution`` is the paper's: mutation and crossover that never leave the space, and the loop of generations. Source:
Ding et al., LongRoPE, arXiv:2402.13753, algorithm 1 and section 3.3; the numbers are the paper's.

``cma-es`` is covariance matrix adaptation of what a few knots add to the log factors of the best candidate so far.
Between knots the addition is linear in the pair's number, so that neighbouring pairs, which matter alike, move
together; the shape that a seed has between its knots stays. Each restart has more knots, down to one a pair. Source:
Hansen, The CMA evolution strategy: a tutorial, arXiv:1604.00772, as the package ``cma`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.search.settings import ALGORITHMS
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


MOST_TRIES = 100
"""Attempts at a candidate that was not there before; a small space may have none left."""


@dataclass(frozen=True)
class EvolutionSettings:
    """Attributes:
    population: candidates of the first generation.
    parents: the best of all so far, from which the next ones come.
    mutations, crossovers: new candidates of a generation.
    mutation_probability: of each factor, and of n̂; of a factor of the second parent in a crossover as well.
    iterations: generations after the first.
    """

    population: int = 64
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    mutation_probability: float = 0.3
    iterations: int = 40


def mutate(space: Space, parent: Candidate, probability: float, random: np.random.Generator) -> Candidate:
    """A candidate some factors of which are drawn anew, each between its neighbours.

    Args:
        space: of the parent.
        parent: what to change.
        probability: of each factor, and of n̂, to be drawn.
        random: where chance comes from.
    """
    levels = space.levels_of(parent)
    for pair in range(space.pairs):
        if random.random() < probability:
            low = levels[pair - 1] if pair else 0
            high = levels[pair + 1] if pair + 1 < space.pairs else space.levels - 1
            levels[pair] = int(random.integers(low, high + 1))
    tokens = parent.start_tokens
    if len(space.start_tokens) > 1 and random.random() < probability:
        tokens = int(random.choice(space.start_tokens))
    return space.of_levels(levels, tokens)


def crossover(
    space: Space, first: Candidate, second: Candidate, probability: float, random: np.random.Generator
) -> Candidate | None:
    """The first parent with some factors of the second; None where they would not ascend.

    Args:
        space: of both.
        first, second: parents.
        probability: of each factor, and of n̂, to be the second's.
        random: where chance comes from.
    """
    drawn = random.random(space.pairs + 1) < probability
    pairs = zip(first.rescale_factors, second.rescale_factors, drawn[:-1], strict=True)
    tokens = second.start_tokens if drawn[-1] else first.start_tokens
    child = Candidate(tuple(b if taken else a for a, b, taken in pairs), tokens)
    return child if space.contains(child) else None


def evolve(settings: EvolutionSettings | None = None) -> Algorithm:
    """The paper's algorithm with its numbers, or others."""
    told = settings or EvolutionSettings()

    def run(
        space: Space, seeds: Sequence[Candidate], random: np.random.Generator
    ) -> Generator[Ask, list[Measured], None]:
        seen: set[Candidate] = set()

        def mutant() -> Candidate:
            return mutate(space, _one_of(parents, random), told.mutation_probability, random)

        def child() -> Candidate:
            first, second = _one_of(parents, random), _one_of(parents, random)
            return crossover(space, first, second, told.mutation_probability, random) or mutant()

        parents = list(seeds)
        first = _new(seen, len(seeds), iter(seeds).__next__)
        first += _new(seen, told.population - len(first), mutant)
        measured = yield Ask(tuple(first), told.parents)
        for _ in range(told.iterations):
            measured = sorted(measured, key=lambda each: each.rank)[: told.parents]
            parents = [each.candidate for each in measured]
            offspring = _new(seen, told.mutations, mutant) + _new(seen, told.crossovers, child)
            if not offspring:
                return
            measured = yield Ask((*parents, *offspring), told.parents)

    return run


def _one_of(parents: Sequence[Candidate], random: np.random.Generator) -> Candidate:
    return parents[int(random.integers(len(parents)))]


def _new(seen: set[Candidate], count: int, make: Callable[[], Candidate]) -> list[Candidate]:
    """As many candidates as can be found that were not there before."""
    found: list[Candidate] = []
    for _ in range(MOST_TRIES * max(count, 0)):
        if len(found) == count:
            break
        try:
            candidate = make()
        except StopIteration:
            break
        if candidate not in seen:
            seen.add(candidate)
            found.append(candidate)
    return found


FINEST = 0.005
"""Smallest standard deviation of a log factor: half a step of the grid at a factor of 1."""
DULL = 3
"""Generations with hardly anything new, and restarts with nothing new, that end what they belong to."""
TOKENS_SCALE = 20.0
"""Places in the list of start tokens that are as far as a factor e."""


@dataclass(frozen=True)
class CovarianceSettings:
    """Attributes:
    knots: of the first run; each restart has twice as many, down to one a pair, and then it begins anew.
    sigma: standard deviation of the first run's additions to the log factors; 0.2 changes a factor by a fifth.
    keep: how many of a generation racing has to measure in full; the ranks of the others may be of fewer documents.
    """

    knots: int = 4
    sigma: float = 0.2
    keep: int = 1


def covariance(settings: CovarianceSettings | None = None) -> Algorithm:
    """The algorithm, with settings that were measured or others."""
    told = settings or CovarianceSettings()

    def run(
        space: Space, seeds: Sequence[Candidate], random: np.random.Generator
    ) -> Generator[Ask, list[Measured], None]:
        known = _Known()
        yield from known.ask(tuple(seeds), len(seeds))
        knots, sigma, idle = min(told.knots, space.pairs), told.sigma, 0
        while idle < DULL:
            before = len(known.measured)
            yield from _descend(space, known, knots, sigma, told.keep, random)
            idle = 0 if len(known.measured) > before else idle + 1
            if knots < space.pairs:
                knots, sigma = min(2 * knots, space.pairs), told.sigma / 2
            else:
                # All pairs have been free: from the beginning, and further away.
                knots, sigma = min(told.knots, space.pairs), 2 * told.sigma

    return run


class _Known:
    """What was measured so far, and the best of it."""

    def __init__(self) -> None:
        self.measured: dict[Candidate, Measured] = {}

    @property
    def best(self) -> Candidate:
        return min(self.measured.values(), key=lambda each: each.rank).candidate

    def ask(
        self, candidates: Sequence[Candidate], keep: int
    ) -> Generator[Ask, list[Measured], list[Measured]]:
        """Ask for candidates, unless all of them are known."""
        if any(candidate not in self.measured for candidate in candidates):
            for measured in (yield Ask(tuple(candidates), keep)):
                self.measured[measured.candidate] = measured
        return [self.measured[candidate] for candidate in candidates]


def _descend(
    space: Space, known: _Known, knots: int, sigma: float, keep: int, random: np.random.Generator
) -> Generator[Ask, list[Measured], None]:
    """One run of the strategy from the best candidate, until it stands still."""
    size = knots + (len(space.start_tokens) > 1)
    decode = _decoder(space, known.best, knots)
    # The package knows no single coordinate; a second one that means nothing does no harm.
    strategy = _strategy(max(size, 2), sigma, random)
    dull = 0
    while dull < DULL and not strategy.stop() and strategy.sigma * max(strategy.D) > FINEST:
        points = strategy.ask()
        candidates = [decode(point) for point in points]
        new = sum(candidate not in known.measured for candidate in set(candidates))
        dull = 0 if 4 * new > len(points) else dull + 1
        measured = yield from known.ask(candidates, keep)
        # Only the order counts, and objectives of unlike numbers of documents cannot be compared as they are.
        ranks = sorted({each.rank for each in measured})
        strategy.tell(points, [float(ranks.index(each.rank)) for each in measured])


def _decoder(space: Space, start: Candidate, knots: int) -> Callable[[NDArray[np.float64]], Candidate]:
    """From coordinates ``[knots]``, and one for n̂ where there is a choice, to a candidate; zeros are the start."""
    pairs = np.arange(space.pairs)
    places = np.linspace(0, space.pairs - 1, knots)
    logs = np.log(start.rescale_factors)
    index = space.start_tokens.index(start.start_tokens)

    def decode(point: NDArray[np.float64]) -> Candidate:
        moved = logs + np.interp(pairs, places, point[:knots])
        # Between the nearest that ascend from above and from below: neither end of a fall is favoured.
        above, below = np.maximum.accumulate(moved), np.minimum.accumulate(moved[::-1])[::-1]
        factors = np.exp(np.clip((above + below) / 2, 0.0, math.log(space.largest)))
        chosen = index
        if len(space.start_tokens) > 1:
            chosen = round(min(max(index + TOKENS_SCALE * point[knots], 0), len(space.start_tokens) - 1))
        return space.nearest(factors.tolist(), space.start_tokens[chosen])

    return decode


def _strategy(size: int, sigma: float, random: np.random.Generator) -> Any:
    """The package's strategy, silent, without files, and with no chance but ours."""
    # Imported here: a search by evolution does without.
    import cma

    options = {
        "randn": lambda many, dimension: random.standard_normal((many, dimension)),
        # No number: the package leaves numpy's own generator alone.
        "seed": math.nan,
        "verbose": -9,
        "verb_log": 0,
        "verb_disp": 0,
        # Its tests of values would take ranks for objectives; ours end a run instead.
        "tolfun": 0,
        "tolfunhist": 0,
        "tolflatfitness": math.inf,
        "tolstagnation": math.inf,
    }
    return cma.CMAEvolutionStrategy(np.zeros(size), sigma, options)


def algorithm_named(name: str) -> Algorithm:
    """An algorithm with its published or measured settings.

    Raises:
        RopewalkError: for a name that is none of :data:`~ropewalk.search.settings.ALGORITHMS`.
    """
    if name not in ALGORITHMS:
        raise RopewalkError(f"unknown search algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}")
    return covariance() if name == "cma-es" else evolve()
