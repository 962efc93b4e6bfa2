"""The figure of a training run's loss, and of how evenly a mixture of experts is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures.drawing import Figure, canvas, complete, look, rule, scale
from ropewalk.reporting.figures.prepare import Floats, tell
from ropewalk.reporting.style import BLUE, GREY

SMOOTHED_POINTS = 50
"""Smallest number of steps for which the figure also shows a running mean."""


def training_figure(
    metrics: Sequence[Mapping[str, Any]], title: str = "", x_key: str | None = None
) -> Figure:
    """Draw the training loss over steps or another running quantity, with a running mean for long runs.

    Args:
        metrics: one mapping per step in order, with ``loss`` in nats per token (None or NaN leaves a gap) and
            optionally ``stage``. A change of stage is marked. If steps have ``max_violation``, a second panel shows it.
        title: title above the panel.
        x_key: key of the horizontal axis, such as a running count of tokens. None for steps from 1.

    Raises:
        RopewalkError: if no step has a finite loss.
    """
    loss = np.array([math.nan if line.get("loss") is None else float(line["loss"]) for line in metrics])
    loss[~np.isfinite(loss)] = math.nan
    if not np.isfinite(loss).any():
        raise RopewalkError("there is no finite training loss to draw")
    x = np.array([n if x_key is None else line[x_key] for n, line in enumerate(metrics, start=1)], np.float64)
    load = None
    if any("max_violation" in line for line in metrics):
        load = np.array([line.get("max_violation", math.nan) for line in metrics], np.float64)
    panels = canvas(1 if load is None else 2)
    axes = panels[0]
    for each, words in zip(panels, ("loss (nats per token)", "max violation"), strict=False):
        # Ten digits show any step or count of tokens exactly.
        scale(each.xaxis, x_key or "optimizer step", text=lambda value: f"{value:,.10g}")
        scale(each.yaxis, words)
    caption = "Training loss of each step"
    if len(loss) >= SMOOTHED_POINTS:
        # About 4 % of the run, but never fewer than 5 steps.
        window = max(5, len(loss) // 25)
        axes.plot(x, loss, label="each step", **look(GREY, width=0.8, order=2))
        axes.plot(x, _running_mean(loss, window), label=f"mean of {window}", **look(width=2))
        caption += f", and the mean over the last {window} steps"
    else:
        axes.plot(x, loss, **look(BLUE, "-", "o", width=1.6, size=3))
    stages = [line.get("stage") for line in metrics]
    changes = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    for at in changes:
        # Between the last step of one stage and the first of the next, since it belongs to neither.
        rule(axes, (x[at - 1] + x[at]) / 2)
    caption += "; dashed lines mark the start of a new stage" if changes else ""
    if load is not None:
        panels[1].plot(x, load, **look())
        caption += "; below: excess load of the busiest expert relative to the mean load, in the least balanced layer"

    def place(at: float) -> str:
        return f"{'step ' if x_key is None else ''}{at:,.10g}{'' if x_key is None else f' {x_key}'}"

    told = (
        tell("loss", x, loss, place),
        *(f"stage {stages[at]} from {place(x[at])}" for at in changes),
        *((tell("max violation", x, load, place),) if load is not None else ()),
    )
    return complete(panels, title, f"{caption}.", told, keys=[axes])


def _running_mean(values: Floats, window: int) -> Floats:
    """Mean of the finite values among the last ``window`` at each point; fewer values at the beginning."""
    # Differences of cumulative sums: one pass, however long the run.
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    # Copies, because the slices overlap in memory.
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    # 0 / 0 where no value is finite yet.
    with np.errstate(invalid="ignore"):
        means: Floats = sums / counts
    return means
