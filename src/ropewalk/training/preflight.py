"""Everything that can be refused before any work starts is refused here, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ropewalk.attention import check_engine
from ropewalk.data import PackingSettings, load_tokenizer, special_ids
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.settings import RowPolicies
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.store import model_digest
from ropewalk.io.settings import explain
from ropewalk.models.config import ModelConfig
from ropewalk.models.load import attention_spec, choose_device, left_out, read_config, with_rope
from ropewalk.models.routing import records_routing
from ropewalk.parallel import MeshShape, World, require_devices
from ropewalk.planning.sizing.mesh_choice import check_mesh, choose_mesh
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100
from ropewalk.rope import LongRope, RopeMethod
from ropewalk.rope.target import recommended_base
from ropewalk.search import Factors, read_factors
from ropewalk.training.measurement import prompt_suites
from ropewalk.training.metrics import require_trackers
from ropewalk.training.recipe.recipe import Parallel, Recipe, Stage
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.stage_rope import stage_ropes
from ropewalk.training.stage_rope.base import bounds_of, takes_recommended_base
from ropewalk.training.stage_rope.other_layers import described, ropes_of_other_layers


def resolve(recipe: Recipe, world: World | None = None, mesh: MeshShape | None = None) -> ResolvedRecipe:
    """Check a recipe against the checkpoint, the machine, and the processes that there are.

    Args:
        recipe: what to do.
        world: this process among those of the run; alone if None.
        mesh: what rank 0 has decided on; chosen here if None.

    Raises:
        RopewalkError: for the first thing that would fail later, with what would work instead.
    """
    world = world or World()
    model = resolve_model(recipe.model)
    stated = read_config(model, recipe.trust_remote_code)
    config = _without_limits(recipe, stated)
    keeps_rope = all(stage.rope.limiting.method == "default" for stage in recipe.stages)
    refused = config.training_refusals(recipe.stages[-1].context, keeps_rope)
    if refused:
        raise EngineError(f"the model {refused[0]}")
    # What a limit was there for is not what the model was trained at.
    trained = stated.trained_length
    require_trackers(recipe.trackers)
    current = config.full_attention_rope
    tables = tuple(_table(stage) for stage in recipe.stages)
    bounds = bounds_of(stage_ropes(recipe, tables), (current, trained))
    others = ropes_of_other_layers(recipe, config, trained)
    possible = [method for each in bounds for method in (each.low, each.high)]
    for stage, each, other in zip(recipe.stages, bounds, others, strict=True):
        for method in (each.low, each.high):
            with_rope(config, method, stage.context, other)
    _check_short_context(recipe)
    aux_losses = tuple(_router_aux_loss(number, stage, config) for number, stage in enumerate(recipe.stages))
    last = bounds[-1].low
    device, precision = _device_and_precision(recipe, world)
    compute = torch.float32 if precision == "float32" else torch.bfloat16
    check_engine(recipe.engine, attention_spec(config, device, compute))
    mesh = mesh or mesh_of(recipe, config, world, device, precision)
    if mesh.world_size > 1:
        refuse_on_mesh(mesh, config, recipe.exact_rope, [current, *possible])
    vocabulary = config.source.get_text_config().vocab_size
    tokenizer = _tokenizer(recipe, model, vocabulary, mesh.world_size > 1)
    special = special_ids(tokenizer)
    # Rows that were packed before have decided.
    packing = () if recipe.data.rows else tuple(_packing(recipe, stage) for stage in recipe.stages)
    for settings in packing:
        settings.bos_policy(special)
    engine = check_engine(recipe.engine, attention_spec(config, device, compute, ring=mesh.ring > 1))
    dtype = getattr(torch, config.dtype or "float32")
    return ResolvedRecipe(
        recipe,
        model,
        trained,
        dtype,
        current,
        others,
        tuple(each.method for each in bounds),
        tuple(each.origin for each in bounds),
        packing,
        tokenizer,
        device,
        precision,
        engine,
        mesh,
        tables,
        last.original_max_position_embeddings if isinstance(last, LongRope) else None,
        aux_losses,
        left_out(config),
    )


def _router_aux_loss(number: int, stage: Stage, config: ModelConfig) -> float:
    """Factor of the load-balancing loss of a stage.

    Raises:
        RopewalkError: if there is nothing to balance.
        EngineError: if nobody knows where the model's routers are.
    """
    asked = stage.router_aux_loss
    if asked not in (0, "config") and not config.num_experts:
        raise RopewalkError(
            f"stages.{number}.router_aux_loss is {asked:g}, and the model has no mixture of experts; leave it out"
        )
    factor = config.router_aux_loss if asked == "config" else asked
    if factor and config.num_experts and not records_routing(config):
        raise EngineError(
            f"stages.{number}.router_aux_loss would be {factor:g}, and transformers does not say where the router "
            f"logits of {config.model_type} are; set it to 0"
        )
    return factor if config.num_experts else 0.0


def _device_and_precision(recipe: Recipe, world: World) -> tuple[torch.device, str]:
    device = choose_device(recipe.device)
    if world.size > 1 and device.type == "cuda":
        device = torch.device("cuda", world.local_rank)
    if recipe.precision != "auto":
        return device, recipe.precision
    if device.type != "cuda":
        return device, "float32"
    # Sharded parameters are float32 masters already, and gathered in bfloat16 they take half the memory.
    return device, "bfloat16-autocast" if world.size == 1 else "bfloat16"


def _tokenizer(recipe: Recipe, model: str, vocabulary: int, sharded: bool) -> Any:
    """The model's tokenizer, which takes texts of the target length and prompts of the recipe's lengths."""
    tokenizer = load_tokenizer(model)
    for prompts in prompt_suites(recipe, tokenizer, sharded):
        for length in recipe.evaluation.lengths or ():
            prompts.check(length)
    # A tokenizer that truncates at the old length would take the new context away again.
    tokenizer.model_max_length = max(tokenizer.model_max_length, recipe.stages[-1].context)
    if len(tokenizer) > vocabulary:
        raise RopewalkError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {vocabulary}: not a pair"
        )
    return tokenizer


def _without_limits(recipe: Recipe, config: ModelConfig) -> ModelConfig:
    """The config without what the recipe lifts.

    Raises:
        EngineError: if a limit stays that no engine runs.
        RopewalkError: if there is nothing of the kind to lift.
    """
    if "dual_chunk_attention" in config.limits and "dual_chunk_attention" not in recipe.lift:
        raise EngineError(
            "the model states dual chunk attention, which neither transformers nor ropewalk runs and which servers "
            "would go on using with the new RoPE; write lift: [dual_chunk_attention], which drops it from the config"
        )
    for number, limit in enumerate(recipe.lift):
        if limit not in config.limits:
            there = f"it has {', '.join(config.limits)}" if config.limits else "leave lift out"
            raise RopewalkError(f"lift.{number} is {limit}, and the model has nothing of the kind: {there}")
    return config.lifted(recipe.lift)


def _table(stage: Stage) -> Factors | None:
    return (
        None
        if stage.rope.limiting.factors is None
        else read_factors(Path(stage.rope.limiting.factors).expanduser())
    )


def _check_short_context(recipe: Recipe) -> None:
    if recipe.short_context is not None and not recipe.exact_rope:
        raise RopewalkError(
            "short_context: a search measures through ropewalk's rotary module; set exact_rope: true"
        )


def _packing(recipe: Recipe, stage: Stage) -> PackingSettings:
    # Under the pattern anchor the row's BOS is the anchor, whatever the other stages do.
    bos = "auto" if stage.pattern == "anchor" else recipe.data.bos
    policies = {name: getattr(recipe.data, name) for name in RowPolicies.model_fields} | {"bos": bos}
    try:
        return PackingSettings(
            context=stage.context, pattern=stage.pattern, positions=stage.positions, **policies
        )
    except ValidationError as error:
        raise RopewalkError(explain(error, PackingSettings)) from error


def mesh_of(
    recipe: Recipe, config: ModelConfig, world: World, device: torch.device, precision: str
) -> MeshShape:
    """The mesh that a recipe asks for, or what ``auto`` stands for; every stage fits it.

    Args:
        recipe: what to do.
        config: of the model.
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


def _first_for_all(meshes: list[MeshShape], recipe: Recipe, config: ModelConfig, world: World) -> MeshShape:
    for mesh in meshes:
        try:
            for stage in recipe.stages:
                _check(mesh, stage, config, world)
        except RopewalkError as error:
            refusal = error
        else:
            return mesh
    raise RopewalkError(f"no mesh that parallel auto takes for one stage suits all of them: {refusal}")


def _check(mesh: MeshShape, stage: Stage, config: ModelConfig, world: World) -> None:
    assert config.num_heads is not None
    heads, rows = config.num_heads, (stage.rows_per_step, stage.rows_per_batch)
    check_mesh(mesh, world.size, heads, stage.context, *rows)


def _chosen(
    stage: Stage, config: ModelConfig, world: World, device: torch.device, precision: str
) -> MeshShape:
    shape = ModelShape.from_config(config)
    memory = device_bytes(device) // (world.local_size if device.type == "cpu" else 1)
    if precision == "bfloat16-autocast" and not stage.gradient_checkpointing:
        # Autograd saves each weight as autocast has rounded it, until the backward.
        memory = max(0, memory - 2 * shape.layer_parameters)
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


def refuse_on_mesh(
    mesh: MeshShape, config: ModelConfig, exact_rope: bool, methods: Iterable[RopeMethod]
) -> None:
    """Raise for what one process can train and a mesh cannot.

    Args:
        mesh: of more than one process.
        config: of the model.
        exact_rope: whether the rotary module is ours.
        methods: of the checkpoint and all stages.

    Raises:
        RopewalkError: for dropout: every process would draw the same mask for other tokens.
        EngineError: for recurrent layers whose rows are cut over ranks, and for transformers' own RoPE that takes the
            length of a shard for the row's.
    """
    if config.recurrent_layers and mesh.sequence_degree > 1:
        raise EngineError(
            f"the model has recurrent layers ({len(config.recurrent_layers)} of {len(config.layers)}), whose state "
            f"does not travel between ranks, and parallel ({mesh}) cuts rows over {mesh.sequence_degree}; use "
            "parallel.ring 1 and parallel.sequence 1, with parallel.replicate and parallel.shard as you like"
        )
    for key, value in config.values.items():
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


def announcement(resolved: ResolvedRecipe) -> list[str]:
    """The lines that a run begins with: model, engine, processes, stages, and what to know of factor tables."""
    recipe = resolved.recipe
    told = " (auto)" if recipe.engine == "auto" else ""
    lines = [
        f"model {resolved.model}, trained for {resolved.trained_length} tokens",
        f"attention engine {resolved.engine}{told} on {resolved.device}, {resolved.precision}",
    ]
    if resolved.left_out is not None:
        lines.append(resolved.left_out)
    if resolved.mesh.world_size > 1:
        told = " (auto)" if recipe.parallel == "auto" else ""
        lines.append(f"{resolved.mesh.world_size} processes: {resolved.mesh}{told}")
    known = zip(recipe.stages, resolved.methods, resolved.origins, strict=True)
    for number, (stage, method, origin) in enumerate(known, start=1):
        base = "a base yet to be chosen" if method is None else f"rope_theta {method.rope_theta:,.0f}"
        if stage.rope.limiting.search is not None:
            base = "factors yet to be searched for"
        training = f"{stage.steps} steps of {stage.rows_per_step} rows" if stage.steps else "no training"
        lines.append(
            f"stage {number}: {stage.context} tokens, {stage.rope.limiting.method} with {base}, "
            f"pattern {stage.pattern}, positions {stage.positions}, {training}"
        )
        if resolved.router_aux_losses[number - 1]:
            factor = resolved.router_aux_losses[number - 1]
            lines.append(f"stage {number}: load-balancing loss of experts with factor {factor:g}")
        for kind, other in resolved.other_ropes[number - 1].items():
            lines.append(
                f"stage {number}: this RoPE is for layers of full attention; {kind}: {described(other)}"
            )
        if origin is not None and takes_recommended_base(stage.rope.limiting):
            reason = recommended_base(*origin, stage.context).reason
            lines.append(f"stage {number}: why this base: {reason}")
    return [*lines, *_remarks_on_tables(resolved)]


def _remarks_on_tables(resolved: ResolvedRecipe) -> list[str]:
    """What to know of the factor tables that a recipe names, before they are trained with."""
    lines = []
    named = [(number, table) for number, table in enumerate(resolved.tables, start=1) if table is not None]
    own = model_digest(resolved.model) if any(table.model.digest for _, table in named) else None
    for number, table in named:
        if own is not None and table.model.digest not in (None, own):
            lines.append(
                f"stage {number}: the factors in {resolved.recipe.stages[number - 1].rope.limiting.factors} "
                f"were found on another checkpoint ({table.model.name}) "
                "with the same frequencies; they may not be the best for this one"
            )
    return lines
