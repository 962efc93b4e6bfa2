"""The frequency scaling of Llama 3.1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_factor, check_original_length, check_positive
from ropewalk.rope.methods.base import (
    FACTOR,
    ORIGINAL,
    Origin,
    RopeFrequencies,
    RopeMethod,
    TargetContext,
    assumed_original,
    register,
    unscaled_inv_freq,
)

METAS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Llama 3.1's values, and the defaults for a new checkpoint."""


@register
@final
@dataclass(frozen=True)
class Llama3(RopeMethod):
    """Llama 3.1: keep the frequency of fast pairs, divide that of slow pairs by ``s``, and interpolate the rest.

    Attributes:
        factor: ``s``; Meta chose it independently of T'/T (8 for 8192 to 131072 tokens).
        low_freq_factor: the frequency of a pair that turns less often than this within ``T`` tokens is divided by
            ``s``.
        high_freq_factor: a pair that turns more often than this within ``T`` tokens is unchanged; at least
            ``low_freq_factor``.
        original_max_position_embeddings: ``T``, tokens.

    Source: Llama 3.1's reference code, ``apply_scaling``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    name: ClassVar[str] = "llama3"
    parameters: ClassVar[Mapping[str, str]] = {
        **FACTOR,
        "low_freq_factor": "the frequency of pairs that turn less often than this within the original length is "
        "divided by the whole factor; "
        f"default {METAS['low_freq_factor']:g}",
        "high_freq_factor": "pairs that turn more often than this within the original length stay unchanged; "
        f"default {METAS['high_freq_factor']:g}",
    }
    config_keys: ClassVar[tuple[str, ...] | None] = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        ORIGINAL,
    )
    origin: ClassVar[Origin | None] = Origin(
        "as yarn by wavelength, low and high frequency factors 1 and 4",
        "Llama 3.1's reference code",
        "the factor is chosen, not derived: Meta chose 8 for 8192 to 131072 tokens",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_positive("low_freq_factor", self.low_freq_factor)
        check_positive("high_freq_factor", self.high_freq_factor)
        check_original_length(self.original_max_position_embeddings)
        if self.high_freq_factor < self.low_freq_factor:
            raise RopewalkError(
                f"high_freq_factor must be at least low_freq_factor {self.low_freq_factor}, got "
                f"{self.high_freq_factor}"
            )

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        inv_freq = unscaled_inv_freq(self.rotary_dim, self.rope_theta)
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        # Llama 4 sets both factors to 1: there is no ramp, and each pair is kept or divided.
        kept = (
            ((turns - self.low_freq_factor) / span).clamp(0, 1)
            if span
            else (turns >= self.low_freq_factor).double()
        )
        return RopeFrequencies(inv_freq * kept + inv_freq / self.factor * (1 - kept), 1.0)

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        if original is not None:
            return []
        return [f"{assumed_original(self, 'transformers and vLLM')}, and llama.cpp takes 8192"]

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        # A llama3 checkpoint keeps its own ramp; a checkpoint that was not scaled before gets Meta's.
        given = {**METAS, **wanted.given}
        return super().for_target(
            current, wanted if isinstance(current, Llama3) else replace(wanted, given=given)
        )
