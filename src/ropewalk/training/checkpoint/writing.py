"""Choice of checkpoint format: whole models with one process, shards with several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ropewalk.attention.engines.capabilities import SIMULATED
from ropewalk.models.compute.losses import LossModel
from ropewalk.parallel.context import RunContext
from ropewalk.training.checkpoint.background import CheckpointWriter
from ropewalk.training.checkpoint.files import Completed, nothing_more
from ropewalk.training.checkpoint.sharded import ShardedCheckpoints
from ropewalk.training.checkpoint.single import WholeCheckpoints
from ropewalk.training.recipe.recipe import Checkpoints
from ropewalk.training.update.optimizer import MasterAdamW


def asynchronous(settings: Checkpoints, device: torch.device, offloaded: bool) -> bool:
    """Whether checkpoints are written while training goes on, from a copy in CPU memory."""
    if settings.asynchronous == "auto":
        # On a CPU, copying and writing compete with training for cores and memory; a state that is in CPU memory would
        # be there twice.
        return device.type in ("cuda", SIMULATED) and not offloaded
    return settings.asynchronous


def checkpointing(
    folder: Path,
    model: LossModel,
    optimizer: MasterAdamW,
    tokenizer: Any,
    settings: Checkpoints,
    context: RunContext,
    completed: Completed = nothing_more,
    offloaded: bool = False,
) -> CheckpointWriter:
    """The writer of one stage's checkpoints; when its context ends, all of them are complete.

    Args:
        folder: folder for the checkpoints.
        model, optimizer: model and optimizer in training.
        tokenizer: tokenizer to save with a whole model.
        settings: number of checkpoints to keep, and whether to write them in the background.
        context: processes of the run; each must call this function.
        completed: called on rank 0 with each complete checkpoint.
        offloaded: whether the optimizer's state is in CPU memory.
    """
    background = asynchronous(settings, model.device, offloaded)
    # One process holds the whole model, so its checkpoint can be a folder that transformers loads.
    if context.mesh is None:
        return WholeCheckpoints(
            folder, model.model, optimizer, tokenizer, settings.keep, background, completed
        )
    return ShardedCheckpoints(folder, model, optimizer, context, settings.keep, background, completed)
