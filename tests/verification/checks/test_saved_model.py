"""The saved folder in plain transformers against the model in memory, within what float32 angles explain."""

import uuid
from dataclasses import replace

import pytest

from ropewalk.parallel import MeshShape
from ropewalk.rope import Linear
from ropewalk.verification import Planned, run_planned
from tests.verification.verification_cases import run_with


def of_its_own(case, **setup):
    """The case without the folder that another check has saved."""
    return replace(case, setup=replace(case.setup, **setup), key=uuid.uuid4().hex)


SAVED = Planned("saved", "", "", MeshShape(shard=2))


@pytest.mark.parametrize("exact_rope", [True, False])
def test_plain_transformers_computes_the_logits_of_the_model_in_memory(two_ranks, shallow_case, exact_rope):
    check = two_ranks.run(run_planned, SAVED, of_its_own(shallow_case, exact_rope=exact_rope))[0]
    assert check.passed
    assert 0 <= check.error <= check.budget
    # The budget comes from what angles and norms in float32 change, and lets no other RoPE through.
    assert check.budget < 1e-3
    assert f"logits of {shallow_case.length} tokens" in check.note


def test_a_method_that_a_config_writes_out_is_read_back_as_it_was(two_ranks, shallow_case):
    check = two_ranks.run(run_planned, SAVED, of_its_own(shallow_case, rope=Linear(8, 80000.0, 2.0)))[0]
    assert check.passed


def test_a_config_that_loses_its_base_is_outside_the_budget(two_ranks, shallow_case):
    check = two_ranks.run(run_with, "theta default on reload", SAVED, of_its_own(shallow_case))[0]
    assert check.passed is False
    assert check.error > 10 * check.budget
    assert "the folder's weights or config are not those of the model that was saved" in check.note
