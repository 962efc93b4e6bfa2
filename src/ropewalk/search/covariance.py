"""Search by covariance matrix adaptation: what a few knots add to the log factors of the best candidate so far.

Between knots the addition is linear in the pair's number, so that neighbouring pairs, which matter alike, move
together; the shape that a seed has between its knots stays. Each restart has more knots, down to one a pair.

Source: Hansen, The CMA evolution strategy: a tutorial, arXiv:1604.00772, as the package ``cma`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.search.algorithm import Algorithm, Ask, Measured
from ropewalk.search.space import Candidate, Space

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
