"""How an audit is shown: its tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from ropewalk.audit.effective_frequencies import angle_error_with_turns
from ropewalk.audit.results import STEP_NAMES, Audit, AuditResult
from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures.audit import (
    ablation_figure,
    drift_figure,
    first_token_figure,
    heads_figure,
    lengths_figure,
    mitigations_figure,
    samples_figure,
    tokens_figure,
)
from ropewalk.reporting.primitives import Figure
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable

SHIFTED_NAMES = {"first": "the first token", "others": "all others", "all": "the whole row"}
STEP_LABELS = {
    "none": "none",
    "angles": "angles",
    "cos_sin": "cos and sin",
    "rotation": "rotation",
    "product": "q·k product",
    "softmax": "softmax",
    "rest": "rest of the model",
    "all": "all together",
}
"""The ablation's steps on an axis."""

HEADS = "How far attention drifts in each head, the darker the further; together they are D."


def describe_audit(result: AuditResult) -> Iterator[Part]:
    """What was found, in sentences, then all tables, and what is to be said of the model's RoPE."""
    yield from result.finding
    for table in audit_tables(result.audit):
        yield ""
        yield table
    yield from result.rope_findings


def audit_tables(found: Audit) -> list[ResultTable]:
    """Drift, ablation, first-token experiment, mitigations and frequencies, in this order."""
    return [_drift(found), _ablation(found), _first_token(found), _mitigations(found), _rope(found)]


def series_name(dtype: str, angles: str, parameters: str) -> str:
    """What a curve of the drift is called in tables and pictures."""
    name = dtype + (", exact angles" if angles == "exact" else "")
    return f"{name}, random weights" if parameters == "random" else name


def _drift(found: Audit) -> ResultTable:
    shifts = list(dict.fromkeys(drift.delta1 for drift in found.drift))
    rows: dict[str, dict[int, str]] = {}
    for drift in found.drift:
        name = series_name(drift.dtype, drift.angles, drift.parameters)
        rows.setdefault(name, {})[drift.delta1] = _figure(drift.D)
    delta2 = found.drift[0].delta2
    return ResultTable(
        f"D between a shift and {delta2:,}: how the attention that tokens receive changes, summed over tokens, "
        f"heads and layers; mean over {_rows(found.samples)}",
        ("arithmetic", *(f"{shift:,}" for shift in shifts)),
        tuple((name, *(cells[shift] for shift in shifts)) for name, cells in rows.items()),
    )


def _ablation(found: Audit) -> ResultTable:
    shifts = list(dict.fromkeys(row.delta1 for row in found.ablation))
    near, steps = shifts[0], list(dict.fromkeys(row.step for row in found.ablation))
    by = {(row.step, row.delta1): row for row in found.ablation}
    return ResultTable(
        f"Each step in {found.dtype} by itself, everything else in float64; {_rows(found.ablation_samples)}",
        ("step", *(f"D at {shift:,}" for shift in shifts), "logit error", "logit difference", "KL (nats)"),
        tuple(
            (
                STEP_NAMES[step],
                *(_figure(by[step, shift].D) for shift in shifts),
                _figure(by[step, near].logit_error),
                _figure(by[step, near].logit_difference),
                _figure(by[step, near].kl),
            )
            for step in steps
        ),
    )


def _first_token(found: Audit) -> ResultTable:
    one = found.first_token[0]
    return ResultTable(
        f"Tokens moved from {one.delta1:,} to {one.delta2:,} in {found.dtype}, what float64 changes too being the "
        "true effect; then only these tokens rounded while the whole row moves, and the share that explains",
        ("tokens", "D moved", "in float64", "by arithmetic", "D rounded", "share", "logits rounded", "share"),
        tuple(
            (
                SHIFTED_NAMES[effect.shifted],
                _figure(effect.D),
                _figure(effect.D_exact),
                _figure(effect.D_arithmetic),
                _figure(effect.D_rounding),
                _percent(effect.share_of_D),
                _figure(effect.logit_rounding),
                _percent(effect.share_of_logits),
            )
            for effect in found.first_token
        ),
    )


def _mitigations(found: Audit) -> ResultTable:
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
                _figure(mitigation.D),
                *([_figure(mitigation.far_D)] if far else []),
                _figure(mitigation.logit_error),
                _figure(mitigation.kl),
                ratio(mitigation.time_ratio),
                ratio(mitigation.memory_ratio),
            )
            for mitigation in found.mitigations
        ),
    )


def _rope(found: Audit) -> ResultTable:
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
                _figure(stage.frequency_error),
                _figure(angle_error_with_turns(stage, config[stage.layer_type])),
            )
            for stage in found.rope
        ),
        text_columns=3,
    )


def _figure(value: float) -> str:
    """Three significant digits; NaN says that arithmetic overflowed."""
    if math.isnan(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def draw_audit(found: Audit, folder: Path, name: str) -> tuple[list[Path], list[str]]:
    """Draw all pictures of an audit of the model ``name`` into a folder.

    Returns:
        The files in the order to look at them, and a sentence for each picture that could not be drawn: where a dtype
        overflows there is nothing to see.
    """
    # Imported here, for matplotlib takes a second.
    from ropewalk.reporting.drawing import draw

    folder.mkdir(parents=True, exist_ok=True)
    drawn, left_out = [], []
    for part, figure in _figures(found, name).items():
        path = folder / f"{part}.png"
        try:
            draw(figure(), path)
        except RopewalkError as error:
            left_out.append(f"{path.name} was not drawn: {error}")
        else:
            drawn.append(path)
    return drawn, left_out


def _figures(found: Audit, name: str) -> dict[str, Callable[[], Figure]]:
    low, tokens = found.dtype, f"{found.length:,} tokens"
    near, delta2 = found.near, found.delta2
    pair = f"between shifts of {near:,} and {delta2:,}"
    audited = [d for d in found.drift if (d.dtype, d.angles, d.parameters) == (low, "model", "pretrained")]
    curves = [
        [(drift.delta1, value) for drift, value in zip(audited, row, strict=True)]
        for row in zip(*(drift.per_sample for drift in audited), strict=True)
    ]
    lengths = {
        series_name(dtype, angles, "pretrained"): [
            (p.length, p.D, p.mean_logit_difference)
            for p in found.lengths
            if (p.dtype, p.angles) == (dtype, angles)
        ]
        for dtype, angles in dict.fromkeys((point.dtype, point.angles) for point in found.lengths)
    }
    effects = [(SHIFTED_NAMES[e.shifted], e.D, e.D_exact, e.D_arithmetic) for e in found.first_token]
    sweep = [(point.delta1, point.delta2, point.D) for point in found.sweep]
    shifts = list(dict.fromkeys(row.delta1 for row in found.ablation))
    by = {(row.step, row.delta1): row.D for row in found.ablation}
    ablations = [(label, [by[step, shift] for shift in shifts]) for step, label in STEP_LABELS.items()]
    # What the others are compared with first.
    mitigations = [
        (mitigation.name, mitigation.D, mitigation.far_D, mitigation.time_ratio)
        for mitigation in sorted(
            found.mitigations, key=lambda mitigation: mitigation.name != "fused attention"
        )
    ]
    return {
        "drift": lambda: drift_figure(
            _series(found), f"{name}: drift when a row of {tokens} is moved (Δ₂ = {delta2:,})"
        ),
        "samples": lambda: samples_figure(
            curves, sweep, f"{name}: {low}, row by row, and against other shifts"
        ),
        "tokens": lambda: tokens_figure(
            found.per_token, found.sink.index, f"{name}: {low}, each token's part of D {pair}"
        ),
        "lengths": lambda: lengths_figure(lengths, f"{name}: differences {pair} against length"),
        "heads": lambda: heads_figure(found.heads, f"{name}: {low}, D of each head {pair}", HEADS),
        "first-token": lambda: first_token_figure(
            effects, f"{name}: {low}, moving a part of the row from {near:,} to {delta2:,}"
        ),
        "ablation": lambda: ablation_figure(
            ablations,
            [f"Δ₁ = {shift:,}" for shift in shifts],
            f"{name}: D of each step in {low} by itself (Δ₂ = {delta2:,})",
        ),
        "mitigations": lambda: mitigations_figure(
            mitigations,
            f"{name}: mitigations of drift in {low} (near: {near:,}, far: {found.far:,}; Δ₂ = {delta2:,})",
        ),
    }


def _series(found: Audit) -> dict[str, list[tuple[int, float, float, float]]]:
    """Curves of the drift by name, those of the random control in the audited dtype alone: they crowd each other."""
    series: dict[str, list[tuple[int, float, float, float]]] = {}
    for drift in found.drift:
        if drift.parameters == "random" and (drift.dtype, drift.angles) != (found.dtype, "model"):
            continue
        name = series_name(drift.dtype, drift.angles, drift.parameters)
        series.setdefault(name, []).append((drift.delta1, drift.D, *drift.ci95))
    return series
