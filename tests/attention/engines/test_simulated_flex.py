"""Results without data have the shapes and the order in memory of those that torch's FlexAttention computes."""

import pytest
import torch
from torch._higher_order_ops.flex_attention import (
    flex_attention_backward_fake_tensor_mode,
    flex_attention_fake_impl,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from ropewalk.attention.engines.simulated_flex import simulated_flex


def described(*tensors):
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
def test_results_and_gradients_are_those_of_torch(order, value_dim):
    with FakeTensorMode():

        def made(heads, width):
            shape = (2, heads, 50, width)
            x = torch.empty([shape[dim] for dim in order], dtype=torch.bfloat16)
            return x.permute([order.index(dim) for dim in range(4)]).requires_grad_()

        q, k, v = made(4, 16), made(2, 16), made(2, value_dim)
        out, lse = simulated_flex(q, k, v, 7)
        torch_out, torch_lse, _ = flex_attention_fake_impl(q, k, v, None, (), 1.0, {})
        assert described(out, lse) == described(torch_out, torch_lse)
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.empty_like(out), torch.empty_like(lse)))
        *expected, _ = flex_attention_backward_fake_tensor_mode(
            q, k, v, out, lse, out, lse, None, None, (), 1.0, {}
        )
        assert described(*gradients) == described(*expected)


def test_nothing_is_computed_where_there_is_data():
    q = torch.ones(1, 2, 5, 16)
    with pytest.raises(AssertionError, match="no data to compute with"):
        simulated_flex(q, q, q, 7)
