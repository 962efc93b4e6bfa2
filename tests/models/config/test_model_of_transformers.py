"""What a config says of each layer, against transformers: its choice of a layer's cache, and its models' outputs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

from ropewalk.attention.options import EVERYTHING
from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import build, class_of, read_model_config
from ropewalk.models.config.layers import (
    MIXERS,
    ROTATE_IN_WINDOWS_ALONE,
    WINDOWS_IN_THE_MASK,
    WITH_SINKS,
)
from ropewalk.models.config.model import ModelConfig
from ropewalk.training.stage_engine import layers_alike
from ropewalk.training.update.speed import products_of_pairs
from tests.checkpoint_cases import CASES, path_of
from tests.models.families import COMMON, FAMILIES
from tests.versions import needs_transformers

FOUR = {**COMMON, "num_hidden_layers": 4, "rope_theta": 1e4}
F, S = "full_attention", "sliding_attention"
FACTS = (
    "methods",
    "trained_length",
    "max_position_embeddings",
    "head_dim",
    "key_dim",
    "widest_dims",
    "num_heads",
    "num_kv_heads",
    "softcap",
    "has_sinks",
    "model_type",
    "config_class",
    "dtype",
    "layer_notes",
    "planning_notes",
)
"""What a config says, whether it comes from a file or from a transformers config in memory."""


def of_transformers(config: Any) -> list[tuple[str, int | None]]:
    """Kind and window of each layer, as transformers itself makes a cache for them."""
    kinds, _ = get_layer_types_and_kwargs(config.get_text_config())
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    return list(zip(kinds, windows, strict=True))


def ours(config: ModelConfig) -> list[tuple[str, int | None]]:
    return [(layer.kind, layer.window) for layer in config.layers]


WINDOW = {"sliding_window": 16}
VARIANTS = {
    "mistral": {"model_type": "mistral", **WINDOW},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "mistral with a switch that it does not have": {
        "model_type": "mistral",
        **WINDOW,
        "use_sliding_window": False,
    },
    "mistral by its class": {"model_type": "mistral"},
    "window beyond the longest input": {"model_type": "mistral", "sliding_window": 65536},
    "phi3": {"model_type": "phi3", **WINDOW},
    "starcoder2": {"model_type": "starcoder2", **WINDOW},
    "qwen2 off by its class": {"model_type": "qwen2", **WINDOW},
    "qwen2 off": {"model_type": "qwen2", **WINDOW, "use_sliding_window": False},
    "qwen2 on": {"model_type": "qwen2", **WINDOW, "use_sliding_window": True, "max_window_layers": 3},
    "qwen2 on for none": {
        "model_type": "qwen2",
        **WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 4,
    },
    "qwen3 on": {"model_type": "qwen3", **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2 with a list": {
        "model_type": "qwen2",
        **WINDOW,
        "use_sliding_window": True,
        "layer_types": [F, S, F, F],
    },
    "all full with a window stated": {"model_type": "qwen2", **WINDOW, "layer_types": [F] * 4},
    "gemma2": {"model_type": "gemma2", **WINDOW},
    "gemma3": {"model_type": "gemma3_text", **WINDOW, "rope_local_base_freq": 1e4},
    "gemma3 with a pattern": {"model_type": "gemma3_text", **WINDOW, "sliding_window_pattern": 2},
    "cohere2": {"model_type": "cohere2", **WINDOW},
    "cohere2 with a pattern": {"model_type": "cohere2", **WINDOW, "sliding_window_pattern": 2},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]},
    "smollm3 on": {"model_type": "smollm3", **WINDOW, "use_sliding_window": True},
    "olmo3": {"model_type": "olmo3", **WINDOW},
    "gpt_oss": {"model_type": "gpt_oss", **WINDOW},
    "exaone4": {"model_type": "exaone4", **WINDOW, "sliding_window_pattern": 2},
    "llama": {"model_type": "llama"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_windows_are_those_that_transformers_masks_by(name: str, tmp_path: Path) -> None:
    said = {**FOUR, **VARIANTS[name]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    built = class_of(said["model_type"]).from_dict(dict(said))
    expected = of_transformers(built)
    # As a file, and as the config of a model in memory.
    assert ours(read_model_config(str(tmp_path))) == expected
    assert ours(ModelConfig.of(built)) == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.config_class is not None])
def test_windows_of_published_configs_are_those_of_transformers(name: str) -> None:
    said = json.loads(path_of(name).read_text())
    built = build(name, class_of(said["model_type"]), said)
    of_file, in_memory = read_model_config(str(path_of(name))), ModelConfig.of(built)
    assert ours(of_file) == of_transformers(built)
    assert in_memory.layers == of_file.layers
    for fact in FACTS:
        assert getattr(in_memory, fact) == getattr(of_file, fact), fact


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("cohere2", {"sliding_window": 64, "layer_types": [F] * 4, "logit_scale": 0.25}),
        ("cohere2", {"sliding_window": 64, "layer_types": [S] * 4, "logit_scale": 0.25}),
        ("exaone4", {"sliding_window": 64, "layer_types": [F] * 4}),
        ("exaone4", {"sliding_window": None, "layer_types": [F] * 4}),
        ("smollm3", {"no_rope_layers": [0] * 4}),
        ("smollm3", {"no_rope_layers": [1] * 4}),
        ("mistral", {"sliding_window": 64}),
    ],
)
def test_layers_without_rope_are_those_that_no_position_changes(family: str, more: dict[str, Any]) -> None:
    config = class_of(family)(**{**COMMON, "num_hidden_layers": 4, **more})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        near, far = (model(tokens, position_ids=step * torch.arange(8)[None]).logits for step in (1, 5))
    rotates = {layer.rotates for layer in ModelConfig.of(config).layers}
    assert rotates == {not torch.equal(near, far)}


def test_the_tiny_families_have_the_windows_of_their_configs() -> None:
    for name, extra in FAMILIES.values():
        config = getattr(transformers, name)(**{**COMMON, **extra})
        windows = [window for _, window in of_transformers(config) if window is not None]
        assert ModelConfig.of(config).shortest_window == min(windows, default=None)


WITHOUT_ROPE = {"falcon_mamba", "jamba", "mamba", "mamba2", "zamba"}
WITH_OTHER_LAYERS = {"glm5_next", "inkling", "inkling2", "inkling2_loop", "qwen4_exp", "zamba2", "zaya"}
"""Families whose recurrent layers have no entry in :data:`MIXERS`: there is nothing to extend, or packed rows are
refused because of other layers too, or of a mixer that keeps more than convolutions and a state."""


def test_recurrent_layers_that_nobody_named_are_told() -> None:
    """What keeps a state in transformers' cache is named in ``MIXERS`` or above; a new family must be looked at."""
    needs_transformers("5.23", "a cache of states under these names")
    models = Path(transformers.__file__).parent / "models"
    calls = re.compile(r"\.(update_conv_state|update_recurrent_state|get_linear_cache)\(")
    files = [
        path for path in models.glob("*/modeling_*.py") if calls.search(path.read_text(encoding="utf-8"))
    ]
    named = {name.removesuffix("_text") for name in MIXERS}
    installed = {path.name for path in models.iterdir()}
    others = WITHOUT_ROPE | WITH_OTHER_LAYERS
    assert {path.parent.name for path in files} == installed & (named | others)
    assert not named & others


def unpassed_window(folder: Path) -> bool:
    """Whether a family masks by a window, but its layers pass none to their attention function."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py")]
    return any(
        "create_sliding_window_causal_mask" in text and "sliding_window=" not in text for text in texts
    )


def test_families_that_are_known_by_name_are_those_of_the_installed_transformers() -> None:
    """Lists of names against the sources: learned sinks, RoPE behind a layer's window, windows that are not passed."""
    models = Path(transformers.__file__).parent / "models"
    sinks, windowed = set(), set()
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        family = path.parent.name
        if "self.sinks = nn.Parameter(torch" in text:
            sinks.add(family)
        # Most files have no such condition, and parsing all of them takes seconds.
        if "apply_rotary_pos_emb(" in text and re.search(r"\bif\b[^:]*(sliding|is_local)", text):
            conditions = {
                ast.unparse(node.test)
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.If)
                and any("apply_rotary_pos_emb(" in ast.unparse(each) for each in node.body)
            }
            if any("sliding" in test or "is_local" in test for test in conditions):
                windowed.add(family)
    # Families that only later versions have cannot be loaded by this one.
    installed = {path.name for path in models.iterdir()}
    unpassed = {name for name in installed if unpassed_window(models / name)}
    # They cannot be loaded as one decoder, or are refused for their masks.
    assert unpassed - {"blt", "doge", "paligemma"} == installed.intersection(WINDOWS_IN_THE_MASK)
    with_sinks = {name.removesuffix("_text") for name in WITH_SINKS}
    # deepseek_v4 and mimo_v2_flash have layer types of their own, for which they are refused.
    assert sinks - {"deepseek_v4", "mimo_v2_flash"} == installed & with_sinks
    assert windowed - {"exaone4_5"} == installed.intersection(ROTATE_IN_WINDOWS_ALONE)


def test_a_window_that_a_switch_turns_off_is_none_where_the_class_writes_0() -> None:
    config = transformers.Qwen2MoeConfig(**COMMON, sliding_window=32, use_sliding_window=False)
    assert config.sliding_window == 0
    assert {layer.window for layer in ModelConfig.of(config).layers} == {None}


def test_heads_of_each_layer_type_have_their_own_width() -> None:
    config = transformers.Gemma4TextConfig(
        **COMMON | {"num_hidden_layers": 6}, head_dim=8, global_head_dim=32
    )
    read = ModelConfig.of(config)
    assert [layer.key_dim for layer in read.layers] == [8] * 5 + [32]
    assert {kind: method.rotary_dim for kind, method in read.methods.items()} == {S: 8, F: 32}
    assert (read.head_dim, read.key_dim, read.widest_dims) == (32, 32, (32, 32))
    # transformers resolves each layer by itself.
    assert [each.head_dim for each in config.per_layer_config] == [layer.key_dim for layer in read.layers]


def test_layers_with_more_query_heads_than_others_are_counted_by_their_own() -> None:
    """Step 3.7 has more in layers with a window, Laguna a list of them."""
    needs_transformers("5.24", "a class for Step 3.7")
    by_window = transformers.CONFIG_MAPPING["step3p7"](
        text_config={
            **FOUR,
            "head_dim": 8,
            "layer_types": [F, S, S, F],
            "sliding_window": 7,
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "num_sliding_attention_heads": 6,
        }
    )
    listed = transformers.CONFIG_MAPPING["laguna"](
        **FOUR, head_dim=8, num_attention_heads_per_layer=[4, 6, 6, 4]
    )
    for config in (ModelConfig.of(by_window), ModelConfig.of(listed)):
        assert (config.heads_of_layers, config.num_heads, config.common_heads) == ((4, 6, 6, 4), 4, 2)
        pairs = products_of_pairs(config, [EVERYTHING] * 4)
        assert pairs == {EVERYTHING: (4 + 6 + 6 + 4) * (8 + 8)}
        assert sorted(each.num_heads for each in layers_alike(config) for _ in range(each.layers)) == [
            *(4, 4),
            *(6, 6),
        ]
    of_transformers = by_window.get_text_config().per_layer_config
    assert [each.num_attention_heads for each in of_transformers] == [4, 6, 6, 4]


def test_layers_of_one_type_whose_heads_differ_are_refused() -> None:
    values = {**FOUR, "layer_types": [F, S, S, F], "sliding_window": 7, "head_dim": 8}
    values["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (F, S)}
    del values["rope_theta"]
    sound = ModelConfig({**values, "per_layer_config": {"0": {"head_dim": 16}, "3": {"head_dim": 16}}})
    assert [layer.key_dim for layer in sound.layers] == [16, 8, 8, 16]
    with pytest.raises(RopewalkError, match=r"have the same head_dim, got 16 in layer 0 and 8 in layer 3"):
        _ = ModelConfig({**values, "per_layer_config": {"0": {"head_dim": 16}}}).methods
    of_all = {**FOUR, "head_dim": 8, "per_layer_config": {"2": {"head_dim": 16}}}
    with pytest.raises(RopewalkError, match=r"have the same head_dim, got 8 in layer 0 and 16 in layer 2"):
        _ = ModelConfig(of_all).methods


def test_layers_that_differ_in_anything_else_are_refused_by_name() -> None:
    config = transformers.LlamaConfig(**COMMON, per_layer_config={1: {"intermediate_size": 8}})
    with pytest.raises(
        RopewalkError, match=r"layers of llama differ in intermediate_size .*supports only layers"
    ):
        ModelConfig.of(config)
