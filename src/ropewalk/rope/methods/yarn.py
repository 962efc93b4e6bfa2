"""YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import (
    check_critical_pair,
    check_factor,
    check_original_length,
    check_positive,
    is_number,
)
from ropewalk.rope.methods.base import (
    ATTENTION,
    CRITICAL_PAIR,
    FACTOR,
    ORIGINAL,
    ConfigEntry,
    Origin,
    RopeFrequencies,
    RopeMethod,
    TargetContext,
    assumed_original,
    ratio_warning,
    register,
    unscaled_inv_freq,
)

_PARAMETERS = {
    "attention_factor": ATTENTION,
    "beta_fast": "pairs that turn at least this often within the original length stay unchanged",
    "beta_slow": "the frequency of pairs that turn less often than this within the original length is divided by the "
    "whole factor",
    "mscale": "with mscale_all_dim, sets the attention factor as DeepSeek's configs do",
    "mscale_all_dim": "see mscale",
    "truncate": "round the ends of the ramp outward to whole pairs; default true",
}
_AT_PAIR = {
    CRITICAL_PAIR: "index of the pair at which the ramp ends, counted from 0, instead of beta_slow, which is computed "
    "from it"
}
MSCALES = ("mscale", "mscale_all_dim")
_ZERO_IS_DEFAULT = ("beta_fast", "beta_slow", *MSCALES)
"""transformers treats 0 as "not given" here."""


@register
@final
@dataclass(frozen=True)
class Yarn(RopeMethod):
    """YaRN: keep the frequency of fast pairs, divide that of slow pairs by ``s``, and interpolate the rest (the ramp).

    Attributes:
        factor: ``s = T'/T``, target over original length.
        original_max_position_embeddings: ``T``, tokens.
        beta_fast: a pair that turns at least this often within ``T`` tokens is unchanged.
        beta_slow: the frequency of a pair that turns less often than this within ``T`` tokens is divided by ``s``.
        attention_factor: factor on cos and sin; None for ``0.1·ln s + 1``, or for the formula under ``mscale``.
        mscale: if ``mscale`` and ``mscale_all_dim`` are given and not 0, and ``attention_factor`` is None, the
            attention factor is ``(0.1·mscale·ln s + 1) / (0.1·mscale_all_dim·ln s + 1)`` (DeepSeek).
        mscale_all_dim: see ``mscale``.
        truncate: whether the ends of the ramp are rounded outward to whole pairs.

    Source: Peng et al., arXiv:2309.00071, section 3.2 and equation 22; the clamp of the ramp's upper end at
    ``d - 1`` (not ``d/2 - 1``) is that of the authors' code and of transformers.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    name: ClassVar[str] = "yarn"
    parameters: ClassVar[Mapping[str, str]] = {**FACTOR, **_PARAMETERS, **_AT_PAIR}
    target_parameters: ClassVar[Mapping[str, type]] = {CRITICAL_PAIR: int}
    # The authors' checkpoints have the key finetuned, which has no effect: those of this type are all static.
    config_keys: ClassVar[tuple[str, ...] | None] = ("factor", ORIGINAL, "beta_fast", "beta_slow",
        "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned")  # fmt: skip
    origin: ClassVar[Origin | None] = Origin(
        "fast pairs unchanged, slow ones divided by T'/T, a ramp between; attention factor 0.1·ln(T'/T) + 1",
        "Peng et al., arXiv:2309.00071, section 3.2",
        "supported by every server; generalised well beyond the trained length in arXiv:2411.13476",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_original_length(self.original_max_position_embeddings)
        for field in ("beta_fast", "beta_slow"):
            check_positive(field, getattr(self, field))
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor)
        for field in ("mscale", "mscale_all_dim"):
            value = getattr(self, field)
            if value is not None and (not is_number(value) or value < 0):
                raise RopewalkError(f"{field} must be 0 or more, or absent, got {value!r}")
        if self.beta_fast < self.beta_slow:
            raise RopewalkError(
                f"beta_fast must be at least beta_slow {self.beta_slow}, got {self.beta_fast}"
            )
        # Below this length even the fastest pair turns too rarely, and the published ramp has no upper end.
        if self.original_max_position_embeddings <= 2 * math.pi * self.beta_slow:
            raise RopewalkError(
                f"yarn needs original_max_position_embeddings above 2·pi·beta_slow = "
                f"{2 * math.pi * self.beta_slow:.1f} tokens, got {self.original_max_position_embeddings}"
            )

    def ramp_range(self) -> tuple[float, float]:
        """Pairs (as real numbers) at which the ramp starts and ends: unchanged up to the first, scaled from the last.

        A pair ``i`` turns ``T·θ_i/2π`` times over the original length; solved for ``i``.
        """

        def pair_that_turns(times: float) -> float:
            turns = self.original_max_position_embeddings / (2 * math.pi * times)
            return self.rotary_dim * math.log(turns) / (2 * math.log(self.rope_theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            # Outward, so that no pair inside the ramp is treated as unchanged or fully scaled.
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, self.rotary_dim - 1)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        import torch

        low, high = self.ramp_range()
        # As in transformers if both ends fall on one pair; this keeps the division finite.
        width = high - low if high != low else 0.001
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float64, device="cpu")
        # 0 keeps a pair, 1 divides its frequency by the factor.
        scaled = ((pairs - low) / width).clamp(0, 1)
        kept = unscaled_inv_freq(self.rotary_dim, self.rope_theta)
        return RopeFrequencies(kept * (1 - scaled) + kept / self.factor * scaled, self._attention_factor())

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log_factor = math.log(self.factor)
        # As in transformers, the ratio applies only if both values are given and not 0.
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log_factor + 1) / (0.1 * self.mscale_all_dim * log_factor + 1)
        return 0.1 * log_factor + 1

    def _states_the_formula(self) -> bool:
        """Whether the stated ``attention_factor`` equals the formula's, as in OLMo 3."""
        formula = replace(self, attention_factor=None)._attention_factor()
        return self.attention_factor is not None and math.isclose(
            self.attention_factor, formula, rel_tol=2**-24
        )

    @classmethod
    def from_entry(cls, entry: ConfigEntry) -> RopeMethod:
        # Given a factor, yarn needs no lengths: a checkpoint truncated to a shorter context keeps its frequencies.
        stated = "factor" in entry.values
        original = entry.original_length() if stated else entry.length_before_extension()
        finetuned = entry.values.get("finetuned", False)
        if not isinstance(finetuned, bool):
            raise RopewalkError(
                f"the key 'finetuned' in the RoPE parameters of the config must be true or false, got {finetuned!r}"
            )
        optional = {
            key: value
            for key, value in entry.values.items()
            if key in _PARAMETERS and (value or key not in _ZERO_IS_DEFAULT)
        }
        method = cls(entry.rotary_dim, entry.rope_theta, entry.factor(original), original, **optional)
        # Written by for_all_readers: they state once more what attention_factor states.
        ratio = replace(method, attention_factor=None)
        if ratio.mscale and ratio.mscale_all_dim and method._states_the_formula():
            return replace(method, mscale=None, mscale_all_dim=None)
        return method

    @staticmethod
    def for_all_readers(entry: Mapping[str, Any], max_length: int) -> dict[str, Any]:
        """SGLang and mlx-lm read no ``attention_factor``, but a ratio of two mscales, which is written beside it.

        Nothing is written for the published factor, or if mscales are stated.
        """
        attention, log_factor = entry.get("attention_factor"), 0.1 * math.log(entry.get("factor") or 1)
        if attention is None or log_factor <= 0 or any(key in entry for key in MSCALES):
            return dict(entry)
        if math.isclose(attention, log_factor + 1, rel_tol=2**-24):
            return dict(entry)
        # Both positive, because transformers treats 0 as "not given"; 1 as DeepSeek writes it, if that is enough.
        all_dim = max(1.0, 2 * (1 / attention - 1) / log_factor)
        mscale = attention * all_dim + (attention - 1) / log_factor
        return {**entry, **dict(zip(MSCALES, (mscale, all_dim), strict=True))}

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        # A stated factor that equals the formula would be wrong for the new length; derive it again.
        if isinstance(current, Yarn) and current._states_the_formula():
            current = replace(current, attention_factor=None)
        fixed = current.attention_factor if isinstance(current, Yarn) else None
        # 1 means no attention temperature, which holds at any length; other values belong to one length.
        if fixed not in (None, 1) and "attention_factor" not in wanted.given:
            raise RopewalkError(
                f"the yarn RoPE of this checkpoint has attention_factor {fixed}, which is valid only for the present "
                "length; set attention_factor for the target length"
            )
        given = dict(wanted.given)
        pair = given.pop(CRITICAL_PAIR, None)
        if pair is not None and "beta_slow" in given:
            raise RopewalkError(
                f"give either critical_pair {pair} or beta_slow {given['beta_slow']:g}: both set the end of yarn's ramp"
            )
        method = super().for_target(current, replace(wanted, given=given))
        assert isinstance(method, Yarn)
        return method if pair is None else method.ending_at(pair)

    def ending_at(self, pair: int) -> Yarn:
        """The same method with the end of its ramp at a pair; the start of the ramp stays.

        Args:
            pair: counted from 0, the fastest pair.

        Raises:
            RopewalkError: if there is no such pair, or the ramp starts there or later.

        Source: YaRN with the real critical dimension, Shang et al., LongRoPE2, arXiv:2502.20082, section 4.
        """
        check_critical_pair(self.rotary_dim, pair)
        # A ramp with rounded ends ends at the next whole pair, so half a pair earlier is as far as possible from where
        # rounding, here or in a program that reads beta_slow from a config, would move its end.
        end = pair - 0.5 if self.truncate else float(pair)
        turns = self.original_max_position_embeddings / (2 * math.pi)
        beta_slow = turns * self.rope_theta ** (-2 * end / self.rotary_dim)
        if beta_slow >= self.beta_fast:
            raise RopewalkError(
                f"the ramp of yarn starts near pair {self.ramp_range()[0]:.4g} (beta_fast {self.beta_fast:g}), so it "
                f"cannot end at critical_pair {pair}; set a larger critical_pair or beta_fast"
            )
        return replace(self, beta_slow=beta_slow)

    def extended_length(self) -> int | None:
        return round(self.factor * self.original_max_position_embeddings)

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        if original is not None:
            return ratio_warning(self, entry, original, length)
        assumed = assumed_original(self)
        if self.factor == 1:
            return [assumed]
        longer = self.extended_length()
        return [
            f"{assumed}, and vLLM before 0.30 serves {longer} tokens; the config does not say whether {length} "
            f"includes the factor {self.factor:g}, so the model is taken as trained for {length} tokens (if it is "
            f"trained for {longer}, set that with --from)"
        ]
