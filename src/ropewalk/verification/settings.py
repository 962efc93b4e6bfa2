"""Settings of ``ropewalk verify``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ropewalk.io.settings import COMMON, Count, Length, Option, Overrides, Settings


class VerifySettings(Settings):
    """The recipe to verify, and how much of its model and rows to use."""

    group: ClassVar[str | None] = "Model, rows and processes"

    recipe: Annotated[str, Option(argument=True)] = Field(
        "demo", description="Recipe file (YAML), or the name of a recipe that ropewalk ships, such as demo."
    )
    overrides: Annotated[Overrides, COMMON] = Field(
        (), description="Override a key of the recipe, such as stages.0.context=32k. May be repeated."
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
