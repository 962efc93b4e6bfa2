"""The audit as a whole: what it refuses and what it leaves as it was."""

import pytest
import torch
import transformers

from ropewalk import PackedLayout, RopewalkError
from ropewalk.audit import AuditSettings, audit_model
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.models.rope.rotary import swap_rotary
from ropewalk.rope import methods_from_config
from tests.audit.audit_cases import changed, sharp_llama, token_rows
from tests.marks import slow_after

SETTINGS = AuditSettings(shifts=(0, 16, 1000), ablation_samples=2)
BRIEF = changed(SETTINGS, shifts=(0, 16), ablation_samples=1, random_control=False)


@pytest.fixture(scope="module")
def rows():
    return token_rows(3, 48)


@pytest.fixture(scope="module")
def found(rows):
    return audit_model(sharp_llama(), rows, SETTINGS)


@pytest.fixture(scope="module")
def again(rows):
    """The same audit once more, and what it told of its progress."""
    told = []
    return audit_model(sharp_llama(), rows, SETTINGS, progress=lambda *each: told.append(each)), told


@pytest.mark.slow
def test_progress_counts_to_its_total(again):
    _, told = again
    # Four series of three rows and of two, and two rows each of eight ablations, nine mitigations and one experiment.
    assert [(done, total) for done, total, _ in told] == [(done, 56) for done in range(1, 57)]
    labels = list(dict.fromkeys(label for _, _, label in told))
    assert labels == [
        "drift",
        "drift of the random control",
        "ablation",
        "first-token experiment",
        "mitigations",
    ]


def test_the_model_is_the_same_afterwards(rows):
    model = sharp_llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    logits = model(rows[0][None]).logits
    audit_model(model, rows[:1], changed(SETTINGS, ablation_samples=1))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model(rows[0][None]).logits, logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_twice_is_the_same(found, again):
    second, _ = again
    assert second.drift == found.drift or _same(second.drift, found.drift)
    assert second.ablation == found.ablation
    assert second.first_token == found.first_token


def _same(a, b):
    return [str(each) for each in a] == [str(each) for each in b]


def test_a_model_with_exact_angles_has_none_to_mend(rows):
    model = sharp_llama()
    swap_rotary(model, methods_from_config(model.config.to_dict()))
    found = audit_model(model, rows[:1], changed(SETTINGS, random_control=False, ablation_samples=1))
    by = {(d.angles, d.delta1): d.D for d in found.drift if d.dtype == "float32"}
    # Its cos and sin are float32 too: the roundings of the two are other ones, of the same size.
    assert by["model", 1000] < 3 * by["exact", 1000]


def test_qwen_without_bos_and_with_biases_and_tied_embeddings():
    config = transformers.Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = audit_model(model, token_rows(1, 48), BRIEF)
    assert found.drift[0].D > 0
    assert found.ablation[0].D < 1e-7


@pytest.mark.parametrize("family", slow_after(1, ["gemma3", "gemma2"]))
def test_soft_capping_and_layer_types(family):
    common = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "max_position_embeddings": 64,
    }
    name = {"gemma2": "Gemma2Config", "gemma3": "Gemma3TextConfig"}[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**common)).eval()
    found = audit_model(model, token_rows(1, 48), BRIEF)
    assert found.ablation[0].D < 1e-7


def test_layouts_must_be_of_the_rows(rows):
    with pytest.raises(RopewalkError, match="3 rows of 48 tokens need 3 layouts of 48 tokens"):
        audit_model(sharp_llama(), rows, SETTINGS, [PackedLayout.from_lengths([47], "full", 0)] * 3)


def test_a_model_that_normalises_after_rotation_is_refused_by_name():
    config = transformers.HunYuanDenseV1Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.query_layernorm.weight, 0.5, 2.0)
    with pytest.raises(
        RopewalkError, match="layer 0 of HunYuanDenseV1ForCausalLM does more to queries and keys"
    ):
        AuditedModel.of(model)


def test_the_random_control_is_random(rows, monkeypatch):
    """And is the control that its seed gives: not the trained model, nor another one each time."""
    # What comes after the drift would take most of the time.
    for after in ("ablate_steps", "first_token_effects", "measure_mitigations"):
        monkeypatch.setattr(f"ropewalk.audit.run.{after}", lambda *_: ())
    brief = changed(SETTINGS, dtypes=("bfloat16",), shifts=(0, 16))
    controls = []
    for seed in (SETTINGS.seed, SETTINGS.seed, 7):
        found = audit_model(sharp_llama(), rows[:2], changed(brief, seed=seed))
        by = {
            d.parameters: d.D
            for d in found.drift
            if (d.dtype, d.angles, d.delta1) == ("bfloat16", "model", 0)
        }
        assert by["random"] < by["pretrained"] / 10
        controls.append(by["random"])
    assert controls[0] == controls[1] != controls[2]
