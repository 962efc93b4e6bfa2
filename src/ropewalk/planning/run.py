"""Plan training stages for a longer context, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.progress import counted
from ropewalk.io.results import Result
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel.context import RunContext
from ropewalk.planning.advice import Advice
from ropewalk.planning.inspection import advise_on, read_checkpoint
from ropewalk.planning.settings import PlanSettings
from ropewalk.planning.stages import PlannedStage, plan_stages, recipe_stages
from ropewalk.rope import check_candidate


@dataclass(frozen=True)
class PlanResult(Result):
    """Stages from a checkpoint to a target length.

    Attributes:
        config: the checkpoint's config.
        target_length: tokens.
        notes: warnings and remarks on the checkpoint, one sentence each.
        stages: in training order.
        advice: for the target length.
    """

    config: ModelConfig
    target_length: int
    notes: tuple[str, ...]
    stages: tuple[PlannedStage, ...]
    advice: Advice

    @property
    def recipe(self) -> str:
        """The ``stages`` of a recipe as YAML."""
        return recipe_stages(self.stages, self.advice.lift)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "model": self.config.model,
            "trained_length": self.config.trained_length,
            "target_length": self.target_length,
            "defaults": dict(self.config.defaults),
            "notes": list(self.notes),
            "stages": [stage.to_json() for stage in self.stages],
            "recipe": self.recipe,
            "advice": self.advice.to_json(),
        }


def plan(config: PlanSettings, context: RunContext | None = None) -> PlanResult:
    """Plan the training stages for a longer context.

    Args:
        config: the checkpoint, the target length and the rule that chooses the RoPE setting.
        context: run context, whose reporter shows progress; None shows no progress.

    Returns:
        ``stages`` has the stages in training order, each with its ``context`` in tokens and its RoPE ``method``.
            ``recipe`` has the same stages as YAML for a recipe. ``advice`` is the advice that :func:`ropewalk.inspect`
            gives.

    Raises:
        RopewalkError: if the model cannot be trained at that length, if its present RoPE scaling cannot be extended, or
            if the rule is unknown or gives no setting for that length.

    Example:
        >>> from ropewalk.planning import PlanSettings, plan
        >>> found = plan(PlanSettings(model="embedded", target=1024))
        >>> [(stage.context, stage.recipe_method) for stage in found.stages]
        [(1024, 'theta')]
    """
    # A misspelt rule fails here, before the config is read or downloaded.
    if config.rule is not None:
        check_candidate(config.rule)
    target, reporter = config.target, (context or RunContext()).rank_0_reporter
    checkpoint = read_checkpoint(config.model, config.from_length)
    method = checkpoint.full_attention_rope
    notes = (*checkpoint.config_warnings, *checkpoint.planning_notes)
    with counted(reporter, f"bases for {target:,} tokens", None, "distances") as progress:
        advice = advise_on(checkpoint, target, config.explain, progress)
        # Asked for before the stages, because the refusal is phrased as advice: it says what would work instead.
        if advice.refusals:
            raise RopewalkError(advice.action.rstrip("."))
        notes = (*notes, *(f"first {order}" for order in advice.first))
        if checkpoint.rotates_in_windows_alone(target):
            if config.rule is not None:
                refused = checkpoint.reach_refusals(target)
                raise RopewalkError(f"--rule {config.rule} does not apply to this model: it {refused[0]}")
            stages = list(advice.stages)
        else:
            stages = plan_stages(method, checkpoint.trained_length, target, config.rule, progress=progress)
    return PlanResult(checkpoint, target, notes, tuple(stages), advice)
