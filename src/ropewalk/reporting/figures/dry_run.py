"""The figure of a planned step's memory: what fills a GPU from the forward to the update."""

from __future__ import annotations

import numpy as np

from ropewalk.dry_run.memory import MOMENTS
from ropewalk.dry_run.run import PlannedRun, PlannedStage
from ropewalk.reporting import style
from ropewalk.reporting.figures.primitives import (
    Area,
    Axis,
    Figure,
    Line,
    Look,
    Mark,
    Note,
    Panel,
    Rule,
    series_fill,
)

BANDS = {
    "states": ("parameters", "gradients", "moments"),
    "gathered": ("gathered", "reduction"),
    "activations": ("activations",),
    "in work": ("logits", "working"),
}
"""Parts that the figure draws as one, from the bottom up."""


def memory_figure(result: PlannedRun) -> Figure:
    """Draw the memory of a GPU over the course of a step, one panel per stage."""
    panels = tuple(_panel(stage, first=number == 0) for number, stage in enumerate(result.stages))
    return Figure(
        panels,
        title=f"{result.model} on {result.ranks} x {result.device}: memory of a GPU during a step",
        caption="Memory of a GPU from the forward pass to the update, estimated by running the step without data. "
        "States: parameters, gradients and AdamW's moments; gathered: FSDP's buffers. The dashed line is the usable "
        "memory.",
        height=style.HEIGHT_INCHES * (1 if len(panels) == 1 else 0.7 * len(panels)),
        told=tuple(map(_told, result.stages)),
    )


def _told(stage: PlannedStage) -> str:
    """The highest memory of each moment of a step."""
    highest: dict[str, float] = {}
    for moment, parts in zip(stage.memory.course_moments, stage.memory.course, strict=True):
        highest[moment] = max(highest.get(moment, 0.0), sum(parts.values()) / 1e9)
    moments = ", ".join(
        f"{MOMENTS.get(moment, moment)} up to {most:.1f} GB" for moment, most in highest.items()
    )
    return f"stage {stage.number}, {stage.context:,} tokens: {moments}; usable: {stage.usable / 1e9:.0f} GB"


def _panel(stage: PlannedStage, first: bool) -> Panel:
    course = stage.memory.course
    x = np.arange(len(course), dtype=np.float64)
    low = np.zeros(len(course))
    marks: list[Mark] = []
    for number, (name, parts) in enumerate(BANDS.items()):
        high = low + np.array([sum(each[part] for part in parts) for each in course]) / 1e9
        marks.append(Area(x, low, high, series_fill(number, len(BANDS)), name))
        low = high
    marks.append(Line(x, low, Look(style.INK, width=1.2)))
    usable = stage.usable / 1e9
    # Room for the heading above the highest point.
    top = max(float(low.max()), usable) * 1.25
    marks.append(Rule(usable, "y", f"usable: {usable:.0f} GB", "above", dash="--"))
    # A step of several passes repeats its forward and backward, which are named once.
    begun: set[str] = set()
    for place, moment in enumerate(stage.memory.course_moments):
        if moment not in begun and moment in ("forward", "backward", "update"):
            marks.append(Note(MOMENTS[moment], float(place), 0.0, 3, 4, size=8, paper=True))
            begun.add(moment)
    return Panel(
        tuple(marks),
        Axis("course of the step", ticks=()),
        Axis("GB", limits=(0.0, top)),
        heading=(f"stage {stage.number}: {stage.context:,} tokens", stage.mesh),
        key=first,
    )
