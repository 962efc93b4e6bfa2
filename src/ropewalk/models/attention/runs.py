"""Runs of packed rows, gathered for layers that carry a state through each: in padded batches, or in one row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.parallel.fragments import tokens_by_run

SHORT = 32
"""Runs of up to this many tokens share a batch. Longer runs share one with runs of more than half their length, so
padding at most doubles the work."""


@dataclass(frozen=True, eq=False)
class RunBatch:
    """Runs of similar length, padded at the end; or runs of any lengths, one after another in one row.

    Attributes:
        shape: rows, and tokens of a row with padding.
        tokens: int64 ``[tokens]``, indices into all tokens.
        places: int64 ``[tokens]``, index of each token in the flattened rows.
        numbers: int64 ``[runs]``, which of all runs these are.
        lengths: int64 ``[runs]``, tokens of each.
    """

    shape: tuple[int, int]
    tokens: Tensor
    places: Tensor
    numbers: Tensor
    lengths: Tensor

    @property
    def runs(self) -> int:
        return self.numbers.numel()

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int64 ``[runs + 1]``, where the runs of one row start and end."""
        return F.pad(self.lengths.cumsum(0), (1, 0))

    @cached_property
    def seq_idx(self) -> Tensor:
        """int32 ``[1, tokens]``, number of each token's run in one row."""
        numbers = torch.arange(self.runs, dtype=torch.int32, device=self.lengths.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.tokens.numel())[None]

    def padded(self, x: Tensor) -> Tensor:
        """``[rows, row length, ...]`` from ``[all tokens, ...]``, with zeros in padding."""
        rows, length = self.shape
        taken = x.index_select(0, self.tokens)
        if taken.shape[0] < rows * length:
            taken = x.new_zeros(rows * length, *x.shape[1:]).index_copy(0, self.places, taken)
        padded: Tensor = taken.unflatten(0, self.shape)  # type: ignore[no-untyped-call]
        return padded

    def unpadded(self, x: Tensor) -> Tensor:
        """``[tokens, ...]`` from ``[rows, row length, ...]``."""
        return x.flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True, eq=False)
class RunBatches:
    """All runs.

    Attributes:
        batches: the batches, by length.
        back: int64, for each token its index in the concatenated tokens of the batches.
        runs_back: int64, for each run its index in the concatenated runs of the batches.
    """

    batches: tuple[RunBatch, ...]
    back: Tensor
    runs_back: Tensor

    @classmethod
    def of(cls, *batches: RunBatch) -> RunBatches:
        # Every token and run is in exactly one batch, so sorting the gathered indices inverts the gather.
        tokens, numbers = (
            torch.cat([getattr(each, name) for each in batches]) for name in ("tokens", "numbers")
        )
        return cls(batches, torch.argsort(tokens), torch.argsort(numbers))


def one_row(tokens: Tensor, lengths: Tensor, device: torch.device) -> RunBatches:
    """All runs in one row; the arguments are as for :func:`batches_by_length`."""
    places, numbers = (torch.arange(len(each), device=device) for each in (tokens, lengths))
    return RunBatches.of(RunBatch((1, len(tokens)), tokens.to(device), places, numbers, lengths.to(device)))


def batches_by_length(tokens: Tensor, lengths: Tensor, device: torch.device) -> RunBatches:
    """Runs in batches of similar length.

    Args:
        tokens: int64, the tokens of all runs, run by run, on the CPU.
        lengths: int64, tokens of each run, on the CPU.
        device: device of the result.
    """
    starts = lengths.cumsum(0) - lengths
    # The smallest power of two that is at least the length of the run.
    size = 2 ** (lengths.clamp(min=SHORT) - 1).double().log2().floor().long().add(1)
    batches = []
    for each in torch.unique(size).tolist():
        # Runs of similar length share a batch, so padding at most doubles the tokens.
        chosen = torch.nonzero(size == each).flatten()
        mine, longest = lengths[chosen], int(lengths[chosen].max())
        inside = torch.arange(int(mine.sum())) - (mine.cumsum(0) - mine).repeat_interleave(mine)
        taken = tokens[starts[chosen].repeat_interleave(mine) + inside]
        places = (torch.arange(len(chosen)) * longest).repeat_interleave(mine) + inside
        batches.append(
            RunBatch((len(chosen), longest), *(x.to(device) for x in (taken, places, chosen, mine)))
        )
    return RunBatches.of(*batches)


@cached_per_layout
def run_sequence(layouts: tuple[PackedLayout, ...], device: torch.device) -> RunBatches:
    """The runs of a batch of rows in one row, for kernels that take boundaries.

    Args:
        layouts: one layout for each row, all of the same length.
        device: device of the tensors.
    """
    return one_row(*tokens_by_run(layouts), device)


@cached_per_layout
def run_batches(layouts: tuple[PackedLayout, ...], device: torch.device) -> RunBatches | None:
    """The runs of a batch of rows in padded batches; None if each row is one run.

    Args:
        layouts: one layout for each row, all of the same length.
        device: device of the tensors.
    """
    tokens, lengths = tokens_by_run(layouts)
    return None if len(lengths) == len(layouts) else batches_by_length(tokens, lengths, device)
