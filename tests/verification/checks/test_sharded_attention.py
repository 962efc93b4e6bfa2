"""Attention in the recipe's own dtype and with the model's own scale, in one process and over ranks."""

import uuid
from dataclasses import replace

import pytest
import torch

from ropewalk.attention.oracle import ExactAttention, cotangent_of, oracle_attention, values_of
from ropewalk.parallel import MeshShape
from ropewalk.verification import Planned, planned_checks
from ropewalk.verification.checks.engines import attention_inputs, engine_equals_reference
from tests.verification.verification_cases import run_with

TWO = [MeshShape(ring=2), MeshShape(sequence=2)]
FOUR = [MeshShape(ring=2, sequence=2), MeshShape(shard=2, ring=2), MeshShape(replicate=2, sequence=2)]
PRECISIONS = ["float32", "bfloat16", "bfloat16-autocast"]


def attention(ranks, case, shape, fault=None):
    case = replace(case, key=uuid.uuid4().hex)
    return ranks.run(run_with, fault, Planned("attention", "", "", shape), case)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", TWO, ids=str)
def test_two_ranks_attend_as_one(two_ranks, sharp_case, shape, precision):
    check = attention(two_ranks, replace(sharp_case, precision=precision), shape)
    assert check.passed, check
    assert check.error > 0


@pytest.mark.parametrize("shape", FOUR, ids=str)
def test_four_ranks_attend_as_one(four_ranks, sharp_case, shape):
    check = attention(four_ranks, replace(sharp_case, precision="bfloat16-autocast"), shape)
    assert check.passed, check


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-autocast"])
def test_rounded_scores_of_a_ring_are_found(two_ranks, sharp_case, precision):
    sharp = replace(sharp_case, precision=precision)
    check = attention(two_ranks, sharp, MeshShape(ring=2), "ring scores in bfloat16")
    assert check.passed is False
    assert "attention over 2 ring is further from exact attention" in check.note


def test_the_scale_is_the_models_own(two_ranks, granite_case):
    found = replace(granite_case, key=uuid.uuid4().hex)
    assert attention_inputs(found)[0][0].scale == 0.9
    assert engine_equals_reference(found, "segments").passed
    assert attention(two_ranks, granite_case, MeshShape(ring=2)).passed
    assert not attention(two_ranks, granite_case, MeshShape(ring=2), "scale lost in the ring").passed


def test_an_engine_that_loses_the_scale_is_found(granite_case, monkeypatch):
    import ropewalk.verification.checks.engines as engines

    sound = engines.attend

    def unscaled(*args, scale=None, **options):
        return sound(*args, **options)

    monkeypatch.setattr(engines, "attend", unscaled)
    assert not engine_equals_reference(replace(granite_case, key=uuid.uuid4().hex), "segments").passed


def test_an_engine_that_a_ring_has_not_is_not_run(two_ranks, case):
    check = attention(two_ranks, replace(case, setup=replace(case.setup, engine="flex")), MeshShape(ring=2))
    assert check.passed is None
    assert check.note.startswith("not run here: engine flex needs all keys of a row at once")


def test_meshes_that_cut_no_row_have_nothing_to_attend(case):
    planned = planned_checks(case, 4, MeshShape(replicate=2, sequence=2))
    assert [each.name for each in planned if each.kind == "attention"] == [
        f"attention on ranks, {mesh}"
        for mesh in ("4 sequence", "4 ring", "2 ring x 2 sequence", "2 replicate x 2 sequence")
    ]


def test_scores_in_bfloat16_are_outside_the_budget_and_what_is_no_number_too(sharp_case):
    layouts = [sharp_case.rows[0].layout]
    row = attention_inputs(replace(sharp_case, precision="bfloat16", key=uuid.uuid4().hex))[0][0]
    expected = ExactAttention.of(row.tensors, layouts, row.scale)
    assert expected.errors_of(expected.values).worst_share == 0

    def rounding(q, k, v):
        return oracle_attention(q, k, v, layouts, row.scale)

    found = values_of(rounding, row.tensors, cotangent_of(row.query, row.value))
    assert expected.errors_of(found).worst_share > 1
    nan = tuple(torch.full_like(x, torch.nan) for x in expected.values)
    assert expected.errors_of(nan).worst_share > 1
