"""The varlen kernel: torch's variable-length FlashAttention over all runs in one call. CUDA, 16-bit dtypes.

It is FlashAttention 2, or 3 or 4 where ``torch.nn.attention.activate_flash_attention_impl`` has activated them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.layout import cached_per_layout
from ropewalk.attention.operators import varlen_backward, varlen_forward
from ropewalk.attention.options import AttentionOptions

MAX_RUNS = 65535
"""Most runs in one call: FlashAttention numbers them by the second dimension of a CUDA grid."""


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of a kernel call.

    Attributes:
        first_query, first_key: where its runs begin in the buffers of all runs.
        queries, keys: number of its queries and keys.
        cu_queries, cu_keys: int32 ``[runs + 1]`` offsets on the device.
        most_queries, most_keys: lengths of its longest run.
    """

    first_query: int
    first_key: int
    queries: int
    keys: int
    cu_queries: Tensor
    cu_keys: Tensor
    most_queries: int
    most_keys: int

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_queries, self.cu_keys, self.most_queries, self.most_keys

    def queries_of(self, x_QHD: Tensor) -> Tensor:
        return x_QHD.narrow(0, self.first_query, self.queries)

    def keys_of(self, x_SKD: Tensor) -> Tensor:
        return x_SKD.narrow(0, self.first_key, self.keys)

    def lse_of(self, lse_HQ: Tensor) -> Tensor:
        return lse_HQ.narrow(1, self.first_query, self.queries).contiguous()


@cached_per_layout
def calls_of(runs: Runs, device: torch.device) -> tuple[Call, ...]:
    """The kernel calls for these runs; one call for most batches."""
    return tuple(_calls(runs, device))


def _calls(runs: Runs, device: torch.device) -> Iterator[Call]:
    first_query = first_key = 0
    for start in range(0, len(runs.queries), MAX_RUNS):
        queries, keys = (each[start : start + MAX_RUNS] for each in (runs.queries, runs.keys))
        offsets = _offsets(queries, device), _offsets(keys, device)
        yield Call(first_query, first_key, sum(queries), sum(keys), *offsets, max(queries), max(keys))
        first_query, first_key = first_query + sum(queries), first_key + sum(keys)


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """See :class:`ropewalk.attention.engines.runs.Kernel`."""
    scale = options.scale_of(q.shape[2])
    parts = [
        varlen_forward(
            call.queries_of(q), call.keys_of(k), call.keys_of(v), *call.lengths, scale, options.window
        )
        for call in calls_of(runs, q.device)
    ]
    if len(parts) == 1:
        return parts[0]
    outputs, sums = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(sums, 1)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`ropewalk.attention.engines.runs.Kernel`."""
    scale = options.scale_of(q.shape[2])
    parts = [
        varlen_backward(
            call.queries_of(grad),
            call.queries_of(q),
            call.keys_of(k),
            call.keys_of(v),
            call.queries_of(out),
            call.lse_of(lse),
            *call.lengths,
            scale,
            options.window,
        )
        for call in calls_of(runs, q.device)
    ]
    if len(parts) == 1:
        return parts[0]
    dq, dk, dv = (torch.cat(each) for each in zip(*parts, strict=True))
    return dq, dk, dv
