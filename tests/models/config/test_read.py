"""Configs of checkpoints, as transformers and their files state them."""

import json

import pytest

from ropewalk import RopewalkError, load_model
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope
from ropewalk.rope import (
    Yarn,
)
from tests.models.families import tiny_model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", r"there is no folder or file ./missing"),
        ("/nowhere/at/all", "there is no folder or file /nowhere/at/all"),
        (
            "nope/nope",
            "there is no folder nope/nope, and no config.json could be loaded for it from the Hugging Face Hub",
        ),
        (".", "has no config.json"),
    ],
)
def test_missing_models_are_named(name, message):
    with pytest.raises(RopewalkError, match=message):
        load_model(name)


def test_a_default_theta_is_never_taken_silently(tmp_path, caplog):
    checkpoint = tmp_path / "llama"
    tiny_model("llama").save_pretrained(checkpoint)
    load_model(checkpoint)
    assert caplog.messages == []
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config))
    assert load_model(checkpoint).config.rope_parameters["rope_theta"] == 1e4
    assert "does not state rope_theta; LlamaConfig's default of 10000 is used" in caplog.text


def test_a_checkpoint_without_rope_is_refused(tmp_path):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RopewalkError, match="RoPE"):
        load_model(tmp_path)


def test_the_length_that_the_file_leaves_open_is_not_multiplied(tmp_path):
    """transformers fills in an original length, so its config alone looks as if the file stated one."""
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    length = stated["max_position_embeddings"]
    assert read_config(tmp_path).trained_length == read_model_config(str(tmp_path)).trained_length == length
    # Extended to twice that, its config states a larger factor, which would reach four times as far.
    written = with_rope(read_config(tmp_path), Yarn(8, 1e4, 8.0, length), 2 * length)
    written.source.save_pretrained(tmp_path)
    assert read_config(tmp_path).trained_length == 2 * length
