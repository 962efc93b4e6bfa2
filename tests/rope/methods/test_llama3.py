"""Llama 3's scaling: as transformers has it, fast pairs kept and slow ones divided."""

import math

import torch
from hypothesis import given
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.rope import Llama3, config_entries, unscaled_inv_freq
from tests.rope.rope_cases import (
    FLOAT32_ORACLE,
    FLOAT64_ORACLE,
    assert_close,
    examples,
    llama3s,
    llama_config,
    oracle,
    transformers_in_float64,
)


@examples
@given(llama3s)
def test_llama3_equals_transformers(method: Llama3) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    with transformers_in_float64():
        expected, attention_factor = oracle(method, {name: getattr(method, name) for name in names}, 2**20)
    inv_freq, ours = method.frequencies()
    assert_close(inv_freq, expected, FLOAT64_ORACLE)
    assert ours == attention_factor == 1


@examples
@given(llama3s)
def test_llama3_keeps_fast_pairs_and_divides_slow_ones(method: Llama3) -> None:
    plain = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    turns = method.original_max_position_embeddings * plain / (2 * math.pi)
    inv_freq = method.frequencies().inv_freq
    fast, slow = turns > method.high_freq_factor, turns < method.low_freq_factor
    assert torch.equal(inv_freq[fast], plain[fast])
    assert torch.equal(inv_freq[slow], plain[slow] / method.factor)


def test_llama3_with_equal_factors_is_that_of_transformers() -> None:
    """Llama 4: both factors are 1, so nothing is blended."""
    method = Llama3(128, 5e5, 16.0, 1.0, 1.0, 8192)
    config = llama_config(method, **config_entries(method, 128))
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    torch.testing.assert_close(method.frequencies().inv_freq, inv_freq.double(), rtol=FLOAT32_ORACLE, atol=0)
