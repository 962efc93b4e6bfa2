"""No rotation at all: what DroPE leaves of RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_original_length
from ropewalk.rope.methods.base import RopeFrequencies, RopeMethod, TargetContext, register
from ropewalk.rope.methods.longrope import NO_ROTATION, LongRope


@register
@final
@dataclass(frozen=True)
class NoRope(RopeMethod):
    """No layer rotates queries and keys (NoPE): every frequency is 0, so cos is 1 and sin is 0; or some layers do not.

    In a config, the result for all layers is longrope whose factors are all
    :data:`~ropewalk.rope.methods.longrope.NO_ROTATION` at every length, with an attention factor of 1;
    :meth:`instead_of` reads that back. ``rope_theta`` then has no effect. If only some layers do not rotate, a config
    states the method of the others, and lists the layers beside it (``no_rope_layers``).

    Attributes:
        original_max_position_embeddings: tokens that the config states as the original length and as the context, so
            that no program finds two lengths to choose between.
        layers: numbers of the layers that do not rotate, from 0, in order; None for all layers.
        kept: method of the other layers; None if there are none.
        qk_norm: whether the model gets an RMSNorm on the queries and keys of each head.

    Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE),
    arXiv:2512.12167.
    """

    original_max_position_embeddings: int
    layers: tuple[int, ...] | None = None
    kept: RopeMethod | None = None
    qk_norm: bool = False

    name: ClassVar[str] = "none"
    parameters: ClassVar[Mapping[str, str]] = {
        "layers": "list of the layers that lose their RoPE, counted from 0, if others keep it; default: all layers",
        "qk_norm": "add an RMSNorm on the queries and keys of each head, which starts with weights of 1; the result is "
        "a Qwen3 model; default: false",
    }
    config_keys: ClassVar[tuple[str, ...] | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_original_length(self.original_max_position_embeddings)
        if self.layers is None:
            return
        if self.qk_norm:
            raise RopewalkError(
                f"qk_norm is not possible with layers {list(self.layers)}: no model type of transformers has norms of "
                "queries and keys and a list of layers without RoPE; leave out one of the two"
            )
        numbers = self.layers
        if not numbers or any(type(number) is not int or number < 0 for number in numbers):
            raise RopewalkError(f"layers must be a list of layers, counted from 0, got {list(numbers)}")
        object.__setattr__(self, "layers", tuple(sorted(set(numbers))))
        assert self.kept is not None
        if self.kept.length_dependent:
            raise RopewalkError(
                f"layers {list(numbers)} cannot lose their RoPE alone, because the others have {self.kept.name} RoPE, "
                "which depends on the length; drop the RoPE of all layers"
            )

    @property
    def rotates(self) -> bool:
        return self.kept is not None

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        """The frequencies of the layers that rotate, or 0."""
        import torch

        if self.kept is not None:
            return self.kept.frequencies(sequence_length)
        still = torch.zeros(self.rotary_dim // 2, dtype=torch.float64, device="cpu")
        return RopeFrequencies(still, 1.0)

    def as_written(self) -> RopeMethod:
        if self.kept is not None:
            return self.kept.as_written()
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
        """The checkpoint's method without its rotation, in all layers or in some more of them."""
        layers, qk_norm = wanted.given.get("layers"), wanted.given.get("qk_norm", False)
        if layers is None:
            # Norms of an earlier stage stay.
            normed = qk_norm or (isinstance(current, NoRope) and current.qk_norm)
            return cls(current.rotary_dim, current.rope_theta, wanted.target_length, qk_norm=normed)
        kept, before = (current.kept, current.layers or ()) if isinstance(current, NoRope) else (current, ())
        if kept is None:
            raise RopewalkError(f"layers {list(layers)} cannot lose their RoPE, because no layer has any")
        return cls(
            current.rotary_dim, current.rope_theta, wanted.target_length, (*before, *layers), kept, qk_norm
        )
