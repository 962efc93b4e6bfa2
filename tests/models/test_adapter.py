"""LoRA in a model in memory: where it goes, what it trains, its initial values, saving and merging."""

import warnings

import peft
import pytest
import torch
import transformers

from ropewalk import RopewalkError
from ropewalk.models.adapter import (
    NewAdapter,
    adapter_of,
    merge_adapter,
    places_of,
    read_adapter,
    save_adapter,
    trained_parameters,
)
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import empty_model
from tests.marks import slow_after
from tests.models.attention import standin_kernels
from tests.models.families import COMMON, FAMILIES, tiny_model


def settings(**values):
    return AdapterSettings(**{"rank": 4, **values})


def with_adapter(model, seed=0, **values):
    NewAdapter(settings(**values), seed, "base", 0, 0).add_to(model)
    return model


def fill(model, seed=1):
    """Other values for all that is trained, so that the adapter changes something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def logits(model):
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_new_adapter_changes_no_output_and_the_merged_one_nothing_else(family, tmp_path):
    model = tiny_model(family).eval()
    before, weights = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    names = dict(model.named_parameters()).keys()
    state = torch.get_rng_state()
    with_adapter(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(model), before)
    fill(model)
    changed = logits(model)
    assert (changed - before).abs().max() > 1e-3
    merge_adapter(model)
    assert adapter_of(model) is None
    assert dict(model.named_parameters()).keys() == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(logits(model), changed, rtol=1e-4, atol=1e-4)
    attention = ("attn", "attention", "mixer")
    for name, value in model.state_dict().items():
        may_change = "norm" in name or "embed" in name or name == "lm_head.weight"
        if not may_change and not any(each in name for each in attention):
            assert torch.equal(value, weights[name]), name


def test_only_what_the_recipe_names_is_trained():
    model = with_adapter(tiny_model("llama"), targets=["q_proj", "up_proj"], also_train=["norms"])
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == set(trained_parameters(model))
    assert {name.rsplit(".lora_", 1)[0].rpartition(".")[2] for name in trained if "lora_" in name} == {
        "q_proj",
        "up_proj",
    }
    norms = {name for name in trained if "lora_" not in name}
    assert norms == {name for name, _ in tiny_model("llama").named_parameters() if "norm" in name}


def test_one_layer_may_have_an_adapter_alone():
    model = with_adapter(tiny_model("llama"), targets=["layers.1.self_attn.q_proj"], also_train=[])
    layer = "model.layers.1.self_attn.q_proj"
    assert set(trained_parameters(model)) == {f"{layer}.lora_{each}.default.weight" for each in "AB"}
    adapter = adapter_of(model)
    assert adapter is not None
    assert adapter.config.target_modules == {layer}


def test_groups_of_layers_mean_what_their_names_say():
    model = tiny_model("llama")
    targets, whole = places_of(settings(targets=["attention"], also_train=["embeddings"]), model)
    assert {name.rpartition(".")[2] for name in targets} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert whole == ["model.embed_tokens"]
    everything, _ = places_of(settings(targets=["all-linear"], also_train=[]), model)
    linear = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert set(everything) == linear - {"lm_head"}
    both, _ = places_of(settings(targets=["attention", "q_proj"]), model)
    assert both == targets


@pytest.mark.parametrize("family", slow_after(1, ["granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"]))
def test_no_adapter_is_passed_by_a_kernel(family, monkeypatch):
    model = tiny_model(family, sharp=True, shallow=True)
    mixer = mixers_of(model, ModelConfig.of(model.config))[0]
    with pytest.raises(
        RopewalkError, match=r"adapter.targets.1 is 'out_proj', which .* choose from attention"
    ):
        with_adapter(model, targets=["attention", "out_proj"])
    with_adapter(model, targets=["all-linear"])
    fill(model)
    expected = logits(model.eval())
    calls = standin_kernels.install(monkeypatch, type(mixer))
    found = logits(model.train())
    assert "mamba_split_conv1d_scan_combined" in [name for name, _ in calls]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"targets": ["q_prj"]},
            r"adapter.targets.0 is 'q_prj', but the model has no .*; did you mean q_proj\?",
        ),
        (
            {"targets": ["attention", "nothing"]},
            "adapter.targets.1 is 'nothing'.*choose from attention, all-linear, q_proj",
        ),
        (
            {"targets": ["self_attn"]},
            "'self_attn', which is of class LlamaAttention and can have no adapter; choose from",
        ),
        (
            {"targets": ["lm_head"]},
            "'lm_head', which is the output head and can have no adapter; choose from",
        ),
        ({"targets": ["embed_tokens"]}, "which is of class Embedding and"),
        (
            {"rank": 1000},
            r"adapter.rank is 1000, but can be at most \d+ for model.layers.0.self_attn.q_proj, which has ",
        ),
    ],
)
def test_places_that_do_not_exist_are_refused_with_those_that_do(values, message):
    with pytest.raises(RopewalkError, match=message) as refusal:
        places_of(settings(**values), tiny_model("llama"))
    assert "\n" not in str(refusal.value)


def test_initial_values_depend_on_the_seed_alone():
    first, again, other = (with_adapter(tiny_model("llama"), seed) for seed in (0, 0, 1))
    a, b, c = (
        {name: each for name, each in trained_parameters(model).items() if "lora_" in name}
        for model in (first, again, other)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if "lora_A" in name)
    assert not any(each.any() for name, each in a.items() if "lora_B" in name)
    # As nn.Linear draws: uniform between plus and minus the root of 1 / inputs.
    bound = a["model.layers.0.self_attn.q_proj.lora_A.default.weight"].shape[1] ** -0.5
    drawn = torch.cat(
        [each.flatten() for name, each in a.items() if "lora_A" in name and "o_proj" not in name]
    )
    assert bound * 0.9 < drawn.abs().max() <= bound


def test_trained_parameters_have_their_dtype_and_frozen_ones_theirs():
    model = tiny_model("llama")
    exact = {name: each.clone() for name, each in model.named_parameters()}
    NewAdapter(settings(), 0, "base", 0, 0).add_to(model, torch.float32, torch.bfloat16)
    for name, each in model.named_parameters():
        assert each.dtype == (torch.float32 if each.requires_grad else torch.bfloat16), name
    for name, each in trained_parameters(model).items():
        if "lora_" not in name:
            assert torch.equal(each, exact[name]), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "chosen",
    [
        {"targets": ["all-linear"]},
        # The name q_proj alone would mean all layers.
        {"targets": ["layers.1.self_attn.q_proj", "up_proj"], "also_train": ["norms"]},
    ],
    ids=["all", "one layer"],
)
def test_plain_peft_reads_what_was_saved(tmp_path, tied, chosen):
    config = transformers.LlamaConfig(**COMMON, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "base")
    with_adapter(model, **chosen)
    fill(model)
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter", trained_parameters(model))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=config)
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 for an attribute under its old name.
        warnings.simplefilter("ignore", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    found = read_adapter(tmp_path / "adapter", trained_parameters(model))
    assert all(torch.equal(found[name], each) for name, each in trained_parameters(model).items())


def test_the_adapter_for_a_model_counts_its_parameters(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    new = NewAdapter.on(settings(), 0, "base", empty_model(tmp_path))
    with_adapter(model)
    assert new.trained == sum(each.numel() for each in trained_parameters(model).values())
    assert new.trained + new.frozen == sum(each.numel() for each in model.parameters())
    assert f"{new.trained:,} of {new.trained + new.frozen:,} parameters" in str(new)


def test_a_file_with_weights_that_the_adapter_lacks_is_refused(tmp_path):
    model = with_adapter(tiny_model("llama"))
    save_adapter(model, tmp_path, trained_parameters(model))
    fewer = [name for name in trained_parameters(model) if "q_proj" not in name]
    with pytest.raises(RopewalkError, match=r"has the weight .*layers\.0\.self_attn\.q_proj\.lora_A\.weight"):
        read_adapter(tmp_path, fewer)
