"""Attention in the recipe's own dtype and with the model's own scale, in one process and over ranks."""

import uuid
from dataclasses import replace

import pytest

from ropewalk.parallel import MeshShape
from ropewalk.verification import Planned, planned_checks
from tests.verification.verification_cases import in_precision, run_with

TWO = [MeshShape(ring=2), MeshShape(sequence=2)]
FOUR = [MeshShape(ring=2, sequence=2), MeshShape(shard=2, ring=2), MeshShape(replicate=2, sequence=2)]
PRECISIONS = ["float32", "bfloat16", "bfloat16-autocast"]


def attention(ranks, case, shape, fault=None):
    case = replace(case, key=uuid.uuid4().hex)
    return ranks.run(run_with, fault, Planned("attention", "", "", shape), case)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", TWO, ids=str)
def test_two_ranks_attend_as_one(two_ranks, sharp_case, shape, precision):
    check = attention(two_ranks, in_precision(sharp_case, precision), shape)
    assert check.passed, check
    assert check.error > 0


@pytest.mark.parametrize("shape", FOUR, ids=str)
def test_four_ranks_attend_as_one(four_ranks, sharp_case, shape):
    check = attention(four_ranks, in_precision(sharp_case, "bfloat16-autocast"), shape)
    assert check.passed, check


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-autocast"])
def test_rounded_scores_of_a_ring_are_found(two_ranks, sharp_case, precision):
    sharp = in_precision(sharp_case, precision)
    check = attention(two_ranks, sharp, MeshShape(ring=2), "ring scores in bfloat16")
    assert check.passed is False
    assert "attention over 2 ring is further from exact attention" in check.note


def test_meshes_that_cut_no_row_have_nothing_to_attend(case):
    planned = planned_checks(case, 4, MeshShape(replicate=2, sequence=2))
    assert [each.name for each in planned if each.kind == "attention"] == [
        f"attention on ranks, {mesh}"
        for mesh in ("4 sequence", "4 ring", "2 ring x 2 sequence", "2 replicate x 2 sequence")
    ]
