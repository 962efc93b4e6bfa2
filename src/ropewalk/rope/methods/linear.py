"""Linear position interpolation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from ropewalk.rope._checks import check_factor
from ropewalk.rope.methods.base import (
    FACTOR,
    ORIGINAL,
    Origin,
    RopeFrequencies,
    RopeMethod,
    ratio_warning,
    register,
    unscaled_inv_freq,
)


@register
@final
@dataclass(frozen=True)
class Linear(RopeMethod):
    """Position interpolation: ``θ_i / s``. Source: Chen et al., arXiv:2306.15595."""

    factor: float

    name: ClassVar[str] = "linear"
    parameters: ClassVar[Mapping[str, str]] = FACTOR
    # The original length has no effect here, but some checkpoints state it.
    config_keys: ClassVar[tuple[str, ...] | None] = ("factor", ORIGINAL)
    origin: ClassVar[Origin | None] = Origin(
        "θ' = θ·T/T'",
        "Chen et al., arXiv:2306.15595",
        "also slows the pairs that distinguish neighbouring tokens",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return RopeFrequencies(unscaled_inv_freq(self.rotary_dim, self.rope_theta) / self.factor, 1.0)

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        if original is not None or length is None:
            return ratio_warning(self, entry, original, length)
        return [
            f"linear factor {self.factor:g}: the config does not say whether max_position_embeddings {length} includes "
            f"the factor, as assumed here, or is the length before scaling; in that case the model is trained for "
            f"{length * self.factor:.10g} tokens (set it with --from)"
        ]

    def unscaled_length(self, length: int | None) -> int | None:
        return None if length is None else int(length / self.factor)
