"""Per-operation ablation: the error of each step alone, by computing everything else in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import EXACT, Arithmetic
from ropewalk.audit.passes import LogitDifference, Pass, Runner, Term, differences, logit_difference, shifted
from ropewalk.audit.results import STEPS, StepAblation

ABLATED = ("none", *STEPS, "all")
"""The rows of an ablation: all in float64, each step alone in the audited arithmetic, and all of it."""


def ablation_arithmetic(step: str, audited: Arithmetic) -> Arithmetic:
    """The arithmetic of a row by its name in ``ABLATED``."""
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
        runner: of the model.
        rows: int64 ``[length]`` each.
        audited: the arithmetic to explain.
        shifts: delta1, tokens; near and far, since angles fail far away only.
        delta2: the shift compared with.

    Returns:
        A row for each of ``ABLATED`` and shift, means over rows.

    Raises:
        RopewalkError: if a shift is beyond the runner's ``total_length``.
    """
    sums = {(step, shift): Comparison() for shift in shifts for step in ABLATED}
    for row in rows:
        exact: dict[int, Pass] = {}
        for step in ABLATED:
            used = ablation_arithmetic(step, audited)
            found = run_shifts(runner, row, used, [*shifts, delta2])
            exact = exact or found
            changes = shift_changes(runner, found, shifts, delta2)
            for shift in shifts:
                sums[step, shift].add(runner, changes[shift], found[shift], found[delta2], exact[shift])
    return tuple(
        StepAblation(step, shift, delta2, total.D, total.logit_error, total.logit_difference, total.kl)
        for (step, shift), total in sums.items()
    )


def passes_of_ablation(shifts: Sequence[int], delta2: int, rows: int) -> int:
    """Forward passes that :func:`ablate_steps` makes."""
    return len(ABLATED) * len({*shifts, delta2}) * rows


def run_shifts(
    runner: Runner,
    row: Tensor,
    arithmetic: Arithmetic,
    shifts: Sequence[int],
    layout: PackedLayout | None = None,
) -> dict[int, Pass]:
    """A pass of a row at each of some shifts; a layout's positions move as it moves in a longer row."""
    found = {}
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
    """D between each shift and delta2; with passes in float64, less what changes in those."""
    wanted: dict[int, list[Term]] = {}
    for shift in shifts:
        wanted[shift] = [(1, found[shift]), (-1, found[delta2])]
        if exact is not None:
            wanted[shift] += [(-1, exact[shift]), (1, exact[delta2])]
    return {shift: change.D for shift, change in differences(runner, wanted).items()}


def moved(layout: PackedLayout, shift: int) -> Tensor:
    """Positions of a layout whose documents lie ``shift`` tokens further back in a longer row.

    The anchor stays at the row's start. Positions that restart in each document do not change at all.
    """
    positions = layout.position_ids.clone()
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
        """D of a row, its passes at delta1 and delta2, and the first in float64."""
        error = logit_difference(runner, exact, first)
        moved_by: LogitDifference = logit_difference(runner, second, first)
        self.rows += 1
        self.sum_D += D
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
