"""What ``verify`` is asked for."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ropewalk.io.settings import Count, Length, Option, Overrides, Settings


class VerifySettings(Settings):
    """A recipe, and how much of its model and rows is verified."""

    group: ClassVar[str | None] = "What to verify"

    recipe: Annotated[str, Option(argument=True)] = Field(
        "demo", description="A recipe in YAML, or the name of a shipped one (demo)."
    )
    overrides: Overrides = Field(
        (), description="Change a key of the recipe: stages.0.context=32k; may be given again."
    )
    layers: Count | None = Field(
        None, ge=1, description="Verify the model's first layers alone; all of them if not given."
    )
    rows: Count = Field(4, ge=2, description="Packed rows to verify on, at least one for each rank.")
    length: Length | None = Field(
        None,
        description="Tokens of a row; the first stage's context, or less for a large model, if not given.",
    )
    ranks: Count = Field(
        2, ge=2, description="Processes to start on this machine; under torchrun its own are used."
    )
