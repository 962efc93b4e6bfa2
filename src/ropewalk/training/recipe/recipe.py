"""Recipe: all settings of a run, as written in YAML. Unknown keys are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from ropewalk.attention.choices import EngineName, Limit, Pattern, Positions
from ropewalk.io.settings import FREE, ONWARD, SAME, Count, Length, OnResume, Settings
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.training.recipe.data import Data
from ropewalk.training.recipe.evaluation import Evaluation
from ropewalk.training.recipe.export import Export
from ropewalk.training.recipe.rope import Rope, Search, ShortContext

__all__ = [
    "AdapterSettings",
    "Change",
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
]

BEGUN = OnResume("fixed", "the stage has started with it")
DECIDES = OnResume("fixed", "what was computed so far depends on it")

Schedule = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
NotNegative = Annotated[float, Field(ge=0)]
Precision = Literal["auto", "float32", "bfloat16-autocast", "bfloat16"]


class Stage(Settings):
    """One training stage at one context length."""

    context: Annotated[Length, BEGUN] = Field(
        description="row length in tokens, which becomes the model's context"
    )
    rope: Rope = Field(
        default_factory=lambda: Rope(),
        description="how RoPE changes at the beginning of the stage; default: method theta",
    )
    pattern: Annotated[Pattern, BEGUN] = Field(
        "anchor", description="which tokens of a packed row attend to each other"
    )
    positions: Annotated[Positions, BEGUN] = Field(
        "continuous", description="RoPE positions: counted over the whole row, or restarting in each document"
    )
    steps: Annotated[Count, ONWARD] = Field(
        ge=0, description="optimizer steps; 0 in a longrope stage changes the factors without training"
    )
    rows_per_step: Annotated[Count, BEGUN] = Field(
        8, ge=1, description="rows per optimizer step, over all processes and micro-batches"
    )
    rows_per_batch: Annotated[Count, ONWARD] = Field(
        1,
        ge=1,
        description="rows per forward pass; a step accumulates gradients over as many passes as it needs",
    )
    learning_rate: Annotated[float, ONWARD] = Field(
        2e-5, gt=0, description="peak learning rate, reached after the warm-up"
    )
    warmup_steps: Annotated[Count, ONWARD] = Field(
        0, ge=0, description="steps of linear learning-rate warm-up"
    )
    schedule: Annotated[Schedule, ONWARD] = Field(
        "constant",
        description="learning-rate schedule after the warm-up; warmup-stable-decay: constant, then linear over the "
        "last decay_steps",
    )
    min_learning_rate: Annotated[float, ONWARD] = Field(
        0.0, ge=0, description="learning rate at the end of a schedule that decays"
    )
    decay_steps: Annotated[Count, ONWARD] = Field(
        0, ge=0, description="steps of decay at the end of the schedule warmup-stable-decay"
    )
    router_aux_loss: Annotated[Literal["config"] | NotNegative, ONWARD] = Field(
        "config",
        description="factor of the load-balancing loss of a mixture of experts; config: the model's own where its "
        "output_router_logits is true, else none; 0: none",
    )
    gradient_checkpointing: Annotated[bool, FREE] = Field(
        False, description="store only the input of each layer, and recompute the layer in the backward pass"
    )
    offload_activations: Annotated[bool, FREE] = Field(
        False, description="store those inputs in CPU memory; requires gradient_checkpointing"
    )

    @model_validator(mode="after")
    def _check(self) -> Stage:
        if not self.steps and self.rope.limiting.method != "longrope":
            raise ValueError(
                f"steps 0 is allowed only for longrope stages, which can change factors without training; rope "
                f"{self.rope.limiting.method!r} needs 1 or more"
            )
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("offload_activations needs gradient_checkpointing: true")
        if self.rows_per_step % self.rows_per_batch:
            raise ValueError(
                f"rows_per_step {self.rows_per_step} is not a multiple of rows_per_batch {self.rows_per_batch}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        self._check_decay()
        return self

    def _check_decay(self) -> None:
        stable = self.schedule == "warmup-stable-decay"
        if self.min_learning_rate and self.schedule == "constant":
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} has no effect on the schedule constant; choose linear, "
                "cosine or warmup-stable-decay, or leave it out"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is more than learning_rate {self.learning_rate:g}"
            )
        if self.decay_steps and not stable:
            raise ValueError(
                f"decay_steps {self.decay_steps} has no effect on the schedule {self.schedule}; set schedule: "
                "warmup-stable-decay, or leave it out"
            )
        if stable and self.steps and not self.decay_steps:
            raise ValueError("schedule warmup-stable-decay needs decay_steps of 1 or more")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} are more than steps {self.steps}"
            )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit later keys that have their default, so that recipes look as written by earlier versions."""
        said: dict[str, Any] = handler(self)
        return {
            key: value
            for key, value in said.items()
            if value or key not in ("min_learning_rate", "decay_steps")
        }


class Optimizer(Settings):
    """AdamW as in arXiv:2411.13476; matrices decay, norms and biases do not."""

    on_resume = ONWARD

    weight_decay: float = Field(0.1, ge=0, description="weight decay of matrices; norms and biases have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="term added to the root of the second moment")
    max_grad_norm: float = Field(
        1.0, gt=0, description="largest global gradient norm; larger gradients are scaled down"
    )


class Checkpoints(Settings):
    every: Annotated[Count, FREE] = Field(
        10, ge=1, description="optimizer steps between checkpoints; the end of a stage always has one"
    )
    keep: Annotated[Count, FREE] = Field(5, ge=1, description="number of latest checkpoints to keep")
    asynchronous: Annotated[Literal["auto"] | bool, FREE] = Field(
        "auto",
        description="with several processes, continue training while files are written; auto: on CUDA only",
    )


class Parallel(Settings):
    """How the processes of a run are arranged; the product of the four is their number."""

    on_resume = ONWARD

    replicate: Count = Field(1, ge=1, description="data parallel copies of the sharded model")
    shard: Count = Field(
        1, ge=1, description="data parallel processes that shard one copy of the parameters (FSDP)"
    )
    sequence: Count = Field(
        1,
        ge=1,
        description="processes that split a row by attention heads (Ulysses); must divide the number of heads",
    )
    ring: Count = Field(
        1,
        ge=1,
        description="processes that split a row into parts and exchange keys and values (context parallel ring)",
    )


def _kind(value: Any) -> str:
    return "_auto" if isinstance(value, str) else "_degrees"


ParallelOrAuto = Annotated[
    Annotated[Literal["auto"], Tag("_auto")] | Annotated[Parallel, Tag("_degrees")], Discriminator(_kind)
]
"""The discriminator selects one variant, so that an error is about that variant and not about both."""


class Change(Settings):
    """A key that had another value before a run was resumed.

    The new value holds for the steps after step ``step`` of stage ``stage``, which is counted from 0 as in the keys.
    """

    on_resume = FREE

    key: str = Field(description="name of the key, such as stages.0.steps")
    old: Any = Field(description="previous value")
    new: Any = Field(description="new value")
    stage: Count = Field(ge=0, description="index of the stage that the run had reached")
    step: Count = Field(ge=0, description="completed steps of that stage")


class Recipe(Settings):
    """One run of ``ropewalk extend``."""

    model: Annotated[str, SAME] = Field(
        min_length=1,
        description="checkpoint folder, Hub id, or a model in the package, `embedded` or `embedded:retrieval`",
    )
    output: Annotated[str, FREE] = Field(min_length=1, description="folder of the run; must not exist yet")
    data: Data = Field(description="the documents, and how they are packed")
    stages: Annotated[list[Stage], ONWARD] = Field(
        min_length=1, description="training stages, in order of growing context"
    )
    short_context: Annotated[ShortContext | None, DECIDES] = Field(
        None,
        description="search separate factors for texts up to the original length, on the final weights; the "
        "last stage must be longrope",
    )
    lift: Annotated[list[Limit], SAME] = Field(
        [],
        description="limits to remove from the model's attention. windows: every layer sees its whole document; "
        "dual_chunk_attention: no server applies it. The model has to learn the longer reach in training",
    )
    adapter: Annotated[AdapterSettings | None, DECIDES] = Field(
        None,
        description="train small matrices (LoRA) beside the model's weights instead of the weights; the result is "
        "the merged model, and the adapter itself",
    )
    optimizer: Optimizer = Field(
        Optimizer(), description="AdamW settings of all stages; its state starts fresh in each stage"
    )
    checkpoints: Checkpoints = Field(
        Checkpoints(), description="how often to save, and how many checkpoints to keep"
    )
    export: Annotated[Export, FREE] = Field(
        Export(), description="which weights become the result: last, best or average, or the keys below"
    )
    evaluation: Evaluation = Field(Evaluation(), description="measurements before and after training")
    seed: Annotated[int, DECIDES] = Field(
        0, ge=0, lt=2**32, description="random seed for the order of rows and for evaluation samples"
    )
    parallel: Annotated[ParallelOrAuto, ONWARD] = Field(
        "auto",
        description="how the processes of torchrun share the model and the rows; auto: split rows no finer "
        "than memory requires",
    )
    engine: Annotated[Literal["auto", EngineName], ONWARD] = Field(
        "auto",
        description="attention engine; auto: segments on a CPU; on CUDA the first of varlen, flex and "
        "segments that can run",
    )
    exact_rope: Annotated[bool, DECIDES] = Field(
        True, description="compute angles in float64 and rotate in float32; false: as transformers does"
    )
    device: Annotated[str, ONWARD] = Field(
        "auto", description="device; auto: cuda if available, otherwise cpu"
    )
    precision: Annotated[Precision, SAME] = Field(
        "auto",
        description="dtype of computation; auto: on CUDA bfloat16-autocast with one process and bfloat16 "
        "with several or with an adapter, otherwise float32",
    )
    trackers: Annotated[
        list[Literal["wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "aim", "swanlab"]], FREE
    ] = Field(
        [], description="experiment trackers to report to, beside metrics.jsonl; install their packages first"
    )
    trust_remote_code: Annotated[bool, DECIDES] = Field(
        False, description="run the Python code that comes with the checkpoint"
    )
    history: Annotated[list[Change], FREE] = Field(
        [],
        description="changes made by `--resume`, which ropewalk records in the run's recipe.yaml; do not set it",
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
    def _export_finds_its_weights(self) -> Recipe:
        export, steps = self.export, self.stages[-1].steps
        if export.weights == "last":
            return self
        if not steps:
            raise ValueError(
                f"export {export.weights} needs training in the last stage, which has 0 steps; set last"
            )
        if self.short_context is not None:
            raise ValueError(
                f"export {export.weights} is not possible with short_context, which searches factors for the last "
                "weights; set last, or omit short_context"
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
                "export average is not possible with adapter, as the mean of small matrices is not that of the models; "
                "set last or best"
            )
        if checkpoints.keep < number:
            raise ValueError(
                f"export averages {number} checkpoints, but checkpoints.keep is {checkpoints.keep}; set it to {number} "
                "or more, or export.average_of to fewer"
            )
        written = -(-steps // checkpoints.every)
        if written < number:
            raise ValueError(
                f"export averages {number} checkpoints, but the last stage writes {written} in its {steps} steps; set "
                "checkpoints.every or export.average_of to less"
            )

    def _check_best(self) -> None:
        evaluation, by = self.evaluation, self.export.by
        if evaluation.every is None:
            raise ValueError("export best needs evaluation during training; set evaluation.every")
        suites = evaluation.in_training().suites
        if by is None and len(suites) > 1:
            raise ValueError(
                f"export best needs export.by, since evaluation during training measures {', '.join(suites)}; name "
                "one of these"
            )
        if by is not None and by.split("/")[0] not in suites:
            raise ValueError(
                f"export.by is {by}, but evaluation during training measures only {', '.join(suites)}; set it to one "
                "of these, or to one score such as passkey/1024"
            )

    @model_validator(mode="after")
    def _short_factors_have_a_place(self) -> Recipe:
        last = self.stages[-1].rope.limiting.method
        if self.short_context is not None and last != "longrope":
            raise ValueError(
                f"short_context searches the short factors of longrope, but the last stage's rope is {last!r}; omit "
                "it, or end with a longrope stage"
            )
        return self
