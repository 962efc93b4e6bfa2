"""Our attention and rotary module inside transformers models: parity, refusals, and no trace when saved."""

import copy
import json
import sys

import pytest
import torch
import transformers
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors.torch import load_file, save_file

from ropewalk import EngineError, PackedLayout, RopewalkError, load_model
from ropewalk.attention.choices import PATTERNS
from ropewalk.models.attention import hooks as attention_hooks
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.models.load import (
    ModelSetup,
    _refuse_sinks,
    attach,
    attention_spec,
    checkpoint_activations,
    empty_model,
    refuse_files,
)
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import (
    LongRope,
    RotaryEmbedding,
    Theta,
    method_for_target,
)
from tests.models.families import COMMON, FAMILIES, tiny_model
from tests.versions import missing

LAYOUTS = {
    pattern: PackedLayout.from_lengths([20, 1, 30, 12], pattern, 1 if pattern == "anchor" else 0, positions)
    for pattern, positions in zip(PATTERNS, ("continuous", "reset", "continuous"), strict=True)
}


def token_ids(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def dense_logits(model, ids, layout):
    """transformers' own eager attention with the layout's dense mask: the oracle."""
    blocked = torch.finfo(model.dtype).min
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=model.dtype)
    mask = mask.masked_fill(~layout.dense_mask(), blocked)
    return model(ids, attention_mask=mask, position_ids=layout.position_ids[None]).logits


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request):
    """(transformers' model, the same with our attention and rotary module)"""
    # torch multiplies the experts of a mixture in float32 at most.
    stock = tiny_model(request.param, torch.float32 if "moe" in request.param else torch.float64)
    ours = copy.deepcopy(stock)
    attach(ours)
    return stock, ours


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_equal_eager_attention_with_the_dense_mask(pair, pattern):
    stock, ours = pair
    layout = LAYOUTS[pattern]
    ids = token_ids(layout.total_length)
    expected, found = dense_logits(stock, ids, layout), ours(ids, layout=layout).logits
    # Both models are float64, but stock rotates with float32 angles and some norms run in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)


def test_generation_is_unchanged(pair):
    stock, ours = pair
    ids = token_ids(10)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert ours.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "cohere2", "glm4"])
def test_left_padded_batches_generate_as_before(family):
    stock = tiny_model(family)
    ours = copy.deepcopy(stock)
    attach(ours)
    ids = token_ids(8, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert ours.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()


def tiny_llama(**options):
    model = tiny_model("llama")
    attach(model, **options)
    return model


def test_a_packed_document_has_the_logits_it_has_alone():
    model = tiny_llama().double()
    for pattern, layout in LAYOUTS.items():
        ids = token_ids(layout.total_length)
        packed = model(ids, layout=layout).logits[0]
        for document in range(4):
            own = (layout.document_ids == document).nonzero().flatten()
            anchored = layout.anchor_length and pattern == "anchor"
            index = torch.cat([torch.zeros(1, dtype=torch.int64), own]) if anchored else own
            alone = PackedLayout.from_lengths([len(index)], "full", 0)
            # Alone it stands where it stands in the row: the distance to the anchor is part of what it sees.
            positions = layout.position_ids[None, index]
            logits = model(ids[:, index], layout=alone, position_ids=positions).logits[0, -len(own) :]
            # Norms of a Llama run in float32, so equal inputs may differ by float32 roundings.
            same = torch.allclose(logits, packed[own], rtol=0, atol=1e-6)
            assert same == (pattern != "full" or document == 0), (pattern, document)


def test_a_batch_may_hold_a_different_layout_a_row():
    model = tiny_llama()
    layouts = [PackedLayout.from_lengths([20, 43], "anchor"), PackedLayout.from_lengths([64], "full", 0)]
    ids = token_ids(64, batch=2)
    together = model(ids, layout=layouts).logits
    for row, layout in enumerate(layouts):
        torch.testing.assert_close(
            together[row], model(ids[row : row + 1], layout=layout).logits[0], rtol=0, atol=1e-6
        )


def test_gradient_checkpointing_gives_the_same_gradients():
    layout = LAYOUTS["anchor"]
    ids = token_ids(layout.total_length)
    gradients = []
    for checkpointing in (False, True):
        model = tiny_llama().train()
        if checkpointing:
            checkpoint_activations(model)
        model(ids, layout=layout).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_bfloat16_generation_sees_what_training_saw(cache):
    """Cached keys are float32 after an exact rotation; each logit must still equal the packed forward's."""
    model = tiny_llama().to(torch.bfloat16)
    ids = token_ids(24)
    out = model.generate(
        ids,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    layout = PackedLayout.from_lengths([31], "full", 0)
    packed = model(out.sequences[:, :-1], layout=layout).logits[0, 23:].float()
    steps = torch.cat(out.logits).float()
    # One bfloat16 rounding of a logit of this size; products of other shapes may round the other way.
    assert (steps - packed).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * packed.abs().max()


def test_exact_rope_survives_a_cast_to_bfloat16():
    model = tiny_llama().to(torch.bfloat16)
    rotary = rotary_module(model)[2]
    assert isinstance(rotary, RotaryEmbedding)
    inv_freq = rotary.frequencies().inv_freq
    expected = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-15, atol=0)


def test_transformers_own_rotary_module_can_stay():
    model = tiny_llama(exact_rope=False)
    assert type(rotary_module(model)[2]).__name__ == "LlamaRotaryEmbedding"
    layout = LAYOUTS["anchor"]
    assert model(token_ids(64), layout=layout).logits.isfinite().all()


def test_attached_again_a_model_takes_the_new_engine():
    model = tiny_llama(engine="reference")
    attach(model, engine="flex")
    with pytest.raises(EngineError, match="flex has no backward"):
        model(token_ids(64), layout=LAYOUTS["anchor"])
    attach(model, engine="sdpa")
    assert model(token_ids(64), layout=LAYOUTS["anchor"]).logits.isfinite().all()


def test_position_ids_given_override_the_layouts():
    model = tiny_llama()
    ids, layout = token_ids(64), LAYOUTS["anchor"]
    shifted = model(ids, layout=layout, position_ids=layout.position_ids[None] * 3).logits
    assert (shifted - model(ids, layout=layout).logits).abs().max() > 1e-3


def call(model, **options):
    layout = options.pop("layout", LAYOUTS["anchor"])
    return model(token_ids(64), layout=layout, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 64)}, "leave attention_mask out"),
        ({"past_key_values": transformers.DynamicCache()}, "cannot use a key/value cache"),
        ({"layout": PackedLayout.from_lengths([10])}, "describes 11 tokens, but the row has 64"),
        ({"layout": [LAYOUTS["anchor"]] * 2}, "got 2 layouts for a batch of 1"),
    ],
)
def test_calls_that_contradict_the_layout_are_refused(options, message):
    with pytest.raises(RopewalkError, match=message):
        call(tiny_llama(), **options)


def test_a_refused_call_leaves_the_model_usable():
    model = tiny_llama()
    with pytest.raises(RopewalkError):
        call(model, attention_mask=torch.ones(1, 64))
    assert attention_hooks._current.get() is None
    assert model.generate(token_ids(4), max_new_tokens=2, pad_token_id=0).shape == (1, 6)


def test_restarting_positions_without_a_layout_are_refused():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(RopewalkError, match="describe the documents with layout="):
        tiny_llama()(token_ids(5), position_ids=positions)


def test_an_architecture_that_drops_the_layout_is_refused():
    config = transformers.StableLmConfig(**COMMON)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    attach(model, exact_rope=False)
    with pytest.raises(EngineError, match="does not pass keyword arguments"):
        model(token_ids(64), layout=LAYOUTS["anchor"])


def test_attention_dropout_in_training_is_refused():
    config = transformers.LlamaConfig(**{**COMMON, "attention_dropout": 0.1})
    model = transformers.AutoModelForCausalLM.from_config(config)
    attach(model)
    with pytest.raises(EngineError, match=r"attention dropout 0\.1"):
        model.train()(token_ids(64), layout=LAYOUTS["anchor"])


def test_other_layer_types_are_refused_by_name():
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(EngineError, match="layers of type linear_attention"):
        attach(model)


def test_a_rotary_module_that_contradicts_the_config_is_refused():
    model = tiny_model("llama")
    rotary_module(model)[2].inv_freq.mul_(1.01)
    with pytest.raises(
        RopewalkError, match=r"differ by up to \d.* from those of the RoPE in the model's config; keep"
    ):
        attach(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_converted_before_it_is_attached_is_refused_with_a_number(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        RopewalkError,
        match=rf"differ by up to \d\.\de-\d+ .*, because its inv_freq is in {name}; call attach before the model",
    ):
        attach(tiny_model("llama", dtype))
    model = tiny_model("llama")
    attach(model)
    assert model.to(dtype)(token_ids(64), layout=LAYOUTS["anchor"]).logits.isfinite().all()


def test_a_rotary_module_without_numbers_is_refused():
    model = tiny_model("llama")
    rotary_module(model)[2].inv_freq[1:] = torch.nan
    with pytest.raises(RopewalkError, match="differ by up to nan"):
        attach(model)


def test_a_rotary_module_of_other_shapes_is_refused():
    model = tiny_model("llama")
    stock = rotary_module(model)[2]
    stock.inv_freq = stock.inv_freq[1:]
    with pytest.raises(RopewalkError, match=r"LlamaRotaryEmbedding returns cos and sin in shapes"):
        attach(model)


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_new_rope_is_written_into_the_config(checkpoint):
    model = load_model(checkpoint, ModelSetup(rope=Theta(rotary_dim=8, rope_theta=5e5)))
    assert model.config.rope_parameters["rope_theta"] == 5e5
    assert rotary_module(model)[2].frequencies().inv_freq[1] == pytest.approx(5e5 ** (-2 / 8), rel=1e-15)


def test_a_method_that_the_config_cannot_hold_is_refused_by_name(tmp_path):
    tiny_model("phi3").save_pretrained(tmp_path)
    (current,) = read_config(tmp_path).methods.values()
    with pytest.raises(
        RopewalkError, match=r"phi3 cannot express the RoPE method linear.*use the method theta"
    ):
        load_model(tmp_path, ModelSetup(rope=method_for_target("linear", current, 256, 1024)))


def test_start_tokens_run_in_our_module_only(checkpoint):
    factors = tuple(1.0 + i for i in range(4))
    rope = LongRope(
        rotary_dim=8,
        rope_theta=1e4,
        short_factor=(1.0,) * 4,
        long_factor=factors,
        attention_factor=1.1,
        original_max_position_embeddings=16,
        start_tokens=4,
    )
    assert (
        rotary_module(load_model(checkpoint, ModelSetup(rope=rope)))[2].frequencies(total_length=64)
        is not None
    )
    with pytest.raises(RopewalkError, match="start_tokens above 0"):
        load_model(checkpoint, ModelSetup(rope=rope, exact_rope=False))


def test_engines_are_asked_for_the_widths_that_attention_has():
    latent = transformers.DeepseekV3Config(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert attention_spec(ModelConfig.of(latent), "cpu", torch.float32).widths == (192, 128)
    assert attention_spec(
        ModelConfig.of(transformers.Qwen3Config(head_dim=96)), "cpu", torch.float32
    ).widths == (96, 96)
    plain = transformers.GPTNeoXConfig(hidden_size=512, num_attention_heads=8)
    assert attention_spec(ModelConfig.of(plain), "cpu", torch.float32).widths == (64, 64)


BAD_LAYERS = [
    ("qwen2", {"sliding_window": 0}, "sliding_window is 0"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "quantum", "full_attention"]},
        "'quantum' .* for layer 1, a type",
    ),
    ("qwen2", {"layer_types": ["full_attention", 3, "full_attention"]}, "layer_types is 3 .* for layer 1"),
    (
        "qwen2",
        {"layer_types": ["full_attention"] * 2},
        "layer_types lists 2 layers, but the model has 3 layers, 0 to 2",
    ),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "layer 0 is of type"),
    ("qwen2", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ("gpt_oss", {"sliding_window": None}, "layer 0 is of type sliding_attention .* sliding_window is null"),
    ("gemma3", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern is 0"),
    ("llama4", {"attention_chunk_size": None}, "layer 0 is of type chunked_attention"),
    ("llama4", {"no_rope_layers": [1, 1]}, "no_rope_layers lists 2 layers"),
]


@pytest.mark.parametrize(("family", "keys", "said"), BAD_LAYERS)
def test_layers_that_a_config_says_wrong_are_refused_by_number_before_weights(family, keys, said, tmp_path):
    # There are no weights: whoever looked for them would say so.
    write_config(tiny_model(family, sharp=True).config, tmp_path, keys)
    for read in (read_config, lambda model: read_model_config(model).layers, load_model):
        with pytest.raises(RopewalkError, match=said):
            read(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        (
            "gemma3",
            {"layer_types": ["conv"] + ["full_attention"] * 5},
            # Where transformers refuses them itself, it is in its words.
            r"layers of type conv \(first in layer 0\)|Gemma3TextConfig rejects the config .* 'conv'",
        ),
        (
            "ministral",
            {"sliding_window": None, "layer_types": ["full_attention"] * 3},
            "sliding_window null .* transformers runs models of type ministral",
        ),
    ],
)
def test_what_packed_rows_cannot_pass_is_refused_before_weights(family, keys, said, tmp_path):
    write_config(tiny_model(family, sharp=True).config, tmp_path, keys)
    with pytest.raises(RopewalkError, match=said):
        load_model(tmp_path)


def write_config(config, folder, keys):
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_a_wrong_count_of_sinks_is_refused_by_layer_before_weights_are_read(tmp_path, monkeypatch):
    tiny_model("gpt_oss", sharp=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.sinks"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    for load in (load_model, empty_model):
        with pytest.raises(RopewalkError, match=r"layer 1 .* sinks of shape \[3\].*num_attention_heads 4"):
            load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(RopewalkError, match=r"cannot load the model in .*: model\.safetensors: "):
        load_model(tmp_path)


def test_a_wrong_count_of_sinks_on_the_hub_is_refused_from_headers(tmp_path, monkeypatch):
    """Before weights are downloaded; where headers cannot be read, loading says what is wrong."""
    tiny_model("gpt_oss", sharp=True).config.save_pretrained(tmp_path)
    asked = []

    def headers(self, repo_id):
        asked.append(repo_id)
        if len(asked) > 1:
            raise OfflineModeIsEnabled("offline")
        tensor = TensorInfo("F32", [3], (0, 12))
        files = {"a.safetensors": SafetensorsFileMetadata({}, {"model.layers.1.self_attn.sinks": tensor})}
        return SafetensorsRepoMetadata(None, True, {}, files)

    monkeypatch.setattr("huggingface_hub.HfApi.get_safetensors_metadata", headers)
    config = read_config(tmp_path)
    with pytest.raises(RopewalkError, match=r"layer 1 .* in me/model has attention sinks of shape \[3\]"):
        _refuse_sinks("me/model", config)
    _refuse_sinks("me/model", config)
    assert asked == ["me/model"] * 2


def test_a_key_that_a_class_misses_is_named(tmp_path):
    """The rotary module of Cohere Compass reads RoPE parameters by layer type alone."""
    config_class = getattr(transformers, "CohereCompassTextConfig", None) or missing(
        "CohereCompassTextConfig"
    )
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = {**COMMON, "model_type": config_class.model_type, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RopewalkError, match="cohere_compass_text reads the key 'full_attention'"):
        empty_model(tmp_path)


def test_weights_beside_an_adapter_are_refused_before_they_are_read(checkpoint, monkeypatch):
    """transformers adds the adapter to weights that may contain it already."""
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    for read in (load_model, empty_model, read_config):
        with pytest.raises(
            RopewalkError, match=r"both the weights of a model and adapter_config\.json.* move"
        ):
            read(checkpoint)


def test_a_hub_model_beside_an_adapter_is_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (checkpoint / "adapter_config.json").write_text("{}")
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    with pytest.raises(RopewalkError, match=r"some/model contains both .* adapter_config\.json"):
        refuse_files("some/model")


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (
            "config.json",
            {"pad_token_id": 97},
            "pad_token_id is 97 in the config of .*, but vocab_size is 97; set ",
        ),
        (
            "config.json",
            {"pad_token_id": -1000},
            "pad_token_id is -1000 in the config of .*, but vocab_size is 97",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True}},
            "are quantized .awq., and the package that they need is not installed: .*; give the checkpoint that they",
        ),
        ("generation_config.json", [], "cannot load the model in "),
    ],
)
def test_what_transformers_cannot_load_is_refused_in_one_sentence(tmp_path, monkeypatch, file, change, said):
    for package in ("gptqmodel", "awq"):
        monkeypatch.setitem(sys.modules, package, None)
    tiny_model("llama").save_pretrained(tmp_path)
    before = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**before, **change} if change else change))
    with pytest.raises(RopewalkError, match=said) as caught:
        load_model(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_token_for_padding_outside_the_embedding_is_refused_before_weights_are_sharded(tmp_path):
    config = tiny_model("llama").config
    config.pad_token_id = 97
    config.save_pretrained(tmp_path)
    with pytest.raises(RopewalkError, match=r"pad_token_id is 97 .*, but vocab_size is 97"):
        empty_model(tmp_path)
