"""Every attention engine of this machine against the float64 oracle, on what the model itself attends with."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention import attend, check_engine
from ropewalk.errors import EngineError
from ropewalk.integrations.losses import decoder_of
from ropewalk.packing import PackedLayout
from ropewalk.testing import AttentionErrors, attention_errors
from ropewalk.verification.case import Case
from ropewalk.verification.computing import load_whole, once
from ropewalk.verification.result import Outcome

RECORDING = "ropewalk_recording"
"""Name under which transformers knows the attention that keeps its queries, keys and values."""

Attended = tuple[Tensor, Tensor, Tensor]


def engine_equals_reference(case: Case, engine: str) -> Outcome:
    """Output and gradients of one engine in every layer and row, in the dtype that the recipe computes in.

    The budget is that of ``ropewalk.testing``, twice what plain attention in this dtype is off and one rounding; for
    gradients a rounding of the scores as well. Those of a trained model are large, and a fused backward takes its
    weights from a log-sum-exp as large as they are, rounded to the dtype.
    """
    dtype = compute_dtype(case)
    try:
        check_engine(engine, case.device, dtype, case.length, head_dim=case.head_dim, softcap=case.softcap)
    except EngineError as refusal:
        return Outcome.not_run(f"not run here: {refusal}")
    attended = once(case, "attended", lambda: _attended(case))
    worst = (0.0, 0.0, 0.0, "")
    for number, calls in enumerate(attended):
        layout = case.rows[number].layout
        for layer, (q, k, v) in enumerate(calls):
            run = partial(attend, layout=layout, engine=engine, softcap=case.softcap)
            found = attention_errors(run, q.to(dtype), k.to(dtype), v.to(dtype), [layout], case.softcap)
            worst = max(worst, (*_worst(found, _peak(q, k, layout)), f"layer {layer}, row {number}"))
    _, error, budget, where = worst
    what = str(dtype).removeprefix("torch.")
    return Outcome.within(
        error,
        budget,
        f"output and gradients of attention in {len(attended[0])} layers and {len(attended)} rows, {what}",
        f"in {where} engine {engine} is further from exact attention than plain attention in {what} is: it does not "
        "attend as the layout says, so documents leak into each other or miss tokens; choose another engine",
    )


def compute_dtype(case: Case) -> torch.dtype:
    """What attention computes in under the recipe's precision."""
    return torch.float32 if case.precision == "float32" else torch.bfloat16


def _worst(found: AttentionErrors, peak: float) -> tuple[float, float, float]:
    """Share of the budget, error and budget of the worst of output and gradients; ``peak`` is the largest score."""
    shares = []
    for number, (error, plain, unit) in enumerate(zip(found.engine, found.plain, found.unit, strict=True)):
        # Rounded to the nearest, the log-sum-exp is off by half a unit of its size.
        allowed = 2 * plain + unit * (1 + peak / 2 if number else 1)
        shares.append((error / allowed if error else 0.0, error, allowed))
    return max(shares)


def _peak(query: Tensor, key: Tensor, layout: PackedLayout) -> float:
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-2, -1) / math.sqrt(query.shape[-1])
    return float(scores.abs().masked_fill(~layout.dense_mask().to(scores.device), 0.0).max())


def _attended(case: Case) -> list[list[Attended]]:
    """Queries, keys and values of every row and layer, as plain attention over the row meets them."""
    from transformers import AttentionInterface

    calls: list[Attended] = []

    def record(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        layout: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        calls.append((query.detach(), key.detach(), value.detach()))
        output = attend(query, key, value, layout.layouts, "reference", scaling, options.get("softcap"))
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(RECORDING, record)
    model = load_whole(case, torch.float32)
    model.model.set_attn_implementation(RECORDING)
    rows = []
    for row in case.rows:
        calls = []
        with torch.no_grad():
            decoder_of(model.model)(row.input_ids[None].to(model.device), layout=row.layout)
        rows.append(calls)
    return rows
