"""The figure of a training run's loss, and of how evenly a mixture of experts is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures.primitives import Axis, Figure, Floats, Line, Look, Mark, Panel, Rule
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
    marks: list[Mark]
    told = "Training loss of each step"
    if len(loss) >= SMOOTHED_POINTS:
        window = max(5, len(loss) // 25)
        marks = [
            Line(x, loss, Look(GREY, width=0.8), "each step", order=2),
            Line(x, _running_mean(loss, window), Look(BLUE, width=2), f"mean of {window}"),
        ]
        told += f", and the mean over the last {window} steps"
    else:
        marks = [Line(x, loss, Look(BLUE, "-", "o", width=1.6, size=3))]
    stages = [line.get("stage") for line in metrics]
    changes = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    marks += [Rule((x[at - 1] + x[at]) / 2) for at in changes]
    told += "; dashed lines mark the start of a new stage" if changes else ""
    axis = Axis("optimizer step" if x_key is None else x_key, text=lambda value: f"{value:,.10g}")
    panels = [Panel(tuple(marks), axis, Axis("loss (nats per token)"), key=True)]
    if any("max_violation" in line for line in metrics):
        load = np.array([line.get("max_violation", math.nan) for line in metrics], np.float64)
        panels.append(Panel((Line(x, load, Look(BLUE, "-")),), axis, Axis("max violation")))
        told += "; below: excess load of the busiest expert relative to the mean load, in the least balanced layer"
    return Figure(tuple(panels), f"{told}.", title)


def _running_mean(values: Floats, window: int) -> Floats:
    """Mean of the finite values among the last ``window`` at each point; fewer values at the beginning."""
    # Differences of cumulative sums: one pass, however long the run.
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    with np.errstate(invalid="ignore"):
        means: Floats = sums / counts
    return means
