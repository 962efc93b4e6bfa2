"""A plan for a longer context: at which lengths to train, with which RoPE, why, and what that takes of a cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.results import Result
from ropewalk.models.config import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.advice import Advice
from ropewalk.planning.inspection import advise_on, read_checkpoint
from ropewalk.planning.sizing.memory import Memory, estimate_memory
from ropewalk.planning.sizing.mesh_choice import choose_mesh
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100, Cluster, estimate_step
from ropewalk.planning.stages import PlannedStage, plan_stages, recipe_stages
from ropewalk.rope import check_candidate
from ropewalk.rope.theory.bases import Progress


@dataclass(frozen=True)
class StageSize:
    """What a stage would take on a cluster, one row a group of ranks in each step.

    Attributes:
        context: tokens of a row.
        mesh: how the ranks are arranged.
        memory: of one rank, bytes.
        seconds: of a step.
        rows_per_step: rows of it.
    """

    context: int
    mesh: str
    memory: Memory
    seconds: float
    rows_per_step: int

    def to_json(self) -> dict[str, Any]:
        """JSON values; bytes and seconds."""
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
        config: of the checkpoint.
        target_length: tokens.
        notes: what to know of the checkpoint, a sentence each.
        stages: one after another.
        advice: on the target length.
        sizes: what each stage takes; none where no number of processes was given.
    """

    config: ModelConfig
    target_length: int
    notes: tuple[str, ...]
    stages: tuple[PlannedStage, ...]
    advice: Advice
    sizes: tuple[StageSize, ...] = ()

    @property
    def recipe(self) -> str:
        """The ``stages`` of a recipe in YAML."""
        return recipe_stages(self.stages)

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``sizes`` only where they were asked for."""
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


def plan(
    model: str,
    target: int,
    *,
    rule: str | None = None,
    from_length: int | None = None,
    explain: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Plan the stages to a longer context.

    Args:
        model: a folder, a ``config.json``, a Hub id, or ``embedded``.
        target: context to extend to, in tokens.
        rule: one of :func:`ropewalk.rope.candidates` or ``theta=5e6``; what is recommended if None.
        from_length: trained length in tokens, where the config misstates it.
        explain: whether to map the bases that reach the target too, which takes seconds.
        processes: GPUs to size each stage for, H100 in nodes of eight; None sizes nothing.
        progress: of the searches.

    Raises:
        RopewalkError: if the model cannot be trained at that length, its scaling has no continuation, or the rule no
            answer.

    Example:
        >>> from ropewalk.planning import plan
        >>> [(stage.context, stage.recipe_method) for stage in plan("embedded", 1024).stages]
        [(1024, 'theta')]
    """
    if rule is not None:
        check_candidate(rule)
    config = read_checkpoint(model, from_length)
    method, notes = config.full_attention_rope, (*config.config_warnings, *config.planning_notes)
    advice = advise_on(config, target, explain, progress)
    if advice.refusals:
        raise RopewalkError(advice.action.rstrip("."))
    stages = plan_stages(method, config.trained_length, target, rule, progress=progress)
    sizes = () if processes is None else tuple(_size(config, stage.context, processes) for stage in stages)
    return PlanResult(config, target, notes, tuple(stages), advice, sizes)


def _size(config: ModelConfig, context: int, processes: int, cluster: Cluster = H100) -> StageSize:
    shape = ModelShape.from_config(config)
    run = ShardedRun(shape, MeshShape(), context)
    mesh = choose_mesh(run, processes, processes, cluster)
    run = replace(run, mesh=mesh)
    rows = mesh.data_degree
    return StageSize(context, str(mesh), estimate_memory(run), estimate_step(run, rows).seconds, rows)
