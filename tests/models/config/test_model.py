"""What a config says, from its mapping alone; transformers itself is asked in ``test_config_transformers``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from ropewalk import PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach
from tests.models.families import tiny_model

FOUR = {"num_hidden_layers": 4, "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 32768}
F, S = "full_attention", "sliding_attention"

HEADS = {"hidden_size": 64, "num_attention_heads": 4}
LENGTH = {"max_position_embeddings": 4096}
WINDOW = {"rope_theta": 1e4, "max_position_embeddings": 4096, "sliding_window": 1024}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
MIXED = {
    "full_attention": {**YARN, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, [None] * 4),
        ({"sliding_window": 4096}, [4096] * 4),
        ({"sliding_window": 4096, "layer_types": [F] * 4}, [None] * 4),
        ({"sliding_window": 4096, "layer_types": [S, S, S, F]}, [4096, 4096, 4096, None]),
        ({"sliding_window": 65536}, [65536] * 4),
        ({"sliding_window": 4096, "use_sliding_window": None}, [None] * 4),
        ({"sliding_window": 4096, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 4096, "use_sliding_window": True}, [4096] * 4),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096]),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4),
        ({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 0}, [None] * 4),
        ({"sliding_window": None, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": 4096, "sliding_window_pattern": 2}, [4096, None, 4096, None]),
        ({"sliding_window": 4096, "sliding_window_pattern": "LLG"}, [4096, 4096, None, 4096]),
        ({"attention_chunk_size": 8192}, [8192] * 4),
    ],
)
def test_the_window_of_each_layer(keys: dict[str, Any], windows: list[int | None]) -> None:
    config = ModelConfig({**FOUR, **keys})
    assert [layer.window for layer in config.layers] == windows
    assert config.shortest_window == min((w for w in windows if w is not None), default=None)


@pytest.mark.parametrize(
    ("keys", "rotates"),
    [
        ({}, [True] * 4),
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]}, [True, True, True, False]),
        ({"model_type": "llama4_text", "no_rope_layer_interval": 2}, [True, False, True, False]),
        (
            {"model_type": "cohere2", "sliding_window": 64, "layer_types": [S, S, S, F]},
            [True, True, True, False],
        ),
        ({"model_type": "exaone4", "sliding_window": None}, [True] * 4),
        ({"model_type": "mistral", "sliding_window": 64}, [True] * 4),
        (
            {
                "layer_types": [S, S, S, F],
                "sliding_window": 8,
                "rope_parameters": {F: None, S: {"rope_theta": 1e4}},
            },
            [True, True, True, False],
        ),
    ],
)
def test_which_layers_rotate(keys: dict[str, Any], rotates: list[bool]) -> None:
    assert [layer.rotates for layer in ModelConfig({**FOUR, **keys}).layers] == rotates


@pytest.mark.parametrize("key", ["no_rope_layers", "layer_types", "layer_rope_theta", "mlp_layer_types"])
def test_a_list_of_another_length_is_refused_with_both_lengths(key: str) -> None:
    entry: object = F if key.endswith("types") else 1
    for count in (3, 5):
        with pytest.raises(
            RopewalkError, match=f"{key} lists {count} layers, but the model has 4 layers, 0 to 3"
        ):
            _ = ModelConfig({**FOUR, key: [entry] * count}).layers


@pytest.mark.parametrize("key", ["attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers"])
@pytest.mark.parametrize("number", [4, -1, True, "1"])
def test_a_layer_that_the_model_does_not_have_is_refused(key: str, number: object) -> None:
    with pytest.raises(
        RopewalkError, match=f"{key} names layer {number!r}, but the model has 4 layers, 0 to 3"
    ):
        _ = ModelConfig({**FOUR, key: [1, number]}).layers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attn_logit_softcapping": -50.0}, r"attn_logit_softcapping is -50\.0 in the config, but must be above 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0 in the config, but must be above 0"),
        ({"floor_scale": float("nan")}, "floor_scale is nan in the config, but must be above 0"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, r"is 9 in the config, but must be from 1 to 8 \(num_l"),
        ({"num_experts": 8, "num_experts_per_tok": 0}, r"is 0 in the config, but must be from 1 to 8 \(num_experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0 in the config, but must be at least 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1 in the config, but must be a whole number of at"),
        ({"mamba_d_conv": 0}, "mamba_d_conv is 0 in the config, but must be at least 1"),
    ],
)  # fmt: skip
def test_numbers_that_no_layer_can_compute_with_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        _ = ModelConfig({**FOUR, **wrong}).layers


def test_a_mixture_without_experts_may_choose_none() -> None:
    """Dense Granite 4 models have the keys of a mixture."""
    assert ModelConfig({**FOUR, "num_local_experts": 0, "num_experts_per_tok": 0}).layers


def test_layers_are_not_counted_where_nothing_states_their_number() -> None:
    uncounted = {**FOUR, "num_hidden_layers": None}
    _ = ModelConfig({**uncounted, "attn_layer_indices": [9, 18]}).layers
    for value, said in ((3, "must be a list of layers"), ([-1], "names layer -1, but layers count from 0")):
        with pytest.raises(RopewalkError, match=f"attn_layer_indices .*{said}"):
            _ = ModelConfig({**uncounted, "attn_layer_indices": value}).layers


@pytest.mark.parametrize("width", [0, -5, "16", True])
def test_a_wrong_window_is_refused_with_the_first_layer_that_has_it(width: object) -> None:
    windowed = {**FOUR, "layer_types": [F, S, S, F], "sliding_window": width}
    with pytest.raises(
        RopewalkError, match=f"sliding_window is {width!r} in the config for layer 1, but must be"
    ):
        _ = ModelConfig(windowed).layers


def test_lists_are_held_to_each_other_where_nothing_says_how_many_layers_there_are() -> None:
    few = {**FOUR, "num_hidden_layers": None, "layer_types": [F, F], "no_rope_layers": [1, 0, 1]}
    with pytest.raises(RopewalkError, match="no_rope_layers lists 3 layers, but the model has 2"):
        _ = ModelConfig(few).layers


def test_layers_are_named_in_words() -> None:
    thirty_six = {**FOUR, "num_hidden_layers": 36, "no_rope_layers": [1, 1, 1, 0] * 9}
    assert ModelConfig(thirty_six).layer_notes == [
        "every 4th layer, from 3 to 35 (of 36, counted from 0) has no RoPE, so a new base does not change it"
    ]
    some = {**FOUR, "sliding_window": 4096, "layer_types": [F, S, S, F]}
    assert ModelConfig(some).layer_notes == [
        "each of layers 1 to 2 (of 4, counted from 0) sees only the last 4,096 tokens (sliding_window), whatever the "
        "base"
    ]
    assert ModelConfig(FOUR).layer_notes == []
    assert ModelConfig({**FOUR, "no_rope_layers": [0] * 4}).layer_notes == [
        "no layer has RoPE, so the base has no effect"
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, []),
        ({"sliding_window": 32768}, []),
        ({"sliding_window": 4096, "use_sliding_window": None}, []),
        ({"sliding_window": 4096}, ["a sliding window of 4,096 tokens in every layer"]),
        ({"sliding_window": 4096, "layer_types": [F, S, S, F]}, []),
        ({"layer_types": [F, "linear_attention", F, F]}, ["layers of type linear_attention"]),
        ({"model_type": "gpt_oss", "sliding_window": 128, "layer_types": [S, F, S, F]}, []),
        ({"is_causal": False}, ["attends in both directions"]),
        ({"attention_dropout": 0.1}, ["attention dropout 0.1"]),
        ({"no_rope_layers": [0] * 4}, ["no layer with RoPE"]),
        ({"rope_theta": None, "rope_parameters": {F: {"rope_theta": 1e6}, S: {"rope_theta": 1e4}}}, []),
    ],
)
def test_what_training_refuses(keys: dict[str, Any], said: list[str]) -> None:
    refused = ModelConfig({**FOUR, **keys}).training_refusals(32768)
    assert len(refused) == len(said)
    assert all(part in sentence for part, sentence in zip(said, refused, strict=True))


def test_rope_in_windows_alone_is_refused_unless_it_stays() -> None:
    config = ModelConfig({**FOUR, "model_type": "cohere2", "sliding_window": 64, "layer_types": [S, S, S, F]})
    (refused,) = config.training_refusals(32768)
    assert "set rope: {method: default} in every stage to keep its RoPE" in refused
    assert config.training_refusals(32768, keeps_rope=True) == []
    # A window that holds the whole context is none.
    assert config.training_refusals(64) == []


def test_windows_say_how_far_a_stack_of_them_reaches() -> None:
    (refused,) = ModelConfig({**FOUR, "sliding_window": 4096}).training_refusals(32768)
    assert f"the windows of all 4 layers together reach {1 + 4 * 4095:,};" in refused
    chunked = ModelConfig({**FOUR, "attention_chunk_size": 4096})
    (refused,) = chunked.training_refusals(32768)
    assert "layers together reach 4,096;" in refused
    assert "its own chunk of 4,096 tokens (attention_chunk_size)" in " ".join(
        ModelConfig(
            {**FOUR, "attention_chunk_size": 4096, "layer_types": ["chunked_attention"] * 3 + [F]}
        ).layer_notes
    )


def test_what_only_training_refuses_stops_no_packed_row() -> None:
    assert ModelConfig({**FOUR, "sliding_window": 8, "attention_dropout": 0.1}).packing_refusals() == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", "x"),
        ("sliding_window", 0),
        ("sliding_window", -1),
        ("sliding_window", True),
        ("sliding_window", 4096.5),
        ("attention_chunk_size", [1]),
        ("num_hidden_layers", "4"),
        ("max_window_layers", "2"),
        ("sliding_window_pattern", [4]),
        ("sliding_window_pattern", ""),
        ("no_rope_layer_interval", -4),
        ("no_rope_layer_interval", 0),
        ("sliding_window_pattern", 0),
        ("use_sliding_window", "yes"),
        ("layer_types", 4),
        ("layer_types", [F, None, F, F]),
        ("no_rope_layers", {"0": 1}),
        ("no_rope_layers", [1, 1, 1, 7]),
    ],
)
def test_values_that_say_nothing_of_layers_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(RopewalkError, match=f"^{key} is .* in the config"):
        _ = ModelConfig({**FOUR, "sliding_window": 8, key: value}).layers


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope_theta": 1e4}, []),
        ({"rope_theta": 1e4, "max_position_embeddings": 16384, "rope_scaling": YARN}, []),
        (
            {"rope_theta": 1e4, "max_position_embeddings": 32768, "rope_scaling": YARN},
            ["yarn factor 4 times .* 4096 is 16384 tokens, but max_position_embeddings is 32768"],
        ),
        # Without a factor there is nothing to disagree.
        ({"rope_theta": 1e4, "max_position_embeddings": 32768, "rope_scaling": {**YARN, "factor": None}}, []),
        (
            {
                "rope_theta": 1e4,
                "max_position_embeddings": 16384,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ["linear factor 2 times .* 4096 is 8192 tokens, but max_position_embeddings is 16384"],
        ),
        (
            {"rope_theta": 1e4, **LENGTH, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["linear factor 2: the config does not say whether max_position_embeddings .* includes"],
        ),
        # Without an original length, whether max_position_embeddings includes the factor is left open.
        (
            {
                "rope_theta": 1e4,
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            [
                "yarn: the config does not state original_.*transformers, vLLM and llama.cpp take .* 131072, and vLLM "
                "before 0.30 serves 524288 .* taken as trained for 131072"
            ],
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0},
            },
            ["yarn: the config does not state original_max_position_embeddings, for .* take .* 131072$"],
        ),
        (
            {
                "rope_theta": 5e5,
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            [
                "llama3: the config does not state original_.*transformers and vLLM take .* 131072, .* takes 8192"
            ],
        ),
        (
            {
                "rope_theta": 1e4,
                "max_position_embeddings": 8192,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
            [
                "longrope: the config does not state original_.*take .* 8192, so no input of that length gets the long"
            ],
        ),
        (
            {
                "rope_theta": 1e4,
                **LENGTH,
                "model_max_length": 131072,
                "max_sequence_length": LENGTH["max_position_embeddings"],
            },
            ["model_max_length is 131072, but max_position_embeddings is"],
        ),
        (
            {
                "rope_theta": 1e4,
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {
                    "type": "longrope",
                    "factor": 8.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                },
            },
            ["longrope factor 8 times .* 4096 is 32768 tokens, but max_position_embeddings is 131072"],
        ),
        # llama3's factor is no ratio of lengths.
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            [],
        ),
        (
            {"rope_theta": 1e4, "max_position_embeddings": 8192, "original_max_position_embeddings": 4096},
            ["max_position_embeddings 8192 is more than .* 4096, but rope type default scales nothing"],
        ),
        (
            {"rope_theta": 1e4, **LENGTH, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            ["rope type dynamic is for inference only"],
        ),
        ({"max_position_embeddings": 16384, "rope_parameters": MIXED}, []),
        (
            {"max_position_embeddings": 65536, "rope_parameters": MIXED},
            ["full_attention: yarn factor 4 times .* is 16384 tokens"],
        ),
        (
            {
                "max_position_embeddings": 65536,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": YARN,
            },
            ["full_attention: yarn factor 4 times .* is 16384 tokens"],
        ),
        (WINDOW, [r"only the last 1024 tokens \(sliding_window\), fewer than max_position_embeddings 4096"]),
        ({**WINDOW, "sliding_window": 4096}, []),
        ({**WINDOW, "use_sliding_window": False}, []),
        ({**WINDOW, "use_sliding_window": True}, ["only the last 1024 tokens"]),
        ({**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, []),
        (
            {**WINDOW, "layer_types": ["sliding_attention", "sliding_attention"]},
            ["only the last 1024 tokens"],
        ),
        ({**WINDOW, "layer_types": ["full_attention"]}, []),
    ],
)
def test_config_warnings_are_said_and_nothing_is_refused(keys: dict[str, Any], said: list[str]) -> None:
    sentences = ModelConfig({**HEADS, **keys}).config_warnings
    assert len(sentences) == len(said)
    for sentence, part in zip(sentences, said, strict=True):
        assert re.search(part, sentence)


WINDOWS = {"sliding_window": 4096, "layer_types": [S, F, S, F], "use_sliding_window": True}


def source(**keys: Any) -> ModelConfig:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return ModelConfig.of(transformers.Qwen2Config(**{**shape, "rope_theta": 1e6, **keys}))


def test_lifted_windows_leave_full_attention_in_every_layer() -> None:
    config = source(**WINDOWS)
    assert config.limits == ("windows",)
    lifted = config.lifted(["windows"])
    assert [layer.window for layer in lifted.layers] == [None] * 4
    assert {layer.kind for layer in lifted.layers} == {F}
    assert lifted.methods == config.methods
    assert lifted.limits == ()
    again = ModelConfig.of(type(lifted.source).from_dict(lifted.source.to_dict()))
    assert again.localities == lifted.localities
    assert [layer.window for layer in config.layers] == [4096, None, 4096, None]


def test_a_dropped_dual_chunk_config_stays_dropped() -> None:
    config = source(dual_chunk_attention_config={"chunk_size": 8, "original_max_position_embeddings": 262144})
    assert config.limits == ("dual_chunk_attention",)
    lifted = config.lifted(["dual_chunk_attention", "windows"])
    assert "dual_chunk_attention_config" not in lifted.source.to_dict()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "ministral", "mistral", "qwen2"])
def test_plain_transformers_runs_what_windows_were_lifted_from(family: str) -> None:
    lifted = ModelConfig.of(tiny_model(family, sharp=True).config).lifted(["windows"])
    assert {layer.window for layer in lifted.layers} == {None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(lifted.source, attn_implementation="eager").eval()
    ids = torch.arange(3, 26)[None]
    with torch.no_grad():
        stock = model(ids).logits
        attach(model, exact_rope=False)
        ours = model(ids, layout=PackedLayout.from_lengths([23], "full", 0)).logits
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["cohere2", "exaone4"])
def test_windows_that_say_which_layers_rotate_are_not_lifted(family: str) -> None:
    config = ModelConfig.of(tiny_model(family, sharp=True).config)
    with pytest.raises(
        RopewalkError, match="cannot be removed, because they determine which of its layers have RoPE"
    ):
        config.lifted(["windows"])


def test_what_there_is_not_is_not_lifted() -> None:
    config = source()
    assert config.limits == ()
    assert config.lifted(["windows"]) is config


def test_windows_with_a_rope_of_their_own_stay() -> None:
    gemma = ModelConfig.of(transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=8))
    with pytest.raises(RopewalkError, match="windows of gemma3_text cannot be removed"):
        gemma.lifted(["windows"])


def test_full_layers_without_rope_are_nothing_to_extend() -> None:
    """As transformers writes a Beam: null is the RoPE of its full layers."""
    rope = {F: None, S: MIXED[S]}
    config = ModelConfig(
        FOUR | HEADS | {"sliding_window": 4096, "layer_types": [S, S, S, F], "rope_parameters": rope}
    )
    assert config.trained_length == 32768
    with pytest.raises(RopewalkError, match=r"layer types with RoPE in this model's config \(sliding_att"):
        _ = config.limiting_kind
