"""No rotation at all: what DroPE leaves of RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from ropewalk.rope._checks import check_original_length
from ropewalk.rope.methods.base import RopeFrequencies, RopeMethod, TargetContext, register
from ropewalk.rope.methods.longrope import NO_ROTATION, LongRope


@register
@final
@dataclass(frozen=True)
class NoRope(RopeMethod):
    """No layer rotates queries and keys (NoPE): every frequency is 0, so cos is 1 and sin is 0.

    In a config, the result is longrope whose factors are all :data:`~ropewalk.rope.methods.longrope.NO_ROTATION` at
    every length, with an attention factor of 1; :meth:`instead_of` reads that back. ``rope_theta`` has no effect.

    Attributes:
        original_max_position_embeddings: tokens that the config states as the original length and as the context, so
            that no program finds two lengths to choose between.

    Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE),
    arXiv:2512.12167.
    """

    original_max_position_embeddings: int

    name: ClassVar[str] = "none"
    config_keys: ClassVar[tuple[str, ...] | None] = None
    rotates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_original_length(self.original_max_position_embeddings)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        import torch

        still = torch.zeros(self.rotary_dim // 2, dtype=torch.float64, device="cpu")
        return RopeFrequencies(still, 1.0)

    def as_written(self) -> RopeMethod:
        still = (NO_ROTATION,) * (self.rotary_dim // 2)
        return LongRope(
            self.rotary_dim, self.rope_theta, still, still, 1.0, self.original_max_position_embeddings
        )

    def top_level(self) -> dict[str, int]:
        return self.as_written().top_level()

    @classmethod
    def instead_of(cls, method: RopeMethod) -> RopeMethod:
        """The method of a config, or this one if it turns no pair at any length."""
        if not isinstance(method, LongRope) or method.attention_factor != 1 or method.start_tokens:
            return method
        if min(*method.short_factor, *method.long_factor) < NO_ROTATION:
            return method
        return cls(method.rotary_dim, method.rope_theta, method.original_max_position_embeddings)

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        """The checkpoint's method without its rotation, whatever that method is."""
        return cls(current.rotary_dim, current.rope_theta, wanted.target_length)
