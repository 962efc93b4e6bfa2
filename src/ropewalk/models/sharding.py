"""A transformers model over several ranks: FSDP2 shards, filled by the rank that reads the checkpoint."""

from __future__ import annotations

import os
import re
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ropewalk.errors import EngineError
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.checkpoint.save import take_over_whole
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import AS_IT_IS, ModelSetup, empty_model, load_model
from ropewalk.parallel import Mesh, World
from ropewalk.parallel.mesh import sharded_dimension


def load_sharded(
    path_or_id: str | os.PathLike[str],
    mesh: Mesh,
    world: World,
    setup: ModelSetup = AS_IT_IS,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    adapter: NewAdapter | None = None,
    offload: bool = False,
) -> LossModel:
    """Load a checkpoint with its parameters sharded over the ranks; every rank calls this.

    Only rank 0 reads it, into CPU memory in the checkpoint's own dtype, and distributes it one parameter at a time. No
    other rank ever holds more than its shard and one parameter.

    Args:
        path_or_id, setup: as for :func:`load_model`.
        mesh, world: those of this run; the mesh states the kind of device.
        dtype: dtype of the shards.
        compute_dtype: dtype in which parameters are gathered; gradients are reduced in float32. None for ``dtype``.
        adapter: adapter to add, whose frozen parameters have ``compute_dtype``; None for none.
        offload: as for :func:`shard_model`.

    Returns:
        The model with its output head, sharded, in evaluation mode.

    Raises:
        RopewalkError: as for :func:`load_model`, on every rank.
    """
    # Only rank 0 reads the files: with one copy per process, CPU memory would limit the number of ranks on a node.
    source: list[Any] = []

    def read() -> bool:
        """Read the model into a list, because on_rank_0 sends what is returned to all ranks: whether it is tied."""
        whole = load_model(path_or_id, setup)
        # Both raise for a model that cannot be trained, before any rank makes its shards.
        OutputHead.of(whole)
        decoder_layers(whole)
        if adapter is not None:
            adapter.add_to(whole)
        source.append(whole)
        return bool(getattr(whole.config, "tie_word_embeddings", False))

    tied = world.on_rank_0(read)
    model = empty_model(path_or_id, setup, dtype, own_head=not tied)
    if adapter is not None:
        adapter.add_to(model, dtype, compute_dtype)
    trained = LossModel(model, OutputHead.unchecked(model))
    shard_model(trained, mesh, compute_dtype, offload)
    materialise(trained, world.device_on(mesh), offload)
    _fill(model, source[0] if source else None)
    if source:
        # This rank writes what is saved.
        take_over_whole(source[0], model)
    return trained.eval()


def shard_model(
    trained: LossModel, mesh: Mesh, compute_dtype: torch.dtype | None = None, offload: bool = False
) -> None:
    """Shard a model in place: one unit for each decoder layer, and one for the rest, including tied parameters.

    Args:
        trained: model on the CPU or on the ``meta`` device.
        mesh: parameters are sharded over all its ranks except replicas.
        compute_dtype: dtype in which parameters are gathered; None to keep theirs. Tensors passed between layers are
            not cast, so that cos and sin of RoPE stay float32.
        offload: whether the shards and their gradients are in CPU memory. Each shard is sent to the device before it is
            gathered, and its gradient to CPU memory as soon as it is reduced.

    Raises:
        EngineError: as for :func:`decoder_layers`.
    """
    layers = decoder_layers(trained.model)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    dimensions = mesh.device_mesh if mesh.shape.replicate > 1 else mesh.device_mesh["shard_all"]
    ranks = mesh.shape.shard_degree

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(sharded_dimension(parameter.shape, ranks))

    # Layers first: fully_shard of the root then takes only what no layer has claimed.
    where = (
        CPUOffloadPolicy(pin_memory=mesh.device_mesh.device_type == "cuda") if offload else OffloadPolicy()
    )
    for module in (*layers, trained):
        fully_shard(
            module,
            mesh=dimensions,
            mp_policy=policy,
            shard_placement_fn=placement,
            offload_policy=where,
        )


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a model that are sharded separately: those that transformers checkpoints separately.

    Raises:
        EngineError: if it has none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(
            f"{type(model).__name__} is not built from transformers' decoder layers, so it cannot be sharded; train it "
            "with one process"
        )
    return layers


def materialise(module: nn.Module, device: torch.device, offload: bool = False) -> None:
    """Allocate memory for a module on the meta device, whole or sharded, and move its buffers.

    ``to_empty`` would untie tied parameters and reset buffers.

    Args:
        module: the module.
        device: device of its buffers, and of its parameters unless ``offload`` leaves those in CPU memory.
        offload: whether it does.
    """
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                # Through the device, so that a dry run sees that there is no data.
                empty = empty.cpu() if offload else empty
                made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            setattr(owner, name, made[id(parameter)])
        for name, buffer in owner.named_buffers(recurse=False):
            there = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            setattr(owner, name, there)


@torch.no_grad()
def _fill(model: Any, source: Any | None) -> None:
    """Send every parameter and buffer of rank 0's whole model to the shards of all ranks, in a fixed order."""
    parameters = {} if source is None else dict(source.named_parameters())
    for name, shard in model.named_parameters():
        # The shape of a DTensor is that of the whole tensor.
        full = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        if source is not None:
            full.copy_(parameters[name])
        dist.broadcast(full, src=0)
        shard.to_local().copy_(local_part(full, shard))
    # Buffers are not sharded.
    for name, buffer in model.named_buffers():
        if source is not None:
            buffer.copy_(_buffer_in(source, name, buffer.dtype))
        dist.broadcast(buffer, src=0)


def _buffer_in(source: Any, name: str, dtype: torch.dtype) -> Tensor:
    """A buffer of a whole model, with the value that it has after a load in the given dtype.

    The class computes buffers that are not in a checkpoint in the dtype of the load. With the checkpoint's own dtype,
    Gemma's embedding factor would be rounded to bfloat16 on ranks (34 for the root of 1152) but not in one process.
    """
    read: Tensor = source.get_buffer(name)
    parent, _, attribute = name.rpartition(".")
    owner = source.get_submodule(parent)
    if not read.is_floating_point() or read.dtype == dtype or name in source.state_dict():
        return read
    # In a copy without weights, because the class would draw weights anew.
    bare = copy(owner)
    bare._parameters = {key: p if p is None else p.to("meta") for key, p in owner._parameters.items()}
    bare._buffers = {key: b if b is None else b.to(dtype) for key, b in owner._buffers.items()}
    _initializer_of(source, parent)._init_weights(bare)
    made = bare._buffers[attribute]
    # If a class does not say how its buffer is computed, the buffer stays as it was read.
    assert made is not None
    return made if torch.equal(made.to(read.dtype), read) else read


def _initializer_of(source: Any, name: str) -> Any:
    """The transformers model that initialises one of its modules: the innermost one that contains it, or is it."""
    from transformers import PreTrainedModel

    found, module = source, source
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            found = module
    return found


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's shard of a whole tensor that every rank has, split like ``like``."""
    # With None torch sends nothing, since every rank has the whole tensor.
    cut = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return cut.to_local()


@torch.no_grad()
def gathered_state(model: Any, world: World, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The parameters and saved buffers of a sharded model, whole, on rank 0's CPU; empty on the other ranks.

    They are gathered one by one, so apart from its shards no other rank ever holds more than one parameter. Tied
    parameters appear under one name. Every rank must call this.

    Args:
        model: a transformers model, whole or sharded.
        world: the ranks that hold it.
        dtype: dtype of the result, except for what transformers keeps in float32; None to keep it.
    """
    state: dict[str, Tensor] = {}
    kept = set() if dtype is None else kept_in_float32(model, dtype)

    def take(name: str, full: Tensor, in_float32: bool) -> None:
        if world.is_rank_0:
            other = dtype is not None and full.is_floating_point() and not in_float32
            state[name] = full.detach().to("cpu", dtype if other else full.dtype)

    for name, parameter in model.named_parameters():
        # Gathering is collective, so all ranks take part.
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        take(name, whole, id(parameter) in kept)
    # The class computes all other buffers, which no checkpoint holds.
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            take(name, buffer, in_float32=False)
    return state


def kept_in_float32(model: Any, dtype: torch.dtype) -> set[int]:
    """Ids of the parameters that transformers keeps in float32 when it loads a model in a dtype, such as routers.

    The lists of names are private to transformers, so a test compares with a real load.
    """
    names: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype not in (torch.bfloat16, torch.float16) or not names:
        return set()
    pattern = re.compile(r"(^|\.)(" + "|".join(map(re.escape, sorted(names))) + r")($|\.)")
    return {id(parameter) for name, parameter in model.named_parameters() if pattern.search(name)}
