"""The finding of an audit in three sentences: how much, where from, what helps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ropewalk.audit.ablation import dominant_step
from ropewalk.audit.arithmetic import STEPS
from ropewalk.audit.results import Audit, Drift, Mend, Rung

STEP_NAMES = {
    "none": "nothing (all in float64)",
    "angles": "the angles (position times inv_freq)",
    "cos_sin": "rounding cos and sin",
    "rotation": "the rotation's products",
    "product": "rounding rotated queries and keys for q·k",
    "softmax": "softmax",
    "rest": "the rest of the model",
    "all": "all together",
}
"""What the ladder's steps are called in a sentence."""

NEGLIGIBLE = 0.0005
"""A share of all attention that lands elsewhere, below which a drift is called negligible."""

LEAST_GAIN = 1.2
"""A mend that divides D by less than this is not worth its name."""

ALIKE = 1.3
"""Mends whose D differs by less than this differ by which roundings happen to tip."""

NOISE = 1e-6
"""D of this and less is what float64 leaves."""

STOCK = ("eager attention", "fused attention")
LAYOUTS = ("anchor layout", "positions reset")
DEFAULT = "float32 rotation"
"""What ropewalk trains and evaluates with."""


def finding(audit: Audit) -> tuple[str, str, str]:
    """How large the drift is, which step causes it, and what mends it.

    Args:
        audit: of one model; every figure in the sentences stands in it.

    Returns:
        Three sentences.
    """
    return _size(audit), _cause(audit), _mend(audit)


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
            "nothing can be said of its positions."
        )
    verdict = ", which is negligible" if found.moved < NEGLIGIBLE else ""
    said = (
        f"In {audit.dtype}, a row of {audit.length:,} tokens attends otherwise at position {audit.near:,} than at "
        f"{audit.delta2:,}: {_percent(found.moved)} of all attention lands on other tokens (D = {found.D:.3g})"
        f"{verdict}, where exact relative positions would move none"
    )
    clauses = [said, *_compared(audit, found)]
    rung = audit.ladder[0]
    if rung.D > NOISE:
        clauses.append(
            f"even float64 has D = {rung.D:.2g}, so the model uses positions beside RoPE, or computes a part in lower "
            "precision whatever it is asked for"
        )
    others = {d.dtype for d in audit.drift if d.parameters == "pretrained" and not math.isfinite(d.D)}
    if others:
        clauses.append(f"{' and '.join(sorted(others))} overflows")
    return "; ".join(clauses) + "."


def _compared(audit: Audit, found: Drift) -> list[str]:
    """Clauses that set a drift beside those of float32 and of random weights."""
    clauses = []
    wide = _at(audit, "float32", audit.near)
    if wide is not None and audit.dtype != "float32" and math.isfinite(wide.D):
        clauses.append(f"in float32 D = {wide.D:.2g}")
    random = _at(audit, audit.dtype, audit.near, parameters="random")
    if random is not None and random.D > 0:
        same_rows = found.per_sample[: len(random.per_sample)]
        ratio = sum(same_rows) / len(same_rows) / random.D
        clauses.append(f"with random weights D = {random.D:.2g}{_trained(ratio)}")
    return clauses


def _trained(ratio: float) -> str:
    if ratio >= 2:
        return f", so training makes it {_times(ratio)} times as large"
    return ", about the same" if ratio > 0.5 else ", more than with these"


def _cause(audit: Audit) -> str:
    near = [rung for rung in audit.ladder if rung.delta1 == audit.near]
    single = [rung for rung in near if rung.step in STEPS]
    whole = next(rung for rung in near if rung.step == "all")
    overflowing = [STEP_NAMES[rung.step] for rung in single if not math.isfinite(rung.D)]
    if overflowing:
        return f"By itself {_listed(overflowing)} makes it overflow."
    if not math.isfinite(whole.D):
        return "No step overflows by itself, only all of them together."
    if whole.D <= NOISE:
        return "There is no drift to explain."
    return f"{_steps(audit, single, whole)}; {_first_token(audit)}."


def _steps(audit: Audit, single: Sequence[Rung], whole: Rung) -> str:
    worst = dominant_step(audit.ladder, audit.near)
    others = sorted(
        (rung for rung in single if rung.step != worst.step and rung.D > 0.1 * whole.D),
        key=lambda rung: -rung.D,
    )
    rows = f"{audit.ladder_samples} row{'s' if audit.ladder_samples > 1 else ''}"
    together = math.sqrt(sum(rung.D**2 for rung in single))
    if together < 0.5 * whole.D:
        return (
            f"No step explains it by itself (the largest, {STEP_NAMES[worst.step]}, has D = {worst.D:.3g} of "
            f"{whole.D:.3g} on {rows}): the smallest difference tips roundings of the hidden states"
        )
    also = [f"{STEP_NAMES[rung.step]} ({rung.D:.3g})" for rung in others]
    return (
        f"By itself the largest cause is {STEP_NAMES[worst.step]} (D = {worst.D:.3g} of {whole.D:.3g} on {rows})"
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
        explained = ", and rounding it contributes nothing"
    else:
        explained = f", and rounding it accounts for {_percent(effect.share_of_D)}"
    if sink.index == 0:
        attended = f"it receives {_percent(sink.attention)} of the attention"
    else:
        attended = (
            f"most attended is the row's token {sink.index + 1:,}, with {_percent(sink.attention)}; the first receives "
            f"{_percent(sink.first_attention)}"
        )
    return (
        f"the first token carries {_percent(carried)} of the drift{explained} ({attended}, where an even share would "
        f"be {_percent(sink.even_attention)})"
    )


def best_mend(audit: Audit) -> Mend | None:
    """The change of arithmetic to recommend; None where none helps.

    The one whose D is least at the worse of both shifts; among those that come within 1.3 times of it, the first of the
    list, in which simpler ones come first.
    """
    base = next((mend for mend in audit.mends if mend.name == "fused attention"), None)
    tried = [
        mend for mend in audit.mends if mend.name not in (*STOCK, *LAYOUTS) and math.isfinite(_worse(mend))
    ]
    if base is None or not tried or not _worse(base) > NOISE or not math.isfinite(_worse(base)):
        return None
    least = min(_worse(mend) for mend in tried)
    best = next(mend for mend in tried if _worse(mend) <= ALIKE * least)
    return best if _worse(base) > LEAST_GAIN * _worse(best) else None


def _worse(mend: Mend) -> float:
    # Not max() alone: it would pass over a NaN.
    return math.nan if math.isnan(mend.D + mend.far_D) else max(mend.D, mend.far_D)


def _mend(audit: Audit) -> str:
    by_name = {mend.name: mend for mend in audit.mends}
    eager, base, default = by_name["eager attention"], by_name["fused attention"], by_name.get(DEFAULT)
    best = best_mend(audit)
    if not math.isfinite(base.D):
        said = "Fused attention overflows as well"
    elif not math.isfinite(eager.D):
        said = f"Fused attention, which keeps scores in float32, does not overflow (D = {base.D:.3g})"
    elif best is None:
        said = "No change of arithmetic lowers the D of fused attention by much"
    else:
        verb = "lower" if best.name.endswith("angles") else "lowers"
        cost = (
            ""
            if best.time_ratio is None
            else f", at {best.time_ratio:.1f} times the time of a forward pass here"
        )
        said = f"{best.name.capitalize()} {verb} the D of fused attention from {base.D:.3g} to {best.D:.3g}{cost}"
        if default is not None and default is not best and math.isfinite(default.D):
            said += f" (ropewalk's default, {DEFAULT}, to {default.D:.3g})"
    return said + _far(audit) + "."


def _far(audit: Audit) -> str:
    """A clause on angles: what float32 does far away, with the model's own and with exact ones."""
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
        f"; at a shift of {audit.far:,} float32 drifts {_times(ratios[0])} times as far as at {audit.near:,} with the "
        f"model's own angles, and {_times(ratios[1])} times with exact ones"
    )


def _times(ratio: float) -> str:
    """Two significant digits."""
    if ratio < 10:
        return f"{ratio:.1f}"
    digits = int(math.log10(ratio)) - 1
    return f"{round(ratio / 10**digits) * 10**digits:,}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{100 * share:.1g}%"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
