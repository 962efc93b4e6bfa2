"""The RoPE that a load holds, found without loading, is that of a real load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ropewalk.models.config.file import read_model_config
from ropewalk.models.rope.frequencies import loaded_rope

SMALL = {"hidden_size": 64, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 256}


def written(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loaded_rope_is_that_of_a_real_load(rope: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    extra = {"num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 64}
    config = transformers.LlamaConfig.from_dict({**LLAMA, **extra, **json.loads(json.dumps(rope))})
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == dtype
    (held,) = loaded_rope(read_model_config(str(tmp_path))) or ()
    real = model.model.rotary_emb
    assert torch.equal(held.inv_freq, real.inv_freq.double())
    assert held.dtype == str(real.inv_freq.dtype).removeprefix("torch.")
    assert held.attention_factor == real.attention_scaling
    assert held.layer_type is None


def test_loaded_rope_of_layer_types_is_that_of_a_real_load(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, num_hidden_layers=6, num_key_value_heads=2, vocab_size=32, intermediate_size=64
    )
    transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    real = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").model.rotary_emb
    held = loaded_rope(read_model_config(str(tmp_path)))
    assert held is not None
    assert [one.layer_type for one in held] == ["full_attention", "sliding_attention"]
    for one in held:
        assert torch.equal(one.inv_freq, getattr(real, f"{one.layer_type}_inv_freq").double())


def test_reading_changes_no_global_state(tmp_path: Path) -> None:
    verbosity = transformers.logging.get_verbosity()
    loaded_rope(read_model_config(written(tmp_path, {**LLAMA, "dtype": "bfloat16"})))
    assert transformers.logging.get_verbosity() == verbosity
    assert torch.get_default_dtype() == torch.float32
