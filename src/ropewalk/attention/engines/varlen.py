"""The varlen engine: torch's variable-length FlashAttention over the runs. Requires CUDA and a 16-bit dtype."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.engines.runs import Gather, into_runs, out_of_runs, runs_of
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions, Locality

MAX_RUNS = 65535
"""Most runs in one call: FlashAttention numbers them by the second dimension of a CUDA grid."""


@dataclass(frozen=True, eq=False)
class Offsets:
    """Start offsets of runs that are stored one after the other in a buffer.

    Attributes:
        slots: total number of tokens.
        cu_seqlens: int32 ``[runs + 1]`` slot offsets on the device.
        max_seqlen: tokens of the longest run.
    """

    slots: int
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Offsets:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        return cls(sum(lengths), cu_seqlens, max(lengths))


@dataclass(frozen=True, eq=False)
class Call:
    """The runs of one kernel call: queries, and keys whose last one is the last query's own."""

    queries: Offsets
    keys: Offsets


def calls_of(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> tuple[Call, ...]:
    """The kernel calls for runs with these numbers of queries and keys; one call for most batches."""
    starts = range(0, len(queries), MAX_RUNS)
    parts = [(queries[start : start + MAX_RUNS], keys[start : start + MAX_RUNS]) for start in starts]
    return tuple(Call(Offsets.of(q, device), Offsets.of(k, device)) for q, k in parts)


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """Attributes: the gather, None if runs are already stored one after the other; the kernel calls."""

    gather: Gather | None
    calls: tuple[Call, ...]


def plan(layouts: Sequence[PackedLayout], device: torch.device, locality: Locality) -> VarlenPlan:
    """The runs, cut into the layer's chunks. The kernel itself applies a window."""
    lengths, gather = runs_of(layouts, device, locality.chunk)
    return VarlenPlan(gather, calls_of(lengths, lengths, device))


def run(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, plan: VarlenPlan, options: AttentionOptions
) -> Tensor:
    q, k, v = (into_runs(x, plan.gather) for x in (q_BHTD, k_BKTD, v_BKTD))
    return out_of_runs(causal_varlen(q, k, v, plan.calls, options), plan.gather, q_BHTD.shape[0])


def causal_varlen(
    q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, calls: Sequence[Call], options: AttentionOptions
) -> Tensor:
    """Causal attention within each run, aligned at the last query and the last key: ``[Q, H, D]``."""
    if len(calls) == 1:
        return _kernel(q_QHD, k_SKD, v_SKD, calls[0], options)
    queries, keys = [call.queries.slots for call in calls], [call.keys.slots for call in calls]
    # Runs are independent, so a batch with too many for one kernel launch is divided between runs.
    parts = zip(q_QHD.split(queries), k_SKD.split(keys), v_SKD.split(keys), calls, strict=True)
    return torch.cat([_kernel(*part, options) for part in parts])


def _kernel(q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: Call, options: AttentionOptions) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    attention: Callable[..., Any] = varlen_attn
    groups = q_QHD.shape[1] // k_SKD.shape[1]
    if _takes_fewer_kv_heads(varlen_attn):
        attention = partial(varlen_attn, enable_gqa=groups > 1)
    elif groups > 1:
        # Older kernels need as many key/value heads as query heads.
        k_SKD, v_SKD = (x.repeat_interleave(groups, dim=1) for x in (k_SKD, v_SKD))
    window = options.window
    output = attention(
        q_QHD,
        k_SKD,
        v_SKD,
        call.queries.cu_seqlens,
        call.keys.cu_seqlens,
        call.queries.max_seqlen,
        call.keys.max_seqlen,
        scale=options.scale_of(q_QHD.shape[2]),
        # Causal and aligned at the last query and the last key; the left window size excludes the query itself.
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(output, Tensor)
    return output


@cache
def _takes_fewer_kv_heads(kernel: Callable[..., Any]) -> bool:
    """Whether the kernel accepts fewer key/value heads than query heads; that of torch 2.11 does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters
