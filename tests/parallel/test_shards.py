"""Shards without processes: take and join are inverses, padding holds nothing, meshes count right."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import PackedLayout, RopewalkError
from ropewalk.attention.layout import IGNORED
from ropewalk.errors import EngineError
from ropewalk.parallel import NO_TOKEN, MeshShape, RowShards, SequenceGroups, ShardedLayouts, row_shards
from ropewalk.parallel.ulysses import check_heads, replicated_kv_heads
from ropewalk.testing import random_layout

DEGREES = st.integers(1, 6)


@given(
    st.integers(2, 90),
    DEGREES,
    DEGREES,
    st.integers(0, 2**32),
    st.sampled_from(["contiguous", "zigzag", "cost"]),
)
def test_what_is_taken_apart_joins_again(total, ring, sequence, seed, balance):
    layout = random_layout(max(total, ring + 1), random.Random(seed), interleaved=True)
    row = row_shards(layout, ring, sequence, balance)
    values = torch.randint(1, 1000, (2, layout.total_length))
    shards = [row.take(values, r, s, 0) for r in range(ring) for s in range(sequence)]
    assert {tuple(shard.shape) for shard in shards} == {(2, row.shard_length)}
    assert torch.equal(row.join(shards), values)
    # No token twice, none lost: with padding of 0 the sums agree.
    assert sum(int(shard.sum()) for shard in shards) == int(values.sum())
    held = row.tokens[row.tokens != NO_TOKEN]
    assert sorted(held.tolist()) == list(range(layout.total_length))
    assert row.padding == (row.tokens == NO_TOKEN).sum() < ring * sequence + total


@given(st.integers(2, 60), st.integers(2, 5), st.integers(0, 2**32))
def test_positions_and_labels_are_the_rows_own(total, degree, seed):
    layout = random_layout(total, random.Random(seed))
    sharded = [
        ShardedLayouts.of([layout], SequenceGroups(sequence=degree, sequence_rank=rank))
        for rank in range(degree)
    ]
    found = sharded[0].rows[0].join([each.position_ids()[0] for each in sharded])
    assert torch.equal(found, layout.position_ids)
    labels = torch.arange(total)
    shards = torch.cat([each.take([labels], IGNORED)[0] for each in sharded])
    assert shards[shards != IGNORED].tolist() == list(range(total))
    assert (shards[total:] == IGNORED).all()


def test_chunks_must_cover_the_row_once():
    order = torch.arange(6)
    for chunks in [(((0, 3),), ((4, 6),)), (((0, 4),), ((3, 6),)), (((0, 6),), ((6, 7),))]:
        with pytest.raises(RopewalkError, match="must cover each of the row's 6 tokens exactly once"):
            RowShards(order, chunks)
    with pytest.raises(
        RopewalkError, match=r"ring_length must be a multiple of sequence 1 and at least 3, .*, got 2"
    ):
        RowShards(order, (((0, 3),), ((3, 6),)), ring_length=2)


def test_a_ring_rank_may_hold_nothing():
    row = RowShards(torch.arange(4), (((0, 4),), ()), sequence=2)
    assert row.tokens.tolist() == [[0, 1, 2, 3], [NO_TOKEN] * 4]


def test_a_row_that_no_ring_cuts_stays_in_storage_order():
    layout = PackedLayout.from_segments([2, 3, 1], [1, 0, 1], "intra_document", 0)
    sharded = ShardedLayouts.of([layout], SequenceGroups(sequence=3))
    assert sharded.rows[0].tokens.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert sharded.shard_length == 2


def test_an_unknown_balance_is_refused():
    with pytest.raises(RopewalkError, match="unknown balance 'fair'; choose from auto, contiguous"):
        row_shards(PackedLayout.from_lengths([5]), 2, 1, "fair")


@given(DEGREES, DEGREES, DEGREES, DEGREES)
def test_every_rank_has_a_place_of_its_own(replicate, shard, ring, sequence):
    shape = MeshShape(replicate, shard, ring, sequence)
    places = [shape.place(rank) for rank in range(shape.world_size)]
    assert len(set(places)) == shape.world_size == replicate * shard * ring * sequence
    # Ranks of one sequence group read the same rows, and each group others.
    groups = {}
    for rank, place in enumerate(places):
        groups.setdefault(shape.data_rank(rank), set()).add((place.ring, place.sequence))
    assert sorted(groups) == list(range(shape.data_degree))
    assert {len(group) for group in groups.values()} == {shape.sequence_degree}
    assert shape.shard_degree * replicate == shape.world_size


def test_meshes_are_checked_and_named():
    with pytest.raises(RopewalkError, match=r"parallel.ring must be 1 or more, got 0"):
        MeshShape(ring=0)
    with pytest.raises(RopewalkError, match="rank must be from 0 to 3 in a mesh with world_size 4, got 4"):
        MeshShape(shard=4).place(4)
    assert str(MeshShape(replicate=2, sequence=4)) == "2 replicate x 4 sequence"
    assert str(MeshShape()) == "1 rank"


def test_heads_that_cannot_be_divided_are_refused_with_what_would_do():
    with pytest.raises(
        EngineError, match=r"sequence 8 does not divide the model's 12 attention heads; set .* to one of 1, 2"
    ):
        check_heads(12, 8)
    assert [replicated_kv_heads(kv, 4) for kv in (1, 2, 4, 6, 8)] == [4, 4, 4, 12, 8]
