"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from ropewalk.io.settings import Option, OutputFile

JsonFlag = Annotated[
    bool, Field(description="Print the result as JSON on stdout, nothing else."), Option(name="--json")
]


def _can_be_drawn(path: Path | None) -> Path | None:
    """Refuse a picture that could not be written, before the work."""
    if path is not None and path.suffix not in (".png", ".svg"):
        raise ValueError(f"a figure is written as .png or .svg, got {path}")
    return path


PlotFile = Annotated[
    OutputFile | None,
    AfterValidator(_can_be_drawn),
    Field(description="Draw a picture into FILE (.png or .svg)."),
]
