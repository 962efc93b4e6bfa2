"""A model without RoPE in plain transformers: the model that was trained, in every family that may lose its RoPE."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.compute.float64 import KeepFloat64
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import STAND_STILL
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.rope import NoRope, method_for_target
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


def still_in(model, layers):
    """The same model in which these layers get cos = 1 and sin = 0."""

    def still(module, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    for number in layers:
        model.model.layers[number].register_forward_pre_hook(still, with_kwargs=True)
    return model


def plain_llama(folder, layers=(0, 2), **own):
    """A saved tiny model without windows, its method without RoPE in some layers, and ids."""
    model = tiny_model(own.pop("family", "llama"), torch.float64)
    for key, value in own.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder)
    config = read_config(folder)
    return method_for_target(
        "none", config.full_attention_rope, LENGTH, LENGTH, parameters={"layers": layers}
    )


IDS = torch.randint(3, 90, (1, LONGER), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("family", "own"),
    [("llama", {}), ("mistral", {"sliding_window": None}), ("smollm3", {"no_rope_layers": [1, 1, 1, 1]})],
)
def test_named_layers_lose_their_rope_as_smollm3_with_the_same_weights(tmp_path, family, own):
    method = plain_llama(tmp_path / "with", family=family, **own)
    # With transformers' own angles in the layers that rotate: ours are of float64, and differ from them by 1e-5.
    setup = ModelSetup(method, 2 * LENGTH, exact_rope=False)
    trained = load_model(tmp_path / "with", setup, torch.float64)
    save_model(trained, tmp_path / "without")
    exported = plain(tmp_path / "without", family)
    with torch.no_grad():
        found = exported(IDS).logits
        assert (trained(IDS).logits - found).abs().max() < 1e-12
        assert (still_in(plain(tmp_path / "with", family), (0, 2))(IDS).logits - found).abs().max() < 1e-12
        # One layer more, or one less, that rotates is another model.
        for other in ((0,), (2,), (0, 1, 2), (0, 1, 2, 3)):
            model = still_in(plain(tmp_path / "with", family), other)
            assert (model(IDS).logits - found).abs().max() > 1e-3
    read = read_config(tmp_path / "without")
    assert read.model_type == "smollm3"
    assert [layer.rotates for layer in read.layers] == [False, True, False, True]
    # Read again as what it is, with the same method, as a run does before its last evaluation.
    again = load_model(tmp_path / "without", setup, torch.float64)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, trained(IDS).logits)


def normed_heads(model):
    """The same model with an RMSNorm of weight 1 on the queries and keys of each head, by hand."""
    eps, width = model.config.rms_norm_eps, model.model.layers[0].self_attn.head_dim

    def normed(module, args, output):
        heads = output.unflatten(-1, (-1, width))
        return (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)

    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(normed)
        layer.self_attn.k_proj.register_forward_hook(normed)
    return model


@pytest.mark.parametrize(("family", "own"), [("llama", {}), ("mistral", {"sliding_window": None})])
def test_norms_of_queries_and_keys_make_it_a_qwen3(tmp_path, family, own):
    config = plain_llama(tmp_path / "with", family=family, **own).kept
    method = NoRope(config.rotary_dim, config.rope_theta, LENGTH, qk_norm=True)
    trained = load_model(tmp_path / "with", ModelSetup(method, LENGTH), torch.float64)
    save_model(trained, tmp_path / "without")
    exported = plain(tmp_path / "without", family)
    assert exported.config.model_type == "qwen3"
    # Norms and the softmax stay in float64, as by hand.
    with torch.no_grad(), KeepFloat64():
        found = exported(IDS).logits
        expected = normed_heads(without_rotation(plain(tmp_path / "with", family)))(IDS).logits
        assert (trained(IDS).logits - found).abs().max() < 1e-12
        assert (expected - found).abs().max() < 1e-12
        assert (without_rotation(plain(tmp_path / "with", family))(IDS).logits - found).abs().max() > 1e-3
    # Trained norms are kept by a later load.
    for layer in exported.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 3.0)
    exported.save_pretrained(tmp_path / "trained")
    again = load_model(tmp_path / "trained", ModelSetup(method, LENGTH), torch.float64)
    assert (again.model.layers[0].self_attn.q_norm.weight == 3).all()


@pytest.mark.parametrize(
    ("family", "own", "sentence"),
    [
        ("llama", {"attention_bias": True}, "and its layers have biases; leave out qk_norm"),
        ("qwen2", {}, "and its layers are not those of qwen3 without these norms; leave out qk_norm"),
        ("olmo2", {}, "and its layers are not those of qwen3 without these norms; leave out qk_norm"),
        ("mistral", {"sliding_window": 7}, "and its layers have a window of 7 tokens; leave out qk_norm"),
    ],
)
def test_norms_that_no_config_can_state_are_refused(tmp_path, family, own, sentence):
    plain_llama(tmp_path, family=family, **own)
    with pytest.raises(RopewalkError, match=sentence):
        load_model(tmp_path, ModelSetup(NoRope(8, 1e4, LENGTH, qk_norm=True), LENGTH))


@pytest.mark.parametrize(
    ("family", "own", "layers", "sentence"),
    [
        (
            "qwen2",
            {},
            (0,),
            "and its queries, keys and values have biases and its outputs none; drop the RoPE of all",
        ),
        ("qwen3", {}, (0,), "and it normalizes queries and keys; drop the RoPE of all layers"),
        ("granite", {}, (0,), "and its layers are not those of smollm3; drop the RoPE of all layers"),
        (
            "mistral",
            {"sliding_window": 7},
            (0,),
            "and its layers have a window of 7 tokens; drop the RoPE of all",
        ),
        ("llama", {}, (4,), "4 is no layer of the model, which has 4, 0 to 3"),
        ("llama", {}, (0, 1, 2, 3), r"\[0, 1, 2, 3\] are all layers that have RoPE; leave 'layers' out"),
    ],
)
def test_layers_that_no_config_can_name_are_refused(tmp_path, family, own, layers, sentence):
    method = plain_llama(tmp_path, layers, family=family, **own)
    with pytest.raises(RopewalkError, match=sentence):
        load_model(tmp_path, ModelSetup(method, LENGTH))


def test_other_families_are_refused_by_name(tmp_path):
    saved(tmp_path, "gemma3_text")
    method = NoRope(8, 1e4, LENGTH)
    with pytest.raises(RopewalkError, match=r"\(method 'none'\) were compared .*, and not for gemma3_text;"):
        load_model(tmp_path, ModelSetup(method, LENGTH))
