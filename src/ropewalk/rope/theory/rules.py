"""A base for a longer context, by the name of the rule that gives it."""

from __future__ import annotations

import difflib

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_ntk_dim, check_rotary_dim, check_theta
from ropewalk.rope.theory.bases import HIGHEST_CEILING, SAFE_CEILING, Progress, rounded_up, safe_base
from ropewalk.rope.theory.recommend import CRITICAL_DIMENSION, LENGTH_FLOOR, length_floor, recommended_theta
from ropewalk.rope.theory.scaling import ntk_theta, scaled_theta
from ropewalk.rope.theory.schedules import SCHEDULES

RECOMMENDED, NTK, LOWER_BOUND, SCHEDULE = "recommended", "ntk", "lower-bound", "schedule:"
RULES = (
    RECOMMENDED,
    CRITICAL_DIMENSION,
    LENGTH_FLOOR,
    NTK,
    LOWER_BOUND,
    *(SCHEDULE + name for name in SCHEDULES),
)
"""Every rule that sets a base."""


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
    length-floor       the smallest base with a similarity margin of 0 or more up to ``T'`` for 128 rotated dimensions;
                       ``b`` itself where that is larger
    ntk                ``b·(T'/T)^(d/(d-2))``: the slowest pair turns as far over ``T'`` as it did over ``T``
    lower-bound        the safe base of ``T'``: from there to the ceiling every base has a similarity margin of
                       0 or more up to ``T'``; rounded up to four digits; ``b`` itself where that is larger
    schedule:NAME      the base that a published model used for the shortest context of at least ``T'``
    ================== ======================================================================================

    Args:
        rule: one of :data:`RULES`.
        rotary_dim: rotated dimensions of a head.
        rope_theta: ``b``, the checkpoint's base.
        trained_length: ``T``, tokens.
        target_length: ``T'``, tokens, at least ``trained_length``.
        ceiling: for lower-bound, the largest base to look at; None for 1e12, or 1e15 where that is too near.
        progress: for lower-bound, which takes seconds.

    Raises:
        RopewalkError: if the rule is unknown or has no answer; the message says which other has.
    """
    check_rule(rule)
    check_rotary_dim(rotary_dim)
    check_theta(rope_theta)
    if not 1 <= trained_length <= target_length:
        raise RopewalkError(
            f"the target length must be at least the trained length, got {target_length} and {trained_length}"
        )
    if rule == RECOMMENDED:
        return recommended_theta(rope_theta, trained_length, target_length).rope_theta
    if rule == LENGTH_FLOOR:
        return max(rope_theta, length_floor(target_length))
    if rule == CRITICAL_DIMENSION:
        return scaled_theta(rope_theta, trained_length, target_length)
    if rule == NTK:
        check_ntk_dim(rotary_dim)
        return ntk_theta(rotary_dim, rope_theta, target_length / trained_length)
    if rule == LOWER_BOUND:
        # Every larger base is as good: a number that people can copy.
        return max(rope_theta, rounded_up(_safe(target_length, rotary_dim, ceiling, progress), 4))
    return SCHEDULES[rule.removeprefix(SCHEDULE)].theta(target_length)


def check_rule(rule: str) -> None:
    """Raise for a rule that there is not; the message names the nearest that there is."""
    if rule not in RULES:
        near = difflib.get_close_matches(rule, RULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(RULES)}"
        raise RopewalkError(f"unknown rule {rule!r}; {hint}")


def _safe(length: int, rotary_dim: int, ceiling: float | None, progress: Progress | None) -> float:
    """A safe base with a decade of feasible ones above it, unless the caller sets the ceiling."""
    for highest in (SAFE_CEILING, HIGHEST_CEILING) if ceiling is None else (ceiling,):
        safe = safe_base(length, rotary_dim, highest, progress)
        if safe is not None and (ceiling is not None or safe <= highest / 10):
            return safe
    raise RopewalkError(
        f"no base up to {highest:g} is safe for {length} tokens with rotary_dim {rotary_dim}"
        + ("" if ceiling is None else "; raise the ceiling")
    )
