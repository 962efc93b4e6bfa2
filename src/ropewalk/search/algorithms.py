"""Search algorithms, and the interface between an algorithm and an evaluator.

An algorithm is a generator. It yields an :class:`Ask`, receives one :class:`Measured` per candidate in the same order,
and returns when it has no further candidates. An evaluator computes the loss of one candidate on one document. This is
the unit of cost, called a *forward*.

``evolution`` is the algorithm of the LongRoPE paper: generations of mutation and crossover that stay within the search
space. Source: Ding et al., LongRoPE, arXiv:2402.13753, algorithm 1 and section 3.3; the default settings are the
paper's. In LongRoPE2's space (Shang et al., arXiv:2502.20082, algorithms 1 and 2) a mutation keeps the critical pair of
its parent, and so does a crossover that of its first parent.

``cma-es`` is covariance matrix adaptation of offsets to the log factors of the best candidate so far. The offsets are
set at a few knots and interpolated linearly over the pair index between them, because neighbouring pairs have similar
effects; the best candidate's own shape between knots is kept. Each restart uses more knots, up to one per pair. Source:
Hansen, The CMA evolution strategy: a tutorial, arXiv:1604.00772, as implemented in the package ``cma``.
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
from ropewalk.search.space import Candidate, Space, with_factors_below


class Job(NamedTuple):
    """One forward: a candidate and the index of the document to evaluate it on."""

    candidate: Candidate
    document: int


@dataclass(frozen=True)
class Ask:
    """Candidates that an algorithm asks to have measured.

    Attributes:
        candidates: at least one; candidates that were measured before cost nothing.
        keep: number of best candidates that the algorithm needs measured on all documents. Racing may drop the others
            after fewer documents.
    """

    candidates: tuple[Candidate, ...]
    keep: int


@dataclass(frozen=True)
class Measured:
    """Measurement of one candidate.

    Attributes:
        candidate: the candidate.
        objective: nats per token, to be minimised; infinite if a loss is NaN or infinite.
        documents: number of documents it was measured on, counted from the first.
    """

    candidate: Candidate
    objective: float
    documents: int

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: more documents first, because objectives on fewer documents are noisier."""
        return -self.documents, self.objective


Algorithm = Callable[[Space, Sequence[Candidate], np.random.Generator], Generator[Ask, list[Measured], None]]
"""Function from a search space, initial candidates and a random generator to the generator of its asks."""


class Evaluator(Protocol):
    """Computes losses of candidates on documents. All ranks make the same calls and get the same results."""

    @property
    def n_documents(self) -> int:
        """Number of documents that a candidate is measured on."""

    def losses(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, float]]:
        """Yield each job with its loss in nats per token, as it completes; a NaN loss becomes infinite."""

    def objective(self, losses: Sequence[float]) -> float:
        """Objective from the losses of the first ``len(losses)`` documents, in nats per token."""


MOST_TRIES = 100
"""Maximum number of attempts per new candidate; a small space may contain no new candidate."""


@dataclass(frozen=True)
class EvolutionSettings:
    """Settings of the evolutionary search.

    Attributes:
        population: number of candidates in the first generation.
        parents: number of best candidates from which each generation is made.
        mutations, crossovers: number of new candidates per generation.
        mutation_probability: probability that a mutation redraws a factor or n̂, and that a crossover takes it from the
            second parent.
        iterations: number of generations after the first.
    """

    population: int = 64
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    mutation_probability: float = 0.3
    iterations: int = 40


def mutate(space: Space, parent: Candidate, probability: float, random: np.random.Generator) -> Candidate:
    """A copy of the parent with some factors redrawn, each between its neighbours, so that factors stay ascending.

    The critical pair stays, and the factors before it are derived anew.

    Args:
        space: search space of the parent.
        parent: candidate to mutate.
        probability: probability of redrawing each factor, and n̂.
        random: random generator.
    """
    levels, first = space.levels_of(parent), parent.critical_pair
    for pair in range(first, space.pairs):
        if random.random() < probability:
            # Between its neighbours as mutated so far, so that every mutant is ascending without repair.
            low = levels[pair - 1] if pair > first else space.lowest
            high = levels[pair + 1] if pair + 1 < space.pairs else space.levels - 1
            levels[pair] = int(random.integers(low, high + 1))
    tokens = parent.start_tokens
    if len(space.start_tokens) > 1 and random.random() < probability:
        tokens = int(random.choice(space.start_tokens))
    return space.of_levels(levels, tokens, first)


def crossover(
    space: Space, first: Candidate, second: Candidate, probability: float, random: np.random.Generator
) -> Candidate | None:
    """The first parent with some factors taken from the second; None if the result does not ascend.

    Parents with different critical pairs exchange only factors that are free in both, from the later of the two pairs
    on. The child has the critical pair of the first parent, and the factors before it are derived anew.

    Args:
        space: search space of both parents.
        first, second: parents.
        probability: probability of taking each factor, and n̂, from the second parent.
        random: random generator.
    """
    # Drawn in one call whatever the outcome: the stream of random numbers then depends on the seed alone.
    from_second = random.random(space.pairs + 1) < probability
    from_second[: max(first.critical_pair, second.critical_pair)] = False
    pairs = zip(first.rescale_factors, second.rescale_factors, from_second[:-1], strict=True)
    tokens = second.start_tokens if from_second[-1] else first.start_tokens
    factors = tuple(b if taken else a for a, b, taken in pairs)
    child = with_factors_below(factors, tokens, first.critical_pair)
    return child if space.contains(child) else None


def evolve(settings: EvolutionSettings | None = None) -> Algorithm:
    """Evolutionary search; with the paper's settings if ``settings`` is None."""
    chosen = settings or EvolutionSettings()

    def run(
        space: Space, seeds: Sequence[Candidate], random: np.random.Generator
    ) -> Generator[Ask, list[Measured], None]:
        seen: set[Candidate] = set()

        def mutant() -> Candidate:
            return mutate(space, _one_of(parents, random), chosen.mutation_probability, random)

        def child() -> Candidate:
            first, second = _one_of(parents, random), _one_of(parents, random)
            # A crossover can break the order of the factors; a mutant then takes its place in the generation.
            return crossover(space, first, second, chosen.mutation_probability, random) or mutant()

        parents = list(seeds)
        # Different baselines may round to the same grid point; _new leaves repeats out.
        first = _new(seen, len(seeds), iter(seeds).__next__)
        first += _new(seen, chosen.population - len(first), mutant)
        measured = yield Ask(tuple(first), chosen.parents)
        for _ in range(chosen.iterations):
            measured = sorted(measured, key=lambda each: each.rank)[: chosen.parents]
            parents = [each.candidate for each in measured]
            offspring = _new(seen, chosen.mutations, mutant) + _new(seen, chosen.crossovers, child)
            if not offspring:
                return
            # Parents are asked for again: their losses are known and free, and racing needs them in the ranking.
            measured = yield Ask((*parents, *offspring), chosen.parents)

    return run


def _one_of(parents: Sequence[Candidate], random: np.random.Generator) -> Candidate:
    return parents[int(random.integers(len(parents)))]


def _new(seen: set[Candidate], count: int, make: Callable[[], Candidate]) -> list[Candidate]:
    """Up to ``count`` candidates that are not in ``seen``; they are added to it."""
    found: list[Candidate] = []
    for _ in range(MOST_TRIES * max(count, 0)):
        if len(found) == count:
            break
        try:
            candidate = make()
        # From a list of seeds that is used up; inside a generator it would become a RuntimeError (PEP 479).
        except StopIteration:
            break
        if candidate not in seen:
            seen.add(candidate)
            found.append(candidate)
    return found


MIN_STD = 0.005
"""Standard deviation of log factors below which a run stops: half a grid step at a factor of 1."""
PATIENCE = 3
"""Consecutive generations with few new candidates that end a run, and restarts with none that end the search."""
TOKENS_SCALE = 20.0
"""Steps in the list of start-token counts per unit of the search coordinate, where a unit is a factor of e."""


@dataclass(frozen=True)
class CovarianceSettings:
    """Settings of the CMA-ES search.

    Attributes:
        knots: number of knots of the first run. Each restart doubles it, up to one per pair; then it starts over.
        sigma: initial standard deviation of the offsets to log factors in the first run; 0.2 is about 20 % of a factor.
        keep: number of best candidates of a generation that racing measures on all documents.
    """

    knots: int = 4
    sigma: float = 0.2
    keep: int = 1


def covariance(settings: CovarianceSettings | None = None) -> Algorithm:
    """CMA-ES search; with the settings that did best in our measurements if ``settings`` is None."""
    chosen = settings or CovarianceSettings()

    def run(
        space: Space, seeds: Sequence[Candidate], random: np.random.Generator
    ) -> Generator[Ask, list[Measured], None]:
        known = _Known()
        # The loop has measured the seeds already, so this only tells the algorithm their objectives.
        yield from known.ask(tuple(seeds), len(seeds))
        knots, sigma, idle = min(chosen.knots, space.pairs), chosen.sigma, 0
        while idle < PATIENCE:
            before = len(known.measured)
            yield from _descend(space, known, knots, sigma, chosen.keep, random)
            idle = 0 if len(known.measured) > before else idle + 1
            if knots < space.pairs:
                # From coarse to fine: with twice the knots each one shapes fewer pairs, so smaller moves suffice.
                knots, sigma = min(2 * knots, space.pairs), chosen.sigma / 2
            else:
                # The last run moved every pair on its own: start over with few knots and a wider spread.
                knots, sigma = min(chosen.knots, space.pairs), 2 * chosen.sigma

    return run


class _Known:
    """All measurements so far."""

    def __init__(self) -> None:
        self.measured: dict[Candidate, Measured] = {}

    @property
    def best(self) -> Candidate:
        return min(self.measured.values(), key=lambda each: each.rank).candidate

    def ask(
        self, candidates: Sequence[Candidate], keep: int
    ) -> Generator[Ask, list[Measured], list[Measured]]:
        """Ask for candidates, unless all have been measured already."""
        if any(candidate not in self.measured for candidate in candidates):
            for measured in (yield Ask(tuple(candidates), keep)):
                self.measured[measured.candidate] = measured
        return [self.measured[candidate] for candidate in candidates]


def _descend(
    space: Space, known: _Known, knots: int, sigma: float, keep: int, random: np.random.Generator
) -> Generator[Ask, list[Measured], None]:
    """One CMA-ES run from the best candidate so far, until it converges."""
    size = knots + (len(space.start_tokens) > 1)
    decode = _decoder(space, known.best, knots)
    # The package does not support one dimension; the decoder ignores a second one.
    strategy = _strategy(max(size, 2), sigma, random)
    stale = 0
    while stale < PATIENCE and not strategy.stop() and strategy.sigma * max(strategy.D) > MIN_STD:
        points = strategy.ask()
        candidates = [decode(point) for point in points]
        new = sum(candidate not in known.measured for candidate in set(candidates))
        # On a grid, a converging run proposes the same candidates again long before sigma is small.
        stale = 0 if 4 * new > len(points) else stale + 1
        measured = yield from known.ask(candidates, keep)
        # CMA-ES uses only the order of the values. After racing, objectives cover different numbers of documents and
        # cannot be compared directly, but ranks can.
        ranks = sorted({each.rank for each in measured})
        strategy.tell(points, [float(ranks.index(each.rank)) for each in measured])


def _decoder(space: Space, start: Candidate, knots: int) -> Callable[[NDArray[np.float64]], Candidate]:
    """Map search coordinates to candidates.

    Args:
        space: search space.
        start: candidate at the origin of the coordinates.
        knots: number of knots.

    Returns:
        A function from coordinates ``[knots]``, or ``[knots + 1]`` with n̂ last if the space has several start-token
        counts, to a candidate of the space.
    """
    pairs = np.arange(space.pairs)
    places = np.linspace(0, space.pairs - 1, knots)
    # In logarithms, so that a step changes factors of 1.1 and of 30 by the same ratio.
    logs = np.log(start.rescale_factors)
    index = space.start_tokens.index(start.start_tokens)

    def decode(point: NDArray[np.float64]) -> Candidate:
        moved = logs + np.interp(pairs, places, point[:knots])
        # Factors must ascend. The mean of the smallest ascending bound above and the largest below moves both sides of
        # a descent equally; either bound alone would bias the factors upwards or downwards.
        above, below = np.maximum.accumulate(moved), np.minimum.accumulate(moved[::-1])[::-1]
        factors = np.exp(np.clip((above + below) / 2, 0.0, math.log(space.largest)))
        chosen = index
        if len(space.start_tokens) > 1:
            chosen = round(min(max(index + TOKENS_SCALE * point[knots], 0), len(space.start_tokens) - 1))
        return space.nearest(factors.tolist(), space.start_tokens[chosen])

    return decode


def _strategy(size: int, sigma: float, random: np.random.Generator) -> Any:
    """CMA-ES of the package ``cma``, without output or files, and with all random numbers from ``random``."""
    # Imported here because only cma-es needs the package.
    import cma

    options = {
        "randn": lambda many, dimension: random.standard_normal((many, dimension)),
        # With NaN the package does not seed numpy's global generator.
        "seed": math.nan,
        "verbose": -9,
        "verb_log": 0,
        "verb_disp": 0,
        # Disable stopping criteria on objective values, because the values here are ranks; _descend has its own.
        "tolfun": 0,
        "tolfunhist": 0,
        "tolflatfitness": math.inf,
        "tolstagnation": math.inf,
    }
    return cma.CMAEvolutionStrategy(np.zeros(size), sigma, options)


def algorithm_named(name: str) -> Algorithm:
    """The algorithm with this name, with its default settings.

    Raises:
        RopewalkError: if the name is not in :data:`~ropewalk.search.settings.ALGORITHMS`.
    """
    if name not in ALGORITHMS:
        raise RopewalkError(f"unknown search algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}")
    return covariance() if name == "cma-es" else evolve()
