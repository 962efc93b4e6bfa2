"""RoPE theory without a model: context bound of a base, bases that reach a length, and frequencies of a method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.io.progress import Reporter, Silent, counted
from ropewalk.io.results import Result
from ropewalk.parallel.context import RunContext
from ropewalk.planning.rules import check_target, origin_of
from ropewalk.planning.settings import BasesSettings, BoundSettings, FrequenciesSettings, ThetaSettings
from ropewalk.rope import Default, DynamicNtk, RopeFrequencies, RopeMethod, bound_at, method_for_target
from ropewalk.rope.methods.base import CRITICAL_PAIR, Origin
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
from ropewalk.rope.theory.rules import RECOMMENDED

DISTANCES = "distances"
"""Unit in which the search for bases reports its progress."""
SHORTEST_HALF = 1024
"""Lower limit in tokens of the lengths that :func:`bases_for_halves` maps."""


@dataclass(frozen=True)
class BoundResult(Result):
    """Context bounds of one or more bases.

    Attributes:
        rotary_dim: number of rotated dimensions per head.
        bases: the requested base, then those to compare it with.
        bounds: context bound in tokens by base. None if no violation was found up to ``SEARCH_LIMIT``.
        margin_there: B(m) at the first distance where it is negative. None if there is none.
    """

    rotary_dim: int
    bases: tuple[float, ...]
    bounds: Mapping[float, int | None]
    margin_there: float | None

    @property
    def rope_theta(self) -> float:
        """The requested base."""
        return self.bases[0]

    @property
    def first_violation(self) -> int | None:
        """First distance in tokens at which B(m) is negative."""
        bound = self.bounds[self.rope_theta]
        return None if bound is None else bound + 1

    def to_json(self) -> dict[str, Any]:
        """JSON values, with formula and source."""
        # A bound that was not found is at least the limit of the search; `at_least` says so.
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


def bound_of(config: BoundSettings) -> BoundResult:
    """Compute a base's context bound, the distance up to which similar tokens get no less attention than random ones.

    Args:
        config: the base, and others to compare it with.

    Raises:
        RopewalkError: if an argument is out of range.
    """
    rope_theta, rotary_dim = config.rope_theta, config.rotary_dim
    bases = (rope_theta, *config.compare)
    # A dict, so that a base that is compared with itself is computed once.
    frequencies = {base: inv_freq_of_base(rotary_dim, base) for base in bases}
    bounds = {base: context_bound(inv_freq) for base, inv_freq in frequencies.items()}
    bound = bounds[rope_theta]
    margin = None if bound is None else float(similarity_margin(frequencies[rope_theta], bound + 1))
    return BoundResult(rotary_dim, bases, bounds, margin)


@dataclass(frozen=True)
class BasesResult(Result):
    """Bases that reach a length.

    Attributes:
        found: intervals of feasible bases.
        ceiling: largest base searched.
    """

    found: FeasibleBases
    ceiling: float

    @property
    def safe_base_near_ceiling(self) -> bool:
        """Whether the safe base is so close to the ceiling that infeasible bases may follow beyond the ceiling."""
        safe = self.found.safe_base
        # A decade of feasible bases below the ceiling makes a gap beyond it unlikely.
        return safe is not None and safe > self.ceiling / 10 and self.ceiling > 10

    def to_json(self) -> dict[str, Any]:
        """JSON values, with formula and source."""
        return {
            **asdict(self.found),
            "safe_base_near_ceiling": self.safe_base_near_ceiling,
            "formula": "B(m) = Σ cos(m·b^(-2i/d)) ≥ 0 for all 0 ≤ m ≤ length",
            "source": "arXiv:2405.14591, equation 7; intervals found exactly, at least 1e-6 wide (relative)",
        }


def bases_for(config: BasesSettings, context: RunContext | None = None) -> BasesResult:
    """Find the bases that reach a length: the infimum, every feasible interval, and the safe base.

    Args:
        config: the length and the largest base to search.
        context: run context whose reporter shows progress.

    Raises:
        RopewalkError: if an argument is out of range.
    """
    length = config.length
    with counted(_reporter(context), f"bases for {length:,} tokens", length, DISTANCES) as progress:
        found = feasible_bases(length, config.rotary_dim, config.ceiling, progress)
    return BasesResult(found, config.ceiling)


def bases_for_halves(result: BasesResult, context: RunContext | None = None) -> list[FeasibleBases]:
    """Find the bases for half the length, a quarter and so on down to ``SHORTEST_HALF``, shortest first.

    Args:
        result: the bases for the whole length.
        context: run context whose reporter shows progress.
    """
    whole = result.found
    lengths = [whole.length]
    # Shortest first: the cost grows with the length, so progress appears early.
    while lengths[0] >= 2 * SHORTEST_HALF:
        lengths.insert(0, lengths[0] // 2)
    maps = []
    with counted(_reporter(context), "figure", len(lengths), "lengths") as progress:
        for done, length in enumerate(lengths[:-1]):
            progress(done, len(lengths))
            maps.append(feasible_bases(length, whole.rotary_dim, result.ceiling))
    return maps


@dataclass(frozen=True)
class LongerContext(Result):
    """RoPE before and after extending the context.

    Attributes:
        before, after: RoPE of the model, and RoPE for the target length.
        trained_length, target_length: tokens.
        context_bound: context bound of ``after``, tokens.
    """

    before: RopeMethod
    after: RopeMethod
    trained_length: int
    target_length: int
    context_bound: int


@dataclass(frozen=True)
class ThetaResult(LongerContext):
    """The base that a rule gives for a longer context. RoPE is unscaled before and after.

    Attributes:
        rule: the rule that gave the base. For ``recommended``, the rule that the recommendation chose.
        reason: why the recommendation chose that rule. None if the user named the rule.
        critical_dimension: number of rotary dimensions that complete a turn within the trained length.
        origin: formula, source and caveat of the rule.
    """

    rule: str
    reason: str | None
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


def theta_for(config: ThetaSettings, context: RunContext | None = None) -> ThetaResult:
    """Compute the base that a rule gives for a longer context, and the context bound of that base.

    Args:
        config: unscaled RoPE of the model, lengths, and the rule.
        context: run context whose reporter shows progress.

    Raises:
        RopewalkError: if the rule is unknown or gives no base.
    """
    current = Default(config.rotary_dim, config.rope_theta)
    trained_length, target_length, rule = config.from_length, config.to_length, config.rule
    # Both are checked before the search, which takes minutes at long lengths.
    check_rule(rule)
    check_target(target_length)
    dim, base = current.rotary_dim, current.rope_theta
    with counted(_reporter(context), f"safe base for {target_length:,} tokens", None, DISTANCES) as progress:
        theta = theta_by_rule(rule, dim, base, trained_length, target_length, config.ceiling, progress)
    # The result names the rule that the recommendation picked, so that its formula and source can be shown.
    reason = None
    if rule == RECOMMENDED:
        found = recommended_theta(base, trained_length, target_length, dim)
        rule, reason = found.rule, found.reason
    after = Default(dim, theta)
    return ThetaResult(
        current,
        after,
        trained_length,
        target_length,
        bound_at(after, target_length),
        rule,
        reason,
        critical_dimension(dim, base, trained_length),
        origin_of(rule, current),
    )


@dataclass(frozen=True)
class FrequenciesResult(LongerContext):
    """Frequencies of a RoPE method for a target length.

    Attributes:
        name: method as the user named it.
        frequencies: frequencies of ``after`` at the target length.
    """

    name: str
    frequencies: RopeFrequencies

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


def frequencies_for(config: FrequenciesSettings) -> FrequenciesResult:
    """Compute the frequencies of a RoPE method for a target length.

    Args:
        config: the method (also ``dynamic``), unscaled RoPE of the model, and lengths.

    Raises:
        RopewalkError: for the reasons of :func:`ropewalk.rope.method_for_target`, or if the file of factors cannot be
            read.
    """
    name, current = config.method, Default(config.rotary_dim, config.rope_theta)
    trained_length, target_length = config.from_length, config.to_length
    short, long = (None, None) if config.factors is None else factor_lists(config.factors)
    parameters = {
        "factor": config.factor,
        CRITICAL_PAIR: config.critical_pair,
        "short_factor": short,
        "long_factor": long,
        "clipped": config.clipped,
    }
    given = {key: value for key, value in parameters.items() if value is not None}
    if name == DynamicNtk.name:
        unknown = given.keys() - {"factor"}
        if unknown:
            raise RopewalkError(f"{min(unknown)} does not apply to the method dynamic; it takes factor")
        factor = config.factor or target_length / trained_length
        # Dynamic NTK has no frequencies to train with, so method_for_target refuses it; these are the ones it
        # runs with.
        after: RopeMethod = DynamicNtk(current.rotary_dim, current.rope_theta, factor, trained_length)
    else:
        after = method_for_target(name, current, trained_length, target_length, parameters=given)
    frequencies = after.frequencies(target_length)
    bound = bound_at(after, target_length)
    return FrequenciesResult(current, after, trained_length, target_length, bound, name, frequencies)


def factor_lists(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read the lists ``short_factor`` and ``long_factor`` from a JSON file, one number per rotary pair.

    Raises:
        RopewalkError: if the file cannot be read or lacks one of the lists.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RopewalkError(f"cannot read {path} as JSON: {error}") from error
    # The names of a config's longrope entry, so that such an entry can be given as it is.
    keys = ("short_factor", "long_factor")
    if not isinstance(values, dict) or not all(isinstance(values.get(key), list) for key in keys):
        raise RopewalkError(f"{path} must contain a JSON object with the lists short_factor and long_factor")
    return tuple(values[keys[0]]), tuple(values[keys[1]])


def _reporter(context: RunContext | None) -> Reporter:
    return Silent() if context is None else context.rank_0_reporter
