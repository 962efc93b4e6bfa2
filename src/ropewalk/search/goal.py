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
from ropewalk.rope.theory import critical_pairs
from ropewalk.search.space import (
    ALL_PAIRS,
    CAP,
    CRITICAL_CAP,
    CRITICAL_DIMENSION,
    Candidate,
    Space,
    SpaceName,
)

PI, NTK, YARN = "pi", "ntk", "yarn"
ORIGINAL, LONG = "original", "long"
TITLES = {PI: "PI", NTK: "NTK", YARN: "YaRN"}
"""Titles of baselines; a baseline without one is shown by its name."""


@dataclass(frozen=True)
class Goal:
    """Checkpoint and target length of a search.

    A target beyond the original length is a search for long factors, otherwise for short factors. A longrope
    checkpoint keeps its original length, so the factors of a second search are relative to the unscaled frequencies
    too.

    Attributes:
        current: current RoPE method of the checkpoint, with dynamic and plain NTK resolved by :func:`goal_of`.
        trained_length: tokens that the checkpoint is trained for.
        original_length: ``T``, trained length before any extension by longrope, tokens.
        target_length: tokens that factors are searched for.
        attention_factor: attention factor of every candidate; a config has only one for short and long factors.
    """

    current: Default | LongRope
    trained_length: int
    original_length: int
    target_length: int
    attention_factor: float

    @property
    def short(self) -> bool:
        """Whether this is a search for short factors."""
        return self.target_length <= self.original_length

    @property
    def scale(self) -> float:
        """Extension ratio ``s``: target length / original length, at least 1."""
        return max(1.0, self.target_length / self.original_length)

    def space(
        self,
        start_tokens: tuple[int, ...] = (0,),
        largest: float | None = None,
        name: SpaceName = ALL_PAIRS,
    ) -> Space:
        """Search space of this goal.

        Args:
            start_tokens: allowed start-token counts n̂.
            largest: upper bound of the factors. None means ``1.25 · s`` for long factors (``2 · s`` in LongRoPE2's
                space); for short factors, half of the checkpoint's largest long factor but at least 1.25, because
                short texts need less interpolation.
            name: LongRoPE's space or LongRoPE2's.

        Raises:
            RopewalkError: if the start tokens cover the whole target length; if LongRoPE2's space is to have short
                factors, or no whole factor from ``s`` to ``largest``.
        """
        if name == CRITICAL_DIMENSION:
            return self._critical_space(largest)
        if largest is None:
            scale = self.scale
            if self.short and isinstance(self.current, LongRope):
                # CAP is multiplied in below, so that the bound is half of the largest long factor.
                scale = max(1.0, max(self.current.long_factor) / CAP / 2)
            largest = CAP * scale
        if max(start_tokens, default=0) >= self.target_length:
            raise RopewalkError(
                f"{max(start_tokens)} start tokens would leave all {self.target_length} positions unscaled; lower "
                "start_tokens (--start-tokens)"
            )
        return Space(self.current.rotary_dim // 2, largest, start_tokens)

    def _critical_space(self, largest: float | None) -> Space:
        if self.short:
            raise RopewalkError(
                f"the space {CRITICAL_DIMENSION} is for long factors, but factors for {self.target_length} tokens "
                f"(within the original length of {self.original_length}) are short factors; use the space {ALL_PAIRS}"
            )
        largest = CRITICAL_CAP * self.scale if largest is None else largest
        allowed = tuple(self.critical_pairs)
        return Space(self.current.rotary_dim // 2, largest, smallest=self.scale, critical_pairs=allowed)

    @property
    def critical_pairs(self) -> range:
        """Pairs that may be the real critical pair; the last is the theoretical one."""
        return critical_pairs(self.current.rotary_dim, self.current.rope_theta, self.original_length)

    def method(self, candidate: Candidate) -> LongRope:
        """Method to measure a candidate with; its factors apply at every length.

        Short factors are measured with the start tokens of the long factors, because a config has one count for both.
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
        """Method for the extended checkpoint: the candidate's factors beside the checkpoint's other factor list, or 1s.

        Raises:
            RopewalkError: if a search for short factors has start tokens.
        """
        ones = (1.0,) * len(candidate.rescale_factors)
        kept = self.current if isinstance(self.current, LongRope) else None
        if not self.short:
            return replace(self.method(candidate), short_factor=kept.short_factor if kept else ones)
        if candidate.start_tokens:
            raise RopewalkError(
                f"a search for short factors cannot have start tokens, got {candidate.start_tokens}; set start_tokens "
                "(--start-tokens) to 0"
            )
        return replace(self.method(candidate), long_factor=kept.long_factor if kept else ones)

    def baselines(self) -> dict[str, RopeMethod]:
        """Methods that need no search, by name; the result is compared with them.

        For long factors these are PI, NTK and YaRN, each with its own attention factor. On a longrope checkpoint their
        factors multiply the checkpoint's, with the candidates' attention factor. For short factors they are the
        original frequencies and the checkpoint's long factors.
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
            # On a checkpoint that already has long factors, a rule stretches what was trained, so its factors
            # multiply them.
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

    def seeds(self, space: Space, seed: int = 0) -> dict[str, Candidate]:
        """Initial candidates by name: the baselines' factors, moved to the nearest point of the space.

        The baselines lie outside LongRoPE2's space. There the initial candidates are one for each critical pair, with
        factors drawn with the random ``seed``.
        """
        if space.has_critical_pairs:
            import numpy as np

            # A generator of its own: the algorithm draws from that of the seed itself.
            random = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
            return {f"critical pair {each.critical_pair}": each for each in space.start(random)}
        return {name: space.nearest(factors) for name, factors in self.baseline_factors().items()}

    def baseline_factors(self) -> dict[str, tuple[float, ...]]:
        """Rescale factors λ ``[pairs]`` of each baseline, relative to the unscaled frequencies."""
        return {
            name: method.long_factor if isinstance(method, LongRope) else rescale_factors(method)
            for name, method in self.baselines().items()
        }


def goal_of(
    current: RopeMethod, trained_length: int, target_length: int, attention_factor: float | None = None
) -> Goal:
    """Goal of a search on a checkpoint with the given RoPE method.

    Args:
        current: RoPE method of the checkpoint.
        trained_length: tokens that the checkpoint is trained for.
        target_length: tokens; beyond the trained length, or at most the original length of a longrope checkpoint.
        attention_factor: attention factor of all candidates. None means the published ``√(1 + ln s / ln T)``, or for
            short factors the checkpoint's own.

    Raises:
        RopewalkError: if the checkpoint already uses another scaling method, or the target length needs no scaling.
    """
    # NTK only changes the base, and dynamic NTK leaves the frequencies unchanged up to the trained length.
    plain = current.as_default() if isinstance(current, Ntk) else current
    if isinstance(plain, DynamicNtk):
        plain = Default(plain.rotary_dim, plain.rope_theta)
    if not isinstance(plain, Default | LongRope):
        larger = f"{current.name} with a larger factor" if hasattr(current, "factor") else current.name
        raise RopewalkError(
            f"the checkpoint uses {current.name} scaling, but the search supports only unscaled RoPE and longrope; "
            f"either search on the unscaled checkpoint, or use {larger} instead of a search"
        )
    original = plain.original_max_position_embeddings if isinstance(plain, LongRope) else trained_length
    if target_length < 1:
        raise RopewalkError(f"the target length must be 1 token or more, got {target_length}")
    # Within the trained length, only a longrope checkpoint has factors of its own to search for.
    if target_length <= trained_length and not (isinstance(plain, LongRope) and target_length <= original):
        wanted = f"above {trained_length} tokens"
        if isinstance(plain, LongRope):
            wanted = f"either {wanted} for long factors, or up to {original} tokens for short factors"
        raise RopewalkError(
            f"a search for {target_length} tokens has nothing to extend, because the checkpoint is trained for "
            f"{trained_length} tokens; give a target length {wanted}"
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
    """Rescale factors λ ``[pairs]`` of a method that does not depend on the length: unscaled inv_freq / inv_freq."""
    unscaled = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    return tuple((unscaled / method.frequencies().inv_freq).tolist())
