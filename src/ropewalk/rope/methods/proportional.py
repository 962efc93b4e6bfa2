"""RoPE that rotates part of the pairs with the frequencies of the whole head (Gemma 4, LFM3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_factor, is_number
from ropewalk.rope.methods.base import (
    PARTIAL,
    RopeFrequencies,
    RopeMethod,
    TargetContext,
    register,
    unscaled_inv_freq,
)


@register
@final
@dataclass(frozen=True)
class Proportional(RopeMethod):
    """``θ_i / s`` for the first pairs of a head and 0 for the others, which do not rotate.

    Unlike plain partial rotation, the frequencies are those of the whole head: ``rotary_dim`` includes the pairs that
    do not rotate.

    Attributes:
        partial_rotary_factor: share of the pairs that rotate, above 0 and at most 1.
        factor: ``s``; 1 in published checkpoints.

    Source: transformers, ``_compute_proportional_rope_parameters``.
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    name: ClassVar[str] = "proportional"
    parameters: ClassVar[Mapping[str, str]] = {"factor": "the divisor of the frequencies, without a default"}
    config_keys: ClassVar[tuple[str, ...] | None] = (PARTIAL, "factor")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        if not is_number(self.partial_rotary_factor) or not 0 < self.partial_rotary_factor <= 1:
            raise RopewalkError(
                f"{PARTIAL} must be a number above 0 and at most 1, got {self.partial_rotary_factor!r}"
            )
        if not self.turning_pairs:
            raise RopewalkError(
                f"{PARTIAL} {self.partial_rotary_factor:g} of {self.rotary_dim} dimensions leaves no pair to rotate; "
                f"raise {PARTIAL}"
            )

    @property
    def turning_pairs(self) -> int:
        """Number of pairs that rotate; the others of ``rotary_dim // 2`` do not."""
        return int(self.partial_rotary_factor * self.rotary_dim // 2)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        inv_freq = unscaled_inv_freq(self.rotary_dim, self.rope_theta) / self.factor
        inv_freq[self.turning_pairs :] = 0
        return RopeFrequencies(inv_freq, 1.0)

    def to_entry(self) -> dict[str, Any]:
        entry = super().to_entry()
        if self.factor == 1:
            # transformers uses the key but warns about it, because it is not in its list for this type.
            del entry["factor"]
        return entry

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        if not isinstance(current, Proportional):
            raise RopewalkError(
                "method 'proportional' is for a checkpoint that was trained with this method, but this checkpoint "
                f"has {current.name} RoPE; choose theta, linear or yarn"
            )
        if "factor" not in wanted.given:
            raise RopewalkError(
                "method 'proportional' needs 'factor', because no known rule gives a factor for the target length; "
                "set 'factor', or choose method 'theta' with a larger rope_theta (the same pairs of dimensions stay "
                "unrotated)"
            )
        return replace(current, factor=wanted.given["factor"])
