"""RopeMethod: one frozen value a RoPE scaling method, with one pure function that gives its frequencies.

Notation: ``d`` = ``rotary_dim``, ``b`` = ``rope_theta``, ``θ_i = b^(-2i/d)`` rad/token for the pair
``i = 0 … d/2 - 1``, ``T`` = ``original_max_position_embeddings`` (tokens the model was first trained for),
``s`` = ``factor``. Frequencies are computed in float64 on the CPU, whatever the default device or dtype is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import (
    check_factor,
    check_factors,
    check_ntk_dim,
    check_original_length,
    check_positive,
    check_rotary_dim,
    check_sequence_length,
    check_theta,
    is_number,
)
from ropewalk.rope.theory.scaling import ntk_theta


class RopeFrequencies(NamedTuple):
    """What a method comes down to.

    Attributes:
        inv_freq: float64 ``[rotary_dim // 2]`` on the CPU, rad/token.
        attention_factor: factor on cos and sin alike, so on every q·k its square; dimensionless.
    """

    inv_freq: Tensor
    attention_factor: float


def unscaled_inv_freq(rotary_dim: int, rope_theta: float) -> Tensor:
    """``θ_i = rope_theta^(-2i/rotary_dim)``, float64 ``[rotary_dim // 2]`` on the CPU, rad/token.

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    # The device is named because models are built under torch.device("meta"), which would catch this tensor.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / -rotary_dim
    inv_freq: Tensor = float(rope_theta) ** exponents
    return inv_freq


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """``√(1 + ln s / ln T)``, 1 where ``s ≤ 1``. Source: Ding et al., arXiv:2402.13753; Phi-3's code."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))


@dataclass(frozen=True)
class RopeMethod(ABC):
    """The base of all methods; subclasses are final.

    Attributes:
        rotary_dim: rotated dimensions of a head, even.
        rope_theta: RoPE base as the checkpoint states it, > 1, dimensionless.
        name: how recipes and reports call the method.
        trainable: whether a model may be trained with it.
        length_dependent: whether the frequencies depend on the sequence length.

    Raises:
        RopewalkError: if a field is out of range; the message gives its value.
    """

    rotary_dim: int
    rope_theta: float

    name: ClassVar[str]
    trainable: ClassVar[bool] = True
    length_dependent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_rotary_dim(self.rotary_dim)
        check_theta(self.rope_theta)

    @abstractmethod
    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        """The frequencies for a sequence; pure.

        Args:
            sequence_length: total tokens of the sequence. Only methods whose ``length_dependent`` is true
                read it; for them None means the original length.

        Returns:
            :class:`RopeFrequencies`.
        """


@final
@dataclass(frozen=True)
class Default(RopeMethod):
    """``θ_i``, nothing scaled.

    Also the method "theta" (ABF, adjusted base frequency): it changes ``rope_theta`` and nothing else, so a
    checkpoint extended that way is a plain one with another base, and no config can tell the two apart.
    :data:`Theta` is therefore this class by its other name.

    Source: arXiv:2104.09864; ABF: Xiong et al., arXiv:2309.16039.
    """

    name: ClassVar[str] = "default"

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return RopeFrequencies(unscaled_inv_freq(self.rotary_dim, self.rope_theta), 1.0)


Theta = Default
"""Default under its name in recipes; see :class:`Default`."""


@final
@dataclass(frozen=True)
class Linear(RopeMethod):
    """Position interpolation: ``θ_i / s``. Source: Chen et al., arXiv:2306.15595."""

    factor: float

    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return RopeFrequencies(unscaled_inv_freq(self.rotary_dim, self.rope_theta) / self.factor, 1.0)


@final
@dataclass(frozen=True)
class Ntk(RopeMethod):
    """NTK-aware: the base becomes ``b·s^(d/(d-2))``. ``rope_theta`` is the checkpoint's ``b``.

    In a config it is a default method with the new base, which is what :meth:`as_default` gives.
    """

    factor: float

    name: ClassVar[str] = "ntk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_ntk_dim(self.rotary_dim)

    def as_default(self) -> Default:
        """The same frequencies, bit for bit, as a :class:`Default` with the new base."""
        return Default(self.rotary_dim, ntk_theta(self.rotary_dim, self.rope_theta, self.factor))

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return self.as_default().frequencies()


@final
@dataclass(frozen=True)
class DynamicNtk(RopeMethod):
    """NTK-aware with ``s' = s·L/T - (s - 1)`` from the current length ``L``, unscaled up to ``T``.

    Inference only: each length has another base, so keys already cached, and every training length, would
    disagree with the others. Source: emozilla, "Dynamically Scaled RoPE" (2023).
    """

    factor: float
    original_max_position_embeddings: int

    name: ClassVar[str] = "dynamic"
    trainable: ClassVar[bool] = False
    length_dependent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_ntk_dim(self.rotary_dim)
        check_original_length(self.original_max_position_embeddings)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        original = self.original_max_position_embeddings
        length = max(check_sequence_length(sequence_length) or original, original)
        scale = self.factor * length / original - (self.factor - 1)
        return Default(self.rotary_dim, ntk_theta(self.rotary_dim, self.rope_theta, scale)).frequencies()


@final
@dataclass(frozen=True)
class Yarn(RopeMethod):
    """YaRN: keep the pairs that turn often over ``T``, divide the slow ones by ``s``, ramp between.

    Attributes:
        factor: ``s = T'/T``, target over original length.
        original_max_position_embeddings: ``T``, tokens.
        beta_fast: turns over ``T`` from which a pair is kept.
        beta_slow: turns over ``T`` below which a pair is divided by ``s``.
        attention_factor: None for ``0.1·ln s + 1``, or its ratio below.
        mscale, mscale_all_dim: where both are given and not 0, the attention factor is
            ``(0.1·mscale·ln s + 1) / (0.1·mscale_all_dim·ln s + 1)`` (DeepSeek).
        truncate: whether the ramp's ends are rounded outward to whole pairs.

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
                f"beta_fast must be at least beta_slow, got {self.beta_fast} and {self.beta_slow}"
            )
        # Below this length even the fastest pair turns too seldom, and the published ramp has no upper end.
        if self.original_max_position_embeddings <= 2 * math.pi * self.beta_slow:
            raise RopewalkError(
                f"yarn needs original_max_position_embeddings above 2·pi·beta_slow = "
                f"{2 * math.pi * self.beta_slow:.1f} tokens, got {self.original_max_position_embeddings}"
            )

    def ramp_range(self) -> tuple[float, float]:
        """Pairs (as real numbers) where the ramp begins and ends: kept up to the first, scaled from the last.

        A pair ``i`` turns ``T·θ_i/2π`` times over the original length; solved for ``i``.
        """

        def pair_that_turns(times: float) -> float:
            turns = self.original_max_position_embeddings / (2 * math.pi * times)
            return self.rotary_dim * math.log(turns) / (2 * math.log(self.rope_theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, self.rotary_dim - 1)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        low, high = self.ramp_range()
        # As transformers does where both ends fall on one pair; it keeps the division finite.
        width = high - low if high != low else 0.001
        pairs = torch.arange(self.rotary_dim // 2, dtype=torch.float64, device="cpu")
        scaled = ((pairs - low) / width).clamp(0, 1)
        kept = unscaled_inv_freq(self.rotary_dim, self.rope_theta)
        return RopeFrequencies(kept * (1 - scaled) + kept / self.factor * scaled, self._attention_factor())

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log_factor = math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log_factor + 1) / (0.1 * self.mscale_all_dim * log_factor + 1)
        return 0.1 * log_factor + 1


@final
@dataclass(frozen=True)
class Llama3(RopeMethod):
    """Llama 3.1: keep short wavelengths, divide long ones by ``s``, blend between by turns over ``T``.

    Attributes:
        factor: ``s``; Meta's value is chosen, not T'/T (8 for 8192 to 131072).
        low_freq_factor: turns over ``T`` below which a pair is divided by ``s``.
        high_freq_factor: turns over ``T`` above which a pair is kept; at least ``low_freq_factor``.
        original_max_position_embeddings: ``T``, tokens.

    Source: Llama 3.1's reference code, ``apply_scaling``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    name: ClassVar[str] = "llama3"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_positive("low_freq_factor", self.low_freq_factor)
        check_positive("high_freq_factor", self.high_freq_factor)
        check_original_length(self.original_max_position_embeddings)
        if self.high_freq_factor < self.low_freq_factor:
            raise RopewalkError(
                f"high_freq_factor must be at least low_freq_factor, got {self.high_freq_factor} and "
                f"{self.low_freq_factor}"
            )

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        inv_freq = unscaled_inv_freq(self.rotary_dim, self.rope_theta)
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        # Llama 4 has both at 1: nothing to blend, a pair is kept or divided.
        kept = (
            ((turns - self.low_freq_factor) / span).clamp(0, 1)
            if span
            else (turns >= self.low_freq_factor).double()
        )
        return RopeFrequencies(inv_freq * kept + inv_freq / self.factor * (1 - kept), 1.0)


@final
@dataclass(frozen=True)
class LongRope(RopeMethod):
    """LongRoPE: ``θ_i / λ_i``, with one list of λ up to the original length and another beyond.

    Attributes:
        short_factor: ``[rotary_dim // 2]`` λ for sequences of at most ``T`` tokens, each > 0.
        long_factor: ``[rotary_dim // 2]`` λ for longer sequences, each > 0.
        attention_factor: factor on cos and sin, at every length (see :func:`longrope_attention_factor`).
        original_max_position_embeddings: ``T``, tokens.
        start_tokens: n̂, the positions ``0 … n̂ - 1`` that keep ``θ_i``. :meth:`frequencies` describes the
            positions after them; the rotary module tells them apart, a config cannot.

    Source: Ding et al., arXiv:2402.13753, section 3.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int
    start_tokens: int = 0

    name: ClassVar[str] = "longrope"
    length_dependent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("attention_factor", self.attention_factor)
        check_original_length(self.original_max_position_embeddings)
        for field in ("short_factor", "long_factor"):
            # Configs hold lists; a tuple keeps the value hashable and truly frozen.
            factors = check_factors(field, getattr(self, field), self.rotary_dim // 2)
            object.__setattr__(self, field, factors)
        if isinstance(self.start_tokens, bool) or not isinstance(self.start_tokens, int):
            raise RopewalkError(f"start_tokens must be a whole number, got {self.start_tokens!r}")
        if self.start_tokens < 0:
            raise RopewalkError(f"start_tokens must be 0 or more, got {self.start_tokens}")

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        length = check_sequence_length(sequence_length) or self.original_max_position_embeddings
        long = length > self.original_max_position_embeddings
        factors = torch.tensor(
            self.long_factor if long else self.short_factor, dtype=torch.float64, device="cpu"
        )
        inv_freq = unscaled_inv_freq(self.rotary_dim, self.rope_theta) / factors
        return RopeFrequencies(inv_freq, float(self.attention_factor))


METHODS: dict[str, type[RopeMethod]] = {
    "default": Default,
    "theta": Theta,
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": DynamicNtk,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
}
"""Every method by the name a recipe uses."""
