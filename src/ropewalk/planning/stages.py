"""Plan training stages: the context length and the RoPE setting of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import format_length
from ropewalk.planning.rules import check_target, tokens_text
from ropewalk.rope import Default, LongRope, NoRope, RopeMethod, bound_at
from ropewalk.rope.methods.base import CRITICAL_PAIR
from ropewalk.rope.target import GIVEN, YARN_AT, candidate, recommended_base
from ropewalk.rope.theory import stage_contexts
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import CURRENT, RECOMMENDED, pair_of

KEPT = Default.name
"""Recipe method that keeps the checkpoint's RoPE unchanged."""


@dataclass(frozen=True)
class PlannedStage:
    """One training stage.

    Attributes:
        context: sequence length in tokens.
        method: RoPE of the stage.
        recipe_method: value of ``rope.method`` in the recipe.
        context_bound: tokens up to which the margin B(m) of the method is non-negative.
        reason: why the stage has this context and this setting.
        critical_pair: pair at which the ramp of yarn ends, as the rule names it; None for every other setting.
    """

    context: int
    method: RopeMethod
    recipe_method: str
    context_bound: int
    reason: str
    critical_pair: int | None = None

    @property
    def recipe_parameter(self) -> str:
        """The value beside the method in a recipe, with a comma before it; empty if the method has none."""
        if self.recipe_method == "theta":
            return f", rope_theta: {self.method.rope_theta:.10g}"
        factor = getattr(self.method, "factor", None)
        if factor is None or self.recipe_method == KEPT:
            return ""
        at_pair = "" if self.critical_pair is None else f", {CRITICAL_PAIR}: {self.critical_pair}"
        return f", factor: {factor!r}{at_pair}"

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``method`` is the value of ``rope.method`` in the recipe."""
        return {
            "context": self.context,
            "method": self.recipe_method,
            "rope_theta": self.method.rope_theta,
            "factor": getattr(self.method, "factor", None),
            "critical_pair": self.critical_pair,
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
    """Plan stages that extend the context by 4 to 8 times each, with a RoPE setting per stage.

    Without a rule, an unscaled checkpoint gets the recommended base for the length of each stage, as in ``ropewalk
    extend``. A checkpoint scaled by linear, yarn or llama3 keeps its method and gets a larger factor, because it was
    trained with those frequencies.

    Args:
        current: RoPE method that the checkpoint was trained with.
        trained_length, target_length: tokens; the target must be longer.
        rule: one of :func:`ropewalk.rope.candidates` or ``theta=5e6``.
        ceiling, progress: largest base to search and progress callback, for the rule lower-bound.

    Raises:
        RopewalkError: if the checkpoint's scaling cannot be extended, or the rule gives no setting.
    """
    if isinstance(current, LongRope):
        raise RopewalkError(
            "the model uses longrope, whose factors are valid for one length only, and no formula gives the factors "
            "for another length; search for the factors with `ropewalk search`"
        )
    contexts = stage_contexts(trained_length, target_length)
    if rule == CURRENT:
        # `current` is a row of comparisons only; planning with it would train without extending.
        raise RopewalkError(
            "the rule 'current' keeps RoPE as it is, so there is nothing to plan; omit --rule"
        )
    if rule == NoRope.name:
        raise RopewalkError(
            f"the rule 'none' is trained at the original length of {trained_length:,} tokens, so there are no stages "
            "of growing context to plan; write one stage of this context with rope: none"
        )
    check_target(target_length)
    name = rule or (RECOMMENDED if is_unscaled(current) else current.name)
    if name == RECOMMENDED and recommended_base(current, trained_length, target_length).rule == CURRENT:
        # A base that covers the last stage covers the shorter ones; asking per stage could raise it on the way.
        name = CURRENT
    stages = []
    length = trained_length
    for context in contexts:
        # Each stage is derived from the checkpoint, not from the stage before: rules relate to the trained length.
        method = candidate(name, current, trained_length, context, ceiling, progress)
        bound = bound_at(method, context)
        # The recommendation may follow different rules at different lengths.
        chosen_rule = name
        if name == RECOMMENDED:
            chosen_rule = recommended_base(current, trained_length, context).rule
        stages.append(
            PlannedStage(
                context,
                method,
                # A base given by hand on a scaled checkpoint keeps the scaling, which the recipe calls theta as well.
                "theta" if isinstance(method, Default) or name.startswith(GIVEN) else method.name,
                bound,
                _reason(chosen_rule, method, length, context, bound),
                pair_of(name) if name.startswith(YARN_AT) else None,
            )
        )
        length = context
    return stages


ATTEND_NO_FURTHER = "layers with RoPE attend no further than before"


def kept_stages(
    current: RopeMethod, trained_length: int, target_length: int, because: str = ATTEND_NO_FURTHER
) -> list[PlannedStage]:
    """Plan stages that keep RoPE unchanged, for models in which no layer's RoPE limits the context.

    Args:
        current: RoPE method that the checkpoint was trained with.
        trained_length, target_length: tokens; the target must be longer.
        because: a clause that says why.
    """
    stages = []
    length = trained_length
    for context in stage_contexts(trained_length, target_length):
        reason = f"{_longer(length, context)}; RoPE stays unchanged: {because}"
        stages.append(PlannedStage(context, current, KEPT, bound_at(current, context), reason))
        length = context
    return stages


def is_unscaled(method: RopeMethod) -> bool:
    """Whether a checkpoint with this method gets a new base. A scaled checkpoint keeps its own method."""
    # plain, because a config states fixed NTK as nothing but another base.
    return isinstance(method.plain, Default)


def recipe_stages(stages: Sequence[PlannedStage], lift: Sequence[str] = ()) -> str:
    """Write the ``lift`` and ``stages`` keys of a recipe as YAML. Users set steps and batch sizes themselves."""
    lines = [*([f"lift: [{', '.join(lift)}]"] if lift else []), "stages:"]
    for stage in stages:
        lines.append(f"  - context: {format_length(stage.context)}")
        lines.append(f"    rope: {{method: {stage.recipe_method}{stage.recipe_parameter}}}")
        lines.append("    steps: 500  # as many as your tokens allow")
    return "\n".join(lines) + "\n"


def _reason(rule: str, method: RopeMethod, before: int, context: int, bound: int) -> str:
    factor = getattr(method, "factor", None)
    if factor is not None:
        set_to = f"{method.name} with factor {factor:g} and base {method.rope_theta:,.0f}"
        if rule.startswith(YARN_AT):
            set_to += f", its ramp ending at pair {pair_of(rule)}"
    else:
        what = "base" if isinstance(method, Default) else f"{method.name} with base"
        set_to = f"{what} {method.rope_theta:,.0f} from the rule {rule}"
    enough = "covers" if bound >= context else "does not cover"
    return (
        f"{_longer(before, context)}; {set_to}; the context bound of {tokens_text(bound)} {enough} the stage"
    )


def _longer(before: int, context: int) -> str:
    return f"{context / before:.3g} times the previous {before:,} tokens"
