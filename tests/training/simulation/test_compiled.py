"""Fused functions in a dry run: what has memory in their forward, between it and their backward, and in that."""

import pytest

from tests.training.simulation import compiled_cases
from tests.training.simulation import recording_cases as cases


def test_a_fused_function_counts_as_one_operator(aside):
    """Its inputs, the operand and result of its product, and its outputs have memory; its other values do not."""
    recording = aside(cases.recorded, cases.runs_fused)
    x, weight, operand, product, output, row = (
        64 * 32 * 4,
        32 * 16 * 4,
        64 * 32 * 4,
        64 * 16 * 4,
        64 * 16 * 4,
        32 * 4,
    )
    changes = [event.change for event in recording.events]
    assert changes[:4] == [x, weight, operand, product]
    assert sorted(changes[4:]) == sorted(
        [output, row, *(-each for each in (x, weight, operand, product, output, row))]
    )
    # The function and its product; empty tensors are not touched.
    found = {(each.name, each.kind): each.bytes for each in recording.operators.elements()}
    assert found == {
        ("gated", "other"): x + operand + product + output + row,
        ("aten.mm", "matmul"): operand + weight + product,
    }
    assert recording.flops == {("dense", "start"): 2 * 64 * 32 * 16}


def test_a_value_that_takes_the_place_of_a_freed_one_counts_as_itself(aside):
    recording = aside(cases.recorded, cases.runs_the_same_twenty_times)
    x = 64 * 32 * 4
    # Each of 20 products has an operand and a result; the first operand is made of the input, and the output is last.
    found = [each.bytes for each in recording.operators.elements() if each.kind == "other"]
    assert found == [x + 2 * 20 * x + x] * 20


pytestmark = [
    # torch's compiler asks for it, and hides its warning in a way that turning warnings into errors forestalls.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

HIDDEN, WIDE, WEIGHT = 32 * 64 * 2, 32 * 256 * 2, 64 * 256 * 2
"""Bytes of a hidden state, of a tensor of an MLP's width, and of one of its weights."""


def test_a_fused_mlp_keeps_the_results_of_its_two_wide_products_and_what_the_third_one_reads(aside):
    forward, backward, flops = aside(cases.trained, cases.mlp, False)
    assert forward == [WIDE, WIDE, WIDE, HIDDEN]
    product = 2 * 32 * 64 * 256
    assert flops == {("dense", "forward"): 3 * product, ("dense", "backward"): 6 * product}
    assert sum(backward) == HIDDEN + 3 * WEIGHT + HIDDEN - 3 * WIDE


def test_a_compiler_keeps_of_an_mlp_what_a_dry_run_says():
    assert compiled_cases.kept_of_mlp() == 3 * WIDE


def test_a_checkpointed_mlp_keeps_nothing_and_repeats_its_forward(aside):
    forward, backward, flops = aside(cases.trained, cases.mlp, True)
    assert forward == [WIDE, WIDE, WIDE, HIDDEN, -WIDE, -WIDE, -WIDE]
    product = 2 * 32 * 64 * 256
    assert flops[("dense", "recomputation")] == 3 * product
    assert flops[("dense", "backward")] == 6 * product
    # The gradients, and the output's given one.
    assert sum(backward) == HIDDEN + 3 * WEIGHT + HIDDEN


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_fused_norm_holds_its_output_alone(aside, checkpointed):
    forward, backward, _ = aside(cases.trained, cases.norm, checkpointed)
    assert forward == [HIDDEN]
    again = [HIDDEN, -HIDDEN] if checkpointed else []
    assert backward == [HIDDEN, *again, HIDDEN, 64 * 2]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_graph_of_a_fused_function_does_not_hold_its_output(aside, checkpointed):
    forward, _, _ = aside(cases.trained, cases.unused, checkpointed)
    assert forward == [HIDDEN, 2, -HIDDEN]


def test_a_fused_rotation_does_not_hold_its_input(aside):
    """It is linear in the queries, so its backward needs cos and sin alone."""
    forward, _, _ = aside(cases.trained, cases.rotation, False)
    assert forward == [HIDDEN, -HIDDEN]
