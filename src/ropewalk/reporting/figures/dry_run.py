"""The figure of a planned step's memory: what fills a GPU from the forward to the update."""

from __future__ import annotations

import numpy as np

from ropewalk.dry_run.run import PlannedRun, PlannedStage
from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    PAPER,
    Axes,
    Figure,
    canvas,
    complete,
    heading,
    look,
    note,
    rule,
    scale,
    series_area,
)
from ropewalk.training.simulation.memory import MOMENTS

BANDS = {
    "states": ("parameters", "gradients", "moments"),
    "gathered": ("gathered", "reduction"),
    "activations": ("activations",),
    "in work": ("logits", "working"),
}
"""Parts that the figure draws as one, from the bottom up."""


def memory_figure(result: PlannedRun) -> Figure:
    """Draw the memory of a GPU over the course of a step, one panel per stage."""
    count = len(result.stages)
    panels = canvas(count, height=style.HEIGHT_INCHES * (1 if count == 1 else 0.7 * count))
    for axes, stage in zip(panels, result.stages, strict=True):
        _draw_stage(axes, stage)
    caption = (
        "Memory of a GPU from the forward pass to the update, estimated by running the step without data. "
        "States: parameters, gradients and AdamW's moments; gathered: FSDP's buffers. The dashed line is the usable "
        "memory."
    )
    title = f"{result.model} on {result.ranks} x {result.device}: memory of a GPU during a step"
    return complete(panels, title, caption, map(_told, result.stages), keys=panels[:1])


def _told(stage: PlannedStage) -> str:
    """The highest memory of each moment of a step."""
    highest: dict[str, float] = {}
    for moment, parts in zip(stage.memory.course_moments, stage.memory.course, strict=True):
        highest[moment] = max(highest.get(moment, 0.0), sum(parts.values()) / 1e9)
    moments = ", ".join(
        f"{MOMENTS.get(moment, moment)} up to {most:.1f} GB" for moment, most in highest.items()
    )
    return f"stage {stage.number}, {stage.context:,} tokens: {moments}; usable: {stage.usable / 1e9:.0f} GB"


def _draw_stage(axes: Axes, stage: PlannedStage) -> None:
    course, usable = stage.memory.course, stage.usable / 1e9
    x = np.arange(len(course))
    highest = max(sum(parts.values()) for parts in course) / 1e9
    scale(axes.xaxis, "course of the step", ticks=())
    # Room for the heading above the highest point.
    scale(axes.yaxis, "GB", limits=(0.0, max(highest, usable) * 1.25))
    low = np.zeros(len(course))
    for number, (name, parts) in enumerate(BANDS.items()):
        high = low + np.array([sum(each[part] for part in parts) for each in course]) / 1e9
        options = {**series_area(number, len(BANDS)), "linewidth": 0}
        axes.fill_between(x, low, high, label=name, zorder=1, **options)
        low = high
    axes.plot(x, low, **look(style.INK, width=1.2))
    rule(axes, usable, f"usable: {usable:.0f} GB", "above", across=True, dash="--")
    # A step of several passes repeats its forward and backward, which are named once.
    begun: set[str] = set()
    for place, moment in enumerate(stage.memory.course_moments):
        if moment not in begun and moment in ("forward", "backward", "update"):
            note(axes, MOMENTS[moment], (place, 0.0), (3, 4), size=8, bbox=PAPER)
            begun.add(moment)
    heading(axes, f"stage {stage.number}: {stage.context:,} tokens", stage.mesh)
