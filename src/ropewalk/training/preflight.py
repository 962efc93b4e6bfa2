"""Everything that can be refused before any work starts is refused here, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ropewalk.attention import EngineName, check_engine
from ropewalk.data import PackingSettings, load_tokenizer, special_ids
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.settings import RowPolicies
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.io.settings import explain
from ropewalk.models.config import ModelConfig
from ropewalk.models.load import attention_spec, choose_device, read_config, with_rope
from ropewalk.parallel import MeshShape, World
from ropewalk.rope import LongRope, RopeMethod
from ropewalk.search import Factors, read_factors
from ropewalk.training.arrangement import mesh_of, refuse_on_mesh
from ropewalk.training.recipe.recipe import Recipe, Stage
from ropewalk.training.stage_rope.methods import possible_methods
from ropewalk.training.trackers import require_trackers


@dataclass(frozen=True)
class Plan:
    """A recipe whose every question is answered.

    Attributes:
        model: folder or hub id.
        trained_length: context of the checkpoint as it is, in tokens.
        dtype: dtype of the checkpoint's weights, in which the result is saved.
        rope: RoPE method of the checkpoint as it is.
        methods: RoPE method of each stage; None where it follows from what an ``auto`` stage will choose, or a search
            will find.
        packing: packing settings of each stage; none where the recipe names rows.
        tokenizer: the model's tokenizer.
        device: where to train.
        precision: float32, bfloat16-autocast or bfloat16.
        engine: the attention engine that ``auto`` stands for.
        mesh: how the processes are arranged.
        tables: the factor table of each stage that names one.
        original_length: ``T`` in tokens, where the result is a longrope checkpoint.
    """

    model: str
    trained_length: int
    dtype: torch.dtype
    rope: RopeMethod
    methods: tuple[RopeMethod | None, ...]
    packing: tuple[PackingSettings, ...]
    tokenizer: Any
    device: torch.device
    precision: str
    engine: EngineName
    mesh: MeshShape = field(default_factory=MeshShape)
    tables: tuple[Factors | None, ...] = ()
    original_length: int | None = None


def plan(recipe: Recipe, world: World | None = None, mesh: MeshShape | None = None) -> Plan:
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
    config = read_config(model, recipe.trust_remote_code)
    text = config.get_text_config()
    read = ModelConfig.of(config)
    refused = read.training_refusals(recipe.stages[-1].context)
    if refused:
        raise EngineError(f"the model {refused[0]}")
    trained = read.trained_length
    require_trackers(recipe.trackers)
    current = read.methods[None]
    tables = tuple(_table(stage) for stage in recipe.stages)
    possible = possible_methods(recipe, current, trained, tables)
    for stage, ends in zip(recipe.stages, possible, strict=True):
        for method in ends:
            with_rope(text, method, stage.context)
    methods = _known_methods(recipe, possible)
    _check_short_context(recipe)
    last = possible[-1][0]
    device = choose_device(recipe.device)
    if world.size > 1 and device.type == "cuda":
        device = torch.device("cuda", world.local_rank)
    precision = recipe.precision
    if precision == "auto":
        # Sharded parameters are float32 masters already, and gathered in bfloat16 they take half the memory.
        precision = "float32"
        if device.type == "cuda":
            precision = "bfloat16-autocast" if world.size == 1 else "bfloat16"
    compute = torch.float32 if precision == "float32" else torch.bfloat16
    check_engine(recipe.engine, attention_spec(text, device, compute))
    mesh = mesh or mesh_of(recipe, text, world, device, precision)
    if mesh.world_size > 1:
        refuse_on_mesh(mesh, text, recipe.exact_rope, [current, *(m for ends in possible for m in ends)])
    tokenizer = load_tokenizer(model)
    special = special_ids(tokenizer)
    for length in recipe.evaluation.lengths or ():
        PasskeyTask().samples(PromptEncoder(tokenizer), length, recipe.evaluation.samples, recipe.seed)
    # A tokenizer that truncates at the old length would take the new context away again.
    tokenizer.model_max_length = max(tokenizer.model_max_length, recipe.stages[-1].context)
    if len(tokenizer) > text.vocab_size:
        raise RopewalkError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {text.vocab_size}: not a pair"
        )
    # Rows that were packed before have decided.
    packing = () if recipe.data.rows else tuple(_packing(recipe, stage) for stage in recipe.stages)
    for settings in packing:
        settings.bos_policy(special)
    engine = check_engine(recipe.engine, attention_spec(text, device, compute, ring=mesh.ring > 1))
    dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    return Plan(
        model,
        trained,
        dtype,
        current,
        methods,
        packing,
        tokenizer,
        device,
        precision,
        engine,
        mesh,
        tables,
        last.original_max_position_embeddings if isinstance(last, LongRope) else None,
    )


def _table(stage: Stage) -> Factors | None:
    return None if stage.rope.factors is None else read_factors(Path(stage.rope.factors).expanduser())


def _known_methods(
    recipe: Recipe, possible: list[tuple[RopeMethod, RopeMethod]]
) -> tuple[RopeMethod | None, ...]:
    """The methods that nothing is left to choose or to find for."""
    known: list[RopeMethod | None] = []
    searched = False
    for stage, (low, high) in zip(recipe.stages, possible, strict=True):
        # A later stage replaces the long factors, or keeps those that were found.
        searched = stage.rope.search is not None or (searched and stage.rope.method == "default")
        known.append(low if low == high and not searched else None)
    return tuple(known)


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
