"""A function in tiles against the same one at once; its use for MLPs and for the loss has tests of its own."""

import torch
from torch import nn

from ropewalk.models.compute.tiles import in_tiles


def test_tiles_of_several_tensors_change_no_value_and_no_gradient():
    linear = nn.Linear(8, 5, dtype=torch.float64)
    states = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(3, 7, 1, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(0, 5, (3, 7, 2))
    inputs = [states, factors, linear.weight, linear.bias]
    weights = torch.randn(3, 7, 2, dtype=torch.float64)

    def function(hidden, factor, index):
        return (linear(hidden) * factor).gather(-1, index)

    given = (states, factors, indices)
    whole, tiled = function(*given), in_tiles(linear, function, 4, given)
    with torch.no_grad():
        assert torch.equal(in_tiles(linear, function, 4, given), tiled)
    expected = torch.autograd.grad((whole * weights).sum(), inputs)
    found = torch.autograd.grad((tiled * weights).sum(), inputs)
    for ours, theirs in zip((tiled, *found), (whole, *expected), strict=True):
        # Sums of 21 float64 terms of size 1 in another order.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_a_cast_made_without_gradient_is_not_taken_where_one_is_needed():
    linear, states = nn.Linear(8, 8, bias=False), torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        in_tiles(linear, linear, 4, (states,))
        linear(states).sum().backward()
    assert linear.weight.grad is not None
