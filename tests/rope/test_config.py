"""Config to method and back: round trips through transformers itself, old spellings, contradictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import (
    ROPE_KEYS,
    Default,
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    RopeMethod,
    Spelling,
    Yarn,
    config_entries,
    head_dim,
    longrope_attention_factor,
    method_from_config,
    methods_from_config,
    replace_methods,
)
from ropewalk.rope.config import with_older_keys
from tests.rope.rope_cases import (
    FLOAT32_ORACLE,
    FLOAT64_ORACLE,
    PUBLISHED,
    examples,
    llama_config,
    methods,
    transformers_in_float64,
)

HEADS = {"hidden_size": 64, "num_attention_heads": 4}
LENGTH = {"max_position_embeddings": 4096}
PHI = LongRope(12, 10000.0, (1.0,) * 6, (1.0, 1.5, 2.0, 4.0, 8.0, 16.0), 1.19, 4096)
GEMMA = {
    "full_attention": Linear(16, 1000000.0, 8.0),
    "sliding_attention": Default(16, 10000.0),
}


@examples
@given(methods, st.sampled_from(["5.x", "4.x"]))
def test_method_survives_the_way_through_a_llama_config(method: RopeMethod, spelling: Spelling) -> None:
    config = llama_config(method, **config_entries(method, method.rotary_dim, spelling=spelling))
    # NTK-aware is a default method with another base as soon as it is in a config.
    expected = method.as_default() if isinstance(method, Ntk) else method
    assert method_from_config(config.to_dict()) == expected
    functions = {**ROPE_INIT_FUNCTIONS, "default": LlamaRotaryEmbedding.compute_default_rope_parameters}
    with transformers_in_float64():
        inv_freq, attention_factor = functions[expected.name](config)
    # longrope casts to float32 by a tensor method, which stays float32.
    tolerance = FLOAT32_ORACLE if isinstance(method, LongRope) else FLOAT64_ORACLE
    torch.testing.assert_close(method.frequencies().inv_freq, inv_freq.double(), rtol=tolerance, atol=0)
    assert method.frequencies().attention_factor == pytest.approx(attention_factor, rel=FLOAT64_ORACLE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_in_both_spellings(name: str, tmp_path: Path) -> None:
    method, keys, max_length = PUBLISHED[name]
    as_published = {"head_dim": method.rotary_dim, "max_position_embeddings": max_length, **keys}
    assert method_from_config(as_published) == method
    llama_config(method, max_length, **keys).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved
    assert method_from_config(saved) == method


def test_phi_3_is_read_in_every_spelling_and_survives_its_own_config() -> None:
    lists = {"short_factor": list(PHI.short_factor), "long_factor": list(PHI.long_factor)}
    for kind in ({"type": "su"}, {"type": "longrope"}, {"rope_type": "longrope", "type": "su"}):
        config = {
            **HEADS,
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {**lists, **kind},
        }
        method = method_from_config(config)
        # sqrt(1 + ln 32 / ln 4096), the value in Microsoft's table for 128k: 1.1902.
        assert isinstance(method, LongRope)
        assert method.attention_factor == longrope_attention_factor(32, 4096)
        assert method.attention_factor == pytest.approx(1.1902, abs=5e-5)
        assert method.long_factor == PHI.long_factor
        assert method.rotary_dim == 12
    hf = Phi3Config(**HEADS, max_position_embeddings=131072, **config_entries(PHI, 16))
    assert method_from_config(hf.to_dict()) == PHI
    rotary = Phi3RotaryEmbedding(hf)
    torch.testing.assert_close(
        PHI.frequencies().inv_freq, rotary.inv_freq.double(), rtol=FLOAT32_ORACLE, atol=0
    )
    assert rotary.attention_scaling == PHI.attention_factor


def test_longrope_original_length_wins_over_the_one_phi_3_has_by_default() -> None:
    method = LongRope(16, 10000.0, (1.0,) * 8, (2.0,) * 8, 1.0, 8192)
    hf = Phi3Config(**HEADS, max_position_embeddings=131072, **config_entries(method, 16))
    assert hf.rope_parameters["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize("spelling", ["5.x", "4.x"])
def test_gemma_3_has_a_method_for_each_layer_type(spelling: Spelling) -> None:
    entries = config_entries(GEMMA, 16, spelling=spelling)
    assert methods_from_config({"head_dim": 16, **entries}) == GEMMA
    hf = Gemma3TextConfig(hidden_size=64, num_attention_heads=4, head_dim=16, **entries)
    assert methods_from_config(hf.to_dict()) == GEMMA
    rotary = Gemma3RotaryEmbedding(hf)
    for layer_type, method in GEMMA.items():
        expected = getattr(rotary, f"{layer_type}_inv_freq").double()
        torch.testing.assert_close(method.frequencies().inv_freq, expected, rtol=FLOAT32_ORACLE, atol=0)
        assert method_from_config(hf.to_dict(), layer_type) == method
    with pytest.raises(RopewalkError, match="pass layer_type, one of full_attention, sliding_attention"):
        method_from_config(hf.to_dict())
    with pytest.raises(RopewalkError, match="no RoPE method for layer type 'global'; choose one of full"):
        method_from_config(hf.to_dict(), "global")


def test_a_layer_type_without_position_embedding_is_left_out() -> None:
    nested = {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert list(methods_from_config({"head_dim": 16, "rope_parameters": nested})) == ["sliding_attention"]


@examples
@given(st.integers(1, 256).flatmap(lambda pairs: st.tuples(st.just(2 * pairs), st.integers(2 * pairs, 1024))))
def test_partial_rotary_dimension_survives_rounding(dims: tuple[int, int]) -> None:
    rotary_dim, width = dims
    for spelling in ("5.x", "4.x"):
        entries = config_entries(Default(rotary_dim, 1e4), width, spelling=spelling)
        assert method_from_config({"head_dim": width, **entries}).rotary_dim == rotary_dim


def test_partial_rotary_factor_is_read_inside_and_outside() -> None:
    config = {**HEADS, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert method_from_config(config).rotary_dim == 8
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert method_from_config({**HEADS, "rope_parameters": inside}).rotary_dim == 8
    with pytest.raises(
        RopewalkError,
        match=r"partial_rotary_factor is 0.25 outside the RoPE parameters of the config, but 0.5",
    ):
        method_from_config({**HEADS, "rope_parameters": inside, "partial_rotary_factor": 0.25})
    with pytest.raises(RopewalkError, match=r"at most 1, got 1\.5"):
        method_from_config({**HEADS, "rope_theta": 1e4, "partial_rotary_factor": 1.5})


def test_head_dim_may_differ_from_hidden_size_over_heads() -> None:
    assert head_dim(HEADS) == 16
    assert head_dim({**HEADS, "head_dim": None}) == 16
    assert head_dim({**HEADS, "head_dim": 128}) == 128
    with pytest.raises(RopewalkError, match="must have either head_dim"):
        head_dim({"hidden_size": 64})
    # Latent attention: RoPE turns its own part of a head.
    assert head_dim({**HEADS, "head_dim": 192, "qk_rope_head_dim": 64}) == 64


def test_the_two_spellings_may_agree() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = {
        **HEADS,
        "rope_theta": 1e4,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 1e4},
    }
    assert method_from_config(config) == Linear(16, 1e4, 2.0)


def test_original_length_falls_back_to_max_position_embeddings() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = {**HEADS, "rope_theta": 1e4, "rope_scaling": yarn, "max_position_embeddings": 2048}
    assert method_from_config(config) == Yarn(16, 1e4, 4.0, 2048)
    with pytest.raises(RopewalkError, match="need max_position_embeddings, and the config has none"):
        method_from_config({**HEADS, "rope_theta": 1e4, "rope_scaling": yarn})


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512, "beta_fast": 0}
    config = {**HEADS, "rope_theta": 1e4, "rope_scaling": yarn, "max_position_embeddings": 2048}
    assert method_from_config(config) == Yarn(16, 1e4, 4.0, 512)


def test_dynamic_starts_from_max_position_embeddings() -> None:
    config = {"max_position_embeddings": 2048, "rope_theta": 1e4, **HEADS}
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    assert method_from_config(config) == DynamicNtk(16, 1e4, 2.0, 2048)
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}
    with pytest.raises(RopewalkError, match=r"2048, but the config also has .* 1024"):
        method_from_config(config)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "no rope_theta: this checkpoint does not use RoPE, or its config does not state"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "no rope_theta"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_parameters\['full_attention'\] in the config has no rope_theta",
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta has different values: 500000.0 outside the RoPE parameters, 10000.0 in rope_parameters",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "contradicts itself: rope_parameters says Default.* but rope_scaling says Linear",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
            "the key 'rope_type' is 'linear', but the key 'type' is 'dynamic'",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1]}},
            "the rope type 'mrope' for positions in images and videos, which ropewalk does not support for the",
        ),
        (
            {
                "model_type": "qwen2_5_vl",
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [2, 3, 3]},
            },
            "the keys mrope_section for positions in images and videos, which .* type 'qwen2_5_vl'; `ropewalk",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}},
            "^rope_scaling of the config states factor but no rope_type; add rope_type, one of linear, dynamic, yarn",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}},
            "^rope_parameters of the config states factor but no rope_type",
        ),
        # 0.5 times 0.1·ln 4 + 1 = 1.138629436.
        (
            {
                "rope_theta": 1e4,
                **LENGTH,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 0.5},
            },
            "attn_factor is 0.5 .* transformers ignores it, but vLLM .*; replace it by attention_factor 0.5693147181 ",
        ),
        # Only Hunyuan's classes read alpha.
        (
            {
                "model_type": "llama",
                "rope_theta": 1e4,
                "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
            },
            "rope type 'dynamic' has unknown keys alpha",
        ),
        (
            {
                "model_type": "hunyuan_v1_dense",
                "rope_theta": 1e4,
                "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "gamma": 2},
            },
            "rope type 'dynamic' has unknown keys gamma",
        ),
        (
            {
                "model_type": "hunyuan_v1_dense",
                "rope_theta": 1e4,
                "rope_scaling": {"type": "dynamic", "alpha": "big"},
            },
            "alpha must be a finite number above 0, got 'big'",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "spiral"}},
            "unknown rope type 'spiral'; known are default",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}},
            "rope type 'linear' has unknown keys beta_fast; it takes factor",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_theta": 1e4, "rope_scaling": "linear"}, "rope_scaling must be a mapping, got 'linear'"),
        (
            {
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
            },
            "original_max_position_embeddings is 4096 outside the RoPE parameters of the config, but 2048",
        ),
        (
            {"rope_local_base_freq": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_local_base_freq 10000.0 gives sliding-window layers a base of their own",
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_theta is 500000.0, but no layer type",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
            },
            "contradicts rope_parameters",
        ),
        ({"text_config": {"rope_theta": 1e4}}, "under text_config"),
        (
            {"rope_theta": 1e4, "hidden_size": 66},
            "hidden_size 66 is not a multiple of num_attention_heads 4, and the config has no head_dim",
        ),
        (
            {"rope_theta": 1e4, "num_attention_heads": 0},
            "num_attention_heads must be a whole number, .* got 0",
        ),
        ({"rope_theta": 1e4, "head_dim": 16.5}, "head_dim must be a whole number, at least 1, got 16.5"),
        ({"rope_theta": 1e4, "head_dim": True}, "head_dim must be a whole number, at least 1, got True"),
        ({"rope_theta": [1e4, 1e6]}, r"rope_theta must be a finite number above 1, got \[10000.0"),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": "yes"},
                **LENGTH,
            },
            "the key 'finetuned' in the RoPE parameters of the config must be true or false, got 'yes'",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
            "rope type 'linear' has unknown keys finetuned",
        ),
        (
            {"rope_theta": 1e4, "max_position_embeddings": "4k", "rope_scaling": {"type": "yarn"}},
            "max_position_embeddings must be a whole number, at least 1, got '4k'",
        ),
    ],
)
def test_silent_or_contradictory_configs_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        methods_from_config({**HEADS, **keys})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        {"rope_type": "yarn"},
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_the_original_length_is_not_more_than_the_present_one(scaling: dict[str, Any], inside: bool) -> None:
    original = {"original_max_position_embeddings": 8192}
    config = {
        **HEADS,
        "rope_theta": 1e4,
        "rope_scaling": {**scaling, **(original if inside else {})},
        **({} if inside else original),
    }
    with pytest.raises(
        RopewalkError,
        match="8192, the length before the extension, is more than max_position_embeddings 4096",
    ):
        methods_from_config({**config, "max_position_embeddings": 4096})
    assert methods_from_config({**config, "max_position_embeddings": 8192})


def test_yarn_with_a_factor_may_be_cut_short() -> None:
    config = {**HEADS, "rope_theta": 1e4, "rope_scaling": YARN, "max_position_embeddings": 256}
    assert method_from_config(config) == Yarn(16, 1e4, 4.0, 4096)
    assert len(ModelConfig(config).config_warnings) == 1


def test_width_of_heads_may_differ_from_the_quotient() -> None:
    config = {"hidden_size": 1152, "num_attention_heads": 7, "head_dim": 256, "rope_theta": 1e4}
    assert method_from_config(config) == Default(256, 1e4)


def test_finetuned_of_the_yarn_authors_changes_nothing() -> None:
    for finetuned in (True, False, None):
        yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
        config = {**HEADS, "rope_theta": 1e4, "rope_scaling": {**yarn, "finetuned": finetuned}}
        assert method_from_config(config) == Yarn(16, 1e4, 32.0, 4096)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LENGTH_VALUE = LENGTH["max_position_embeddings"]
WINDOW = {"rope_theta": 1e4, "max_position_embeddings": 4096, "sliding_window": 1024}
MIXED = {
    "full_attention": {**YARN, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_a_layer_type_is_refused_where_there_are_none() -> None:
    with pytest.raises(
        RopewalkError, match="'full_attention'; omit layer_type, because all layers share one method"
    ):
        method_from_config({**HEADS, "rope_theta": 1e4}, "full_attention")


def test_entries_are_what_each_spelling_writes() -> None:
    method = Llama3(16, 5e5, 8.0, 1.0, 4.0, 8192)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert config_entries(method, 16) == {"rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert config_entries(method, 16, spelling="4.x") == {"rope_theta": 5e5, "rope_scaling": scaling}
    assert config_entries(Default(8, 5e5), 16, spelling="4.x") == {
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
    }
    json.dumps(config_entries(PHI, 16), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((LongRope(4, 1e4, (1.0, 1.0), (2.0, 2.0), 1.0, 512, 8), 4), "longrope with start_tokens 8"),
        ((Default(16, 1e4), 8), "rotary_dim 16 is more than head_dim 8"),
        (
            ({None: Default(16, 1e4), "full_attention": Default(16, 1e4)}, 16),
            "methods must have either the single key None",
        ),
        (({}, 16), "methods must have either the single key None"),
        (
            ({"a": DynamicNtk(8, 1e4, 2.0, 512), "b": DynamicNtk(8, 1e4, 2.0, 256)}, 8),
            "only one max_position_embeddings, but the layer types need 512 and 256",
        ),
    ],
)
def test_what_a_config_cannot_say_is_refused(arguments: tuple[Any, int], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        config_entries(*arguments)


def test_the_old_spelling_knows_only_the_layer_types_of_gemma_3() -> None:
    scaled = {**GEMMA, "sliding_attention": Linear(16, 1e4, 2.0)}
    with pytest.raises(RopewalkError, match=r"linear for sliding_attention; set spelling='5\.x'"):
        config_entries(scaled, 16, spelling="4.x")
    with pytest.raises(RopewalkError, match=r"unknown spelling '3\.x'"):
        config_entries(Default(16, 1e4), 16, spelling="3.x")  # type: ignore[arg-type]


def test_replacing_methods_leaves_nothing_of_the_old_ones() -> None:
    old = {
        **HEADS,
        "vocab_size": 10,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "partial_rotary_factor": 0.5,
    }
    method = Yarn(8, 5e5, 4.0, 4096)
    new = replace_methods(old, method)
    assert set(new) - set(HEADS) == {"vocab_size", "rope_parameters"}
    assert method_from_config(new) == method
    assert old["rope_theta"] == 1e4
    assert set(config_entries(PHI, 16)) <= set(ROPE_KEYS)


MINISTRAL: dict[str, Any] = {
    "model_type": "ministral3",
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
    },
}


def test_the_temperature_of_ministral_3_is_read_over_and_kept() -> None:
    method = Yarn(8, 1e6, 16.0, 16)
    assert methods_from_config(MINISTRAL) == {None: method}
    longer = replace_methods(MINISTRAL, replace(method, factor=64.0))["rope_parameters"]
    assert (longer["llama_4_scaling_beta"], longer["original_max_position_embeddings"]) == (0.1, 16)
    # Plain RoPE has no original length of its own, and the attention still counts in it.
    plain = replace_methods(MINISTRAL, Default(8, 1e6))["rope_parameters"]
    assert (plain["llama_4_scaling_beta"], plain["original_max_position_embeddings"]) == (0.1, 16)
    # Nothing reads the length inside, so that one which could go stale is not written.
    assert "max_position_embeddings" not in longer


def test_a_method_that_would_change_the_steps_of_the_temperature_is_refused() -> None:
    with pytest.raises(
        RopewalkError, match=r"depends on original_max_position_embeddings, .* from 16 to 256;"
    ):
        replace_methods(MINISTRAL, Yarn(8, 1e6, 4.0, 256))


def test_two_lengths_of_ministral_3_that_differ_are_refused() -> None:
    with pytest.raises(
        RopewalkError,
        match="max_position_embeddings is 512 outside the RoPE parameters of the config, but 256",
    ):
        methods_from_config({**MINISTRAL, "max_position_embeddings": 512})


def test_the_temperature_of_another_model_type_is_refused_as_unknown() -> None:
    with pytest.raises(RopewalkError, match="unknown keys llama_4_scaling_beta, max_position_embeddings"):
        methods_from_config({**MINISTRAL, "model_type": "llama"})


AXES = {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
"""Four pairs of a head for time, height and width in images."""
WITH_AXES = {
    "model_type": "qwen3_vl_text",
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **AXES},
}


def test_the_type_mrope_is_plain_rope_in_text() -> None:
    published = {**WITH_AXES, "rope_theta": 1e4, "rope_scaling": {"type": "mrope", **AXES}}
    del published["rope_parameters"]
    assert method_from_config(published) == method_from_config(WITH_AXES) == Default(8, 1e4)


@pytest.mark.parametrize("method", [Default(8, 7e4), Yarn(8, 1e4, 4.0, 256)])
def test_axes_stay_beside_a_new_base_and_beside_yarn(method: RopeMethod) -> None:
    written = replace_methods({**WITH_AXES, "max_position_embeddings": 1024}, method)
    assert {key: written["rope_parameters"][key] for key in AXES} == AXES
    assert method_from_config(written) == method
    older = with_older_keys(written)
    assert older["rope_theta"] == method.rope_theta
    assert {key: older["rope_scaling"][key] for key in AXES} == AXES
    # transformers 4 knows these keys alone.
    del older["rope_parameters"]
    assert method_from_config(older) == method


@pytest.mark.parametrize("method", [Linear(8, 1e4, 4.0), Llama3(8, 1e4, 4.0, 1.0, 4.0, 256)])
def test_a_method_beside_which_positions_in_images_would_change_is_refused(method: RopeMethod) -> None:
    with pytest.raises(RopewalkError, match=f"RoPE of type {method.name} would change positions in images"):
        replace_methods(WITH_AXES, method)
    # Without axes it is written.
    assert method_from_config(replace_methods({"head_dim": 8, "rope_theta": 1e4}, method)) == method


def test_axes_of_a_layer_type_stay_in_its_entry() -> None:
    entry = WITH_AXES["rope_parameters"]
    config = {
        "model_type": "cohere_compass_text",
        "head_dim": 8,
        "rope_parameters": {"full_attention": entry},
    }
    written = replace_methods(config, {"full_attention": Default(8, 7e4)})
    assert written["rope_parameters"]["full_attention"] == {**entry, "rope_theta": 7e4}
