"""How a row is cut over a ring: what each rank holds, and how much it has to compute."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.parallel import BALANCES, ShardedLayouts, row_shards
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring.balance import TIE, ring_chunks, ring_work
from ropewalk.testing import cut_row, random_layout


def any_layout(seed: int, total: int) -> PackedLayout:
    rng = random.Random(seed)
    return random_layout(
        total, rng, interleaved=rng.random() < 0.3, max_anchor=rng.randint(0, min(5, total - 1))
    )


@given(
    st.integers(0, 10**6), st.integers(1, 90), st.integers(1, 9), st.sampled_from(BALANCES), st.integers(1, 3)
)
def test_every_token_is_held_once_and_ranks_hold_as_many(seed, total, ring, balance, sequence):
    layout = any_layout(seed, max(total, ring))
    row = row_shards(layout, ring, sequence, balance)
    held = row.tokens[row.tokens >= 0]
    assert sorted(held.tolist()) == list(range(layout.total_length))
    sizes = [sum(end - start for start, end in chunks) for chunks in row.chunks]
    assert max(sizes) - min(sizes) <= 1
    for chunks in row.chunks:
        assert all(start < end for start, end in chunks)
        assert all(end < start for (_, end), (start, _) in pairwise(chunks))
    assert row.padding < ring * sequence
    values = torch.arange(layout.total_length) * 3
    shards = [row.take(values, r, s, -7) for r in range(ring) for s in range(sequence)]
    assert torch.equal(row.join(shards), values)


@given(st.integers(0, 10**6), st.integers(2, 70), st.integers(2, 6), st.sampled_from(BALANCES))
def test_work_is_what_the_dense_mask_counts(seed, total, ring, balance):
    layout = any_layout(seed, max(total, ring))
    row = row_shards(layout, ring, 1, balance)
    keys = layout.dense_mask().sum(dim=1)
    counted = tuple(int(keys[held[held >= 0]].sum()) for held in row.tokens)
    assert ring_work(layout, row.chunks) == counted


@given(st.integers(0, 10**6), st.integers(2, 90), st.integers(2, 6))
def test_auto_is_within_a_hundredth_of_the_best_cut(seed, total, ring):
    layout = any_layout(seed, max(total, ring))
    most = {name: max(ring_work(layout, ring_chunks(layout, ring, name))) for name in BALANCES}
    assert most["auto"] <= (1 + TIE) * min(most[name] for name in ("contiguous", "zigzag", "cost"))


def test_the_first_of_cuts_that_tie_is_taken():
    alike = PackedLayout.from_lengths([16] * 4, "intra_document", 0)
    assert ring_chunks(alike, 4, "auto") == ring_chunks(alike, 4, "contiguous")
    one = PackedLayout.from_lengths([64], "full", 0)
    assert ring_chunks(one, 4, "auto") == ring_chunks(one, 4, "zigzag")


def test_pieces_of_a_zigzag():
    one = PackedLayout.from_lengths([16], "full", 0)
    assert ring_chunks(one, 2, "contiguous") == (((0, 8),), ((8, 16),))
    assert ring_chunks(one, 2, "zigzag") == (((0, 4), (12, 16)), ((4, 12),))


@pytest.mark.parametrize("ring", [2, 4, 8, 64])
@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
def test_cost_balances_one_long_document_among_short_ones(ring, pattern):
    rng = random.Random(0)
    for lengths in ([2**15, *cut_row(2**15, 300, rng)], [*cut_row(2**15, 300, rng), 2**15]):
        layout = PackedLayout.from_lengths(lengths, pattern, 7)
        work = ring_work(layout, ring_chunks(layout, ring, "cost"))
        # The best of the three piece counts; a rank's pieces are too few and too equal for exact balance.
        assert max(work) <= 1.05 * sum(work) / ring


def test_cost_is_better_than_a_zigzag_where_documents_are_uneven():
    layout = PackedLayout.from_lengths([2**13, *cut_row(2**13, 100, random.Random(0))])
    most = {name: max(ring_work(layout, ring_chunks(layout, 4, name))) for name in BALANCES}
    assert most["cost"] < 0.7 * most["zigzag"]
    assert most["auto"] == most["cost"]


def test_work_of_long_rows_does_not_overflow():
    length = 2**24
    layout = PackedLayout.from_lengths([length], "full", 0)
    assert sum(ring_work(layout, ring_chunks(layout, 8, "zigzag"))) == length * (length + 1) // 2


def test_a_row_shorter_than_the_ring_is_refused():
    layout = PackedLayout.from_lengths([2], "anchor", 1)
    with pytest.raises(
        RopewalkError, match=r"a row of 3 tokens is too short for a ring of 4 ranks; use longer"
    ):
        row_shards(layout, 4, 1)
    assert row_shards(layout, 3, 1).padding == 0


def test_rows_of_a_batch_have_shards_of_one_length():
    layouts = [
        PackedLayout.from_lengths([9], "full", 0),
        PackedLayout.from_lengths([4, 5], "intra_document", 0),
    ]
    sharded = ShardedLayouts.of(layouts, SequenceGroups(ring=2, sequence=2))
    assert {row.ring_length for row in sharded.rows} == {6}
