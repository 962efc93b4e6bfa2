"""The relation of a RoPE base to a context length: the critical dimension and the scaling law of theta."""

from __future__ import annotations

import math

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_critical_pair, check_ntk_dim, check_rotary_dim, check_theta

SHORTEST_LENGTH = 7
"""Tokens: the first integer length in which the fastest pair, at 1 rad/token, completes a turn (2*pi tokens)."""


def critical_dimension(rotary_dim: int, rope_theta: float, trained_length: int) -> int:
    """Number of rotary dimensions that complete a full period within the trained length.

    ``2·ceil(d/2 · log_b(T/2π))``, at most ``d``. The slower dimensions never completed a turn in training, so
    positions beyond ``T`` rotate them to angles that training did not cover.

    Args:
        rotary_dim: even number of rotated dimensions of a head.
        rope_theta: RoPE base, > 1, dimensionless.
        trained_length: tokens, at least 7 (the fastest pair turns once in 2*pi tokens).

    Returns:
        An even number between 2 and ``rotary_dim``. For Llama 3 8B (arguments 128, 5e5, 8192) it is 70, because the
            formula gives 34.98 pairs, rounded up to 35.

    Raises:
        RopewalkError: if an argument is out of range; the message gives its value.

    Source: Liu et al., arXiv:2310.05209, section 3; values checked against Llama 2 and 3.
    """
    check_rotary_dim(rotary_dim)
    check_theta(rope_theta)
    _check_length("trained_length", trained_length)
    pairs = math.ceil(rotary_dim / 2 * math.log(trained_length / (2 * math.pi), rope_theta))
    return min(2 * pairs, rotary_dim)


def critical_pairs(rotary_dim: int, rope_theta: float, trained_length: int) -> range:
    """Pairs, counted from 0, that may be the real critical pair: the first pair whose training was insufficient.

    From ``⌈d/2 · log_b(T/20π)⌉``, the first pair that turns at most ten times within ``T``, to the theoretical critical
    pair ``⌈d/2 · log_b(T/2π)⌉``, the first that turns at most once. Both are at least 1 and at most ``d/2 - 1``.

    Args:
        rotary_dim, rope_theta, trained_length: as for :func:`critical_dimension`, which is twice the theoretical
            critical pair.

    Raises:
        RopewalkError: if an argument is out of range, or there is only one pair.

    Example:
        >>> critical_pairs(128, 5e5, 8192)
        range(24, 36)

    Source: Shang et al., LongRoPE2, arXiv:2502.20082, section 3.3 and algorithm 1.
    """
    theoretical = critical_dimension(rotary_dim, rope_theta, trained_length) // 2
    slowest = rotary_dim // 2 - 1
    if slowest < 1:
        raise RopewalkError(
            f"a critical pair needs a faster pair before it, but rotary_dim {rotary_dim} has 1 pair"
        )
    ten_turns = math.ceil(rotary_dim / 2 * math.log(trained_length / (20 * math.pi), rope_theta))
    low, high = (min(max(each, 1), slowest) for each in (ten_turns, theoretical))
    return range(low, high + 1)


def scaled_theta(rope_theta: float, trained_length: int, target_length: int) -> float:
    """The base for a longer context that keeps the critical dimension: ``b^(ln(T'/2π) / ln(T/2π))``.

    Args:
        rope_theta: RoPE base of the checkpoint, > 1, dimensionless.
        trained_length: ``T``, tokens the checkpoint was trained for, at least 7.
        target_length: ``T'``, tokens to extend to, at least ``trained_length``.

    Returns:
        The new base, at least ``rope_theta``. Llama 3 8B from 8192 to 262144 tokens gives 283461213.5,
        the base that Gradient published.

    Raises:
        RopewalkError: if an argument is out of range; the message gives its value.

    Source: Liu et al., arXiv:2310.05209, theorem 1; Gradient's Llama-3-8B-Instruct-262k.
    """
    check_theta(rope_theta)
    _check_length("trained_length", trained_length)
    if target_length < trained_length:
        raise RopewalkError(
            f"the target length must be at least the trained length of {trained_length} tokens, got {target_length}"
        )
    exponent: float = math.log(target_length / (2 * math.pi)) / math.log(trained_length / (2 * math.pi))
    try:
        return float(rope_theta**exponent)
    # float ** float raises instead of giving infinity.
    except OverflowError:
        raise RopewalkError(
            f"to extend from {trained_length} to {target_length} tokens, the rule critical-dimension gives a base too "
            f"large for float64 ({rope_theta:g} to the power {exponent:.1f}); choose a shorter target length"
        ) from None


def ntk_theta(rotary_dim: int, rope_theta: float, factor: float, critical_pair: int | None = None) -> float:
    """Base ``b·s^(d/(2·c))`` that divides the frequency of pair ``c`` by ``s`` and keeps that of the fastest pair.

    The frequency of pair ``i`` is divided by ``s^(i/c)``, so pairs behind ``c`` are divided by more than ``s``.

    Args:
        rotary_dim: ``d``, rotated dimensions of a head, at least 4.
        rope_theta: ``b``.
        factor: ``s``.
        critical_pair: ``c``, counted from 0, the fastest pair. None means the slowest pair, ``d/2 - 1``.

    Raises:
        RopewalkError: if the pair is out of range, or the base is too large for float64.

    Source: bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al., arXiv:2309.00071, equation 16. With another pair: the
        NTK of Shang et al., LongRoPE2, arXiv:2502.20082, which prints no formula; this one follows from ``λ_c = s``.
    """
    check_ntk_dim(rotary_dim)
    pair = rotary_dim // 2 - 1 if critical_pair is None else critical_pair
    check_critical_pair(rotary_dim, pair)
    try:
        return float(rope_theta * factor ** (rotary_dim / (2 * pair)))
    # float ** float raises instead of giving infinity.
    except OverflowError:
        raise RopewalkError(
            f"NTK scaling by {factor:g} at pair {pair} gives a base too large for float64; choose a larger "
            "critical_pair"
        ) from None


def _check_length(name: str, length: int) -> None:
    if length < SHORTEST_LENGTH:
        raise RopewalkError(f"{name} must be at least {SHORTEST_LENGTH} tokens, got {length}")
