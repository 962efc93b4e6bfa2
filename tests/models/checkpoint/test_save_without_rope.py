"""A model without RoPE in plain transformers: the model that was trained, in every family that may lose its RoPE."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import STAND_STILL
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.rope import NoRope
from tests.models.every_family import tiny_model

LENGTH = 256
LONGER = 3 * LENGTH


def plain(folder, family):
    # Gemma 2 caps its scores, which torch's own attention cannot.
    attention = "eager" if family == "gemma2" else "sdpa"
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention, use_safetensors=True
    )
    return loaded.eval()


def without_rotation(model):
    """The same model in which every rotary module returns cos = 1 and sin = 0: what DroPE defines."""

    def still(module, args, kwargs, output):
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(still, with_kwargs=True)
    return model


def saved(folder, family):
    model = tiny_model(family, torch.float64)
    if family == "phi3":
        # Its class has a longer original length than the tiny model's context.
        model.config.original_max_position_embeddings = LENGTH
    model.save_pretrained(folder)
    return read_config(folder)


@pytest.mark.parametrize("family", STAND_STILL)
def test_the_exported_model_is_the_trained_one_and_rotates_nothing(tmp_path, family):
    config = saved(tmp_path / "with", family)
    assert config.max_position_embeddings == LENGTH
    method = NoRope(config.full_attention_rope.rotary_dim, config.full_attention_rope.rope_theta, LENGTH)
    trained = load_model(tmp_path / "with", ModelSetup(method, 2 * LENGTH), torch.float64)
    save_model(trained, tmp_path / "without")
    exported = plain(tmp_path / "without", family)
    ids = torch.randint(3, 90, (1, LONGER), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = exported(ids).logits
        # On a loaded model: its attention is the exported one's, whose softmax is of float64 only in sdpa.
        assert (trained(ids).logits - found).abs().max() < 1e-12
        assert (without_rotation(plain(tmp_path / "with", family))(ids).logits - found).abs().max() < 1e-12
        # The rotation that was lost matters.
        assert (plain(tmp_path / "with", family)(ids).logits - found).abs().max() > 0.1
    read = read_config(tmp_path / "without")
    assert [type(each) for each in read.methods.values()] == [NoRope]
    assert not any(layer.rotates for layer in read.layers)
    assert read.trained_length == read.max_position_embeddings == 2 * LENGTH


def test_one_layer_that_still_rotates_shows(tmp_path):
    """What the comparison above is for: it fails if a single layer of a model keeps its RoPE."""
    saved(tmp_path / "with", "smollm3")
    model = plain(tmp_path / "with", "smollm3")
    model.config.no_rope_layers = [1, *[0] * (len(model.model.layers) - 1)]
    still, one = (without_rotation(plain(tmp_path / "with", "smollm3")), model)
    for layer, rotates in zip(one.model.layers, one.config.no_rope_layers, strict=True):
        layer.self_attn.use_rope = bool(rotates)
    ids = torch.randint(3, 90, (1, LONGER), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (still(ids).logits - one(ids).logits).abs().max() > 1e-3


def test_other_families_are_refused_by_name(tmp_path):
    saved(tmp_path, "gemma3_text")
    method = NoRope(8, 1e4, LENGTH)
    with pytest.raises(RopewalkError, match=r"\(method 'none'\) were compared .*, and not for gemma3_text;"):
        load_model(tmp_path, ModelSetup(method, LENGTH))
