"""The audit as a whole: what it refuses, what it leaves as it was, and the sentences it ends in."""

from dataclasses import replace

import pytest
import torch
import transformers

from ropewalk import PackedLayout, RopewalkError
from ropewalk.audit import AuditSettings, audit_model, finding, forward_passes
from ropewalk.audit.results import best_mitigation
from ropewalk.models.intercept import AuditedModel
from ropewalk.models.rotary import swap_rotary
from ropewalk.rope import methods_from_config
from tests.audit.audit_cases import sharp_llama, token_rows

SETTINGS = AuditSettings(shifts=(0, 16, 1000), ablation_samples=2)


def changed(settings, **values):
    return settings.model_copy(update=values)


@pytest.fixture(scope="module")
def rows():
    return token_rows(3, 48)


@pytest.fixture(scope="module")
def found(rows):
    return audit_model(sharp_llama(), rows, SETTINGS)


@pytest.fixture(scope="module")
def again(rows):
    """The same audit once more without costs, and what it told of its progress."""
    told = []
    settings = changed(SETTINGS, costs=False)
    return (
        audit_model(sharp_llama(), rows, settings, progress=lambda *each: told.append(each)),
        settings,
        told,
    )


def test_progress_counts_every_forward_pass(again):
    _, settings, told = again
    assert [done for done, _, _ in told] == list(range(1, forward_passes(settings, 3) + 1))
    assert {total for _, total, _ in told} == {forward_passes(settings, 3)}
    labels = list(dict.fromkeys(label for _, _, label in told))
    assert labels == ["drift", "drift of the random control", "ablation", "first token", "mitigations"]


def test_the_model_is_the_same_afterwards(rows):
    model = sharp_llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    logits = model(rows[0][None]).logits
    audit_model(model, rows[:1], changed(SETTINGS, ablation_samples=1))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model(rows[0][None]).logits, logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_twice_is_the_same(found, again):
    second, *_ = again
    assert second.drift == found.drift or _same(second.drift, found.drift)
    assert second.ablation == found.ablation
    assert second.first_token == found.first_token


def _same(a, b):
    return [str(each) for each in a] == [str(each) for each in b]


def test_a_model_with_exact_angles_has_none_to_mend(rows):
    model = sharp_llama()
    swap_rotary(model, methods_from_config(model.config.to_dict()))
    found = audit_model(model, rows[:2], changed(SETTINGS, random_control=False, ablation_samples=1))
    by = {(d.angles, d.delta1): d.D for d in found.drift if d.dtype == "float32"}
    # Its cos and sin are float32 too: the roundings of the two are other ones, of the same size.
    assert by["model", 1000] < 3 * by["exact", 1000]
    assert {mitigation.reason for mitigation in found.mitigations} == {
        "the model runs ropewalk's rotary module already; load it with exact_rope=False"
    }


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
    found = audit_model(model, token_rows(2, 48), changed(SETTINGS, costs=False, ablation_samples=1))
    assert found.drift[0].D > 0
    assert found.ablation[0].D < 1e-7


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
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
    found = audit_model(model, token_rows(2, 48), changed(SETTINGS, ablation_samples=1))
    assert found.ablation[0].D < 1e-7
    fused = next(mitigation for mitigation in found.mitigations if mitigation.name == "fused attention")
    assert (fused.reason is not None) == (family == "gemma2")


def test_the_finding_is_three_sentences_with_the_audits_own_figures(found):
    size, cause, mitigation = finding(found)
    near = next(d for d in found.drift if d.dtype == "bfloat16" and d.delta1 == 0)
    share = f"{near.moved:.1%}" if near.moved >= 0.001 else f"{100 * near.moved:.1g}%"
    assert f"{share} of all attention lands on other tokens (D = {near.D:.3g})" in size
    assert "with random weights D =" in size
    first = next(e for e in found.first_token if e.shifted == "first")
    assert f"accounts for {first.share_of_D:.1%}" in cause or "contributes nothing" in cause
    assert "on 2 rows" in cause
    best = best_mitigation(found)
    assert best is not None
    assert mitigation.startswith(best.name.capitalize())
    for sentence in (size, cause, mitigation):
        assert sentence.endswith(".")


def test_the_finding_of_an_overflow_names_what_overflows_and_what_does_not(found):
    nan = float("nan")
    drift = tuple(replace(d, D=nan) if d.dtype == "bfloat16" else d for d in found.drift)
    ablation = tuple(replace(r, D=nan) if r.step in ("product", "all") else r for r in found.ablation)
    mitigations = tuple(
        replace(m, D=nan, far_D=nan) if m.name == "eager attention" else m for m in found.mitigations
    )
    size, cause, mitigation = finding(replace(found, drift=drift, ablation=ablation, mitigations=mitigations))
    assert "overflows" in size
    assert cause == "By itself rounding rotated queries and keys for q·k makes it overflow."
    assert mitigation.startswith("Fused attention, which keeps scores in float32, does not overflow")
    every = tuple(replace(m, D=nan, far_D=nan) for m in found.mitigations)
    assert best_mitigation(replace(found, mitigations=every)) is None
    assert finding(replace(found, mitigations=every))[2].startswith("Fused attention overflows as well")


def test_another_dtype_that_overflows_is_named(found):
    drift = tuple(replace(d, D=float("nan")) if d.dtype == "float16" else d for d in found.drift)
    assert finding(replace(found, drift=drift))[0].endswith("float16 overflows.")


@pytest.mark.parametrize(
    ("near", "far", "best"),
    [
        # The worse of both shifts counts, and what is about as good and simpler comes first.
        ([1.0, 0.5, 0.1], [1.0, 0.5, 0.1], "float32 attention"),
        ([1.0, 0.12, 0.1], [1.0, 0.12, 0.1], "float32 rotation"),
        ([1.0, 0.2, 0.0001], [1.0, 0.2, 5.0], "float32 rotation"),
        ([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], None),
    ],
)
def test_the_mend_to_recommend(found, near, far, best):
    base = replace(found.mitigations[1], D=1.0, far_D=1.0)
    names = ("exact angles", "float32 rotation", "float32 attention")
    mitigations = [replace(base, name=n, D=a, far_D=b) for n, a, b in zip(names, near, far, strict=True)]
    chosen = best_mitigation(replace(found, mitigations=(base, *mitigations)))
    assert (chosen and chosen.name) == best


def test_weights_that_nobody_trained_are_not_said_to_be(found):
    random = next(d for d in found.drift if (d.dtype, d.parameters, d.delta1) == ("bfloat16", "random", 0))
    drift = tuple(
        replace(random, parameters="pretrained")
        if (d.dtype, d.parameters, d.delta1) == ("bfloat16", "pretrained", 0)
        else d
        for d in found.drift
    )
    assert "training" not in finding(replace(found, drift=drift))[0]
    assert "about the same" in finding(replace(found, drift=drift))[0]


def test_the_finding_of_float32_alone():
    found = audit_model(
        sharp_llama(),
        token_rows(2, 48),
        changed(SETTINGS, dtypes=("float32",), random_control=False, costs=False),
    )
    size, cause, mitigation = finding(found)
    assert size.startswith("In float32")
    assert "random" not in size
    assert (
        "No step explains it" in cause
        or "the angles" in cause
        or "cos and sin" in cause
        or "q·k" in cause
        or "products" in cause
    )
    assert "with exact ones" in mitigation


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"shifts": ()}, "at least one shift"),
        ({"shifts": (0, 0)}, "given once"),
        ({"shifts": (16,)}, "other than delta2"),
        ({"delta2": -1}, "got -1"),
        ({"dtypes": ("float64",)}, "'float64'"),
        ({"dtypes": ()}, "got none"),
        ({"dtypes": ("bfloat16", "bfloat16")}, "each dtype once"),
        ({"ablation_samples": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        AuditSettings(**values)


def test_layouts_must_be_of_the_rows(rows):
    with pytest.raises(RopewalkError, match="each of the 3 rows of 48 tokens needs a layout"):
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


def test_the_random_control_is_random(rows, found):
    """And is the control that its seed gives: not the trained model, nor another one each time."""
    by = {d.parameters: d.D for d in found.drift if (d.dtype, d.angles, d.delta1) == ("bfloat16", "model", 0)}
    assert by["random"] < by["pretrained"] / 10
    brief = changed(SETTINGS, dtypes=("bfloat16",), shifts=(0, 16), ablation_samples=2, costs=False)
    for seed in (SETTINGS.seed, 7):
        other = audit_model(sharp_llama(), rows[:2], changed(brief, seed=seed))
        (control,) = [
            d.D for d in other.drift if (d.dtype, d.parameters, d.delta1) == ("bfloat16", "random", 0)
        ]
        assert (control == by["random"]) == (seed == SETTINGS.seed)


def test_the_finding_compares_the_control_on_the_same_rows(found):
    near = [d for d in found.drift if (d.dtype, d.delta1) == ("bfloat16", 0)]
    pretrained, random = (next(d for d in near if d.parameters == p) for p in ("pretrained", "random"))
    assert len(random.per_sample) == 2
    drift = tuple(
        replace(d, per_sample=(50 * random.D, 50 * random.D, 9e9)) if d is pretrained else d
        for d in found.drift
    )
    assert "training makes it 50 times as large" in finding(replace(found, drift=drift))[0]


def test_the_far_shift_is_never_delta2():
    assert AuditSettings(shifts=(0, 16)).far == 0
    assert AuditSettings(shifts=(0, 16, 1000)).far == 1000
    assert AuditSettings(shifts=(0, 5), delta2=1000).far == 5
