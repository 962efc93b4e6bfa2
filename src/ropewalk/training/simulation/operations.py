"""Operations and scratch memory of attention kernels, from the lengths of their sequences.

torch's own counter takes every query to see every key. Causal attention over packed documents computes far fewer pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.attention.engines import simulated_flex as _registers_its_operators  # noqa: F401
from ropewalk.attention.operators import (
    CPU_FLASH,
    CPU_FLASH_BACKWARD,
    CUDNN,
    CUDNN_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    VARLEN,
    VARLEN_BACKWARD,
)
from ropewalk.attention.speeds import timed_flops

FLEX = torch.ops.ropewalk.flex_attention
FLEX_BACKWARD = torch.ops.ropewalk.flex_attention_backward

BACKWARDS = frozenset((VARLEN_BACKWARD, CPU_FLASH_BACKWARD, CUDNN_BACKWARD, FLASH_BACKWARD, FLEX_BACKWARD))
ATTENTION = frozenset((VARLEN, CPU_FLASH, CUDNN, FLASH, FLEX)) | BACKWARDS
"""Kernels whose operations are counted by visible pairs."""

GROUPED = torch.ops.aten._grouped_mm
"""Products of the experts of a mixture, one per group of rows, in one call."""

ROWS_PER_RUN = 128
"""Rows that FlashAttention adds to its accumulators for each sequence of a call."""

Values = Callable[[Tensor], Tensor | None]
"""The values of a tensor that was copied to the device, where they are known."""


def visible_pairs(queries: int, keys: int, window: int | None = None) -> int:
    """Number of query-key pairs of causal attention, aligned at the last query and the last key.

    Args:
        queries, keys: lengths in tokens.
        window: number of keys that a query sees at most, itself included; None for no limit.

    Example:
        >>> visible_pairs(4, 4), visible_pairs(2, 4), visible_pairs(4, 4, window=2)
        (10, 7, 7)
    """

    def up_to(key: int) -> int:
        """Pairs of as many queries as keys."""
        inside = key if window is None else min(key, window)
        return inside * (inside + 1) // 2 + (key - inside) * inside

    return up_to(keys) - up_to(max(keys - queries, 0))


def kernel_of(packet: Any) -> str:
    """Kernel of an attention operator, a key of :data:`~ropewalk.attention.speeds.SPEEDS`."""
    name = str(packet)
    return next((kernel for kernel in ("cudnn", "efficient", "flex") if kernel in name), "flash2")


class AttentionCall(NamedTuple):
    """Floating-point operations of a call, and those that take as long at the full speed of its kernel."""

    flops: int
    timed_flops: int


def attention_call(packet: Any, args: Sequence[Any], kwargs: Any, values: Values) -> AttentionCall:
    """Floating-point operations of an attention kernel; a multiply-add counts as two.

    The forward takes ``2·H·(D + D')`` per pair, of D dimensions of keys and D' of values. The backward of flash
    attention computes the scores again, and takes ``H·(6·D + 4·D')``.

    Args:
        packet: one of ``ATTENTION``.
        args, kwargs: arguments of the operator.
        values: see :data:`Values`.
    """
    backward = packet in BACKWARDS
    q, k, v = args[2:5] if packet is FLEX_BACKWARD else args[1:4] if backward else args[:3]
    if packet in (FLEX, FLEX_BACKWARD):
        # The kernel computes whole blocks, and the scores twice in the backward. Neither is counted, as with the other
        # kernels: a layer's operations do not depend on the engine, and its efficiency does.
        pairs, width, value_width = q.shape[1] * args[-1], q.shape[3], v.shape[3]
    elif packet in (VARLEN, VARLEN_BACKWARD):
        pairs = q.shape[1] * _pairs_of_runs(packet, args, kwargs, values)
        width, value_width = q.shape[2], v.shape[2]
    else:
        causal = _named(packet, args, kwargs).get("is_causal", False)
        length, keys = q.shape[2], k.shape[2]
        # These kernels align at the first query and the first key.
        seen = visible_pairs(min(length, keys), min(length, keys)) + max(length - keys, 0) * keys
        pairs = q.shape[0] * q.shape[1] * (seen if causal else length * keys)
        width, value_width = q.shape[3], v.shape[3]
    flops = int(pairs * ((6 * width + 4 * value_width) if backward else 2 * (width + value_width)))
    return AttentionCall(flops, timed_flops(flops, pairs, q.shape[:-1].numel(), width))


def recomputed_flops(packet: Any, args: Sequence[Any], flops: int) -> int:
    """Of the operations of an attention kernel in a backward, those that the forward has done before.

    Activation checkpointing runs forward kernels again. A backward kernel computes the scores again, ``2·H·D`` per
    pair.
    """
    if packet not in BACKWARDS:
        return flops
    key, value = args[3:5] if packet is FLEX_BACKWARD else args[2:4]
    width, value_width = key.shape[-1], value.shape[-1]
    return int(flops * 2 * width // (6 * width + 4 * value_width))


def _pairs_of_runs(packet: Any, args: Sequence[Any], kwargs: Any, values: Values) -> int:
    given = _named(packet, args, kwargs)
    queries, keys = (_lengths(given[name], values) for name in ("cu_seq_q", "cu_seq_k"))
    left, right = given.get("window_size") or (-1, -1)
    if queries is None or keys is None:
        # Without the lengths, one sequence is the upper bound.
        queries, keys = [given["query"].shape[0]], [given["key"].shape[0]]
    if right != 0 and not given.get("is_causal"):
        return sum(q * k for q, k in zip(queries, keys, strict=True))
    window = None if left < 0 else left + 1
    return sum(visible_pairs(q, k, window) for q, k in zip(queries, keys, strict=True))


def _lengths(offsets: Tensor, values: Values) -> list[int] | None:
    known = values(offsets)
    return None if known is None else [end - start for start, end in pairwise(known.tolist())]


def grouped_flops(a: Tensor, b: Tensor) -> int:
    """Floating-point operations of ``_grouped_mm``, which torch's own counter leaves out.

    Groups divide the rows of a two-dimensional operand, or the dimension that two of them are summed over. Each row
    belongs to one group, so the number of groups does not count.
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def grouped_output(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """Output of ``_grouped_mm`` without data, in the dtype of ``a``.

    CUDA multiplies float32 and float16 as well, group after group, for which the host reads the offsets. torch's own
    function for shapes knows bfloat16 alone.

    Source: torch's GroupedMMUtils.h, ``create_grouped_gemm_output_tensor`` and ``_grouped_mm_fallback``.
    """
    if a.dim() == b.dim() == 2:
        assert offsets is not None
        return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])
    leading = a.shape[:1] if a.dim() == b.dim() else ()
    return a.new_empty(*leading, a.shape[-2], b.shape[-1])


def workspace(packet: Any, args: Sequence[Any], kwargs: Any) -> int:
    """Bytes that a kernel allocates besides its results, and frees when it ends.

    FlashAttention 2 accumulates the gradients of queries in float32, with the head dimension rounded up to a multiple
    of 32 or 64, and keeps one float32 per head; both have 128 more rows per sequence, or a multiple of 128 rows where
    all sequences have one length. cuDNN does the same without rounding. With grouped-query attention both compute
    gradients of keys and values for every query head.

    FlexAttention has a float32 per head and query for the largest scores in the forward, and two in the backward: for
    the products of outputs and their gradients, and for gradients of the log-sum-exp, which are zero without sinks.

    Source: torch's flash_api.cpp, ``mha_varlen_bwd``: ``dq_accum``, ``softmax_d``, ``dk_expanded``, ``dv_expanded``,
    and ``mha_bwd``; cudnn-frontend's scaled_dot_product_flash_attention.h, ``dQ_accum``, ``softmax_sum``,
    ``dK_fullhead``;
    ``_inductor/kernel/flex/flex_attention.py``: ``max_scores``, ``delta``, ``grad_lse_exp2``.
    """
    if packet is FLEX:
        return int(args[0].shape[:3].numel() * 4)
    if packet is FLEX_BACKWARD:
        return int(args[2].shape[:3].numel() * 4 * 2)
    if packet not in (VARLEN_BACKWARD, FLASH_BACKWARD, CUDNN_BACKWARD):
        return 0
    given = _named(packet, args, kwargs)
    query, key = given["query"], given["key"]
    heads, width = query.shape[1], query.shape[-1]
    multiple = 1 if packet is CUDNN_BACKWARD else 32 if width <= 128 else 64
    rounded = -(-width // multiple) * multiple
    if packet is VARLEN_BACKWARD:
        rows = query.shape[0] + ROWS_PER_RUN * (given["cu_seq_q"].shape[0] - 1)
    else:
        whole = 1 if packet is CUDNN_BACKWARD else ROWS_PER_RUN
        rows = query.shape[0] * -(-query.shape[2] // whole) * whole
    sums = rows * heads * (rounded + 1) * 4
    expanded = 2 * key.numel() // key.shape[1] * heads * key.element_size() if key.shape[1] != heads else 0
    return int(sums + expanded)


def _named(packet: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in packet.default._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
