"""CoPE: clipped RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_original_length
from ropewalk.rope.methods.base import Origin, RopeFrequencies, RopeMethod, TargetContext, register
from ropewalk.rope.methods.longrope import NO_ROTATION, LongRope

PUBLISHED_SHARE = 20 / 64
"""Share of the pairs that the authors clip: 20 of the 64 of Llama 3."""


@register
@final
@dataclass(frozen=True)
class Cope(RopeMethod):
    """CoPE: the frequencies of the slowest pairs fade to 0 along half a period of the cosine.

    The slowest ``clipped`` frequencies are multiplied by ``(1 + cos φ) / 2``, with ``φ`` evenly spaced from 0 to π. The
    first of them is therefore unchanged, and the last is 0: this pair does not rotate. A config states the method as
    longrope with the same factors at every length.

    Attributes:
        clipped: number of slowest pairs, from 2 to ``rotary_dim / 2``.
        original_max_position_embeddings: longest input in tokens. The frequencies do not depend on it; a config states
            it as the original length as well, so that no program serves less or computes an attention factor.

    Source: Li et al., arXiv:2602.05258; ``modeling_cope.py`` of github.com/hrlics/CoPE, which clips ``min(20, pairs)``.
    """

    clipped: int
    original_max_position_embeddings: int

    name: ClassVar[str] = "cope"
    parameters: ClassVar[Mapping[str, str]] = {
        "clipped": "number of slowest rotary pairs whose frequencies are lowered, that of the last one to 0; default: "
        "20 of 64 pairs, or the same share, rounded"
    }
    config_keys: ClassVar[tuple[str, ...] | None] = None
    origin: ClassVar[Origin | None] = Origin(
        "θ_i' = θ_i·(1 + cos φ)/2 for the slowest 20 of 64 pairs, φ from 0 to π",
        "Li et al., arXiv:2602.05258",
        "does not depend on T'; the authors train with it and raise the base as well",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = self.rotary_dim // 2
        clipped = self.clipped
        if isinstance(clipped, bool) or not isinstance(clipped, int) or not 2 <= clipped <= pairs:
            raise RopewalkError(
                f"clipped must be a whole number of rotary pairs from 2 to {pairs} (rotary_dim / 2), got {clipped!r}"
                if pairs >= 2
                else f"cope needs at least 2 rotary pairs (a rotary_dim of 4), got rotary_dim {self.rotary_dim}"
            )
        check_original_length(self.original_max_position_embeddings)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return self.as_written().frequencies()

    def as_written(self) -> LongRope:
        steps = range(self.clipped - 1)
        faded = [2 / (1 + math.cos(math.pi * step / (self.clipped - 1))) for step in steps]
        factors = (*(1.0,) * (self.rotary_dim // 2 - self.clipped), *faded, NO_ROTATION)
        return LongRope(
            self.rotary_dim, self.rope_theta, factors, factors, 1.0, self.original_max_position_embeddings
        )

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        return self.as_written().config_warnings(entry, original, length)

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        share = max(2, round(PUBLISHED_SHARE * (current.rotary_dim // 2)))
        kept = current.clipped if isinstance(current, Cope) else share
        clipped = wanted.given.get("clipped", kept)
        return cls(current.rotary_dim, current.rope_theta, clipped, wanted.target_length)


def as_cope(method: RopeMethod) -> RopeMethod:
    """A method that was read from a config, as a :class:`Cope` if it is longrope with CoPE's factors.

    Factors may have the precision of float32, in which programs compute.
    """
    if not isinstance(method, LongRope) or method.long_factor[-1] < NO_ROTATION:
        return method
    # The first clipped pair has a factor of 1 as well.
    clipped = sum(factor != 1 for factor in method.long_factor) + 1
    if not 2 <= clipped <= len(method.long_factor):
        return method
    found = Cope(method.rotary_dim, method.rope_theta, clipped, method.original_max_position_embeddings)
    ours = found.as_written().long_factor
    same = method.attention_factor == 1 and all(
        math.isclose(own, stated, rel_tol=2**-23)
        for stated_factors in (method.short_factor, method.long_factor)
        for own, stated in zip(ours, stated_factors, strict=True)
    )
    return found if same else method
