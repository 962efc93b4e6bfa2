"""Checkpoints of one process: a folder that plain transformers loads, with all an exact resume needs beside it."""

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

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digests
from ropewalk.io.files import new_folder
from ropewalk.models.load import save_model
from ropewalk.models.sharding import local_part
from ropewalk.parallel import World
from ropewalk.training.checkpoint.files import Position, Record, checkpoint_name, keep_latest, write_record
from ropewalk.training.optimizer import STATE_KINDS, MasterAdamW

TENSORS = "training_state.safetensors"


def save_checkpoint(
    folder: Path, model: Any, tokenizer: Any, optimizer: MasterAdamW, position: Position, keep: int
) -> Path:
    """Write one checkpoint below ``folder``, whole or not at all, then delete all but the latest ``keep``.

    Its weights are the optimiser's float32 masters, whatever dtype the model computes in.
    """
    path = folder / checkpoint_name(position)
    with new_folder(path) as partial:
        save_model(model, partial, tokenizer, optimizer.weights(model.state_dict()))
        random = {f"rng.{device}": state for device, state in random_states().items()}
        tensors = {**named_moments(model, optimizer), **random}
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial / TENSORS)
        files = digests(path for path in partial.iterdir() if path.is_file())
        write_record(partial, Record(position, files, random_states=tuple(random_states())))
    keep_latest(folder, keep)
    return path


def named_weights(model: Any, optimizer: MasterAdamW | None) -> dict[str, Tensor]:
    """A model's parameters and saved buffers, tied ones once, by the model's own names; no copies.

    Where an optimiser keeps a master of a parameter, the master stands in its place.
    """
    masters = (
        {}
        if optimizer is None
        else {id(p): optimizer.masters[name] for name, p in optimizer.parameters.items()}
    )
    found = {name: masters.get(id(p), p).detach() for name, p in model.named_parameters()}
    saved = model.state_dict().keys()
    return found | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def named_moments(model: Any, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """An optimiser's state by the names that its parameters have in a transformers model; no copies."""
    own = {id(p): name for name, p in model.named_parameters()}
    split = ((key.split(".", 1), tensor) for key, tensor in optimizer.state().items())
    return {f"{kind}.{own[id(optimizer.parameters[name])]}": tensor for (kind, name), tensor in split}


def set_moments(model: Any, optimizer: MasterAdamW, tensors: Mapping[str, Tensor]) -> None:
    """Hand an optimiser the state that :func:`named_moments` names."""
    own = {id(p): name for name, p in model.named_parameters()}
    optimizer.load_state(
        {
            f"{kind}.{name}": tensors[f"{kind}.{own[id(parameter)]}"]
            for kind, (name, parameter) in product(STATE_KINDS, optimizer.parameters.items())
        }
    )


def read_weights(path: Path, model: Any, into: Mapping[str, Tensor], world: World) -> None:
    """Fill tensors, whole or sharded, from the weights of a Hugging Face folder; every rank calls this.

    Rank 0 reads it through transformers, which may name or stack a file's tensors differently from the model's.

    Args:
        path: the folder.
        model: the transformers model whose weights these are.
        into: as :func:`named_weights` gives them.
        world: the ranks that hold them.

    Raises:
        RopewalkError: on every rank, if the folder cannot be read or holds another model.
    """
    source: dict[str, Tensor] = {}

    def read() -> None:
        try:
            whole, loading = type(model).from_pretrained(
                path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RopewalkError(f"cannot load the weights in {path}: {reason}") from error
        if loading["missing_keys"]:
            raise RopewalkError(f"the checkpoint in {path} lacks the weight {min(loading['missing_keys'])}")
        source.update(named_weights(whole, None))
        _require_fit(path, source, into)

    world.on_rank_0(read)
    _send(source, into, world)


def read_state(path: Path, into: Mapping[str, Tensor], world: World) -> None:
    """Fill an optimiser's tensors from a checkpoint of one process, and set rank 0's random number generators.

    The arguments are as for :func:`read_weights`; ``into`` as :func:`named_moments` gives them.

    Raises:
        RopewalkError: on every rank, if the file cannot be read or holds other tensors.
    """
    source: dict[str, Tensor] = {}

    def read() -> None:
        try:
            with safe_open(path / TENSORS, framework="pt") as file:
                source.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise RopewalkError(f"the training state in {path} is damaged or incomplete: {error}") from error
        _require_fit(path, source, into)

    world.on_rank_0(read)
    _send(source, into, world)
    set_random_states(
        {name.removeprefix("rng."): state for name, state in source.items() if name.startswith("rng.")}
    )


def random_states() -> dict[str, Tensor]:
    """States of this process's random number generators, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Put back what :func:`random_states` gave, where there is such a device."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _require_fit(path: Path, source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, target in into.items():
        if name not in source:
            raise RopewalkError(f"the checkpoint {path} does not fit the model: it has no {name}")
        if source[name].shape != target.shape:
            there, here = list(source[name].shape), list(target.shape)
            raise RopewalkError(
                f"the checkpoint {path} does not fit the model: {name} is {there} there, {here} here"
            )


@torch.no_grad()
def _send(source: Mapping[str, Tensor], into: Mapping[str, Tensor], world: World) -> None:
    """One tensor at a time from rank 0 to the shards of all ranks, in one order."""
    for name, target in into.items():
        if world.size == 1:
            target.copy_(source[name])
            continue
        full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if world.is_rank_0:
            full.copy_(source[name])
        # What lies on the CPU, such as the step counts, has a backend of its own there.
        dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            target.to_local().copy_(local_part(full, target))
        else:
            target.copy_(full)
