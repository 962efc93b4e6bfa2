"""Methods to test with: hypothesis strategies, published checkpoints, and transformers run in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import settings
from hypothesis import strategies as st
from transformers import LlamaConfig, modeling_rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, Ntk, RopeMethod, Yarn

# From published config.json files; each is (method, what the file's RoPE keys say, max_position_embeddings).
LLAMA_3_1 = (
    Llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192),
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    131072,
)
QWEN_2_5 = (
    Yarn(128, 1000000.0, 4.0, 32768),
    {
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    131072,
)
GPT_OSS = (
    Yarn(64, 150000, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
    {
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    131072,
)
DEEPSEEK_V3_PARAMETERS = (
    Yarn(64, 10000, 40, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    {
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    163840,
)
PUBLISHED = {
    "Llama 3.1": LLAMA_3_1,
    "Qwen 2.5": QWEN_2_5,
    "gpt-oss": GPT_OSS,
    "DeepSeek-V3": DEEPSEEK_V3_PARAMETERS,
}

# transformers computes in float32: rounding the exponent (2^-25) moves theta^x by ln(1e9)/2^25 = 6.2e-7, and
# power, reciprocal and scaling round by 6e-8 each. That is below 1e-6, the agreement asked for.
FLOAT32_ORACLE = 1e-6
# In float64 the same sum is 2e-15; llama3's blend may amplify it by factor·high/(high - low) <= 64·8/2.
FLOAT64_ORACLE = 1e-12

examples = settings(deadline=None, max_examples=60)

dims = st.integers(2, 64).map(lambda pairs: 2 * pairs)
thetas = st.floats(1e3, 1e9)
factors = st.floats(1, 64)
lengths = st.integers(64, 131072)


@st.composite
def yarns(draw: st.DrawFn) -> Yarn:
    beta_slow = draw(st.floats(0.5, 4))
    return Yarn(
        draw(dims),
        draw(thetas),
        draw(factors),
        draw(lengths),
        beta_fast=draw(st.floats(4, 64)),
        beta_slow=beta_slow,
        attention_factor=draw(st.none() | st.floats(0.5, 2)),
        mscale=draw(st.none() | st.floats(0.1, 2)),
        mscale_all_dim=draw(st.none() | st.floats(0.1, 2)),
        truncate=draw(st.booleans()),
    )


@st.composite
def longropes(draw: st.DrawFn) -> LongRope:
    dim = draw(dims)
    rescale = st.lists(st.floats(0.5, 64), min_size=dim // 2, max_size=dim // 2).map(tuple)
    return LongRope(dim, draw(thetas), draw(rescale), draw(rescale), draw(st.floats(0.5, 2)), draw(lengths))


defaults = st.builds(Default, dims, thetas)
linears = st.builds(Linear, dims, thetas, factors)
ntks = st.builds(Ntk, dims, thetas, factors)
dynamics = st.builds(DynamicNtk, dims, thetas, factors, lengths)
llama3s = st.builds(Llama3, dims, thetas, factors, st.floats(0.5, 2), st.floats(4, 8), lengths)
methods = defaults | linears | ntks | dynamics | yarns() | llama3s | longropes()


def llama_config(method: RopeMethod, max_position_embeddings: int = 131072, **keys: Any) -> LlamaConfig:
    """A LlamaConfig with heads as wide as the method's rotary dimension and these RoPE keys."""
    return LlamaConfig(
        hidden_size=2 * method.rotary_dim,
        num_attention_heads=2,
        head_dim=method.rotary_dim,
        **{"max_position_embeddings": max_position_embeddings, **keys},
    )


@contextmanager
def transformers_in_float64() -> Iterator[None]:
    """Let transformers' RoPE functions, which ask for float32 by name, compute in float64."""
    double = SimpleNamespace(**vars(torch))
    double.float = double.float32 = torch.float64
    with patch.object(modeling_rope_utils, "torch", double), patch.object(modeling_llama, "torch", double):
        yield


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    torch.testing.assert_close(actual, expected.double(), rtol=relative, atol=0)


def oracle(
    method: RopeMethod,
    parameters: dict[str, Any],
    max_length: int = 131072,
    sequence_length: int | None = None,
) -> tuple[torch.Tensor, float]:
    """transformers' function of the same rope type on parameters written out here."""
    parameters = {"rope_type": method.name, "rope_theta": method.rope_theta, **parameters}
    config = llama_config(method, max_length, rope_parameters=parameters)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[method.name](config, None, seq_len=sequence_length)
    return inv_freq, attention_factor
