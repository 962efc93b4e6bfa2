"""Documented lengths: recognised by what a config says, used as the trained length, and named with their source."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ropewalk.models.config.documented import DOCUMENTED
from ropewalk.models.config.file import config_from_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.planning.inspection import advise_on
from ropewalk.rope import Yarn
from tests.checkpoint_cases import path_of

QWEN3 = json.loads(path_of("qwen3-8b").read_text())


def described(name: str, **changes: Any) -> ModelConfig:
    return config_from_json({**json.loads(path_of(name).read_text()), **changes}, name)


@pytest.mark.parametrize(
    ("name", "changes", "length"),
    [
        ("qwen3-8b", {}, 32768),
        ("qwen2.5-7b-instruct", {}, 32768),
        # The base model's file.
        ("qwen2.5-7b-instruct", {"max_position_embeddings": 131072}, 32768),
        ("mistral-7b-v0.1", {}, 8192),
        # What another length, base or shape says is the config's alone.
        ("qwen3-8b", {"max_position_embeddings": 131072}, 131072),
        ("qwen3-8b", {"rope_theta": 5e6}, 40960),
        ("qwen3-8b", {"num_hidden_layers": 35}, 40960),
        ("mistral-7b-v0.2", {}, 32768),
        ("qwen2.5-7b-instruct-1m", {}, 262144),
    ],
)
def test_a_documented_length_counts_for_the_config_that_it_is_of(
    name: str, changes: dict[str, Any], length: int
) -> None:
    config = described(name, **changes)
    assert config.trained_length == length
    notes = [note for note in config.config_warnings if "which is taken as the trained length" in note]
    assert len(notes) == (config.max_position_embeddings != length and "1m" not in name)
    for note in notes:
        assert "(model card of " in note or "(arXiv:" in note


def test_the_base_for_qwen3_follows_from_its_documented_length() -> None:
    config = described("qwen3-8b")
    advice = advise_on(config, 131072)
    # 1e6^(ln(131072/2π) / ln(32768/2π)); from the stated 40,960 tokens it would be 6.2e6.
    assert advice.chosen is not None
    assert advice.chosen.method is not None
    assert advice.chosen.method.rope_theta == pytest.approx(9.37e6, rel=1e-3)
    assert advice.caveats[-1].startswith("The trained length comes from the publisher's documentation;")


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen2.5-7b-instruct"])
def test_the_publishers_way_without_training_is_named_as_a_config_states_it(name: str) -> None:
    (note,) = [note for note in described(name).planning_notes if note.startswith("without training")]
    assert "serves up to 131,072 tokens" in note
    stated = json.loads(note[note.index("{") : note.index("}") + 1])
    changed = described(name, rope_parameters=stated)
    assert changed.methods == {None: Yarn(128, 1e6, 4.0, 32768)}
    # With it in the config, no second one is proposed.
    assert not [note for note in changed.planning_notes if note.startswith("without training")]
    (warning,) = [note for note in changed.config_warnings if "without training" in note]
    assert "is trained for 32768 tokens; its publisher serves 131072 with this yarn" in warning
    assert changed.trained_length == 131072


def test_models_without_a_documented_way_have_none() -> None:
    assert not [note for note in described("mistral-7b-v0.1").planning_notes if "without training" in note]


def test_a_given_length_counts_more() -> None:
    config = ModelConfig(QWEN3, given_length=40960)
    assert config.trained_length == 40960
    assert not [note for note in config.config_warnings if "taken as the trained length" in note]


def test_every_entry_is_reached_and_has_a_source() -> None:
    for entry in DOCUMENTED:
        for hidden, layers in entry.shapes:
            shape = {"model_type": entry.model_type, "hidden_size": hidden, "num_hidden_layers": layers}
            config = ModelConfig(
                {
                    **shape,
                    "head_dim": 128,
                    "rope_theta": entry.rope_theta,
                    "max_position_embeddings": entry.stated,
                }
            )
            assert config.documented is entry
            assert config.trained_length == entry.native
        assert entry.source
