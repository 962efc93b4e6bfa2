"""Single-process checkpoints: a folder that plain transformers loads, plus the state for an exact resume."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.digests import digests
from ropewalk.io.files import new_folder
from ropewalk.models.adapter import adapter_of, read_adapter, save_adapter, trained_parameters
from ropewalk.models.checkpoint.loaded_weights import refuse_other_weights
from ropewalk.models.checkpoint.save import save_model, whole_of
from ropewalk.models.sharding import local_part
from ropewalk.parallel import World
from ropewalk.training.checkpoint.background import CheckpointWriter
from ropewalk.training.checkpoint.files import (
    Completed,
    Position,
    Record,
    checkpoint_name,
    keep_latest,
    nothing_more,
    write_record,
)
from ropewalk.training.update.optimizer import STATE_KINDS, MasterAdamW

WEIGHT, STATE, RANDOM = "weight.", "optimizer.", "random."
"""Prefixes of names in what a checkpoint contains: weights, AdamW's state, random number generators."""
TENSORS = "training_state.safetensors"
"""File with the optimizer state and the states of the random number generators."""


class WholeCheckpoints(CheckpointWriter):
    """Writer of the checkpoints of one stage in one process.

    Weights are the optimizer's float32 masters, whatever dtype the model computes in. A checkpoint's folder gets its
    final name once all files are on disk; only then are older checkpoints deleted.

    Attributes:
        folder: folder of the checkpoints.
        keep: number of complete checkpoints to keep.
        completed: called with each complete checkpoint, from the thread that wrote it.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        optimizer: MasterAdamW,
        tokenizer: Any,
        keep: int,
        asynchronous: bool = False,
        completed: Completed = nothing_more,
    ) -> None:
        super().__init__(folder, model.device, asynchronous)
        self.keep = keep
        self.completed = completed
        self._model = model
        self._optimizer = optimizer
        self._tokenizer = tokenizer

    def _state(self) -> dict[str, Tensor]:
        model, optimizer = self._model, self._optimizer
        if adapter_of(model) is None:
            weights = optimizer.weights(model.state_dict())
        else:
            weights = named_weights(model, optimizer)
        return {
            **{WEIGHT + name: tensor for name, tensor in weights.items()},
            **{STATE + name: tensor for name, tensor in named_moments(model, optimizer).items()},
            # Random states too, so that dropout after a resume is what it would have been.
            **{RANDOM + device: state for device, state in random_states().items()},
        }

    def _write(self, position: Position, state: Mapping[str, Tensor], best: Path | None) -> None:
        weights, moments, random = (_under(kind, state) for kind in (WEIGHT, STATE, RANDOM))
        path = self.folder / checkpoint_name(position)
        with new_folder(path) as partial:
            if adapter_of(self._model) is None:
                save_model(self._model, partial, self._tokenizer, weights)
            else:
                save_adapter(self._model, partial, weights)
            tensors = {**moments, **{f"rng.{device}": each for device, each in random.items()}}
            # safetensors refuses tensors that are not contiguous, such as transposed ones.
            save_file(
                {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial / TENSORS
            )
            files = digests(path for path in partial.iterdir() if path.is_file())
            write_record(
                partial, Record(position, files, random_states=tuple(random), betas=self._optimizer.betas)
            )
        keep_latest(self.folder, self.keep, best)
        self.completed(path)


def _under(kind: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(kind): tensor for name, tensor in state.items() if name.startswith(kind)}


def save_checkpoint(
    folder: Path, model: Any, tokenizer: Any, optimizer: MasterAdamW, position: Position, keep: int
) -> Path:
    """Write one checkpoint to a subfolder of ``folder``, and delete all but the latest ``keep``."""
    with WholeCheckpoints(folder, model, optimizer, tokenizer, keep) as checkpoints:
        return checkpoints.save(position)


def named_weights(model: Any, optimizer: MasterAdamW | None) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers by name, tied ones once, without copying.

    Of a model with an adapter only the parameters that it trains: all others are those of the checkpoint that the run
    began with. If the optimizer keeps a master of a parameter, the master replaces the parameter.
    """
    masters = (
        {}
        if optimizer is None
        else {id(p): optimizer.masters[name] for name, p in optimizer.parameters.items()}
    )
    if adapter_of(model) is not None:
        return {name: masters.get(id(p), p).detach() for name, p in trained_parameters(model).items()}
    found = {name: masters.get(id(p), p).detach() for name, p in model.named_parameters()}
    saved = model.state_dict().keys()
    return found | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def named_moments(model: Any, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """The optimizer's state, keyed by the names of parameters in the transformers model, without copying."""
    # The optimizer's names belong to the wrapping LossModel; files use the names of the transformers model.
    own = {id(p): name for name, p in model.named_parameters()}
    split = ((key.split(".", 1), tensor) for key, tensor in optimizer.state().items())
    return {f"{kind}.{own[id(optimizer.parameters[name])]}": tensor for (kind, name), tensor in split}


def set_moments(model: Any, optimizer: MasterAdamW, tensors: Mapping[str, Tensor]) -> None:
    """Restore the optimizer's state from tensors keyed as in :func:`named_moments`."""
    own = {id(p): name for name, p in model.named_parameters()}
    optimizer.load_state(
        {
            f"{kind}.{name}": tensors[f"{kind}.{own[id(parameter)]}"]
            for kind, (name, parameter) in product(STATE_KINDS, optimizer.parameters.items())
        }
    )


def read_weights(path: Path, model: Any, into: Mapping[str, Tensor], world: World) -> None:
    """Fill whole or sharded tensors with the weights of a Hugging Face folder; every rank must call this function.

    Rank 0 reads the folder through transformers, because names and stacking of tensors in files may differ from those
    in the model.

    Args:
        path: the folder.
        model: transformers model of the same class.
        into: tensors to fill, from :func:`named_weights`.
        world: ranks that hold the tensors.

    Raises:
        RopewalkError: on every rank, if the folder cannot be read or contains another model.
    """
    source: dict[str, Tensor] = {}

    def read() -> None:
        if adapter_of(model) is not None:
            source.update(_read_adapter(path, into))
            _require_fit(path, source, into)
            return
        try:
            whole, loading = type(model).from_pretrained(
                # In float32, because the masters were saved and rounding them would change the run.
                path,
                dtype=torch.float32,
                # The alternative, a .bin file, is a pickle, which can run code.
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = first_line(error)
            raise RopewalkError(f"cannot load the weights in {path}: {reason}") from error
        refuse_other_weights(path, whole.config, whole, loading, alone=whole_of(model) is not None)
        source.update(named_weights(whole, None))
        _require_fit(path, source, into)

    world.on_rank_0(read)
    _send(source, into, world)


def _read_adapter(path: Path, into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        return read_adapter(path, into)
    except (OSError, SafetensorError) as error:
        raise RopewalkError(f"cannot load the adapter in {path}: {error}") from error


def read_state(path: Path, into: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Fill the optimizer's tensors from a single-process checkpoint.

    Args:
        path: folder of the checkpoint.
        into: tensors to fill, from :func:`named_moments`.
        world: ranks that hold the tensors; each must call this function.

    Returns:
        On rank 0 the saved states of random number generators, as from :func:`random_states`.

    Raises:
        RopewalkError: on every rank, if the file cannot be read or contains other tensors.
    """
    source: dict[str, Tensor] = {}

    def read() -> None:
        try:
            with safe_open(path / TENSORS, framework="pt") as file:
                # safe_open returns no mapping: it has keys() but cannot be iterated.
                source.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise RopewalkError(f"the training state in {path} is damaged or incomplete: {error}") from error
        _require_fit(path, source, into)

    world.on_rank_0(read)
    _send(source, into, world)
    return {name.removeprefix("rng."): state for name, state in source.items() if name.startswith("rng.")}


def random_states() -> dict[str, Tensor]:
    """States of this process's random number generators, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore states from :func:`random_states`, for devices that exist here."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _require_fit(path: Path, source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    way_on = "restore the model and the adapter settings that it was written with, or use another checkpoint"
    for name, target in into.items():
        if name not in source:
            raise RopewalkError(f"the checkpoint {path} does not match the model: it has no {name}; {way_on}")
        if source[name].shape != target.shape:
            there, here = list(source[name].shape), list(target.shape)
            raise RopewalkError(
                f"the checkpoint {path} does not match the model: {name} has shape {there} in the checkpoint and "
                f"{here} in the model; {way_on}"
            )


@torch.no_grad()
def _send(source: Mapping[str, Tensor], into: Mapping[str, Tensor], world: World) -> None:
    """Send tensors one at a time, in the same order on all ranks, from rank 0 to the shards of all ranks."""
    for name, target in into.items():
        if world.size == 1:
            target.copy_(source[name])
            continue
        # Ranks other than 0 hold one whole tensor at a time besides their shards.
        full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if world.is_rank_0:
            full.copy_(source[name])
        # CPU tensors such as step counts go over gloo, CUDA tensors over NCCL: the group has a backend for each device.
        dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            target.to_local().copy_(local_part(full, target))
        else:
            target.copy_(full)
