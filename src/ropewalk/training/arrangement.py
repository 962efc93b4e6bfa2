"""How a run's processes are arranged: the mesh that a recipe asks for or that suits it, and what no mesh can train."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.parallel import MeshShape, World, require_devices
from ropewalk.planning.sizing.mesh_choice import check_mesh, choose_mesh
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100
from ropewalk.rope import RopeMethod
from ropewalk.training.recipe.recipe import Parallel, Recipe, Stage


def mesh_of(recipe: Recipe, config: Any, world: World, device: torch.device, precision: str) -> MeshShape:
    """The mesh that a recipe asks for, or what ``auto`` stands for; every stage fits it.

    Args:
        recipe: what to do.
        config: the decoder's transformers config.
        world: the processes that there are.
        device: of this one.
        precision: resolved.

    Raises:
        RopewalkError: if the mesh does not suit processes, heads or rows; the message names what would.
    """
    if world.size == 1:
        asked = MeshShape() if recipe.parallel == "auto" else _asked(recipe.parallel)
        if asked.world_size > 1:
            raise RopewalkError(
                f"parallel asks for {asked.world_size} processes ({asked}) and this is one; start it with torchrun "
                f"--nproc-per-node {asked.world_size} -m ropewalk"
            )
        return asked
    require_devices(world, device)
    if recipe.parallel != "auto":
        mesh = _asked(recipe.parallel)
        for stage in recipe.stages:
            _check(mesh, stage, config, world)
        return mesh
    choices = [_chosen(stage, config, world, device, precision) for stage in recipe.stages]
    # A stage fits a mesh that cuts rows finer than it needs, if its rows divide.
    return _first_for_all(sorted(choices, key=lambda mesh: -mesh.sequence_degree), recipe, config, world)


def _asked(parallel: Any) -> MeshShape:
    assert isinstance(parallel, Parallel)
    return MeshShape(**parallel.model_dump())


def _first_for_all(meshes: list[MeshShape], recipe: Recipe, config: Any, world: World) -> MeshShape:
    for mesh in meshes:
        try:
            for stage in recipe.stages:
                _check(mesh, stage, config, world)
        except RopewalkError as error:
            refusal = error
        else:
            return mesh
    raise RopewalkError(f"no mesh that parallel auto takes for one stage suits all of them: {refusal}")


def _check(mesh: MeshShape, stage: Stage, config: Any, world: World) -> None:
    heads, rows = config.num_attention_heads, (stage.rows_per_step, stage.rows_per_batch)
    check_mesh(mesh, world.size, heads, stage.context, *rows)


def _chosen(stage: Stage, config: Any, world: World, device: torch.device, precision: str) -> MeshShape:
    shape = ModelShape.from_config(config.to_dict())
    memory = device_bytes(device) // (world.local_size if device.type == "cpu" else 1)
    if precision == "bfloat16-autocast" and not stage.gradient_checkpointing:
        # Autograd saves each weight as autocast has rounded it, until the backward.
        memory = max(0, memory - 2 * shape.layers * shape.layer_parameters)
    run = ShardedRun(
        shape,
        MeshShape(),
        stage.context,
        stage.rows_per_batch,
        checkpointing=stage.gradient_checkpointing,
        offload=stage.offload_activations,
        # Under autocast parameters are gathered, and hidden states handed on, in float32.
        dtype="bfloat16" if precision == "bfloat16" else "float32",
    )
    cluster = replace(H100, ranks_per_node=world.local_size, bytes_per_rank=memory)
    return choose_mesh(run, stage.rows_per_step, world.size, cluster)


def device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_on_mesh(mesh: MeshShape, config: Any, exact_rope: bool, methods: Iterable[RopeMethod]) -> None:
    """Raise for what one process can train and a mesh cannot.

    Args:
        mesh: of more than one process.
        config: the decoder's transformers config.
        exact_rope: whether the rotary module is ours.
        methods: of the checkpoint and all stages.

    Raises:
        RopewalkError: for dropout: every process would draw the same mask for other tokens.
        EngineError: for transformers' own RoPE that takes the length of a shard for the row's.
    """
    for key, value in config.to_dict().items():
        active = isinstance(value, float) and value > 0 and key != "classifier_dropout"
        if active and ("dropout" in key or key.endswith("pdrop")):
            raise RopewalkError(
                f"the model has {key} {value}, and several processes would not drop what one does; set it to 0 in "
                "config.json, or train with one process"
            )
    dependent = sorted({method.name for method in methods if method.length_dependent})
    if dependent and mesh.sequence_degree > 1 and not exact_rope:
        raise EngineError(
            f"transformers' own RoPE {dependent[0]} would take the length of a shard for the row's; set exact_rope: "
            "true, or use parallel.sequence 1 and parallel.ring 1"
        )
