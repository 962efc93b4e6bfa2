"""What each rotary pair has seen in training, and what of the target length is new to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.errors import RopewalkError
from ropewalk.rope.theory.margin import frequencies_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PairExposure:
    """One rotary pair, trained at one setting and used at another.

    Attributes:
        pair: index from 0, the fastest.
        period: ``2π/θ`` of the new setting, tokens.
        trained_period: of the setting that was trained.
        trained_turns: turns over the trained length; 1 or more means that every angle was seen.
        target_turns: turns of the new setting over the target length.
        complete: whether a full period was seen in training.
        new_angles: share of the target's angles that lie beyond all that were seen, 0 to 1.
    """

    pair: int
    period: float
    trained_period: float
    trained_turns: float
    target_turns: float
    complete: bool
    new_angles: float


def exposure(
    trained_inv_freq: torch.Tensor | ArrayLike,
    trained_length: int,
    inv_freq: torch.Tensor | ArrayLike,
    target_length: int,
) -> list[PairExposure]:
    """For each pair, which angles of the target length training has not shown: the out-of-distribution report.

    A pair that turned once has shown every angle. One that did not has shown those from 0 to ``T·θ``; of the angles
    0 to ``T'·θ'`` at the new frequency, those count as new that lie beyond, modulo ``2π``. (A relative distance of
    ``m`` turns a pair as a position of ``m`` does, so the same holds for distances.)

    Args:
        trained_inv_freq: ``[pairs]``, rad/token, with which the model was trained.
        trained_length: ``T``, tokens.
        inv_freq: ``[pairs]``, rad/token, to be used from now on.
        target_length: ``T'``, tokens.

    Source: Liu et al., arXiv:2310.05209, section 3; arXiv:2405.14591, figure 2.
    """
    before, after = frequencies_of(trained_inv_freq), frequencies_of(inv_freq)
    if before.shape != after.shape:
        raise RopewalkError(f"the two settings must have as many pairs, got {len(before)} and {len(after)}")
    for name, length in (("trained_length", trained_length), ("target_length", target_length)):
        if length < 1:
            raise RopewalkError(f"{name} must be at least 1 token, got {length}")
    return [
        _pair(number, float(old), trained_length, float(new), target_length)
        for number, (old, new) in enumerate(zip(before, after, strict=True))
    ]


def _pair(number: int, old: float, trained_length: int, new: float, target_length: int) -> PairExposure:
    turn = 2 * math.pi
    trained_turns, target_turns = old * trained_length / turn, new * target_length / turn
    complete = trained_turns >= 1
    return PairExposure(
        pair=number,
        period=turn / new if new else math.inf,
        trained_period=turn / old if old else math.inf,
        trained_turns=trained_turns,
        target_turns=target_turns,
        complete=complete,
        new_angles=0.0 if complete else _share_beyond(old * trained_length, new * target_length),
    )


def _share_beyond(seen: float, reach: float) -> float:
    """Share of angles spread evenly over ``0 … reach`` that lie beyond ``seen`` modulo a turn; ``seen`` < 2π."""
    # Interpolation makes the two equal but for rounding.
    if reach <= seen * (1 + 1e-12):
        return 0.0
    turns, rest = divmod(reach, 2 * math.pi)
    return (turns * (2 * math.pi - seen) + max(rest - seen, 0.0)) / reach


def slowest_angles(inv_freq: torch.Tensor | ArrayLike, positions: ArrayLike) -> np.ndarray:
    """Angle of the slowest pair at some positions, rad, not reduced: the paper's figure 2."""
    slowest: np.ndarray = float(frequencies_of(inv_freq).min()) * np.asarray(positions, dtype=np.float64)
    return slowest
