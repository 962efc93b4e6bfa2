"""The kernel of causal-conv1d in a dry run: tensors, memory and operations."""

from ropewalk.planning.sizing.recurrent import convolution_flops
from tests.training.simulation.recurrent import kernel_cases as cases
from tests.training.simulation.recurrent.kernel_cases import B, L

BYTES = (115_200, 115_200, 115_680, 116_544)
"""Bytes after the forward and at most in it, and after the backward and at most in it.

Of the code of causal-conv1d 1.6.1, run on the simulated device with launches of kernels left out.
"""
BIAS = 96
"""Bytes of the gradient of the bias, which the package converts before it drops that of the weight."""


def test_tensors_are_those_that_transformers_computes_in_torch(aside):
    found, expected = aside(cases.play, "convolution"), cases.in_torch("convolution")
    assert (found["results"], found["gradients"]) == (expected["results"], expected["gradients"])


def test_memory_is_that_of_the_package(aside):
    *found, most = aside(cases.play, "convolution")["bytes"]
    assert tuple(found) == BYTES[:-1]
    assert abs(most - BYTES[-1]) <= BIAS


def test_the_work_of_the_model_is_the_formula_and_twice_that(aside):
    flops = convolution_flops(B * L, 48, 4)
    assert aside(cases.play, "convolution")["flops"] == {
        "forward": (flops,) * 2,
        "backward": (2 * flops,) * 2,
    }
