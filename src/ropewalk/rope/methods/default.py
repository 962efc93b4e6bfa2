"""Unscaled RoPE, also with another base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from ropewalk.rope.methods.base import (
    ORIGINAL,
    RopeFrequencies,
    RopeMethod,
    register,
    unscaled_inv_freq,
)


@register
@final
@dataclass(frozen=True)
class Default(RopeMethod):
    """Unscaled RoPE: the frequencies are ``θ_i``.

    :data:`Theta` is another name of this class, for the method ``theta`` (ABF, adjusted base frequency). ``theta``
    changes only ``rope_theta``, so a config of ``theta`` is a config of unscaled RoPE.

    Source: arXiv:2104.09864; ABF: Xiong et al., arXiv:2309.16039.
    """

    name: ClassVar[str] = "default"
    other_names: ClassVar[tuple[str, ...]] = ("theta",)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return RopeFrequencies(unscaled_inv_freq(self.rotary_dim, self.rope_theta), 1.0)

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        if length is None or original is None or length <= original:
            return []
        return [
            f"max_position_embeddings {length} is more than {ORIGINAL} {original}, but rope type default "
            "scales nothing"
        ]


Theta = Default
"""Default under its name in recipes; see :class:`Default`."""
