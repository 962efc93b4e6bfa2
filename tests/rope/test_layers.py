"""The attention of each layer, from a config's mapping alone; transformers itself is asked in tests/integrations."""

from __future__ import annotations

from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.rope.layers import (
    attention_of_layers,
    layer_notes,
    packing_refusals,
    shortest_window,
    training_refusals,
)

FOUR = {"num_hidden_layers": 4, "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 32768}
F, S = "full_attention", "sliding_attention"


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
    config = {**FOUR, **keys}
    assert [layer.window for layer in attention_of_layers(config)] == windows
    assert shortest_window(config) == min((w for w in windows if w is not None), default=None)


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
    assert [layer.rotates for layer in attention_of_layers({**FOUR, **keys})] == rotates


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(RopewalkError, match="no_rope_layers lists 3 layers, and the model has 4"):
        attention_of_layers({**FOUR, "no_rope_layers": [1, 1, 0]})


def test_layers_are_named_in_words() -> None:
    thirty_six = {**FOUR, "num_hidden_layers": 36, "no_rope_layers": [1, 1, 1, 0] * 9}
    assert layer_notes(thirty_six) == [
        "every 4th layer, from 3 to 35 (of 36, counted from 0) has no RoPE, so a new base leaves it as it is"
    ]
    some = {**FOUR, "sliding_window": 4096, "layer_types": [F, S, S, F]}
    assert layer_notes(some) == [
        "each of layers 1 to 2 (of 4, counted from 0) sees only the last 4,096 tokens (sliding_window), whatever the "
        "base"
    ]
    assert layer_notes(FOUR) == []
    assert layer_notes({**FOUR, "no_rope_layers": [0] * 4}) == [
        "no layer has RoPE, so no base changes anything"
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, []),
        ({"sliding_window": 32768}, []),
        ({"sliding_window": 4096, "use_sliding_window": None}, []),
        ({"sliding_window": 4096}, ["sliding window of 4,096 tokens, shorter than the context of 32,768"]),
        ({"layer_types": [F, "linear_attention", F, F]}, ["layers of type linear_attention"]),
        ({"model_type": "gpt_oss"}, ["attention sinks"]),
        ({"is_causal": False}, ["attends in both directions"]),
        ({"attention_dropout": 0.1}, ["attention dropout 0.1"]),
        ({"no_rope_layers": [0] * 4}, ["no layer with RoPE"]),
        (
            {"rope_theta": None, "rope_parameters": {F: {"rope_theta": 1e6}, S: {"rope_theta": 1e4}}},
            ["a RoPE of its own for each layer type (full_attention, sliding_attention)"],
        ),
    ],
)
def test_what_training_refuses(keys: dict[str, Any], said: list[str]) -> None:
    refused = training_refusals({**FOUR, **keys}, 32768)
    assert len(refused) == len(said)
    assert all(part in sentence for part, sentence in zip(said, refused, strict=True))


def test_what_only_training_refuses_stops_no_packed_row() -> None:
    assert packing_refusals({**FOUR, "sliding_window": 8, "attention_dropout": 0.1}) == []


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
        ("layer_types", 4),
        ("layer_types", [F, None, F, F]),
        ("no_rope_layers", {"0": 1}),
    ],
)
def test_values_that_say_nothing_of_layers_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(RopewalkError, match=f"^{key} is .* in the config"):
        attention_of_layers({**FOUR, "sliding_window": 8, key: value})
