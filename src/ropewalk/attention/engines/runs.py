"""Runs: the contiguous causal sequences into which a packed layout decomposes, and how to gather them.

Under every pattern a packed row is a set of *runs*: sequences in which plain causal attention is exactly what
the layout asks for. Under ``full`` the row is one run. Under ``intra_document`` each document is a run. Under
``anchor`` each document with the anchor in front of it is a run; the anchor sees only itself, so all copies of
its queries give the same output, and one of them is kept. Gathering by index also covers interleaved chunks:
attention does not depend on storage order once positions are applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions


@dataclass(frozen=True)
class RunGroup:
    """Adjacent runs of equal size.

    Attributes:
        runs: number of runs.
        queries, keys: tokens of each run, with at least as many keys as queries.
        first_query, first_key: where they begin in the buffers of all runs.
    """

    runs: int
    queries: int
    keys: int
    first_query: int
    first_key: int

    def queries_of(self, x_QHD: Tensor) -> Tensor:
        """A view ``[runs, H, queries, D]`` of ``[Q, H, D]``."""
        own = x_QHD[self.first_query : self.first_query + self.runs * self.queries]
        rows: Tensor = own.unflatten(0, (self.runs, self.queries))  # type: ignore[no-untyped-call]
        return rows.transpose(1, 2)

    def keys_of(self, x_SKD: Tensor) -> Tensor:
        """A view ``[runs, K, keys, D]`` of ``[S, K, D]``."""
        own = x_SKD[self.first_key : self.first_key + self.runs * self.keys]
        rows: Tensor = own.unflatten(0, (self.runs, self.keys))  # type: ignore[no-untyped-call]
        return rows.transpose(1, 2)

    def lse_of(self, lse_HQ: Tensor) -> Tensor:
        """A view ``[runs, H, queries]`` of ``[H, Q]``."""
        own = lse_HQ[:, self.first_query : self.first_query + self.runs * self.queries]
        rows: Tensor = own.unflatten(1, (self.runs, self.queries))  # type: ignore[no-untyped-call]
        return rows.transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs that are stored one after the other: causal sequences whose last query sees their last key.

    Attributes:
        queries, keys: number of queries and of keys of each run.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @cached_property
    def groups(self) -> tuple[RunGroup, ...]:
        """The runs, with adjacent ones of equal size together."""
        sizes = groupby(zip(self.queries, self.keys, strict=True))
        return tuple(_placed((len(list(same)), *size) for size, same in sizes))

    @cached_property
    def singles(self) -> tuple[RunGroup, ...]:
        """The runs, each by itself."""
        return tuple(_placed((1, *size) for size in zip(self.queries, self.keys, strict=True)))

    @staticmethod
    def new_lse(q_QHD: Tensor) -> Tensor:
        """An empty log-sum-exp ``[H, Q]``."""
        wide = torch.promote_types(q_QHD.dtype, torch.float32)
        return torch.empty(q_QHD.shape[1], q_QHD.shape[0], dtype=wide, device=q_QHD.device)


def _placed(sizes: Iterable[tuple[int, int, int]]) -> Iterator[RunGroup]:
    """Groups of numbers of runs, queries and keys, one after the other."""
    first_query = first_key = 0
    for runs, queries, keys in sizes:
        yield RunGroup(runs, queries, keys, first_query, first_key)
        first_query, first_key = first_query + runs * queries, first_key + runs * keys


class Kernel(Protocol):
    """Attention within runs; the modules of kernels have these two functions.

    Kernels apply scale, soft cap and window. Chunks must be runs of their own, and sinks are merged afterwards.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Attention of ``[Q, H, D]`` queries to ``[S, K, D]`` keys and ``[S, K, V]`` values of the runs.

        Returns:
            Output ``[Q, H, V]``, and the log-sum-exp of the scores ``[H, Q]``, in float32 or wider.
        """

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: Runs,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v.

        ``out`` and ``lse`` may be those of a softmax over more keys than these; the gradients are then those of the
        keys that are there.
        """


@dataclass(frozen=True, eq=False)
class Gather:
    """Index tensors that move a flattened batch into a buffer of consecutive runs and back; built once for each row.

    Attributes:
        index: int64 ``[slots]``, the token in each slot.
        slot: int64 ``[tokens]``, the slot that owns each token; its output and its own gradient are stored there.
        dropped: int64, slots that hold a copy of a token that another slot owns.
        repeats: pairs (tokens ``[n]``, slots ``[copies, n]``) of tokens that also occupy further slots.
    """

    index: Tensor
    slot: Tensor
    dropped: Tensor
    repeats: tuple[tuple[Tensor, Tensor], ...]


def runs_of(
    layouts: Sequence[PackedLayout], device: torch.device, chunk: int | None = None
) -> tuple[list[int], Gather | None]:
    """The runs of a batch, row by row, with documents in ascending order.

    Args:
        layouts: layouts of the rows.
        device: device of the gather's tensors.
        chunk: tokens per chunk, if runs are cut into chunks that become runs themselves; None for whole runs.

    Returns:
        The tokens of each run; and the gather that stores the runs one after the other, with index tensors on the
        device, or None if the batch is already stored that way.
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
            # Each document has a copy of the anchor in front of it; the first copy owns the anchor's tokens.
            copies = (runs.cumsum(0) - runs)[:, None] + torch.arange(anchor)
            documents = torch.ones(int(runs.sum()), dtype=torch.bool)
            documents[copies] = False
            owns = documents.clone()
            owns[:anchor] = True
            index = torch.empty(len(documents), dtype=torch.int64)
            index[copies], index[documents] = order[:anchor], order[anchor:]
            if len(copies) > 1:
                # Copies beyond the first are listed, so that the backward pass adds their gradients to the anchor's.
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
        # Chunks of a run are already stored one after the other.
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
    """The gather into slots whose tokens ``index`` gives; every token occupies at least one slot.

    Args:
        index: int64 ``[slots]``, on the CPU; contains all values from 0 to tokens - 1.
        device: device of the gather's tensors.

    Returns:
        A gather in which the first slot of a token owns it; None if the tokens are already in this order.
    """
    # No copy is needed if the tokens are already in this order.
    if torch.equal(index, torch.arange(len(index))):
        return None
    # Sorted stably by token, the copies of a token are adjacent and its first slot comes first.
    slots, copies = index.argsort(stable=True), index.bincount()
    first = copies.cumsum(0) - copies
    owned = torch.zeros(len(index), dtype=torch.bool)
    owned[slots[first]] = True
    repeats = []
    # Grouped by number of copies, so that each group is one rectangular index and its gradients are one deterministic
    # sum.
    for count in copies.unique().tolist():
        if count > 1:
            tokens = (copies == count).nonzero().flatten()
            repeats.append((tokens, slots[first[tokens] + torch.arange(1, count)[:, None]]))
    return _gather(index, owned, repeats, device)


def _any_interleaved(layouts: Sequence[PackedLayout]) -> bool:
    return any(layout.is_interleaved and layout.pattern != "full" for layout in layouts)


def sort_by_document(layouts: Sequence[PackedLayout], device: torch.device) -> Gather | None:
    """The gather that sorts each row's tokens by (document, order); None if all rows are sorted already.

    Attention does not depend on storage order once positions are applied. An engine for contiguous documents
    therefore also serves interleaved ones if it runs between this gather and its inverse.
    """
    if not _any_interleaved(layouts):
        return None
    index = torch.cat(
        [layout.storage_in_order + row * layout.total_length for row, layout in enumerate(layouts)]
    )
    return _gather(index, torch.ones(len(index), dtype=torch.bool), (), device)


class _IntoRuns(torch.autograd.Function):
    """``tokens[index]``, with a backward pass that gathers instead of adding by index.

    One slot owns each token, so its gradient is a copy. Only anchors add up several gradients, one from each
    document, and they do so in float32 or wider for every dtype. An index_add would be neither deterministic nor
    precise on a GPU.
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
            # In place to save memory: in context parallelism up to half of a row's keys occupy further slots.
            result[tokens] = copies.sum(dim=0, dtype=wide).add_(result[tokens]).to(result.dtype)
        return result, None


class _OutOfRuns(torch.autograd.Function):
    """The output of each token from the slot that owns it; the other slots get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return slots.index_select(0, gather.slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gather: Gather = ctx.gather
        (grad,) = grads
        # Copies of a token did not contribute to the output, so their gradient is zero.
        return grad.index_select(0, gather.index).index_fill_(0, gather.dropped, 0.0), None


def into_runs(x_BHTD: Tensor, gather: Gather | None) -> Tensor:
    """``[B, H, T, D]`` to ``[slots, H, D]``; without a gather only another view if the strides allow it."""
    x_BTHD = x_BHTD.transpose(1, 2)
    if gather is None:
        # Kernels read whole heads, so the elements of a head must be contiguous.
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
    """``[B, H, T, D]`` with each row sorted by (document, order), given :func:`sort_by_document`'s gather."""
    slots = into_runs(x_BHTD, gather)
    return slots.view(x_BHTD.shape[0], -1, *slots.shape[1:]).transpose(1, 2)


def unsort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """The inverse of :func:`sort_rows`."""
    return out_of_runs(x_BHTD.transpose(1, 2).flatten(0, 1), gather, x_BHTD.shape[0])
