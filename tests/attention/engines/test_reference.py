"""The reference engine: soft cap, scale and widths by the definition."""

import pytest
import torch

from ropewalk import PackedLayout, attend
from ropewalk.attention.options import AttentionOptions
from ropewalk.testing import (
    attention_errors,
    oracle_attention,
)
from tests.attention.attention_cases import random_qkv


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("engine", ["reference", "sdpa"])
def test_soft_cap_and_scale(engine, softcap):
    layout = PackedLayout.from_lengths([30, 5, 20], "anchor")
    q, k, v = (x.double() for x in random_qkv(1, 4, 2, layout.total_length, 16))
    options = AttentionOptions(0.7, softcap)
    found = attend(q, k, v, layout, engine, options)
    expected = oracle_attention(q, k, v, [layout], options)
    # Two float64 evaluations of sums over at most 55 terms of size 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    other = oracle_attention(q, k, v, [layout], AttentionOptions(0.7, 4.0))
    assert (found - other).abs().max() > 1e-3


def test_values_may_be_wider_than_heads():
    layout = PackedLayout.from_lengths([30, 5], "anchor")
    q, k, _ = random_qkv(1, 4, 2, layout.total_length, 16)
    v = random_qkv(1, 4, 2, layout.total_length, 24)[2]
    errors = attention_errors(lambda *qkv: attend(*qkv, layout, engine="sdpa"), q, k, v, [layout])
    assert errors.worst_share <= 1, errors
