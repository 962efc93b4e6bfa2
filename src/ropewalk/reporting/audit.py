"""Show an audit: tables, figures and terminal output."""

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
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.tables import Part, ResultTable

SHIFTED_NAMES = {"first": "first token", "others": "all other tokens", "all": "whole sequence"}
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
"""Labels of the ablation's operations in figures."""

HEADS = "Attention difference of each head; darker is larger. The sum over all heads is D."


def describe_audit(result: AuditResult) -> Iterator[Part]:
    """The findings in sentences, all tables, and remarks on the model's RoPE."""
    yield from result.finding
    for table in audit_tables(result.audit):
        yield ""
        yield table
    yield from result.rope_findings


def audit_tables(found: Audit) -> list[ResultTable]:
    """Tables of the drift, ablation, first-token experiment, mitigations and frequencies, in this order."""
    return [_drift(found), _ablation(found), _first_token(found), _mitigations(found), _rope(found)]


def series_name(dtype: str, angles: str, parameters: str) -> str:
    """Name of a drift curve in tables and figures."""
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
        f"Attention difference D between a shift of Δ₁ (columns) and one of {delta2:,} tokens, summed over tokens, "
        f"heads and layers; mean over {_rows(found.samples)}",
        ("arithmetic", *(f"{shift:,}" for shift in shifts)),
        tuple((name, *(cells[shift] for shift in shifts)) for name, cells in rows.items()),
    )


def _ablation(found: Audit) -> ResultTable:
    shifts = list(dict.fromkeys(row.delta1 for row in found.ablation))
    # The table has one group of logit columns only, so it shows those of the first shift.
    near, steps = shifts[0], list(dict.fromkeys(row.step for row in found.ablation))
    by = {(row.step, row.delta1): row for row in found.ablation}
    return ResultTable(
        f"Ablation: one operation in {found.dtype}, everything else in float64; {_rows(found.ablation_samples)}",
        (
            "operation",
            *(f"D at {shift:,}" for shift in shifts),
            "logit error",
            "logit difference",
            "KL (nats)",
        ),
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
        f"Tokens shifted from {one.delta1:,} to {one.delta2:,} in {found.dtype} and in float64 (the true effect)",
        ("tokens", "D shifted", "in float64", "by rounding", "D rounded", "share", "logits rounded", "share"),
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
        notes=(
            "rounded: the whole sequence shifts and only these tokens are rounded; share: relative to rounding all",
        ),
    )


def _mitigations(found: Audit) -> ResultTable:
    far = found.far != found.near
    return ResultTable(
        f"Mitigations in {found.dtype}",
        (
            "mitigation",
            f"D at {found.near:,}",
            *([f"D at {found.far:,}"] if far else []),
            "logit error",
            "KL (nats)",
        ),
        tuple(
            (
                mitigation.name,
                _figure(mitigation.D),
                *([_figure(mitigation.far_D)] if far else []),
                _figure(mitigation.logit_error),
                _figure(mitigation.kl),
            )
            for mitigation in found.mitigations
        ),
        notes=(_OTHER_LAYOUTS,),
    )


_OTHER_LAYOUTS = (
    "anchor layout and positions reset change which tokens attend to each other, so their D is not comparable with "
    "the others: it is a sum over fewer keys, and in the anchor layout a shift changes every document's distance to "
    "the anchor, and so the rounding of its attention"
)
"""Why D of a layout may exceed that of fused attention; docs/precision.md says how it is computed."""


def _rope(found: Audit) -> ResultTable:
    position = found.rope[0].position
    # A model may have several RoPEs, each with a config of its own to compare with.
    config = {stage.layer_type: stage for stage in found.rope if stage.stage == "config"}
    return ResultTable(
        f"Difference between the RoPE that the model runs and its config; angles up to position {position:,}",
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
    """Format with three significant digits. NaN means that the arithmetic overflowed."""
    if math.isnan(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _rows(count: int) -> str:
    return f"{count} sequence{'s' if count > 1 else ''}"


def draw_audit(found: Audit, folder: Path, name: str) -> tuple[list[Path], list[str]]:
    """Draw all figures of an audit of the model ``name`` into a folder.

    Returns:
        The files in reading order, and one sentence for each figure that could not be drawn, for example because a
        dtype overflowed.
    """
    # Imported here because matplotlib takes a second to import.
    from ropewalk.reporting.figures.drawing import draw

    folder.mkdir(parents=True, exist_ok=True)
    plotted, left_out = [], []
    for part, figure in _figures(found, name).items():
        path = folder / f"{part}.png"
        try:
            draw(figure(), path)
        # An audit takes minutes and its numbers are already safe, so a figure that fails is named and not fatal.
        except RopewalkError as error:
            left_out.append(f"{path.name} was not drawn: {error}")
        else:
            plotted.append(path)
    return plotted, left_out


def _figures(found: Audit, name: str) -> dict[str, Callable[[], Figure]]:
    low, tokens = found.dtype, f"{found.length:,} tokens"
    near, delta2 = found.near, found.delta2
    pair = f"between shifts of {near:,} and {delta2:,}"
    audited = [d for d in found.drift if (d.dtype, d.angles, d.parameters) == (low, "model", "pretrained")]
    # Transposed: per_sample has a value for each sequence, a curve has one for each shift.
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
    # The baseline comes first.
    mitigations = [
        (mitigation.name, mitigation.D, mitigation.far_D)
        for mitigation in sorted(
            found.mitigations, key=lambda mitigation: mitigation.name != "fused attention"
        )
    ]
    # Built one at a time by the caller, so that one without values does not prevent the others.
    return {
        "drift": lambda: drift_figure(
            _series(found), f"{name}: attention drift when a sequence of {tokens} shifts (Δ₂ = {delta2:,})"
        ),
        "samples": lambda: samples_figure(
            curves, sweep, f"{name}: {low}, by sequence and by second shift Δ₂"
        ),
        "tokens": lambda: tokens_figure(
            found.per_token, found.sink.index, f"{name}: {low}, contribution of each token to D {pair}"
        ),
        "lengths": lambda: lengths_figure(lengths, f"{name}: differences {pair} by sequence length"),
        "heads": lambda: heads_figure(found.heads, f"{name}: {low}, D of each head {pair}", HEADS),
        "first-token": lambda: first_token_figure(
            effects, f"{name}: {low}, shifting part of the sequence from {near:,} to {delta2:,}"
        ),
        "ablation": lambda: ablation_figure(
            ablations,
            [f"Δ₁ = {shift:,}" for shift in shifts],
            f"{name}: D with one operation in {low} (Δ₂ = {delta2:,})",
        ),
        "mitigations": lambda: mitigations_figure(
            mitigations,
            f"{name}: mitigations of drift in {low} (near: {near:,}, far: {found.far:,}; Δ₂ = {delta2:,})",
        ),
    }


def _series(found: Audit) -> dict[str, list[tuple[int, float, float, float]]]:
    """Drift curves by name. The random control is shown only in the audited dtype, because the curves overlap."""
    series: dict[str, list[tuple[int, float, float, float]]] = {}
    for drift in found.drift:
        if drift.parameters == "random" and (drift.dtype, drift.angles) != (found.dtype, "model"):
            continue
        name = series_name(drift.dtype, drift.angles, drift.parameters)
        series.setdefault(name, []).append((drift.delta1, drift.D, *drift.ci95))
    return series
