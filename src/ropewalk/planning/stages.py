"""A curriculum: at which contexts to train, and what RoPE each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import format_length
from ropewalk.planning.rules import check_target, tokens_text
from ropewalk.rope import Default, LongRope, RopeMethod, bound_at
from ropewalk.rope.target import GIVEN, candidate, recommended_base
from ropewalk.rope.theory import stage_contexts
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import CURRENT, RECOMMENDED

KEPT = Default.name
"""A recipe's method that leaves the checkpoint's RoPE as it is."""


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
) -> list[PlannedStage]:
    """Stages of 4 to 8 times the length before, each with its own setting.

    Where no rule is given, an unscaled checkpoint gets the recommended base of each stage's length, as ``ropewalk
    extend`` takes it; one that is scaled by linear, yarn or llama3 goes on with its own method and a larger factor,
    since its weights know those frequencies.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens, the second larger.
        rule: one of :func:`ropewalk.rope.candidates` or ``theta=5e6``.
        ceiling, progress: of the rule lower-bound.

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
    check_target(target_length)
    name = rule or (RECOMMENDED if is_unscaled(current) else current.name)
    if name == RECOMMENDED and recommended_base(current, trained_length, target_length).rule == CURRENT:
        # What stays in the end stays on the way: the law asks for less of a shorter stage, and for more than it has.
        name = CURRENT
    stages = []
    length = trained_length
    for context in contexts:
        method = candidate(name, current, trained_length, context, ceiling, progress)
        bound = bound_at(method, context)
        said = name
        if name == RECOMMENDED:
            said = recommended_base(current, trained_length, context).rule
        stages.append(
            PlannedStage(
                context,
                method,
                "theta" if isinstance(method, Default) or name.startswith(GIVEN) else method.name,
                bound,
                _reason(said, method, length, context, bound),
            )
        )
        length = context
    return stages


def kept_stages(current: RopeMethod, trained_length: int, target_length: int) -> list[PlannedStage]:
    """Stages in which RoPE stays as it is, for models in which no layer's RoPE limits the context.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens, the second larger.
    """
    stages = []
    length = trained_length
    for context in stage_contexts(trained_length, target_length):
        reason = f"{_longer(length, context)}; RoPE stays as it is, since no layer with RoPE sees further than before"
        stages.append(PlannedStage(context, current, KEPT, bound_at(current, context), reason))
        length = context
    return stages


def is_unscaled(method: RopeMethod) -> bool:
    """Whether a checkpoint with this method gets a new base; a scaled one goes on with its own method."""
    return isinstance(method.plain, Default)


def recipe_stages(stages: Sequence[PlannedStage], lift: Sequence[str] = ()) -> str:
    """The ``stages`` of a recipe in YAML, and what it lifts; steps and rows are left for the user to set."""
    lines = [*([f"lift: [{', '.join(lift)}]"] if lift else []), "stages:"]
    for stage in stages:
        lines.append(f"  - context: {format_length(stage.context)}")
        parameter = ""
        if stage.recipe_method == "theta":
            parameter = f", rope_theta: {stage.method.rope_theta:.10g}"
        elif stage.recipe_method != KEPT:
            parameter = f", factor: {stage.method.factor!r}"  # type: ignore[attr-defined]
        lines.append(f"    rope: {{method: {stage.recipe_method}{parameter}}}")
        lines.append("    steps: 500  # as many as your tokens allow")
    return "\n".join(lines) + "\n"


def _reason(rule: str, method: RopeMethod, before: int, context: int, bound: int) -> str:
    factor = getattr(method, "factor", None)
    if factor is not None:
        set_to = f"{method.name} with factor {factor:g} and base {method.rope_theta:,.0f}"
    else:
        set_to = f"base {method.rope_theta:,.0f} by the rule {rule}"
    enough = "covers" if bound >= context else "does not cover"
    return (
        f"{_longer(before, context)}; {set_to}; its context bound of {tokens_text(bound)} {enough} the stage"
    )


def _longer(before: int, context: int) -> str:
    return f"{context / before:.3g} times the {before:,} tokens before"
