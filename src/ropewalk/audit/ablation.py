"""Per-operation ablation: run one step in the audited arithmetic and everything else in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import EXACT, Arithmetic
from ropewalk.audit.differences import Term, differences
from ropewalk.audit.passes import LogitDifference, Pass, Runner, logit_difference, shifted
from ropewalk.audit.results import STEPS, StepAblation

ABLATED = ("none", *STEPS, "all")
"""Rows of an ablation: everything in float64, each step alone in the audited arithmetic, and all steps in it."""


def ablation_arithmetic(step: str, audited: Arithmetic) -> Arithmetic:
    """The arithmetic of one row of the ablation, by its name in ``ABLATED``."""
    if step == "none":
        return EXACT
    return audited if step == "all" else EXACT.with_step(step, of=audited)


def ablate_steps(
    runner: Runner,
    rows: Sequence[Tensor],
    audited: Arithmetic,
    shifts: Sequence[int],
    delta2: int = 16,
) -> tuple[StepAblation, ...]:
    """D and the error of the logits with one step at a time in the audited arithmetic.

    Args:
        runner: runner of the model.
        rows: token ids, int64 ``[length]`` each.
        audited: arithmetic whose errors are to be explained.
        shifts: delta1 in tokens; include near and far ones, since angles fail only at large positions.
        delta2: the shift in tokens that all others are compared with.

    Returns:
        A row for each entry of ``ABLATED`` and each shift, with means over rows.

    Raises:
        RopewalkError: if a shift does not fit in the runner's ``total_length``.
    """
    sums = {(step, shift): Comparison() for shift in shifts for step in ABLATED}
    for row in rows:
        exact: dict[int, Pass] = {}
        for step in ABLATED:
            used = ablation_arithmetic(step, audited)
            found = run_shifts(runner, row, used, [*shifts, delta2])
            # ABLATED begins with "none", so the first passes of a row are the exact ones that the others are
            # compared with.
            exact = exact or found
            changes = shift_changes(runner, found, shifts, delta2)
            for shift in shifts:
                sums[step, shift].add(runner, changes[shift], found[shift], found[delta2], exact[shift])
            runner.advance()
    return tuple(
        StepAblation(step, shift, delta2, total.D, total.logit_error, total.logit_difference, total.kl)
        for (step, shift), total in sums.items()
    )


def run_shifts(
    runner: Runner,
    row: Tensor,
    arithmetic: Arithmetic,
    shifts: Sequence[int],
    layout: PackedLayout | None = None,
) -> dict[int, Pass]:
    """One pass of a row at each shift; a layout's positions move as they would in a longer row."""
    found = {}
    # delta2 may be one of the shifts; a single pass serves both.
    for shift in dict.fromkeys(shifts):
        position_ids = shifted(len(row), shift) if layout is None else moved(layout, shift)
        found[shift] = runner.run(row, arithmetic, position_ids, layout, keep=("hidden", "layers"))
    return found


def shift_changes(
    runner: Runner,
    found: Mapping[int, Pass],
    shifts: Sequence[int],
    delta2: int,
    exact: Mapping[int, Pass] | None = None,
) -> dict[int, float]:
    """D between each shift and delta2. With float64 passes given, their change is subtracted first."""
    wanted: dict[int, list[Term]] = {}
    for shift in shifts:
        wanted[shift] = [(1, found[shift]), (-1, found[delta2])]
        if exact is not None:
            wanted[shift] += [(-1, exact[shift]), (1, exact[delta2])]
    return {shift: change.D for shift, change in differences(runner, wanted).items()}


def moved(layout: PackedLayout, shift: int) -> Tensor:
    """Positions of a layout whose documents start ``shift`` tokens later in a longer row.

    The anchor stays at the start of the row. Positions that restart in each document do not change at all.
    """
    positions = layout.position_ids.clone()
    # Where positions restart, they fall from one document to the next.
    restarts = bool((positions[layout.anchor_length :].diff() <= 0).any())
    if not restarts:
        positions[layout.anchor_length :] += shift
    return positions


@dataclass
class Comparison:
    """Sums over rows of what :class:`StepAblation` and :class:`~ropewalk.audit.results.Mitigation` report."""

    rows: int = 0
    sum_D: float = 0.0
    sum_error: float = 0.0
    sum_difference: float = 0.0
    sum_kl: float = 0.0

    def add(self, runner: Runner, D: float, first: Pass, second: Pass, exact: Pass) -> None:
        """Add D of a row, its passes at delta1 and delta2, and its float64 pass at delta1."""
        error = logit_difference(runner, exact, first)
        moved_by: LogitDifference = logit_difference(runner, second, first)
        self.rows += 1
        self.sum_D += D
        # Root mean squares of rows are averaged as squares, as if the rows were one long row.
        self.sum_error += error.rms**2
        self.sum_difference += moved_by.rms**2
        self.sum_kl += error.kl

    @property
    def D(self) -> float:
        return self.sum_D / self.rows

    @property
    def logit_error(self) -> float:
        return math.sqrt(self.sum_error / self.rows)

    @property
    def logit_difference(self) -> float:
        return math.sqrt(self.sum_difference / self.rows)

    @property
    def kl(self) -> float:
        return self.sum_kl / self.rows
