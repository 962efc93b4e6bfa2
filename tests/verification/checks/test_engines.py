"""An engine equals the reference on the model's own inputs, within a budget that a lost scale exceeds."""

import uuid
from dataclasses import replace

import torch

from ropewalk.attention.oracle import ExactAttention, cotangent_of, oracle_attention, values_of
from ropewalk.parallel import MeshShape
from ropewalk.verification import Planned
from ropewalk.verification.checks.engines import attention_inputs, engine_equals_reference
from tests.verification.verification_cases import in_precision, run_with


def attention(ranks, case, shape, fault=None):
    case = replace(case, key=uuid.uuid4().hex)
    return ranks.run(run_with, fault, Planned("attention", "", "", shape), case)[0]


def test_the_scale_is_the_models_own(two_ranks, granite_case):
    found = replace(granite_case, key=uuid.uuid4().hex)
    assert attention_inputs(found)[0][0].options.scale == 0.9
    outcome = engine_equals_reference(found, "sdpa")
    assert outcome.passed
    assert outcome.note.endswith("float32, computed by CPU flash")
    assert attention(two_ranks, granite_case, MeshShape(ring=2)).passed
    assert not attention(two_ranks, granite_case, MeshShape(ring=2), "scale lost in the ring").passed


def test_an_engine_that_loses_the_scale_is_found(granite_case, monkeypatch):
    import ropewalk.verification.checks.engines as engines

    sound = engines.attend

    def unscaled(*args, options, **others):
        return sound(*args, options=replace(options, scale=None), **others)

    monkeypatch.setattr(engines, "attend", unscaled)
    assert not engine_equals_reference(replace(granite_case, key=uuid.uuid4().hex), "sdpa").passed


def test_an_engine_that_a_ring_has_not_is_not_run(two_ranks, case):
    check = attention(two_ranks, replace(case, setup=replace(case.setup, engine="flex")), MeshShape(ring=2))
    assert check.passed is None
    assert check.note.startswith("not run here: engine flex needs all keys of a row at once")


def test_scores_in_bfloat16_are_outside_the_budget_and_what_is_no_number_too(sharp_case):
    layouts = [sharp_case.rows[0].layout]
    row = attention_inputs(replace(in_precision(sharp_case, "bfloat16"), key=uuid.uuid4().hex))[0][0]
    expected = ExactAttention.of(row.tensors, layouts, row.options)
    assert expected.errors_of(expected.values).worst_share == 0

    def rounding(q, k, v):
        return oracle_attention(q, k, v, layouts, row.options)

    found = values_of(rounding, row.tensors, cotangent_of(row.query, row.value))
    assert expected.errors_of(found).worst_share > 1
    nan = tuple(torch.full_like(x, torch.nan) for x in expected.values)
    assert expected.errors_of(nan).worst_share > 1
