"""Plan training stages for a longer context, with reasons and, for a given number of GPUs, memory and time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.progress import counted
from ropewalk.io.results import Result
from ropewalk.models.config import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.parallel.context import RunContext
from ropewalk.planning.advice import Advice
from ropewalk.planning.inspection import advise_on, read_checkpoint
from ropewalk.planning.settings import PlanSettings
from ropewalk.planning.sizing.memory import Memory, estimate_memory
from ropewalk.planning.sizing.mesh_choice import choose_mesh
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100, Cluster, estimate_step
from ropewalk.planning.stages import PlannedStage, plan_stages, recipe_stages
from ropewalk.rope import check_candidate


@dataclass(frozen=True)
class StageSize:
    """Estimated memory and time of a stage on a cluster. Each data-parallel group trains on one sequence per step.

    Attributes:
        context: sequence length in tokens.
        mesh: degrees of parallelism.
        memory: memory of one rank, bytes.
        seconds: time of one step.
        rows_per_step: sequences per step.
    """

    context: int
    mesh: str
    memory: Memory
    seconds: float
    rows_per_step: int

    def to_json(self) -> dict[str, Any]:
        """JSON values; memory in bytes, time in seconds."""
        return {
            "context": self.context,
            "mesh": self.mesh,
            "memory": {**asdict(self.memory), "peak": self.memory.peak},
            "seconds": self.seconds,
            "rows_per_step": self.rows_per_step,
        }


@dataclass(frozen=True)
class PlanResult(Result):
    """Stages from a checkpoint to a target length.

    Attributes:
        config: the checkpoint's config.
        target_length: tokens.
        notes: warnings and remarks on the checkpoint, one sentence each.
        stages: in training order.
        advice: for the target length.
        sizes: memory and time of each stage. Empty if no number of processes was given.
    """

    config: ModelConfig
    target_length: int
    notes: tuple[str, ...]
    stages: tuple[PlannedStage, ...]
    advice: Advice
    sizes: tuple[StageSize, ...] = ()

    @property
    def recipe(self) -> str:
        """The ``stages`` of a recipe as YAML."""
        return recipe_stages(self.stages, self.advice.lift)

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``sizes`` only if a number of processes was given."""
        sizes = {"sizes": [size.to_json() for size in self.sizes]} if self.sizes else {}
        return {
            "model": self.config.model,
            "trained_length": self.config.trained_length,
            "target_length": self.target_length,
            "defaults": dict(self.config.defaults),
            "notes": list(self.notes),
            "stages": [stage.to_json() for stage in self.stages],
            "recipe": self.recipe,
            "advice": self.advice.to_json(),
            **sizes,
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
    processes = config.processes
    sizes = (
        ()
        if processes is None
        else tuple(size_of_stage(checkpoint, stage.context, processes) for stage in stages)
    )
    return PlanResult(checkpoint, target, notes, tuple(stages), advice, sizes)


def size_of_stage(config: ModelConfig, context: int, processes: int, cluster: Cluster = H100) -> StageSize:
    """Memory and time of a stage that trains all weights on so many GPUs.

    Raises:
        RopewalkError: if the model's memory is not estimated.
    """
    shape = ModelShape.from_config(config)
    # The mesh of this run is ignored by choose_mesh, which gets one sequence per process and step.
    run = ShardedRun(shape, MeshShape(), context)
    mesh = choose_mesh(run, processes, processes, cluster)
    run = replace(run, mesh=mesh)
    rows = mesh.data_degree
    return StageSize(context, str(mesh), estimate_memory(run), estimate_step(run, rows).seconds, rows)
