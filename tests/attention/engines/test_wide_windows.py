"""Wide windows on a CPU: the dense masked product and its gradients, and packed rows through them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import PackedLayout, attend
from ropewalk.attention.engines import segments, wide_windows
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.segments import _visible
from ropewalk.attention.engines.wide_windows import wide_windowed_attention
from ropewalk.attention.options import AttentionOptions
from tests.attention.engines.test_windows import with_gradients

SCALE = 0.3


def dense(length, window):
    visible = _visible(length, length, window, torch.device("cpu"))
    return lambda q, k, v: plain_attention(q, k, v, visible, AttentionOptions(SCALE))


def wide(window):
    return lambda q, k, v: wide_windowed_attention(q, k, v, window, SCALE)


def inputs_of(length, groups=1, dtype=torch.float64, spread=1.0):
    torch.manual_seed(length)
    shapes = (2, 2 * groups, length, 4), (2, 2, length, 4), (2, 2, length, 4)
    inputs = [(spread * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]
    return inputs, torch.randn(shapes[0], dtype=dtype)


@st.composite
def lengths_and_windows(draw):
    window = draw(st.integers(2, 40))
    return draw(st.integers(window + 1, 130)), window


@given(lengths_and_windows(), st.sampled_from([1, 3]))
def test_it_is_the_dense_masked_product(case, groups):
    length, window = case
    inputs, cotangent = inputs_of(length, groups)
    expected = with_gradients(dense(length, window), inputs, cotangent)
    found = with_gradients(wide(window), inputs, cotangent)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_key_more_or_less_shows():
    inputs, cotangent = inputs_of(50)
    expected = with_gradients(dense(50, 20), inputs, cotangent)
    for window in (19, 21):
        for a, b in zip(with_gradients(wide(window), inputs, cotangent), expected, strict=True):
            assert (a - b).abs().max() > 1e-3


def kernel_alone(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spread", "other", "window"), [(1.0, dense(500, 150), 150), (3.0, kernel_alone, 500)]
)
def test_it_stays_within_the_error_budget(spread, other, window, dtype):
    """Twice the error of plain attention in the same dtype, and one rounding.

    With scores of tens, which give one triangle nearly all the weight of some queries, it is that of torch's kernel
    over the whole run, whose gradients have three times the error of plain attention there.
    """
    inputs, cotangent = inputs_of(500, dtype=dtype, spread=spread)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    errors = []
    for attention, seen in ((wide(150), 150), (other, window)):
        found = with_gradients(attention, inputs, cotangent)
        truth = with_gradients(dense(500, seen), exact, cotangent.double())
        assert all(x.dtype is dtype for x in found)
        errors.append([(a - b).abs().max().item() for a, b in zip(found, truth, strict=True)])
    for error, of_other, expected in zip(*errors, truth, strict=True):
        assert error <= 2 * of_other + torch.finfo(dtype).eps * expected.abs().max().item()


@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_rows_go_through_it(pattern, batch, monkeypatch):
    """Documents shorter than the window, as long, and longer; with an anchor that leaves the window."""
    monkeypatch.setattr(segments, "LEAST_WINDOW", 2)
    calls = []
    kernel = wide_windows._causal
    monkeypatch.setattr(wide_windows, "_causal", lambda *args: calls.append(0) or kernel(*args))
    layout = PackedLayout.from_lengths([9, 40, 24, 3], pattern=pattern)
    torch.manual_seed(0)
    rows = torch.randn(3, batch, 4, layout.total_length, 8, dtype=torch.float64)
    q, k, v = (x.clone().requires_grad_() for x in rows)
    options = AttentionOptions(window=9)
    cotangent = torch.randn_like(q)
    found, expected = (
        with_gradients(
            lambda q, k, v, engine=engine: attend(q, k, v, layout, engine=engine, options=options),
            (q, k, v),
            cotangent,
        )
        for engine in ("segments", "reference")
    )
    assert calls
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
