"""Search space of rescale factors: a grid, factors that do not decrease from the fastest pair on, and start tokens.

In LongRoPE's space every pair has a factor of its own. In LongRoPE2's, only the pairs from a *critical pair* ``c`` on
do, and each candidate has its own ``c``; those below follow from the factor of the critical pair: ``λ_i = λ_c^(i/c)``.

Source: Ding et al., LongRoPE, arXiv:2402.13753, section 3.2 and table 4; Shang et al., LongRoPE2, arXiv:2502.20082,
section 3.3 and algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    import numpy as np

STEPS_PER_UNIT = 100
"""Grid points per unit: factors are multiples of 0.01."""
SMALLEST = 1.0
"""Lower bound of the factors: below 1 a pair would rotate faster than in training."""
CAP = 1.25
"""Default upper bound of the factors, as a multiple of target length / original length."""
CRITICAL_CAP = 2.0
"""The same in LongRoPE2's space."""
SpaceName = Literal["all-pairs", "critical-dimension"]
ALL_PAIRS: SpaceName = "all-pairs"
CRITICAL_DIMENSION: SpaceName = "critical-dimension"
START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""Start-token counts n̂ of the paper's search."""


@dataclass(frozen=True)
class Candidate:
    """One point of the search space.

    Attributes:
        rescale_factors: ``[pairs]`` λ, fastest pair first; from the critical pair on multiples of 0.01.
        start_tokens: n̂, number of initial tokens whose RoPE angles stay unscaled.
        critical_pair: ``c``, counted from 0: the factors of the pairs before it are ``λ_c^(i/c)``. With 0 there are
            none.
    """

    rescale_factors: tuple[float, ...]
    start_tokens: int = 0
    critical_pair: int = 0


def factors_below(factor: float, critical_pair: int) -> tuple[float, ...]:
    """Factors ``λ_i = factor^(i/c)`` of the pairs before the critical pair ``c``, not rounded to the grid.

    They are those of NTK with the base that gives the critical pair its factor.
    """
    return tuple(factor ** (pair / critical_pair) for pair in range(critical_pair))


@dataclass(frozen=True)
class Space:
    """Set of all candidates.

    Attributes:
        pairs: number of rotary pairs per head.
        largest: upper bound of the factors; rounded down to the grid.
        start_tokens: allowed start-token counts n̂, ascending. A transformers config can store only ``(0,)``.
        smallest: lower bound of the factors from the critical pair on; rounded up to the grid.
        critical_pairs: allowed critical pairs, ascending; ``(0,)`` if every pair has a factor of its own.

    Raises:
        RopewalkError: if an attribute is out of range.
    """

    pairs: int
    largest: float
    start_tokens: tuple[int, ...] = (0,)
    smallest: float = SMALLEST
    critical_pairs: tuple[int, ...] = (0,)

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
        if self.has_critical_pairs and not self._whole_factors():
            raise RopewalkError(
                f"the search space critical-dimension starts from whole factors between {self.smallest:.6g} (target "
                f"length / original length) and the largest factor {self.largest:.6g}, but there are none; raise "
                f"largest (--largest) to {math.ceil(self.smallest)} or more"
            )

    @property
    def has_critical_pairs(self) -> bool:
        """Whether some pairs follow from a critical pair, as in LongRoPE2."""
        return self.critical_pairs != (0,)

    @property
    def levels(self) -> int:
        """Number of grid points from 1 to the largest factor."""
        # 1.25 · s can fall just below a grid value in float64; the tolerance undoes that before the floor.
        return math.floor((self.largest - SMALLEST) * STEPS_PER_UNIT + 1e-6) + 1

    @property
    def lowest(self) -> int:
        """Smallest level of a factor from the critical pair on."""
        return math.ceil((self.smallest - SMALLEST) * STEPS_PER_UNIT - 1e-6)

    def value(self, level: int) -> float:
        """Factor of a level from 0 to ``levels - 1``, rounded to two decimals so that equal factors compare equal."""
        return round(SMALLEST + level / STEPS_PER_UNIT, 2)

    def level(self, factor: float) -> int:
        """Level nearest to a factor, which may be out of bounds."""
        return min(max(round((factor - SMALLEST) * STEPS_PER_UNIT), self.lowest), self.levels - 1)

    def of_levels(self, levels: Sequence[int], start_tokens: int = 0, critical_pair: int = 0) -> Candidate:
        """Candidate with these levels, which from the critical pair on must be in range and not decrease.

        The levels before the critical pair have no effect.
        """
        return with_factors_below(tuple(map(self.value, levels)), start_tokens, critical_pair)

    def levels_of(self, candidate: Candidate) -> list[int]:
        """Levels of a candidate's factors; before its critical pair, factors lie between levels."""
        return [self.level(factor) for factor in candidate.rescale_factors]

    def start(self, random: np.random.Generator) -> list[Candidate]:
        """One candidate for each critical pair, with one whole factor for all pairs from it on, drawn at random."""
        whole = self._whole_factors()
        drawn = (self.level(whole[int(random.integers(len(whole)))]) for _ in self.critical_pairs)
        return [
            self.of_levels([level] * self.pairs, critical_pair=pair)
            for pair, level in zip(self.critical_pairs, drawn, strict=True)
        ]

    def _whole_factors(self) -> range:
        # With a tolerance, because a bound that stands for a whole number may fall just beside it in float64.
        return range(math.ceil(self.smallest - 1e-9), math.floor(self.largest + 1e-9) + 1)

    def nearest(self, factors: Sequence[float], start_tokens: int = 0) -> Candidate:
        """Candidate near arbitrary factors: each rounded to the grid, then raised to its predecessor if it is smaller.

        Only for a space in which every pair has a factor of its own.

        Args:
            factors: ``[pairs]`` finite factors.
            start_tokens: any count; replaced by the nearest allowed one, on a tie by the smaller.

        Raises:
            RopewalkError: if the number of factors is not ``pairs``, or a factor is NaN or infinite.
        """
        assert not self.has_critical_pairs
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
        """Whether a candidate lies in this space: grid, bounds, order, start tokens and critical pair."""
        factors, pair = candidate.rescale_factors, candidate.critical_pair
        return (
            len(factors) == self.pairs
            and candidate.start_tokens in self.start_tokens
            and pair in self.critical_pairs
            and all(map(math.isfinite, factors))
            and all(b >= a for a, b in pairwise(factors))
            # Equal to the last bit, because value() and factors_below() are the only sources of factors.
            and all(factor == self.value(self.level(factor)) for factor in factors[pair:])
            and factors[:pair] == factors_below(factors[pair], pair)
        )


def with_factors_below(factors: tuple[float, ...], start_tokens: int, critical_pair: int) -> Candidate:
    """Candidate with these factors from the critical pair on, and those before it derived from its factor."""
    below = factors_below(factors[critical_pair], critical_pair)
    return Candidate(below + factors[critical_pair:], start_tokens, critical_pair)
