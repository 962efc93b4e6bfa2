"""Windowed attention on a CPU: the dense masked product, its gradients, and what is kept for the backward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.attention.engines import windows
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.segments import _visible
from ropewalk.attention.engines.windows import windowed_attention
from ropewalk.attention.options import AttentionOptions


def with_gradients(attention, inputs, cotangent):
    output = attention(*inputs)
    return output, *torch.autograd.grad(output, inputs, cotangent)


@given(
    count=st.integers(1, 40),
    before=st.integers(0, 40),
    window=st.integers(1, 45),
    groups=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([4, 7]),
    blocks=st.sampled_from([(1, 1), (2, 5), (7, 7), (32, 64)]),
    score_bytes=st.sampled_from([1, 2000, 2**21]),
)
@settings(deadline=None, max_examples=60)
def test_it_is_the_dense_masked_product(count, before, window, groups, value_dim, blocks, score_bytes):
    torch.manual_seed(count + 41 * before)
    length = count + before
    shapes = (2 * groups, count, 4), (2, length, 4), (2, length, value_dim)
    inputs = [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    cotangent = torch.randn(2, 2 * groups, count, value_dim, dtype=torch.float64)
    visible = _visible(count, length, window, torch.device("cpu"))
    expected = with_gradients(
        lambda q, k, v: plain_attention(q, k, v, visible, AttentionOptions(0.3)), inputs, cotangent
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "BLOCKS", blocks)
        patch.setattr(windows, "SCORE_BYTES", score_bytes)
        found = with_gradients(lambda q, k, v: windowed_attention(q, k, v, window, 0.3), inputs, cotangent)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_heads_of_a_transposed_tensor_are_read_where_they_lie():
    """As a layer hands them over: tokens first in memory, heads second."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 30, heads, 4, dtype=torch.float64).transpose(1, 2) for heads in (4, 2, 2))
    visible = _visible(30, 30, 8, torch.device("cpu"))
    expected = plain_attention(q, k, v, visible, AttentionOptions(0.3))
    torch.testing.assert_close(windowed_attention(q, k, v, 8, 0.3), expected, rtol=0, atol=1e-12)


def test_gradients_of_keys_add_up_in_float32():
    """In bfloat16, many small gradients would be lost beside their sum."""
    inputs = [torch.randn(1, 1, 600, 8).bfloat16().requires_grad_() for _ in range(3)]
    cotangent = torch.ones(1, 1, 600, 8, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(
        lambda q, k, v: windowed_attention(q, k, v, 500, 0.01), exact, cotangent.double()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "BLOCKS", (1, 1))
        found = with_gradients(lambda q, k, v: windowed_attention(q, k, v, 500, 0.01), inputs, cotangent)
    assert found[3].dtype == torch.bfloat16
    errors = (found[3].double() - expected[3]).abs()
    assert float(errors.max()) <= 2**-8 * float(expected[3].abs().max())


def test_queries_keys_values_and_one_number_a_query_are_kept_for_the_backward():
    inputs = [torch.randn(1, 2, 400, 8, requires_grad=True) for _ in range(3)]
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        windowed_attention(*inputs, 100, 0.3)
    assert sum(tensor.numel() for tensor in kept) == sum(x.numel() for x in inputs) + 2 * 400
