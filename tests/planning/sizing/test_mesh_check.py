"""A mesh that suits ranks, heads and rows passes; any other is refused with one that would suit."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import EngineError, RopewalkError
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.mesh_check import check_mesh


def check(mesh, world=8, heads=32, length=1024, rows=16, rows_per_batch=1):
    check_mesh(mesh, world, heads, length, rows, rows_per_batch)


def test_a_mesh_that_suits_passes():
    check(MeshShape(replicate=2, shard=2, sequence=2))


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (
            MeshShape(sequence=4),
            {},
            r"parallel {sequence: 4} needs 4 ranks, but 8 were started; start 4, or set parallel to "
            r"{shard: 2, sequence: 4}$",
        ),
        (
            MeshShape(replicate=3, sequence=4),
            {},
            r"parallel {replicate: 3, sequence: 4} needs 12 ranks, but 8 were started; start 12, or set parallel to "
            r"{shard: 2, sequence: 4}$",
        ),
        (
            MeshShape(ring=3, sequence=4),
            {},
            r"parallel {ring: 3, sequence: 4} needs 12 ranks, but 8 were started; start 12, or set parallel to "
            r"{shard: 2, sequence: 4}$",
        ),
        (
            MeshShape(shard=2),
            {"world": 1},
            r"needs 2 ranks, but 1 was started; start 2, or set parallel to {shard: 1}$",
        ),
        (
            MeshShape(sequence=8),
            {"heads": 12},
            r"parallel.sequence 8 does not divide the model's 12 attention heads; set "
            r"parallel.sequence to one of 1, 2, 3, 4, 6, 12; to",
        ),
        (
            MeshShape(ring=2, sequence=4),
            {"length": 7},
            r"parallel.ring x parallel.sequence is 8, but a row of 7 tokens can be split over at most 7 ranks; lower",
        ),
        (
            MeshShape(replicate=2, shard=4),
            {"rows": 20},
            r"rows_per_step must be a positive multiple of 8 \(8 data-parallel groups x rows_per_batch 1\), got 20; "
            r"use 16 or 24$",
        ),
        (
            MeshShape(shard=4, sequence=2),
            {"rows": 6, "rows_per_batch": 2},
            r"rows_per_step must be a positive multiple of 8 \(4 data-parallel groups x rows_per_batch 2\), got 6; "
            r"use 8$",
        ),
        (MeshShape(shard=8), {"rows_per_batch": 0}, r"rows_per_batch must be 1 or more, got 0$"),
    ],
)
def test_a_mesh_that_does_not_suit_is_refused_with_one_that_would(mesh, changes, message):
    with pytest.raises(RopewalkError, match=message):
        check(mesh, **changes)


def test_heads_are_an_engine_error():
    with pytest.raises(EngineError):
        check(MeshShape(sequence=8), heads=4)


@given(
    st.builds(
        MeshShape,
        replicate=st.integers(1, 4),
        shard=st.integers(1, 4),
        ring=st.integers(1, 4),
        sequence=st.integers(1, 4),
    ),
    st.integers(1, 64),
)
def test_the_proposed_mesh_has_as_many_ranks_as_were_started(mesh, world):
    if mesh.world_size == world:
        return
    with pytest.raises(RopewalkError) as caught:
        check_mesh(mesh, world, 12, 10**6, 64, 1)
    proposed = re.search(r"or set parallel to (.*)", str(caught.value))[1]
    assert MeshShape(**yaml.safe_load(proposed)).world_size == world
