"""The base that ropewalk sets for a longer context where nobody names one, by which rule, and why.

Two rules are compared, and the larger base wins:

- the critical-dimension law keeps as many pairs turning a whole period as the checkpoint's training did, so it follows
  from the checkpoint;
- the length floor is the smallest base with ``B(m) ≥ 0`` up to the target length for 128 rotated dimensions, so it
  follows from the length alone. It is the paper's lower bound, and it is taken for every rotary dimension, because
  published models of other widths took the bases of their siblings with 128.

``docs/theory.md`` compares this choice and others with what published models took (``scripts/published_bases.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ropewalk.rope.theory.bases import smallest_base
from ropewalk.rope.theory.scaling import scaled_theta

CRITICAL_DIMENSION, LENGTH_FLOOR = "critical-dimension", "length-floor"
FLOOR_DIM = 128
"""rotary_dim of the published lower bounds, and of nearly all models whose long-context bases are published."""
FLOOR_LIMIT = 2**20
"""Tokens up to which the floor is searched; beyond, the floor of this length is taken, which is no larger."""

KNOWN_FLOORS: Mapping[int, float] = MappingProxyType(
    {
        1024: 4293.43757,
        2048: 11587.2444,
        4096: 26952.3393,
        8192: 83763.8411,
        16384: 231643.647,
        32768: 629978.263,
        65536: 2090179.68,
        131072: 4869104.38,
        262144: 23662397.1,
        524288: 58496173.9,
        1048576: 65374955.2,
    }
)
"""The infima of ``docs/bases.json``, so that the usual lengths need no search; a test holds them equal."""


@dataclass(frozen=True)
class Recommendation:
    """A base for a longer context.

    Attributes:
        rope_theta: the base.
        rule: ``critical-dimension`` or ``length-floor``, whichever asks for more.
        reason: why, one sentence.
        law: the base of the critical-dimension law.
        floor: the length floor, or that of the next known length where the law covers even that.
    """

    rope_theta: float
    rule: str
    reason: str
    law: float
    floor: float


def recommended_theta(rope_theta: float, trained_length: int, target_length: int) -> Recommendation:
    """The larger of the critical-dimension law's base and the length floor.

    Args:
        rope_theta: RoPE base of the checkpoint, > 1, dimensionless.
        trained_length: tokens the checkpoint was trained for, at least 7.
        target_length: tokens to extend to, at least ``trained_length``.

    Raises:
        RopewalkError: if an argument is out of range; the message gives its value.

    Example:
        >>> recommended_theta(5e5, 8192, 262144).rule
        'critical-dimension'
        >>> recommended_theta(1e4, 4096, 32768).rule
        'length-floor'
    """
    law = scaled_theta(rope_theta, trained_length, target_length)
    known = min((length for length in KNOWN_FLOORS if length >= target_length), default=FLOOR_LIMIT)
    # A base that covers the next known length covers this one: no search.
    length = known if law >= KNOWN_FLOORS[known] else min(target_length, FLOOR_LIMIT)
    floor = length_floor(length)
    beyond = ", the longest that is looked at," if length < target_length else ""
    if law >= floor:
        need = "even " if length > target_length else ""
        reason = (
            "the critical-dimension law, which keeps as many pairs turning a whole period as in training, gives "
            f"{law:,.0f}, and {need}{length:,} tokens{beyond} need at least {floor:,.0f}"
        )
        return Recommendation(law, CRITICAL_DIMENSION, reason, law, floor)
    reason = (
        f"{floor:,.0f} is the smallest base that keeps similar tokens attractive (B(m) ≥ 0) up to "
        f"{length:,} tokens{beyond} with {FLOOR_DIM} rotated dimensions; the critical-dimension law "
        f"gives less, {law:,.0f}"
    )
    return Recommendation(floor, LENGTH_FLOOR, reason, law, floor)


@lru_cache(maxsize=256)
def length_floor(length: int) -> float:
    """The smallest base with ``B(m) ≥ 0`` for all ``m`` up to a length, for 128 rotated dimensions.

    The usual lengths are known; for another one up to :data:`FLOOR_LIMIT` the search takes about a second.

    Args:
        length: tokens, at least 1.

    Source: Men et al., arXiv:2405.14591, equation 7; the infimum, where the published table has grid points.
    """
    length = min(length, FLOOR_LIMIT)
    if length in KNOWN_FLOORS:
        return KNOWN_FLOORS[length]
    below = max((base for known, base in KNOWN_FLOORS.items() if known < length), default=1.0)
    found = smallest_base(length, FLOOR_DIM, at_least=below)
    assert found is not None, "the floor of 1M tokens lies far below the highest ceiling"
    return found
