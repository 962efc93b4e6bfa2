"""The reference engine: plain softmax attention with a dense mask. The oracle, never the default."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout

# Shapes: B batch, H query heads, K key/value heads (H a multiple of K), T row length, D head dim, V value dim.


def plain_attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Softmax attention in the dtype of its inputs, every score materialised.

    Args:
        q_BHTD, k_BKTD, v_BKTV: queries, keys and values.
        visible: bool, broadcastable to ``[B, H, T, T]``; every query must see at least one key.
        scale: multiplier of q·k.
        softcap: if given, scores become ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2).

    Returns:
        ``[B, H, T, V]``.
    """
    groups = q_BHTD.shape[1] // k_BKTD.shape[1]
    k_BHTD = k_BKTD.repeat_interleave(groups, dim=1)
    v_BHTV = v_BKTV.repeat_interleave(groups, dim=1)
    scores = q_BHTD @ k_BHTD.transpose(-2, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ v_BHTV


def plan(layouts: Sequence[PackedLayout], device: torch.device) -> Tensor:
    """bool ``[rows, 1, T, T]``: the layouts' definition, evaluated densely."""
    return torch.stack([layout.dense_mask() for layout in layouts]).unsqueeze(1).to(device)


def run(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Tensor:
    return plain_attention(q, k, v, visible, scale, softcap)
