"""States of a checkpoint are compared tensor by tensor, and one process's own checkpoint is what was in memory."""

import math

import pytest
import torch

from ropewalk.parallel import MeshShape
from ropewalk.verification import Planned, run_planned
from ropewalk.verification.checks.checkpoints import _largest


def test_the_largest_difference_is_named_by_its_tensor():
    state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3], dtype=torch.bfloat16)}
    assert _largest(state, state)[0] == 0.0
    assert _largest({**state, "b": torch.tensor([3.5])}, state) == (0.5, "b")
    assert _largest({**state, "a": torch.tensor([1.0, -2.0])}, state) == (4.0, "a")


def test_a_tensor_that_is_missing_or_new_is_infinitely_far():
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    for found in ({"a": state["a"]}, {**state, "c": torch.zeros(1)}):
        error, name = _largest(found, state)
        assert math.isinf(error)
        assert name in ("b", "c")


@pytest.mark.parametrize("kind", ["checkpoint", "resume"])
def test_sound_code_writes_and_resumes_to_the_last_bit(two_ranks, shallow_case, kind):
    planned = Planned(kind, "", "", MeshShape(shard=2))
    check = two_ranks.run(run_planned, planned, shallow_case)[0]
    assert (check.passed, check.error, check.budget) == (True, 0.0, 0.0)
