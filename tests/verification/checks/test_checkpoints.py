"""States of a checkpoint are compared tensor by tensor, and one process's own checkpoint is what was in memory."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk.attention.kept import Keeping
from ropewalk.parallel import MeshShape
from ropewalk.verification import Planned, run_planned
from ropewalk.verification.checks.checkpoints import _largest
from tests.marks import compiles


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


def test_a_run_that_keeps_attention_and_its_optimizer_on_the_host_resumes_to_the_last_bit(
    two_ranks, shallow_case
):
    sparing = replace(
        shallow_case,
        gradient_checkpointing=True,
        offload_activations=True,
        keeping=Keeping(0),
        offload_optimizer=True,
        key="sparing",
    )
    check = two_ranks.run(run_planned, Planned("resume", "", "", MeshShape(shard=2)), sparing)[0]
    assert (check.passed, check.error, check.budget) == (True, 0.0, 0.0)


@compiles
@pytest.mark.slow
def test_compiled_pieces_pass_a_check_of_what_a_run_does(two_ranks, shallow_case):
    """Three rows and then one in a micro-batch; parameters are sharded over the ranks of a sequence too."""
    case = replace(shallow_case, compiled=True, rows_per_batch=3, key="compiled")
    check = two_ranks.run(run_planned, Planned("wrapped rope", "", "", MeshShape(sequence=2)), case)[0]
    assert check.passed, check
