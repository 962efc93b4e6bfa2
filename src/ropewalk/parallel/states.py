"""States and convolution inputs that ranks pass on through the runs of recurrent layers. Differentiable.

Every rank of a sequence group calls these functions in the same order, and uses their results in its graph, because
they are collective in the forward and in the backward. A rank that has nothing to send or receives nothing exchanges
empty tensors.

Source: linear attention over the ranks that share a row, arXiv:2404.02882, here with any piece of a row on any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.parallel.collectives import all_to_all
from ropewalk.parallel.fragments import HaloPlan, SentEntries, StatePlan

# Shapes: B rows, n tokens of the rank in a row, C channels, F fragments, H heads; a state of a head is X x Y.


def convolve(x_BCn: Tensor, plan: HaloPlan, group: Any, convolution: Callable[[Tensor], Tensor]) -> Tensor:
    """A causal convolution along runs whose tokens are spread over ranks.

    Args:
        x_BCn: inputs of this rank's tokens.
        plan: plan of this rank, for the width of the convolution.
        group: process group of the ranks that share the rows.
        convolution: maps ``[1, C, length]`` to the same shape; each output depends on its own input and on those of
            the plan's width before it.

    Returns:
        ``[B, C, n]``.
    """
    flat = x_BCn.transpose(1, 2).flatten(0, 1)
    # One sequence, in which no fragment reaches another one over its halo.
    parts = [flat, *([_exchange(flat, plan.sent, group)] if plan.sent.anywhere else ())]
    inputs = torch.cat([*parts, flat.new_zeros(1, flat.shape[1])]).index_select(0, plan.inputs)
    outputs = convolution(inputs.T[None])[0].T.index_select(0, plan.outputs)
    rows: Tensor = outputs.unflatten(0, (len(x_BCn), -1))  # type: ignore[no-untyped-call]
    return rows.transpose(1, 2)


def incoming_states(added: Tensor, factors: Tensor, plan: StatePlan, group: Any) -> Tensor:
    """The states that a rank's fragments start from.

    A fragment is an affine map of the state before it: S becomes ``factors * S + added``.

    Args:
        added: ``[leading fragments, H, X, Y]``, the state behind each leading fragment if it starts from zero.
        factors: ``[leading fragments, H, X, X]``, matrices, or ``[leading fragments, H, 1, 1]``, numbers.
        plan: plan of this rank.
        group: process group of the ranks that share the rows.

    Returns:
        ``[1 + states, H, X, Y]``, numbered as in the plan.
    """
    size, by_matrix = added.shape[2:].numel(), factors.shape[2:].numel() > 1
    sent = torch.cat([added.flatten(2), factors.flatten(2)], 2)
    received = _exchange(sent, plan.sent, group)
    added = received[..., :size].unflatten(2, added.shape[2:])
    factors = received[..., size:].unflatten(2, factors.shape[2:])
    # A sum over nothing: it connects what was received with the graph even if no step uses it.
    states = [added.new_zeros(1, *added.shape[1:]) + received[:0].sum()]
    # Under autocast, matrices would be rounded.
    with torch.autocast(added.device.type, enabled=False):
        for number, step in enumerate(plan.steps):
            state = added.index_select(0, step)
            if number:
                before, factor = states[-1][: len(step)], factors.index_select(0, step)
                state = state + (factor @ before if by_matrix else factor * before)
            states.append(state)
    return torch.cat(states)


def _exchange(x: Tensor, sent: SentEntries, group: Any) -> Tensor:
    return all_to_all(x.index_select(0, sent.entries), group, sent.send_counts, sent.receive_counts)
