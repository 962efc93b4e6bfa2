"""Unscaled RoPE: the frequencies are transformers' own, and the definition's."""

from hypothesis import given
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropewalk.rope import Default
from tests.rope.rope_cases import FLOAT32_ORACLE, assert_close, defaults, examples, llama_config


@examples
@given(defaults)
def test_default_equals_transformers(method: Default) -> None:
    parameters = {"rope_type": "default", "rope_theta": method.rope_theta}
    config = llama_config(method, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    assert_close(method.frequencies().inv_freq, rotary.inv_freq, FLOAT32_ORACLE)
    assert method.frequencies().attention_factor == rotary.attention_scaling == 1
