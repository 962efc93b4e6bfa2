"""The kernels of flash-linear-attention in a dry run: tensors, memory and operations."""

import pytest

from ropewalk.planning.sizing.recurrent import delta_rule_flops
from tests.training.simulation.recurrent import kernel_cases as cases
from tests.training.simulation.recurrent.kernel_cases import K, T, V

BYTES = {
    "gated": (2_592_000, 7_761_152, 504_000, 12_938_304),
    "gated, state": (2_854_144, 8_023_296, 766_144, 13_200_448),
    "kimi": (3_088_000, 6_184_576, -12_000, 12_385_152),
    "kimi, state": (3_219_072, 6_315_648, 119_072, 12_516_224),
}
"""Bytes after the forward and at most in it, and after the backward and at most in it.

Of the code of fla-core 0.6.0 with triton 3.9.0, run on the simulated device with launches of kernels left out.
"""
MADE = {
    "gated": (7_761_152, 17_114_304),
    "gated, state": (8_023_296, 17_376_448),
    "kimi": (6_312_576, 15_461_152),
    "kimi, state": (6_443_648, 15_592_224),
}
"""Bytes of all tensors that the same code makes in the forward and in the backward."""
HEADS = {"gated": 4, "kimi": 2}


@pytest.mark.parametrize("name", BYTES)
def test_tensors_are_those_that_transformers_computes_in_torch(aside, name):
    found, expected = aside(cases.play, name), cases.in_torch(name)
    assert found["results"] == expected["results"]
    assert found["gradients"] == expected["gradients"]


@pytest.mark.parametrize("name", BYTES)
def test_memory_is_that_of_the_package(aside, name):
    found = aside(cases.play, name)
    assert found["bytes"] == BYTES[name]
    assert found["made"] == (MADE[name][0], pytest.approx(MADE[name][1], rel=cases.SMALL))


def test_the_backward_keeps_what_the_package_saves():
    """Normalized queries and keys, their norms, summed decays and a chunk's matrix; values and beta are inputs."""
    keys, norms, decays, matrix = 2 * 2 * T * 2 * K, 2 * 4 * T * 2, 4 * T * 4, 2 * T * 4 * 64
    output = 2 * T * 4 * V
    assert BYTES["gated"][0] == keys + norms + decays + matrix + output
    decays, matrices = 4 * T * 2 * K, 2 * 2 * T * 2 * 64
    assert BYTES["kimi"][0] == keys + norms + decays + matrices + output // 2


@pytest.mark.parametrize("name", ["gated", "kimi"])
def test_the_work_of_the_model_is_the_formula_and_twice_that(aside, name):
    flops = delta_rule_flops(T, HEADS[name], K, V)
    found = aside(cases.play, name)["flops"]
    assert found["forward"] == (flops, flops)
    model, all_ = found["backward"]
    assert model == 2 * flops
    # States, and what keys and values become, are computed once more; so are scores.
    again = {"gated": 2 * 64 * K + 64 * K + 64 * V + 2 * 64 * 64 + 2 * K * V}
    again["kimi"] = 64 * K + 64 * V + 2 * 64 * 64 + 2 * K * V
    assert all_ - model == 2 * T * HEADS[name] * again[name]


PUBLISHED = {
    "h200": {"gated, 8k": (0.472e-3, 1.444e-3), "gated, 32k": (1.890e-3, 5.697e-3)},
    "b200": {"gated, 32k": (1.770e-3, 5.714e-3)},
}
"""Seconds of fla 0.5.1 forward and backward on an H200, and on a GB200, of which the backward has 32 heads of keys.

Source: QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt and benchmark_results_GB200.txt, 2026.
"""


@pytest.mark.parametrize("gpu", PUBLISHED)
def test_planned_times_are_within_a_tenth_of_published_ones(aside, gpu):
    for name, (forward, backward) in PUBLISHED[gpu].items():
        found = aside(cases.seconds, name, gpu)
        assert found == pytest.approx({"forward": forward, "backward": backward}, rel=0.1)


@pytest.mark.parametrize("name", ["gated, state", "kimi, state"])
def test_a_call_for_the_state_that_ranks_pass_on_is_no_work_of_the_model(aside, name):
    found, plain = aside(cases.play, name)["flops"], aside(cases.play, name.partition(",")[0])["flops"]
    for moment in ("forward", "backward"):
        assert found[moment] == (0, plain[moment][1])
