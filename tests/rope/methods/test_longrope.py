"""LongRoPE: as transformers has it, at every length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.rope import LongRope, longrope_attention_factor
from tests.rope.rope_cases import FLOAT32_ORACLE, assert_close, examples, longropes, oracle


@examples
@given(longropes(), st.none() | st.integers(1, 10**6))
def test_longrope_equals_transformers_at_every_length(method: LongRope, sequence_length: int | None) -> None:
    parameters = {
        "short_factor": list(method.short_factor),
        "long_factor": list(method.long_factor),
        "attention_factor": method.attention_factor,
        "original_max_position_embeddings": method.original_max_position_embeddings,
        "factor": 1.0,
    }
    expected, attention_factor = oracle(method, parameters, 2**20, sequence_length)
    inv_freq, ours = method.frequencies(sequence_length)
    assert_close(inv_freq, expected, FLOAT32_ORACLE)
    assert ours == attention_factor


@examples
@given(st.floats(1, 256), st.integers(64, 131072))
def test_longrope_attention_factor_equals_transformers(factor: float, original: int) -> None:
    method = LongRope(4, 10000.0, (1.0, 1.0), (2.0, 2.0), 1.0, original)
    parameters = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "factor": factor}
    _, expected = oracle(method, {**parameters, "original_max_position_embeddings": original})
    assert longrope_attention_factor(factor, original) == pytest.approx(expected, rel=1e-15)
