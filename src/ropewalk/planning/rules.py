"""What each rule would set for a target length, how far that reaches, and where the rule comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope import METHODS, Default, RopeMethod, bound_at, candidate, compared_methods
from ropewalk.rope.methods.base import Origin
from ropewalk.rope.theory import SAFE_CEILING, SCHEDULES, SEARCH_LIMIT, feasible_bases
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import CURRENT, LOWER_BOUND, RECOMMENDED, RULES

LONGEST_SEARCH = 2**21
"""Tokens up to which the feasible bases are mapped without being asked for by name."""
WIDE = 0.1
"""Relative width from which an interval of feasible bases is no accident."""
PUBLISHED_DIM = 128
"""rotary_dim of the models behind the published schedules."""

ORIGINS: dict[str, Origin] = {
    "current": Origin(
        "the frequencies as they are",
        "config.json",
        "positions beyond the trained length turn the slow pairs to angles that training never showed",
    ),
    "critical-dimension": Origin(
        "b' = b^(ln(T'/2π) / ln(T/2π))",
        "Liu et al., arXiv:2310.05209, theorem 1; used by Gradient for Llama 3",
        "keeps the number of pairs that complete a turn; says nothing of the margin B(m), so look at the bound",
    ),
    "length-floor": Origin(
        "the least b' with B(m) = Σ cos(m·b'^(-2i/128)) ≥ 0 for all m ≤ T'",
        "Men et al., arXiv:2405.14591, equation 7; the infimum of what ropewalk rope base maps",
        "counts the length alone, and larger bases fail again in between: a least demand, not a guarantee",
    ),
    "recommended": Origin(
        "the larger of critical-dimension and length-floor",
        "compared with what published models took: docs/theory.md",
        "two thirds of the published bases lie within a factor of 2 of it",
    ),
    "ntk": Origin(
        "b' = b·(T'/T)^(d/(d-2))",
        "bloc97 (2023); Peng et al., arXiv:2309.00071, equation 16",
        "made for use without training; with training, larger bases did better (arXiv:2411.13476)",
    ),
    "lower-bound": Origin(
        "the least b' from which every larger base has B(m) = Σ cos(m·b'^(-2i/d)) ≥ 0 for all m ≤ T'",
        "Men et al., arXiv:2405.14591, equation 7; safe base in place of the infimum, see docs/theory.md",
        "a necessary condition, derived for similar against random keys; it does not say how much training is needed",
    ),
}
"""Formula, source and caveat of each rule but the schedules; a method says its own."""


@dataclass(frozen=True)
class Setting:
    """What one rule sets.

    Attributes:
        rule: as in :func:`ropewalk.rope.candidates`.
        method: the method, None where the rule does not apply.
        context_bound: tokens up to which B(m) ≥ 0; ``SEARCH_LIMIT`` where no violation was found up to there.
        reaches_target: whether that is the target or more; None where the rule does not apply.
        reason: why the rule does not apply.
        formula, source, caveat: where the number comes from and what it leaves out.
    """

    rule: str
    method: RopeMethod | None
    context_bound: int | None
    reaches_target: bool | None
    reason: str | None
    formula: str
    source: str
    caveat: str

    @property
    def reach(self) -> str:
        """The context bound in words; empty where the rule does not apply."""
        return "" if self.context_bound is None else tokens_text(self.context_bound)

    def to_json(self) -> dict[str, Any]:
        """JSON values; the method by name, base and, where it has one, factor."""
        values = asdict(self)
        method = values.pop("method") and self.method
        return {
            "rule": values.pop("rule"),
            "method": None if method is None else method.name,
            "rope_theta": None if method is None else method.rope_theta,
            "factor": None if method is None else getattr(method, "factor", None),
            **values,
        }


def tokens_text(bound: int) -> str:
    """A context bound in words: the search for it ends somewhere."""
    return f"more than {SEARCH_LIMIT:,} tokens" if bound >= SEARCH_LIMIT else f"{bound:,} tokens"


def compared() -> tuple[str, ...]:
    """The rules that are compared: all but the recommended one, which is one of them, and the slow lower-bound."""
    bases = tuple(rule for rule in RULES if rule not in (RECOMMENDED, LOWER_BOUND))
    return (CURRENT, *bases, *compared_methods())


def compare_settings(current: RopeMethod, trained_length: int, target_length: int) -> list[Setting]:
    """The setting of each rule of :func:`compared` for a target length; those that do not apply say why.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens, the second not shorter.

    Raises:
        RopewalkError: if the target is beyond ``SEARCH_LIMIT``.
    """
    check_target(target_length)
    settings = []
    for name in compared():
        try:
            method = candidate(name, current, trained_length, target_length)
        except RopewalkError as error:
            settings.append(Setting(name, None, None, None, str(error), *origin_of(name, current)))
        else:
            settings.append(setting_of(name, current, method, target_length))
    return settings


def check_target(target_length: int) -> None:
    """Refuse a length up to which no context bound is searched."""
    if target_length > SEARCH_LIMIT:
        raise RopewalkError(f"the target length may be at most {SEARCH_LIMIT} tokens, got {target_length}")


def setting_of(rule: str, current: RopeMethod, method: RopeMethod, target_length: int) -> Setting:
    """A rule's setting with its context bound.

    Args:
        rule: its name.
        current: the method the checkpoint was trained with.
        method: what the rule sets.
        target_length: tokens.
    """
    bound = bound_at(method, target_length)
    return Setting(rule, method, bound, bound >= target_length, None, *origin_of(rule, current))


@dataclass(frozen=True)
class FeasibleSummary:
    """Which bases reach a length by the similarity margin, for a model's own rotary dimension.

    Attributes:
        rotary_dim: rotated dimensions of a head.
        ceiling: largest base that was looked at.
        infimum: the smallest one.
        wide_from: the low end of the first interval at least ``WIDE`` wide (relative).
        safe_base: from here to the ceiling every base reaches.
        intervals: how many intervals there are.
        reason: why there is no map; the other values are None then.
    """

    rotary_dim: int
    ceiling: float
    infimum: float | None = None
    wide_from: float | None = None
    safe_base: float | None = None
    intervals: int | None = None
    reason: str | None = None


def feasible_summary(
    rotary_dim: int, target_length: int, progress: Progress | None = None
) -> FeasibleSummary:
    """Map the feasible bases up to 1e12, in seconds to half a minute; left out above ``LONGEST_SEARCH``."""
    if target_length > LONGEST_SEARCH:
        reason = f"not searched: above {LONGEST_SEARCH:,} tokens that takes many minutes (ropewalk rope base does it)"
        return FeasibleSummary(rotary_dim, SAFE_CEILING, reason=reason)
    found = feasible_bases(target_length, rotary_dim, SAFE_CEILING, progress)
    wide = next((low for low, high in found.feasible if high >= (1 + WIDE) * low), None)
    return FeasibleSummary(
        rotary_dim, SAFE_CEILING, found.infimum, wide, found.safe_base, len(found.feasible)
    )


def origin_of(rule: str, current: RopeMethod) -> Origin:
    """Formula, source and caveat of a rule."""
    if rule in ORIGINS:
        return ORIGINS[rule]
    if rule in compared_methods():
        origin = METHODS[rule].origin
        assert origin is not None
        return origin
    schedule = SCHEDULES[rule.removeprefix("schedule:")]
    other = isinstance(current, Default) and current.rotary_dim != PUBLISHED_DIM
    dims = f"; rotary_dim {PUBLISHED_DIM}, this model has {current.rotary_dim}" if other else ""
    return Origin("as published", schedule.source, f"chosen for {schedule.start}{dims}")
