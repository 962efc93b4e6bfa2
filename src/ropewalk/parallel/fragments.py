"""Fragments: the pieces of runs that the ranks of a sequence group hold, and what ranks pass on for recurrent layers.

The state of a recurrent layer goes from token to token through a run: the whole row under ``full``, otherwise a
document, or the anchor. A *fragment* is a maximal stretch of a run that one rank holds, wherever its tokens are in the
rank's shard. A fragment needs two things of the fragments before it in its run: their state, and, for the layer's
convolution, the last inputs before it (its *halo*). Everything here is index arithmetic on layouts and shards, which
every rank computes by itself; no sizes are exchanged.

Ranks of a sequence group are numbered ``ring_rank * sequence + sequence_rank``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.attention.spans import Ints
from ropewalk.parallel.shards import NO_TOKEN, RowShards


def tokens_by_run(layouts: Sequence[PackedLayout]) -> tuple[Tensor, Tensor]:
    """The runs of recurrent layers in all rows, one after another.

    Returns:
        int64 ``[batch * length]``, indices into the concatenated rows, and int64, number of tokens of each run.
    """
    length = layouts[0].total_length
    order = torch.cat([layout.storage_in_order + row * length for row, layout in enumerate(layouts)])
    return order, torch.cat([_run_lengths(layout) for layout in layouts])


def _run_lengths(layout: PackedLayout) -> Tensor:
    """int64: tokens of each run of a row in the order of ``storage_in_order``, with the anchor before the documents."""
    if layout.pattern == "full":
        return torch.tensor([layout.total_length])
    anchor = torch.tensor([layout.anchor_length] if layout.anchor_length else [], dtype=torch.int64)
    return torch.cat([anchor, layout.document_lengths])


@dataclass(frozen=True, eq=False)
class Fragments:
    """The fragments of all ranks in *run order*: by row, run and place in the run. Together they are all tokens.

    Attributes:
        starts, ends: ``[fragments]``, where each fragment starts and ends in run order.
        firsts: ``[fragments]``, where its run starts.
        runs: ``[fragments]``, number of its run, ascending.
        owners: ``[fragments]``, the rank that holds it.
        holders: ``[tokens]``, for each token in run order the rank that holds it.
        places: ``[tokens]``, for each token in run order its index in the rank's ``batch * shard_length`` tokens.
        ranks: number of ranks.
        held: number of tokens of each rank, with padding.
    """

    starts: Ints
    ends: Ints
    firsts: Ints
    runs: Ints
    owners: Ints
    holders: Ints
    places: Ints
    ranks: int
    held: int

    def halos(self, rank: int, width: int) -> Ints:
        """Where in run order the ``width`` tokens before each of a rank's fragments are: ``[fragments, width]``.

        Places before the fragment's run are -1.
        """
        mine = self.owners == rank
        before = self.starts[mine][:, None] + np.arange(-width, 0)
        return np.where(before < self.firsts[mine][:, None], -1, before)

    def received_halos(self, width: int) -> list[Ints]:
        """For each rank, ascending, the tokens in run order whose convolution inputs it gets from other ranks."""
        found = []
        for rank in range(self.ranks):
            wanted = np.unique(self.halos(rank, width))
            wanted = wanted[wanted >= 0]
            found.append(wanted[self.holders[wanted] != rank])
        return found

    def received_summaries(self) -> list[Ints]:
        """For each rank, ascending, the fragments before its last one in a run; its own are among them."""
        found = []
        for rank in range(self.ranks):
            # The rank's last fragment in each run, -1 for none.
            last = np.full(int(self.runs[-1]) + 1, -1)
            (mine,) = np.nonzero(self.owners == rank)
            np.maximum.at(last, self.runs[mine], mine)
            (before,) = np.nonzero(np.arange(len(self.runs)) < last[self.runs])
            found.append(before)
        return found


@cached_per_layout
def fragments_of(layouts: tuple[PackedLayout, ...], rows: tuple[RowShards, ...]) -> Fragments:
    """The fragments of a batch of rows.

    Args:
        layouts: layouts of the whole rows, all of one length.
        rows: shards of each row, all of one length.
    """
    order, lengths = (each.numpy() for each in tokens_by_run(layouts))
    total, shard = layouts[0].total_length, rows[0].shard_length
    holders, places = np.empty_like(order), np.empty_like(order)
    for number, row in enumerate(rows):
        held = row.tokens.view(-1, shard).numpy()
        rank, place = np.nonzero(held != NO_TOKEN)
        stored = number * total + held[rank, place]
        holders[stored], places[stored] = rank, number * shard + place
    holders, places = holders[order], places[order]
    run_starts = lengths.cumsum() - lengths
    starts_here = np.zeros(len(order), dtype=bool)
    starts_here[run_starts] = True
    starts_here[1:] |= holders[1:] != holders[:-1]
    (starts,) = np.nonzero(starts_here)
    runs = np.searchsorted(run_starts, starts, side="right") - 1
    return Fragments(
        starts=starts,
        ends=np.append(starts[1:], len(order)),
        firsts=run_starts[runs],
        runs=runs,
        owners=holders[starts],
        holders=holders,
        places=places,
        ranks=rows[0].ring * rows[0].sequence,
        held=len(rows) * shard,
    )


@dataclass(frozen=True, eq=False)
class SentEntries:
    """Entries of a tensor that a rank sends.

    Attributes:
        entries: int64, entries sent to rank 0, then those sent to rank 1, and so on.
        send_counts: number of entries sent to each rank.
        receive_counts: number of entries received from each rank.
        anywhere: whether any rank sends anything; otherwise no rank takes part in an exchange.
    """

    entries: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    anywhere: bool


def _sent(
    received: Sequence[Ints], owners: Ints, numbers: Ints, rank: int, device: torch.device
) -> SentEntries:
    """What a rank sends.

    Args:
        received: for each rank the items that it receives, ascending.
        owners: the rank that has each item.
        numbers: the number of each item among those of its owner.
        rank: the rank.
        device: device of the entries.
    """
    parts = [numbers[items[owners[items] == rank]] for items in received]
    counts = np.bincount(owners[received[rank]], minlength=len(received))
    return SentEntries(
        torch.from_numpy(np.concatenate(parts)).to(device),
        tuple(map(len, parts)),
        tuple(counts.tolist()),
        any(map(len, received)),
    )


def _arrived(received: Ints, owners: Ints, items: int) -> Ints:
    """For each of all items its number among those that a rank receives, rank after rank; -1 for the others."""
    arrived = np.full(items, -1)
    arrived[received[np.argsort(owners[received], kind="stable")]] = np.arange(len(received))
    return arrived


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """How one rank convolves all its fragments at once, each behind its halo.

    Attributes:
        sent: which of the rank's tokens it sends.
        inputs: int64, for each input of the convolution its index among the rank's tokens, followed by received ones
            and one of zeros.
        outputs: int64 ``[batch * shard_length]``, for each token of the rank its place in the convolution.
    """

    sent: SentEntries
    inputs: Tensor
    outputs: Tensor


@cached_per_layout
def halo_plan(fragments: Fragments, rank: int, width: int, device: torch.device) -> HaloPlan:
    """Plan the convolution of one rank.

    Args:
        fragments: fragments of all ranks.
        rank: the rank.
        width: number of inputs before a token that the convolution reads.
        device: device of the tensors.
    """
    received = fragments.received_halos(width)
    arrived = fragments.held + _arrived(received[rank], fragments.holders, len(fragments.holders))
    index = np.where(fragments.holders == rank, fragments.places, arrived)
    # Behind the received ones, for places before a run.
    index = np.append(index, fragments.held + len(received[rank]))
    tokens, lengths = _own(fragments, rank)
    halos = index[fragments.halos(rank, width)]
    # The padding, which belongs to no run, needs no input before it.
    halos = np.concatenate([halos, np.full((len(lengths) - len(halos), width), index[-1])])
    # Each token stands behind the halos of its fragment and of all fragments before it.
    outputs = np.arange(len(tokens)) + width * np.arange(1, len(lengths) + 1).repeat(lengths)
    inputs = np.empty(len(tokens) + halos.size, dtype=np.int64)
    inputs[outputs] = tokens
    starts = lengths.cumsum() - lengths + width * np.arange(len(lengths))
    inputs[starts[:, None] + np.arange(width)] = halos
    of_tokens = np.empty_like(outputs)
    of_tokens[tokens] = outputs
    return HaloPlan(
        _sent(received, fragments.holders, fragments.places, rank, device),
        torch.from_numpy(inputs).to(device),
        torch.from_numpy(of_tokens).to(device),
    )


def _own(fragments: Fragments, rank: int) -> tuple[Ints, Ints]:
    """A rank's tokens, fragment by fragment, and the length of each; padding, if any, is the last fragment."""
    mine = fragments.owners == rank
    tokens, lengths = fragments.places[fragments.holders == rank], (fragments.ends - fragments.starts)[mine]
    padding = np.setdiff1d(np.arange(fragments.held), tokens)
    lengths = np.append(lengths, len(padding))
    return np.append(tokens, padding), lengths[lengths > 0]


@dataclass(frozen=True, eq=False)
class StatePlan:
    """The fragments of one rank, whose summaries it sends, and how incoming states follow from received ones.

    The states are numbered: 0 is a state of zeros, and each step of ``steps`` adds one for each of its entries.

    Attributes:
        tokens: int64 ``[batch * shard_length]``, the rank's tokens, fragment by fragment; padding is the last one.
        lengths: int64 ``[fragments]``.
        leading: int64, the rank's fragments that another one of their run follows.
        sent: which of their summaries the rank sends, by number in ``leading``.
        steps: for each step through the runs that reach this rank, the received summaries that it applies. Runs end
            one after another: entry i goes on from entry i of the step before.
        initial: int64 ``[fragments]``, number of the state that each fragment starts from.
    """

    tokens: Tensor
    lengths: Tensor
    leading: Tensor
    sent: SentEntries
    steps: tuple[Tensor, ...]
    initial: Tensor


@cached_per_layout
def state_plan(fragments: Fragments, rank: int, device: torch.device) -> StatePlan:
    """Plan how one rank passes on states.

    Args:
        fragments: fragments of all ranks.
        rank: the rank.
        device: device of the tensors that index others; the plan's tokens and lengths stay on the CPU.
    """
    received, owners = fragments.received_summaries(), fragments.owners
    (mine,) = np.nonzero(owners == rank)
    followed = np.append(fragments.runs[1:] == fragments.runs[:-1], False)
    numbers = np.cumsum(followed & (owners == rank)) - 1
    arrived = _arrived(received[rank], owners, len(owners))
    before = np.split(received[rank], np.nonzero(np.diff(fragments.runs[received[rank]]))[0] + 1)
    # The longest first, so that those that go on are always the first ones.
    chains = sorted((chain for chain in before if len(chain)), key=len, reverse=True)
    steps, state_behind, states = [], np.zeros(len(owners) + 1, dtype=np.int64), 1
    for step in range(len(chains[0]) if chains else 0):
        applied = np.array([chain[step] for chain in chains if len(chain) > step])
        state_behind[applied] = np.arange(states, states + len(applied))
        steps.append(torch.from_numpy(arrived[applied]).to(device))
        states += len(applied)
    initial = np.where(fragments.starts[mine] > fragments.firsts[mine], state_behind[mine - 1], 0)
    tokens, lengths = _own(fragments, rank)
    # Padding starts from zero.
    initial = np.append(initial, 0)[: len(lengths)]
    return StatePlan(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(lengths),
        leading=torch.from_numpy(np.nonzero(followed[mine])[0]),
        sent=_sent(received, owners, numbers, rank, device),
        steps=tuple(steps),
        initial=torch.from_numpy(initial).to(device),
    )


def passed_bytes(
    fragments: Fragments, rank: int, width: int, input_bytes: int, summary_bytes: int
) -> tuple[int, int]:
    """Bytes that a rank sends to others in the forward and in the backward of one recurrent layer.

    The backward returns gradients of what was received. Activation checkpointing repeats the forward.

    Args:
        fragments: fragments of all ranks.
        rank: the rank.
        width: number of inputs before a token that the layer's convolution reads; 0 without a convolution.
        input_bytes: bytes of a token's inputs of the convolution.
        summary_bytes: bytes of a fragment's summary, in float32: of gated delta rules ``heads * key_dim * (key_dim +
            value_dim)`` numbers, of Mamba-2 and lightning attention one more per head than the state has; 0 without a
            state.

    Returns:
        (forward, backward), bytes.
    """
    forward = backward = 0
    for received, owners, size in (
        (fragments.received_halos(width), fragments.holders, input_bytes),
        (fragments.received_summaries(), fragments.owners, summary_bytes),
    ):
        others = [items for other, items in enumerate(received) if other != rank]
        forward += size * sum(int((owners[items] == rank).sum()) for items in others)
        backward += size * int((owners[received[rank]] != rank).sum())
    return forward, backward
