"""Attention to chosen tokens: a query attends to those that it both sees and has chosen.

Queries are computed in blocks, with a mask of what each of them sees and has chosen: all pairs of a block are computed,
and nothing of quadratic size is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.attention.engines.plain import backward_of_group, forward_of_group
from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.kept import KEPT
from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.packed import without_autocast

# Shapes: B rows, T tokens of a row, C chosen tokens of a query, H heads, D head dim, V value dim.


@dataclass(frozen=True, eq=False)
class Visibility:
    """What the queries of rows see.

    Attributes:
        documents: int64 ``[B, T]``, the document of each token; one for the whole row under ``full``.
        shared: int64 ``[B]``, number of first tokens that every query of a row sees.
    """

    documents: Tensor
    shared: Tensor

    def seen(self, start: int, stop: int) -> Tensor:
        """bool ``[B, stop - start, stop]``: whether each of these queries sees each token before ``stop``."""
        places = torch.arange(stop, device=self.documents.device)
        same = self.documents[:, start:stop, None] == self.documents[:, None, :stop]
        return (same | (places < self.shared[:, None, None])) & (places <= places[start:, None])

    def chosen(self, chosen_BTC: Tensor, start: int, stop: int) -> Tensor:
        """bool ``[B, 1, stop - start, stop]``: whether each query sees and has chosen each token."""
        seen = self.seen(start, stop)
        # What lies behind these tokens, a query does not see.
        places = chosen_BTC[:, start:stop].long().clamp(max=stop)
        chosen = seen.new_zeros(*seen.shape[:2], stop + 1).scatter_(-1, places, True)
        return (seen & chosen[..., :stop])[:, None]


@cached_per_layout
def visibility(layouts: tuple[PackedLayout, ...], device: torch.device) -> Visibility:
    """What the queries of rows of one length see, on a device."""
    documents = [
        torch.zeros_like(each.position_ids) if each.pattern == "full" else each.document_ids
        for each in layouts
    ]
    shared = [each.anchor_length if each.pattern == "anchor" else 0 for each in layouts]
    return Visibility(torch.stack(documents).to(device), torch.tensor(shared, device=device))


def attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layouts: tuple[PackedLayout, ...],
    chosen: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attention of packed rows to the tokens that each query sees and has chosen, forward and backward.

    Args:
        query, key, value: as for :func:`ropewalk.attend`.
        layouts: one layout for each row.
        chosen: whole numbers ``[B, T, C]``, places in the row. Each query must have chosen a token that it sees.
        options: scale, soft cap and sinks of the layer, which has neither a window nor chunks.

    Returns:
        ``[B, H, T, V]`` in the dtype of the inputs.
    """
    seen = visibility(layouts, query.device)
    output: Tensor = _Chosen.apply(query, key, value, options.sinks, chosen, seen, options)  # type: ignore[no-untyped-call]
    return output


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        chosen: Tensor,
        seen: Visibility,
        options: AttentionOptions,
    ) -> Tensor:
        def computed() -> tuple[Tensor, Tensor]:
            with without_autocast(q.device):
                out, lse = forward_of_group(q, k, v, options, partial(seen.chosen, chosen))
            m = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            return (out * (lse - m).exp()[..., None]).to(out.dtype), m

        kept, lengths = KEPT.get(), (q.shape[2],) * len(q)
        out, m = computed() if kept is None else kept.results(computed, Runs(lengths, lengths), None)
        ctx.seen, ctx.options = seen, options
        ctx.save_for_backward(q, k, v, sinks, chosen, out, m)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, chosen, out, m = ctx.saved_tensors
        pairs = partial(ctx.seen.chosen, chosen)
        with without_autocast(q.device):
            gradients = backward_of_group(grad, q, k, v, out, m, ctx.options, pairs)
        if sinks is None:
            return (*gradients, None, None, None, None)
        delta = (grad.to(m.dtype) * out.to(m.dtype)).sum(-1)
        of_sinks = -((sinks.to(m.dtype)[:, None] - m).exp() * delta).sum((0, 2))
        return (*gradients, of_sinks.to(sinks.dtype), None, None, None)
