"""Every attention engine of this machine against the float64 oracle, on what the model itself attends with."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention import attend, check_engine
from ropewalk.data.mixture.report import counted
from ropewalk.errors import EngineError
from ropewalk.models.losses import decoder_of
from ropewalk.verification.case import Case
from ropewalk.verification.computing import load_whole, once
from ropewalk.verification.exactness import Attended, Expected, expected_of, values_of
from ropewalk.verification.result import Outcome

RECORDING = "ropewalk_recording"
"""Name under which transformers knows the attention that keeps its queries, keys and values."""


def engine_equals_reference(case: Case, engine: str) -> Outcome:
    """Output and gradients of one engine in every layer and row, in the dtype that the recipe computes in.

    The budget is that of :func:`expected_of`.
    """
    dtype = case.attention.dtype
    try:
        check_engine(engine, case.attention)
    except EngineError as refusal:
        return Outcome.not_run(f"not run here: {refusal}")
    worst = (0.0, 0.0, 0.0, "")
    rows = attended_of(case)
    for number, layers in enumerate(rows):
        layout = case.rows[number].layout
        for layer, each in enumerate(layers):
            run = partial(attend, layout=layout, engine=engine, scale=each.scale, softcap=each.softcap)
            inputs = (each.query, each.key, each.value)
            found = values_of(run, inputs, each.cotangent, case.precision)
            worst = max(
                worst, (*expected_at(case, number, layer).worst(found), f"layer {layer}, row {number}")
            )
    _, error, budget, where = worst
    what = str(dtype).removeprefix("torch.")
    return Outcome.within(
        error,
        budget,
        f"output and gradients of attention in {counted(len(rows[0]), 'layer')} and {len(rows)} rows, {what}",
        f"in {where} engine {engine} is further from exact attention than plain attention in {what} is: it does not "
        "attend as the layout says, so documents leak into each other or miss tokens; choose another engine",
    )


def attended_of(case: Case) -> list[list[Attended]]:
    """For each row what its layers attend with, rounded to the dtype that the recipe computes in; once a case."""
    return once(case, "attended", lambda: _attended(case))


def expected_at(case: Case, row: int, layer: int) -> Expected:
    """Exact attention of a row in a layer, on the CPU; once a case."""

    def compute() -> Expected:
        found = expected_of(attended_of(case)[row][layer], [case.rows[row].layout])
        return Expected(tuple(x.cpu() for x in found.values), found.allowed)

    return once(case, f"exact attention of row {row}, layer {layer}", compute)


def _attended(case: Case) -> list[list[Attended]]:
    """As plain attention over the row meets them, in float32."""
    from transformers import AttentionInterface

    calls: list[Attended] = []
    dtype = case.attention.dtype

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
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        # Contiguous: views of a layer's projections would keep all of them.
        q, k, v = (x.detach().contiguous() for x in (query, key, value))
        calls.append(Attended(q, k, v, scale, options.get("softcap")).to(dtype))
        output = attend(query, key, value, layout.layouts, "reference", scale, options.get("softcap"))
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
