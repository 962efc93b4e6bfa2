"""CoPE: as its authors compute it, in a config that plain transformers reads, and read back from it."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.write import with_rope, written_config
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import (
    Cope,
    Default,
    LongRope,
    RopeMethod,
    Spelling,
    Yarn,
    config_entries,
    method_for_target,
    methods_from_config,
    replace_methods,
)
from ropewalk.rope.methods.longrope import NO_ROTATION
from tests.rope.rope_cases import (
    FLOAT32_ORACLE,
    FLOAT64_ORACLE,
    assert_close,
    dims,
    examples,
    thetas,
)

LLAMA_3 = Cope(128, 5e5, 20, 65536)
LENGTH = 4096


def published(rotary_dim: int, rope_theta: float, clipped: int) -> np.ndarray:
    """``inv_freq`` of ``LlamaRotaryEmbedding`` in the authors' modeling_cope.py, in float64."""
    inv_freq = 1.0 / rope_theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    mask = 0.5 * (1.0 + np.cos(np.linspace(0.0, np.pi, clipped)))
    inv_freq[len(inv_freq) - clipped :] *= mask
    return inv_freq


@st.composite
def copes(draw: st.DrawFn) -> Cope:
    dim = draw(dims)
    return Cope(dim, draw(thetas), draw(st.integers(2, dim // 2)), LENGTH)


@examples
@given(copes(), st.none() | st.integers(1, 10**6))
def test_the_frequencies_are_the_authors(method: Cope, length: int | None) -> None:
    inv_freq, attention_factor = method.frequencies(length)
    expected = published(method.rotary_dim, method.rope_theta, method.clipped)
    # Near the end of the cosine, 1 + cos φ has lost digits in the authors' form and here: φ rounds by 2e-16, and the
    # derivative of ln(1 + cos φ) there is tan(φ/2) ≈ 2·(pairs - 1)/π.
    np.testing.assert_allclose(inv_freq[:-1].numpy(), expected[:-1], rtol=FLOAT64_ORACLE)
    assert inv_freq[-1] == 0
    assert attention_factor == 1


@examples
@given(copes())
def test_only_the_clipped_pairs_change_and_the_first_of_them_does_not(method: Cope) -> None:
    plain = Default(method.rotary_dim, method.rope_theta).frequencies().inv_freq
    share = method.frequencies().inv_freq / plain
    kept = method.rotary_dim // 2 - method.clipped + 1
    assert bool((share[:kept] == 1).all())
    assert bool((share[kept - 1 :].diff() < 0).all())


def test_the_factors_of_20_pairs() -> None:
    factors = LLAMA_3.as_written().long_factor
    assert [round(each, 4) for each in factors[43:46]] == [1, 1, 1.0069]
    assert [round(each, 2) for each in factors[-3:-1]] == [36.91, 146.64]
    assert factors[-1] == NO_ROTATION


SMALL = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64, "max_position_embeddings": 1024, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "gemma2", "olmo2", "smollm3")
    },
    "phi3, three quarters of whose dimensions rotate": {"partial_rotary_factor": 0.75},
    "glm4": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_transformers_computes_the_authors_frequencies_from_a_written_config(name: str) -> None:
    family = name.split(",")[0]
    config = ModelConfig.of(CONFIG_MAPPING[family](**SMALL, **FAMILIES[name]))
    before = config.full_attention_rope
    method = method_for_target("cope", before, 1024, LENGTH, rope_theta=1e7)
    assert isinstance(method, Cope)
    stated = json.loads(json.dumps(written_config(with_rope(config, method, LENGTH).source)))
    read = CONFIG_MAPPING[family].from_dict(stated)
    expected = torch.from_numpy(published(before.rotary_dim, 1e7, method.clipped))
    for length in (None, LENGTH, 4 * LENGTH):
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](read, "cpu", seq_len=length)
        assert_close(inv_freq[:-1].double(), expected[:-1], FLOAT32_ORACLE)
        assert 0 <= inv_freq[-1] < 1e-30
        assert attention_factor == 1
    rotary = rotary_module(transformers.AutoModelForCausalLM.from_config(read))[2]
    positions = torch.arange(LENGTH)[None]
    cos, sin = (each[0, :, : len(expected)] for each in rotary(torch.zeros(1), positions))
    held: Any = rotary.inv_freq
    assert_close(held[:-1].double(), expected[:-1], FLOAT32_ORACLE)
    assert bool((cos[:, -1] == 1).all())
    assert float(sin[:, -1].abs().max()) < 1e-26
    assert ModelConfig.of(read).full_attention_rope == method
    assert read.max_position_embeddings == LENGTH


@pytest.mark.parametrize("spelling", ["5.x", "4.x"])
@examples
@given(copes())
def test_a_config_is_read_back_as_cope(spelling: Spelling, method: Cope) -> None:
    entries = json.loads(json.dumps(config_entries(method, method.rotary_dim, spelling=spelling)))
    config = {"head_dim": method.rotary_dim, "max_position_embeddings": LENGTH, **entries}
    assert methods_from_config(config) == {None: method}


FACTORS = LLAMA_3.as_written().long_factor


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_factor": 1.1},
        {"short_factor": (1.0,) * 64},
        {"long_factor": (*FACTORS[:50], 1.001 * FACTORS[50], *FACTORS[51:])},
        {"long_factor": (*FACTORS[:-1], 1000.0), "short_factor": (*FACTORS[:-1], 1000.0)},
    ],
)
def test_other_factors_are_longrope(changes: dict[str, Any]) -> None:
    other = replace(LLAMA_3.as_written(), **changes)
    config = {"head_dim": 128, "max_position_embeddings": 65536, **config_entries(other, 128)}
    assert methods_from_config(config) == {None: other}


def test_factors_in_float32_are_still_recognised() -> None:
    rounded = tuple(float(np.float32(factor)) for factor in FACTORS)
    entries = config_entries(replace(LLAMA_3.as_written(), long_factor=rounded, short_factor=rounded), 128)
    assert methods_from_config({"head_dim": 128, "max_position_embeddings": 65536, **entries}) == {
        None: LLAMA_3
    }


PLAIN = Default(128, 5e5)


@pytest.mark.parametrize(
    ("current", "given", "expected"),
    [
        (PLAIN, {}, LLAMA_3),
        (PLAIN, {"parameters": {"clipped": 12}}, Cope(128, 5e5, 12, 65536)),
        (PLAIN, {"rope_theta": 1e7}, Cope(128, 1e7, 20, 65536)),
        # Of 32 pairs the authors' code would clip 20 as well.
        (Default(64, 1e4), {}, Cope(64, 1e4, 10, 65536)),
        (Default(8, 1e4), {}, Cope(8, 1e4, 2, 65536)),
        (Cope(128, 1e7, 12, 8192), {}, Cope(128, 1e7, 12, 65536)),
        (Cope(128, 1e7, 12, 8192), {"rope_theta": 5e7}, Cope(128, 5e7, 12, 65536)),
    ],
)
def test_the_method_of_a_stage(current: RopeMethod, given: dict[str, Any], expected: Cope) -> None:
    assert method_for_target("cope", current, 8192, 65536, **given) == expected


def test_theta_raises_the_base_beneath_the_clipping() -> None:
    assert method_for_target("theta", LLAMA_3, 65536, 131072, rope_theta=1e7) == replace(
        LLAMA_3, rope_theta=1e7
    )


@pytest.mark.parametrize(
    ("current", "given", "said"),
    [
        (PLAIN, {"clipped": 1}, r"clipped must be .* from 2 to 64 \(rotary_dim / 2\), got 1"),
        (PLAIN, {"clipped": 65}, r"from 2 to 64 .* got 65"),
        (PLAIN, {"clipped": 2.5}, "got 2.5"),
        (PLAIN, {"clipped": True}, "got True"),
        (PLAIN, {"factor": 2.0}, "'factor' has no meaning for method 'cope', which takes only 'clipped'"),
        (Default(2, 1e4), {}, "cope needs at least 2 rotary pairs .* got rotary_dim 2"),
        (Yarn(128, 5e5, 4.0, 8192), {}, "'cope' cannot extend a checkpoint that already has yarn RoPE"),
        (
            LongRope(4, 5e5, (1.0, 1.0), (1.0, 2.0), 1.0, 8192),
            {},
            "'cope' cannot extend a checkpoint that already has longrope RoPE",
        ),
    ],
)
def test_refusals(current: RopeMethod, given: dict[str, Any], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        method_for_target("cope", current, 8192, 65536, parameters=given)


def test_families_whose_config_has_no_place_for_it_refuse_it_by_name() -> None:
    axes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    with pytest.raises(RopewalkError, match="type longrope would change positions in images"):
        replace_methods({"model_type": "qwen2_5_vl_text", "head_dim": 128, "rope_parameters": axes}, LLAMA_3)
