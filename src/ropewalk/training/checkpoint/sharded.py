"""Sharded checkpoints: each rank writes its shards, optionally in the background; any mesh can resume from them."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.digests import FileDigest, HashedFile
from ropewalk.io.files import PARTIAL, REPLACED, new_folder, plain_name, unique_name, write_json, writing
from ropewalk.models.checkpoint.save import save_model, whole_of
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.sharding import gathered_state
from ropewalk.parallel import Mesh, World
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.world import PATIENCE
from ropewalk.training.checkpoint.background import CheckpointWriter
from ropewalk.training.checkpoint.files import (
    Completed,
    Position,
    Record,
    checkpoint_name,
    keep_latest,
    nothing_more,
    read_record,
    refuse,
    sync_folder,
    write_export_record,
    write_record,
)
from ropewalk.training.checkpoint.single import (
    RANDOM,
    STATE,
    WEIGHT,
    named_moments,
    named_weights,
    random_states,
    read_state,
    read_weights,
    set_moments,
    set_random_states,
)
from ropewalk.training.update.optimizer import MasterAdamW

METADATA = ".metadata"
_METADATA_CLASSES = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # The second of these modules is that of Python 3.13.
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""What torch pickles in the metadata of a checkpoint, by module."""


class ShardedCheckpoints(CheckpointWriter):
    """Writer of the checkpoints of one stage on several ranks.

    A checkpoint contains float32 weights, the optimizer's state, and the state of each rank's random number generators.
    Its folder gets its final name once all ranks' files are on disk; only then are older checkpoints deleted.

    Attributes:
        folder: folder of the checkpoints, on a file system that all ranks share.
        keep: number of complete checkpoints to keep.
        completed: called on rank 0 with each complete checkpoint, from the thread that wrote it.
    """

    def __init__(
        self,
        folder: Path,
        trained: LossModel,
        optimizer: MasterAdamW,
        context: RunContext,
        keep: int,
        asynchronous: bool = False,
        completed: Completed = nothing_more,
    ) -> None:
        if context.mesh is None:
            raise RopewalkError(
                "sharded checkpoints need a mesh of several processes; with one process use save_checkpoint"
            )
        super().__init__(folder, trained.device, asynchronous)
        self.keep = keep
        self.completed = completed
        self._trained = trained
        self._optimizer = optimizer
        self._mesh = context.mesh
        self._world = context.world
        if asynchronous:
            # The writer thread needs its own process group: collectives of two threads on one group could interleave.
            self._world = replace(self._world, control=dist.new_group(backend="gloo", timeout=PATIENCE))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, where)
        finally:
            if self._thread is not None:
                # The writer thread has ended, so no collective is pending on the group.
                dist.destroy_process_group(self._world.control)

    def _state(self) -> dict[str, Tensor]:
        model = self._trained.model
        return {
            **{WEIGHT + name: t for name, t in named_weights(model, self._optimizer).items()},
            **{STATE + name: t for name, t in named_moments(model, self._optimizer).items()},
            **{f"{RANDOM}{device}.{self._world.rank}": t for device, t in random_states().items()},
        }

    def _write(self, position: Position, state: Mapping[str, Tensor], best: Path | None) -> None:
        """Every phase succeeds or fails on all ranks together."""
        world = self._world
        path = self.folder / checkpoint_name(position)
        # Rank 0 picks a unique name for all ranks; it sends only the name, since mount points may differ by machine.
        partial = path.with_name(world.on_rank_0(lambda: _prepare(path)))
        try:
            mine = _write_shards(path, partial, state, world)
            files = {name: digest for each in world.gather(mine) for name, digest in each.items()}
            world.on_rank_0(lambda: self._commit(position, path, partial, files, best))
        finally:
            if world.is_rank_0:
                shutil.rmtree(partial, ignore_errors=True)

    def _commit(
        self,
        position: Position,
        path: Path,
        partial: Path,
        files: dict[str, FileDigest],
        best: Path | None,
    ) -> None:
        with writing(path):
            there = {each.name for each in partial.iterdir()}
            if unseen := sorted(files.keys() - there):
                raise RopewalkError(
                    f"cannot write {path}: {unseen[0]}, which another process wrote, is not visible on this machine; "
                    "set output to a folder on a file system that all machines share"
                )
            record = Record(
                position,
                files,
                sharded=True,
                world_size=self._world.size,
                mesh=asdict(self._mesh.shape),
                random_states=tuple(random_states()),
                betas=self._optimizer.betas,
            )
            write_record(partial, record)
            # All entries must be on disk before the final name, which says that the checkpoint is complete.
            sync_folder(partial)
            # A resumed run may write a step again: the old folder keeps its content until the new one has its place.
            retired = unique_name(path, REPLACED) if path.exists() else None
            if retired is not None:
                path.rename(retired)
            partial.rename(path)
            sync_folder(self.folder)
            if retired is not None:
                shutil.rmtree(retired)
        keep_latest(self.folder, self.keep, best)
        self.completed(path)


def load_checkpoint(
    path: Path, trained: LossModel, optimizer: MasterAdamW, world: World, mesh: Mesh | None = None
) -> Position:
    """Restore weights, masters, optimizer state and random number generators; every rank must call this function.

    On the mesh that saved the checkpoint, training continues bit for bit; on another mesh, up to rounding. Ranks that
    did not exist when it was saved keep their random number generators as they are.

    Args:
        path: folder of a single-process or sharded checkpoint.
        trained: model of the same architecture, sharded over the mesh if there is one.
        optimizer: optimizer of the model's parameters.
        world: processes of this run.
        mesh: mesh of this run; None for one process.

    Returns:
        Progress of the run at the checkpoint.

    Raises:
        RopewalkError: on every rank, if the checkpoint is damaged or belongs to another model.
    """
    record = world.on_rank_0(lambda: read_record(path))
    model = trained.model
    masters, state = named_weights(model, optimizer), named_moments(model, optimizer)
    if record.sharded:
        there = world.rank < record.world_size
        # The loader fills these tensors in place.
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
        set_random_states(read_state(path, state, world))
    set_moments(model, optimizer, state)
    optimizer.carry_moments(record.betas)
    return record.position


def load_moments(
    path: Path,
    trained: LossModel,
    optimizer: MasterAdamW,
    world: World,
    mesh: Mesh | None = None,
    rewarm: bool = False,
) -> None:
    """Restore only the optimizer's moments, for a new stage; arguments as for :func:`load_checkpoint`.

    Args:
        rewarm: whether to count them as the average of one step, as :meth:`MasterAdamW.carry_moments` does.
    """
    record = world.on_rank_0(lambda: read_record(path))
    state = named_moments(trained.model, optimizer)
    if record.sharded:
        _read_shards(path, {STATE + name: tensor for name, tensor in state.items()}, world, mesh)
    else:
        read_state(path, state, world)
    set_moments(trained.model, optimizer, state)
    optimizer.carry_moments(record.betas, rewarm)


def load_weights(path: Path, trained: LossModel, world: World, mesh: Mesh | None = None) -> None:
    """Load only the weights of a checkpoint, in the model's dtype; arguments as for :func:`load_checkpoint`."""
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
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Export a folder that plain transformers loads; rank 0 gathers the model, every rank must call this function.

    The folder also contains a record of all files' digests (:data:`EXPORT_RECORD`), which reveals later damage.

    Args:
        trained: whole or sharded model.
        folder: folder to create or replace.
        tokenizer: tokenizer to save with the model; None for none.
        world: ranks that hold the model.
        dtype: dtype of the exported weights.
        position: progress of the run that the weights come from; None if they are not from a run.
        weights: the checkpoints that are exported, for the record; None for the last one.

    Raises:
        RopewalkError: on every rank, if rank 0 cannot write.
    """
    # Gathering is a collective of all ranks, so it stands outside of what rank 0 does alone.
    state = gathered_state(trained.model, world, dtype)

    def write() -> None:
        with new_folder(folder) as partial:
            save_model(trained.model, partial, tokenizer, state)
            if whole_of(trained.model) is None:
                # transformers wrote the dtype of the model in memory, which may differ from that of the weights.
                config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
                write_json(partial / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
            write_export_record(partial, position, weights)

    world.on_rank_0(write)


def _prepare(path: Path) -> str:
    """Create the temporary folder of a checkpoint, and return its name."""
    partial = unique_name(path, PARTIAL)
    with writing(path):
        partial.mkdir(parents=True)
    return partial.name


class _HashedFiles(FileSystem):
    """Files of a rank, with the digests of those that it has written."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with HashedFile(path) as file:
            yield file
        self.digests[Path(path).name] = file.digest()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _ShardWriter(FileSystemWriter):
    """Writer that hashes what it writes.

    It raises the underlying OSError: torch's own error names an archive position instead of the reason.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self.files = _HashedFiles()

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


def _write_shards(
    path: Path, partial: Path, state: Mapping[str, Tensor], world: World
) -> dict[str, FileDigest]:
    """Write this rank's files, on rank 0 also torch's metadata of all; their digests."""
    writer = _ShardWriter(partial)
    try:
        state_dict_saver.save(dict(state), storage_writer=writer, process_group=world.control)
    except CheckpointException as error:
        reason = _reason(error)
        if reason is None:
            raise
        refuse(world, f"cannot write {path}: {reason}")
    return writer.files.digests


def _read_shards(path: Path, into: dict[str, Tensor], world: World, mesh: Mesh | None) -> None:
    """Fill whole or sharded tensors from shards of any layout."""
    world.on_rank_0(lambda: _check_metadata(path))
    try:
        with warnings.catch_warnings():
            # torch warns about loading without torch.distributed, which is intended with one process.
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
        refuse(world, f"the checkpoint {path} is damaged or belongs to another model: {reason}")


class _MetadataReader(pickle.Unpickler):
    """Reads a pickle that consists of metadata; any other could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _check_metadata(path: Path) -> None:
    """Raise if a checkpoint's metadata, a pickle, could run code or names a file outside the checkpoint's folder."""
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _MetadataReader(file).load()
        names = [info.relative_path for info in metadata.storage_data.values()]
    # A damaged pickle raises any of these.
    except (
        OSError,
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        EOFError,
    ) as error:
        raise RopewalkError(
            f"the checkpoint {path} is damaged or not from ropewalk: {METADATA} cannot be read: {error}; do not use "
            "this folder"
        ) from error
    for name in names:
        plain_name(name, path / METADATA)


def _reason(
    error: CheckpointException, kinds: type[Exception] | tuple[type[Exception], ...] = (OSError, RuntimeError)
) -> str | None:
    """Reason why a rank failed, if a disk or a file can cause it (torch raises both kinds); None for other errors."""
    # Every rank gets all failures; the lowest rank's is the same choice on all of them.
    rank, (cause, _) = min(error.failures.items())
    if not isinstance(cause, kinds):
        return None
    words = getattr(cause, "strerror", None) or first_line(cause)
    return f"{words} (rank {rank})"
