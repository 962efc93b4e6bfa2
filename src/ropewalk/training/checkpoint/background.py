"""Checkpoints that do not stop training: they are written from a copy in host memory, one at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ropewalk.training.checkpoint.files import Position, checkpoint_name


class CheckpointWriter(ABC):
    """Writer of the checkpoints of one stage; of a sharded run every rank has one and makes the same calls.

    Use it as a context manager, which waits for the checkpoint in progress when the stage ends.

    Attributes:
        folder: folder of the checkpoints.
    """

    def __init__(self, folder: Path, device: torch.device, asynchronous: bool) -> None:
        """Create the writer.

        Args:
            folder: folder of the checkpoints.
            device: device of the model.
            asynchronous: whether files are written while training continues, from a copy that takes as many bytes of
                host memory as the checkpoint, and on CUDA is pinned. The memory is kept until the stage ends.
        """
        self.folder = folder
        # Lists, because the thread appends to them while training empties them.
        self._waits: list[float] = []
        self._writes: list[float] = []
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        if asynchronous:
            cuda = device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=cuda,
                )
            )
            self._thread = ThreadPoolExecutor(1, "checkpoint")

    @abstractmethod
    def _state(self) -> dict[str, Tensor]:
        """Everything of the run that training changes, without copying."""

    @abstractmethod
    def _write(self, position: Position, state: Mapping[str, Tensor], best: Path | None) -> None:
        """Write one checkpoint, possibly in the writer thread, then delete the ones that are not kept."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._thread is not None:
                # If the stage failed, its error is raised, and an error of the background write is ignored.
                self._thread.shutdown(wait=True)
                self._stager.close()

    def save(self, position: Position, best: Path | None = None) -> Path:
        """Write a checkpoint, after waiting for the one in progress.

        Args:
            position: progress of the run.
            best: an earlier checkpoint to keep, whatever its age.

        Returns:
            The checkpoint's folder. If it is written in the background, it exists after :meth:`wait`.

        Raises:
            RopewalkError: on every rank, if any rank cannot write this checkpoint, or could not write the previous one
                in the background; ranks other than 0 raise an Echo. Earlier checkpoints are unaffected.
        """
        self.wait()
        with _timed(self._waits):
            state = self._state()
            if self._thread is None:
                self._write(position, state, best)
            else:
                # Training changes the tensors while the thread writes, so it writes a copy.
                copy: Any = self._stager.stage(state)
                self._writing = self._thread.submit(self._write_copy, position, copy, best)
        return self.folder / checkpoint_name(position)

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete.

        Raises:
            RopewalkError: on every rank, if any rank could not write it.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with _timed(self._waits):
                writing.result()

    def seconds(self) -> dict[str, float]:
        """Metrics of the time since the last call; empty if there was no checkpoint.

        ``checkpoint_wait`` is the time that training stood still: for the copy, for a write in progress, and for a
        write that is not in the background. ``checkpoint_write`` is that of writes in the background that are complete.
        """
        spent = {"checkpoint_wait": self._waits, "checkpoint_write": self._writes}
        return {name: sum(taken.pop() for _ in range(len(taken))) for name, taken in spent.items() if taken}

    def _write_copy(self, position: Position, copy: Mapping[str, Tensor], best: Path | None) -> None:
        with _timed(self._writes):
            self._write(position, copy, best)


@contextmanager
def _timed(taken: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        taken.append(time.perf_counter() - started)
