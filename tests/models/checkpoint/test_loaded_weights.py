"""A checkpoint and the model loaded from it have the same weights, or the load is refused with their names."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ropewalk import RopewalkError, load_model
from ropewalk.models.checkpoint.loaded_weights import _unused, refuse_other_weights
from tests.models.every_family import tiny_config
from tests.models.families import tiny_model
from tests.versions import missing

NO_CONFIG = "no quantization_config that transformers knows"


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def rewritten(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def stated(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def add(*names):
    return lambda weights: weights.update({name: torch.ones(32, 32) for name in names})


def biases(weights):
    for layer in range(3):
        for part in "qkvo":
            weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.ones(32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (biases, r"weights .*0\.self_attn\.k_proj\.bias, .*0\.self_attn\.v_proj\.bias and 8 more"),
        (add("score.weight"), r"the weight score\.weight, which"),
        (add("lm_head.bias"), r"the weight lm_head\.bias, which"),
        # In no encoder: the config is that of a decoder.
        (add("vision_tower.patches.weight"), r"the weight vision_tower\.patches\.weight, which"),
    ],
)
def test_weights_that_the_model_does_not_use_are_refused(folder, change, named):
    rewritten(folder, change)
    with pytest.raises(RopewalkError, match=named):
        load_model(folder)


def test_a_config_with_too_few_layers_is_refused(folder):
    stated(folder, num_hidden_layers=2)
    with pytest.raises(RopewalkError, match=r"weights model\.layers\.2\.input_layernorm\.weight, .* 5 more"):
        load_model(folder)


def test_what_is_left_out_on_purpose_is_not_refused(folder):
    """Frequencies that older versions saved, parts for several tokens at once, and a head that is the embedding."""
    stated(folder, tie_word_embeddings=True)

    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        add("mtp.fc.weight", "model.layers.3.eh_proj.weight", "model.layers.3.mlp.up_proj.weight")(weights)

    rewritten(folder, change)
    model = load_model(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_encoders_may_be_left_out_but_nothing_of_the_decoder():
    model = tiny_model("llama")
    encoders = ["visual.blocks.0.weight", "model.vision_tower.layers.7.weight", "audio_projector.bias"]
    own = ["lm_head.bias", "model.layers.0.mlp.gate.weight", "model.layers.3.mlp.up_proj.weight"]
    assert _unused(model, encoders + own, alone=True, layers=None) == own
    assert _unused(model, encoders + own, alone=False, layers=None) == sorted(encoders + own)
    # The first layers of a model leave the others out.
    assert _unused(model, own, alone=False, layers=3) == own[:2]


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")],
)
@pytest.mark.parametrize("scales", ["weight_scale", "SCB", None])
def test_quantized_weights_without_their_config_are_refused(folder, dtype, named, scales):
    name = "model.layers.1.mlp.up_proj"

    def change(weights):
        weights[f"{name}.weight"] = weights[f"{name}.weight"].to(dtype)
        if scales:
            weights[f"{name}.{scales}"] = torch.ones(48)

    rewritten(folder, change)
    with pytest.raises(RopewalkError, match=rf"{name}\.weight as {named} numbers, .* {NO_CONFIG}"):
        load_model(folder)
    # transformers skips a way of quantizing that it does not know, with no more than a warning.
    stated(folder, quantization_config={"quant_method": "unknown"})
    with pytest.raises(RopewalkError, match=NO_CONFIG):
        load_model(folder)


def test_tables_of_whole_numbers_are_no_quantized_weights(tmp_path):
    """DeepSeek 4 chooses experts of its first layers by a table of tokens."""
    if "deepseek_v4" not in transformers.CONFIG_MAPPING:
        missing("deepseek_v4")
    transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v4")).save_pretrained(tmp_path)
    tables = {k: t.dtype for k, t in load_file(tmp_path / "model.safetensors").items() if "tid2eid" in k}
    assert set(tables.values()) == {torch.int64}
    # ropewalk itself does not serve its attention yet.
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    refuse_other_weights(tmp_path, model.config, model, loading)


def test_a_mixture_whose_experts_are_stacked_on_loading_is_not_refused(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert name in load_file(tmp_path / "model.safetensors")
    load_model(tmp_path)
    rewritten(tmp_path, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(RopewalkError, match=r"experts\.3\.up_proj\.weight as I8"):
        load_model(tmp_path)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The numbers of 4 bits without their sign (OCP Microscaling Formats, version 1.0, table 6)."""


def packed(experts, outputs, inputs):
    """Random weights as gpt-oss's checkpoints have them, and their values."""
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    values = E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * 2.0 ** (scales.long() - 127)[..., None]
    return {"blocks": blocks, "scales": scales}, values.flatten(-2).transpose(1, 2)


def test_experts_of_4_bits_are_loaded_as_numbers_that_can_be_trained_whatever_the_machine(
    tmp_path, monkeypatch
):
    """gpt-oss: transformers' kernels for them have no gradients, and are used only where they are installed."""
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    config = tiny_config("gpt_oss")
    config.intermediate_size = config.hidden_size = 64
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {}
    weights = {name: each.to(torch.bfloat16) for name, each in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        parts, expected[name] = packed(experts, outputs, inputs)
        weights |= {f"{name}_{part}": each for part, each in parts.items()}
    config.save_pretrained(tmp_path)
    stated(tmp_path, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    asked = []
    check = Mxfp4HfQuantizer.validate_environment
    monkeypatch.setattr(
        Mxfp4HfQuantizer,
        "validate_environment",
        lambda self, *args, **kwargs: (
            asked.append(self.quantization_config.dequantize),
            check(self, *args, **kwargs),
        ),
    )
    loaded = load_model(tmp_path)
    assert asked == [True]
    found = loaded.state_dict()
    assert len(expected) == 2 * config.num_hidden_layers
    assert all(torch.equal(found[name].float(), values) for name, values in expected.items())
    assert all(each.requires_grad for each in loaded.parameters())
    assert "quantization_config" not in loaded.config.to_dict()
