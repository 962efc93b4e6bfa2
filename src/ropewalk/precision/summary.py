"""The finding of an audit in three sentences: how much, where from, what helps."""

from __future__ import annotations

import math

from ropewalk.precision.results import Audit, Drift, Mend
from ropewalk.precision.rungs import dominant_step

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

NEGLIGIBLE = 0.001
"""A share of all attention below which a drift is called negligible: one query in a thousand."""

LEAST_GAIN = 1.2
"""A mend that divides D by less than this is not worth its name."""

NOISE = 1e-6
"""D of this and less is what float64 leaves."""


def finding(audit: Audit) -> tuple[str, str, str]:
    """How large the drift is, which step causes it, and what mends it.

    Every figure in it stands in the audit.
    """
    return _size(audit), _cause(audit), _mend(audit)


def _at(
    audit: Audit, dtype: str, delta1: int, angles: str = "model", parameters: str = "pretrained"
) -> Drift | None:
    for drift in audit.drift:
        if (drift.dtype, drift.angles, drift.parameters, drift.delta1) == (dtype, angles, parameters, delta1):
            return drift
    return None


def _size(audit: Audit) -> str:
    rung = audit.ladder[0]
    near, delta2 = rung.delta1, rung.delta2
    found = _at(audit, audit.dtype, near)
    assert found is not None, "an audit has the drift of its first dtype at its first shift"
    if not math.isfinite(found.D):
        return (
            f"In {audit.dtype} this model's attention is not finite, so nothing can be said of its positions: it "
            "overflows."
        )
    share = found.D / audit.length
    compared = []
    wide = _at(audit, "float32", near)
    if wide is not None and audit.dtype != "float32":
        compared.append(f"float32 moves {wide.D:.2g}")
    random = _at(audit, audit.dtype, near, parameters="random")
    if random is not None and random.D > 0:
        same_rows = found.per_sample[: len(random.per_sample)]
        ratio = sum(same_rows) / len(same_rows) / random.D
        compared.append(
            f"the same model with random weights {random.D:.2g}, so training makes it {ratio:,.0f} times as large"
        )
    verdict = " That is negligible." if share < NEGLIGIBLE else ""
    if rung.D > NOISE:
        verdict += (
            f" Even float64 moves {rung.D:.2g}: the model uses positions beside RoPE, or computes a part in lower "
            "precision whatever it is asked for."
        )
    return (
        f"In {audit.dtype}, a row of {audit.length:,} tokens at position {near:,} attends otherwise than at "
        f"{delta2:,}: {found.D:.3g} queries' worth of attention ({share:.2%} of all) lands on other tokens, where "
        "exact relative positions would move none"
        + (f"; {' and '.join(compared)}" if compared else "")
        + f".{verdict}"
    )


def _cause(audit: Audit) -> str:
    near = audit.ladder[0].delta1
    whole = next(rung for rung in audit.ladder if rung.step == "all" and rung.delta1 == near)
    first = next((effect for effect in audit.first_token if effect.shifted == "first"), None)
    sink = audit.sink
    if not math.isfinite(whole.D) or whole.D <= NOISE:
        return "There is no drift to explain."
    worst = dominant_step(audit.ladder, near)
    others = sorted(
        (
            rung
            for rung in audit.ladder
            if rung.delta1 == near and rung.step not in ("none", "all", worst.step) and rung.D > 0.1 * whole.D
        ),
        key=lambda rung: -rung.D,
    )
    also = (
        ", followed by " + " and ".join(f"{STEP_NAMES[rung.step]} ({rung.D:.3g})" for rung in others)
        if others
        else ""
    )
    moved = "" if first is None else f", and rounding it alone explains {first.share_of_D:.1%}"
    at = "the first token" if sink.index == 0 else f"token {sink.index}, not the first,"
    return (
        f"By itself the largest cause is {STEP_NAMES[worst.step]} (D = {worst.D:.3g} of {whole.D:.3g}){also}; "
        f"the first token carries {_first_share(audit, near):.1%} of the drift{moved} "
        f"({at} receives most attention, {sink.attention:.1%} a query)."
    )


def _first_share(audit: Audit, near: int) -> float:
    found = _at(audit, audit.dtype, near)
    return math.nan if found is None else found.first_token_share


def best_mend(audit: Audit) -> Mend | None:
    """The change of arithmetic with the least D; among equals the fastest. None where none helps."""
    base = next((mend for mend in audit.mends if mend.name == "fused attention"), None)
    plain = [
        mend
        for mend in audit.mends
        if mend.name not in ("eager attention", "fused attention", "anchor layout", "positions reset")
        and math.isfinite(mend.D)
    ]
    if base is None or not plain or not math.isfinite(base.D) or base.D <= NOISE:
        return None
    best = min(plain, key=lambda mend: (round(math.log(max(mend.D, NOISE)), 1), mend.time_ratio or math.inf))
    return best if base.D > LEAST_GAIN * best.D else None


def _mend(audit: Audit) -> str:
    near, far = audit.mends[0].delta1, audit.mends[0].far_delta1
    base = next(mend for mend in audit.mends if mend.name == "fused attention")
    best = best_mend(audit)
    if best is None:
        said = f"No change of arithmetic lowers D at a shift of {near:,} by much"
    else:
        cost = (
            "" if best.time_ratio is None else f", at {best.time_ratio:.2f} times the time of a forward pass"
        )
        said = f"{best.name.capitalize()} lowers D from {base.D:.3g} to {best.D:.3g}{cost}"
    stock, exact = _at(audit, "float32", far), _at(audit, "float32", far, "exact")
    stock_near, exact_near = _at(audit, "float32", near), _at(audit, "float32", near, "exact")
    if stock is None or exact is None or stock_near is None or exact_near is None:
        return f"{said}."
    if not all(d.D > 0 and math.isfinite(d.D) for d in (stock, exact, stock_near, exact_near)):
        return f"{said}."
    return (
        f"{said}; at a shift of {far:,} float32 drifts {stock.D / stock_near.D:,.1f} times as far as at {near:,} with "
        f"the model's own angles, and {exact.D / exact_near.D:,.1f} times with exact ones."
    )
