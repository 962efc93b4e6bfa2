"""Settings of ``ropewalk verify`` and ``ropewalk probe-trainer``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ropewalk.io.settings import COMMON, Count, Length, Option, Overrides, Settings, Text


class VerifySettings(Settings):
    """The recipe to verify, and how much of its model and rows to use."""

    group: ClassVar[str | None] = "Model, rows and processes"

    recipe: Annotated[str, Option(argument=True)] = Field(
        "demo", description="Recipe file (YAML), or the name of a recipe that ropewalk ships, such as demo."
    )
    overrides: Annotated[Overrides, COMMON] = Field(
        (), description="Override a key of the recipe, such as stages.0.context=32k."
    )
    layers: Annotated[Count | None, COMMON] = Field(
        None, ge=1, description="Verify only this many of the model's first layers. Default: all."
    )
    rows: Count = Field(4, ge=2, description="Number of packed rows to verify on; at least one per rank.")
    length: Annotated[Length | None, COMMON] = Field(
        None,
        description="Sequence length in tokens. Default: the first stage's context, or less for a large model.",
    )
    ranks: Count = Field(
        2,
        ge=2,
        description="Number of processes to start on this machine. Ignored under torchrun, which starts its own.",
    )


class TrainerProbeSettings(Settings):
    """The trainer to probe, and the documents it is given."""

    group: ClassVar[str | None] = "Trainer and documents"

    target: Annotated[Text, Option(argument=True)] = Field(
        description="Function that makes the trainer, as module:function or file.py:function. It takes the documents "
        "(lists of token ids) or nothing. It returns one of three: a transformers Trainer (TRL's SFTTrainer is one); "
        "a pair (model, step), where step() runs one forward and backward pass; the losses of the documents."
    )
    config: Text | None = Field(
        None,
        description="Checkpoint whose config states RoPE and windows. Default: the config of the model in memory.",
    )
    documents: Annotated[Count, COMMON] = Field(
        8, ge=2, le=1024, description="Number of documents to train on, all of different lengths."
    )
    length: Annotated[Length, COMMON] = Field(
        16,
        ge=8,
        description="Length of the longest document, in tokens. A sliding window is checked only if it is shorter.",
    )
    tokens: Count = Field(16, ge=2, description="Number of tokens of a document to perturb, one at a time.")
    first_token: Count = Field(
        10,
        ge=0,
        description="Smallest token id of the documents; the ids that follow it must not be special tokens.",
    )
