"""Blocks of a ring through torch's variable-length FlashAttention. CUDA, 16-bit floats.

All runs of a layer go through one call: their own keys are apart from each other, so that gradients of keys are
copies, and only those of anchors add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.engines.varlen import MAX_RUNS
from ropewalk.attention.kept import kept
from ropewalk.errors import EngineError
from ropewalk.parallel.ring_blocks import Final, Gradients, Part, Scoring, wide_dtype
from ropewalk.parallel.ring_plan import Range, Round, Run

# Shapes: as in ring_blocks; S slots, in which the keys of runs stand one after the other.


@dataclass(frozen=True, eq=False)
class Layer:
    """Runs whose own keys do not overlap, one after the other.

    Attributes:
        queries: int64 ``[n]``, local places.
        keys: int64 ``[S]``, the key of the round's buffer in each slot.
        own: int64, the slots of the runs' own keys.
        shared: range of anchor keys in the buffer, and int64 ``[runs, keys]``, the slots of its copies.
        cu_q, cu_k: int32 ``[runs + 1]``, where runs start in ``queries`` and ``keys``.
        max_q, max_k: longest run.
        causal: whether runs are causal, aligned at the last query and key.
    """

    queries: Tensor
    keys: Tensor
    own: Tensor
    shared: tuple[tuple[Range, Tensor], ...]
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool


class VarlenBlocks:
    """FlashAttention over the runs of each layer of a round."""

    def forward(
        self, q_PHD: Tensor, k_NKD: Tensor, v_NKV: Tensor, each: Round, scoring: Scoring
    ) -> Iterator[Part]:
        for layer in layers_of(each, q_PHD.device):
            q, k, v = q_PHD[layer.queries], k_NKD[layer.keys], v_NKV[layer.keys]
            out, lse_Hn = varlen_forward(q, k, v, layer, scoring.scale)
            shift = lse_Hn.transpose(0, 1)
            yield Part(layer.queries, out, shift, torch.ones_like(shift))

    def backward(
        self,
        q_PHD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        final: Final,
        each: Round,
        scoring: Scoring,
        into: Gradients,
    ) -> None:
        for layer in layers_of(each, q_PHD.device):
            q, k, v = q_PHD[layer.queries], k_NKD[layer.keys], v_NKV[layer.keys]
            out, grad = final.out_PHV[layer.queries], final.grad_PHV[layer.queries]
            lse_Hn = final.lse_PH[layer.queries].transpose(0, 1).contiguous()
            grad_q, grad_k, grad_v = varlen_backward(grad, q, k, v, out, lse_Hn, layer, scoring.scale)
            into.q_PHD.index_add_(0, layer.queries, grad_q.to(into.q_PHD.dtype))
            _add_slots(into.k_NKD, grad_k, layer)
            _add_slots(into.v_NKV, grad_v, layer)


def _add_slots(into_NKD: Tensor, grad_SKD: Tensor, layer: Layer) -> None:
    """Add gradients of slots to those of keys; no index repeats, so that the order of additions is fixed."""
    wide = wide_dtype(grad_SKD.dtype)
    into_NKD.index_add_(0, layer.keys[layer.own], grad_SKD[layer.own].to(wide))
    for (start, end), slots in layer.shared:
        into_NKD[start:end] += grad_SKD[slots].sum(dim=0, dtype=wide)


@kept
def layers_of(each: Round, device: torch.device) -> tuple[Layer, ...]:
    """The layers of a round, their index tensors on a device; made once, every layer of a model finds them here."""
    found: dict[int, list[Run]] = {}
    for run in each.runs:
        found.setdefault(run.layer, []).append(run)
    parts = [runs[at : at + MAX_RUNS] for runs in found.values() for at in range(0, len(runs), MAX_RUNS)]
    return tuple(_layer(runs, each.causal, device) for runs in parts)


def _layer(runs: Sequence[Run], causal: bool, device: torch.device) -> Layer:
    own: list[Range] = []
    shared: dict[Range, list[int]] = {}
    start = 0
    for run in runs:
        if run.shared[0] < run.shared[1]:
            shared.setdefault(run.shared, []).append(start)
        start += run.num_keys
        own.append((start - (run.own[1] - run.own[0]), start))
    queries = [run.queries[1] - run.queries[0] for run in runs]
    keys = [run.num_keys for run in runs]
    return Layer(
        queries=_indices([run.queries for run in runs]).to(device),
        keys=_indices([each for run in runs for each in run.keys]).to(device),
        own=_indices(own).to(device),
        shared=tuple(
            (each, (torch.tensor(firsts)[:, None] + torch.arange(each[1] - each[0])).to(device))
            for each, firsts in shared.items()
        ),
        cu_q=torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device),
        cu_k=torch.tensor([0, *keys]).cumsum(0).to(torch.int32).to(device),
        max_q=max(queries),
        max_k=max(keys),
        causal=causal,
    )


def _indices(ranges: Sequence[Range]) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in ranges])


def varlen_forward(
    q_nHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layer: Layer, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[n, H, D]`` and lse ``[H, n]`` by torch's public function.

    Raises:
        EngineError: if this torch gives the lse in another shape.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    out, lse = varlen_attn(
        q_nHD,
        k_SKD,
        v_SKD,
        layer.cu_q,
        layer.cu_k,
        layer.max_q,
        layer.max_k,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0) if layer.causal else (-1, -1),
        enable_gqa=q_nHD.shape[1] != k_SKD.shape[1],
    )
    # Its docstring of torch 2.13 says [n, H]; the kernel and the shape function beside it give [H, n].
    if lse.shape != (q_nHD.shape[1], q_nHD.shape[0]):
        raise EngineError(
            f"torch {torch.__version__} gives log-sum-exps of shape {tuple(lse.shape)} where a ring expects "
            f"{(q_nHD.shape[1], q_nHD.shape[0])}; use engine segments"
        )
    return out, lse


def varlen_backward(
    grad_nHD: Tensor,
    q_nHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_nHD: Tensor,
    lse_Hn: Tensor,
    layer: Layer,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values for weights by this lse, which no public function takes.

    The one call of a private operator, which the import registers; a test holds its schema against this call.
    """
    import torch.nn.attention.varlen

    grad_q, grad_k, grad_v = torch.ops.torch_attn._varlen_attn_backward(
        grad_nHD.contiguous(),
        q_nHD,
        k_SKD,
        v_SKD,
        out_nHD.contiguous(),
        lse_Hn,
        layer.cu_q,
        layer.cu_k,
        layer.max_q,
        layer.max_k,
        layer.causal,
        torch.zeros(2, dtype=torch.uint64, device=q_nHD.device),
        scale=scale,
        window_size=[-1, 0] if layer.causal else [-1, -1],
    )
    return grad_q, grad_k, grad_v
