"""The drift: how far attention changes when a row moves to other positions although relative positions stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
import torch
from torch import Tensor

from ropewalk.audit.arithmetic import DTYPES, Angles, Arithmetic
from ropewalk.audit.differences import (
    AttentionDifference,
    attention_sink,
    differences,
    logit_differences,
    mean_sink,
)
from ropewalk.audit.passes import Pass, Runner, shifted
from ropewalk.audit.results import Drift, LengthPoint, Parameters, Sink, SweepPoint
from ropewalk.audit.settings import check_shifts
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import ratio_interval

SWEEP_ROWS = 4
"""Rows for which D is computed between every two shifts; the number of differences grows quadratically."""

SHIFTS_AT_ONCE = 4
"""Number of shifts whose attention is computed together; delta2 is computed once for all of them. Their queries and
keys stay in memory until then: five float32 passes need about as much as the eight bfloat16 passes of a sweep."""

SHORTEST_CUT = 32
"""Shortest row in tokens for which D is reported; shorter rows have too few queries."""


@dataclass(frozen=True)
class Series:
    """One curve of the drift.

    Attributes:
        dtype: name of the dtype in which the model runs as transformers runs it.
        angles: ``model`` for the model's own rotary module, ``exact`` for float64 angles instead.

    Raises:
        RopewalkError: if the dtype is unknown.
    """

    dtype: str
    angles: Angles = "model"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise RopewalkError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class DriftFindings:
    """The drift of one model.

    Attributes:
        drift: one value for each series and shift.
        lengths: D by row length for each series, between the first shift and delta2.
        sweep: D of the first series between every two shifts.
        per_token: each token's part of D between the first shift and delta2; mean over rows.
        heads: each head's part of D, by layer and head.
        sink: attention sink of the last series.
    """

    drift: tuple[Drift, ...]
    lengths: tuple[LengthPoint, ...]
    sweep: tuple[SweepPoint, ...]
    per_token: tuple[float, ...]
    heads: tuple[tuple[float, ...], ...]
    sink: Sink


def cut_lengths(length: int) -> tuple[int, ...]:
    """Powers of two from 32 up to the length of the row, and that length itself."""
    powers = [2**n for n in range(SHORTEST_CUT.bit_length() - 1, length.bit_length()) if 2**n < length]
    return (*powers, length)


def measure_drift(
    runner: Runner,
    rows: Sequence[Tensor],
    series: Sequence[Series],
    shifts: Sequence[int],
    delta2: int = 16,
    parameters: Parameters = "pretrained",
) -> DriftFindings:
    """Measure D between each shift and ``delta2``.

    Args:
        runner: runner of the model.
        rows: token ids, int64 ``[length]`` each, all of the same length.
        series: dtypes and angles, most interesting first.
        shifts: positions of the first token in tokens; all different.
        delta2: the shift in tokens that all others are compared with.
        parameters: label of the results: pretrained or randomly initialised.

    Returns:
        Values over all rows; see :class:`DriftFindings`.

    Raises:
        EngineError: if the model's rotation is not supported, or the model cannot run in one of the dtypes.
        RopewalkError: if rows, series or shifts are missing, a shift is negative or repeated, or rows differ in
            length.
    """
    check_rows(rows)
    check_shifts(shifts, delta2)
    if not series:
        raise RopewalkError("an audit needs at least one dtype, such as bfloat16, got none")
    length = len(rows[0])
    cuts = cut_lengths(length)
    found: list[_Rows] = []
    for one in series:
        collected = _Rows(one, tuple(shifts), delta2)
        # Once per series, not per row: emulating the model's rotation takes two passes of its own.
        arithmetic = runner.stock(DTYPES[one.dtype], one.angles)
        for number, row in enumerate(rows):
            # The first few rows of the first series compare all pairs of shifts, other rows only each with delta2.
            collected.add(runner, row, arithmetic, cuts, not found and number < SWEEP_ROWS)
            runner.advance()
        found.append(collected)
    first = found[0]
    return DriftFindings(
        drift=tuple(d for one in found for d in one.drift(parameters)),
        lengths=tuple(point for one in found for point in one.length_points(cuts)),
        sweep=first.sweep(),
        per_token=tuple(torch.stack(first.tokens).mean(0).tolist()),
        heads=tuple(map(tuple, torch.stack(first.heads).mean(0).tolist())),
        # The widest arithmetic comes last, so its attention sink is the most accurate.
        sink=mean_sink(found[-1].sinks),
    )


def check_rows(rows: Sequence[Tensor]) -> None:
    """Raise if there are no rows, or rows of different lengths."""
    if not rows:
        raise RopewalkError("an audit needs at least one row, got none")
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise RopewalkError(
            f"all rows of an audit must have the same length, got lengths from {min(lengths)} to {max(lengths)} tokens"
        )
    if min(lengths) < 2:
        raise RopewalkError(f"a row needs 2 tokens or more, got {min(lengths)}")


class _Rows:
    """Numbers accumulated over the rows of one series. Keeping the attention of every row would fill the memory."""

    def __init__(self, series: Series, shifts: tuple[int, ...], delta2: int) -> None:
        self.series, self.shifts, self.delta2 = series, shifts, delta2
        self.every = sorted({*shifts, delta2})
        self.D: list[list[float]] = []
        self.moved: list[list[float]] = []
        self.shares: list[list[tuple[float, float]]] = []
        self.between: list[dict[tuple[int, int], float]] = []
        self.tokens: list[Tensor] = []
        self.heads: list[Tensor] = []
        self.by_length: list[tuple[list[float], list[float]]] = []
        self.sinks: list[Sink] = []

    def add(
        self,
        runner: Runner,
        row: Tensor,
        arithmetic: Arithmetic,
        cuts: tuple[int, ...],
        sweep: bool,
    ) -> None:
        def run(shift: int) -> Pass:
            return runner.run(row, arithmetic, shifted(len(row), shift), keep=("layers",))

        reference = run(self.delta2)
        sink = attention_sink(reference)
        changes: dict[int, AttentionDifference] = {}
        # A sweep compares every pass with every other, so all of them must be in memory together.
        size = len(self.shifts) if sweep else SHIFTS_AT_ONCE
        for some in (self.shifts[first : first + size] for first in range(0, len(self.shifts), size)):
            # delta2 is also compared with itself: the test that nothing differs is measured, not assumed.
            moved = {shift: run(shift) for shift in some}
            pairs = {(shift, self.delta2): (found, reference) for shift, found in moved.items()}
            if sweep:
                others = [shift for shift in some if shift != self.delta2]
                pairs |= {(a, b): (moved[a], moved[b]) for a, b in combinations(others, 2)}
            both = differences(
                runner, {pair: ((1, one), (-1, other)) for pair, (one, other) in pairs.items()}, cuts
            )
            changes |= {shift: both[shift, self.delta2] for shift in some}
            if self._near in some:
                # Only at the first shift: logits of every shift would take longer than the attention itself.
                at = logit_differences(moved[self._near], reference, cuts)
                self.by_length.append((changes[self._near].D_at, at))
            if sweep:
                # D is the same in both directions, so a pair is stored once.
                self.between.append({(min(pair), max(pair)): found.D for pair, found in both.items()})
        self.D.append([changes[shift].D for shift in self.shifts])
        self.moved.append([changes[shift].moved for shift in self.shifts])
        self.shares.append([(change.share_of(0), change.share_of(sink.index)) for change in changes.values()])
        self.tokens.append(changes[self._near].tokens)
        self.heads.append(changes[self._near].heads)
        self.sinks.append(sink)

    @property
    def _near(self) -> int:
        """The first shift other than delta2."""
        return next((shift for shift in self.shifts if shift != self.delta2), self.delta2)

    def drift(self, parameters: Parameters) -> list[Drift]:
        found = []
        for number, shift in enumerate(self.shifts):
            samples = [row[number] for row in self.D]
            first, sink = np.mean([row[number] for row in self.shares], axis=0)
            found.append(
                Drift(
                    dtype=self.series.dtype,
                    angles=self.series.angles,
                    parameters=parameters,
                    delta1=shift,
                    delta2=self.delta2,
                    D=float(np.mean(samples)),
                    ci95=ratio_interval(samples, at_least=0),
                    moved=float(np.mean([row[number] for row in self.moved])),
                    first_token_share=float(first),
                    sink_share=float(sink),
                    per_sample=tuple(samples),
                )
            )
        return found

    def length_points(self, cuts: tuple[int, ...]) -> list[LengthPoint]:
        D, D_logit = np.array(self.by_length).mean(0)
        heads = self.heads[0].numel()
        between = (self.series.dtype, self.series.angles, self._near, self.delta2)
        return [
            LengthPoint(*between, cut, float(D[n]), float(D_logit[n]), float(D_logit[n]) / heads)
            for n, cut in enumerate(cuts)
        ]

    def sweep(self) -> tuple[SweepPoint, ...]:
        return tuple(
            SweepPoint(a, b, float(np.mean([row[min(a, b), max(a, b)] for row in self.between])))
            # Both orders of a pair, so that a figure gets the full square.
            for a, b in permutations(self.every, 2)
        )
