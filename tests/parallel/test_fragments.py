"""Fragments of runs on ranks: what a rank sends, receives and starts from, against the definition, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PackedLayout
from ropewalk.parallel import RowShards, SequenceGroups, ShardedLayouts
from ropewalk.parallel.fragments import fragments_of, halo_plan, passed_bytes, state_plan
from ropewalk.testing import random_layout

CPU = torch.device("cpu")
PATTERNS = ("full", "intra_document", "anchor")


def sharded_rows(rng):
    """A batch of rows of one length, cut over up to eight ranks."""
    ring, sequence = rng.choice([(1, 2), (4, 1), (2, 2), (3, 1), (1, 4), (2, 4)])
    total = rng.choice([9, 16, 33, 64, 130])
    layouts = [
        random_layout(total, rng, rng.choice([1, 3, 12]), PATTERNS, rng.random() < 0.5, max_anchor=5)
        for _ in range(rng.choice([1, 2, 3]))
    ]
    groups = SequenceGroups(ring=ring, sequence=sequence)
    return ShardedLayouts.of(layouts, groups, rng.choice(["contiguous", "zigzag", "cost"]))


def runs_of(sharded):
    """For each run of all rows its tokens as (row, storage index), in order."""
    runs = []
    for row, layout in enumerate(sharded.layouts):
        tokens = torch.arange(layout.total_length)
        documents = layout.document_ids if layout.pattern != "full" else torch.zeros_like(tokens)
        runs += [[(row, int(t)) for t in tokens[documents == each]] for each in documents.unique()]
    return runs


def held_by(sharded):
    """For each rank what is in its places, row by row: (row, storage index), None for padding."""
    rows = sharded.rows
    return [
        [
            None if token < 0 else (row, token)
            for row, shards in enumerate(rows)
            for token in shards.of(ring, sequence).tolist()
        ]
        for ring in range(rows[0].ring)
        for sequence in range(rows[0].sequence)
    ]


def delivered(plans, values):
    """What each rank receives if rank r has the list ``values[r]``."""
    parts = [
        [[own[i] for i in part] for part in plan.sent.entries.split(list(plan.sent.send_counts))]
        for plan, own in zip(plans, values, strict=True)
    ]
    for rank, plan in enumerate(plans):
        assert [len(part[rank]) for part in parts] == list(plan.sent.receive_counts)
        assert plan.sent.anywhere == any(any(each.sent.send_counts) for each in plans)
    return [[value for part in parts for value in part[rank]] for rank in range(len(plans))]


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_a_convolution_reads_the_inputs_before_each_token_of_its_run(rng, width):
    sharded = sharded_rows(rng)
    fragments, held = fragments_of(sharded.layouts, sharded.rows), held_by(sharded)
    plans = [halo_plan(fragments, rank, width, CPU) for rank in range(len(held))]
    before = {}
    for run in runs_of(sharded):
        padded = [None] * width + run
        before |= {token: padded[number : number + width] for number, token in enumerate(run)}
    received = delivered(plans, held)
    for plan, own, came in zip(plans, held, received, strict=True):
        assert not set(came) & set(own)
        assert len(set(came)) == len(came)
        values = [*own, *came, None]
        inputs = [values[i] for i in plan.inputs]
        for place, token in zip(plan.outputs.tolist(), own, strict=True):
            assert inputs[place] == token
            if token is not None:
                assert inputs[place - width : place] == before[token]


@given(st.randoms(use_true_random=False))
def test_each_fragment_starts_from_all_of_its_run_before_it(rng):
    """A state is the list of tokens that it has seen."""
    sharded = sharded_rows(rng)
    fragments, held = fragments_of(sharded.layouts, sharded.rows), held_by(sharded)
    plans = [state_plan(fragments, rank, CPU) for rank in range(len(held))]
    before = {token: run[:number] for run in runs_of(sharded) for number, token in enumerate(run)}
    last = {token for run in runs_of(sharded) for token in run[-1:]}
    pieces = []
    for plan, own in zip(plans, held, strict=True):
        assert sorted(plan.tokens.tolist()) == list(range(len(own)))
        pieces.append([[own[i] for i in part] for part in plan.tokens.split(plan.lengths.tolist())])
        for piece in pieces[-1]:
            # One stretch of a run, or all the padding.
            assert piece == (before[piece[-1]] + piece[-1:])[-len(piece) :] if piece[0] else not any(piece)
        for one, other in zip(pieces[-1], pieces[-1][1:], strict=False):
            assert other[0] is None or before[other[0]][-1:] != one[-1:], "a fragment is as long as it can be"
        leading = plan.leading.tolist()
        assert leading == [i for i, piece in enumerate(pieces[-1]) if piece[0] and piece[-1] not in last]
    summaries = [[own[i] for i in plan.leading] for plan, own in zip(plans, pieces, strict=True)]
    received = delivered(plans, summaries)
    for plan, own, came in zip(plans, pieces, received, strict=True):
        assert len({piece[0] for piece in came}) == len(came)
        states, level = [[]], []
        for step in plan.steps:
            added = [came[i] for i in step]
            level = [(level[i] if level else []) + each for i, each in enumerate(added)]
            states += level
        assert sorted(i for step in plan.steps for i in step.tolist()) == list(range(len(came)))
        for piece, number in zip(own, plan.initial.tolist(), strict=True):
            assert states[number] == (before[piece[0]] if piece[0] else [])


def test_ranks_without_tokens_and_a_row_of_single_tokens():
    layout = PackedLayout.from_lengths([5, 4], "full", 0)
    empty = RowShards(layout.storage_in_order, (((0, 4), (6, 9)), (), ((4, 6),), ()), 1, 8)
    fragments = fragments_of((layout,), (empty,))
    assert fragments.owners.tolist() == [0, 2, 0]
    plan = state_plan(fragments, 1, CPU)
    assert plan.lengths.tolist() == [8]
    assert plan.sent.send_counts == plan.sent.receive_counts == (0, 0, 0, 0)
    assert plan.sent.anywhere
    assert state_plan(fragments, 0, CPU).sent.send_counts == (1, 0, 1, 0)
    assert halo_plan(fragments, 1, 3, CPU).inputs.tolist() == [8, 8, 8, *range(8)]


@pytest.mark.parametrize("pattern", ["intra_document", "anchor"])
def test_whole_runs_are_passed_to_nobody(pattern):
    layout = PackedLayout.from_lengths([7, 8], pattern, 1)
    sharded = ShardedLayouts.of([layout], SequenceGroups(ring=2), "contiguous")
    fragments = fragments_of(sharded.layouts, sharded.rows)
    assert np.all(fragments.starts == fragments.firsts)
    assert not halo_plan(fragments, 0, 3, CPU).sent.anywhere
    assert not state_plan(fragments, 0, CPU).sent.anywhere


@pytest.mark.parametrize(("balance", "summaries", "halos"), [("contiguous", 7, 1), ("zigzag", 13, 2)])
def test_bytes_of_the_busiest_of_eight_ranks_with_one_document(balance, summaries, halos):
    """A layer of Qwen3.5-9B: 32 heads of 128 by 128, and a convolution of 4 tokens in bfloat16.

    In a zigzag, rank 6 has the parts 6 and 9 of 16, which 7 and 6 ranks follow. A halo goes to one rank alone.
    """
    layout = PackedLayout.from_lengths([2**18], "full", 0)
    sharded = ShardedLayouts.of([layout], SequenceGroups(ring=8), balance)
    fragments = fragments_of(sharded.layouts, sharded.rows)
    summary, inputs = 32 * 128 * 256 * 4, 2 * (2 * 16 * 128 + 32 * 128)
    forward, backward = zip(
        *(passed_bytes(fragments, rank, 3, inputs, summary) for rank in range(8)), strict=True
    )
    assert max(forward) == summaries * summary + halos * 3 * inputs
    assert sum(forward) == sum(backward)
