"""How ranks are arranged: every rank has one place, groups share all but one dimension, and rows are shared as said."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.parallel import MeshShape
from ropewalk.parallel.mesh import DIMENSIONS
from tests.parallel.exchange_cases import forgotten_groups, groups_of, mesh_of_another_size

DEGREES = st.integers(1, 4)
SHAPES = st.builds(MeshShape, replicate=DEGREES, shard=DEGREES, ring=DEGREES, sequence=DEGREES)


@given(SHAPES)
def test_ranks_count_through_the_places_the_last_dimension_first(shape):
    places = [shape.place(rank) for rank in range(shape.world_size)]
    counted = product(*(range(getattr(shape, name)) for name in DIMENSIONS))
    assert [tuple(getattr(place, name) for name in DIMENSIONS) for place in places] == list(counted)
    for rank in (-1, shape.world_size):
        with pytest.raises(RopewalkError, match=f"with world_size {shape.world_size}, got {rank}"):
            shape.place(rank)


@given(SHAPES, st.sampled_from(DIMENSIONS))
def test_each_rank_is_in_one_group_of_a_dimension_at_its_own_place(shape, dimension):
    groups = shape.neighbours(dimension)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    others = [name for name in DIMENSIONS if name != dimension]
    for group in groups:
        places = [shape.place(rank) for rank in group]
        assert [getattr(place, dimension) for place in places] == list(range(getattr(shape, dimension)))
        assert len({tuple(getattr(place, name) for name in others) for place in places}) == 1


@given(SHAPES)
def test_ranks_that_hold_parts_of_the_same_rows_are_those_of_one_sequence_group(shape):
    by_rows: dict[int, list[int]] = {}
    for rank in range(shape.world_size):
        by_rows.setdefault(shape.data_rank(rank), []).append(rank)
    assert sorted(by_rows) == list(range(shape.data_degree))
    assert {len(ranks) for ranks in by_rows.values()} == {shape.ring * shape.sequence}
    for ranks in by_rows.values():
        assert len({(shape.place(rank).replicate, shape.place(rank).shard) for rank in ranks}) == 1


@given(SHAPES)
def test_parameters_are_sharded_over_all_that_are_no_replicas(shape):
    assert shape.replicate * shape.shard_degree == shape.world_size
    assert shape.data_degree * shape.ring * shape.sequence == shape.world_size


def test_a_shape_says_what_is_parallel_in_it():
    assert str(MeshShape()) == "1 rank"
    assert str(MeshShape(replicate=2, sequence=4)) == "2 replicate x 4 sequence"


@pytest.mark.parametrize("shape", [{"ring": 2, "sequence": 2}, {"shard": 2, "sequence": 2}, {"replicate": 4}])
def test_live_groups_are_those_of_the_arithmetic_and_are_made_once(four_ranks, shape):
    expected = MeshShape(**shape)
    for rank, (ranks, place, data_rank, parameters, shared) in enumerate(four_ranks.run(groups_of, shape)):
        for names, found in zip((("ring",), ("sequence",), ("ring", "sequence")), ranks, strict=True):
            own = next(list(group) for group in expected.neighbours(*names) if rank in group)
            assert found == (None if len(own) == 1 else own)
        assert place == (
            expected.place(rank).ring,
            expected.place(rank).sequence,
            (found or [rank]).index(rank),
        )
        assert data_rank == expected.data_rank(rank)
        assert parameters == (expected.replicate, expected.shard_degree)
        assert shared


def test_a_mesh_of_another_number_of_ranks_is_refused(two_ranks):
    said = "a mesh of 2 shard x 2 sequence needs 4 ranks, but the run has 2; change parallel, or start 4 processes"
    assert two_ranks.run(mesh_of_another_size, {"shard": 2, "sequence": 2}) == [said] * 2


def test_groups_that_were_forgotten_are_made_anew(two_ranks):
    assert two_ranks.run(forgotten_groups) == [False, False]
