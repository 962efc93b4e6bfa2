"""Recipe: everything that decides a run, as a person writes it. Unknown keys are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ropewalk.attention.choices import EngineName, Limit, Pattern, Positions
from ropewalk.io.settings import FREE, ONWARD, SAME, Count, Length, OnResume, Settings
from ropewalk.training.recipe.data import Data
from ropewalk.training.recipe.evaluation import Evaluation
from ropewalk.training.recipe.rope import Rope, Search, ShortContext

__all__ = [
    "Change",
    "Checkpoints",
    "Data",
    "Evaluation",
    "Length",
    "Optimizer",
    "Parallel",
    "Precision",
    "Recipe",
    "Rope",
    "Search",
    "ShortContext",
    "Stage",
]

BEGUN = OnResume("fixed", "the stage has begun with it")
DECIDES = OnResume("fixed", "what was computed so far depends on it")

Schedule = Literal["constant", "linear", "cosine"]
Precision = Literal["auto", "float32", "bfloat16-autocast", "bfloat16"]


class Stage(Settings):
    """One stretch of training at one context length."""

    context: Annotated[Length, BEGUN] = Field(
        description="tokens of a row; the model's context after this stage"
    )
    rope: Rope = Field(default_factory=lambda: Rope(), description="how RoPE changes; theta by default")
    pattern: Annotated[Pattern, BEGUN] = Field("anchor", description="which tokens of a row see each other")
    positions: Annotated[Positions, BEGUN] = Field(
        "continuous", description="RoPE positions: over the row, or restarting in each document"
    )
    steps: Annotated[Count, ONWARD] = Field(
        ge=0, description="optimiser steps; 0 on a longrope stage changes the factors and trains nothing"
    )
    rows_per_step: Annotated[Count, BEGUN] = Field(
        8, ge=1, description="rows of one optimiser step, over all micro-batches"
    )
    rows_per_batch: Annotated[Count, ONWARD] = Field(
        1, ge=1, description="rows of one forward pass (gradient accumulation)"
    )
    learning_rate: Annotated[float, ONWARD] = Field(2e-5, gt=0, description="after the warm-up")
    warmup_steps: Annotated[Count, ONWARD] = Field(0, ge=0, description="steps of linear warm-up")
    schedule: Annotated[Schedule, ONWARD] = Field(
        "constant", description="what the rate does after the warm-up"
    )
    gradient_checkpointing: Annotated[bool, FREE] = Field(
        False, description="keep only each layer's input and compute the layer again in the backward"
    )
    offload_activations: Annotated[bool, FREE] = Field(
        False, description="keep those inputs in CPU memory until the backward; with gradient_checkpointing"
    )

    @model_validator(mode="after")
    def _check(self) -> Stage:
        if not self.steps and self.rope.method != "longrope":
            raise ValueError(
                f"steps 0 trains nothing, which makes sense where factors are swapped; rope {self.rope.method!r} "
                "needs 1 or more"
            )
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("offload_activations needs gradient_checkpointing: true")
        if self.rows_per_step % self.rows_per_batch:
            raise ValueError(
                f"rows_per_step {self.rows_per_step} is not a multiple of rows_per_batch {self.rows_per_batch}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        return self


class Optimizer(Settings):
    """AdamW as in arXiv:2411.13476; matrices decay, norms and biases do not."""

    on_resume = ONWARD

    weight_decay: float = Field(0.1, ge=0, description="of matrices; norms and biases do not decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping by global norm")


class Checkpoints(Settings):
    every: Annotated[Count, FREE] = Field(
        10, ge=1, description="optimiser steps between checkpoints; a stage's end always has one"
    )
    keep: Annotated[Count, FREE] = Field(5, ge=1, description="checkpoints kept, the latest ones")
    asynchronous: Annotated[Literal["auto"] | bool, FREE] = Field(
        "auto", description="several processes: train on while files are written; auto: on cuda"
    )


class Parallel(Settings):
    """How the processes of a run are arranged; the product of the four is their number."""

    on_resume = ONWARD

    replicate: Count = Field(1, ge=1, description="copies of the sharded model, with different rows")
    shard: Count = Field(
        1, ge=1, description="processes with different rows that share one model's parameters"
    )
    sequence: Count = Field(
        1, ge=1, description="processes that share a row by attention heads (Ulysses); divides the heads"
    )
    ring: Count = Field(1, ge=1, description="parts of a row between which keys and values travel")


def _kind(value: Any) -> str:
    return "_auto" if isinstance(value, str) else "_degrees"


ParallelOrAuto = Annotated[
    Annotated[Literal["auto"], Tag("_auto")] | Annotated[Parallel, Tag("_degrees")], Discriminator(_kind)
]
"""Told apart by hand, so that an error is about what was meant and not about both."""


class Change(Settings):
    """A key that had another value before a run was resumed.

    The new value holds for the steps after step ``step`` of stage ``stage``, which is counted from 0 as in the keys.
    """

    on_resume = FREE

    key: str = Field(description="such as stages.0.steps")
    old: Any = Field(description="its value before")
    new: Any = Field(description="its value from then on")
    stage: Count = Field(ge=0, description="stage that the run had reached, from 0")
    step: Count = Field(ge=0, description="steps of that stage that were done")


class Recipe(Settings):
    """One run of ``ropewalk extend``."""

    model: Annotated[str, SAME] = Field(
        min_length=1, description="folder in Hugging Face layout, hub id, or embedded"
    )
    output: Annotated[str, FREE] = Field(min_length=1, description="folder of the run; it must not exist yet")
    data: Data = Field(description="which documents, and how they become rows")
    stages: Annotated[list[Stage], ONWARD] = Field(
        min_length=1, description="stretches of training, contexts growing"
    )
    short_context: Annotated[ShortContext | None, DECIDES] = Field(
        None,
        description="search the short factors on the final weights, for the original length; last stage longrope",
    )
    lift: Annotated[list[Limit], SAME] = Field(
        [],
        description="limits of the model's attention to take away: windows, so that every layer sees all of its "
        "document; dual_chunk_attention, so that no server uses it. Training must teach the model what it gains",
    )
    optimizer: Optimizer = Field(Optimizer(), description="AdamW, one for all stages, fresh in each")
    checkpoints: Checkpoints = Field(Checkpoints(), description="when to save, how many to keep")
    evaluation: Evaluation = Field(Evaluation(), description="what is measured before and after")
    seed: Annotated[int, DECIDES] = Field(
        0, ge=0, lt=2**32, description="row order, samples of the evaluation"
    )
    parallel: Annotated[ParallelOrAuto, ONWARD] = Field(
        "auto", description="how torchrun's processes share model and rows; auto: the least cut that fits"
    )
    engine: Annotated[Literal["auto", EngineName], ONWARD] = Field(
        "auto",
        description="attention engine; auto: segments on a CPU; on CUDA varlen, else flex, else segments",
    )
    exact_rope: Annotated[bool, DECIDES] = Field(
        True, description="float64 angles and float32 rotation; false: transformers' own"
    )
    device: Annotated[str, ONWARD] = Field("auto", description="auto: cuda where there is one, else cpu")
    precision: Annotated[Precision, SAME] = Field(
        "auto",
        description="auto: on cuda bfloat16-autocast in one process, bfloat16 in several; float32 elsewhere",
    )
    trackers: Annotated[
        list[Literal["wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "aim", "swanlab"]], FREE
    ] = Field([], description="where metrics go beside metrics.jsonl; their packages must be installed")
    trust_remote_code: Annotated[bool, DECIDES] = Field(
        False, description="run model code that comes with the checkpoint"
    )
    history: Annotated[list[Change], FREE] = Field(
        [], description="what `--resume` has changed, written into the run's own recipe.yaml; leave it out"
    )

    @model_validator(mode="after")
    def _contexts_grow(self) -> Recipe:
        contexts = [stage.context for stage in self.stages]
        for number, (before, after) in enumerate(pairwise(contexts), start=1):
            if after < before:
                raise ValueError(
                    f"stages.{number}.context {after} is shorter than the stage before it ({before})"
                )
        return self

    @model_validator(mode="after")
    def _short_factors_have_a_place(self) -> Recipe:
        last = self.stages[-1].rope.method
        if self.short_context is not None and last != "longrope":
            raise ValueError(
                f"short_context searches the short factors of longrope, and the last stage's rope is {last!r}; leave "
                "it out, or end with a longrope stage"
            )
        return self
