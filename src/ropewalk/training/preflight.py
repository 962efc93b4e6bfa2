"""Preflight checks: resolve a recipe and refuse, before any work starts, what would fail later."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from ropewalk.attention import EngineName, check_engine
from ropewalk.attention.api import KERNELS
from ropewalk.attention.choices import KEEP_FROM
from ropewalk.attention.engines.capabilities import Capability, capability_of
from ropewalk.attention.kept import Keeping
from ropewalk.data import PackingSettings, load_tokenizer, special_ids
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.rows.kinds import long_kind, short_kind
from ropewalk.data.settings import RowPolicies
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.fused import compiler_missing
from ropewalk.io.settings import explain
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.attention.indexed import refuse_parts_of_rows
from ropewalk.models.attention.kernels import missing_kernels
from ropewalk.models.attention.recurrent import refuse_older_transformers
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.compute.routing import DRAWS_EXPERTS, MOST_RECORDED_SINCE, records_routing
from ropewalk.models.config.auto_class import encoders_note
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.parameters import count_parameters
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope
from ropewalk.models.load import ModelSetup, attention_spec, choose_device, empty_model
from ropewalk.parallel import MeshShape, World, require_devices
from ropewalk.planning.sizing.mesh_check import check_mesh
from ropewalk.planning.sizing.time import H100
from ropewalk.rope import LongRope, RopeMethod
from ropewalk.rope.target import recommended_base
from ropewalk.search import Factors, read_factors
from ropewalk.training.measurement import prompt_suites
from ropewalk.training.memory_need import USABLE, Bounds, bounds, keeping_all, may_keep, played_need
from ropewalk.training.mesh_choice import DoesNotFit, MeshChoice
from ropewalk.training.metrics import require_trackers
from ropewalk.training.recipe.recipe import Parallel, Precision, Recipe, Stage
from ropewalk.training.recipe.stage import describe_own_settings
from ropewalk.training.resolved import ResolvedRecipe, ResolvedStage, StagePacking
from ropewalk.training.simulation.rank_costs import in_own_process
from ropewalk.training.stage_engine import measures_engine
from ropewalk.training.stage_rope.base import takes_recommended_base
from ropewalk.training.stage_rope.decide import bounds_of
from ropewalk.training.stage_rope.other_layers import described, ropes_of_other_layers
from ropewalk.versions import older_transformers

Meshes = tuple[MeshShape, tuple[MeshShape, ...]]
"""The mesh of a run before and after training, and that of each stage."""


@dataclass(frozen=True)
class Machine:
    """Hardware that a run is planned for, instead of this machine's.

    Attributes:
        device: device of a rank, which need not exist here.
        memory: bytes of memory of a rank.
        capability: compute capability of the GPU; None for that of this machine.
        elsewhere: whether it is another machine, on which everything that helps a run is taken to be installed.
    """

    device: torch.device
    memory: int
    capability: Capability | None = None
    elsewhere: bool = True


def resolve(
    recipe: Recipe,
    world: World | None = None,
    meshes: Meshes | None = None,
    training: range | None = None,
    machine: Machine | None = None,
    with_tokenizer: bool | None = None,
) -> ResolvedRecipe:
    """Check a recipe against the checkpoint, the machine and the processes, and resolve every ``auto``.

    Args:
        recipe: recipe to resolve.
        world: processes of the run; this one alone if None.
        meshes: meshes that rank 0 has chosen, which also decides what layers keep of their attention; chosen here if
            None.
        training: indices of the stages that these processes train; all if None. The others need not suit them.
        machine: hardware to resolve the recipe for; None for this machine.
        with_tokenizer: whether to load the tokenizer and check that packing and prompts can use it. Default: only for
            this machine. The model's config is read in any case.

    Raises:
        RopewalkError: for the first problem that would make the run fail, with an alternative that works.
    """
    world = world or World()
    model = resolve_model(recipe.model)
    stated = read_config(model, recipe.trust_remote_code)
    config = _without_limits(recipe, stated)
    keeps_rope = all(stage.rope.limiting.method == "default" for stage in recipe.stages)
    refused = config.training_refusals(recipe.stages[-1].context, keeps_rope)
    if refused:
        raise EngineError(f"the model {refused[0]}")
    refuse_older_transformers(config)
    # The trained length comes from the config as stated: lifting a limit does not change what the model was trained on.
    trained = stated.trained_length
    if machine is None:
        require_trackers(recipe.trackers)
    current = config.full_attention_rope
    tables = tuple(_table(stage) for stage in recipe.stages)
    bounds = bounds_of(recipe, (current, trained), tables)
    others = ropes_of_other_layers(recipe, config, trained)
    possible = [method for each in bounds for method in (each.low, each.high)]
    # The configs are discarded: making them raises now for a RoPE that the model could not have in the run.
    for stage, each, other in zip(recipe.stages, bounds, others, strict=True):
        for method in (each.low, each.high):
            with_rope(config, method, stage.context, other)
    _check_short_context(recipe)
    aux_losses = tuple(_router_aux_loss(number, stage, config) for number, stage in enumerate(recipe.stages))
    last = bounds[-1].low
    device = _device(recipe, world) if machine is None else machine.device
    capability = None if machine is None else machine.capability
    precision = _precision(recipe.precision, recipe, device, world)
    decided = [recipe.stage(number) for number in range(len(recipe.stages))]
    in_stages = [_precision(each.precision, recipe, device, world) for each in decided]
    precisions = list(dict.fromkeys([precision, *in_stages]))
    # An engine that cannot run the model at all is refused first; whether it suits the ring is checked below, once the
    # mesh is known.
    for computed in precisions:
        _engine(recipe, config, device, computed, capability=capability)
    adapter = _adapter(recipe, model, world, device, precisions)
    trained_parameters = None if adapter is None else adapter.trained
    places = _Places(config, world, device, trained_parameters, machine)
    numbers, given = range(len(decided)) if training is None else training, meshes is not None
    if meshes is None:
        meshes = meshes_of(recipe, places, in_stages, numbers)
        if machine is None and device.type == "cuda":
            _refuse_small_host(recipe, places, in_stages, meshes[1], numbers)
    mesh, in_stage = meshes
    for computed, arranged in dict.fromkeys([(precision, mesh), *zip(in_stages, in_stage, strict=True)]):
        _refuse_precision(config, computed, arranged)
        if arranged.world_size > 1:
            refuse_on_mesh(arranged, config, recipe.exact_rope, [current, *possible])
    tokenizer = None
    short_lengths = tuple(
        _short_length(number, recipe, each.low, config, other)
        for number, (each, other) in enumerate(zip(bounds, others, strict=True))
    )
    packing: tuple[StagePacking, ...] = ()
    if machine is None if with_tokenizer is None else with_tokenizer:
        vocabulary = config.source.get_text_config().vocab_size
        tokenizer = _tokenizer(recipe, model, vocabulary, mesh.world_size > 1)
        # Packed rows already contain the decisions that packing settings make.
        if not recipe.data.rows:
            packing = tuple(map(partial(_packing, recipe), recipe.stages, short_lengths))
        for settings in (each for both in packing for each in both if each is not None):
            settings.bos_policy(special_ids(tokenizer, settings))
    stages = [
        ResolvedStage(
            settings,
            own,
            _engine(recipe, config, device, own, arranged.ring > 1, settings.stage, capability),
            arranged,
            _compiled(settings.stage, device, machine is not None),
        )
        for settings, own, arranged in zip(decided, in_stages, in_stage, strict=True)
    ]
    for number, there in enumerate(stages):
        if there.settings.stage.keep_attention is True and there.engine not in KERNELS:
            raise EngineError(
                f"stages.{number}.keep_attention: true needs engine {' or '.join(KERNELS)}, but the stage runs "
                f"{there.engine}; set keep_attention to auto"
            )
    stages = [replace(each, keeping=_keeping(each)) for each in stages]
    resolved = ResolvedRecipe(
        recipe=recipe,
        model=model,
        trained_length=trained,
        dtype=getattr(torch, config.dtype or "float32"),
        rope=current,
        other_ropes=others,
        methods=tuple(each.method for each in bounds),
        origins=tuple(each.origin for each in bounds),
        packing=packing,
        short_lengths=short_lengths,
        tokenizer=tokenizer,
        device=device,
        precision=precision,
        engine=_engine(recipe, config, device, precision, mesh.ring > 1, capability=capability),
        stages=tuple(stages),
        mesh=mesh,
        tables=tables,
        original_length=last.original_max_position_embeddings if isinstance(last, LongRope) else None,
        router_aux_losses=aux_losses,
        encoders=encoders_note(config.source),
        indexer_note=config.indexer_note,
        adapter=adapter,
        capability=capability,
        missing=_missing(config, device, machine),
    )
    return resolved if given else _keeping_where_it_fits(resolved, places, numbers)


def _missing(config: ModelConfig, device: torch.device, machine: Machine | None) -> tuple[str, ...]:
    """Packages of kernels for recurrent layers that a GPU's machine lacks."""
    here = device.type == "cuda" and (machine is None or not machine.elsewhere)
    return missing_kernels(config) if here else ()


def _compiled(stage: Stage, device: torch.device, planned: bool) -> bool:
    """Whether a stage compiles pieces of the model.

    Args:
        stage: the stage.
        device: device to train on.
        planned: whether it is that of another machine, on which torch is taken to compile.

    Raises:
        RopewalkError: if the stage asks for it where torch cannot compile.
    """
    if stage.compile is False or (stage.compile == "auto" and device.type != "cuda"):
        return False
    missing = "" if planned else compiler_missing(device.type)
    if missing and stage.compile is True:
        raise RopewalkError(
            f"compile: true needs {missing} to compile for {device.type}; install it, or set compile: false"
        )
    return not missing


def _adapter(
    recipe: Recipe, model: str, world: World, device: torch.device, precisions: Sequence[str]
) -> NewAdapter | None:
    """The adapter that the recipe requests; None if it requests none.

    Raises:
        RopewalkError: if the model has no such places for it, several processes would draw its dropout, or frozen
            weights cannot be quantized.
    """
    settings = recipe.adapter
    if settings is None:
        return None
    if settings.dropout and world.size > 1:
        raise RopewalkError(
            f"adapter.dropout is {settings.dropout:g}, but several processes would not draw the same random numbers as "
            "one process; set adapter.dropout to 0, or train with one process"
        )
    # A folder is named by its whole path, because the adapter's config says where its base is from anywhere.
    base = str(Path(model).resolve()) if Path(model).is_dir() else model
    if settings.quantize is not None:
        for precision in precisions:
            _refuse_quantization(f"adapter.quantize is {settings.quantize}", world, device, precision)
    # On the meta device, so that targets are resolved and counted without loading a weight.
    empty = empty_model(model, ModelSetup(trust_remote_code=recipe.trust_remote_code))
    return NewAdapter.on(settings, recipe.seed, base, empty)


def _refuse_quantization(asked: str, world: World, device: torch.device, precision: str) -> None:
    """Raise where bitsandbytes cannot keep the frozen weights in 4 bits."""
    if find_spec("bitsandbytes") is None:
        raise RopewalkError(
            f"{asked}, which needs the package bitsandbytes; pip install 'ropewalk[qlora]', or leave quantize out"
        )
    if world.size > 1:
        raise RopewalkError(
            f"{asked}, but quantized weights cannot be sharded over {world.size} processes; train with one process, or "
            "leave quantize out"
        )
    if device.type != "cuda":
        # bitsandbytes 0.50 packs weights for a CPU in evaluation, and their product then has no gradient.
        raise RopewalkError(
            f"{asked}, but bitsandbytes trains only on CUDA, and the device is {device}; leave quantize out"
        )
    if precision != "bfloat16":
        raise RopewalkError(f"{asked}, but precision is {precision}; set precision: bfloat16")


def _router_aux_loss(number: int, stage: Stage, config: ModelConfig) -> float:
    """Factor of the load-balancing loss of a stage.

    Raises:
        RopewalkError: if the model has no experts to balance.
        EngineError: if transformers does not record the model's router logits.
    """
    requested = stage.router_aux_loss
    if requested not in (0, "config") and not config.num_experts:
        raise RopewalkError(
            f"stages.{number}.router_aux_loss is {requested:g}, but the model has no mixture of experts; omit "
            "router_aux_loss"
        )
    factor = config.router_aux_loss if requested == "config" else requested
    if factor and config.num_experts and not records_routing(config):
        later = ""
        if (installed := older_transformers(MOST_RECORDED_SINCE)) is not None:
            later = (
                f", or try transformers {MOST_RECORDED_SINCE} or later, which records router logits of more models "
                f"than the installed {installed}"
            )
        raise EngineError(
            f"stages.{number} trains with router_aux_loss {factor:g}, but transformers does not record the router "
            f"logits of {config.model_type}, which this loss needs; set stages.{number}.router_aux_loss to 0{later}"
        )
    return factor if config.num_experts else 0.0


def _engine(
    recipe: Recipe,
    config: ModelConfig,
    device: torch.device,
    precision: str,
    ring: bool = False,
    stage: Stage | None = None,
    capability: Capability | None = None,
) -> EngineName:
    # Under autocast, too, attention computes in bfloat16.
    compute = torch.float32 if precision == "float32" else torch.bfloat16
    # Short rows contain several documents, whatever the pattern of the others.
    one_run = stage is not None and stage.pattern == "full" and stage.short_rows is None
    full = stage.context if stage is not None and one_run else None
    spec = attention_spec(config, device, compute, ring=ring, full=full, capability=capability)
    return check_engine(recipe.engine, spec)


def _device(recipe: Recipe, world: World) -> torch.device:
    device = choose_device(recipe.device)
    if world.size > 1 and device.type == "cuda":
        return torch.device("cuda", world.local_rank)
    return device


def _precision(asked: Precision, recipe: Recipe, device: torch.device, world: World) -> str:
    if asked != "auto":
        return asked
    if device.type != "cuda":
        return "float32"
    # Shards are float32 master weights already, and gathering them in bfloat16 halves memory and traffic. The frozen
    # weights below an adapter need no float32 copy.
    return "bfloat16-autocast" if world.size == 1 and recipe.adapter is None else "bfloat16"


def _refuse_precision(config: ModelConfig, precision: str, mesh: MeshShape) -> None:
    """Raise for families whose code mixes dtypes under a precision; found by training a tiny model of every family."""
    if config.model_type == "dbrx" and precision == "bfloat16-autocast":
        raise EngineError(
            "precision bfloat16-autocast does not suit dbrx, whose experts add bfloat16 outputs to float32 states; set "
            "precision to either bfloat16 or float32"
        )
    if config.model_type == "minimax" and precision == "bfloat16" and mesh.world_size > 1:
        raise EngineError(
            "precision bfloat16 on several processes does not suit minimax, whose decay factors stay in float32; set "
            "precision to either bfloat16-autocast or float32"
        )


def _tokenizer(recipe: Recipe, model: str, vocabulary: int, sharded: bool) -> Any:
    """Load the model's tokenizer, and check that prompts of the recipe's lengths can be generated with it."""
    tokenizer = load_tokenizer(model, vocabulary)
    evaluations = [recipe.evaluation]
    if recipe.evaluation.every is not None:
        evaluations.append(recipe.evaluation.in_training())
    for evaluation in evaluations:
        for prompts in prompt_suites(evaluation, recipe.seed, tokenizer, sharded):
            for length in evaluation.lengths or ():
                prompts.check(length)
    # A tokenizer saved with the old limit would truncate texts to the old context.
    tokenizer.model_max_length = max(tokenizer.model_max_length, recipe.stages[-1].context)
    return tokenizer


def _without_limits(recipe: Recipe, config: ModelConfig) -> ModelConfig:
    """The config without the limits that the recipe lifts.

    Raises:
        EngineError: if a remaining limit is supported by no engine.
        RopewalkError: if the recipe lifts a limit that the model does not have.
    """
    if "dual_chunk_attention" in config.limits and "dual_chunk_attention" not in recipe.lift:
        raise EngineError(
            "the model's config sets dual chunk attention, which transformers and ropewalk do not support, but "
            "servers would apply to the extended model; set lift: [dual_chunk_attention] to remove dual chunk "
            "attention from the config"
        )
    for number, limit in enumerate(recipe.lift):
        if limit not in config.limits:
            instead = f"lift can remove {', '.join(config.limits)}" if config.limits else "leave lift out"
            raise RopewalkError(
                f"lift.{number} is {limit!r}, but the model has no such limit to remove; {instead}"
            )
    return config.lifted(recipe.lift)


def _table(stage: Stage) -> Factors | None:
    return (
        None
        if stage.rope.limiting.factors is None
        else read_factors(Path(stage.rope.limiting.factors).expanduser())
    )


def _short_length(
    number: int, recipe: Recipe, method: RopeMethod, config: ModelConfig, others: Mapping[str, RopeMethod]
) -> int | None:
    """Most tokens of a document in the short rows of a stage; None for a stage without.

    Raises:
        RopewalkError: if short rows cannot have the RoPE of the checkpoint.
    """
    if recipe.stages[number].short_rows is None:
        return None
    key = f"stages.{number}.short_rows"
    if not recipe.exact_rope:
        raise RopewalkError(
            f"{key} needs ropewalk's rotary module, which chooses the RoPE of each row; set exact_rope: true"
        )
    changed = [kind for kind, other in others.items() if other != config.other_ropes.get(kind)]
    if changed:
        raise RopewalkError(
            f"{key} trains short rows with the RoPE of the checkpoint, but the run changes that of layers of type "
            f"{changed[0]} for rows of every length; leave {changed[0]} out of the stages' rope"
        )
    assert isinstance(method, LongRope)
    length, context = method.original_max_position_embeddings, recipe.stages[number].context
    if context <= length:
        raise RopewalkError(
            f"{key} needs a context of more than the original length of {length} tokens, got {context}; raise "
            f"stages.{number}.context, or leave short_rows out"
        )
    return length


def _check_short_context(recipe: Recipe) -> None:
    if recipe.short_context is not None and recipe.stages[-1].short_rows is not None:
        raise RopewalkError(
            "short_context would search other short factors than the short rows of the last stage train with; leave "
            "out short_context or short_rows"
        )
    if recipe.short_context is not None and not recipe.exact_rope:
        raise RopewalkError(
            "short_context needs ropewalk's rotary module, which exact_rope: false disables; set exact_rope: true"
        )


def _packing(recipe: Recipe, stage: Stage, short_length: int | None) -> StagePacking:
    # With the pattern anchor, the BOS token at the start of the row is the anchor, so the setting does not apply.
    bos = "auto" if stage.pattern == "anchor" else recipe.data.bos
    # Nor has any other pattern an anchor; the recipe's own check refuses one that no stage has.
    anchor = recipe.data.anchor_token if stage.pattern == "anchor" else None
    policies = {name: getattr(recipe.data, name) for name in RowPolicies.model_fields}
    policies |= {"bos": bos, "anchor_token": anchor}
    try:
        rows = PackingSettings(
            context=stage.context, pattern=stage.pattern, positions=stage.positions, **policies
        )
        if short_length is None:
            return StagePacking(rows)
        return StagePacking(long_kind(rows, short_length), short_kind(rows, short_length, recipe.data.bos))
    except ValidationError as error:
        raise RopewalkError(explain(error, PackingSettings)) from error


@dataclass(frozen=True)
class _Places:
    """Model, processes and device that a mesh must suit in every stage.

    Attributes:
        config: config of the model.
        world: processes of the run.
        device: device of this process.
        trained: number of parameters that an adapter trains; None if all are trained.
        machine: hardware to plan for; None for this machine.
    """

    config: ModelConfig
    world: World
    device: torch.device
    trained: int | None
    machine: Machine | None = None

    @cached_property
    def parameters(self) -> int | None:
        """Number of the model's parameters; None if it is not known."""
        return count_parameters(self.config)

    @property
    def memory(self) -> int:
        """Bytes of memory of a rank."""
        if self.machine is not None:
            return self.machine.memory
        # CPU processes share the machine's memory; on CUDA each has a device.
        return device_bytes(self.device) // (self.world.local_size if self.device.type == "cpu" else 1)


def meshes_of(recipe: Recipe, places: _Places, precisions: Sequence[str], training: range) -> Meshes:
    """The mesh of the run, and that of each stage: as the recipe requests, or as ``auto`` chooses.

    Args:
        recipe: the recipe.
        places: what the meshes must suit.
        precisions: resolved precision of each stage.
        training: indices of the stages that these processes train. Others have the mesh of the run.

    Raises:
        RopewalkError: if a mesh does not match the processes, heads or rows; the message names one that does.
    """
    own = {
        number: _mesh(requested, f"stages.{number}.parallel", recipe, places, {number: precisions[number]})
        for number in training
        if (requested := recipe.stages[number].parallel) is not None
    }
    shared = {number: precisions[number] for number in training if number not in own}
    last = len(recipe.stages) - 1
    # If every stage that trains has a mesh of its own, auto evaluates on that of the last one.
    if not shared and last in own and recipe.parallel == "auto":
        mesh = own[last]
    else:
        # If no stage is left to share it, the run's mesh evaluates at the context of the last one.
        mesh = _mesh(recipe.parallel, "parallel", recipe, places, shared or {last: precisions[last]})
    return mesh, tuple(own.get(number, mesh) for number in range(len(recipe.stages)))


def _mesh(
    asked: Literal["auto"] | Parallel,
    key: str,
    recipe: Recipe,
    places: _Places,
    precisions: Mapping[int, str],
) -> MeshShape:
    """The mesh that ``key`` requests, checked for all stages whose precisions are given."""
    world, stages = places.world, {number: recipe.stages[number] for number in precisions}
    if world.size == 1:
        mesh = MeshShape() if asked == "auto" else _asked(asked)
        if mesh.world_size > 1:
            raise RopewalkError(
                f"{key} {mesh.setting} needs {mesh.world_size} processes, but only one was started; start the command "
                f"with torchrun --nproc-per-node {mesh.world_size} -m ropewalk"
            )
        return mesh
    if places.machine is None:
        require_devices(world, places.device)
    if asked != "auto":
        mesh = _asked(asked)
        for stage in stages.values():
            try:
                _check(mesh, stage, places)
            except RopewalkError as error:
                # The message begins with a key of the run; before it stands the stage whose own key it is.
                raise RopewalkError(f"{key.removesuffix('parallel')}{error}") from error
        return mesh
    choices = [_chosen(number, recipe, places, precisions[number]) for number in stages]
    # Try the finest split of rows first: a stage also runs with a finer split than it needs, if its rows divide.
    for mesh in sorted(choices, key=lambda mesh: -mesh.sequence_degree):
        try:
            for stage in stages.values():
                _check(mesh, stage, places)
        except RopewalkError as error:
            refusal = error
        else:
            return mesh
    raise RopewalkError(
        f"{key}: auto found no mesh that suits all stages ({refusal}); set {key}.replicate, shard, ring and "
        "sequence"
    )


def _asked(parallel: Parallel) -> MeshShape:
    return MeshShape(**parallel.model_dump())


def _check(mesh: MeshShape, stage: Stage, places: _Places) -> None:
    heads, world = places.config.common_heads, places.world
    assert heads is not None
    rows = (stage.rows_per_step, stage.rows_per_batch)
    check_mesh(mesh, world.size, heads, stage.context, *rows)


def _chosen(number: int, recipe: Recipe, places: _Places, precision: str) -> MeshShape:
    """The mesh that ``auto`` chooses for a stage."""
    here = Machine(places.device, places.memory, capability_of(places.device), elsewhere=False)
    planned = places.machine or here

    def on_mesh(stage: Stage, mesh: MeshShape) -> ResolvedRecipe:
        stages = (*recipe.stages[:number], stage, *recipe.stages[number + 1 :])
        changed = recipe.model_copy(update={"stages": stages})
        world = World(0, mesh.world_size, 0, min(mesh.world_size, places.world.local_size))
        meshes = mesh, (mesh,) * len(recipe.stages)
        resolved = resolve(changed, world, meshes, range(number, number + 1), planned)
        compiled = _compiled(stage, places.device, places.machine is not None)
        return replace(resolved, stages=tuple(replace(each, compiled=compiled) for each in resolved.stages))

    choice = MeshChoice(
        places.config,
        places.parameters,
        recipe.stages[number],
        precision,
        places.trained,
        places.device.type == "cuda",
        # Only the memory is that of this device; auto compares the meshes with the speeds of H100s.
        replace(H100, ranks_per_node=places.world.local_size, bytes_per_rank=places.memory),
        on_mesh,
        number,
    )
    try:
        return choice.choose(places.world.size)
    except DoesNotFit as error:
        if places.machine is not None:
            # A plan shows what does not fit, and tries changes of its own.
            raise
        raise RopewalkError(f"{error}; {error.remedy()}") from error


def refuse_too_large(recipe: Recipe, machine: Machine, ranks: int, host: int) -> None:
    """Raise if no mesh of a machine's devices, or its CPU's memory, has room for the last stage as it is set.

    Args:
        recipe: the recipe.
        machine: the devices.
        ranks: their number.
        host: bytes of CPU memory.

    Raises:
        DoesNotFit: if none has; the message gives the mesh that comes closest.
        RopewalkError: if that cannot be said.
    """
    world, last = World(0, ranks, 0, ranks), len(recipe.stages) - 1
    config = _without_limits(recipe, read_config(resolve_model(recipe.model), recipe.trust_remote_code))
    places = _Places(config, world, machine.device, None, machine)
    stage, precision = (
        recipe.stages[last],
        _precision(recipe.stage(last).precision, recipe, machine.device, world),
    )
    mesh = _chosen(last, recipe, places, precision)
    if not (stage.offload_activations or stage.offload_optimizer):
        return
    resolved = resolve(recipe, world, (mesh, (mesh,) * len(recipe.stages)), range(last, last + 1), machine)
    resolved = _keeping_where_it_fits(resolved, places, (last,))
    needed = ranks * played_need(resolved, last).host
    if needed > USABLE * host:
        raise DoesNotFit(
            f"rows of {stage.context:,} tokens do not fit on {ranks} ranks with the stage's settings: they need "
            f"{needed / 1e9:,.1f} GB of CPU memory, of which {USABLE * host / 1e9:,.1f} GB are usable",
            lambda: "use a machine with more CPU memory",
        )


def _keeping(stage: ResolvedStage) -> Keeping | None:
    """What the checkpointed layers of a stage keep of their attention, unless ``auto`` finds room on the GPU for all.

    Then results go to CPU memory with the layers' inputs, if moving them is quicker than computing them again.
    """
    settings = stage.settings.stage
    asked = settings.keep_attention
    if asked is False or not settings.gradient_checkpointing or stage.engine not in KERNELS:
        return None
    if asked is True:
        return Keeping(0)
    return Keeping(KEEP_FROM) if settings.offload_activations else None


def _keeping_where_it_fits(
    resolved: ResolvedRecipe, places: _Places, training: Iterable[int]
) -> ResolvedRecipe:
    """The recipe with all results of attention kept on the GPU in the stages that ``auto`` finds room for them."""
    # One process for the dry runs of all stages, which is started by the first.
    with in_own_process():
        for number in training:
            here = resolved.stages[number]
            if here.settings.stage.steps and may_keep(resolved, number):
                kept = keeping_all(resolved, number)
                known = _bounds(here.settings.stage, here.mesh, here.precision, places)
                if _fits(kept, number, known, places):
                    resolved = kept
    return resolved


def _fits(resolved: ResolvedRecipe, number: int, known: Bounds, places: _Places) -> bool:
    """Whether a rank's memory has room for a stage; False where no dry run can say it."""
    if (decided := known.decides(places.memory)) is not None:
        return decided
    if places.config.indexed_layers:
        # Their dry run walks along the row, which takes minutes.
        return False
    capability = resolved.capability or capability_of(places.device)
    try:
        return played_need(replace(resolved, capability=capability), number).fits(places.memory)
    except EngineError:
        return False


def _bounds(stage: Stage, mesh: MeshShape, precision: str, places: _Places) -> Bounds:
    on_gpu = places.device.type == "cuda"
    return bounds(places.config, places.parameters, stage, mesh, precision, places.trained, on_gpu)


def least_bytes(resolved: ResolvedRecipe, mesh: MeshShape) -> Iterator[tuple[int, int]]:
    """Index of each stage that trains, and fewer bytes than it takes on a rank of this mesh, which need not suit it.

    Raises:
        RopewalkError: if the config cannot be read.
    """
    recipe, adapter = resolved.recipe, resolved.adapter
    if recipe.adapter is not None and recipe.adapter.quantize is not None:
        # The bounds count frozen weights in the compute dtype.
        return
    config = read_config(resolved.model, recipe.trust_remote_code)
    places = _Places(config, World(), resolved.device, None if adapter is None else adapter.trained)
    for number, stage in enumerate(resolved.stages):
        if stage.settings.stage.steps:
            yield number, _bounds(stage.settings.stage, mesh, stage.precision, places).least


def _refuse_small_host(
    recipe: Recipe, places: _Places, precisions: Sequence[str], meshes: Sequence[MeshShape], training: range
) -> None:
    """Raise if a stage would send more to the CPU's memory than this machine has."""
    ranks, present = places.world.local_size, device_bytes(torch.device("cpu"))
    for number in training:
        stage = recipe.stages[number]
        asked = [name for name in ("offload_activations", "offload_optimizer") if getattr(stage, name)]
        if not (asked and stage.steps):
            continue
        # Without kept attention and what pinned memory is rounded up by, so a run needs no less.
        needed = ranks * _bounds(stage, meshes[number], precisions[number], places).host
        if needed > present:
            raise RopewalkError(
                f"stages.{number} would keep {needed / 1e9:.3g} GB or more in the CPU memory of a machine, which has "
                f"{present / 1e9:.3g} GB; set {' or '.join(asked)} to false, or train on more machines"
            )


def device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device, or of this machine for a CPU, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_on_mesh(
    mesh: MeshShape, config: ModelConfig, exact_rope: bool, methods: Iterable[RopeMethod]
) -> None:
    """Raise for models that one process can train but a mesh cannot.

    Args:
        mesh: mesh of more than one process.
        config: config of the model.
        exact_rope: whether ropewalk's rotary module is used.
        methods: RoPE methods of the checkpoint and of all stages.

    Raises:
        RopewalkError: for dropout and other noise, because every process would draw the same numbers for different
            tokens.
        EngineError: for recurrent layers if rows are sharded and transformers is too old to pass on their state, and
            for transformers' own length-dependent RoPE, which would use the length of a shard instead of the row's.
    """
    refuse_older_transformers(config, on_ranks=mesh.sequence_degree > 1)
    if mesh.sequence_degree > 1:
        refuse_parts_of_rows(config)
    if config.model_type in DRAWS_EXPERTS:
        raise RopewalkError(
            f"the routers of {config.model_type} draw experts at random in training, but several processes would not "
            "draw the same random numbers as one process; train with one process"
        )
    # DBRX states the noise of its routers in ffn_config.
    parts = [config.values, *(each for each in config.values.values() if isinstance(each, Mapping))]
    for key, value in (item for part in parts for item in part.items()):
        # classifier_dropout belongs to the head of a classifier, which a language model does not have.
        active = isinstance(value, float) and value > 0 and key != "classifier_dropout"
        if active and ("dropout" in key or "jitter" in key or key.endswith("pdrop")):
            raise RopewalkError(
                f"the model has {key} {value}, but several processes would not draw the same random numbers as one "
                f"process; set {key} to 0 in config.json, or train with one process"
            )
    dependent = sorted({method.name for method in methods if method.length_dependent})
    if dependent and mesh.sequence_degree > 1 and not exact_rope:
        raise EngineError(
            f"with exact_rope: false, transformers' {dependent[0]} would use the length of each rank's part of a row "
            "instead of the length of the whole row; set exact_rope: true, or set parallel.sequence and "
            "parallel.ring to 1"
        )


def announcement(resolved: ResolvedRecipe) -> list[str]:
    """Lines that a run prints at the start: model, engine, processes, stages, and notes on factor tables."""
    recipe = resolved.recipe
    automatic = " (auto)" if recipe.engine == "auto" else ""
    if any(measures_engine(resolved, number) for number in range(len(recipe.stages))):
        automatic = " (auto; measured anew before each stage)"
    lines = [
        f"model {resolved.model}, trained for {resolved.trained_length} tokens",
        f"attention engine {resolved.engine}{automatic} on {resolved.device}, {resolved.precision}",
    ]
    if resolved.encoders is not None:
        lines.append(resolved.encoders)
    if resolved.indexer_note is not None:
        lines.append(resolved.indexer_note)
    if resolved.missing:
        lines.append(
            "recurrent layers run transformers' own code, which takes more time and memory than kernels, because "
            f"{' and '.join(resolved.missing)} {'is' if len(resolved.missing) == 1 else 'are'} not installed"
        )
    if resolved.mesh.world_size > 1:
        automatic = " (auto)" if recipe.parallel == "auto" else ""
        lines.append(f"{resolved.mesh.world_size} processes: {resolved.mesh}{automatic}")
    if resolved.adapter is not None:
        lines.append(f"adapter: {resolved.adapter}")
    known = zip(recipe.stages, resolved.methods, resolved.origins, strict=True)
    for number, (stage, method, origin) in enumerate(known, start=1):
        base = "a base to be chosen in the run" if method is None else f"rope_theta {method.rope_theta:,.0f}"
        if stage.short_rows is not None and stage.rope.limiting.method != LongRope.name:
            base = f"its frequencies as longrope's long factors over {base}"
        if stage.rope.limiting.search is not None:
            base = "factors to be searched in the run"
        training = f"{stage.steps} steps of {stage.rows_per_step} rows" if stage.steps else "no training"
        lines.append(
            f"stage {number}: {stage.context} tokens, {stage.rope.limiting.method} with {base}, "
            f"pattern {stage.pattern}, positions {stage.positions}, {training}"
        )
        if stage.short_rows is not None:
            lines.append(
                f"stage {number}: {stage.short_rows:.3g} of the rows are short: documents of at most "
                f"{resolved.short_lengths[number - 1]:,} tokens with the RoPE of the checkpoint, each by itself; the "
                "others have longer documents alone"
            )
        if resolved.router_aux_losses[number - 1]:
            factor = resolved.router_aux_losses[number - 1]
            lines.append(f"stage {number}: load-balancing loss of the experts has factor {factor:g}")
        if own := describe_own_settings(stage.own_settings):
            lines.append(f"stage {number} has its own settings: {own}")
        here, mesh = resolved.stages[number - 1], resolved.mesh
        if here.compiled and stage.steps:
            automatic = " (auto)" if stage.compile == "auto" else ""
            lines.append(f"stage {number}: norms, MLPs or experts, and rotations are compiled{automatic}")
        if here.keeping is not None and stage.steps:
            automatic = " (auto)" if stage.keep_attention == "auto" else ""
            lines.append(f"stage {number}: {here.keeping}{automatic}")
        if here.mesh != mesh:
            lines.append(f"stage {number}: {here.mesh.world_size} processes: {here.mesh}")
        if here.engine != resolved.engine:
            lines.append(f"stage {number}: attention engine {here.engine}")
        for kind, other in resolved.other_ropes[number - 1].items():
            lines.append(
                f"stage {number}: this RoPE is for layers of full attention; layers of type {kind}: {described(other)}"
            )
        if origin is not None and takes_recommended_base(stage.rope.limiting):
            reason = recommended_base(*origin, stage.context).reason
            lines.append(f"stage {number}: reason for this base: {reason}")
    if recipe.export.weights == "average":
        lines.append(
            f"the result will have the mean weights of the last {recipe.export.average_of} checkpoints"
        )
    elif recipe.export.weights == "best":
        by = recipe.export.by or recipe.evaluation.in_training().suites[0]
        lines.append(f"the result will have the weights with the best score of {by} during the last stage")
    return [*lines, *_remarks_on_tables(resolved)]


def _remarks_on_tables(resolved: ResolvedRecipe) -> list[str]:
    """Notes on the factor tables that a recipe names."""
    lines = []
    named = [(number, table) for number, table in enumerate(resolved.tables, start=1) if table is not None]
    # Hashing the weights takes long, so only where a table has a digest to compare with.
    own = model_digest(resolved.model) if any(table.model.digest for _, table in named) else None
    for number, table in named:
        if own is not None and table.model.digest not in (None, own):
            lines.append(
                f"stage {number}: the factors in {resolved.recipe.stages[number - 1].rope.limiting.factors} "
                f"were found on another checkpoint ({table.model.name}) "
                "with the same frequencies; they may not be the best for this one"
            )
    return lines
