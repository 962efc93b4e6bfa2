"""The kernels of mamba-ssm in a dry run: tensors, memory and operations."""

import pytest

from ropewalk.planning.sizing.recurrent import convolution_flops, scan_flops
from tests.training.simulation.recurrent import kernel_cases as cases
from tests.training.simulation.recurrent.kernel_cases import B, H, L, N, P

BYTES = {
    "scan": (1_277_952, 4_800_512, 1_506_144, 21_833_440),
    "scan, state": (1_409_024, 4_800_512, 1_571_680, 21_898_976),
    "mixer": (1_459_200, 7_565_312, 1_660_000, 31_049_472),
    "mixer, norm": (1_468_800, 6_336_512, 1_651_424, 29_821_664),
}
"""Bytes after the forward and at most in it, and after the backward and at most in it.

Of the code of mamba-ssm 2.3.2.post1 and causal-conv1d 1.6.1, run on the simulated device with launches of kernels left
out, for 132 multiprocessors and blocks of 32 tokens.
"""
MADE = {
    "scan": (5_193_728, 26_117_440),
    "scan, state": (5_193_728, 26_182_976),
    "mixer": (8_188_928, 35_452_512),
    "mixer, norm": (8_198_528, 34_765_888),
}
"""Bytes of all tensors that the same code makes in the forward and in the backward."""
SUMS = 224
"""Bytes of sums over blocks of heads and tokens that the package makes beside, at the highest point."""
SCAN = scan_flops(B * L, H, P, N, 2, 256)


@pytest.mark.parametrize("name", BYTES)
def test_tensors_are_those_that_transformers_computes_in_torch(aside, name):
    found, expected = aside(cases.play, name), cases.in_torch(name)
    assert found["gradients"] == expected["gradients"]
    if name.startswith("scan"):
        # transformers returns the outputs in the dtype in which it computes, and the kernel in that of its inputs.
        expected["results"][0] = (B, L, H, P), cases.torch.bfloat16
    assert found["results"] == expected["results"]


@pytest.mark.parametrize("name", BYTES)
def test_memory_is_that_of_the_package(aside, name):
    played = aside(cases.play, name)
    *found, most = played["bytes"]
    assert tuple(found) == BYTES[name][:-1]
    assert played["made"] == (MADE[name][0], pytest.approx(MADE[name][1], rel=cases.SMALL))
    assert 0 <= BYTES[name][-1] - most <= SUMS


def test_the_backward_keeps_what_the_package_saves():
    """The output, and decays summed within chunks, in float32; the rest are inputs."""
    chunks = 3
    assert BYTES["scan"][0] == 2 * B * L * H * P + 4 * B * H * chunks * 256
    # The output before the gate, and that of the last map.
    assert BYTES["mixer"][0] == 2 * B * L * H * P + 2 * B * L * 96
    # And a norm for each group and token.
    assert BYTES["mixer, norm"][0] == BYTES["mixer"][0] + 4 * 2 * B * L


@pytest.mark.parametrize("name", ["scan", "mixer"])
def test_the_work_of_the_model_is_the_formula_and_twice_that(aside, name):
    convolution = convolution_flops(B * L, H * P + 4 * N, 4) * (name == "mixer")
    found = aside(cases.play, name)["flops"]
    assert found["forward"] == (SCAN + convolution,) * 2
    model, all_ = found["backward"]
    assert model == 2 * (SCAN + convolution)
    # B with C, states, scores with inputs for decays, and the convolution, are computed once more.
    again = 2 * B * L * (256 * 2 * N + H * P * N + 256 * H * P)
    assert all_ - model == again + convolution


def test_a_call_for_the_state_that_ranks_pass_on_is_no_work_of_the_model(aside):
    found, plain = (aside(cases.play, name)["flops"] for name in ("scan, state", "scan"))
    for moment in ("forward", "backward"):
        assert found[moment] == (0, plain[moment][1])
