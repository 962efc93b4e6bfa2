"""A kernel without data counts the bytes of its tensors once, and its operations as the moment has them."""

from tests.training.simulation.recurrent import launch_cases as cases


def test_a_kernel_reads_and_writes_each_tensor_once(aside):
    (found,) = aside(cases.launches, False)
    assert (found.name, found.kind, found.phase) == ("some_kernel", "recurrent", "forward")
    # Two tensors that it reads, and one that it writes and does not read.
    assert found.bytes == 4 * (100 + 50 + 30)
    assert (found.flops, found.repeated, found.timed_flops) == (1000, 10, 1000)


def test_a_forward_within_a_backward_is_computed_again_and_a_gradient_is_not(aside):
    forward, gradient = sorted(aside(cases.launches, True), key=lambda each: each.name)
    assert (forward.name, forward.phase, forward.repeated) == ("again", "backward", 1000)
    assert (gradient.name, gradient.phase, gradient.repeated) == ("gradient", "backward", 10)
