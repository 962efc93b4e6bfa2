"""Recipe: all settings of a run, as written in YAML. Unknown keys are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_serializer, model_validator

from ropewalk.attention.choices import EngineName, Limit
from ropewalk.io.settings import FREE, ONWARD, Count, Length, Settings, explain
from ropewalk.io.urls import masked
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.training.recipe.data import Data, StageData
from ropewalk.training.recipe.evaluation import Evaluation
from ropewalk.training.recipe.export import Export
from ropewalk.training.recipe.rope import Rope, Search, ShortContext
from ropewalk.training.recipe.stage import (
    Optimizer,
    Parallel,
    ParallelOrAuto,
    Precision,
    Seed,
    Stage,
    StageOptimizer,
    StageSettings,
)

__all__ = [
    "AdapterSettings",
    "Checkpoints",
    "Data",
    "Evaluation",
    "Export",
    "Length",
    "Optimizer",
    "Parallel",
    "Precision",
    "Recipe",
    "Rope",
    "Search",
    "ShortContext",
    "Stage",
    "StageData",
    "StageOptimizer",
    "StageSettings",
]


class Checkpoints(Settings):
    every: Annotated[Count, FREE] = Field(
        default=10, ge=1, description="optimizer steps between checkpoints; the end of a stage always has one"
    )
    keep: Annotated[Count, FREE] = Field(default=5, ge=1, description="number of latest checkpoints to keep")
    asynchronous: Annotated[Literal["auto"] | bool, FREE] = Field(
        default="auto",
        description="continue training while files are written, from a copy in CPU memory of 12 bytes per trained "
        "parameter of the process; auto: on CUDA, in stages without `offload_optimizer`",
    )
    copy_to: Annotated[str | None, FREE] = Field(
        default=None,
        min_length=1,
        description="URL (s3://bucket/run, gs://..., file:///...) to which rank 0 copies each checkpoint and all other "
        "files that `--resume` needs; `--resume` continues from this copy if the output folder is empty. The recipe "
        "in the run's folder has `***` in place of a signature in the URL, so resume with your own recipe",
    )

    @field_serializer("copy_to")
    def _masked(self, url: str | None) -> str | None:
        """Keep credentials out of the run's folder, its report, trackers and whatever else lists settings."""
        return None if url is None else masked(url)


Tracker = Literal[
    "wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "aim", "swanlab", "clearml", "dvclive"
]
"""Experiment trackers by accelerate's names."""


class Recipe(Settings):
    """One run of ``ropewalk extend``."""

    model: Annotated[str, FREE] = Field(
        min_length=1,
        description="checkpoint folder, Hub id, or a tiny model that ropewalk ships (`embedded`, `embedded:retrieval`)",
    )
    output: Annotated[str, FREE] = Field(min_length=1, description="folder of the run; must not exist yet")
    data: Data = Field(description="the documents, and how they are packed")
    stages: list[Stage] = Field(min_length=1, description="training stages, in order of growing context")
    short_context: ShortContext | None = Field(
        default=None,
        description="after training, search for LongRoPE's short factors, which apply to inputs up to the original "
        "length (before any extension); the last stage must have the RoPE method longrope",
    )
    lift: list[Limit] = Field(
        default=[],
        description="which limits of attention to remove: windows (sliding-window layers then attend as far as "
        "full-attention layers, and training must teach them this) or dual_chunk_attention (the exported config no "
        "longer enables dual chunk attention, so servers do not use it)",
    )
    adapter: AdapterSettings | None = Field(
        default=None,
        description="train a LoRA adapter instead of the model's weights; the run exports the adapter and the model "
        "with the adapter merged into it",
    )
    optimizer: Optimizer = Field(
        default=Optimizer(), description="AdamW settings, for all stages that do not set their own"
    )
    checkpoints: Checkpoints = Field(
        default=Checkpoints(), description="how often to save, and how many checkpoints to keep"
    )
    export: Annotated[Export, FREE] = Field(
        default=Export(),
        description="which weights to export: last, best, average, or a mapping with the keys `export.*` "
        "below",
    )
    evaluation: Evaluation = Field(
        default=Evaluation(), description="evaluations before, during and after training"
    )
    seed: Seed = Field(default=0, description="random seed for the order of rows and for evaluation samples")
    parallel: Annotated[ParallelOrAuto, ONWARD] = Field(
        default="auto",
        description="how the processes of torchrun share the model and the rows, as a mapping with the keys "
        "`parallel.*` below; auto: split each row over as few processes as memory allows",
    )
    step_timeout: Annotated[Count, FREE] = Field(
        default=3600,
        ge=1,
        description="seconds without a completed step, after which a run of several processes stops and names the "
        "processes that are stuck; must be longer than the longest step",
    )
    engine: Annotated[Literal["auto", EngineName], ONWARD] = Field(
        default="auto",
        description="attention engine: sdpa (PyTorch's SDPA), flex (FlexAttention), varlen (FlashAttention), or "
        "reference (softmax with a dense mask, for tests); auto: sdpa on a CPU; on a GPU the fastest for each stage, "
        "measured on its first rows",
    )
    exact_rope: bool = Field(
        default=True,
        description="compute RoPE's angles in float64 and rotate in float32; false: transformers' own RoPE",
    )
    device: Annotated[str, ONWARD] = Field(
        default="auto", description="device; auto: cuda if available, otherwise cpu"
    )
    precision: Annotated[Precision, FREE] = Field(
        default="auto",
        description="dtype of computation, from the table under Precision; auto: float32 without CUDA; on "
        "CUDA bfloat16-autocast for one process without an adapter, otherwise bfloat16",
    )
    trackers: Annotated[list[Tracker], FREE] = Field(
        default=[],
        description="experiment trackers that also receive the metrics; install their packages first",
    )
    trust_remote_code: bool = Field(
        default=False, description="run the Python code that comes with the checkpoint"
    )

    def stage(self, number: int) -> StageSettings:
        """A stage, counted from 0, with the run's settings where it sets none."""
        stage = self.stages[number]
        data = self.data if stage.data is None else stage.data.over(self.data)
        optimizer = self.optimizer
        if stage.optimizer is not None:
            optimizer = optimizer.model_copy(update=stage.optimizer.model_dump(exclude_none=True))
        return StageSettings(
            stage,
            data,
            optimizer,
            stage.precision or self.precision,
            stage.parallel or self.parallel,
            # Stages with equal seeds would draw their rows in the same order.
            self.seed + number if stage.seed is None else stage.seed,
        )

    @model_validator(mode="after")
    def _stages_have_documents(self) -> Recipe:
        for number, stage in enumerate(self.stages):
            own = stage.data
            if own is not None and ((own.sources and self.data.rows) or (own.rows and self.data.sources)):
                named, run = ("sources", "rows") if self.data.rows else ("rows", "sources")
                raise ValueError(
                    f"stages.{number}.data has the key {named!r}, but the run's data section has {run!r}; use {run!r} "
                    "in both"
                )
            # Merging a stage with the run validates what it results in.
            try:
                # For its error alone: the run's data and the stage's may be invalid together.
                self.stage(number)
            except ValidationError as error:
                raise ValueError(f"stages.{number}.data: {explain(error, Data)}") from error
        return self

    @model_validator(mode="after")
    def _some_stage_holds_documents_out(self) -> Recipe:
        trained = [stage for stage in self.stages if stage.steps]
        if trained and all(stage.own_documents for stage in trained) and not self.data.validation_sources:
            key = "sources" if self.data.sources else "rows"
            raise ValueError(
                f"every stage that trains has data.{key} of its own, so the run's data.{key} are not used and no "
                "documents can be held out for evaluation; set data.validation_sources, or leave one stage without "
                f"data.{key} of its own"
            )
        return self

    @model_validator(mode="after")
    def _anchors_have_a_pattern(self) -> Recipe:
        anchor = self.data.anchor_token
        if anchor is not None and all(stage.pattern != "anchor" for stage in self.stages):
            raise ValueError(
                f"data.anchor_token is {anchor}, but no stage has the pattern anchor; set pattern: anchor in a stage, "
                "or omit data.anchor_token"
            )
        return self

    @model_validator(mode="after")
    def _contexts_grow(self) -> Recipe:
        contexts = [stage.context for stage in self.stages]
        for number, (before, after) in enumerate(pairwise(contexts), start=1):
            # Equal contexts are fine: a stage may change only its documents or its learning rate.
            if after < before:
                raise ValueError(
                    f"stages.{number}.context {after} is less than stages.{number - 1}.context {before}; order the "
                    "stages by context, with the shortest first"
                )
        return self

    @model_validator(mode="after")
    def _adapters_stay_on_the_device(self) -> Recipe:
        for number, stage in enumerate(self.stages):
            if self.adapter is not None and stage.offload_optimizer:
                raise ValueError(
                    f"stages.{number}.offload_optimizer is not possible with an adapter, whose few weights take little "
                    "memory; set it to false"
                )
        return self

    @model_validator(mode="after")
    def _export_finds_its_weights(self) -> Recipe:
        export, steps = self.export, self.stages[-1].steps
        if export.weights == "last":
            return self
        if not steps:
            raise ValueError(
                f"export {export.weights!r} needs training in the last stage, which has 0 steps; set export to 'last'"
            )
        if self.short_context is not None:
            raise ValueError(
                f"export {export.weights!r} is not possible with short_context, which searches factors for the last "
                "weights; set export to 'last', or leave out short_context"
            )
        if export.weights == "average":
            self._check_average(steps)
        else:
            self._check_best()
        return self

    def _check_average(self, steps: int) -> None:
        number, checkpoints = self.export.average_of, self.checkpoints
        if self.adapter is not None:
            raise ValueError(
                "export 'average' is not possible with an adapter, because the mean of the adapters' matrices is not "
                "the mean of the merged models; set export to 'last' or 'best'"
            )
        if checkpoints.keep < number:
            raise ValueError(
                f"export averages {number} checkpoints, but checkpoints.keep is {checkpoints.keep}; set "
                f"checkpoints.keep to {number} or more, or export.average_of to at most {checkpoints.keep}"
            )
        # Rounded up, because the last step of a stage always writes one.
        written = -(-steps // checkpoints.every)
        if written < number:
            raise ValueError(
                f"export averages {number} checkpoints, but the last stage writes only {written} in its {steps} steps; "
                "lower checkpoints.every or export.average_of"
            )

    def _check_best(self) -> None:
        evaluation, by = self.evaluation, self.export.by
        if evaluation.every is None:
            raise ValueError("export 'best' needs evaluation during training; set evaluation.every")
        suites = evaluation.in_training().suites
        if by is None and len(suites) > 1:
            raise ValueError(
                f"export 'best' needs export.by, since evaluation during training measures {', '.join(suites)}; set "
                "export.by to one of these"
            )
        # A score's name begins with its suite: passkey/1024.
        if by is not None and by.split("/")[0] not in suites:
            raise ValueError(
                f"export.by is {by}, but evaluation during training measures only {', '.join(suites)}; set it to "
                f"{' or '.join(suites)}, or to one score such as {suites[0]}/1024"
            )

    @model_validator(mode="after")
    def _norms_begin_with_the_run(self) -> Recipe:
        for number, stage in enumerate(self.stages):
            if not stage.rope.parameter("qk_norm"):
                continue
            if self.adapter is not None:
                raise ValueError(
                    f"stages.{number}.rope.qk_norm is not possible with an adapter, which would not train the norms; "
                    "leave out one of the two"
                )
            if not self.stages[0].rope.parameter("qk_norm"):
                raise ValueError(
                    f"stages.{number}.rope.qk_norm adds norms that earlier stages do not train; set it in the first "
                    "stage"
                )
        return self

    @model_validator(mode="after")
    def _scale_belongs_to_the_result(self) -> Recipe:
        for number, stage in enumerate(self.stages):
            if stage.rope.softmax_scale is None:
                continue
            where = f"stages.{number}.rope.softmax_scale"
            if number < len(self.stages) - 1:
                raise ValueError(f"{where} is measured on the final weights; move it to the last stage")
            if self.adapter is not None:
                raise ValueError(
                    f"{where} is not possible with an adapter, whose files would lack the scale; leave out one of the "
                    "two"
                )
            if self.export.weights != "last":
                raise ValueError(
                    f"{where} is measured on the last weights, but export is {self.export.weights!r}; set export to "
                    "'last'"
                )
        return self

    @model_validator(mode="after")
    def _short_factors_have_a_place(self) -> Recipe:
        last = self.stages[-1].rope.limiting.method
        if self.short_context is not None and last != "longrope":
            raise ValueError(
                f"short_context searches the short factors of longrope, but the last stage's rope is {last!r}; leave "
                "out short_context, or end with a longrope stage"
            )
        return self
