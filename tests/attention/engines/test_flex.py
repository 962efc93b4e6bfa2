"""The flex engine's forward against the float64 oracle; its block mask is tested in test_blocks.py."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import attend
from ropewalk.attention.options import AttentionOptions
from ropewalk.testing import (
    attention_errors,
    random_layout,
)
from tests.attention.attention_cases import random_qkv


@given(seed=st.integers(0, 10**6), length=st.integers(4, 260), softcap=st.sampled_from([None, 3.0]))
@settings(max_examples=15, deadline=None)
def test_flex_forward_within_the_error_budget(seed, length, softcap):
    rng = random.Random(seed)
    layouts = [random_layout(length, rng, interleaved=rng.random() < 0.5, max_anchor=2) for _ in range(2)]
    q, k, v = random_qkv(2, 4, 2, length, 16, seed=seed)

    def flex(q, k, v):
        return attend(q, k, v, layouts, "flex", AttentionOptions(softcap=softcap))

    errors = attention_errors(flex, q, k, v, layouts, AttentionOptions(softcap=softcap), gradients=False)
    assert errors.worst_share <= 1, errors
