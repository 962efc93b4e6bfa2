"""LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_factors, check_original_length, check_positive, check_sequence_length
from ropewalk.rope.methods.base import (
    ATTENTION,
    ORIGINAL,
    ConfigEntry,
    RopeFrequencies,
    RopeMethod,
    TargetContext,
    assumed_original,
    ratio_warning,
    register,
    unscaled_inv_freq,
)

if TYPE_CHECKING:
    from torch import Tensor

MSCALES = ("short_mscale", "long_mscale")
"""Keys through which vLLM reads the attention factor."""
NO_ROTATION = 1e30
"""The factor λ of a pair that does not turn: cos is 1 and sin below the rounding of float64 at every position.

λ itself is a float32 number, as which programs read it."""
RIGHT_AT_EVERY_LENGTH = (
    "one server is correct for inputs of every length if short_factor equals long_factor, or if the model was extended "
    "with yarn or a new rope_theta"
)
"""What to do about programs that do not choose between the two lists as transformers does."""


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """``√(1 + ln s / ln T)``, or 1 if ``s ≤ 1``. Source: Ding et al., arXiv:2402.13753; Phi-3's code."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


def has_published_attention(attention_factor: float, factor: float, original_length: int) -> bool:
    """Whether an attention factor equals ``√(1 + ln s / ln T)`` within the precision of float32 cos and sin."""
    return math.isclose(attention_factor, longrope_attention_factor(factor, original_length), rel_tol=2**-24)


@register
@final
@dataclass(frozen=True)
class LongRope(RopeMethod):
    """LongRoPE: the frequencies are ``θ_i / λ_i``, with one list of λ up to the original length and another beyond it.

    Attributes:
        short_factor: ``[rotary_dim // 2]``, λ for sequences of at most ``T`` tokens, each > 0.
        long_factor: ``[rotary_dim // 2]``, λ for longer sequences, each > 0.
        attention_factor: factor on cos and sin at every length. The published value, ``√(1 + ln s / ln T)``, comes from
            :func:`longrope_attention_factor`.
        original_max_position_embeddings: ``T``, tokens.
        start_tokens: number of first positions that keep ``θ_i``. :meth:`frequencies` gives the frequencies of the
            positions after them. ropewalk's rotary module applies start tokens; a config cannot express them.

    Source: Ding et al., arXiv:2402.13753, section 3.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int
    start_tokens: int = 0

    name: ClassVar[str] = "longrope"
    rope_type_aliases: ClassVar[tuple[str, ...]] = ("su",)
    parameters: ClassVar[Mapping[str, str]] = {
        "attention_factor": ATTENTION,
        "short_factor": "list of one factor for each rotary pair; default: the checkpoint's, or 1 for each pair",
        "long_factor": "list of one factor for each rotary pair",
        "start_tokens": "number of initial tokens with unscaled RoPE; must be 0, because a config.json cannot store "
        "other numbers",
    }
    config_keys: ClassVar[tuple[str, ...] | None] = (
        "factor", "short_factor", "long_factor", "attention_factor", *MSCALES, ORIGINAL
    )  # fmt: skip
    length_dependent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("attention_factor", self.attention_factor)
        check_original_length(self.original_max_position_embeddings)
        for field in ("short_factor", "long_factor"):
            # Configs contain lists; a tuple makes the value hashable and immutable.
            factors = check_factors(field, getattr(self, field), self.rotary_dim // 2)
            object.__setattr__(self, field, factors)
        if isinstance(self.start_tokens, bool) or not isinstance(self.start_tokens, int):
            raise RopewalkError(f"start_tokens must be a whole number, got {self.start_tokens!r}")
        if self.start_tokens < 0:
            raise RopewalkError(f"start_tokens must be 0 or more, got {self.start_tokens}")

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        import torch

        # Without a length, the frequencies are those of short sequences, as transformers initialises its module.
        length = check_sequence_length(sequence_length) or self.original_max_position_embeddings
        long = length > self.original_max_position_embeddings
        factors = torch.tensor(
            self.long_factor if long else self.short_factor, dtype=torch.float64, device="cpu"
        )
        inv_freq = unscaled_inv_freq(self.rotary_dim, self.rope_theta) / factors
        # Of a pair that does not turn, so that nobody computes a period of 1e30 tokens.
        inv_freq[factors >= NO_ROTATION] = 0
        return RopeFrequencies(inv_freq, float(self.attention_factor))

    def length_class(self, sequence_length: int) -> int:
        original = self.original_max_position_embeddings
        return original + (sequence_length > original)

    def inv_freq_at(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        if not self.start_tokens:
            return inv_freq
        unscaled = unscaled_inv_freq(self.rotary_dim, self.rope_theta).to(inv_freq.device)
        return inv_freq.where(positions >= self.start_tokens, unscaled)

    @property
    def switch_length(self) -> int | None:
        return None if self.short_factor == self.long_factor else self.original_max_position_embeddings

    @classmethod
    def from_entry(cls, entry: ConfigEntry) -> RopeMethod:
        original = entry.length_before_extension()
        attention_factor = entry.values.get("attention_factor")
        if attention_factor is None:
            # transformers computes it by the same formula where a config omits it.
            attention_factor = longrope_attention_factor(entry.factor(original), original)
        # vLLM and transformers read different keys; with different values they would compute different models.
        for key in MSCALES:
            if entry.values.get(key, attention_factor) != attention_factor:
                raise RopewalkError(
                    f"longrope's {key} {entry.values[key]} differs from the attention factor {attention_factor}, so "
                    "vLLM and transformers would compute different models; make the two values equal"
                )
        short, long = entry.need("short_factor"), entry.need("long_factor")
        return cls(entry.rotary_dim, entry.rope_theta, short, long, attention_factor, original)

    def as_written(self) -> RopeMethod:
        if self.start_tokens:
            raise RopewalkError(
                f"a config.json cannot express longrope with start_tokens {self.start_tokens}; set start_tokens to "
                "0, or use the method only in ropewalk.rope.RotaryEmbedding"
            )
        return self

    def as_computed_by_transformers(self) -> RopeMethod:
        return replace(self, start_tokens=0)

    def to_entry(self) -> dict[str, Any]:
        # A config has no such key; as_written refuses any value but 0.
        return {key: value for key, value in super().to_entry().items() if key != "start_tokens"}

    def top_level(self) -> dict[str, int]:
        # In Phi-3's config the top-level value takes precedence over the one inside.
        return {ORIGINAL: self.original_max_position_embeddings}

    @staticmethod
    def for_all_readers(entry: Mapping[str, Any], max_length: int) -> dict[str, Any]:
        """transformers needs ``factor``, the longest input over the original length, and reads ``attention_factor``.

        vLLM reads ``short_mscale`` and ``long_mscale``, and without them uses the published ``√(1 + ln s / ln T)``.
        They are written if the attention factor differs from that formula.
        """
        factor = max_length / entry[ORIGINAL]
        stated = {**entry, "factor": factor}
        if not has_published_attention(entry["attention_factor"], factor, entry[ORIGINAL]):
            stated |= dict.fromkeys(MSCALES, entry["attention_factor"])
        return stated

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        if original is not None:
            return ratio_warning(self, entry, original, length)
        return [
            f"{assumed_original(self, 'transformers and vLLM')}, so no input of that length gets the long factors"
        ]

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        """The given factors, relative to ``θ_i``; a longrope checkpoint keeps its original length."""
        given = wanted.given
        missing = next((key for key in ("short_factor", "long_factor") if key not in given), None)
        if missing is not None:
            raise RopewalkError(
                f"longrope needs {missing}, one number for each pair of rotated dimensions; find the factors with "
                "`ropewalk search`"
            )
        # The factors are relative to the length of the first training, not to the latest extension.
        start = (
            current.original_max_position_embeddings
            if isinstance(current, LongRope)
            else wanted.original_length
        )
        return cls(
            current.rotary_dim,
            current.rope_theta,
            given["short_factor"],
            given["long_factor"],
            given.get("attention_factor", longrope_attention_factor(wanted.target_length / start, start)),
            start,
            given.get("start_tokens", 0),
        )
