"""A recipe that is resolved: which rows of a step a process reads."""

import pytest

from ropewalk.parallel import Mesh, MeshShape, SequenceGroups, World
from ropewalk.parallel.context import RunContext
from ropewalk.training.resolved import share_of_step

WORLD = World(rank=0, size=4, local_rank=0, local_size=4)


@pytest.mark.parametrize(
    "shape", [MeshShape(sequence=4), MeshShape(2, 1, 2, 1), MeshShape(2, 2), MeshShape(shard=4)]
)
def test_ranks_of_a_sequence_group_read_the_same_rows_and_others_other_ones(shape):
    rows = [7, 3, 9, 1, 8, 2, 6, 4]
    shares = {}
    for rank in range(4):
        context = RunContext(WORLD, Mesh(shape, rank, None, SequenceGroups()))
        shares.setdefault(shape.data_rank(rank), []).append(share_of_step(rows, context))
    for of_group in shares.values():
        assert len(of_group) == shape.sequence_degree
        assert all(share == of_group[0] for share in of_group)
    read = [row for of_group in shares.values() for row in of_group[0]]
    assert sorted(read) == sorted(rows)
    assert share_of_step(rows, RunContext()) == rows
