"""Checkpoints of several ranks: each writes its shards, in the background if asked; any mesh or one process resumes."""

from __future__ import annotations

import json
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, digests
from ropewalk.io.files import PARTIAL, REPLACED, new_folder, unique_name, write_json, writing
from ropewalk.models.load import save_model
from ropewalk.models.losses import LossModel
from ropewalk.models.sharding import gathered_state
from ropewalk.parallel import Mesh, World
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.world import PATIENCE
from ropewalk.training.checkpoint.files import (
    Position,
    Record,
    checkpoint_name,
    keep_latest,
    read_record,
    refuse,
    sync_folder,
    told_to_all,
    write_export_record,
    write_record,
)
from ropewalk.training.checkpoint.single import (
    named_moments,
    named_weights,
    random_states,
    read_state,
    read_weights,
    set_moments,
    set_random_states,
)
from ropewalk.training.optimizer import MasterAdamW

WEIGHT, STATE, RANDOM = "weight.", "optimizer.", "random."


class ShardedCheckpoints:
    """Writes the checkpoints of one stage of a run of several ranks; every rank makes one and calls it alike.

    A checkpoint holds float32 weights, the optimiser's state, and each rank's random number generators. Its folder
    takes its name when all ranks' files are on the disk, and only then older ones go.

    Used as a context, so that a checkpoint in the making is finished whatever ends the stage.

    Attributes:
        folder: that checkpoints go to, on a file system that all ranks share.
        keep: complete checkpoints to keep.
        asynchronous: whether files are written while the next steps train, from a copy in CPU memory: 12 bytes for
            each parameter of a rank's shard.
    """

    def __init__(
        self,
        folder: Path,
        trained: LossModel,
        optimizer: MasterAdamW,
        context: RunContext,
        keep: int,
        asynchronous: bool = False,
    ) -> None:
        if context.mesh is None:
            raise RopewalkError(
                "a checkpoint in shards is for several processes; save_checkpoint writes one of one"
            )
        self.folder = folder
        self.keep = keep
        self.asynchronous = asynchronous
        self._trained = trained
        self._optimizer = optimizer
        self._mesh = context.mesh
        self._writers: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._world = context.world
        if asynchronous:
            # Messages of the background must not mix with those of training.
            self._world = replace(self._world, control=dist.new_group(backend="gloo", timeout=PATIENCE))
            self._writers = ThreadPoolExecutor(1, "checkpoint")

    def __enter__(self) -> ShardedCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._writers is not None:
                # Where the stage failed, its own error matters, and not that of the checkpoint.
                self._writers.shutdown(wait=True)
                # Nothing is under way in it now, whatever happened.
                dist.destroy_process_group(self._world.control)

    def save(self, position: Position) -> Path:
        """Write a checkpoint, after the one in the making is finished.

        Returns:
            Its folder; with ``asynchronous`` it is there after :meth:`wait`.

        Raises:
            RopewalkError: on every rank, if one of them cannot write this checkpoint (or the last one, in the
                background); on all but rank 0 as an Echo. What was there before is untouched.
        """
        self.wait()
        state = {
            **{WEIGHT + name: t for name, t in named_weights(self._trained.model, self._optimizer).items()},
            **{STATE + name: t for name, t in named_moments(self._trained.model, self._optimizer).items()},
            **{f"{RANDOM}{device}.{self._world.rank}": t for device, t in random_states().items()},
        }
        if self._writers is None:
            self._write(position, state)
        else:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
            self._writing = self._writers.submit(self._write, position, copies)
        return self.folder / checkpoint_name(position)

    def wait(self) -> None:
        """Until the checkpoint in the making is whole.

        Raises:
            RopewalkError: as :meth:`save`.
        """
        if self._writing is not None:
            writing_, self._writing = self._writing, None
            writing_.result()

    def _write(self, position: Position, state: dict[str, Tensor]) -> None:
        """What the background does: every step ends on all ranks alike, well or not."""
        world = self._world
        path = self.folder / checkpoint_name(position)
        # Rank 0 names the folder for all; where the machines share no disk, each has its own path to it.
        partial = path.with_name(world.on_rank_0(lambda: _prepare(path)))
        try:
            _write_shards(path, partial, state, world)
            files = _digests_of_all(path, partial, world)
            world.on_rank_0(lambda: self._commit(position, path, partial, files))
        finally:
            if world.is_rank_0:
                shutil.rmtree(partial, ignore_errors=True)

    def _commit(self, position: Position, path: Path, partial: Path, files: dict[str, FileDigest]) -> None:
        with writing(path):
            there = {each.name: each for each in partial.iterdir()}
            if unseen := sorted(files.keys() - there.keys()):
                raise RopewalkError(
                    f"cannot write {path}: {unseen[0]}, which another process wrote, is not to be seen from this "
                    "machine; give an output on a file system that all machines share"
                )
            # The metadata, which torch's writer wrote for all.
            others = {each for name, each in there.items() if name not in files}
            record = Record(
                position,
                {**files, **digests(others)},
                sharded=True,
                world_size=self._world.size,
                mesh=asdict(self._mesh.shape),
                random_states=tuple(random_states()),
            )
            write_record(partial, record)
            sync_folder(partial)
            retired = unique_name(path, REPLACED) if path.exists() else None
            if retired is not None:
                path.rename(retired)
            partial.rename(path)
            sync_folder(self.folder)
            if retired is not None:
                shutil.rmtree(retired)
        keep_latest(self.folder, self.keep)


def load_checkpoint(
    path: Path, trained: LossModel, optimizer: MasterAdamW, world: World, mesh: Mesh | None = None
) -> Position:
    """Put weights, masters, optimiser and random number generators where they were; every rank calls this.

    On the mesh that saved it training goes on bit for bit, on another one within rounding. The random number generators
    of a rank that did not exist then are left as they are.

    Args:
        path: a checkpoint of one process or of ranks.
        trained: of the same architecture, sharded over the mesh, where there is one.
        optimizer: over its parameters.
        world: of this run.
        mesh: of this run; None for one process.

    Returns:
        How far the run had come.

    Raises:
        RopewalkError: on every rank, if it is damaged or of another model.
    """
    record = world.on_rank_0(lambda: read_record(path))
    model = trained.model
    masters, state = named_weights(model, optimizer), named_moments(model, optimizer)
    if record.sharded:
        there = world.rank < record.world_size
        here = {d: t.clone() for d, t in random_states().items() if there and d in record.random_states}
        _read_shards(
            path,
            {
                **{WEIGHT + name: tensor for name, tensor in masters.items()},
                **{STATE + name: tensor for name, tensor in state.items()},
                **{f"{RANDOM}{device}.{world.rank}": tensor for device, tensor in here.items()},
            },
            world,
            mesh,
        )
        set_random_states(here)
    else:
        read_weights(path, model, masters, world)
        read_state(path, state, world)
    set_moments(model, optimizer, state)
    return record.position


def load_weights(path: Path, trained: LossModel, world: World, mesh: Mesh | None = None) -> None:
    """Put the weights of a checkpoint into a model, in the model's dtype; arguments as for :func:`load_checkpoint`."""
    record = world.on_rank_0(lambda: read_record(path))
    into = named_weights(trained.model, None)
    if record.sharded:
        _read_shards(path, {WEIGHT + name: tensor for name, tensor in into.items()}, world, mesh)
    else:
        read_weights(path, trained.model, into, world)


def export_model(
    trained: LossModel,
    folder: Path,
    tokenizer: Any,
    world: World,
    dtype: torch.dtype,
    position: Position | None = None,
) -> None:
    """Write a folder that plain transformers loads; rank 0 alone gathers the model, every rank calls this.

    Beside the weights lies a record of every file's digest (:data:`EXPORT_RECORD`), by which damage is found later.

    Args:
        trained: whole or sharded.
        folder: to make, or to replace.
        tokenizer: saved beside the weights, if any.
        world: the ranks that hold the model.
        dtype: of the weights in it.
        position: how far the run had come whose weights these are, if they are of one.

    Raises:
        RopewalkError: on every rank, if rank 0 cannot write.
    """
    state = gathered_state(trained.model, world, dtype)

    def write() -> None:
        with new_folder(folder) as partial:
            save_model(trained.model, partial, tokenizer, state)
            # transformers notes the dtype of the model in memory.
            config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
            write_json(partial / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
            write_export_record(partial, position)

    world.on_rank_0(write)


def _prepare(path: Path) -> str:
    """Make a folder to fill with a checkpoint, and return its name."""
    partial = unique_name(path, PARTIAL)
    with writing(path):
        partial.mkdir(parents=True)
    return partial.name


class _PlainSpoken(FileSystemWriter):
    """torch's archive writer speaks of positions where the disk said why it refused; this one passes that on."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from None


def _write_shards(path: Path, partial: Path, state: dict[str, Tensor], world: World) -> None:
    try:
        state_dict_saver.save(state, storage_writer=_PlainSpoken(partial), process_group=world.control)
    except CheckpointException as error:
        reason = _reason(error)
        if reason is None:
            raise
        refuse(world, f"cannot write {path}: {reason}")


def _digests_of_all(path: Path, partial: Path, world: World) -> dict[str, FileDigest]:
    """Each rank hashes what it wrote, which its own machine still has in memory."""
    mine: dict[str, FileDigest] = {}
    failure = None
    try:
        mine = digests(partial.glob(f"__{world.rank}_*"))
    except OSError as error:
        failure = f"{error.strerror or error} (rank {world.rank})"
    told = told_to_all(world, (mine, failure))
    failures = [each for _, each in told if each is not None]
    if failures:
        refuse(world, f"cannot read back {path}: {failures[0]}")
    return {name: digest for digests_, _ in told for name, digest in digests_.items()}


def _read_shards(path: Path, into: dict[str, Tensor], world: World, mesh: Mesh | None) -> None:
    """Fill tensors, whole or sharded, from whatever shards the checkpoint has; its metadata is a pickle of torch's."""
    try:
        with warnings.catch_warnings():
            # One process is what is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            state_dict_loader.load(
                into,
                storage_reader=FileSystemReader(path),
                process_group=world.control,
                no_dist=mesh is None,
            )
    except CheckpointException as error:
        reason = _reason(error, Exception)
        if reason is None:
            raise
        refuse(world, f"the checkpoint {path} is damaged, or of another model: {reason}")


def _reason(
    error: CheckpointException, kinds: type[Exception] | tuple[type[Exception], ...] = (OSError, RuntimeError)
) -> str | None:
    """Why a rank failed, if it is of a kind that a disk or a file can cause; torch writes through both."""
    rank, (cause, _) = min(error.failures.items())
    if not isinstance(cause, kinds):
        return None
    words = getattr(cause, "strerror", None) or next(
        iter(str(cause).strip().splitlines()), type(cause).__name__
    )
    return f"{words} (rank {rank})"
