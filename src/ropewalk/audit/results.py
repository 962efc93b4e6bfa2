"""Results of an audit: plain values with names and units. NaN means that there is no finite value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import Interval
from ropewalk.io.results import Result

Parameters = Literal["pretrained", "random"]
Shifted = Literal["first", "others", "all"]


@dataclass(frozen=True)
class Drift:
    """The attention difference D between two shifts of the same rows.

    Attributes:
        dtype: dtype of the model, run as transformers runs it.
        angles: ``model``: the model's own rotary module; ``exact``: float64 angles instead.
        parameters: the checkpoint's parameters, or those of a randomly initialised control.
        delta1, delta2: position of each row's first token, in tokens.
        D: equation 4: for each token, the change of the attention that it receives, averaged over the queries at or
            after it; summed over tokens, heads and layers, mean over rows.
        moved: share of all attention that moves to other tokens, 0 to 1; mean over queries, heads, layers and rows.
        ci95: Student's 95 % interval of D over rows; NaN for fewer than two rows.
        first_token_share: share of D that falls on the row's first token, 0 to 1.
        sink_share: the same for the token that receives most attention.
        per_sample: D of each row.
    """

    dtype: str
    angles: str
    parameters: Parameters
    delta1: int
    delta2: int
    D: float
    ci95: Interval
    moved: float
    first_token_share: float
    sink_share: float
    per_sample: tuple[float, ...]


@dataclass(frozen=True)
class LengthPoint:
    """Difference between two shifts for rows truncated at one length; mean over rows.

    Attributes:
        dtype, angles: as in :class:`Drift`.
        delta1, delta2: shifts, tokens.
        length: tokens of the truncated rows.
        D: attention difference of the truncated rows.
        D_logit: equation 5: absolute difference of the score (before softmax) that a query gives the first token;
            mean over queries, summed over layers and heads.
        mean_logit_difference: the same averaged over layers and heads too, so that models can be compared.
    """

    dtype: str
    angles: str
    delta1: int
    delta2: int
    length: int
    D: float
    D_logit: float
    mean_logit_difference: float


@dataclass(frozen=True)
class SweepPoint:
    """D between two shifts in the audited dtype; mean over rows."""

    delta1: int
    delta2: int
    D: float


@dataclass(frozen=True)
class Sink:
    """The token that receives most attention in exact arithmetic, and how much it receives.

    Attributes:
        index: index of the token in the row from 0, most frequent over rows.
        attention: attention that each row's sink receives, 0 to 1; mean over the queries that see it, layers, heads
            and rows.
        first_attention: the same for the first token.
        even_attention: attention that the first token would receive if every query attended evenly to what it sees.
        strongest_head: the largest mean attention that any head of any layer gives the first token, 0 to 1.
    """

    index: int
    attention: float
    first_attention: float
    even_attention: float
    strongest_head: float


@dataclass(frozen=True)
class FirstTokenEffect:
    """Effect of some tokens of a row on the drift: the effect of moving them and the effect of rounding them.

    Attributes:
        delta1, delta2: shift of the moved tokens before and after the move, in tokens.
        shifted: ``first``: only the first token; ``others``: all tokens but the first; ``all``: the whole row.
        D: attention difference between before and after the move in the audited dtype.
        D_exact: the same in float64; not zero if relative positions change.
        D_arithmetic: attention difference that the dtype adds to the float64 one.
        D_rounding: attention difference when the whole row moves and only these tokens' queries and keys are
            rotated and rounded as in the audited dtype, with everything else in float64.
        share_of_D: part of the whole row's D_rounding that they explain; ``first`` and ``others`` add up to 1.
        logit_difference, logit_exact, logit_arithmetic, logit_rounding, share_of_logits: the same for the logits,
            as root mean squares.
    """

    delta1: int
    delta2: int
    shifted: Shifted
    D: float
    D_exact: float
    D_arithmetic: float
    D_rounding: float
    share_of_D: float
    logit_difference: float
    logit_exact: float
    logit_arithmetic: float
    logit_rounding: float
    share_of_logits: float


@dataclass(frozen=True)
class StepAblation:
    """One step of the ablation: everything in float64 except this step.

    Attributes:
        step: name of the step; ``none`` has everything in float64, ``all`` is the audited arithmetic.
        delta1, delta2: shifts, in tokens.
        D: attention difference between them, mean over rows.
        logit_error: root mean square difference of the logits at delta1 from those in float64.
        logit_difference: the same between delta1 and delta2.
        kl: mean Kullback-Leibler divergence at delta1 from the prediction in float64, in nats per token.
    """

    step: str
    delta1: int
    delta2: int
    D: float
    logit_error: float
    logit_difference: float
    kl: float


@dataclass(frozen=True)
class Mitigation:
    """Effect of a change of arithmetic or layout on the drift.

    Attributes:
        name: name of the change.
        delta1, delta2: shifts of D, in tokens.
        D: attention difference between them that arithmetic causes, mean over rows.
        far_delta1, far_D: the same at a shift far away.
        logit_error: root mean square difference of the logits at delta1 from those in float64 with the same layout.
        kl: mean Kullback-Leibler divergence at delta1, in nats per token.
    """

    name: str
    delta1: int
    delta2: int
    D: float
    far_delta1: int
    far_D: float
    logit_error: float
    kl: float


@dataclass(frozen=True)
class RopeStage:
    """RoPE as a model's rotary module computes it at one stage, for example after loading or after a cast.

    Attributes:
        stage: ``config``, ``loaded``, ``to bfloat16``, … or ``saved and loaded``.
        layer_type: None if all layers share one module's frequencies.
        inv_freq: effective frequencies in rad/token; those of the stage ``config`` are the correct ones.
        dtype: dtype that stores the frequencies.
        cos_sin_dtype: dtype of cos and sin for activations of the stage's dtype.
        frequency_error: largest relative difference of a frequency from the config's; NaN if their number differs.
        angle_error: largest difference of the computed angles from the exact ones in rad, modulo 2π (so at most π),
            over the 64 positions up to ``position``.
        position: position in tokens.
        attention_factor: factor that the module applies to cos and sin.
    """

    stage: str
    layer_type: str | None
    inv_freq: tuple[float, ...]
    dtype: str
    cos_sin_dtype: str
    frequency_error: float
    angle_error: float
    position: int
    attention_factor: float


@dataclass(frozen=True)
class Audit:
    """All results of the audit of one model.

    Attributes:
        length: tokens of a row.
        samples: number of rows of the drift.
        ablation_samples: number of rows of the ablation, the mitigations and the first-token experiment.
        dtype: the audited dtype: that of ablation, mitigations, first-token experiment, sweep, per_token and heads.
        near, far, delta2: shifts in tokens: the first and the largest one other than delta2, and the shift that they
            are compared with.
        drift: by dtype, parameters and shift; float32 also with exact angles.
        sweep: D between every two different shifts, mean over the first four rows.
        per_token: each token's part of D between near and delta2, mean over rows; the parts add up to D.
        lengths: D and D_logit by row length.
        heads: ``[layers][heads]``: each head's part of D between near and delta2, mean over rows; they add up to D.
        sink: the token that receives most attention.
        first_token: effects of moving the first token, the others, or all of them.
        ablation, mitigations, rope: see their classes.
    """

    length: int
    samples: int
    ablation_samples: int
    dtype: str
    near: int
    far: int
    delta2: int
    drift: tuple[Drift, ...]
    sweep: tuple[SweepPoint, ...]
    per_token: tuple[float, ...]
    lengths: tuple[LengthPoint, ...]
    heads: tuple[tuple[float, ...], ...]
    sink: Sink
    first_token: tuple[FirstTokenEffect, ...]
    ablation: tuple[StepAblation, ...]
    mitigations: tuple[Mitigation, ...]
    rope: tuple[RopeStage, ...]


@dataclass(frozen=True)
class AuditResult(Result):
    """An audit of a checkpoint on text.

    Attributes:
        model, text, seed: as in :class:`~ropewalk.audit.settings.AuditSettings`.
        trained_length: trained length of the checkpoint, in tokens.
        checkpoint_dtype: dtype of its weights.
        device: device that it ran on.
        finding: three sentences: the size of the drift, the step that causes it, and what mitigates it.
        rope_findings: one sentence for each stage of the model's life at which its frequencies are wrong.
        audit: all figures.
        versions: versions of the software.
    """

    model: str
    text: str
    trained_length: int
    checkpoint_dtype: str
    device: str
    seed: int
    finding: tuple[str, str, str]
    rope_findings: tuple[str, ...]
    audit: Audit
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """JSON with the figures of ``audit`` at the top level, beside the other values."""
        plain = super().to_json()
        figures, versions = plain.pop("audit"), plain.pop("versions")
        return {**plain, **figures, "versions": versions}


STEPS = ("angles", "cos_sin", "rotation", "product", "softmax", "rest")
"""The steps of a forward pass in order, as the ablation isolates them."""

STEP_NAMES = {
    "none": "nothing (all in float64)",
    "angles": "the angles (position times inv_freq)",
    "cos_sin": "rounding cos and sin",
    "rotation": "rounding the products of the rotation",
    "product": "rounding rotated queries and keys for q·k",
    "softmax": "softmax",
    "rest": "the rest of the model",
    "all": "all together",
}
"""Names of the ablation's steps in sentences."""

NEGLIGIBLE = 0.0005
"""A drift that moves less than this share of all attention is called negligible."""

LEAST_GAIN = 1.2
"""Smallest factor by which a mitigation must divide D to be recommended."""

ALIKE = 1.3
"""Ratio of D below which two mitigations count as equal: they differ only by which values happen to round up."""

NOISE = 1e-6
"""Values of D up to this one are float64's own rounding."""

STOCK = ("eager attention", "fused attention")
LAYOUTS = ("anchor layout", "positions reset")
DEFAULT = "float32 rotation"
"""The arithmetic with which ropewalk trains and evaluates."""


def finding(audit: Audit) -> tuple[str, str, str]:
    """Describe how large the drift is, which step causes it, and what mitigates it.

    Args:
        audit: audit of one model; every figure in the sentences comes from it.

    Returns:
        Three sentences: size of the drift, its cause, and its mitigation.
    """
    return _size(audit), _cause(audit), _mitigation(audit)


def _at(
    audit: Audit, dtype: str, delta1: int, angles: str = "model", parameters: str = "pretrained"
) -> Drift | None:
    for drift in audit.drift:
        if (drift.dtype, drift.angles, drift.parameters, drift.delta1) == (
            dtype,
            angles,
            parameters,
            delta1,
        ):
            return drift
    return None


def _size(audit: Audit) -> str:
    found = _at(audit, audit.dtype, audit.near)
    assert found is not None, "an audit has the drift of its first dtype at its first shift"
    if not math.isfinite(found.D):
        return (
            f"In {audit.dtype} this model's attention overflows as transformers' eager attention computes it, so "
            "its drift cannot be measured."
        )
    verdict = ", which is negligible" if found.moved < NEGLIGIBLE else ""
    text = (
        f"In {audit.dtype}, a row of {audit.length:,} tokens attends differently at position {audit.near:,} than at "
        f"{audit.delta2:,}: {_percent(found.moved)} of all attention moves to other tokens (D = {found.D:.3g})"
        f"{verdict}, while exact relative positions would move none"
    )
    clauses = [text, *_compared(audit, found)]
    # The ablation begins with `none`: everything in float64.
    exact = audit.ablation[0]
    if exact.D > NOISE:
        clauses.append(
            f"even float64 has D = {exact.D:.2g}, so the model uses positions outside RoPE, or always computes a part "
            "in lower precision"
        )
    others = {d.dtype for d in audit.drift if d.parameters == "pretrained" and not math.isfinite(d.D)}
    if others:
        clauses.append(f"{' and '.join(sorted(others))} overflows")
    return "; ".join(clauses) + "."


def _compared(audit: Audit, found: Drift) -> list[str]:
    """Clauses that compare a drift with those of float32 and of random weights."""
    clauses = []
    wide = _at(audit, "float32", audit.near)
    if wide is not None and audit.dtype != "float32" and math.isfinite(wide.D):
        clauses.append(f"in float32 D = {wide.D:.2g}")
    random = _at(audit, audit.dtype, audit.near, parameters="random")
    if random is not None and random.D > 0:
        # The random control runs on fewer rows; only the same rows are compared.
        same_rows = found.per_sample[: len(random.per_sample)]
        ratio = sum(same_rows) / len(same_rows) / random.D
        clauses.append(f"in {audit.dtype} with random weights D = {random.D:.2g}{_trained(ratio)}")
    return clauses


def _trained(ratio: float) -> str:
    if ratio >= 2:
        return f", so training makes it {_times(ratio)} times as large"
    return ", about the same" if ratio > 0.5 else ", more than with these weights"


def _cause(audit: Audit) -> str:
    near = [row for row in audit.ablation if row.delta1 == audit.near]
    single = [row for row in near if row.step in STEPS]
    whole = next(row for row in near if row.step == "all")
    overflowing = [STEP_NAMES[row.step] for row in single if not math.isfinite(row.D)]
    if overflowing:
        return f"The overflow comes from {_listed(overflowing)} alone."
    if not math.isfinite(whole.D):
        return "No operation overflows alone, only all of them together."
    if whole.D <= NOISE:
        return "There is no drift to explain."
    return f"{_steps(audit, single, whole)}; {_first_token(audit)}."


def _steps(audit: Audit, single: Sequence[StepAblation], whole: StepAblation) -> str:
    worst = dominant_step(audit.ablation, audit.near)
    # A step with less than a tenth of the whole is not worth a clause.
    others = sorted(
        (row for row in single if row.step != worst.step and row.D > 0.1 * whole.D),
        key=lambda row: -row.D,
    )
    rows = f"{audit.ablation_samples} row{'s' if audit.ablation_samples > 1 else ''}"
    # Independent rounding errors add up as squares; far below the whole, the steps do not explain it separately.
    together = math.sqrt(sum(row.D**2 for row in single))
    if together < 0.5 * whole.D:
        return (
            f"No operation alone explains it (the largest, {STEP_NAMES[worst.step]}, has D = {worst.D:.3g} of "
            f"{whole.D:.3g} on {rows}): even the smallest difference changes how hidden states are rounded"
        )
    also = [f"{STEP_NAMES[row.step]} ({row.D:.3g})" for row in others]
    return (
        f"The largest single cause is {STEP_NAMES[worst.step]} (D = {worst.D:.3g} with only this operation in "
        f"{audit.dtype}, {whole.D:.3g} with all operations, on {rows})"
        + (f", followed by {_listed(also)}" if also else "")
    )


def _first_token(audit: Audit) -> str:
    found = _at(audit, audit.dtype, audit.near)
    effect = next(effect for effect in audit.first_token if effect.shifted == "first")
    sink = audit.sink
    carried = math.nan if found is None else found.first_token_share
    if math.isnan(effect.share_of_D):
        explained = ""
    elif effect.share_of_D <= 0:
        explained = ", and rounding the first token's query and key causes none of D"
    else:
        explained = (
            f", and rounding the first token's query and key causes {_percent(effect.share_of_D)} of D"
        )
    if sink.index == 0:
        attended = f"the token receives {_percent(sink.attention)} of the attention"
    else:
        attended = (
            f"the row's token {sink.index + 1:,} receives most, {_percent(sink.attention)}; the first receives "
            f"{_percent(sink.first_attention)}"
        )
    return (
        f"the change of attention to the first token is {_percent(carried)} of D{explained} ({attended}, and would "
        f"receive {_percent(sink.even_attention)} if every query attended evenly to all tokens that it sees)"
    )


def best_mitigation(audit: Audit) -> Mitigation | None:
    """The change of arithmetic to recommend; None if none helps.

    Selects the smallest D at the worse of the two shifts. Among those within a factor of 1.3 of it, the first in the
    list wins, because the list starts with the simpler changes.
    """
    base = next(
        (mitigation for mitigation in audit.mitigations if mitigation.name == "fused attention"), None
    )
    tried = [
        mitigation
        for mitigation in audit.mitigations
        if mitigation.name not in (*STOCK, *LAYOUTS) and math.isfinite(_worse(mitigation))
    ]
    # `not >` instead of `<=`: without a finite D there is nothing to improve either.
    if base is None or not tried or not _worse(base) > NOISE or not math.isfinite(_worse(base)):
        return None
    # D depends by chance on which values round up, so a slightly smaller D does not justify a costlier change.
    least = min(_worse(mitigation) for mitigation in tried)
    best = next(mitigation for mitigation in tried if _worse(mitigation) <= ALIKE * least)
    return best if _worse(base) > LEAST_GAIN * _worse(best) else None


def _worse(mitigation: Mitigation) -> float:
    # max() alone would skip a NaN.
    return math.nan if math.isnan(mitigation.D + mitigation.far_D) else max(mitigation.D, mitigation.far_D)


def _mitigation(audit: Audit) -> str:
    by_name = {mitigation.name: mitigation for mitigation in audit.mitigations}
    eager, base, default = by_name["eager attention"], by_name["fused attention"], by_name.get(DEFAULT)
    best = best_mitigation(audit)
    if not math.isfinite(base.D):
        text = "Fused attention overflows as well"
    elif not math.isfinite(eager.D):
        text = f"Fused attention, which keeps scores in float32, does not overflow (D = {base.D:.3g})"
    elif best is None:
        text = "No change of arithmetic lowers the D of fused attention by much"
    else:
        # "Exact angles" is the only name in the plural.
        verb = "lower" if best.name.endswith("angles") else "lowers"
        text = f"{best.name.capitalize()} {verb} the D of fused attention from {base.D:.3g} to {best.D:.3g}"
        if default is not None and default is not best and math.isfinite(default.D):
            text += f"; ropewalk's default, {DEFAULT}, lowers it to {default.D:.3g}"
    return text + _far(audit) + "."


def _far(audit: Audit) -> str:
    """A clause on float32 at a large shift, with the model's own angles and with angles in float64."""
    pairs = [
        [_at(audit, "float32", shift, angles) for shift in (audit.near, audit.far)]
        for angles in ("model", "exact")
    ]
    ratios = [
        far.D / near.D
        for near, far in pairs
        if near is not None and far is not None and near.D > 0 and math.isfinite(far.D / near.D)
    ]
    if len(ratios) < 2 or audit.near == audit.far:
        return ""
    return (
        f"; in float32, D at a shift of {audit.far:,} is {_times(ratios[0])} times D at {audit.near:,} with the "
        f"model's own angles, and {_times(ratios[1])} times with angles in float64"
    )


def _times(ratio: float) -> str:
    """The ratio with two significant digits."""
    if ratio < 10:
        return f"{ratio:.1f}"
    digits = int(math.log10(ratio)) - 1
    return f"{round(ratio / 10**digits) * 10**digits:,}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{100 * share:.1g}%"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def dominant_step(ablations: Sequence[StepAblation], delta1: int) -> StepAblation:
    """The step with the largest D when ablated alone at a shift; a step that overflows counts as the largest.

    Args:
        ablations: result of :func:`ablate_steps`.
        delta1: the shift, tokens.

    Raises:
        RopewalkError: if the ablation was not measured at this shift.
    """
    single = [row for row in ablations if row.delta1 == delta1 and row.step in STEPS]
    if not single:
        measured = ", ".join(map(str, sorted({row.delta1 for row in ablations}))) or "none"
        raise RopewalkError(
            f"the ablation was not measured at a shift of {delta1}; the measured shifts are {measured}"
        )
    # A step that overflows is the worst of all.
    return max(single, key=lambda row: row.D if math.isfinite(row.D) else math.inf)
