"""Parameters are counted from a config as transformers creates them."""

from pathlib import Path

import pytest
import torch
import transformers

from ropewalk.models.config.file import config_from_json, read_model_config
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.parameters import count_parameters
from tests.models import every_family

FAMILIES = ["bamba", "falcon_h1", "gemma3n_text", "granitemoehybrid", "lfm2", "llama", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_a_file_and_of_a_config_are_those_of_a_model_with_weights(
    family: str, tmp_path: Path
) -> None:
    config = every_family.tiny_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    read = read_model_config(str(tmp_path))
    expected = sum(p.numel() for p in model.parameters())
    assert count_parameters(read) == count_parameters(ModelConfig.of(config)) == expected > 0


def test_a_config_that_transformers_cannot_build_has_no_count() -> None:
    assert count_parameters(ModelConfig({"model_type": "of nobody"}, config_class="Nobody")) is None
    # An encoder has no causal language model.
    assert count_parameters(ModelConfig({"model_type": "vit"}, config_class="ViTConfig")) is None


def test_a_decoder_that_is_only_a_part_counts_its_head() -> None:
    """transformers has no class for this decoder with a head but that of the whole, with encoders."""
    whole = every_family.tiny_config("qwen3_vl")
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(whole)
    expected = sum(
        each.numel() for part in (model.model.language_model, model.lm_head) for each in part.parameters()
    )
    assert count_parameters(config_from_json(whole.to_dict())) == expected
