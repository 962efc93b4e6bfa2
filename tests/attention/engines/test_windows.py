"""Windowed attention on a CPU: the dense masked product, its gradients, and what is kept for the backward pass."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.attention.engines import windows
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.segments import _visible
from ropewalk.attention.engines.windows import Piece, windowed_attention
from ropewalk.attention.options import AttentionOptions


def with_gradients(attention, inputs, cotangent):
    output = attention(*inputs)
    return output, *torch.autograd.grad(output, inputs, cotangent)


def whole(q, k):
    """One piece: the queries are the last of a run's tokens."""
    return [Piece(range(q.shape[2]), range(k.shape[2]))]


@given(
    count=st.integers(1, 40),
    before=st.integers(0, 40),
    window=st.integers(1, 45),
    groups=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([4, 7]),
    blocks=st.sampled_from([(1, 1), (2, 5), (7, 7), (32, 64)]),
    score_bytes=st.sampled_from([1, 2000, 2**21]),
    widest_kept=st.sampled_from([0, 45]),
)
@settings(deadline=None, max_examples=60)
def test_it_is_the_dense_masked_product(
    count, before, window, groups, value_dim, blocks, score_bytes, widest_kept
):
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
        patch.setattr(windows, "WIDEST_KEPT", widest_kept)
        found = with_gradients(
            lambda q, k, v: windowed_attention(q, k, v, whole(q, k), window, 0.3), inputs, cotangent
        )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [2, 6, 9, 40])
@pytest.mark.parametrize("blocks", [(1, 1), (3, 3), (32, 64)])
def test_documents_behind_keys_that_they_share(window, blocks, monkeypatch):
    """Each as if it stood alone behind them: longer than the window, as long, and shorter."""
    monkeypatch.setattr(windows, "BLOCKS", blocks)
    torch.manual_seed(0)
    shared, ends = 5, [11, 31, 40, 42]
    inputs = [torch.randn(2, heads, 42, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    lead = range(max(0, shared - window + 1), shared)
    own = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    pieces = [Piece(tokens, tokens, lead if tokens.start else range(0)) for tokens in own]

    def by_document(q, k, v):
        outputs = []
        for tokens in own:
            keys = [*(range(shared) if tokens.start else ()), *tokens]
            visible = _visible(len(tokens), len(keys), window, torch.device("cpu"))
            outputs.append(
                plain_attention(
                    q[:, :, list(tokens)], k[:, :, keys], v[:, :, keys], visible, AttentionOptions(0.3)
                )
            )
        return torch.cat(outputs, dim=2)

    cotangent = torch.randn(2, 4, 42, 4, dtype=torch.float64)
    expected = with_gradients(by_document, inputs, cotangent)
    found = with_gradients(
        lambda q, k, v: windowed_attention(q, k, v, pieces, window, 0.3), inputs, cotangent
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_heads_of_a_transposed_tensor_are_read_where_they_lie():
    """As a layer hands over a document of a row: tokens first in memory, heads second, other tokens before."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 210, heads, 4, dtype=torch.float64)[:, 10:].transpose(1, 2) for heads in (4, 2, 2)
    )
    visible = _visible(200, 200, 8, torch.device("cpu"))
    expected = plain_attention(q, k, v, visible, AttentionOptions(0.3))
    torch.testing.assert_close(windowed_attention(q, k, v, whole(q, k), 8, 0.3), expected, rtol=0, atol=1e-12)


def test_gradients_of_keys_add_up_in_float32():
    """In bfloat16, many small gradients would be lost beside their sum."""
    inputs = [torch.randn(1, 1, 600, 8).bfloat16().requires_grad_() for _ in range(3)]
    cotangent = torch.ones(1, 1, 600, 8, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(
        lambda q, k, v: windowed_attention(q, k, v, whole(q, k), 500, 0.01), exact, cotangent.double()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "BLOCKS", (1, 1))
        found = with_gradients(
            lambda q, k, v: windowed_attention(q, k, v, whole(q, k), 500, 0.01), inputs, cotangent
        )
    assert found[3].dtype == torch.bfloat16
    errors = (found[3].double() - expected[3]).abs()
    assert float(errors.max()) <= 2**-8 * float(expected[3].abs().max())


@pytest.mark.parametrize(
    ("window", "most"), [(windows.WIDEST_KEPT, windows.WIDEST_KEPT + 32), (windows.WIDEST_KEPT + 1, 1)]
)
def test_queries_keys_values_and_weights_of_narrow_windows_are_kept_for_the_backward(window, most):
    """Of a wider window one number a query instead of its weights."""
    inputs = [torch.randn(1, 2, 400, 8, requires_grad=True) for _ in range(3)]
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        windowed_attention(*inputs, whole(*inputs[:2]), window, 0.3)
    more = sum(tensor.numel() for tensor in kept) - sum(x.numel() for x in inputs)
    assert 0 < more <= 2 * 400 * most


@pytest.mark.parametrize("window", [8, windows.WIDEST_KEPT + 1])
def test_a_second_backward_gives_the_same_gradients(window):
    inputs = [torch.randn(1, 2, 200, 8, requires_grad=True) for _ in range(3)]
    output = windowed_attention(*inputs, whole(*inputs[:2]), window, 0.3)
    first = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(output.sum(), inputs)))


def test_what_memory_held_before_reaches_no_result():
    """torch fills new tensors with NaN where algorithms must be deterministic."""
    inputs = [torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3)]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = with_gradients(
            lambda q, k, v: windowed_attention(q, k, v, whole(q, k), 100, 0.3),
            inputs,
            torch.ones(1, 2, 300, 8),
        )
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(bool(x.isfinite().all()) for x in found)


def test_weights_are_let_go_of_block_by_block_if_nothing_is_trained(monkeypatch):
    alive = []

    def scores(*arguments):
        alive.append(sum(reference() is not None for reference in references))
        made = of_block(*arguments)
        references.append(weakref.ref(made))
        return made

    references: list = []
    of_block = windows._scores
    monkeypatch.setattr(windows, "_scores", scores)
    monkeypatch.setattr(windows, "SCORE_BYTES", 1)
    inputs = [torch.randn(1, 1, 60, 8) for _ in range(3)]
    windowed_attention(*inputs, whole(*inputs[:2]), 8, 0.3)
    assert len(alive) > 5
    assert max(alive) <= 1
