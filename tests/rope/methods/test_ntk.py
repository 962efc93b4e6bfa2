"""NTK scaling: as transformers has it, with the fastest pair kept and the slowest divided by the factor."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.rope import DynamicNtk, Ntk, unscaled_inv_freq
from tests.rope.rope_cases import (
    FLOAT64_ORACLE,
    assert_close,
    dynamics,
    examples,
    ntks,
    oracle,
    transformers_in_float64,
)


@examples
@given(ntks)
def test_ntk_equals_transformers_dynamic_at_the_same_scale(method: Ntk) -> None:
    # dynamic's scale is factor·L/T - (factor - 1): with factor 1 it is L/T, so L = s·T gives s.
    length = 2**20
    stretched = round(length * method.factor)
    method = replace(method, factor=stretched / length)
    dynamic = DynamicNtk(method.rotary_dim, method.rope_theta, 1.0, length)
    with transformers_in_float64():
        expected, _ = oracle(dynamic, {"factor": 1.0}, length, stretched)
    assert_close(method.frequencies().inv_freq, expected, FLOAT64_ORACLE)


@examples
@given(ntks)
def test_ntk_divides_the_slowest_pair_by_the_factor_and_keeps_the_fastest(method: Ntk) -> None:
    plain = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    scaled = method.frequencies().inv_freq
    assert scaled[0] == plain[0] == 1
    assert float(plain[-1] / scaled[-1]) == pytest.approx(method.factor, rel=FLOAT64_ORACLE)
    assert torch.equal(scaled, method.as_default().frequencies().inv_freq)


@examples
@given(dynamics, st.none() | st.integers(1, 10**6))
def test_dynamic_equals_transformers_at_every_length(method: DynamicNtk, sequence_length: int | None) -> None:
    with transformers_in_float64():
        expected, attention_factor = oracle(
            method, {"factor": method.factor}, method.original_max_position_embeddings, sequence_length
        )
    inv_freq, ours = method.frequencies(sequence_length)
    assert_close(inv_freq, expected, FLOAT64_ORACLE)
    assert ours == attention_factor == 1
