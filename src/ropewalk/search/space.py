"""The search space: rescale factors on a grid, non-decreasing from the fastest pair to the slowest, and start tokens.

Source: Ding et al., LongRoPE, arXiv:2402.13753, section 3.2 and table 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ropewalk.errors import RopewalkError

STEPS_PER_UNIT = 100
"""The grid has steps of 0.01."""
SMALLEST = 1.0
CAP = 1.25
"""Largest factor over the ratio of target to original length."""
START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)


@dataclass(frozen=True)
class Candidate:
    """One point of the space; two that are equal are the same point.

    Attributes:
        rescale_factors: ``[pairs]`` λ, the fastest pair first, each a multiple of 0.01.
        start_tokens: n̂, the first positions that keep their angles.
    """

    rescale_factors: tuple[float, ...]
    start_tokens: int = 0


@dataclass(frozen=True)
class Space:
    """Which candidates there are.

    Attributes:
        pairs: rotary pairs of a head.
        largest: no factor is above it; brought down to the grid.
        start_tokens: the n̂ to choose from, ascending; ``(0,)`` for a result that a config can hold.

    Raises:
        RopewalkError: if it would be empty.
    """

    pairs: int
    largest: float
    start_tokens: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise RopewalkError(f"a search needs at least one rotary pair, got {self.pairs}")
        if not (math.isfinite(self.largest) and self.largest >= SMALLEST):
            raise RopewalkError(
                f"the largest rescale factor must be {SMALLEST:g} or more, got {self.largest}"
            )
        tokens = self.start_tokens
        if not tokens or min(tokens) < 0 or any(b <= a for a, b in pairwise(tokens)):
            raise RopewalkError(f"start tokens must be ascending numbers, each 0 or more, got {list(tokens)}")

    @property
    def levels(self) -> int:
        """How many values one factor can have."""
        # 1.25 · s can fall just below a grid value in float64; the tolerance undoes that before the floor.
        return math.floor((self.largest - SMALLEST) * STEPS_PER_UNIT + 1e-6) + 1

    def value(self, level: int) -> float:
        """The factor of a level, 0 to ``levels - 1``: the double nearest to its two decimals."""
        return round(SMALLEST + level / STEPS_PER_UNIT, 2)

    def level(self, factor: float) -> int:
        """The level nearest to any factor."""
        return min(max(round((factor - SMALLEST) * STEPS_PER_UNIT), 0), self.levels - 1)

    def of_levels(self, levels: Sequence[int], start_tokens: int = 0) -> Candidate:
        """The candidate with such levels; they must be in range and ascend."""
        return Candidate(tuple(self.value(level) for level in levels), start_tokens)

    def levels_of(self, candidate: Candidate) -> list[int]:
        """The levels of a candidate's factors."""
        return [self.level(factor) for factor in candidate.rescale_factors]

    def nearest(self, factors: Sequence[float], start_tokens: int = 0) -> Candidate:
        """A candidate near any factors: each put on the grid, none below the one before it.

        Args:
            factors: ``[pairs]``.
            start_tokens: any number; the nearest of the space's, the smaller of two.

        Raises:
            RopewalkError: if there are not as many factors as pairs, or one is no finite number.
        """
        if len(factors) != self.pairs:
            raise RopewalkError(
                f"the search needs {self.pairs} rescale factors, one per rotary pair, got {len(factors)}"
            )
        if not all(map(math.isfinite, factors)):
            raise RopewalkError(f"rescale factors must be finite numbers, got {list(factors)}")
        levels: list[int] = []
        for factor in factors:
            levels.append(max(self.level(factor), levels[-1] if levels else 0))
        tokens = min(self.start_tokens, key=lambda each: (abs(each - start_tokens), each))
        return self.of_levels(levels, tokens)

    def contains(self, candidate: Candidate) -> bool:
        """Whether a candidate is one of this space: grid, bounds, order and start tokens."""
        factors = candidate.rescale_factors
        return (
            len(factors) == self.pairs
            and candidate.start_tokens in self.start_tokens
            and all(map(math.isfinite, factors))
            and all(b >= a for a, b in pairwise(factors))
            and all(factor == self.value(self.level(factor)) for factor in factors)
        )
