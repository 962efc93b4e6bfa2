"""ResolvedRecipe: a recipe whose every question is answered, and its model as the processes of a run hold it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ropewalk.attention import EngineName
from ropewalk.data import PackedRows, PackingSettings
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.models.losses import LossModel, OutputHead
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import MeshShape
from ropewalk.parallel.context import RunContext
from ropewalk.rope import RopeMethod
from ropewalk.search import Factors
from ropewalk.training.recipe.recipe import Recipe

RopeAt = tuple[RopeMethod, int]
"""A RoPE method, and the context in tokens that a model has, or is to have, with it."""


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe whose every question is answered, but for those that only the run itself can answer.

    Attributes:
        recipe: as it was written.
        model: folder or hub id.
        trained_length: context of the checkpoint as it is, in tokens.
        dtype: dtype of the checkpoint's weights, in which the result is saved.
        rope: RoPE method of the checkpoint as it is.
        other_ropes: RoPE of layer types that do not limit the context, in each stage; empty where all layers share one.
        methods: RoPE method of each stage; None where it follows from what an ``auto`` stage will choose, or a search
            will find.
        origins: method and length that each stage's recommended base is, or would be, derived from; None where that is
            not known yet.
        packing: packing settings of each stage; none where the recipe names rows.
        tokenizer: the model's tokenizer.
        device: where to train.
        precision: float32, bfloat16-autocast or bfloat16.
        engine: the attention engine that ``auto`` stands for.
        mesh: how the processes are arranged.
        tables: the factor table of each stage that names one.
        original_length: ``T`` in tokens, where the result is a longrope checkpoint.
        router_aux_losses: factor of the load-balancing loss in each stage, 0 for none.
        left_out: what of the model the result will not have, a sentence; None where it has all.
    """

    recipe: Recipe
    model: str
    trained_length: int
    dtype: torch.dtype
    rope: RopeMethod
    other_ropes: tuple[Mapping[str, RopeMethod], ...]
    methods: tuple[RopeMethod | None, ...]
    origins: tuple[RopeAt | None, ...]
    packing: tuple[PackingSettings, ...]
    tokenizer: Any
    device: torch.device
    precision: str
    engine: EngineName
    mesh: MeshShape = field(default_factory=MeshShape)
    tables: tuple[Factors | None, ...] = ()
    original_length: int | None = None
    router_aux_losses: tuple[float, ...] = ()
    left_out: str | None = None

    @property
    def target(self) -> int:
        """Context of the last stage, in tokens."""
        return self.recipe.stages[-1].context

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype that a model which only measures is loaded in."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True, eq=False)
class AtStage:
    """What there is when a run comes to a stage.

    Attributes:
        resolved: the recipe.
        context: processes, output folder, progress.
        weights: checkpoint that the stage starts from; None for the recipe's model.
        rows: packed rows of the stage; None for one that trains nothing.
        validation: packed rows whose held-out documents the run measures on.
    """

    resolved: ResolvedRecipe
    context: RunContext
    weights: Path | None = None
    rows: PackedRows | None = None
    validation: PackedRows | None = None

    @property
    def output(self) -> Path:
        """Folder of the run."""
        return folder_of(self.context)


def folder_of(context: RunContext) -> Path:
    """The folder that a run writes to."""
    assert context.output is not None
    return context.output


def load_for_run(
    resolved: ResolvedRecipe,
    context: RunContext,
    path: str,
    rope: RopeAt | None = None,
    dtype: torch.dtype | str = "auto",
    compute_dtype: torch.dtype | None = None,
    other_ropes: Mapping[str, RopeMethod] | None = None,
) -> LossModel:
    """A model with its output head: whole in a process that is alone, else sharded over the mesh.

    Args:
        resolved: engine, rotary module and device.
        context: the processes; every one of them calls this.
        path: folder or hub id.
        rope: RoPE to run with, and the context that the config states; the checkpoint's own if None.
        dtype: of the parameters; ``auto`` is the checkpoint's own.
        compute_dtype: what shards are gathered in; ``dtype`` if None.
        other_ropes: of layer types that do not limit the context; the checkpoint's own if None.
    """
    recipe = resolved.recipe
    method, length = rope or (None, None)
    setup = ModelSetup(
        method,
        length,
        recipe.engine,
        recipe.exact_rope,
        recipe.trust_remote_code,
        tuple(recipe.lift),
        other_ropes or {},
    )
    if context.mesh is None:
        model = load_model(path, setup, dtype, resolved.device)
        return LossModel(model, OutputHead.of(model)).eval()
    # A sharded model that went out of scope refers to itself: its shards live until the collector comes by.
    gc.collect()
    shards = resolved.dtype if isinstance(dtype, str) else dtype
    return load_sharded(path, context.mesh, context.world, setup, shards, compute_dtype)


def share_of_step(rows: Sequence[int], context: RunContext) -> list[int]:
    """This process's part of one step's rows: those of its data rank."""
    if context.mesh is None:
        return list(rows)
    return list(rows[context.mesh.data_rank :: context.mesh.shape.data_degree])
