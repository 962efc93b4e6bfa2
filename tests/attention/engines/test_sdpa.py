"""The segments engine against the float64 oracle: rows, heads and dtypes of all kinds."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import PackedLayout, attend
from ropewalk.attention.choices import PATTERNS
from ropewalk.testing import (
    attention_errors,
    cut_row,
    random_layout,
)
from tests.attention.attention_cases import random_qkv
from tests.marks import slow_after


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(4, 300),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([8, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    interleaved=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_segments_within_the_error_budget(seed, length, batch, heads, head_dim, dtype, interleaved):
    rng = random.Random(seed)
    layouts = [
        random_layout(length, rng, max_documents=12, interleaved=interleaved, max_anchor=2)
        for _ in range(batch)
    ]
    q, k, v = random_qkv(batch, *heads, length, head_dim, dtype, seed=seed)
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine="sdpa"), q, k, v, layouts)
    assert errors.worst_share <= 1, (errors, [layout.pattern for layout in layouts])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("anchor", [0, 1])
@pytest.mark.parametrize(("documents", "total"), slow_after(1, [(200, 1000), (3, 1300), (1, 700)]))
def test_segments_on_long_rows(pattern, anchor, documents, total):
    rng = random.Random(documents)
    layout = PackedLayout.from_lengths(cut_row(total, documents, rng), pattern, anchor)
    q, k, v = random_qkv(1, 2, 1, layout.total_length, 16)
    errors = attention_errors(lambda *qkv: attend(*qkv, layout, engine="sdpa"), q, k, v, [layout])
    assert errors.worst_share <= 1, errors


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_segments_at_each_head_dim(head_dim):
    layout = PackedLayout.from_lengths([40, 7, 70], "anchor")
    q, k, v = random_qkv(2, 4, 2, layout.total_length, head_dim, torch.bfloat16)
    layouts = [layout, PackedLayout.from_lengths([117], "full")]
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine="sdpa"), q, k, v, layouts)
    assert errors.worst_share <= 1, errors


def test_anchor_gradients_add_up_in_float32():
    """4000 documents of one token give the anchor's value a gradient that bfloat16 sums would stall on."""
    layout = PackedLayout.from_lengths([1] * 4000, "anchor")
    q, k, v = random_qkv(1, 1, 1, 4001, 8, torch.bfloat16)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    v = v.requires_grad_()
    attend(q, k, v, layout, engine="sdpa").backward(torch.ones(1, 1, 4001, 8, dtype=torch.bfloat16))
    # Each document gives half of its weight to the anchor, which gives itself all.
    expected = 1 + 0.5 * 4000
    assert (v.grad[0, 0, 0].float() - expected).abs().max() <= expected * torch.finfo(torch.bfloat16).eps
