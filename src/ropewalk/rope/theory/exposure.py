"""The angles that each rotary pair has seen in training, and those of the target length that are new to it."""

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
    """One rotary pair that was trained with one setting and is used with another.

    Attributes:
        pair: index from 0, the fastest pair.
        period: ``2π/θ`` of the new setting, tokens.
        trained_period: period of the trained setting, tokens.
        trained_turns: turns over the trained length; at least 1 means that every angle was seen.
        target_turns: turns of the new setting over the target length.
        complete: whether training covered a full period.
        new_angles: share of the target's angles that training did not cover, 0 to 1.
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
    """The angles of the target length that training has not covered, for each pair: an out-of-distribution report.

    A pair that completed a turn in training has seen every angle. Otherwise it has seen the angles from 0 to ``T·θ``;
    of the angles 0 to ``T'·θ'`` at the new frequency, those beyond ``T·θ`` modulo ``2π`` are new. (A relative distance
    of ``m`` rotates a pair as a position of ``m`` does, so this applies to distances too.)

    Args:
        trained_inv_freq: ``[pairs]``, rad/token, frequencies of the training.
        trained_length: ``T``, tokens.
        inv_freq: ``[pairs]``, rad/token, the new frequencies.
        target_length: ``T'``, tokens.

    Source: Liu et al., arXiv:2310.05209, section 3; arXiv:2405.14591, figure 2.
    """
    before, after = frequencies_of(trained_inv_freq), frequencies_of(inv_freq)
    if before.shape != after.shape:
        raise RopewalkError(
            f"trained_inv_freq and inv_freq must be equally long, got {len(before)} and {len(after)} frequencies"
        )
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
    # A pair that completed a turn has shown every angle, so no longer context can bring a new one.
    complete = trained_turns >= 1
    # Some methods give the slowest pairs a frequency of 0: these never turn.
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
    """Share of angles uniform over ``0 … reach`` that lie beyond ``seen`` modulo a turn; ``seen`` < 2π."""
    # Interpolation makes the two equal up to rounding.
    if reach <= seen * (1 + 1e-12):
        return 0.0
    turns, rest = divmod(reach, 2 * math.pi)
    return (turns * (2 * math.pi - seen) + max(rest - seen, 0.0)) / reach


def slowest_angles(inv_freq: torch.Tensor | ArrayLike, positions: ArrayLike) -> np.ndarray:
    """Angle of the slowest pair at some positions in rad, without reduction modulo 2π: the paper's figure 2."""
    slowest: np.ndarray = float(frequencies_of(inv_freq).min()) * np.asarray(positions, dtype=np.float64)
    return slowest
