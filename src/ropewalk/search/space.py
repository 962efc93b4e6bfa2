"""Search space of rescale factors: a grid, factors that do not decrease from the fastest pair on, and start tokens.

Source: Ding et al., LongRoPE, arXiv:2402.13753, section 3.2 and table 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ropewalk.errors import RopewalkError

STEPS_PER_UNIT = 100
"""Grid points per unit: factors are multiples of 0.01."""
SMALLEST = 1.0
"""Lower bound of the factors: below 1 a pair would rotate faster than in training."""
CAP = 1.25
"""Default upper bound of the factors, as a multiple of target length / original length."""
START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""Start-token counts n̂ of the paper's search."""


@dataclass(frozen=True)
class Candidate:
    """One point of the search space.

    Attributes:
        rescale_factors: ``[pairs]`` λ, fastest pair first, multiples of 0.01.
        start_tokens: n̂, number of initial tokens whose RoPE angles stay unscaled.
    """

    rescale_factors: tuple[float, ...]
    start_tokens: int = 0


@dataclass(frozen=True)
class Space:
    """Set of all candidates.

    Attributes:
        pairs: number of rotary pairs per head.
        largest: upper bound of the factors; rounded down to the grid.
        start_tokens: allowed start-token counts n̂, ascending. A transformers config can store only ``(0,)``.

    Raises:
        RopewalkError: if an attribute is out of range.
    """

    pairs: int
    largest: float
    start_tokens: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise RopewalkError(f"a search needs at least one rotary pair, got {self.pairs}")
        if not (math.isfinite(self.largest) and self.largest >= SMALLEST):
            raise RopewalkError(
                f"the largest rescale factor must be a finite number, {SMALLEST:g} or more, got {self.largest}"
            )
        tokens = self.start_tokens
        if not tokens or min(tokens) < 0 or any(b <= a for a, b in pairwise(tokens)):
            raise RopewalkError(
                f"start_tokens must be one or more numbers in ascending order, each 0 or more, got {list(tokens)}"
            )

    @property
    def levels(self) -> int:
        """Number of values that a factor can have."""
        # 1.25 · s can fall just below a grid value in float64; the tolerance undoes that before the floor.
        return math.floor((self.largest - SMALLEST) * STEPS_PER_UNIT + 1e-6) + 1

    def value(self, level: int) -> float:
        """Factor of a level from 0 to ``levels - 1``, rounded to two decimals so that equal factors compare equal."""
        return round(SMALLEST + level / STEPS_PER_UNIT, 2)

    def level(self, factor: float) -> int:
        """Level nearest to a factor, which may be out of bounds."""
        return min(max(round((factor - SMALLEST) * STEPS_PER_UNIT), 0), self.levels - 1)

    def of_levels(self, levels: Sequence[int], start_tokens: int = 0) -> Candidate:
        """Candidate with these levels, which must be in range and not decrease."""
        return Candidate(tuple(self.value(level) for level in levels), start_tokens)

    def levels_of(self, candidate: Candidate) -> list[int]:
        """Levels of a candidate's factors."""
        return [self.level(factor) for factor in candidate.rescale_factors]

    def nearest(self, factors: Sequence[float], start_tokens: int = 0) -> Candidate:
        """Candidate near arbitrary factors: each rounded to the grid, then raised to its predecessor if it is smaller.

        Args:
            factors: ``[pairs]`` finite factors.
            start_tokens: any count; replaced by the nearest allowed one, on a tie by the smaller.

        Raises:
            RopewalkError: if the number of factors is not ``pairs``, or a factor is NaN or infinite.
        """
        if len(factors) != self.pairs:
            raise RopewalkError(
                f"the search needs {self.pairs} rescale factors, one per rotary pair, got {len(factors)}"
            )
        if not all(map(math.isfinite, factors)):
            raise RopewalkError(f"rescale factors must be finite numbers, got {list(factors)}")
        levels: list[int] = []
        for factor in factors:
            # Only ascending factors are in the space: one below its neighbour is raised to it.
            levels.append(max(self.level(factor), levels[-1] if levels else 0))
        tokens = min(self.start_tokens, key=lambda each: (abs(each - start_tokens), each))
        return self.of_levels(levels, tokens)

    def contains(self, candidate: Candidate) -> bool:
        """Whether a candidate lies in this space: grid, bounds, order and start tokens."""
        factors = candidate.rescale_factors
        return (
            len(factors) == self.pairs
            and candidate.start_tokens in self.start_tokens
            and all(map(math.isfinite, factors))
            and all(b >= a for a, b in pairwise(factors))
            # Equal to the last bit, because value() is the only source of factors.
            and all(factor == self.value(self.level(factor)) for factor in factors)
        )
