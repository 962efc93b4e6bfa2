"""Meshes that are verified suit the heads, on rows of which ranks have all, one, few or no targets."""

from ropewalk.parallel import MeshShape
from ropewalk.verification import planned_checks
from ropewalk.verification.checks.meshes import uneven_rows


def test_uneven_rows_have_all_one_few_and_no_targets(case):
    counts = [int((row.labels >= 0).sum()) for row in uneven_rows(case.rows)]
    assert counts == [44, 1, 5, 0]


def test_meshes_follow_the_heads(case):
    def meshes(ranks, own=None):
        return {str(p.shape): p.reason for p in planned_checks(case, ranks, own) if p.kind == "ranks"}

    assert meshes(2) == {"2 shard": None, "2 sequence": None, "2 ring": None}
    assert meshes(3)["3 sequence"].startswith(
        "not applicable: 3 ranks do not divide the model's 4 attention heads"
    )
    assert "2 ring x 2 sequence" in meshes(4)
    assert "2 replicate x 2 sequence" in meshes(4, MeshShape(replicate=2, sequence=2))
