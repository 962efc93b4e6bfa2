"""The varlen engine: torch's own variable-length FlashAttention over the runs. CUDA, 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.engines.runs import Gather, into_runs, out_of_runs, runs_of
from ropewalk.attention.layout import PackedLayout

MAX_RUNS = 65535
"""Runs of one call: FlashAttention numbers them by the second dimension of a CUDA grid."""


@dataclass(frozen=True, eq=False)
class Call:
    """The runs of one call of the kernel.

    Attributes:
        slots: tokens of all of them.
        cu_seqlens: int32 ``[runs + 1]`` slot offsets on the device.
        max_seqlen: tokens of the longest.
    """

    slots: int
    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """Attributes: the gather, None where runs lie one after the other already; the calls, one for most batches."""

    gather: Gather | None
    calls: tuple[Call, ...]


def plan(layouts: Sequence[PackedLayout], device: torch.device) -> VarlenPlan:
    lengths, gather = runs_of(layouts, device)
    parts = [lengths[start : start + MAX_RUNS] for start in range(0, len(lengths), MAX_RUNS)]
    calls = [
        Call(sum(part), torch.tensor([0, *part]).cumsum(0).to(torch.int32).to(device), max(part))
        for part in parts
    ]
    return VarlenPlan(gather, tuple(calls))


def run(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, plan: VarlenPlan, scale: float, softcap: float | None
) -> Tensor:
    q, k, v = (into_runs(x, plan.gather) for x in (q_BHTD, k_BKTD, v_BKTD))
    if len(plan.calls) == 1:
        return out_of_runs(causal_varlen(q, k, v, plan.calls[0], scale), plan.gather, q_BHTD.shape[0])
    slots = [call.slots for call in plan.calls]
    parts = zip(q.split(slots), k.split(slots), v.split(slots), plan.calls, strict=True)
    output = torch.cat([causal_varlen(*part, scale) for part in parts])
    return out_of_runs(output, plan.gather, q_BHTD.shape[0])


def causal_varlen(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: Call, scale: float) -> Tensor:
    """Causal attention inside each run."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        q_SHD,
        k_SKD,
        v_SKD,
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q_SHD.shape[1] != k_SKD.shape[1],
    )
    assert isinstance(output, Tensor)
    return output
