"""Runs: the contiguous causal sequences that a packed layout decomposes into, and gathering them.

Whatever the pattern, a packed row is a set of *runs*: sequences in which plain causal attention is exactly
what the layout asks for. Under ``full`` the row is one run; under ``intra_document`` each document is one;
under ``anchor`` each document with the anchor put in front of it is one (the anchor sees only itself, so every
copy of its query gives the same output, and one of them is kept). Gathering by index covers interleaved chunks
too: attention does not care about storage order once positions are applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.packing import PackedLayout


@dataclass(frozen=True, eq=False)
class Run:
    """One causal sequence of a batch of rows.

    Attributes:
        tokens: int64 ``[length]``, indices into the flattened batch (row · T + position).
        repeated: number of leading tokens that another run owns: their outputs are dropped.
    """

    tokens: Tensor
    repeated: int

    @property
    def length(self) -> int:
        return self.tokens.numel()


def runs_of(layouts: Sequence[PackedLayout]) -> list[Run]:
    """All runs of a batch of rows, row by row, documents in ascending order."""
    runs: list[Run] = []
    for row, layout in enumerate(layouts):
        offset = row * layout.total_length
        if layout.pattern == "full":
            runs.append(Run(torch.arange(layout.total_length) + offset, 0))
            continue
        anchor = torch.arange(layout.anchor_length) + offset
        ordered = layout.document_order[layout.anchor_length :] + offset
        documents = ordered.split(layout.document_lengths.tolist())
        if layout.pattern == "anchor" and layout.anchor_length:
            for number, tokens in enumerate(documents):
                repeated = 0 if number == 0 else layout.anchor_length
                runs.append(Run(torch.cat([anchor, tokens]), repeated))
        else:
            if layout.anchor_length:
                runs.append(Run(anchor, 0))
            runs.extend(Run(tokens, 0) for tokens in documents)
    return runs


@dataclass(frozen=True, eq=False)
class Gather:
    """How a flattened batch moves into a buffer of runs, one after the other, and back; made once a row.

    Attributes:
        index: int64 ``[slots]``, the token in each slot.
        slot: int64 ``[tokens]``, the slot that owns each token: where its output and its own gradient lie.
        dropped: int64, the slots that own no token, because another run does.
        repeats: pairs (tokens ``[n]``, slots ``[copies, n]``): tokens that stand in further slots as well.
    """

    index: Tensor
    slot: Tensor
    dropped: Tensor
    repeats: tuple[tuple[Tensor, Tensor], ...]


def gather_of(runs: Sequence[Run], device: torch.device) -> Gather:
    """The gather that lays these runs out one after the other, its index tensors on a device."""
    owned = torch.cat([torch.arange(run.length) >= run.repeated for run in runs])
    index = torch.cat([run.tokens for run in runs])
    slots = torch.arange(len(index))
    slot = torch.empty(int(owned.sum()), dtype=torch.int64)
    slot[index[owned]] = slots[owned]
    copies: dict[tuple[int, int], list[Tensor]] = {}
    start = 0
    for run in runs:
        if run.repeated:
            key = (int(run.tokens[0]), run.repeated)
            copies.setdefault(key, []).append(slots[start : start + run.repeated])
        start += run.length
    repeats = tuple(
        (torch.arange(first, first + count).to(device), torch.stack(found).to(device))
        for (first, count), found in copies.items()
    )
    return Gather(index.to(device), slot.to(device), slots[~owned].to(device), repeats)


def sort_by_document(layouts: Sequence[PackedLayout], device: torch.device) -> Gather | None:
    """The gather that puts every row's tokens into (document, order), or None where they all are.

    Attention does not care about storage order once positions are applied, so an engine for contiguous
    documents serves interleaved ones between this and its inverse.
    """
    if not any(layout.is_interleaved and layout.pattern != "full" for layout in layouts):
        return None
    rows = [Run(layout.storage_in_order + row * layout.total_length, 0) for row, layout in enumerate(layouts)]
    return gather_of(rows, device)


class _IntoRuns(torch.autograd.Function):
    """``tokens[index]``, with a backward that gathers instead of adding by index.

    Each token is owned by one slot, so its gradient is a copy; only the anchors add up, and they do so in
    float32 or better whatever the dtype, since an anchor collects from every document. An index_add would be
    neither deterministic nor precise on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return tokens.index_select(0, gather.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gather: Gather = ctx.gather
        (grad,) = grads
        result = grad.index_select(0, gather.slot)
        wide = torch.promote_types(result.dtype, torch.float32)
        for tokens, slots in gather.repeats:
            copies = grad.index_select(0, slots.flatten()).unflatten(0, slots.shape)
            result[tokens] = (result[tokens].to(wide) + copies.sum(dim=0, dtype=wide)).to(result.dtype)
        return result, None


class _OutOfRuns(torch.autograd.Function):
    """Each token's output from the slot that owns it; the other slots get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return slots.index_select(0, gather.slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gather: Gather = ctx.gather
        (grad,) = grads
        return grad.index_select(0, gather.index).index_fill_(0, gather.dropped, 0.0), None


def into_runs(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """``[B, H, T, D]`` to ``[slots, H, D]``."""
    heads, head_dim = x_BHTD.shape[1], x_BHTD.shape[3]
    tokens = x_BHTD.transpose(1, 2).reshape(-1, heads * head_dim)
    slots: Tensor = _IntoRuns.apply(tokens, gather)
    return slots.view(-1, heads, head_dim)


def out_of_runs(x_SHD: Tensor, gather: Gather, batch: int) -> Tensor:
    """``[slots, H, D]`` to ``[B, H, T, D]``."""
    heads, head_dim = x_SHD.shape[1:]
    tokens: Tensor = _OutOfRuns.apply(x_SHD.reshape(-1, heads * head_dim), gather)
    return tokens.view(batch, -1, heads, head_dim).transpose(1, 2)


def sort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """``[B, H, T, D]`` with each row in (document, order), by :func:`sort_by_document`."""
    slots = into_runs(x_BHTD, gather)
    return slots.view(x_BHTD.shape[0], -1, *slots.shape[1:]).transpose(1, 2)


def unsort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """The inverse of :func:`sort_rows`."""
    return out_of_runs(x_BHTD.transpose(1, 2).flatten(0, 1), gather, x_BHTD.shape[0])
