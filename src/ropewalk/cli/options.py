"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import AfterValidator, Field

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import FilePath, Length, Option

TargetLength = Annotated[Length, Option(name="--to"), Field(description="Target length: 131072, 128k, 1M.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture into FILE (.png or .svg).")
]

JsonFlag = Annotated[
    bool, Field(description="Print the result as JSON on stdout, nothing else."), Option(name="--json")
]

Overrides = Annotated[
    tuple[str, ...],
    Option(name="--set", metavar="KEY=VALUE", repeated=True),
    Field(description="Change a key of the recipe: stages.0.steps=20; may be given again."),
]
"""Changes of a recipe's keys."""


def check_plot(path: Path | None) -> None:
    """Refuse a picture that could not be written, before the work."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise RopewalkError(f"a figure is written as .png or .svg, got {path.name}")
    if path.is_dir():
        raise RopewalkError(f"{path} is a folder; --plot names a file")


def _checked(path: Path | None) -> Path | None:
    check_plot(path)
    return path


PlotFile = Annotated[
    FilePath | None,
    AfterValidator(_checked),
    Field(description="Draw a picture into FILE (.png or .svg)."),
    Option(metavar="FILE"),
]
