"""The theory by itself, without a model: how far a base reaches, which bases reach a length, what a method sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.results import Result
from ropewalk.planning.rules import bound_at, check_target, origin_of
from ropewalk.rope import Default, DynamicNtk, RopeFrequencies, RopeMethod, method_for_target
from ropewalk.rope.methods.base import Origin
from ropewalk.rope.theory import (
    SEARCH_LIMIT,
    FeasibleBases,
    check_rule,
    context_bound,
    critical_dimension,
    feasible_bases,
    inv_freq_of_base,
    recommended_theta,
    similarity_margin,
    theta_by_rule,
)
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import RECOMMENDED


@dataclass(frozen=True)
class BoundResult(Result):
    """How far bases reach.

    Attributes:
        rotary_dim: rotated dimensions of a head.
        bases: the one that was asked about, then those for comparison.
        bounds: context bound in tokens by base; None where no violation was found up to ``SEARCH_LIMIT``.
        margin_there: B(m) at the first distance below zero; None where there is none.
    """

    rotary_dim: int
    bases: tuple[float, ...]
    bounds: Mapping[float, int | None]
    margin_there: float | None

    @property
    def rope_theta(self) -> float:
        """The base that was asked about."""
        return self.bases[0]

    @property
    def first_violation(self) -> int | None:
        """The first distance at which B(m) is below zero, tokens."""
        bound = self.bounds[self.rope_theta]
        return None if bound is None else bound + 1

    def to_json(self) -> dict[str, Any]:
        """JSON values, with formula and source."""
        reach = {base: SEARCH_LIMIT if bound is None else bound for base, bound in self.bounds.items()}
        return {
            "rope_theta": self.rope_theta,
            "rotary_dim": self.rotary_dim,
            "context_bound": reach[self.rope_theta],
            "at_least": self.first_violation is None,
            "first_violation": self.first_violation,
            "margin_there": self.margin_there,
            "others": [{"rope_theta": base, "context_bound": reach[base]} for base in self.bases[1:]],
            "formula": "largest L with B(m) = Σ cos(m·b^(-2i/d)) ≥ 0 for all 0 ≤ m ≤ L",
            "source": "arXiv:2405.14591, section 4.3",
        }


def bound_of(rope_theta: float, rotary_dim: int, others: Sequence[float] = ()) -> BoundResult:
    """The context bound of a base: up to which distance a similar token attracts more than a random one.

    Args:
        rope_theta: RoPE base.
        rotary_dim: rotated dimensions of a head.
        others: bases for comparison.

    Raises:
        RopewalkError: if an argument is out of range.
    """
    bases = (rope_theta, *others)
    frequencies = {base: inv_freq_of_base(rotary_dim, base) for base in bases}
    bounds = {base: context_bound(inv_freq) for base, inv_freq in frequencies.items()}
    bound = bounds[rope_theta]
    margin = None if bound is None else float(similarity_margin(frequencies[rope_theta], bound + 1))
    return BoundResult(rotary_dim, bases, bounds, margin)


@dataclass(frozen=True)
class BasesResult(Result):
    """Which bases reach a length.

    Attributes:
        found: the map of them.
        ceiling: the largest base that was looked at.
    """

    found: FeasibleBases
    ceiling: float

    @property
    def safe_base_near_ceiling(self) -> bool:
        """Whether the safe base lies so close to the ceiling that holes may follow beyond it."""
        safe = self.found.safe_base
        return safe is not None and safe > self.ceiling / 10 and self.ceiling > 10

    def to_json(self) -> dict[str, Any]:
        """JSON values, with formula and source."""
        return {
            **asdict(self.found),
            "safe_base_near_ceiling": self.safe_base_near_ceiling,
            "formula": "B(m) = Σ cos(m·b^(-2i/d)) ≥ 0 for all 0 ≤ m ≤ length",
            "source": "arXiv:2405.14591, equation 7; intervals found exactly, at least 1e-6 wide (relative)",
        }


def bases_for(length: int, rotary_dim: int, ceiling: float, progress: Progress | None = None) -> BasesResult:
    """The bases that reach a length: the infimum, every feasible interval, and the safe base above the holes.

    Args:
        length: tokens.
        rotary_dim: rotated dimensions of a head.
        ceiling: largest base to look at.
        progress: of the search.

    Raises:
        RopewalkError: if an argument is out of range.
    """
    return BasesResult(feasible_bases(length, rotary_dim, ceiling, progress), ceiling)


@dataclass(frozen=True)
class ThetaResult(Result):
    """The base for a longer context by a rule.

    Attributes:
        before, after: unscaled RoPE with the present base and with the new one.
        trained_length, target_length: tokens.
        rule: that gave the base; the one that the recommended base follows, where that was asked for.
        reason: why that one; None where the rule was named.
        context_bound: of the new base, tokens.
        critical_dimension: rotary dimensions that complete a turn within the trained length.
        origin: formula, source and caveat of the rule.
    """

    before: Default
    after: Default
    trained_length: int
    target_length: int
    rule: str
    reason: str | None
    context_bound: int
    critical_dimension: int
    origin: Origin

    @property
    def reaches_target(self) -> bool:
        """Whether the new base's context bound covers the target."""
        return self.context_bound >= self.target_length

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "rope_theta": self.after.rope_theta,
            "rule": self.rule,
            "reason": self.reason,
            "critical_dimension": self.critical_dimension,
            "from": {"rope_theta": self.before.rope_theta, "length": self.trained_length},
            "to": self.target_length,
            "rotary_dim": self.before.rotary_dim,
            "context_bound": self.context_bound,
            "reaches_target": self.reaches_target,
            **self.origin._asdict(),
        }


def theta_for(
    current: Default,
    trained_length: int,
    target_length: int,
    rule: str = RECOMMENDED,
    ceiling: float | None = None,
    progress: Progress | None = None,
) -> ThetaResult:
    """The base for a longer context by a rule, and how far that base reaches.

    Args:
        current: unscaled RoPE of the model.
        trained_length, target_length: tokens.
        rule: one of :data:`ropewalk.rope.theory.RULES`.
        ceiling, progress: of the rule lower-bound.

    Raises:
        RopewalkError: if there is no such rule, or it has no answer.
    """
    check_rule(rule)
    check_target(target_length)
    dim, base = current.rotary_dim, current.rope_theta
    theta = theta_by_rule(rule, dim, base, trained_length, target_length, ceiling, progress)
    reason = None
    if rule == RECOMMENDED:
        found = recommended_theta(base, trained_length, target_length)
        rule, reason = found.rule, found.reason
    after = Default(dim, theta)
    return ThetaResult(
        current,
        after,
        trained_length,
        target_length,
        rule,
        reason,
        bound_at(after, target_length),
        critical_dimension(dim, base, trained_length),
        origin_of(rule, current),
    )


@dataclass(frozen=True)
class FrequenciesResult(Result):
    """The frequencies of a method for a target length.

    Attributes:
        name: of the method, as it was asked for.
        before, after: RoPE of the model, and for the target.
        trained_length, target_length: tokens.
        frequencies: of the second at the target length.
        context_bound: of them, tokens.
    """

    name: str
    before: RopeMethod
    after: RopeMethod
    trained_length: int
    target_length: int
    frequencies: RopeFrequencies
    context_bound: int

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``inv_freq`` in rad/token."""
        return {
            "method": self.name,
            "rope_theta": self.after.rope_theta,
            "rotary_dim": self.before.rotary_dim,
            "from": self.trained_length,
            "to": self.target_length,
            "inv_freq": self.frequencies.inv_freq.tolist(),
            "attention_factor": self.frequencies.attention_factor,
            "context_bound": self.context_bound,
        }


def frequencies_for(
    name: str,
    current: Default,
    trained_length: int,
    target_length: int,
    parameters: Mapping[str, Any] | None = None,
) -> FrequenciesResult:
    """The frequencies of a method for a target length.

    Args:
        name: of any method, dynamic NTK included.
        current: unscaled RoPE of the model.
        trained_length, target_length: tokens.
        parameters: of the method, other than derived; None says nothing.

    Raises:
        RopewalkError: as :func:`ropewalk.rope.method_for_target`.
    """
    given = {key: value for key, value in (parameters or {}).items() if value is not None}
    if name == DynamicNtk.name:
        unknown = given.keys() - {"factor"}
        if unknown:
            raise RopewalkError(f"{min(unknown)} has no meaning for dynamic, which takes factor")
        factor = given.get("factor") or target_length / trained_length
        after: RopeMethod = DynamicNtk(current.rotary_dim, current.rope_theta, factor, trained_length)
    else:
        after = method_for_target(name, current, trained_length, target_length, parameters=given)
    frequencies = after.frequencies(target_length)
    bound = bound_at(after, target_length)
    return FrequenciesResult(name, current, after, trained_length, target_length, frequencies, bound)
