"""torch's private attention operators, as plain functions that return the output and its log-sum-exp.

Below ``scaled_dot_product_attention`` and ``varlen_attn`` torch has operators whose forward returns the log-sum-exp of
the scores and whose backward takes output and log-sum-exp as arguments. A backward uses them only in
``P = exp(S - lse)`` and ``dS = P * (dP - rowsum(dO * O))``, so they may also be those of a softmax over more keys: the
gradients are then exactly the part of these keys. Nothing else in ropewalk calls these operators, and
``tests/attention/test_operators.py`` compares their signatures.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import varlen as _registers_its_operators  # noqa: F401

from ropewalk.attention.engines.capabilities import AttentionSpec, takes_cudnn, why_not

# Shapes: N runs of equal length, H query heads, K key/value heads (a divisor of H), n queries, s keys, Q and S all
# queries and keys of a batch, D head dim, V value dim.

Backend = Literal["cuDNN", "flash", "CPU flash"]
"""Implementations of dense attention in torch that return a log-sum-exp."""

VARLEN = torch.ops.torch_attn._varlen_attn
VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn_backward
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def varlen_forward(
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention over runs of different lengths, causal and aligned at the last query and the last key.

    Args:
        q_QHD, k_SKD, v_SKD: runs one after the other; fewer key/value heads are not repeated.
        cu_queries, cu_keys: int32 ``[runs + 1]``, offsets of the runs.
        most_queries, most_keys: lengths of the longest run.
        scale: multiplier of q·k.
        window: keys that a query sees, its own included; None for all.

    Returns:
        ``[Q, H, D]``, and the log-sum-exp ``[H, Q]`` in float32.
    """
    out, lse, _ = VARLEN(
        q_QHD,
        k_SKD,
        v_SKD,
        cu_queries,
        cu_keys,
        most_queries,
        most_keys,
        window is None,
        scale=scale,
        window_size=_window(window),
    )
    return out, lse


def varlen_backward(
    grad_QHD: Tensor,
    q_QHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_QHD: Tensor,
    lse_HQ: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; arguments as for :func:`varlen_forward`, with its results."""
    # Only dropout reads the state of a random generator.
    unused = torch.zeros(2, dtype=torch.uint64, device=q_QHD.device)
    gradients: tuple[Tensor, Tensor, Tensor] = VARLEN_BACKWARD(
        grad_QHD,
        q_QHD,
        k_SKD,
        v_SKD,
        out_QHD,
        lse_HQ,
        cu_queries,
        cu_keys,
        most_queries,
        most_keys,
        window is None,
        unused,
        scale=scale,
        window_size=_window(window),
    )
    return gradients


def _window(window: int | None) -> list[int]:
    # Tokens before and after a query's own.
    return [-1 if window is None else window - 1, 0]


def dense_backend(q: Tensor, k: Tensor, v: Tensor) -> Backend | None:
    """The operator that ``scaled_dot_product_attention`` runs for ``[..., heads, head_dim]``; None for none of these.

    A GPU is asked; what it answers depends on the cuDNN that is loaded. The device ``meta`` and the simulated device
    of a dry run answer for a GPU whose libraries are those that torch brings.
    """
    if q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":
        return "CPU flash"
    spec = AttentionSpec(q.device, q.dtype, q.shape[-1])
    # Dense FlashAttention needs what it needs for runs of different lengths.
    if why_not("varlen", spec) is not None:
        return None
    if q.device.type == "cuda":
        return _chosen_by_torch(q.device, q.dtype, q.shape[-2], k.shape[-2], q.shape[-1])
    return "cuDNN" if takes_cudnn(spec) else "flash"


@cache
def _chosen_by_torch(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> Backend | None:
    from torch.nn.attention import SDPBackend

    # Its choice depends on nothing else that a causal run varies; gradients are always wanted.
    q, k = (
        torch.empty(1, n, 256, width, dtype=dtype, device=device, requires_grad=True)
        for n in (heads, kv_heads)
    )
    chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=heads != kv_heads)
    backends: dict[int, Backend] = {
        SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
        SDPBackend.FLASH_ATTENTION.value: "flash",
    }
    return backends.get(chosen)


def dense_forward(
    backend: Backend, q_NHnD: Tensor, k_NKsD: Tensor, v_NKsD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of runs of one length.

    Args:
        backend: as given by :func:`dense_backend`.
        q_NHnD, k_NKsD, v_NKsD: one run for each entry of the batch; fewer key/value heads are not repeated.
        causal: whether a query sees only keys up to its own index, for which there must be as many queries as keys.
        scale: multiplier of q·k.

    Returns:
        ``[N, H, n, D]``, and the log-sum-exp ``[N, H, n]`` in float32 (float64 for float64).
    """
    assert not causal or q_NHnD.shape[2] == k_NKsD.shape[2]
    if backend == "CPU flash":
        out, lse = CPU_FLASH(q_NHnD, k_NKsD, v_NKsD, 0.0, causal, scale=scale)
    elif backend == "cuDNN":
        out, lse = CUDNN(q_NHnD, k_NKsD, v_NKsD, None, True, 0.0, causal, False, scale=scale)[:2]
        lse = lse.squeeze(-1)
    else:
        out, lse = FLASH(q_NHnD, k_NKsD, v_NKsD, 0.0, causal, False, scale=scale)[:2]
    return out, lse


def dense_backward(
    backend: Backend,
    grad_NHnD: Tensor,
    q_NHnD: Tensor,
    k_NKsD: Tensor,
    v_NKsD: Tensor,
    out_NHnD: Tensor,
    lse_NHn: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; arguments as for :func:`dense_forward`, with its results."""
    tensors = (grad_NHnD, q_NHnD, k_NKsD, v_NKsD, out_NHnD)
    most = (q_NHnD.shape[2], k_NKsD.shape[2])
    gradients: Any
    if backend == "CPU flash":
        return CPU_FLASH_BACKWARD(*tensors, lse_NHn, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    # Only dropout reads the state of a random generator, and only nested tensors have offsets.
    seed, offset = (torch.zeros(n, dtype=torch.uint64, device=q_NHnD.device) for n in ((2,), ()))
    if backend == "cuDNN":
        lse = lse_NHn.contiguous().unsqueeze(-1)
        gradients = CUDNN_BACKWARD(
            *tensors, lse, seed, offset, None, None, None, *most, 0.0, causal, scale=scale
        )
    else:
        lse = lse_NHn.contiguous()
        gradients = FLASH_BACKWARD(*tensors, lse, None, None, *most, 0.0, causal, seed, offset, scale=scale)
    return gradients  # type: ignore[no-any-return]
