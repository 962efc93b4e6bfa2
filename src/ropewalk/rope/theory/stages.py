"""From a trained length to a target in stages: how far to go at a time."""

from __future__ import annotations

import math

from ropewalk.errors import RopewalkError

LEAST_FACTOR, MOST_FACTOR = 4, 8
"""How many times longer a stage is than the one before, as published curricula go."""


def stage_contexts(trained_length: int, target_length: int) -> list[int]:
    """Context lengths of the stages from ``trained_length`` to ``target_length``, the last one being that.

    As few stages as factors of at most 8 allow, the larger factors first, each of at least 4 where that many stages
    allow it (12 times is 4 and then 3). Intermediate contexts are the trained length times a power of two.

    Args:
        trained_length, target_length: tokens, the second larger.

    Example:
        >>> stage_contexts(8192, 1048576)
        [65536, 262144, 1048576]

    Source: Gradient went 8k → 65k → 262k → 1048k (8x, 4x, 4x); LWM and AnchorContext take 2x to 4x.
    """
    if not 1 <= trained_length < target_length:
        raise RopewalkError(
            f"the target length must be above the trained length, got {target_length} and {trained_length}"
        )
    contexts = []
    length = trained_length
    while length * MOST_FACTOR < target_length:
        left = math.ceil(math.log(target_length / length, MOST_FACTOR) - 1e-9) - 1
        fitting = [
            factor
            for factor in (MOST_FACTOR, LEAST_FACTOR)
            if LEAST_FACTOR**left * factor * length <= target_length <= MOST_FACTOR**left * factor * length
        ]
        # Between 8 and 16 times, one of two stages must be short: not shorter than need be.
        length *= fitting[0] if fitting else LEAST_FACTOR
        contexts.append(length)
    return [*contexts, target_length]
