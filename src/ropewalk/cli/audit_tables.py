"""The tables of an audit for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ropewalk.audit.results import STEP_NAMES

if TYPE_CHECKING:
    from ropewalk.audit import Audit
    from ropewalk.reporting import ResultTable

SHIFTED_NAMES = {"first": "the first token", "others": "all others", "all": "the whole row"}


def tables(found: Audit) -> list[ResultTable]:
    """Drift, ablation, first-token experiment, mitigations and frequencies, in this order."""
    return [_drift(found), _ladder(found), _first_token(found), _mitigations(found), _rope(found)]


def series_name(dtype: str, angles: str, parameters: str) -> str:
    """What a curve of the drift is called in tables and pictures."""
    name = dtype + (", exact angles" if angles == "exact" else "")
    return f"{name}, random weights" if parameters == "random" else name


def _drift(found: Audit) -> ResultTable:
    from ropewalk.reporting import ResultTable

    shifts = list(dict.fromkeys(drift.delta1 for drift in found.drift))
    rows: dict[str, dict[int, str]] = {}
    for drift in found.drift:
        name = series_name(drift.dtype, drift.angles, drift.parameters)
        rows.setdefault(name, {})[drift.delta1] = figure(drift.D)
    delta2 = found.drift[0].delta2
    return ResultTable(
        f"D between a shift and {delta2:,}: how the attention that tokens receive changes, summed over tokens, "
        f"heads and layers; mean over {_rows(found.samples)}",
        ("arithmetic", *(f"{shift:,}" for shift in shifts)),
        tuple((name, *(cells[shift] for shift in shifts)) for name, cells in rows.items()),
    )


def _ladder(found: Audit) -> ResultTable:
    from ropewalk.reporting import ResultTable

    shifts = list(dict.fromkeys(row.delta1 for row in found.ablation))
    near, steps = shifts[0], list(dict.fromkeys(row.step for row in found.ablation))
    by = {(row.step, row.delta1): row for row in found.ablation}
    return ResultTable(
        f"Each step in {found.dtype} by itself, everything else in float64; {_rows(found.ablation_samples)}",
        ("step", *(f"D at {shift:,}" for shift in shifts), "logit error", "logit difference", "KL (nats)"),
        tuple(
            (
                STEP_NAMES[step],
                *(figure(by[step, shift].D) for shift in shifts),
                figure(by[step, near].logit_error),
                figure(by[step, near].logit_difference),
                figure(by[step, near].kl),
            )
            for step in steps
        ),
    )


def _first_token(found: Audit) -> ResultTable:
    from ropewalk.reporting import ResultTable

    one = found.first_token[0]
    return ResultTable(
        f"Tokens moved from {one.delta1:,} to {one.delta2:,} in {found.dtype}, what float64 changes too being the "
        "true effect; then only these tokens rounded while the whole row moves, and the share that explains",
        ("tokens", "D moved", "in float64", "by arithmetic", "D rounded", "share", "logits rounded", "share"),
        tuple(
            (
                SHIFTED_NAMES[effect.shifted],
                figure(effect.D),
                figure(effect.D_exact),
                figure(effect.D_arithmetic),
                figure(effect.D_rounding),
                _percent(effect.share_of_D),
                figure(effect.logit_rounding),
                _percent(effect.share_of_logits),
            )
            for effect in found.first_token
        ),
    )


def _mitigations(found: Audit) -> ResultTable:
    from ropewalk.reporting import ResultTable
    from ropewalk.reporting.style import MISSING

    def ratio(value: float | None) -> str:
        return MISSING if value is None else f"{value:.2f}x"

    by_reason: dict[str, list[str]] = {}
    for mitigation in found.mitigations:
        if mitigation.reason is not None:
            by_reason.setdefault(mitigation.reason, []).append(mitigation.name)
    # The same for all needs no names.
    reasons = [
        reason if len(names) == len(found.mitigations) else f"{', '.join(names)}: {reason}"
        for reason, names in by_reason.items()
    ]
    far = found.far != found.near
    return ResultTable(
        f"What mitigates {found.dtype}; time and memory of a forward pass over fused attention"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
        (
            "mitigation",
            f"D at {found.near:,}",
            *([f"D at {found.far:,}"] if far else []),
            "logit error",
            "KL (nats)",
            "time",
            "memory",
        ),
        tuple(
            (
                mitigation.name,
                figure(mitigation.D),
                *([figure(mitigation.far_D)] if far else []),
                figure(mitigation.logit_error),
                figure(mitigation.kl),
                ratio(mitigation.time_ratio),
                ratio(mitigation.memory_ratio),
            )
            for mitigation in found.mitigations
        ),
    )


def _rope(found: Audit) -> ResultTable:
    from ropewalk.audit import angle_error_with_turns
    from ropewalk.reporting import ResultTable

    position = found.rope[0].position
    config = {stage.layer_type: stage for stage in found.rope if stage.stage == "config"}
    return ResultTable(
        f"RoPE that the model runs with, against its config; angles up to position {position:,}",
        ("stage", "inv_freq in", "cos and sin in", "frequency error", "angle error (rad)"),
        tuple(
            (
                stage.stage + (f" ({stage.layer_type})" if stage.layer_type else ""),
                stage.dtype,
                stage.cos_sin_dtype,
                figure(stage.frequency_error),
                figure(angle_error_with_turns(stage, config[stage.layer_type])),
            )
            for stage in found.rope
        ),
        text_columns=3,
    )


def figure(value: float) -> str:
    """Three significant digits; NaN says that arithmetic overflowed."""
    if math.isnan(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"
