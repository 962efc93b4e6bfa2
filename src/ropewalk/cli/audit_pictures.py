"""The pictures of an audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.cli.audit_tables import SHIFTED_NAMES, series_name
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.audit import Audit
    from ropewalk.reporting import Figure

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


def draw(found: Audit, folder: Path, name: str) -> tuple[list[Path], list[str]]:
    """Draw all pictures of an audit of the model ``name`` into a folder.

    Returns:
        The files in the order to look at them, and a sentence for each picture that could not be drawn: where a dtype
        overflows there is nothing to see.
    """
    from ropewalk.reporting import draw as draw_figure

    folder.mkdir(parents=True, exist_ok=True)
    drawn, left_out = [], []
    for part, figure in _figures(found, name).items():
        path = folder / f"{part}.png"
        try:
            draw_figure(figure(), path)
        except RopewalkError as error:
            left_out.append(f"{path.name} was not drawn: {error}")
        else:
            drawn.append(path)
    return drawn, left_out


def _figures(found: Audit, name: str) -> dict[str, Callable[[], Figure]]:
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
