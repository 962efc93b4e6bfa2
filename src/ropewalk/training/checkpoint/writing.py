"""Which checkpoints a run writes: one process whole models, several processes shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ropewalk.models.losses import LossModel
from ropewalk.parallel.context import RunContext
from ropewalk.training.checkpoint.files import Position
from ropewalk.training.checkpoint.sharded import ShardedCheckpoints
from ropewalk.training.checkpoint.single import save_checkpoint
from ropewalk.training.optimizer import MasterAdamW
from ropewalk.training.recipe.recipe import Checkpoints


class Checkpointing(Protocol):
    """Where the checkpoints of a stage go."""

    def save(self, position: Position) -> Path:
        """Write one and return its folder; it may be whole only at the end of the stage."""


@contextmanager
def checkpointing(
    folder: Path,
    model: LossModel,
    optimizer: MasterAdamW,
    tokenizer: Any,
    settings: Checkpoints,
    context: RunContext,
) -> Iterator[Checkpointing]:
    """The checkpoints of one stage; when the context ends, all of them are whole.

    Args:
        folder: that they go to.
        model, optimizer: in training.
        tokenizer: saved beside a whole model.
        settings: how many to keep, and whether shards are written while training goes on.
        context: the processes; every one of them calls this.
    """
    if context.mesh is None:
        yield _Whole(folder, model, optimizer, tokenizer, settings.keep)
        return
    asynchronous = settings.asynchronous
    if asynchronous == "auto":
        # On a CPU the copy and its files take the time and memory that training needs.
        asynchronous = model.device.type == "cuda"
    with ShardedCheckpoints(folder, model, optimizer, context, settings.keep, asynchronous) as sharded:
        yield sharded


class _Whole:
    def __init__(
        self, folder: Path, model: LossModel, optimizer: MasterAdamW, tokenizer: Any, keep: int
    ) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.tokenizer, self.keep = tokenizer, keep

    def save(self, position: Position) -> Path:
        return save_checkpoint(
            self.folder, self.model.model, self.tokenizer, self.optimizer, position, self.keep
        )
