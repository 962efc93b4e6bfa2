"""Which widths layers need, from a config's mapping, and against what the installed transformers runs without."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from tests.models.families import LOCAL, tiny_model
from tests.versions import pretend_transformers

FOUR = {"num_hidden_layers": 4, "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 32768}
F, S = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"layer_types": [F, F, S, S]},
            "layer 2 is of type sliding_attention .* sliding_window is null; .*or change the layer to",
        ),
        (
            {"layer_types": [F, S, F, F], "use_sliding_window": False},
            "layer 1 is .* use_sliding_window is false; set it to true",
        ),
        (
            {"model_type": "ministral", "layer_types": [S, F, F, F]},
            "layer 0 is of type sliding_attention .* sliding_window is null; set it in tokens$",
        ),
    ],
)
def test_a_layer_with_a_window_needs_its_width(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        _ = ModelConfig({**FOUR, **keys}).layers


@pytest.mark.parametrize("family", LOCAL)
def test_families_that_need_a_width_are_those_that_transformers_runs_none_of_without(family: str) -> None:
    config = tiny_model(family, sharp=True).config
    values = config.to_dict()
    key = "attention_chunk_size" if family == "llama4" else "sliding_window"
    values[key] = None
    values.pop("use_sliding_window", None)
    if values.get("layer_types"):
        values["layer_types"] = [F] * len(values["layer_types"])
    try:
        bare = type(config).from_dict(values)
    except StrictDataclassError:
        # The class itself cannot do without.
        return
    model = transformers.AutoModelForCausalLM.from_config(bare).eval()
    fails = "only with a number" in " ".join(ModelConfig.of(bare).packing_refusals())
    with pytest.raises(ValueError, match="Could not find") if fails else nullcontext():
        model(torch.arange(3, 13)[None])


def test_llama4_without_chunks_needs_a_transformers_that_asks_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tiny_model("llama4", sharp=True).config.to_dict()
    values.update(attention_chunk_size=None, layer_types=[F] * len(values["layer_types"]))
    config = transformers.Llama4TextConfig.from_dict(values)
    for version, refused in (("5.23.4", True), ("5.24.0", False), ("6.0.0", False)):
        pretend_transformers(monkeypatch, version)
        assert ("attention_chunk_size null" in " ".join(ModelConfig.of(config).packing_refusals())) == refused
        chunked = ModelConfig(
            {**FOUR, "model_type": "llama4_text", "layer_types": ["chunked_attention", F, F, F]}
        )
        with pytest.raises(RopewalkError, match=r"null; set it in tokens(.*)") as said:
            _ = chunked.layers
        assert ("or change the layer to full_attention" in str(said.value)) != refused
