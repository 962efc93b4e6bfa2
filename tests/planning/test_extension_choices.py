"""Choices that compound in an extension, as published configs show them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.planning import InspectSettings, inspect
from ropewalk.planning.extension_choices import extension_choices
from ropewalk.planning.inspection import read_checkpoint
from tests.places import ROOT

CONFIGS = ROOT / "tests/configs"


def raw(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found.get("text_config", found)


# Read by hand in the papers and model cards of these models.
NORMS = {
    "llama-2-7b": ("pre", "none"),
    "llama-3-8b": ("pre", "none"),
    "qwen2.5-coder-7b": ("pre", "none"),
    "qwen3-8b": ("pre", "head"),
    "olmo-2-7b": ("post", "layer"),
    "olmo-3-7b": ("post", "layer"),
    "mistral-7b-v0.1": ("pre", "none"),
    "gemma-2-9b": ("both", "none"),
    "glm-4-9b-0414": ("both", "none"),
    "gpt-oss-20b": ("pre", "none"),
    "phi-4-mini-instruct": ("pre", "none"),
}
WINDOWS = {
    # Every layer; three of four; every second from the first.
    "mistral-7b-v0.1": (4096, list(range(32))),
    "olmo-3-7b": (4096, [n for n in range(32) if n % 4 != 3]),
    "gemma-2-9b": (4096, list(range(0, 42, 2))),
    "gpt-oss-20b": (128, list(range(0, 24, 2))),
}


@pytest.mark.parametrize("name", NORMS)
def test_each_choice_is_that_of_the_published_config(name: str) -> None:
    config = raw(name)
    choices = extension_choices(read_checkpoint(str(CONFIGS / f"{name}.json")))
    assert (choices.norm_placement, choices.qk_norm) == NORMS[name]
    heads = config["num_attention_heads"]
    assert (choices.num_attention_heads, choices.num_key_value_heads) == (
        heads,
        config.get("num_key_value_heads", heads),
    )
    window, layers = WINDOWS.get(name, (None, []))
    assert (choices.sliding_window, list(choices.windowed_layers)) == (window, layers)
    assert choices.num_layers == config["num_hidden_layers"]
    assert choices.pretrained_length is None
    assert not choices.latent_attention


def test_the_note_has_the_finding_and_what_this_model_has() -> None:
    llama = read_checkpoint(str(CONFIGS / "llama-3-8b.json"))
    choices = extension_choices(llama, 8192)
    assert choices.note == (
        "choices that compound in an extension (OlmPool: three or more together cost up to 47 %): pre-norm, no QK "
        "norm, 8 key/value heads for 32 query heads, no sliding windows, pretrained with 8,192 tokens"
    )
    assert extension_choices(llama).note.endswith("pretraining length unknown (--pretrained-length)")
    other = replace(choices, norm_placement=None, qk_norm=None, latent_attention=True, windowed_layers=(0,),
        sliding_window=512)  # fmt: skip
    assert "norms not examined, multi-head latent attention, windows of 512 tokens in layer 0" in other.note


def test_inspect_notes_it_for_an_extension_alone() -> None:
    path = str(CONFIGS / "olmo-3-7b.json")
    longer = inspect(InspectSettings(model=path, target=131072, pretrained_length=8192))
    assert longer.choices is not None
    assert longer.notes[-1] == longer.choices.note
    assert longer.to_json()["extension_choices"] == longer.choices.to_json()
    assert longer.choices.to_json()["pretrained_length"] == 8192
    fits = inspect(InspectSettings(model=path, target=4096))
    assert not any("OlmPool" in note for note in fits.notes)
    plain = inspect(InspectSettings(model=path))
    assert plain.choices is plain.to_json()["extension_choices"] is None


def test_a_length_that_cannot_be_is_refused() -> None:
    path = str(CONFIGS / "llama-3-8b.json")
    with pytest.raises(
        RopewalkError, match="--pretrained-length 16384 is more than the trained length of 8192"
    ):
        inspect(InspectSettings(model=path, target=131072, pretrained_length=16384))
    with pytest.raises(RopewalkError, match=r"--pretrained-length 4096 belongs to a note .* with --target"):
        inspect(InspectSettings(model=path, pretrained_length=4096))
