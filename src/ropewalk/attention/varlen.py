"""The varlen engine: torch's own variable-length FlashAttention over the runs. CUDA, 16-bit floats."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.runs import Gather, gather_of, into_runs, out_of_runs, runs_of
from ropewalk.packing import PackedLayout


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """Attributes: the gather; int32 ``[runs + 1]`` slot offsets on the device; the longest run in tokens."""

    gather: Gather
    cu_seqlens: Tensor
    max_seqlen: int


def plan(layouts: Sequence[PackedLayout], device: torch.device) -> VarlenPlan:
    runs = runs_of(layouts)
    lengths = torch.tensor([0] + [run.length for run in runs])
    cu_seqlens = lengths.cumsum(0).to(torch.int32).to(device)
    return VarlenPlan(gather_of(runs, device), cu_seqlens, int(lengths.max()))


def run(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, plan: VarlenPlan, scale: float, softcap: float | None
) -> Tensor:
    q, k, v = (into_runs(x, plan.gather) for x in (q_BHTD, k_BKTD, v_BKTD))
    output = causal_varlen(q, k, v, plan.cu_seqlens, plan.max_seqlen, scale)
    return out_of_runs(output, plan.gather, q_BHTD.shape[0])


def causal_varlen(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Causal attention inside each run, through whichever spelling this torch's ``varlen_attn`` has.

    torch 2.10 says ``is_causal``, later ones ``window_size=(-1, 0)``; ``scale`` and ``enable_gqa`` came later.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters_of(varlen_attn)
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        options["scale"] = scale
    else:  # the kernel multiplies by 1/sqrt(D) itself; make up the difference before it
        q_SHD = q_SHD * (scale * q_SHD.shape[-1] ** 0.5)
    if q_SHD.shape[1] != k_SKD.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            groups = q_SHD.shape[1] // k_SKD.shape[1]
            k_SKD, v_SKD = (x.repeat_interleave(groups, dim=1) for x in (k_SKD, v_SKD))
    output = varlen_attn(q_SHD, k_SKD, v_SKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    assert isinstance(output, Tensor)
    return output


@cache
def _parameters_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
