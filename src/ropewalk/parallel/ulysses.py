"""Ulysses: exchange sequence shards for head shards before attention, and back after it.

Between the two exchanges each rank runs the attention of a single process on its heads, so the output is identical bit
for bit.

Source: DeepSpeed-Ulysses, arXiv:2309.14509; with packed rows, arXiv:2411.13476, table 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import EngineError
from ropewalk.parallel.collectives import all_to_all

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Shapes: B rows, H query heads, K key/value heads, P ranks, s tokens of one rank, D head dim, V value dim.


def check_heads(num_heads: int, degree: int) -> None:
    """Raise if the Ulysses degree does not divide the number of attention heads.

    Raises:
        EngineError: with the degrees that do.
    """
    if num_heads % degree:
        fitting = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
        raise EngineError(
            f"parallel.sequence {degree} does not divide the model's {num_heads} attention heads; set "
            f"parallel.sequence to one of {', '.join(map(str, fitting))}; to split rows over more ranks, raise "
            "parallel.ring"
        )


def replicated_kv_heads(num_kv_heads: int, degree: int) -> int:
    """Number of key/value heads after repeating each as often as needed for ``degree`` to divide their number."""
    return math.lcm(num_kv_heads, degree)


def ulysses(
    q_BHsD: Tensor, k_BKsD: Tensor, v_BKsV: Tensor, group: Any, degree: int, attention: Attention
) -> Tensor:
    """Attention over the tokens of all ranks; each rank computes its share of the heads.

    Args:
        q_BHsD, k_BKsD, v_BKsV: this rank's tokens, equally many on every rank; H is a multiple of ``degree``.
        group: process group of ``degree`` ranks, in sequence order.
        attention: function of query ``[B, H / P, P·s, D]``, key ``[B, K' / P, P·s, D]`` and value
            ``[B, K' / P, P·s, V]`` that returns ``[B, H / P, P·s, V]``; K' is the number of key/value heads after
            repetition.

    Returns:
        ``[B, H, s, V]``.

    Raises:
        EngineError: if H is not a multiple of ``degree``.
    """
    check_heads(q_BHsD.shape[1], degree)
    repeats = replicated_kv_heads(k_BKsD.shape[1], degree) // k_BKsD.shape[1]
    # With fewer key/value heads than ranks, ranks share a head: each needs a copy, whose gradients autograd adds up.
    if repeats > 1:
        k_BKsD, v_BKsV = (x.repeat_interleave(repeats, dim=1) for x in (k_BKsD, v_BKsV))
    parts = [x.unflatten(1, (degree, -1)).transpose(0, 1) for x in (q_BHsD, k_BKsD, v_BKsV)]
    sizes = [part[0].numel() for part in parts]
    # One all-to-all for queries, keys and values saves the latency of two more.
    received = all_to_all(torch.cat([part.flatten(1) for part in parts], dim=1), group).split(sizes, dim=1)
    q, k, v = (_joined(x.view(part.shape)) for x, part in zip(received, parts, strict=True))
    output = attention(q, k, v)
    # The reverse exchange: tokens return to their rank, and the heads of all ranks are concatenated in rank order.
    back = output.unflatten(2, (degree, -1)).permute(2, 0, 1, 3, 4)
    return all_to_all(back, group).transpose(0, 1).flatten(1, 2)


def _joined(x_PBhsD: Tensor) -> Tensor:
    """``[P, B, h, s, D]`` to ``[B, h, P·s, D]``: concatenate the tokens of all ranks in rank order."""
    return x_PBhsD.permute(1, 2, 0, 3, 4).flatten(2, 3)
