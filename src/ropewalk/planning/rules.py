"""Compare the rules for setting RoPE: what each sets for a target length, how far that reaches, and its source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope import METHODS, Default, RopeMethod, bound_at, candidate, compared_methods
from ropewalk.rope.methods.base import Origin
from ropewalk.rope.theory import SAFE_CEILING, SCHEDULES, SEARCH_LIMIT, feasible_bases
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import CURRENT, LOWER_BOUND, NTK_AT, RECOMMENDED, RULES

LONGEST_SEARCH = 2**21
"""Longest target in tokens for which advice maps the feasible bases; ``ropewalk rope base`` maps longer ones."""
WIDE = 0.1
"""Smallest relative width of an interval of feasible bases that is not a numerical coincidence."""
PUBLISHED_DIM = 128
"""rotary_dim of the models behind the published schedules."""

CONTEXT_BOUND = (
    "context bound: the distance up to which similar tokens get, on average, at least as much attention as random "
    "tokens"
)
"""What the term means, for outputs that give one."""
SYMBOLS = (
    "symbols: b base, T trained length, b' and T' those of the extension, d rotary_dim, i rotary pair, "
    "θ_i its frequency, m distance"
)
"""The symbols in a rule's formula, for outputs that give one."""

ORIGINS: dict[str, Origin] = {
    "current": Origin(
        "unchanged frequencies",
        "config.json",
        "beyond the trained length, the slow pairs reach angles not seen in training",
    ),
    "critical-dimension": Origin(
        "b' = b^(ln(T'/2π) / ln(T/2π))",
        "Liu et al., arXiv:2310.05209, theorem 1; used by Gradient for Llama 3",
        "considers only how many pairs complete a turn, so check the context bound as well",
    ),
    "length-floor": Origin(
        "the smallest b' with B(m) = Σ cos(m·b'^(-2i/128)) ≥ 0 for all m ≤ T'",
        "Men et al., arXiv:2405.14591, equation 7; the infimum that `ropewalk rope base` prints",
        "depends on the length alone, and some larger bases do not reach the length: a minimum, not a guarantee",
    ),
    "recommended": Origin(
        "the larger of critical-dimension and length-floor",
        "compared with the bases of published models in docs/theory.md",
        "two thirds of the published bases lie within a factor of 2 of this one",
    ),
    "ntk": Origin(
        "b' = b·(T'/T)^(d/(d-2))",
        "bloc97 (2023); Peng et al., arXiv:2309.00071, equation 16",
        "designed for use without training; with training, larger bases did better (arXiv:2411.13476)",
    ),
    NTK_AT: Origin(
        "b' = b·(T'/T)^(d/(2c)), with the given pair c",
        "Shang et al., LongRoPE2, arXiv:2502.20082, section 4; derived, because the paper prints no formula",
        "no formula gives the pair; `ropewalk search --space critical-dimension` measures it",
    ),
    "lower-bound": Origin(
        "the smallest b' above which every base has B(m) = Σ cos(m·b'^(-2i/d)) ≥ 0 for all m ≤ T'",
        "Men et al., arXiv:2405.14591, equation 7; the safe base instead of the infimum, see docs/theory.md",
        "necessary, not sufficient: compares attention to similar and random tokens, and says nothing about training",
    ),
}
"""Formula, source and caveat of each rule for the base except schedules; methods define their own."""


@dataclass(frozen=True)
class Setting:
    """The setting that one rule gives.

    Attributes:
        rule: one of :func:`ropewalk.rope.candidates`.
        method: RoPE method with its parameters. None if the rule does not apply.
        context_bound: tokens up to which B(m) ≥ 0; ``SEARCH_LIMIT`` if no violation was found up to that limit.
        reaches_target: whether the context bound covers the target. None if the rule does not apply.
        reason: why the rule does not apply.
        formula, source, caveat: how the rule computes the setting, who published it, and what it ignores.
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
        """The context bound as text; empty if the rule does not apply."""
        return "" if self.context_bound is None else tokens_text(self.context_bound)

    def to_json(self) -> dict[str, Any]:
        """JSON values; the method is given as its name, its base and, if it has one, its factor."""
        values = asdict(self)
        # asdict has made a dictionary of the method, so the method itself is taken.
        method = values.pop("method") and self.method
        return {
            "rule": values.pop("rule"),
            "method": None if method is None else method.name,
            "rope_theta": None if method is None else method.rope_theta,
            "factor": None if method is None else getattr(method, "factor", None),
            **values,
        }


def tokens_text(bound: int) -> str:
    """Format a context bound. The search for it stops at ``SEARCH_LIMIT``, so larger bounds are "more than" that."""
    return f"more than {SEARCH_LIMIT:,} tokens" if bound >= SEARCH_LIMIT else f"{bound:,} tokens"


def compared() -> tuple[str, ...]:
    """The rules that advice compares: all except ``recommended``, which picks one of them, and slow ``lower-bound``."""
    bases = tuple(rule for rule in RULES if rule not in (RECOMMENDED, LOWER_BOUND))
    return (CURRENT, *bases, *compared_methods())


def compare_settings(current: RopeMethod, trained_length: int, target_length: int) -> list[Setting]:
    """Compute the setting of each rule in :func:`compared` for a target length. Rules that do not apply say why.

    Args:
        current: RoPE method that the checkpoint was trained with.
        trained_length, target_length: tokens; the target must not be shorter.

    Raises:
        RopewalkError: if the target exceeds ``SEARCH_LIMIT``.
    """
    check_target(target_length)
    settings = []
    for name in compared():
        # A rule that does not apply is a row of the comparison, not an error.
        try:
            method = candidate(name, current, trained_length, target_length)
        except RopewalkError as error:
            settings.append(Setting(name, None, None, None, str(error), *origin_of(name, current)))
        else:
            settings.append(setting_of(name, current, method, target_length))
    return settings


def check_target(target_length: int) -> None:
    """Raise RopewalkError for a target beyond ``SEARCH_LIMIT``, where no context bound can be computed."""
    if target_length > SEARCH_LIMIT:
        raise RopewalkError(f"the target length may be at most {SEARCH_LIMIT} tokens, got {target_length}")


def setting_of(rule: str, current: RopeMethod, method: RopeMethod, target_length: int) -> Setting:
    """Build a rule's setting with its context bound.

    Args:
        rule: name of the rule.
        current: RoPE method that the checkpoint was trained with.
        method: RoPE method that the rule gives.
        target_length: tokens.
    """
    bound = bound_at(method, target_length)
    return Setting(rule, method, bound, bound >= target_length, None, *origin_of(rule, current))


@dataclass(frozen=True)
class FeasibleSummary:
    """Bases whose similarity margin stays non-negative up to a length, for a model's own rotary dimension.

    Attributes:
        rotary_dim: number of rotated dimensions per head.
        ceiling: largest base searched.
        infimum: smallest feasible base.
        wide_from: lower end of the first interval whose relative width is at least ``WIDE``.
        safe_base: base from which every larger one up to the ceiling is feasible.
        intervals: number of intervals of feasible bases.
        reason: why there is no map. The other values are then None.
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
    """Map the feasible bases up to 1e12; targets above ``LONGEST_SEARCH`` are skipped.

    Takes seconds at 128K and a minute or more at 1M.
    """
    if target_length > LONGEST_SEARCH:
        reason = f"not searched above {LONGEST_SEARCH:,} tokens, which takes many minutes; use `ropewalk rope base`"
        return FeasibleSummary(rotary_dim, SAFE_CEILING, reason=reason)
    found = feasible_bases(target_length, rotary_dim, SAFE_CEILING, progress)
    # The infimum may open an interval that a rounded base would miss, so the first wide interval is shown as well.
    wide = next((low for low, high in found.feasible if high >= (1 + WIDE) * low), None)
    return FeasibleSummary(
        rotary_dim, SAFE_CEILING, found.infimum, wide, found.safe_base, len(found.feasible)
    )


def origin_of(rule: str, current: RopeMethod) -> Origin:
    """Return the formula, source and caveat of a rule."""
    if rule in ORIGINS:
        return ORIGINS[rule]
    if rule.startswith(NTK_AT):
        return ORIGINS[NTK_AT]
    if rule in compared_methods():
        origin = METHODS[rule].origin
        assert origin is not None
        return origin
    schedule = SCHEDULES[rule.removeprefix("schedule:")]
    # A published base reaches another length in a model with another number of rotary dimensions.
    other = isinstance(current, Default) and current.rotary_dim != PUBLISHED_DIM
    dims = f" with rotary_dim {PUBLISHED_DIM}; this model has {current.rotary_dim}" if other else ""
    return Origin("as published", schedule.source, f"chosen for {schedule.start}{dims}")
