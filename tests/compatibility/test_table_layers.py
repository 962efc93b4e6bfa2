"""Which layers a program rotates: what it does not rotate, no frequency decides, and what it rotates alone is wrong."""

from typing import Any

import pytest

from ropewalk.compatibility.table import Reading, checkpoint_of, readings_of
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope, written_config
from ropewalk.rope import NoRope
from tests.models.every_family import tiny_config

EVERYWHERE = {"transformers", "transformers-4", "vllm", "vllm-0.22", "sglang"}


def read(raw: dict[str, Any]) -> dict[str, Reading]:
    return {each.key: each for each in readings_of(checkpoint_of(raw), "my/model")}


def raw_of(family: str, **own: Any) -> dict[str, Any]:
    config = tiny_config(family)
    for key, value in own.items():
        setattr(config, key, value)
    return {**written_config(config), "model_type": config.model_type}


def test_llama_cpp_rotates_three_of_four_layers_of_smollm3_whatever_the_file_says() -> None:
    layers = tiny_config("smollm3").num_hidden_layers
    usual = [int((number + 1) % 4 != 0) for number in range(layers)]
    assert {each.verdict for each in read(raw_of("smollm3", no_rope_layers=usual)).values()} == {"same"}
    for other in ([0] * layers, [1] * layers, [1 - each for each in usual]):
        found = read(raw_of("smollm3", no_rope_layers=other))
        assert {key for key, each in found.items() if each.verdict != "same"} == {"llama.cpp"}
        assert found["llama.cpp"].verdict == "differs"
        assert found["llama.cpp"].detail.startswith("it rotates each of layers 0 to 2")


def test_a_base_that_no_layer_uses_divides_nobody() -> None:
    """Without RoPE layers, a program that would take another base computes the same."""
    raw = raw_of("smollm3", no_rope_layers=[0] * tiny_config("smollm3").num_hidden_layers)
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 123456.0}
    del raw["rope_theta"]
    assert read(raw)["transformers-4"].verdict == "same"
    with_rope_layers = {**raw, "no_rope_layers": [1] * raw["num_hidden_layers"]}
    assert read(with_rope_layers)["transformers-4"].verdict == "differs"


@pytest.mark.parametrize("family", ["cohere2", "llama4_text"])
def test_families_with_layers_without_rope_are_compared_by_layer(family: str) -> None:
    raw = raw_of(family)
    layers = raw["num_hidden_layers"]
    fourth = [(number + 1) % 4 != 0 for number in range(layers)]
    found = read(raw)
    expected = checkpoint_of(raw)
    same = [own for _, own in expected.layers] == fourth
    assert (found["llama.cpp"].verdict == "same") == same
    assert found["transformers"].verdict == "same"
    if family == "llama4_text":
        assert (found["sglang"].verdict == "same") == same


@pytest.mark.parametrize(
    ("family", "mlx"),
    [
        ("llama", "same"),
        ("qwen2", "same"),
        ("gemma2", "differs"),
        ("cohere", "differs"),
        ("starcoder2", "differs"),
    ],
)
def test_a_model_that_lost_its_rope_is_the_same_where_longrope_is_read(
    tmp_path: Any, family: str, mlx: str
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    method = NoRope(config.full_attention_rope.rotary_dim, config.full_attention_rope.rope_theta, 256)
    found = read(written_config(with_rope(config, method, 2048).source))
    assert {found[key].verdict for key in EVERYWHERE} == {"same"}
    assert {found[key].served for key in ("vllm", "sglang", "llama.cpp") if found[key].served} == {2048}
    assert found["mlx-lm"].verdict == mlx
    if mlx == "differs":
        assert found["mlx-lm"].detail == "it rotates every layer, and the model rotates no layer"
    assert found["llama.cpp"].verdict == (
        "with an option" if family == "llama" else "not known" if mlx == "differs" else "differs"
    )
