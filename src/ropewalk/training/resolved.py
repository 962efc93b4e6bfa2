"""ResolvedRecipe: a recipe with every ``auto`` resolved, and loading of its model for a run."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ropewalk.attention import EngineName
from ropewalk.attention.api import KERNELS
from ropewalk.attention.engines.capabilities import Capability
from ropewalk.attention.kept import Keeping
from ropewalk.data import PackedRows, PackingSettings, StepRow, TrainingRows
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import MeshShape
from ropewalk.parallel.context import RunContext
from ropewalk.rope import RopeMethod
from ropewalk.search import Factors
from ropewalk.training.recipe.recipe import Recipe, StageSettings

RopeAt = tuple[RopeMethod, int]
"""A RoPE method and the context in tokens that it is for."""


class StagePacking(NamedTuple):
    """Packing settings of a stage.

    Attributes:
        rows: of its rows; of the rows of long documents, if it has short rows too.
        short_rows: of its short rows; None if it has none.
    """

    rows: PackingSettings
    short_rows: PackingSettings | None = None


@dataclass(frozen=True)
class ResolvedStage:
    """Resolved settings of a stage that may differ between stages.

    Attributes:
        settings: the stage, with the run's settings where it has none of its own.
        precision: float32, bfloat16-autocast or bfloat16.
        engine: resolved attention engine.
        mesh: arrangement of the processes.
        compiled: whether pieces of the model are compiled.
        keeping: what checkpointed layers keep of their attention; None for nothing.
    """

    settings: StageSettings
    precision: str
    engine: EngineName
    mesh: MeshShape
    compiled: bool = False
    keeping: Keeping | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of parameters when the model is loaded only for evaluation."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with everything resolved that can be known before the run.

    Attributes:
        recipe: the recipe as written.
        model: folder or Hub id.
        trained_length: context of the checkpoint before the run, in tokens.
        dtype: dtype of the checkpoint's weights, in which the result is saved.
        rope: RoPE method of the checkpoint before the run.
        other_ropes: for each stage, the RoPE of layer types that do not limit the context; empty if all layers share
            one RoPE.
        methods: RoPE method of each stage; None if it depends on what an ``auto`` stage chooses or a search finds.
        origins: for each stage, the method and length from which its recommended base is derived; None if they are not
            known yet.
        packing: packing settings of each stage, and of its short rows; empty if the recipe names packed rows.
        short_lengths: for each stage with short rows, the most tokens of a short document, which is the original
            length; otherwise None.
        tokenizer: the model's tokenizer.
        device: device to train on.
        precision: float32, bfloat16-autocast or bfloat16.
        engine: resolved attention engine.
        stages: what each stage trains with; the precision and engine above are those before and after training.
        mesh: arrangement of the processes before and after training.
        tables: factor table of each stage; None for stages that name none.
        original_length: original length ``T`` in tokens if the result is a longrope checkpoint; otherwise None.
        router_aux_losses: factor of the load-balancing loss in each stage; 0 for none.
        encoders: sentence on what lies beside the decoder and is not trained; None if the model is a decoder alone.
        indexer_note: sentence on parts of the model that are not trained; None if there are none.
        adapter: adapter to train instead of the model's own weights; None for none.
        capability: compute capability of the GPUs that the run is planned for; None for those of this machine.
        missing: packages of kernels for recurrent layers that are not installed on the GPU's machine.
    """

    recipe: Recipe
    model: str
    trained_length: int
    dtype: torch.dtype
    rope: RopeMethod
    other_ropes: tuple[Mapping[str, RopeMethod], ...]
    methods: tuple[RopeMethod | None, ...]
    origins: tuple[RopeAt | None, ...]
    packing: tuple[StagePacking, ...]
    short_lengths: tuple[int | None, ...]
    tokenizer: Any
    device: torch.device
    precision: str
    engine: EngineName
    stages: tuple[ResolvedStage, ...]
    mesh: MeshShape = field(default_factory=MeshShape)
    tables: tuple[Factors | None, ...] = ()
    original_length: int | None = None
    router_aux_losses: tuple[float, ...] = ()
    encoders: str | None = None
    indexer_note: str | None = None
    adapter: NewAdapter | None = None
    capability: Capability | None = None
    missing: tuple[str, ...] = ()

    @property
    def target(self) -> int:
        """Context of the last stage, in tokens."""
        return self.recipe.stages[-1].context

    @property
    def reach(self) -> int:
        """Longest input in tokens that the result's config states.

        The context of the last stage; without RoPE, which needs no training at a length, the largest measured length.
        """
        last, measured = self.methods[-1], self.recipe.evaluation
        if last is None or last.rotates:
            return self.target
        scaled = self.recipe.stages[-1].rope.softmax_scale
        lengths: list[int] = [self.target, *((measured.lengths or ()) if measured.suites else ())]
        return max(lengths + (scaled.lengths if scaled else []))

    def with_engine(self, number: int, engine: EngineName) -> ResolvedRecipe:
        """The same with another engine for a stage, counted from 0."""
        stages = list(self.stages)
        keeping = stages[number].keeping if engine in KERNELS else None
        stages[number] = replace(stages[number], engine=engine, keeping=keeping)
        return replace(self, stages=tuple(stages))

    def keeps(self, keeping: Sequence[Keeping | None]) -> ResolvedRecipe:
        """The same with what the layers of each stage keep of their attention."""
        stages = [replace(each, keeping=kept) for each, kept in zip(self.stages, keeping, strict=True)]
        return replace(self, stages=tuple(stages))

    def precision_at(self, stage: int | None) -> str:
        """Precision in a stage, counted from 0; before and after training if None."""
        return self.precision if stage is None else self.stages[stage].precision


@dataclass(frozen=True, eq=False)
class AtStage:
    """State of a run when it reaches a stage.

    Attributes:
        resolved: the recipe.
        context: processes, output folder and reporter.
        weights: checkpoint that the stage starts from; None for the recipe's model.
        rows: packed rows of the stage; None for a stage without training.
        short_rows: packed rows of short documents; None for a stage that has none.
        validation: packed rows whose held-out documents the run evaluates on.
        searched: hashes of held-out documents on which searches of the run measure; no evaluation may read them.
    """

    resolved: ResolvedRecipe
    context: RunContext
    weights: Path | None = None
    rows: PackedRows | None = None
    short_rows: PackedRows | None = None
    validation: PackedRows | None = None
    searched: frozenset[int] = frozenset()

    @property
    def output(self) -> Path:
        """Folder of the run."""
        return folder_of(self.context)

    def training_rows(self, number: int) -> TrainingRows:
        """All rows of a stage that trains, counted from 0."""
        assert self.rows is not None
        return TrainingRows(self.rows, self.short_rows, self.resolved.recipe.stages[number].short_rows or 0.0)


def folder_of(context: RunContext) -> Path:
    """Output folder of a run."""
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
    with_adapter: bool = False,
    offload: bool = False,
    engine: EngineName | None = None,
) -> LossModel:
    """Load a model with its output head: whole if there is one process, otherwise sharded over the mesh.

    Args:
        resolved: the recipe, for engine, rotary module and device.
        context: processes of the run; each must call this function.
        path: folder or Hub id.
        rope: RoPE method, and the context to write into the config; None keeps those of the checkpoint.
        dtype: dtype of the parameters; ``auto`` is that of the checkpoint.
        compute_dtype: dtype in which shards are gathered; ``dtype`` if None.
        other_ropes: RoPE of layer types that do not limit the context; None keeps those of the checkpoint.
        with_adapter: whether to add the recipe's adapter, if it has one: for the run's checkpoints, which contain its
            trained parameters alone. These have ``dtype``, and all others ``compute_dtype``.
        offload: whether a sharded model keeps its shards in CPU memory.
        engine: attention engine; that of the recipe if None.
    """
    recipe = resolved.recipe
    adapter = resolved.adapter if with_adapter else None
    method, length = rope or (None, None)
    setup = ModelSetup(
        method,
        length,
        engine or recipe.engine,
        recipe.exact_rope,
        recipe.trust_remote_code,
        tuple(recipe.lift),
        other_ropes or {},
    )
    if context.mesh is None:
        # Frozen parameters are not loaded in float32 to be narrowed afterwards, which would double the peak of memory.
        narrow = adapter is not None and compute_dtype is not None
        quantization = (
            None if adapter is None or compute_dtype is None else adapter.quantization(compute_dtype)
        )
        model = load_model(path, setup, "auto" if narrow else dtype, resolved.device, quantization)
        trained = LossModel(model, OutputHead.of(model)).eval()
        if adapter is not None:
            assert isinstance(dtype, torch.dtype)
            adapter.add_to(model, dtype, compute_dtype)
        return trained
    # Sharded models contain reference cycles: collect an earlier one now, or its shards stay allocated.
    gc.collect()
    shards = resolved.dtype if isinstance(dtype, str) else dtype
    return load_sharded(path, context.mesh, context.world, setup, shards, compute_dtype, adapter, offload)


def share_of_step(rows: Sequence[StepRow], context: RunContext) -> list[StepRow]:
    """This process's share of a step's rows: every data_degree-th row, starting at its data rank."""
    if context.mesh is None:
        return list(rows)
    return list(rows[context.mesh.data_rank :: context.mesh.shape.data_degree])
