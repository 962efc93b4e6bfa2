"""Which class of transformers loads a model, and what of the model it leaves out."""

from typing import ClassVar

import pytest
import transformers

from ropewalk.models.config.auto_class import (
    auto_class,
    encoders_note,
    is_part,
    loads_decoder_alone,
    name_of_class,
    plain_model,
)
from tests.models.every_family import tiny_config
from tests.models.families import tiny_model
from tests.models.multimodal import save_whole

CAUSAL, IMAGES = "AutoModelForCausalLM", "AutoModelForImageTextToText"


@pytest.mark.parametrize(
    ("family", "loads", "alone", "for_users"),
    [
        ("llama", CAUSAL, False, CAUSAL),
        ("gemma3", CAUSAL, False, IMAGES),
        ("llama4", CAUSAL, True, IMAGES),
        ("qwen3_5", CAUSAL, True, IMAGES),
        ("qwen3_5_text", CAUSAL, False, CAUSAL),
        ("qwen3_vl", IMAGES, False, IMAGES),
        ("mistral3", IMAGES, False, IMAGES),
    ],
)
def test_the_class_that_loads_a_family(family, loads, alone, for_users):
    config = tiny_config(family)
    assert auto_class(config).__name__ == loads
    assert loads_decoder_alone(config) == alone
    assert name_of_class(family) == for_users
    assert is_part(config) == (for_users == IMAGES)
    assert (encoders_note(config) is not None) == is_part(config)


def test_it_is_said_what_is_kept_as_it_is():
    said = encoders_note(tiny_config("qwen3_5"))
    assert said == (
        "only the language model of qwen3_5 runs and changes; its encoders of images or sounds and the files of its "
        "processor are saved with it as they are"
    )


def test_code_of_a_checkpoint_is_loaded_as_it_says():
    class Own(transformers.PreTrainedConfig):
        model_type = "own"
        sub_configs: ClassVar = {"text_config": transformers.LlamaConfig}

    assert auto_class(Own()).__name__ == CAUSAL
    assert not is_part(Own())


def test_plain_transformers_loads_a_folder_with_its_class(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    assert type(plain_model(tmp_path / "llama")).__name__ == "LlamaForCausalLM"
    folder = save_whole(tmp_path / "qwen", "qwen3_vl")
    assert type(plain_model(folder)).__name__ == "Qwen3VLForConditionalGeneration"
