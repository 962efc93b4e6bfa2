"""Checkpoints whose config holds that of the language model, or states a base in more than one place."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ropewalk import PackedLayout, RopewalkError
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.file import config_from_json, read_model_config
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope
from ropewalk.models.load import ModelSetup, attach, load_model
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import Default, RotaryEmbedding, Yarn
from tests.marks import slow_after
from tests.models.every_family import tiny_config
from tests.models.families import COMMON, GEMMA_4
from tests.versions import WRITES_DBRX, needs_transformers

CONTEXT = 1024


def raised(config):
    """The RoPE of a config with seven times its base."""
    method = config.full_attention_rope
    return Default(method.rotary_dim, 7 * method.rope_theta)


def without_rope(values):
    return {
        k: v
        for k, v in values.items()
        if k not in ("rope_parameters", "rope_theta", "max_position_embeddings")
    }


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llama4", "qwen3_5", "mllama", "emu3", "mistral3"])
def test_only_the_rope_and_the_length_of_the_decoder_change(family):
    whole = tiny_config(family)
    config = ModelConfig.of(whole)
    wanted = raised(config)
    changed = with_rope(config, wanted, 2 * CONTEXT).source
    assert type(changed) is type(whole)
    read = ModelConfig.of(changed)
    assert read.full_attention_rope == wanted
    assert read.max_position_embeddings == 2 * CONTEXT
    before, after = whole.to_dict(), changed.to_dict()
    assert without_rope(before.pop("text_config")) == without_rope(after.pop("text_config"))
    assert before == after


def test_gemma_3_with_its_encoder_of_images_keeps_every_weight(tmp_path):
    torch.manual_seed(0)
    before = transformers.AutoModelForCausalLM.from_config(tiny_config("gemma3"))
    before.save_pretrained(tmp_path / "before")
    config = read_config(tmp_path / "before")
    wanted = raised(config)
    model = load_model(tmp_path / "before", ModelSetup(wanted, CONTEXT))
    save_model(model, tmp_path / "after")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert old.keys() == new.keys()
    assert any("vision" in key for key in new)
    assert all(torch.equal(old[key], new[key]) for key in old)
    assert read_model_config(str(tmp_path / "after")).full_attention_rope == wanted
    rotary = next(
        module
        for module in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after").modules()
        if type(module).__name__ == "Gemma3RotaryEmbedding"
    )
    held = rotary.full_attention_inv_freq.double()
    assert torch.allclose(held, wanted.frequencies().inv_freq, rtol=1e-6, atol=0)


def test_gemma_4_with_its_encoder_of_images_keeps_the_rotary_module_of_the_encoder(tmp_path):
    """Both have one; ours takes the place of the decoder's, and the result is that of plain transformers."""
    torch.manual_seed(0)
    encoder = transformers.Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=8,
        position_embedding_size=64,
    )
    text = transformers.Gemma4TextConfig(**COMMON | GEMMA_4)
    whole = transformers.Gemma4Config(text_config=text, vision_config=encoder, audio_config=None)
    before = transformers.AutoModelForCausalLM.from_config(whole)
    before.save_pretrained(tmp_path / "before")
    config = read_config(tmp_path / "before")
    wanted = config.full_attention_rope.with_theta(7e6)
    model = load_model(tmp_path / "before", ModelSetup(wanted, CONTEXT))
    assert rotary_module(model)[2].methods["full_attention"] == wanted
    in_memory = copy.deepcopy(before)
    attach(in_memory)
    assert type(in_memory.model.language_model.rotary_emb) is RotaryEmbedding
    assert type(in_memory.model.vision_tower.encoder.rotary_emb).__name__ == "Gemma4VisionRotaryEmbedding"
    save_model(model, tmp_path / "after")
    assert read_model_config(str(tmp_path / "after")).full_attention_rope == wanted
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation="eager")
    assert plain.state_dict().keys() == before.state_dict().keys()
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        unchanged = before(ids, use_cache=False).logits
        found = model(ids, layout=PackedLayout.from_lengths([40], "full", 0)).logits
    # Angles of up to 39 rad that are rounded to float32 and not, through a few layers of float32.
    assert float((found - expected).abs().max()) <= 2**-12 * float(expected.abs().max())
    assert float((unchanged - expected).abs().max()) > 2**-12 * float(expected.abs().max())


@pytest.mark.parametrize("family", slow_after(1, ["mllama", "emu3", "llama4"]))
def test_a_language_model_that_is_saved_alone_loads_in_plain_transformers(family, tmp_path):
    """transformers has no causal decoder for the own configs of Llama 3.2 with images and Emu 3."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path / "before")
    tiny_config(family).save_pretrained(tmp_path / "before")
    wanted = raised(read_config(tmp_path / "before"))
    model = load_model(tmp_path / "before", ModelSetup(wanted, CONTEXT), dtype=torch.float32)
    save_model(model, tmp_path / "after")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()
    assert plain.state_dict().keys() == model.state_dict().keys()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, expected = (each(ids, use_cache=False).logits for each in (plain, model))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    read = read_config(tmp_path / "after")
    assert (read.full_attention_rope, read.max_position_embeddings) == (wanted, CONTEXT)


@pytest.mark.parametrize("family", ["cohere2_moe", "bailing_hybrid", "dbrx"])
def test_a_base_that_stands_in_several_places_is_written_into_all(family, tmp_path):
    if family == "dbrx":
        needs_transformers(*WRITES_DBRX)
    config = ModelConfig.of(tiny_config(family))
    wanted = raised(config)
    with_rope(config, wanted, CONTEXT).source.save_pretrained(tmp_path)
    read = read_model_config(str(tmp_path))
    assert (read.full_attention_rope, read.max_position_embeddings) == (wanted, CONTEXT)
    written = json.loads((tmp_path / "config.json").read_text())
    places = [written, written["rope_parameters"], written.get("attn_config", {})]
    assert {place["rope_theta"] for place in places if "rope_theta" in place} == {wanted.rope_theta}
    assert sum("rope_theta" in place for place in places) == 2


def test_a_base_in_attn_config_that_transformers_passes_over_is_refused():
    """dbrx-instruct states 500,000 there, and transformers 5 computes with its class's 10,000."""
    needs_transformers(*WRITES_DBRX)
    values = transformers.DbrxConfig(attn_config={"rope_theta": 5e5, "kv_n_heads": 8}).to_dict()
    del values["rope_parameters"]
    with pytest.raises(RopewalkError, match=r"500000\.0 in attn_config, .* computes with 10000"):
        config_from_json(values)
    assert config_from_json({**values, "rope_theta": 5e5}).full_attention_rope.rope_theta == 5e5


def granite(bases):
    config = transformers.GraniteSWAConfig(
        **{**tiny_config("granite_swa").to_dict(), "layer_rope_theta": bases}
    )
    return ModelConfig.of(config)


@pytest.mark.parametrize("wanted", [Default(8, 7e4), Yarn(8, 1e4, 8.0, 128)], ids=lambda method: method.name)
def test_bases_by_layer_are_read_and_replaced(wanted, tmp_path):
    """The rotary modules that layers of Granite use have the new RoPE, and layers without RoPE stay without."""
    own = granite([1e4, 0, 1e4, 1e4])
    assert [layer.rotates for layer in own.layers] == [True, False, True, True]
    assert not any("layer_rope_theta" in said for said in own.config_warnings)
    assert with_rope(own, own.full_attention_rope, CONTEXT).full_attention_rope == own.full_attention_rope
    with_rope(own, wanted, CONTEXT).source.save_pretrained(tmp_path)
    read = read_config(tmp_path)
    assert read.full_attention_rope == wanted
    assert [layer.rotates for layer in read.layers] == [True, False, True, True]
    model = transformers.AutoModelForCausalLM.from_config(read.source)
    (used,) = model.model.rotary_embs
    expected, factor = wanted.frequencies(CONTEXT)
    assert torch.allclose(used.inv_freq.double(), expected, rtol=1e-6, atol=0)
    assert used.attention_scaling == pytest.approx(factor, rel=1e-6)


def test_another_rope_is_refused_where_layers_have_different_bases():
    own = granite([1e4, 0, 5e4, 1e4])
    assert with_rope(own, own.full_attention_rope, CONTEXT).values["layer_rope_theta"] == [1e4, 0, 5e4, 1e4]
    with pytest.raises(RopewalkError, match=r"bases that differ from rope_theta: 50000"):
        with_rope(own, raised(own), CONTEXT)


def test_bases_by_layer_that_are_not_rope_theta_are_warned_of():
    (said,) = [each for each in granite([1e4, 0, 5e4, 1e4]).config_warnings if "layer_rope_theta" in each]
    assert "bases 10000, 50000" in said
