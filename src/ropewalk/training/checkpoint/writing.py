"""Choice of checkpoint format: whole models with one process, shards with several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ropewalk.models.losses import LossModel
from ropewalk.parallel.context import RunContext
from ropewalk.training.checkpoint.files import Position
from ropewalk.training.checkpoint.sharded import Completed, ShardedCheckpoints, nothing_more
from ropewalk.training.checkpoint.single import save_checkpoint
from ropewalk.training.optimizer import MasterAdamW
from ropewalk.training.recipe.recipe import Checkpoints


class Checkpointing(Protocol):
    """Writer of a stage's checkpoints."""

    def save(self, position: Position, best: Path | None = None) -> Path:
        """Write a checkpoint and return its folder, which may be incomplete until the end of the stage.

        Args:
            position: progress of the run.
            best: an earlier checkpoint to keep, whatever its age.
        """


@contextmanager
def checkpointing(
    folder: Path,
    model: LossModel,
    optimizer: MasterAdamW,
    tokenizer: Any,
    settings: Checkpoints,
    context: RunContext,
    completed: Completed = nothing_more,
) -> Iterator[Checkpointing]:
    """Open the writer of one stage's checkpoints; when the context ends, all of them are complete.

    Args:
        folder: folder for the checkpoints.
        model, optimizer: model and optimizer in training.
        tokenizer: tokenizer to save with a whole model.
        settings: number of checkpoints to keep, and whether to write shards in the background.
        context: processes of the run; each must call this function.
        completed: called on rank 0 with each complete checkpoint.
    """
    # One process holds the whole model, so its checkpoint can be a folder that transformers loads.
    if context.mesh is None:
        yield _Whole(folder, model, optimizer, tokenizer, settings.keep, completed)
        return
    asynchronous = settings.asynchronous
    if asynchronous == "auto":
        # On a CPU, copying and writing compete with training for cores and memory.
        asynchronous = model.device.type == "cuda"
    with ShardedCheckpoints(
        folder, model, optimizer, context, settings.keep, asynchronous, completed
    ) as sharded:
        yield sharded


class _Whole:
    def __init__(
        self,
        folder: Path,
        model: LossModel,
        optimizer: MasterAdamW,
        tokenizer: Any,
        keep: int,
        completed: Completed,
    ) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.tokenizer, self.keep, self.completed = tokenizer, keep, completed

    def save(self, position: Position, best: Path | None = None) -> Path:
        path = save_checkpoint(
            self.folder, self.model.model, self.tokenizer, self.optimizer, position, self.keep, best
        )
        self.completed(path)
        return path
