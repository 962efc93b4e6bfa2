"""Wrong configs of every family: each is refused in one sentence before weights are read, and none ends otherwise."""

import contextlib
import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import MAY_BE_DENSE, config_from_json
from ropewalk.models.config.layers import NUMBERS_OF_EXPERTS
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import load_model
from ropewalk.models.support import ModelsSettings, supported
from ropewalk.rope import Default
from tests.marks import slow_after
from tests.models.every_family import tiny_config

COUNTS = {
    "max_position_embeddings": (0, -1, "4k"),
    "num_hidden_layers": (0, -1, "x"),
    "num_attention_heads": (0, -4),
    "head_dim": (-2, "x"),
    "sliding_window": (0, -5, "wide", 1.5),
}
ROPE = (
    {"rope_theta": 0}, {"rope_theta": -1.0}, {"rope_theta": "big"}, {"rope_theta": float("nan")},
    {"rope_type": "spiral"}, {"partial_rotary_factor": 1.5}, {"partial_rotary_factor": 0.0},
    {"rope_type": "linear", "factor": 0.0}, {"rope_wobble": 3},
)  # fmt: skip
PER_FAMILY = 4
DERIVE_HEAD_DIM = ("sarvam_mla",)
"""Families whose classes drop a stated head_dim, because published configs state that of an engine."""
GEMMA_3 = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
"""What the class of Gemma 3 supplies."""


def wrong(text: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes of a decoder's config, each of which makes it wrong."""
    # Without a window, 0 is one way to say so.
    changes = [
        {key: value}
        for key, values in COUNTS.items()
        for value in values
        if text.get(key) or (key != "sliding_window" and key in text)
    ]
    kinds = text.get("layer_types")
    if kinds:
        changes += [{"layer_types": [*kinds[:-1], "diagonal_attention"]}, {"layer_types": kinds[:-1]}]
    entry = text.get("rope_parameters")
    for change in ROPE if entry else ():
        changed = deepcopy(entry)
        flat = "rope_theta" in changed
        for each in [changed] if flat else [each for each in changed.values() if isinstance(each, dict)]:
            each.update(change)
        changes.append({"rope_parameters": changed})
    return changes


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("glm4_moe_lite", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("glm4_moe_lite", {"v_head_dim": 0}, "v_head_dim is 0"),
        ("longcat_flash", {"qk_rope_head_dim": 63}, "got 63 from qk_rope_head_dim 63"),
        ("ministral", {"sliding_window": 0, "layer_types": None}, "sliding_window is 0 in the config for layer 0,"),
        ("nemotron_h", {"layer_types": None, "layers_block_type": None, "hybrid_override_pattern": "M-Q*"},
         r"hybrid_override_pattern is 'M-Q\*' .* unknown letter 'Q' for layer 2; the known ones are M \(Mamba-2\)"),
        ("qwen3_5_text", {"full_attention_interval": 0, "layer_types": None}, "full_attention_interval is 0"),
        ("qwen3_5_text", {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11]}}, r"got \[11, 11\]"),
        ("t5gemma", {"decoder": {"model_type": "t5_gemma_module", "sliding_window": 0}}, "sliding_window is 0"),
        ("olmo_hybrid", {"layer_types": [None] * 32}, "layer_types is None in the config for layer 0"),
        ("ministral", {"layer_types": ["sliding_attention"] * 31 + [7]}, "layer_types is 7 in the config for layer 31"),
        ("laguna", {"num_attention_heads_per_layer": [48] * 39 + [7]}, "_per_layer is 7 in the config for layer 39"),
        ("laguna", {"num_attention_heads_per_layer": [48] * 39}, "_per_layer lists 39 layers, but the model has 40"),
        ("minimax", {"layer_types": ["linear_attention"] * 5}, "layer_types lists 5 layers"),
        ("doge", {"rope_parameters": {"rope_theta": [1e4]}}, r"rope_theta .* got \[10000.0\]"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier is 0 in the config, but must be above 0"),
        ("falcon_h1", {"key_multiplier": 0.0}, "key_multiplier is 0.0"),
        ("cohere", {"logit_scale": -0.5}, "logit_scale is -0.5"),
        ("llama", {"vocab_size": 0}, "vocab_size is 0 in the config, but must be at least 1"),
        ("llama", {"vocab_size": 2**63}, "vocab_size is 9223372036854775808 in the config, but must be at most 21474"),
        ("llama", {"hidden_size": 2**63}, "hidden_size is 9223372036854775808 in the config, but must be at most"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 in the config, .* at most 65536"),
        ("llama", {"max_position_embeddings": 10**4000},
         "max_position_embeddings is a number of 4001 digits in the config, but must be at most 2147483647"),
        ("llama", {"rope_parameters": {"rope_theta": 10**4000}}, "rope_theta must be a finite number above 1"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0 in the config, .* at least 1: layers of mixtral"),
        ("deepseek_v3", {"n_routed_experts": -1}, "n_routed_experts is -1"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "value_heads is 32 in the config for layer 0, .* a multiple .* 3$"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 24, "linear_num_key_heads": 64},
         "value_heads is 32 in the config for layer 1, .* a multiple of linear_num_key_heads, 64"),
        ("qwen3_5_text", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 48}, "linear_attention for each of its 48 layers"),
        ("gemma3_text", {"rope_parameters": {**GEMMA_3, "chunked_attention": {"rope_theta": 5.0}}},
         r"\{'rope_theta': 5.0\} for layers of type chunked_attention, which gemma3_text does not have"),
        ("gemma3_text", {"rope_parameters": {**GEMMA_3, "sliding_attention": {"rope_theta": 5e5}},
                         "layer_types": ["full_attention"] * 26},
         "'rope_theta': 500000.0.* for layers of type sliding_attention, which .* of type full_attention; remove"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(family: str, change: dict[str, Any], named: str) -> None:
    raw = {**json.loads(CONFIG_MAPPING[family]().to_json_string()), **change}
    with pytest.raises(RopewalkError, match=named):
        config_from_json(raw, family)


def test_wrong_values_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    """The folder has none."""
    CONFIG_MAPPING["granite"](attention_multiplier=0.0).save_pretrained(tmp_path)
    with pytest.raises(RopewalkError, match=r"attention_multiplier is 0\.0"):
        load_model(tmp_path)


def test_entries_that_the_class_supplies_need_no_layer() -> None:
    """A model that transformers has saved states them; without full attention, there is nothing to extend."""
    for kind, said in (
        ("full_attention", []),
        ("sliding_attention", ["has no layer of type full_attention"]),
    ):
        config = CONFIG_MAPPING["gemma3_text"](layer_types=[kind] * 26)
        read = config_from_json(json.loads(config.to_json_string()), "gemma3_text")
        assert set(read.methods) == set(GEMMA_3)
        refused = read.training_refusals(4096)
        assert len(refused) == len(said)
        assert all(text in refusal for text, refusal in zip(said, refused, strict=True))


@pytest.mark.parametrize("family", ["mixtral", *slow_after(2, sorted(MAY_BE_DENSE))])
def test_model_types_that_may_be_dense_run_without_experts(family: str) -> None:
    config = tiny_config(family)
    text = config.get_text_config()
    key = next(key for key in NUMBERS_OF_EXPERTS if key in text.to_dict())
    setattr(text, key, 0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    runs = (
        contextlib.nullcontext()
        if family in MAY_BE_DENSE
        else pytest.raises(RuntimeError, match="out of range")
    )
    with torch.no_grad(), runs:
        model(torch.ones(1, 6, dtype=torch.long), use_cache=False)


@pytest.mark.slow
def test_wrong_configs_of_every_family_are_refused() -> None:
    draw = random.Random(0)
    tried = 0
    for family in supported(ModelsSettings()).families:
        try:
            sound = json.loads(CONFIG_MAPPING[family]().to_json_string())
            config_from_json(deepcopy(sound), family)
        except (KeyError, RopewalkError, StrictDataclassError):
            # The defaults of a few classes are no model.
            continue
        text = sound.get("text_config") or sound
        changes = wrong(text)
        if family in DERIVE_HEAD_DIM:
            changes = [change for change in changes if "head_dim" not in change]
        for change in draw.sample(changes, min(PER_FAMILY, len(changes))):
            raw = deepcopy(sound)
            (raw.get("text_config") or raw).update(change)
            with pytest.raises(RopewalkError) as caught:
                config_from_json(raw, family)
            assert "\n" not in str(caught.value), (family, change)
            tried += 1
    assert tried > 3 * 100


def test_a_layer_that_its_class_replaces_is_named() -> None:
    sound = json.loads(CONFIG_MAPPING["gemma4_text"]().to_json_string())
    last = len(sound["layer_types"]) - 1
    sound["layer_types"][-1] = "diagonal_attention"
    with pytest.raises(
        RopewalkError, match=f"layer {last} of gemma4_text is 'diagonal_attention' in layer_types"
    ):
        config_from_json(sound, "gemma4_text")


SHORT: dict[str, object] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_theta": 1e4,
}


def test_a_short_list_that_its_class_indexes_is_refused_with_both_lengths() -> None:
    """SmolLM3's class derives layer_types from the list where the file states none, and raises an IndexError."""
    with pytest.raises(
        RopewalkError, match="no_rope_layers lists 3 layers, but the model has 4 layers, 0 to 3"
    ):
        config_from_json({**SHORT, "model_type": "smollm3", "no_rope_layers": [1, 1, 0]}, "smollm3")


def test_attention_without_an_entry_in_rope_by_type_is_refused_with_both_lengths() -> None:
    """Gemma 4's class supplies none, and its model fails with a KeyError; null says that there is no RoPE."""
    local, full = "sliding_attention", "full_attention"
    rope = {local: {"rope_type": "default", "rope_theta": 1e4}}
    raw = {**SHORT, "model_type": "gemma4_text", "sliding_window": 64, "max_position_embeddings": 4096}
    del raw["rope_theta"]
    raw = {**raw, "layer_types": [local, local, local, full], "rope_parameters": rope}
    with pytest.raises(
        RopewalkError, match=r"no entry for layers of type full_attention \(layer 3\); add the entry"
    ):
        config_from_json(raw, "gemma4_text")


QWEN_2_5_VL = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
    "vocab_size": 152064,
}
"""The keys of Qwen2.5-VL 7B's config.json that matter here: those of the decoder stand at the top level."""


def test_values_of_a_decoder_at_the_top_level_are_those_that_the_class_reads() -> None:
    read = config_from_json(QWEN_2_5_VL, "m")
    in_memory = ModelConfig.of(transformers.Qwen2_5_VLConfig(**deepcopy(QWEN_2_5_VL)))
    assert (read.model_type, read.whole_type) == ("qwen2_5_vl_text", "qwen2_5_vl")
    assert read.methods == in_memory.methods == {None: Default(128, 1e6)}
    assert read.layers == in_memory.layers
    assert (read.trained_length, read.vocab_size, read.dtype) == (128000, 152064, "bfloat16")
    # Everything is stated.
    assert read.defaults == {}
    assert config_from_json({**QWEN_2_5_VL, "rope_theta": 5e6}, "m").methods == {None: Default(128, 5e6)}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_axes_must_have_all_pairs_of_a_head(key: str) -> None:
    raw = {name: value for name, value in QWEN_2_5_VL.items() if name != "rope_scaling"}
    wrong = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 25]}
    with pytest.raises(
        RopewalkError, match=r"mrope_section \[16, 24, 25\] .* to 65 pairs .* a head rotates 64"
    ):
        config_from_json({**raw, key: wrong}, "m")
