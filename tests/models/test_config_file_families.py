"""Wrong configs of every family: each is refused in one sentence before weights are read, and none ends otherwise."""

import json
import random
from copy import deepcopy
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from ropewalk.errors import RopewalkError
from ropewalk.models.config_file import config_from_json
from ropewalk.models.support import ModelsSettings, supported

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
        ("longcat_flash", {"qk_rope_head_dim": 63}, "got 63"),
        ("qwen3_5_text", {"full_attention_interval": 0, "layer_types": None}, "full_attention_interval is 0"),
        ("qwen3_5_text", {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11]}}, r"got \[11, 11\]"),
        ("t5gemma", {"decoder": {"model_type": "t5_gemma_module", "sliding_window": 0}}, "sliding_window is 0"),
        ("olmo_hybrid", {"layer_types": [None] * 32}, "layer_types is None in the config for layer 0"),
        ("ministral", {"layer_types": ["sliding_attention"] * 31 + [7]}, "layer_types is 7 in the config for layer 31"),
        ("laguna", {"num_attention_heads_per_layer": [48] * 39 + [7]}, "_per_layer is 7 in the config for layer 39"),
        ("laguna", {"num_attention_heads_per_layer": [48] * 39}, "_per_layer lists 39 layers.* layer 39 has no"),
        ("minimax", {"layer_types": ["linear_attention"] * 5}, "layer_types lists 5 layers"),
        ("doge", {"rope_parameters": {"rope_theta": [1e4]}}, r"rope_theta .* got \[10000.0\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(family: str, change: dict[str, Any], named: str) -> None:
    raw = {**json.loads(CONFIG_MAPPING[family]().to_json_string()), **change}
    with pytest.raises(RopewalkError, match=named):
        config_from_json(raw, family)


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
