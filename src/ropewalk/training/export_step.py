"""Export of any checkpoint of a run, whole or sharded, in one process: the model as it was after that step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ropewalk.errors import RopewalkError
from ropewalk.io.files import remove_left_overs
from ropewalk.io.lock import locked
from ropewalk.io.results import Result
from ropewalk.models.adapter import merge_adapter
from ropewalk.models.checkpoint.export import refuse_existing
from ropewalk.parallel import World
from ropewalk.parallel.context import RunContext
from ropewalk.runs import Store
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    check_checkpoint,
    checkpoints_in,
    place_of,
    read_position,
)
from ropewalk.training.checkpoint.sharded import export_model, load_weights
from ropewalk.training.folder import ADVICE, HOLDS, RECIPE
from ropewalk.training.preflight import resolve
from ropewalk.training.recipe.file import load_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import load_for_run
from ropewalk.training.stage_rope.base import Decision


@dataclass(frozen=True)
class ExportedStep(Result):
    """The model after a step of a run.

    Attributes:
        run: folder of the run.
        checkpoint: the checkpoint whose weights were exported.
        out: folder of the model.
        stage, step: the stage, counted from 1, and the completed steps of it.
        tokens: tokens that the run had trained on.
        max_position_embeddings: longest input in tokens that the config states.
        method: RoPE method of the stage.
    """

    run: Path
    checkpoint: Path
    out: Path
    stage: int
    step: int
    tokens: int
    max_position_embeddings: int
    method: str


def export_step(run: Path, step: int, out: Path, stage: int | None = None) -> ExportedStep:
    """Write the model of one of a run's checkpoints, completely or not at all, as the end of its run would.

    The config has the RoPE and the context of the checkpoint's stage, and the weights the dtype of the base model. An
    adapter is merged. The run may go on meanwhile; this process needs memory for a float32 copy of the model.

    Args:
        run: folder of the run.
        step: completed steps of the stage.
        out: a new folder.
        stage: the stage, counted from 1; needed only if several stages have a checkpoint of this step.

    Raises:
        RopewalkError: if there is no such checkpoint, or it is damaged, or ``out`` exists.
    """
    refuse_existing(out)
    recipe = _alone(load_recipe(run / RECIPE))
    path = _checkpoint(run, step, stage)
    damage = check_checkpoint(path)
    if damage is not None:
        raise RopewalkError(f"the checkpoint {path} is damaged: {damage}; export another checkpoint")
    position = read_position(path)
    number = position.stage
    # No stage is trained, so none has to suit this machine.
    resolved = resolve(recipe, training=range(0))
    record = Store(run, HOLDS, ADVICE).record(f"rope-{number + 1}")
    if record is None or record.done is None:
        raise RopewalkError(
            f"{run} has no record of the RoPE of stage {number + 1}; resume the run with --resume"
        )
    decision = Decision.from_json(record.done.value)
    context = recipe.stages[number].context
    model = load_for_run(
        resolved,
        RunContext(),
        resolved.model,
        (decision.method, context),
        torch.float32,
        other_ropes=resolved.other_ropes[number],
        with_adapter=True,
    )
    load_weights(path, model, World())
    if resolved.adapter is not None:
        merge_adapter(model.model)
    weights = {"checkpoints": [path.name]}
    with locked(out.parent, file=out.name):
        remove_left_overs(out.parent, out.name)
        export_model(model, out, resolved.tokenizer, World(), resolved.dtype, position, weights)
    return ExportedStep(
        run, path, out, number + 1, position.step, position.tokens, context, decision.method.name
    )


def _alone(recipe: Recipe) -> Recipe:
    """The recipe for one process on a CPU, which has room for models that no single GPU holds."""
    stages = [
        each if each.parallel is None else each.model_copy(update={"parallel": "auto"})
        for each in recipe.stages
    ]
    return recipe.model_copy(
        update={"parallel": "auto", "device": "cpu", "engine": "auto", "trackers": [], "stages": stages}
    )


def _checkpoint(run: Path, step: int, stage: int | None) -> Path:
    there = checkpoints_in(run / CHECKPOINTS)
    found = [
        path
        for path in there
        if place_of(path)[1] == step and (stage is None or place_of(path)[0] == stage - 1)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        stages = " or ".join(f"--stage {place_of(path)[0] + 1}" for path in found)
        raise RopewalkError(f"several stages have a checkpoint of step {step}; add either {stages}")
    wanted = f"step {step}" if stage is None else f"step {step} of stage {stage}"
    if not there:
        raise RopewalkError(f"{run} has no checkpoint of {wanted}: {run / CHECKPOINTS} has none at all")
    kept = ", ".join(f"step {place_of(path)[1]} (stage {place_of(path)[0] + 1})" for path in there)
    raise RopewalkError(f"{run} has no checkpoint of {wanted}; choose one of {kept}")
