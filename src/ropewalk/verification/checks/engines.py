"""Check every attention engine against the float64 oracle, on the model's own queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention import ENGINES, attend, check_engine
from ropewalk.attention.measuring import kernel_name
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.oracle import Attention, ExactAttention, Values, cotangent_of, values_of
from ropewalk.errors import EngineError
from ropewalk.io.lengths import counted
from ropewalk.models.attention.hooks import attention_options_of
from ropewalk.models.compute.losses import decoder_of
from ropewalk.training.update.step import autocast
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim
from ropewalk.verification.computing import load_whole, once
from ropewalk.verification.result import Outcome

RECORDING = "ropewalk_recording"
"""Name under which the attention function that records its inputs is registered with transformers."""


# Shapes: B rows, H query heads, K key/value heads, T tokens of a row, D head dim, V value dim.


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Recorded attention inputs of one layer.

    Attributes:
        query, key, value: ``[B, H, T, D]``, ``[B, K, T, D]``, ``[B, K, T, V]``.
        options: the layer's own scale, soft cap, window and sinks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def engine_equals_reference(case: Case, engine: str) -> Outcome:
    """Compare output and gradients of one engine with the oracle in every layer and row, in the recipe's dtype.

    The error budget is that of :class:`~ropewalk.attention.oracle.AttentionErrors`.
    """
    dtype = case.attention.dtype
    try:
        able = check_engine(engine, case.attention)
    except EngineError as refusal:
        return Outcome.not_run(f"not run here: {refusal}")
    # Compared by its first entry, the share of the budget that is used.
    worst = (0.0, 0.0, 0.0, "")
    kernels: dict[str, None] = {}
    rows = attention_inputs(case)
    for number, layers in enumerate(rows):
        layout = case.rows[number].layout
        for layer, each in enumerate(layers):
            run = partial(attend, layout=layout, engine=engine, options=each.options)
            kernels[kernel_name(able, *each.tensors, each.options.softcap)] = None
            cotangent = cotangent_of(each.query, each.value)
            found = values_in(case.precision, run, each.tensors, cotangent)
            errors = exact_attention(case, number, layer).errors_of(found)
            worst = max(worst, (*errors.worst, f"layer {layer}, row {number}"))
    _, error, budget, where = worst
    what = str(dtype).removeprefix("torch.")
    return Outcome.within(
        error,
        budget,
        f"output and gradients of attention in {counted(len(rows[0]), 'layer')} and {len(rows)} rows, {what}, "
        f"computed by {' and '.join(kernels)}",
        f"in {where} engine {engine} is further from exact attention than plain attention in {what}: it does not "
        "follow the layout, so documents leak into each other or miss tokens; choose another engine",
    )


def values_in(precision: str, attention: Attention, inputs: tuple[Tensor, ...], cotangent: Tensor) -> Values:
    """Output and gradients of attention as in training, with the forward under the precision's autocast."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with autocast(cotangent.device, precision, sharded=True):
            return attention(q, k, v)

    return values_of(run, inputs, cotangent)


def attention_inputs(case: Case) -> list[list[AttentionInputs]]:
    """For each row, the attention inputs of all layers, rounded to the recipe's dtype; cached per case."""
    return once(case, "attention inputs", lambda: _recorded(case))


def exact_attention(case: Case, row: int, layer: int) -> ExactAttention:
    """Exact attention of a row in a layer, on the CPU; cached per case."""

    def compute() -> ExactAttention:
        inputs = attention_inputs(case)[row][layer]
        found = ExactAttention.of(inputs.tensors, [case.rows[row].layout], inputs.options)
        return replace(found, values=tuple(x.cpu() for x in found.values))

    return once(case, f"exact attention of row {row}, layer {layer}", compute)


def _recorded(case: Case) -> list[list[AttentionInputs]]:
    """Record the attention inputs of every layer in a float32 forward with the reference engine."""
    from transformers import AttentionInterface

    calls: list[AttentionInputs] = []
    dtype = case.attention.dtype

    def record(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        layout: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        # Engines compute what queries see, whichever of it an indexer chooses.
        options.pop("indices", None)
        recorded_options = attention_options_of(module, layout, options)
        if recorded_options.sinks is not None:
            recorded_options = replace(recorded_options, sinks=recorded_options.sinks.detach())
        # Copies, because views would keep the whole projections in memory.
        q, k, v = (x.detach().contiguous().to(dtype) for x in (query, key, value))
        calls.append(AttentionInputs(q, k, v, recorded_options))
        # Reference attention goes on with the forward, so that later layers see inputs no engine under test
        # has touched.
        output = attend(query, key, value, layout.layouts, "reference", options=recorded_options)
        return output.transpose(1, 2).contiguous(), None

    # Registered anew for each case, because `record` keeps the calls of this one.
    AttentionInterface.register(RECORDING, record)
    model = load_whole(case, torch.float32)
    model.model.set_attn_implementation(RECORDING)
    rows = []
    for row in case.rows:
        # record() sees this list too, because it looks the name up at every call.
        calls = []
        with torch.no_grad():
            decoder_of(model.model)(row.input_ids[None].to(model.device), layout=row.layout)
        rows.append(calls)
    return rows


CLAIMS = tuple(
    Claim(
        f"engine {engine}",
        30,
        f"engine {engine} = reference",
        "attention on the model's own queries, keys and values with float64",
        partial(engine_equals_reference, engine=engine),
    )
    for engine in ENGINES
    if engine != "reference"
)
