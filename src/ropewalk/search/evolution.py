"""The paper's evolution: mutation and crossover that never leave the space, and the loop of generations.

Source: Ding et al., LongRoPE, arXiv:2402.13753, algorithm 1 and section 3.3; the numbers are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.search.algorithm import Algorithm, Ask, Measured
from ropewalk.search.space import Candidate, Space

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
