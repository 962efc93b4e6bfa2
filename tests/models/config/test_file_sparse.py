"""Configs of sparse attention, and those that state the rotated part of a head in more than one way."""

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import config_from_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.write import with_rope
from ropewalk.models.rope.frequencies import loaded_rope
from ropewalk.rope import Default, Yarn
from tests.versions import needs_transformers

FLOAT32 = 1e-6
"""Relative, as in ``test_file.py``: transformers computes frequencies in float32."""
SLIDING = "sliding_attention"
CHOSEN, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"

MINIMAX_M3 = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 6,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5e6,
    "sparse_attention_config": {"sparse_attention_freq": [0, 0, 0, 1, 1, 1], "sparse_topk_blocks": 16},
}
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 0, 4, 128, 4, 128],
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}
AXES = {"rope_type": "default", "rope_theta": 1e4}
STATED: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": MINIMAX_M3,
    "deepseek_v4": DEEPSEEK_V4,
    "mistral4": {"model_type": "mistral4", "qk_nope_head_dim": 96, "qk_rope_head_dim": 32},
    "glm4v_moe": {
        "model_type": "glm4v_moe_text",
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**AXES, "mrope_section": [8, 12, 12]},
    },
    "hy_v4_vl": {"model_type": "hy_v4_vl_text", "rope_parameters": {**AXES, "mrope_section": [12, 10, 10]}},
}
"""What published configs of these families state of RoPE."""
ROTATED = {"minimax_m3_vl_text": 64, "deepseek_v4": 64, "mistral4": 32, "glm4v_moe": 64, "hy_v4_vl": 64}


@pytest.fixture(autouse=True)
def _known() -> None:
    needs_transformers("5.24", "a class for these families")


@pytest.mark.parametrize("name", STATED)
def test_the_model_rotates_what_its_config_is_read_to_say(name: str) -> None:
    config = config_from_json(STATED[name])
    assert {method.rotary_dim for method in config.methods.values()} == {ROTATED[name]}
    held = loaded_rope(config)
    assert held is not None
    assert {one.layer_type for one in held} == set(config.methods)
    for one in held:
        expected, factor = config.methods[one.layer_type].frequencies()
        torch.testing.assert_close(one.inv_freq, expected, rtol=FLOAT32, atol=0)
        assert one.attention_factor == pytest.approx(factor, rel=FLOAT32)


def test_layers_that_choose_blocks_limit_the_context_too() -> None:
    config = config_from_json(MINIMAX_M3)
    assert [layer.kind for layer in config.layers] == ["full_attention"] * 3 + ["minimax_m3_sparse"] * 3
    assert config.context_layers(config.trained_length) == list(range(6))
    assert config.layer_notes == [
        "each of layers 3 to 5 (of 6, counted from 0) attends to 16 blocks of 128 earlier tokens: to the nearest ones, "
        "and to those that an indexer chooses for each query at any distance"
    ]
    (refused,) = config.reach_refusals(2**20)
    assert "minimax_m3_sparse (first in layer 3)" in refused


def test_compressed_layers_limit_the_context_and_windows_keep_their_rope() -> None:
    config = config_from_json(DEEPSEEK_V4)
    assert [layer.kind for layer in config.layers] == [SLIDING, SLIDING, CHOSEN, HEAVY, CHOSEN, HEAVY]
    windows, compressed = Default(64, 1e4), Yarn(64, 160000, 16, 65536, attention_factor=1.0)
    assert config.methods == {"main": windows, "compress": compressed}
    assert [layer.rope for layer in config.layers] == [windows] * 2 + [compressed] * 4
    assert (config.full_attention_rope, config.other_ropes) == (compressed, {"main": windows})
    assert (config.trained_length, config.context_layers(2**20)) == (2**20, [2, 3, 4, 5])
    assert [config.key_dim, config.value_dim, config.can_lift_windows] == [512, 512, False]
    # The file states both bases, and the rotated part of a head, under names of its own.
    assert config.defaults.keys().isdisjoint(("compress.rope_theta", "main.partial_rotary_factor"))
    assert config.layer_notes[1:] == [
        "each of layers 2, 4 (of 6, counted from 0) attends to the last 128 tokens, and to all earlier ones as "
        "entries that stand for 4 of them each, of which an indexer chooses 512",
        "each of layers 3, 5 (of 6, counted from 0) attends to the last 128 tokens, and to all earlier ones as "
        "entries that stand for 128 of them each",
    ]
    assert (
        "layers of type sliding_attention (main) have their own RoPE, which is kept" in config.planning_notes
    )
    (refused,) = config.reach_refusals(2**21)
    assert f"{CHOSEN} (first in layer 2), {HEAVY} (first in layer 3)" in refused


def test_a_new_rope_is_that_of_the_compressed_layers_in_every_place() -> None:
    own = ModelConfig.of(CONFIG_MAPPING["deepseek_v4"]())
    wanted = Default(own.full_attention_rope.rotary_dim, 7e6)
    written = with_rope(own, wanted, 1024).source
    assert ModelConfig.of(written).methods == {"main": own.methods["main"], "compress": wanted}
    assert (written.rope_theta, written.compress_rope_theta) == (1e4, 7e6)
    read = config_from_json(json.loads(written.to_json_string()))
    assert read.methods == {"main": own.methods["main"], "compress": wanted}


def test_the_temperature_of_mistral_4_stays() -> None:
    own = ModelConfig.of(CONFIG_MAPPING["mistral4"]())
    before = own.source.rope_parameters
    wanted = own.full_attention_rope.with_theta(7e6)
    after = with_rope(own, wanted).source.rope_parameters
    assert (after["rope_theta"], after["llama_4_scaling_beta"]) == (7e6, before["llama_4_scaling_beta"])
    assert ModelConfig.of(with_rope(own, wanted).source).full_attention_rope == wanted


def test_an_indexer_of_a_multimodal_model_is_told() -> None:
    config = config_from_json({"model_type": "hy_v4_vl", "text_config": STATED["hy_v4_vl"]})
    assert config.layer_notes == [
        "every layer attends to 2,048 earlier tokens, which an indexer chooses for each query at any distance"
    ]
    assert config.context_layers(config.trained_length) == list(range(78))


@pytest.mark.parametrize("of_whole", [True, False])
def test_a_head_of_which_nothing_is_rotated_has_no_rope(of_whole: bool) -> None:
    text = {"model_type": "glm5_next_text", "head_dim": 0, "qk_rope_head_dim": 0}
    with pytest.raises(RopewalkError, match=r"GLM has no RoPE: qk_rope_head_dim, .* is 0"):
        config_from_json({"model_type": "glm5_next", "text_config": text} if of_whole else text, "GLM")
