"""Stage section of a recipe: one training stage, and the settings of the run that it may replace by its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Tag,
    create_model,
    model_serializer,
    model_validator,
)

from ropewalk.attention.choices import Pattern, Positions
from ropewalk.data.rows.kinds import short_rows_of
from ropewalk.io.settings import FREE, ONWARD, Count, Length, Settings
from ropewalk.training.recipe.data import Data, StageData
from ropewalk.training.recipe.rope import Rope

Schedule = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
NotNegative = Annotated[float, Field(ge=0)]
ComputedIn = Literal["float32", "bfloat16-autocast", "bfloat16"]
Precision = Literal["auto", ComputedIn]
Moments = Literal["keep", "reset", "rewarm"]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
AS_A_FILE = "file"
"""Context of serialisation in which a stage omits later keys that have their default."""


class Optimizer(Settings):
    """AdamW as in arXiv:2411.13476; matrices decay, norms and biases do not."""

    free = ONWARD

    weight_decay: float = Field(
        default=0.1, ge=0, description="weight decay of matrices; norms and biases have none"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay rate of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay rate of the second moment")
    epsilon: float = Field(default=1e-8, gt=0, description="term added to the root of the second moment")
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        description="largest global norm of the gradients; larger gradients are scaled down to it",
    )


if TYPE_CHECKING:

    class StageOptimizer(Settings):
        """The keys of Optimizer, each None unless given."""

else:
    # Generated, so that a new key of Optimizer becomes one of a stage as well.
    StageOptimizer = create_model(
        "StageOptimizer",
        __base__=Settings,
        __doc__="Keys of :class:`Optimizer` for one stage; those that are not given are the run's.",
        **{
            name: (
                # The metadata has the bounds, which the annotation alone would lose.
                Annotated[field.annotation | None, *field.metadata],
                Field(default=None, description=field.description),
            )
            for name, field in Optimizer.model_fields.items()
        },
    )
    StageOptimizer.free = ONWARD


class Parallel(Settings):
    """How the processes of a run are arranged; the product of the four is their number."""

    free = ONWARD

    replicate: Count = Field(
        default=1, ge=1, description="number of data parallel copies of the (sharded) model"
    )
    shard: Count = Field(
        default=1,
        ge=1,
        description="number of data parallel processes that share one sharded copy of the model (FSDP)",
    )
    sequence: Count = Field(
        default=1,
        ge=1,
        description="number of processes that split each row; for attention, each process gets the whole row for some "
        "of the heads (Ulysses); must divide the number of heads",
    )
    ring: Count = Field(
        default=1,
        ge=1,
        description="number of processes that split each row and pass keys and values on to each other (ring "
        "attention)",
    )


def _kind(value: Any) -> str:
    return "_auto" if isinstance(value, str) else "_degrees"


ParallelOrAuto = Annotated[
    Annotated[Literal["auto"], Tag("_auto")] | Annotated[Parallel, Tag("_degrees")], Discriminator(_kind)
]
"""The discriminator selects one variant, so that an error is about that variant and not about both."""


class Stage(Settings):
    """One training stage at one context length."""

    context: Length = Field(description="row length in tokens, which becomes the model's context")
    rope: Rope = Field(
        default_factory=lambda: Rope(),
        description="how RoPE changes at the beginning of the stage; default: method theta",
    )
    pattern: Pattern = Field(
        default="anchor", description="which tokens of a packed row attend to each other"
    )
    positions: Positions = Field(
        default="continuous",
        description="RoPE positions: counted over the whole row, or restarting in each document",
    )
    short_rows: float | None = Field(
        default=None,
        description="mixed context window training: share of rows, such as 0.5, that are packed with short documents "
        "alone (at most the original length) and train with the original RoPE, with positions and attention within "
        "each document; all other rows have longer documents alone; default: rows of all documents, with one RoPE",
    )
    steps: Annotated[Count, ONWARD] = Field(
        ge=0,
        description="number of optimizer steps; a longrope stage may have 0, to set its factors without training",
    )
    rows_per_step: Count = Field(
        default=8, ge=1, description="rows per optimizer step, over all processes and micro-batches"
    )
    rows_per_batch: Annotated[Count, ONWARD] = Field(
        default=1,
        ge=1,
        description="rows per forward pass; a step accumulates gradients over as many passes as it needs",
    )
    learning_rate: Annotated[float, ONWARD] = Field(
        default=2e-5, gt=0, description="peak learning rate, reached after the warm-up"
    )
    warmup_steps: Annotated[Count, ONWARD] = Field(
        default=0, ge=0, description="steps of linear learning-rate warm-up"
    )
    schedule: Annotated[Schedule, ONWARD] = Field(
        default="constant",
        description="learning-rate schedule after the warm-up; warmup-stable-decay: constant, then linear over the "
        "last decay_steps",
    )
    min_learning_rate: Annotated[float, ONWARD] = Field(
        default=0.0, ge=0, description="learning rate at the end of a schedule that decays"
    )
    decay_steps: Annotated[Count, ONWARD] = Field(
        default=0, ge=0, description="steps of decay at the end of the schedule warmup-stable-decay"
    )
    moments: Moments = Field(
        default="keep",
        description="AdamW's moments at the start of the stage; keep: those of the stage before; reset: zero; rewarm: "
        "those of the stage before, with the weight of a single gradient",
    )
    data: StageData | None = Field(
        default=None, description="documents of this stage; keys that are not set keep the run's values"
    )
    optimizer: Annotated[StageOptimizer | None, ONWARD] = Field(
        default=None, description="AdamW settings of this stage; keys that are not set keep the run's values"
    )
    precision: ComputedIn | None = Field(
        default=None, description="dtype of computation in this stage; default: the run's precision"
    )
    parallel: Annotated[ParallelOrAuto | None, ONWARD] = Field(
        default=None,
        description="how the processes share the model and the rows in this stage: auto or a mapping; default: the "
        "run's setting",
    )
    seed: Seed | None = Field(
        default=None,
        description="random seed of this stage; default: the run's seed plus the stage's index, counted from 0",
    )
    router_aux_loss: Annotated[Literal["config"] | NotNegative, ONWARD] = Field(
        default="config",
        description="factor of the load-balancing loss of a mixture of experts; config: the factor in the model's "
        "config if its output_router_logits is true, otherwise 0",
    )
    gradient_checkpointing: Annotated[bool, FREE] = Field(
        default=False,
        description="store only the input of each layer, and recompute the layer in the backward pass",
    )
    offload_activations: Annotated[bool, FREE] = Field(
        default=False,
        description="move the layer inputs that gradient_checkpointing stores to CPU memory; requires "
        "gradient_checkpointing",
    )
    keep_attention: Annotated[Literal["auto"] | bool, FREE] = Field(
        default="auto",
        description="under gradient_checkpointing, keep the results of attention beside the layer inputs instead of "
        "computing them again; auto: on the GPU if its memory has room for all; otherwise, with offload_activations, "
        "where a query sees 8,192 keys or more on average",
    )
    tiled_mlp: Annotated[Length | None, FREE] = Field(
        default=None,
        ge=1,
        description="most tokens that an MLP or its experts process at a time on each process; the backward recomputes "
        "them tile by tile; default: all at once",
    )
    offload_optimizer: Annotated[bool, FREE] = Field(
        default=False,
        description="keep AdamW's moments and the float32 weights that it updates in CPU memory, send each gradient "
        "there during the backward, and update there; several processes keep their shards of the weights there",
    )
    compile: Annotated[Literal["auto"] | bool, FREE] = Field(
        default="auto",
        description="compile norms, MLPs or experts, and the rotation of queries and keys into fewer kernels; auto: on "
        "a GPU where torch can compile",
    )

    @property
    def own_documents(self) -> bool:
        """Whether the stage trains on other documents than the run names."""
        return self.data is not None and bool(self.data.sources or self.data.rows)

    @property
    def own_settings(self) -> dict[str, Any]:
        """What the stage decides in place of the run, as JSON values; empty if it leaves everything to the run."""
        names = ("data", "optimizer", "precision", "parallel", "seed")
        own: dict[str, Any] = {} if self.moments == "keep" else {"moments": self.moments}
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Settings):
                value = value.model_dump(mode="json", exclude_defaults=True)
            # A section without keys decides nothing.
            if value is not None and value != {}:
                own[name] = value
        return own

    @model_validator(mode="after")
    def _check(self) -> Stage:
        if not self.steps and self.rope.limiting.method != "longrope":
            raise ValueError(
                "steps 0 is allowed only for longrope stages, which can change factors without training; set steps to "
                f"1 or more for rope {self.rope.limiting.method!r}"
            )
        self._check_short_rows()
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("offload_activations needs gradient_checkpointing: true")
        if self.keep_attention is True and not self.gradient_checkpointing:
            raise ValueError("keep_attention: true needs gradient_checkpointing: true")
        if self.rows_per_step % self.rows_per_batch:
            raise ValueError(
                f"rows_per_step must be a positive multiple of rows_per_batch {self.rows_per_batch}, got "
                f"{self.rows_per_step}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        self._check_decay()
        return self

    def _check_short_rows(self) -> None:
        share, rows = self.short_rows, self.steps * self.rows_per_step
        if share is None:
            return
        if not 0 < share < 1:
            raise ValueError(
                f"short_rows must be more than 0 and less than 1, got {share:g}; set it to 0.5, or omit it to pack "
                "documents of all lengths"
            )
        if self.positions != "continuous":
            raise ValueError(
                f"positions {self.positions} and short_rows contradict each other: positions of the long rows choose "
                "their RoPE, and those of the short rows restart in any case; set positions: continuous"
            )
        if not 1 <= (short := short_rows_of(share, rows)) < rows:
            raise ValueError(
                f"short_rows {share:g} of the {rows} rows of the stage are {short}, but both kinds need one row or "
                "more; raise steps or rows_per_step"
            )

    def _check_decay(self) -> None:
        stable = self.schedule == "warmup-stable-decay"
        if self.min_learning_rate and self.schedule == "constant":
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} has no effect on the schedule constant; choose linear, "
                "cosine or warmup-stable-decay, or omit min_learning_rate"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is more than learning_rate {self.learning_rate:g}"
            )
        if self.decay_steps and not stable:
            raise ValueError(
                f"decay_steps {self.decay_steps} has no effect on the schedule {self.schedule}; set schedule: "
                "warmup-stable-decay, or omit decay_steps"
            )
        # Without a decay, it would be the schedule constant under another name.
        if stable and self.steps and not self.decay_steps:
            raise ValueError("schedule warmup-stable-decay needs decay_steps of 1 or more")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} are more than steps {self.steps}"
            )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """In a recipe file, omit later keys that have their default, so that it looks as earlier versions wrote it."""
        stated: dict[str, Any] = handler(self)
        if self.short_rows is None:
            # Absent everywhere, so that runs of earlier versions go on.
            stated.pop("short_rows", None)
        if info.context != AS_A_FILE:
            return stated
        later = {"min_learning_rate", "decay_steps", "data", "optimizer", "precision", "parallel", "seed"}
        later |= {"compile", "keep_attention", "tiled_mlp", "offload_optimizer"}
        fields = type(self).model_fields
        return {
            key: value for key, value in stated.items() if key not in later or value != fields[key].default
        }


@dataclass(frozen=True)
class StageSettings:
    """A stage with everything decided that it may leave to the run.

    Attributes:
        stage: the stage as written.
        data: documents, and how they are packed.
        optimizer: AdamW settings.
        precision: as in the recipe, which may be ``auto``.
        parallel: arrangement of the processes.
        seed: seed of the order of rows, and of the random number generators at the beginning of the stage.
    """

    stage: Stage
    data: Data
    optimizer: Optimizer
    precision: Precision
    parallel: Literal["auto"] | Parallel
    seed: int


def describe_own_settings(own: Mapping[str, Any]) -> str:
    """Text on what :attr:`Stage.own_settings` has, such as ``optimizer beta2 0.99, precision float32``."""
    data = own.get("data", {})
    paths = [*(source["path"] for source in data.get("sources", ())), *data.get("rows", ())]
    said = [f"documents {', '.join(paths)}"] if paths else []
    if "mixture" in data:
        said.append("its own mixture")
    if "optimizer" in own:
        said.append(f"optimizer {', '.join(f'{key} {value:g}' for key, value in own['optimizer'].items())}")
    if "moments" in own:
        said.append(f"moments {own['moments']}")
    if "precision" in own:
        said.append(f"precision {own['precision']}")
    if "parallel" in own:
        asked = own["parallel"]
        told = asked if isinstance(asked, str) else " x ".join(f"{n} {name}" for name, n in asked.items())
        said.append(f"parallel {told or '1 process'}")
    if "seed" in own:
        said.append(f"seed {own['seed']}")
    return ", ".join(said)
