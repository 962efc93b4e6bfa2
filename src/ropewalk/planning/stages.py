"""A curriculum: at which contexts to train, and what RoPE each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.lengths import format_length
from ropewalk.planning.settings import LONGEST_SEARCH, bound_at, tokens_text
from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, Ntk, RopeMethod, Yarn, candidate
from ropewalk.rope.candidates import CURRENT, GIVEN
from ropewalk.rope.theory import SEARCH_LIMIT, stage_contexts
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import CRITICAL_DIMENSION, LOWER_BOUND


@dataclass(frozen=True)
class PlannedStage:
    """One stage.

    Attributes:
        context: tokens of a row.
        method: RoPE of the stage.
        recipe_method: what the recipe's ``rope.method`` says for it.
        context_bound: tokens up to which the method's margin B(m) is 0 or more.
        reason: why this context and this setting, in plain words.
    """

    context: int
    method: RopeMethod
    recipe_method: str
    context_bound: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``method`` is the recipe's name for it."""
        return {
            "context": self.context,
            "method": self.recipe_method,
            "rope_theta": self.method.rope_theta,
            "factor": getattr(self.method, "factor", None),
            "context_bound": self.context_bound,
            "reason": self.reason,
        }


def plan_stages(
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    rule: str | None = None,
    ceiling: float | None = None,
    progress: Progress | None = None,
    final: RopeMethod | None = None,
    partial: bool = False,
) -> list[PlannedStage]:
    """Stages of 4 to 8 times the length before, each with its own setting.

    An unscaled checkpoint gets a new base by the rule; one that is scaled by linear, yarn or llama3 goes on with
    its own method and a larger factor, since its weights know those frequencies.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens, the second larger.
        rule: one of :data:`ropewalk.rope.CANDIDATES` or ``theta=5e6``; None for :func:`recommended_rule`.
        ceiling, progress: of the rule lower-bound.
        final: the rule's method for the target, where the caller has it already.
        partial: whether only a part of a head is rotated.

    Raises:
        RopewalkError: if the checkpoint's scaling has no continuation, or the rule no answer.
    """
    if isinstance(current, LongRope):
        raise RopewalkError(
            "a longrope checkpoint has factors for one length; a longer one needs factors from a search, and no rule "
            "gives them"
        )
    contexts = stage_contexts(trained_length, target_length)
    if rule == CURRENT:
        raise RopewalkError("the rule current changes nothing, so there is no plan to make; leave --rule out")
    if target_length > SEARCH_LIMIT:
        raise RopewalkError(f"the target length may be at most {SEARCH_LIMIT} tokens, got {target_length}")
    name = rule or recommended_rule(current, trained_length, target_length, partial, ceiling, progress)
    stages = []
    length = trained_length
    for context in contexts:
        known = final if context == target_length else None
        method = known or candidate(name, current, trained_length, context, ceiling, progress)
        bound = bound_at(method, context)
        stages.append(
            PlannedStage(
                context,
                method,
                "theta" if isinstance(method, Default) or name.startswith(GIVEN) else method.name,
                bound,
                _reason(name, method, length, context, bound),
            )
        )
        length = context
    return stages


def recommended_rule(
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    partial: bool = False,
    ceiling: float | None = None,
    progress: Progress | None = None,
) -> str:
    """A scaled checkpoint's own method; else the critical-dimension law where its base reaches the target, else the
    lower bound where there is one.

    Where only a part of a head is rotated, the law: the bound counts the rotated dimensions alone and would ask for
    bases that nobody needs.
    """
    if not isinstance(current, Default | DynamicNtk | Ntk):
        return current.name
    if partial or target_length > LONGEST_SEARCH:
        return CRITICAL_DIMENSION
    law = candidate(CRITICAL_DIMENSION, current, trained_length, target_length)
    if bound_at(law, target_length) >= target_length:
        return CRITICAL_DIMENSION
    try:
        candidate(LOWER_BOUND, current, trained_length, target_length, ceiling, progress)
    except RopewalkError:
        return CRITICAL_DIMENSION
    return LOWER_BOUND


def recipe_stages(stages: Sequence[PlannedStage]) -> str:
    """The ``stages`` of a recipe in YAML; steps and rows are left for the user to set."""
    lines = ["stages:"]
    for stage in stages:
        lines.append(f"  - context: {format_length(stage.context)}")
        parameter = (
            f"rope_theta: {stage.method.rope_theta:.10g}"
            if stage.recipe_method == "theta"
            else f"factor: {stage.method.factor!r}"  # type: ignore[attr-defined]
        )
        lines.append(f"    rope: {{method: {stage.recipe_method}, {parameter}}}")
        lines.append("    steps: 500  # as many as your tokens allow")
    return "\n".join(lines) + "\n"


def _reason(rule: str, method: RopeMethod, before: int, context: int, bound: int) -> str:
    longer = f"{context / before:.3g} times the {before:,} tokens before"
    if isinstance(method, Linear | Yarn | Llama3):
        set_to = f"{method.name} with factor {method.factor:g} and base {method.rope_theta:,.0f}"
    else:
        set_to = f"base {method.rope_theta:,.0f} by the rule {rule}"
    enough = "covers" if bound >= context else "does not cover"
    return f"{longer}; {set_to}; its context bound of {tokens_text(bound)} {enough} the stage"
