"""Runs: the contiguous causal sequences into which a packed layout decomposes, the kernels that attend within them, and
the order in which a row's documents are contiguous.

Attention does not depend on storage order once positions are applied. The tokens of interleaved documents are therefore
sorted before a kernel runs, and its output is put back.
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
        recurring: whether other rows have runs of these sizes too, as under ``full``; documents differ in each row.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    recurring: bool = False

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
    """Index tensors that sort the tokens of a flattened batch and restore their order; built once for each batch.

    Attributes:
        index: int64 ``[tokens]``, the token in each slot.
        slot: int64 ``[tokens]``, the slot of each token.
    """

    index: Tensor
    slot: Tensor


def sort_by_document(layouts: Sequence[PackedLayout], device: torch.device) -> Gather | None:
    """The gather that sorts each row's tokens by (document, order); None if all rows are sorted already.

    Attention does not depend on storage order once positions are applied. An engine for contiguous documents
    therefore also serves interleaved ones if it runs between this gather and its inverse.
    """
    if not any(layout.is_interleaved and layout.pattern != "full" for layout in layouts):
        return None
    index = torch.cat(
        [layout.storage_in_order + row * layout.total_length for row, layout in enumerate(layouts)]
    )
    return Gather(index.to(device), index.argsort().to(device))


class _Moved(torch.autograd.Function):
    """``[B, H, T, D]`` with the tokens of the batch moved, with a backward that moves them back instead of adding."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return _moved(x_BHTD, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return _moved(grad, ctx.inverse), None, None


def _moved(x_BHTD: Tensor, index: Tensor) -> Tensor:
    x_BTHD = x_BHTD.transpose(1, 2)
    return x_BTHD.flatten(0, 1).index_select(0, index).view(x_BTHD.shape).transpose(1, 2)


def sort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """``[B, H, T, D]`` with each row sorted by (document, order), given :func:`sort_by_document`'s gather."""
    rows: Tensor = _Moved.apply(x_BHTD, gather.index, gather.slot)  # type: ignore[no-untyped-call]
    return rows


def unsort_rows(x_BHTD: Tensor, gather: Gather) -> Tensor:
    """The inverse of :func:`sort_rows`."""
    rows: Tensor = _Moved.apply(x_BHTD, gather.slot, gather.index)  # type: ignore[no-untyped-call]
    return rows
