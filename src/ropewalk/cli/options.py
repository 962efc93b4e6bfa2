"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from ropewalk.io.settings import FilePath, Length, Option

TargetLength = Annotated[Length, Option(name="--to"), Field(description="Target length: 131072, 128k, 1M.")]
JsonFlag = Annotated[
    bool, Field(description="Print the result as JSON on stdout, nothing else."), Option(name="--json")
]

Overrides = Annotated[
    tuple[str, ...],
    Option(name="--set", metavar="KEY=VALUE", repeated=True),
    Field(description="Change a key of the recipe: stages.0.steps=20; may be given again."),
]
"""Changes of a recipe's keys."""


def _can_be_drawn(path: Path | None) -> Path | None:
    """Refuse a picture that could not be written, before the work."""
    if path is None:
        return None
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and must be a file")
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a figure is written as .png or .svg, got {path}")
    return path


PlotFile = Annotated[
    FilePath | None,
    AfterValidator(_can_be_drawn),
    Field(description="Draw a picture into FILE (.png or .svg)."),
    Option(metavar="FILE"),
]
