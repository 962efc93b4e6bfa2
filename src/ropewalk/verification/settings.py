"""Settings of ``ropewalk verify`` and ``ropewalk probe-trainer``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ropewalk.io.settings import COMMON, RECIPE_NAME, Count, Length, Option, Overrides, Settings, Text


class VerifySettings(Settings):
    """The recipe to verify, and how much of its model and rows to use."""

    group: ClassVar[str | None] = "Model, rows and processes"

    recipe: Annotated[str, Option(argument=True)] = Field(default="demo", description=f"{RECIPE_NAME}.")
    overrides: Annotated[Overrides, COMMON] = ()
    layers: Annotated[Count | None, COMMON] = Field(
        default=None, ge=1, description="Number of layers to verify, from the first one. Default: all layers."
    )
    rows: Count = Field(
        default=4,
        ge=2,
        description="Number of packed sequences to verify on, rounded up to a multiple of the number of processes.",
    )
    length: Annotated[Length | None, COMMON] = Field(
        default=None,
        description="Sequence length in tokens: 4096 or 4k. Default: the context length of the recipe's first stage, "
        "or less if the verification would take long.",
    )
    ranks: Count = Field(
        default=2,
        ge=2,
        description="Number of processes to start on this machine. Ignored under torchrun, which starts the processes.",
    )


class TrainerProbeSettings(Settings):
    """The trainer to probe, and the documents it is given."""

    group: ClassVar[str | None] = "Trainer and documents"

    target: Annotated[Text, Option(argument=True)] = Field(
        description="Function to probe: module:function or file.py:function. It takes the documents (lists of token "
        "ids). It returns one of: a transformers Trainer (TRL's SFTTrainer is one); a pair (model, step), where "
        "step() runs the forward and backward passes of one optimizer step; a list with the loss of each document; "
        "or a list with the token losses of each document. A function that returns a Trainer need not take the "
        "documents: if it has no argument, the probe replaces the Trainer's data set with the documents."
    )
    config: Text | None = Field(
        default=None,
        description="Checkpoint whose config states the correct RoPE and sliding windows. Default: the config of the "
        "trainer's model.",
    )
    documents: Annotated[Count, COMMON] = Field(
        default=8,
        ge=2,
        le=1024,
        description="Number of generated documents, of different lengths, to train on.",
    )
    length: Annotated[Length, COMMON] = Field(
        default=16,
        ge=8,
        description="Length of the longest document in tokens. Only sliding windows shorter than this are checked.",
    )
    tokens: Count = Field(
        default=16, ge=2, description="Maximum number of tokens to change in each document, one at a time."
    )
    first_token: Count = Field(
        default=10,
        ge=0,
        description="Smallest token id in the documents. The documents use consecutive ids from this one on, and no "
        "id twice, so they need up to --documents times --length ids. None of these may be a special token.",
    )
