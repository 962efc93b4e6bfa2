"""verify finds each fault that is known from this field, and names it; an untouched run passes."""

import uuid
from dataclasses import replace

import pytest

from ropewalk.parallel import MeshShape
from ropewalk.verification import Planned, planned_checks, run_checks
from tests.marks import slow_after
from tests.verification.verification_cases import FAULTS, reached_by, run_with, shifted_rows


def failing(ranks, case, planned, fault=None):
    """{name: note} of the checks that fail."""
    case = replace(case, key=uuid.uuid4().hex)
    checks = run_checks(planned, lambda each: ranks.run(run_with, fault, each, case)[0])
    for check in checks:
        print(check.name, check.error, check.budget, check.passed, check.note)
    return {check.name: check.note for check in checks if check.passed is False}


@pytest.fixture(scope="module")
def sound(two_ranks, shallow_case):
    """Of each planned check: what it finds in an untouched run, and the faults that could change it."""
    return two_ranks.run(reached_by, planned_checks(shallow_case, 2), shallow_case)[0]


FAST = ("mean of means", "theta default on reload")
"""The faults that `make test` plants."""

SHARDS = {"labels of shards, 2 sequence", "labels of shards, 2 ring"}
PARTS = {"2 ranks = 1 rank, 2 sequence", "2 ranks = 1 rank, 2 ring"}
EXPECTED = {
    "labels shifted after sharding": (SHARDS | PARTS, "the ranks lack"),
    "mean of means": (
        PARTS | {"2 ranks = 1 rank, 2 shard", "loss normalisation, 2 shard"},
        "rows with few targets get too much weight",
    ),
    "positions local to the shard": (
        SHARDS | PARTS,
        "positions of tokens on their ranks differ from those in the row",
    ),
    "labels rolled but in the first row": (SHARDS | PARTS, "targets of the row and have"),
    "boundary token dropped": (SHARDS | PARTS, "the ranks lack"),
    "theta default on reload": (
        {"saved folder = model in memory", "RoPE after save and load"},
        "it runs unscaled RoPE with rope_theta 10,000",
    ),
    "bfloat16 inv_freq": ({"RoPE after sharding"}, "its inv_freq is rounded to bfloat16"),
    "mask dropped": (
        # A ring is an engine of its own, which this one now differs from.
        {
            "packed row = separate documents",
            "engine sdpa = reference",
            "attention on ranks, 2 sequence",
            "2 ranks = 1 rank, 2 ring",
        },
        "tokens attend to other documents of the row",
    ),
    "optimizer state lost": (
        {"sharded checkpoint = memory", "resumed run = unbroken run"},
        "a resumed run would differ from an uninterrupted one",
    ),
}


@pytest.mark.slow
def test_an_untouched_run_passes(sound):
    checks = [check for _, check, _ in sound]
    assert [check.name for check in checks if check.passed is False] == []
    assert {check.name for check in checks if check.passed is None} == {
        "engine flex = reference",
        "engine varlen = reference",
    }
    for check in checks:
        assert check.passed is None or 0 <= check.error <= check.budget


@pytest.mark.parametrize("fault", slow_after(2, sorted(FAULTS, key=FAST.__contains__, reverse=True)))
def test_a_planted_fault_is_found_and_named(two_ranks, shallow_case, sound, fault):
    """Checks that never call what the fault replaces find what they find in an untouched run, and are left out."""
    names, said = EXPECTED[fault]
    failed = failing(
        two_ranks, shallow_case, [planned for planned, _, faults in sound if fault in faults], fault
    )
    assert set(failed) == names
    assert any(said in note for note in failed.values())


MEMORY = {"gradient_checkpointing": True, "offload_activations": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ranks", "loss", "resume"])
def test_checkpointed_and_offloaded_layers_pass(two_ranks, case, kind):
    sparing = replace(case, **MEMORY, key=uuid.uuid4().hex)
    check = two_ranks.run(run_with, None, Planned(kind, "", "", MeshShape(shard=2)), sparing)[0]
    assert check.passed, check


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["offloaded tensors lost"])
@pytest.mark.parametrize("kind", ["ranks", "loss"])
def test_faults_of_checkpointing_and_offload_show_where_the_recipe_has_them(
    two_ranks, shallow_case, kind, fault
):
    planned = Planned(kind, "", "", MeshShape(shard=2))
    for settings, passed in (({}, True), (MEMORY, False)):
        changed = replace(shallow_case, **settings, key=uuid.uuid4().hex)
        assert two_ranks.run(run_with, fault, planned, changed)[0].passed is passed


READ_LABELS = ("labels", "shards", "documents", "ranks", "loss")
"""Kinds of the checks that read the labels of rows; others compute the same whatever these are, or train on them."""


@pytest.mark.slow
def test_targets_that_cross_documents_are_found(two_ranks, shallow_case):
    broken = replace(shallow_case, rows=shifted_rows(shallow_case.rows))
    planned = [each for each in planned_checks(broken, 2) if each.kind in READ_LABELS]
    failed = failing(two_ranks, broken, planned)
    assert set(failed) == {"labels of rows"}
    assert "token 0 of row 0 (document -1) has target" in failed["labels of rows"]
    assert "its document requires no target" in failed["labels of rows"]
