"""The goal of a search: its checkpoint and target length, the RoPE method of a candidate, and the baselines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    LongRope,
    Ntk,
    RopeMethod,
    Yarn,
    longrope_attention_factor,
    unscaled_inv_freq,
)
from ropewalk.search.space import CAP, Candidate, Space

PI, NTK, YARN = "pi", "ntk", "yarn"
ORIGINAL, LONG = "original", "long"
TITLES = {PI: "PI", NTK: "NTK", YARN: "YaRN"}
"""Baselines as people write them; the others go by their names."""


@dataclass(frozen=True)
class Goal:
    """A checkpoint, and the length that factors are searched for.

    Beyond the original length the long factors are searched, up to it the short ones. A longrope checkpoint keeps
    its original length: the factors of a second search are relative to the unscaled frequencies too.

    Attributes:
        current: :class:`~ropewalk.rope.Default` or :class:`~ropewalk.rope.LongRope`, as :func:`goal_of` gives it.
        trained_length: tokens that the checkpoint is trained for now.
        original_length: ``T``, tokens before any extension by longrope.
        target_length: tokens.
        attention_factor: of every candidate; it belongs to the whole of the config.
    """

    current: Default | LongRope
    trained_length: int
    original_length: int
    target_length: int
    attention_factor: float

    @property
    def short(self) -> bool:
        """Whether the short factors are searched."""
        return self.target_length <= self.original_length

    @property
    def scale(self) -> float:
        """``s``: target over original length, at least 1."""
        return max(1.0, self.target_length / self.original_length)

    def space(self, start_tokens: tuple[int, ...] = (0,), largest: float | None = None) -> Space:
        """Where to search.

        Args:
            start_tokens: the n̂ to choose from.
            largest: upper bound of the factors; ``1.25 · s`` if None. For short factors, None means half of the
                checkpoint's largest long factor, at least 1.25, because less has to be interpolated.
        """
        if largest is None:
            scale = self.scale
            if self.short and isinstance(self.current, LongRope):
                scale = max(1.0, max(self.current.long_factor) / CAP / 2)
            largest = CAP * scale
        if max(start_tokens, default=0) >= self.target_length:
            raise RopewalkError(
                f"{max(start_tokens)} start tokens leave no position to scale within {self.target_length} tokens; "
                "choose fewer"
            )
        return Space(self.current.rotary_dim // 2, largest, start_tokens)

    def method(self, candidate: Candidate) -> LongRope:
        """The method to measure a candidate with: its factors at every length.

        Short factors are measured with the start tokens of the long ones, which the checkpoint will run them with.
        """
        factors = candidate.rescale_factors
        own = self.current.start_tokens if self.short and isinstance(self.current, LongRope) else 0
        return LongRope(
            self.current.rotary_dim,
            self.current.rope_theta,
            factors,
            factors,
            self.attention_factor,
            self.original_length,
            candidate.start_tokens or own,
        )

    def extended(self, candidate: Candidate) -> LongRope:
        """The method that a checkpoint gets: the other length's factors stay as they were, 1 if there are none."""
        ones = (1.0,) * len(candidate.rescale_factors)
        kept = self.current if isinstance(self.current, LongRope) else None
        if not self.short:
            return replace(self.method(candidate), short_factor=kept.short_factor if kept else ones)
        if candidate.start_tokens:
            raise RopewalkError(
                f"start tokens apply to long factors only, got {candidate.start_tokens}; use 0 for short factors"
            )
        return replace(self.method(candidate), long_factor=kept.long_factor if kept else ones)

    def baselines(self) -> dict[str, RopeMethod]:
        """What a search has to beat, by name: methods that need none.

        For long factors PI, NTK and YaRN, each with its own attention factor; on top of a longrope checkpoint,
        whose factors they multiply, with that of the candidates. For short factors the original frequencies and
        the long factors.
        """
        if self.short:
            named = {ORIGINAL: (1.0,) * (self.current.rotary_dim // 2)}
            if isinstance(self.current, LongRope):
                named[LONG] = self.current.long_factor
            return {name: self.method(Candidate(factors)) for name, factors in named.items()}
        plain = self._on_top()
        if isinstance(self.current, Default):
            return plain
        composed: dict[str, RopeMethod] = {}
        for name, method in plain.items():
            factors = zip(self.current.long_factor, rescale_factors(method), strict=True)
            composed[name] = self.method(Candidate(tuple(a * b for a, b in factors)))
        return composed

    def _on_top(self) -> dict[str, RopeMethod]:
        dim, theta = self.current.rotary_dim, self.current.rope_theta
        ratio = self.target_length / self.trained_length
        return {
            PI: Linear(dim, theta, ratio),
            NTK: Ntk(dim, theta, ratio),
            YARN: Yarn(dim, theta, ratio, self.trained_length),
        }

    def seeds(self, space: Space) -> dict[str, Candidate]:
        """The candidates to begin with: the baselines' factors, brought into the space."""
        return {name: space.nearest(factors) for name, factors in self.baseline_factors().items()}

    def baseline_factors(self) -> dict[str, tuple[float, ...]]:
        """``[pairs]`` λ of each baseline, relative to the unscaled frequencies."""
        return {
            name: method.long_factor if isinstance(method, LongRope) else rescale_factors(method)
            for name, method in self.baselines().items()
        }


def goal_of(
    current: RopeMethod, trained_length: int, target_length: int, attention_factor: float | None = None
) -> Goal:
    """The goal of a search from a checkpoint's method.

    Args:
        current: method of the checkpoint.
        trained_length: tokens that it is trained for.
        target_length: tokens; beyond the trained length, or at most the original length of a longrope checkpoint.
        attention_factor: the published ``√(1 + ln s / ln T)`` if None; for short factors the checkpoint's own.

    Raises:
        RopewalkError: if factors would come on top of another scaling, or the length needs none.
    """
    plain = current.as_default() if isinstance(current, Ntk) else current
    if isinstance(plain, DynamicNtk):
        plain = Default(plain.rotary_dim, plain.rope_theta)
    if not isinstance(plain, Default | LongRope):
        raise RopewalkError(
            f"the checkpoint uses {current.name} scaling, but the search supports only unscaled RoPE and longrope; use "
            f"{current.name} with a larger factor, or search from the checkpoint before it was scaled"
        )
    original = plain.original_max_position_embeddings if isinstance(plain, LongRope) else trained_length
    if target_length < 1:
        raise RopewalkError(f"the target length must be 1 token or more, got {target_length}")
    if target_length <= trained_length and not (isinstance(plain, LongRope) and target_length <= original):
        least = f"up to {original} (short factors) or beyond" if isinstance(plain, LongRope) else "beyond"
        raise RopewalkError(
            f"a search for {target_length} tokens has nothing to extend: the checkpoint is trained for "
            f"{trained_length}; give a length {least} {trained_length}"
        )
    if attention_factor is None:
        short = target_length <= original and isinstance(plain, LongRope)
        attention_factor = (
            plain.attention_factor
            if short and isinstance(plain, LongRope)
            else longrope_attention_factor(target_length / original, original)
        )
    return Goal(plain, trained_length, original, target_length, attention_factor)


def rescale_factors(method: RopeMethod) -> tuple[float, ...]:
    """``[pairs]`` λ: the unscaled frequencies over those of a method that does not depend on the length."""
    unscaled = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    return tuple((unscaled / method.frequencies().inv_freq).tolist())
