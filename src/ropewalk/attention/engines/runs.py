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

from ropewalk.attention.layout import PackedLayout


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


def runs_of(
    layouts: Sequence[PackedLayout], device: torch.device, chunk: int | None = None
) -> tuple[list[int], Gather | None]:
    """The runs of a batch of rows, row by row, documents in ascending order.

    Args:
        layouts: of the rows.
        device: of the gather's tensors.
        chunk: tokens of the chunks that runs are cut into, each a run of its own then; None for whole runs.

    Returns:
        The tokens of each run; and the gather that lays them out one after the other, its index tensors on the device,
        or None where the batch lies that way already.
    """
    lengths: list[Tensor] = []
    indices: list[Tensor] = []
    owned: list[Tensor] = []
    repeats: list[tuple[Tensor, Tensor]] = []
    slots = 0
    for row, layout in enumerate(layouts):
        first, anchor = row * layout.total_length, layout.anchor_length
        order = layout.storage_in_order
        if layout.pattern == "full":
            runs = torch.tensor([layout.total_length])
        elif layout.pattern == "anchor" and anchor:
            runs = layout.document_lengths + anchor
            # Each document has the anchor in front of it; the first copy owns its tokens.
            copies = (runs.cumsum(0) - runs)[:, None] + torch.arange(anchor)
            documents = torch.ones(int(runs.sum()), dtype=torch.bool)
            documents[copies] = False
            owns = documents.clone()
            owns[:anchor] = True
            index = torch.empty(len(documents), dtype=torch.int64)
            index[copies], index[documents] = order[:anchor], order[anchor:]
            if len(copies) > 1:
                repeats.append((torch.arange(first, first + anchor), copies[1:] + slots))
            lengths.append(runs)
            indices.append(index + first)
            owned.append(owns)
            slots += len(index)
            continue
        else:
            runs = layout.document_lengths
            runs = torch.cat([torch.tensor([anchor]), runs]) if anchor else runs
        lengths.append(runs)
        indices.append(order + first)
        owned.append(torch.ones(len(order), dtype=torch.bool))
        slots += len(order)
    tokens = torch.cat(lengths).tolist()
    if chunk is not None:
        # Chunks of a run lie one after the other as they are.
        tokens = [min(chunk, run - start) for run in tokens for start in range(0, run, chunk)]
    if not repeats and not _any_interleaved(layouts):
        return tokens, None
    return tokens, _gather(torch.cat(indices), torch.cat(owned), repeats, device)


def _gather(
    index: Tensor, owned: Tensor, repeats: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> Gather:
    slots = torch.arange(len(index))
    slot = torch.empty(int(owned.sum()), dtype=torch.int64)
    slot[index[owned]] = slots[owned]
    on_device = tuple((tokens.to(device), copies.to(device)) for tokens, copies in repeats)
    return Gather(index.to(device), slot.to(device), slots[~owned].to(device), on_device)


def gather_by(index: Tensor, device: torch.device) -> Gather | None:
    """The gather into slots of which ``index`` says the token; every token stands in one slot or more.

    Args:
        index: int64 ``[slots]``, on the CPU; its values are all of 0 to tokens - 1.
        device: of the gather's own tensors.

    Returns:
        A gather in which the first slot of a token owns it; None where the tokens lie that way already.
    """
    if torch.equal(index, torch.arange(len(index))):
        return None
    slots, copies = index.argsort(stable=True), index.bincount()
    first = copies.cumsum(0) - copies
    owned = torch.zeros(len(index), dtype=torch.bool)
    owned[slots[first]] = True
    repeats = []
    for count in copies.unique().tolist():
        if count > 1:
            tokens = (copies == count).nonzero().flatten()
            repeats.append((tokens, slots[first[tokens] + torch.arange(1, count)[:, None]]))
    return _gather(index, owned, repeats, device)


def _any_interleaved(layouts: Sequence[PackedLayout]) -> bool:
    return any(layout.is_interleaved and layout.pattern != "full" for layout in layouts)


def sort_by_document(layouts: Sequence[PackedLayout], device: torch.device) -> Gather | None:
    """The gather that puts every row's tokens into (document, order), or None where they all are.

    Attention does not care about storage order once positions are applied, so an engine for contiguous
    documents serves interleaved ones between this and its inverse.
    """
    if not _any_interleaved(layouts):
        return None
    index = torch.cat(
        [layout.storage_in_order + row * layout.total_length for row, layout in enumerate(layouts)]
    )
    return _gather(index, torch.ones(len(index), dtype=torch.bool), (), device)


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
            # In place: around a ring up to half of a row's keys stand in further slots.
            result[tokens] = copies.sum(dim=0, dtype=wide).add_(result[tokens]).to(result.dtype)
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


def into_runs(x_BHTD: Tensor, gather: Gather | None) -> Tensor:
    """``[B, H, T, D]`` to ``[slots, H, D]``; without a gather no more than another view, where strides allow it."""
    x_BTHD = x_BHTD.transpose(1, 2)
    if gather is None:
        # Kernels read whole heads: their elements must lie side by side.
        return (
            x_BTHD.reshape(-1, *x_BTHD.shape[2:])
            if x_BTHD.stride(3) == 1
            else x_BTHD.flatten(0, 1).contiguous()
        )
    heads, head_dim = x_BTHD.shape[2:]
    slots: Tensor = _IntoRuns.apply(x_BTHD.reshape(-1, heads * head_dim), gather)
    return slots.view(-1, heads, head_dim)


def out_of_runs(x_SHD: Tensor, gather: Gather | None, batch: int) -> Tensor:
    """``[slots, H, D]`` to ``[B, H, T, D]``."""
    heads, head_dim = x_SHD.shape[1:]
    if gather is None:
        rows: Tensor = x_SHD.unflatten(0, (batch, -1))
        return rows.transpose(1, 2)
    tokens: Tensor = _OutOfRuns.apply(x_SHD.reshape(-1, heads * head_dim), gather)
    return tokens.view(batch, -1, heads, head_dim).transpose(1, 2)


def sort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """``[B, H, T, D]`` with each row in (document, order), by :func:`sort_by_document`."""
    slots = into_runs(x_BHTD, gather)
    return slots.view(x_BHTD.shape[0], -1, *slots.shape[1:]).transpose(1, 2)


def unsort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """The inverse of :func:`sort_rows`."""
    return out_of_runs(x_BHTD.transpose(1, 2).flatten(0, 1), gather, x_BHTD.shape[0])
