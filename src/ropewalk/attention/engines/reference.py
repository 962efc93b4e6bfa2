"""The reference engine: plain softmax attention with a dense mask. It is the oracle and never the default."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions, Locality

# Shapes: B batch, H query heads, K key/value heads (H a multiple of K), T row length, D head dim, V value dim.


def plain_attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, visible: Tensor, options: AttentionOptions
) -> Tensor:
    """Softmax attention in the dtype of its inputs, with all scores materialised.

    Args:
        q_BHTD, k_BKTD, v_BKTV: queries, keys and values.
        visible: bool, broadcastable to ``[B, H, T, T]``; every query must see at least one key.
        options: scale, soft cap and sinks; window and chunk must already be part of ``visible``.

    Returns:
        ``[B, H, T, V]``.
    """
    groups = q_BHTD.shape[1] // k_BKTD.shape[1]
    k_BHTD = k_BKTD.repeat_interleave(groups, dim=1)
    v_BHTV = v_BKTV.repeat_interleave(groups, dim=1)
    scores = q_BHTD @ k_BHTD.transpose(-2, -1) * options.scale_of(q_BHTD.shape[-1])
    return softmax_of(scores, visible, options) @ v_BHTV


def softmax_of(scores_BHTS: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    """``[B, H, T, S]`` weights of scores that are already scaled; applies soft cap, mask and sinks."""
    if options.softcap is not None:
        scores_BHTS = options.softcap * torch.tanh(scores_BHTS / options.softcap)
    scores_BHTS = scores_BHTS.masked_fill(~visible, -math.inf)
    if options.sinks is None:
        return scores_BHTS.softmax(dim=-1)
    sinks = options.sinks.to(scores_BHTS.dtype).view(1, -1, 1, 1).expand(*scores_BHTS.shape[:3], 1)
    # A sink takes part in the softmax sum and is then dropped: it has no value.
    return torch.cat([scores_BHTS, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def plan(layouts: Sequence[PackedLayout], device: torch.device, locality: Locality) -> Tensor:
    """bool ``[rows, 1, T, T]``: the dense masks of the layouts."""
    return torch.stack([layout.dense_mask(locality) for layout in layouts]).unsqueeze(1).to(device)


def run(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    return plain_attention(q, k, v, visible, options)
