"""Rules that set a base for a longer context, the recommended rule, and the number of stages.

The recommended base is the larger of two bases:

- The critical-dimension law keeps as many pairs completing a whole period as in the checkpoint's training, so it
  follows from the checkpoint.
- The length floor is the smallest base with ``B(m) ≥ 0`` up to the target length for 128 rotated dimensions, so it
  follows from the length alone. It is the paper's lower bound. It applies to every rotary dimension, because published
  models with another head dimension took the bases of their siblings with 128.

If the law asks for more than anyone has published and the present base already covers the target, the present base is
kept: checkpoints that were pretrained with 1e9 or 1e11 (Mistral Small, Falcon-H1) need no larger one.

``docs/theory.md`` compares this choice and others with what published models took (``scripts/published_bases.py``).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_rotary_dim, check_theta
from ropewalk.rope.theory.bases import (
    HIGHEST_CEILING,
    SAFE_CEILING,
    Progress,
    rounded_up,
    safe_base,
    smallest_base,
)
from ropewalk.rope.theory.margin import context_bound, inv_freq_of_base
from ropewalk.rope.theory.published import LARGEST_PUBLISHED, SCHEDULES
from ropewalk.rope.theory.scaling import ntk_theta, scaled_theta

CRITICAL_DIMENSION, LENGTH_FLOOR = "critical-dimension", "length-floor"
CURRENT = "current"
"""The name for no change, which is not a rule for a base."""
RECOMMENDED, NTK, LOWER_BOUND, SCHEDULE = "recommended", "ntk", "lower-bound", "schedule:"
NTK_AT = "ntk-rcd="
"""Begin of the rule whose name ends with a critical pair, as in ``ntk-rcd=30``."""
RULES = (
    RECOMMENDED,
    CRITICAL_DIMENSION,
    LENGTH_FLOOR,
    NTK,
    LOWER_BOUND,
    *(SCHEDULE + name for name in SCHEDULES),
)
"""Every rule that sets a base, besides ``ntk-rcd=PAIR``."""


def theta_by_rule(
    rule: str,
    rotary_dim: int,
    rope_theta: float,
    trained_length: int,
    target_length: int,
    ceiling: float | None = None,
    progress: Progress | None = None,
) -> float:
    """The base that a rule sets for a longer context.

    ================== ======================================================================================
    rule               base
    ================== ======================================================================================
    recommended        the larger of the next two: :func:`~ropewalk.rope.theory.recommended_theta`
    critical-dimension ``b^(ln(T'/2π) / ln(T/2π))``: as many dimensions complete a period as before
    length-floor       the smallest base with a similarity margin of at least 0 up to ``T'`` for 128 rotated dimensions;
                       ``b`` itself if that is larger
    ntk                ``b·(T'/T)^(d/(d-2))``: the slowest pair turns as far over ``T'`` as it did over ``T``
    ntk-rcd=PAIR       ``b·(T'/T)^(d/(2·PAIR))``: the pair with this index, counted from 0, turns as far over ``T'`` as
                       it did over ``T``
    lower-bound        the safe base of ``T'``: from there to the ceiling every base has a similarity margin of at
                       least 0 up to ``T'``; rounded up to four digits; ``b`` itself if that is larger
    schedule:NAME      the base that a published model used for the shortest context of at least ``T'``
    ================== ======================================================================================

    Args:
        rule: one of :data:`RULES`, or ``ntk-rcd=PAIR``.
        rotary_dim: rotated dimensions of a head.
        rope_theta: ``b``, the checkpoint's base.
        trained_length: ``T``, tokens.
        target_length: ``T'``, tokens, at least ``trained_length``.
        ceiling: for lower-bound, the largest base to examine; None for 1e12, or 1e15 if no base up to 1e11 is found.
        progress: for lower-bound, which takes seconds.

    Raises:
        RopewalkError: if the rule is unknown or gives no base; the message says which other rule does.
    """
    check_rule(rule)
    check_rotary_dim(rotary_dim)
    check_theta(rope_theta)
    if not 1 <= trained_length <= target_length:
        raise RopewalkError(
            f"the target length must be at least the trained length of {trained_length} tokens, got {target_length}"
        )
    if rule == RECOMMENDED:
        return recommended_theta(rope_theta, trained_length, target_length, rotary_dim).rope_theta
    if rule == LENGTH_FLOOR:
        # The floor is a lower bound, so a base that is above it already stays.
        return max(rope_theta, length_floor(target_length))
    if rule == CRITICAL_DIMENSION:
        return scaled_theta(rope_theta, trained_length, target_length)
    if rule == NTK:
        return ntk_theta(rotary_dim, rope_theta, target_length / trained_length)
    if rule.startswith(NTK_AT):
        return ntk_theta(rotary_dim, rope_theta, target_length / trained_length, pair_of(rule))
    if rule == LOWER_BOUND:
        # Every larger base is equally good, so round up to a number that people can copy.
        return max(rope_theta, rounded_up(_safe(target_length, rotary_dim, ceiling, progress), 4))
    return SCHEDULES[rule.removeprefix(SCHEDULE)].theta(target_length)


def check_rule(rule: str) -> None:
    """Raise for an unknown rule; the message names the closest known one."""
    if rule.startswith(NTK_AT):
        pair_of(rule)
    elif rule not in RULES:
        near = difflib.get_close_matches(rule, RULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RULES)}"
        raise RopewalkError(f"unknown rule {rule!r}; {hint}")


def pair_of(rule: str) -> int:
    """The critical pair at the end of a name such as ``ntk-rcd=30``."""
    name, _, text = rule.partition("=")
    # isdigit() alone accepts digits such as ², which int() refuses.
    if not (text.isascii() and text.isdigit()):
        raise RopewalkError(
            f"{rule}: {text!r} is not the index of a rotary pair, counted from 0; write, for example, {name}=30"
        )
    return int(text)


def _safe(length: int, rotary_dim: int, ceiling: float | None, progress: Progress | None) -> float:
    """A safe base with a decade of feasible bases above it, unless the caller sets the ceiling."""
    for highest in (SAFE_CEILING, HIGHEST_CEILING) if ceiling is None else (ceiling,):
        safe = safe_base(length, rotary_dim, highest, progress)
        if safe is not None and (ceiling is not None or safe <= highest / 10):
            return safe
    raise RopewalkError(
        f"no base up to {highest:g} is large enough for {length} tokens with rotary_dim {rotary_dim}"
        + ("; choose the rule critical-dimension" if ceiling is None else "; raise the ceiling")
    )


FLOOR_DIM = 128
"""rotary_dim of the published lower bounds, and of nearly all models whose long-context bases are published."""
FLOOR_LIMIT = 2**20
"""Largest length in tokens for which the floor is searched; longer targets use this length's floor, a lower bound."""

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
"""The infima of ``docs/bases.json``, so that common lengths need no search; a test checks that they agree."""


@dataclass(frozen=True)
class Recommendation:
    """A base for a longer context.

    Attributes:
        rope_theta: the base.
        rule: ``critical-dimension`` or ``length-floor``, whichever gives more; ``current`` if the base is kept.
        reason: the reason, in one sentence.
        law: the base of the critical-dimension law.
        floor: the length floor, or that of the next known length if the law exceeds even that.
    """

    rope_theta: float
    rule: str
    reason: str
    law: float
    floor: float


def recommended_theta(
    rope_theta: float, trained_length: int, target_length: int, rotary_dim: int = FLOOR_DIM
) -> Recommendation:
    """The larger of the critical-dimension law's base and the length floor, with one exception.

    The present base is kept if its own context bound covers the target and the law asks for more than
    :data:`~ropewalk.rope.theory.published.LARGEST_PUBLISHED`.

    Args:
        rope_theta: RoPE base of the checkpoint, > 1, dimensionless.
        trained_length: tokens the checkpoint was trained for, at least 7.
        target_length: tokens to extend to, at least ``trained_length``.
        rotary_dim: rotated dimensions of a head, for the present base's bound.

    Raises:
        RopewalkError: if an argument is out of range; the message gives its value.

    Example:
        >>> recommended_theta(5e5, 8192, 262144).rule
        'critical-dimension'
        >>> recommended_theta(1e4, 4096, 32768).rule
        'length-floor'
    """
    # The law depends on the checkpoint; the floor on the length alone, so that it can be looked up.
    law = scaled_theta(rope_theta, trained_length, target_length)
    known = min((length for length in KNOWN_FLOORS if length >= target_length), default=FLOOR_LIMIT)
    # A base above the floor of the next known length is above this length's floor too, so no search is needed.
    length = known if law >= KNOWN_FLOORS[known] else min(target_length, FLOOR_LIMIT)
    floor = length_floor(length)
    beyond = ", the longest length examined," if length < target_length else ""
    if law > max(floor, LARGEST_PUBLISHED) and covers(rotary_dim, rope_theta, target_length):
        reason = (
            f"with the present base, similar tokens get at least as much attention as random ones at every distance up "
            f"to {target_length:,} tokens; the rule critical-dimension would give {law:,.0f}, and no published model "
            f"was extended with more than {LARGEST_PUBLISHED:,.0f}"
        )
        return Recommendation(rope_theta, CURRENT, reason, law, floor)
    if law >= floor:
        even, least = ("even ", "only") if length > target_length else ("", "at least")
        reason = (
            f"with base {law:,.0f}, as many rotary pairs complete a turn within the target length as did within the "
            f"trained length (rule critical-dimension); {even}{length:,} tokens{beyond} need a base of {least} "
            f"{floor:,.0f} (rule length-floor, {FLOOR_DIM} rotated dimensions)"
        )
        return Recommendation(law, CRITICAL_DIMENSION, reason, law, floor)
    reason = (
        f"{floor:,.0f} is the smallest base with which similar tokens get at least as much attention as random ones at "
        f"every distance up to {length:,} tokens{beyond} (rule length-floor, {FLOOR_DIM} rotated dimensions); the rule "
        f"critical-dimension gives less, {law:,.0f}"
    )
    return Recommendation(floor, LENGTH_FLOOR, reason, law, floor)


def covers(rotary_dim: int, rope_theta: float, length: int) -> bool:
    """Whether the context bound of a base is at least a length."""
    return context_bound(inv_freq_of_base(rotary_dim, rope_theta), limit=length) is None


@lru_cache(maxsize=256)
def length_floor(length: int) -> float:
    """The smallest base with ``B(m) ≥ 0`` for all ``m`` up to a length, for 128 rotated dimensions.

    The usual lengths are known; for another one up to :data:`FLOOR_LIMIT` the search takes two to ten seconds.

    Args:
        length: tokens, at least 1.

    Source: Men et al., arXiv:2405.14591, equation 7; the infimum, where the published table has grid points.
    """
    length = min(length, FLOOR_LIMIT)
    if length in KNOWN_FLOORS:
        return KNOWN_FLOORS[length]
    # The floor grows with the length, so that of a shorter length is a lower bound.
    below = max((base for known, base in KNOWN_FLOORS.items() if known < length), default=1.0)
    found = smallest_base(length, FLOOR_DIM, at_least=below)
    assert found is not None, "the floor of 1M tokens lies far below the highest ceiling"
    return found


LEAST_FACTOR, MOST_FACTOR = 4, 8
"""Smallest and largest ratio between the lengths of two consecutive stages, as in published curricula."""


def meant_thousands(trained_length: int, target_length: int) -> str:
    """The question whether a target of 128 tokens was to be 128k, to end a sentence with; empty if it cannot be."""
    if target_length < trained_length < 1024 * target_length:
        return f"; did you mean {target_length}k?"
    return ""


def stage_contexts(trained_length: int, target_length: int) -> list[int]:
    """Context lengths of the stages from ``trained_length`` to ``target_length``, ending with the latter.

    Uses as few stages as factors of at most 8 allow, larger factors first, and each at least 4 if that number of
    stages allows it (12 times is 4 and then 3). Intermediate contexts are the trained length times a power of two.

    Args:
        trained_length, target_length: tokens; the second is larger.

    Example:
        >>> stage_contexts(8192, 1048576)
        [65536, 262144, 1048576]

    Source: Gradient went 8k → 65k → 262k → 1048k (8x, 4x, 4x); LWM and AnchorContext take 2x to 4x.
    """
    if not 1 <= trained_length < target_length:
        raise RopewalkError(
            f"the target length must be above the trained length of {trained_length} tokens, got {target_length}"
            f"{meant_thousands(trained_length, target_length)}"
        )
    contexts = []
    length = trained_length
    while length * MOST_FACTOR < target_length:
        # Stages still needed after this one; 1e-9 keeps an exact power of 8 from rounding up to one stage more.
        left = math.ceil(math.log(target_length / length, MOST_FACTOR) - 1e-9) - 1
        fitting = [
            factor
            for factor in (MOST_FACTOR, LEAST_FACTOR)
            if LEAST_FACTOR**left * factor * length <= target_length <= MOST_FACTOR**left * factor * length
        ]
        # Between 8 and 16 times, one of two stages must be short, but no shorter than necessary.
        length *= fitting[0] if fitting else LEAST_FACTOR
        contexts.append(length)
    return [*contexts, target_length]
