"""Attention taken out of a model: it computes what the model computes, in any precision, and leaves no trace."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from ropewalk import EngineError, PackedLayout, RopewalkError
from ropewalk.audit.arithmetic import EXACT, stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel, LayerRotation
from ropewalk.audit.differences import differences, queries_from
from ropewalk.audit.passes import Runner, longest, shifted
from ropewalk.models.compute import float64
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach
from ropewalk.models.rope.rotary import rotary_module, swap_rotary
from tests.audit.audit_cases import dense_attention
from tests.audit.peaked_models import LENGTH, SHARP, logits, other, row, sharp, stock_logits, tiny, units
from tests.marks import slow_after
from tests.models.families import FAMILIES, WINDOW, tiny_model

SHIFTS = (0, 137)


def loaded_as(model, dtype):
    """The model as from_pretrained gives it in a dtype: parameters rounded, frequencies in float32."""
    ours, (_, _, own) = copy.deepcopy(model).to(dtype), rotary_module(model)
    for name, buffer in rotary_module(ours)[2].named_buffers():
        buffer.data = own.get_buffer(name).data.clone()
    return ours


@pytest.fixture(scope="module", params=[*sorted(FAMILIES), *(f"sharp {name}" for name in SHARP)])
def audited_model(request):
    name = request.param.removeprefix("sharp ")
    return AuditedModel.of(tiny(name) if name == request.param else sharp(name))


@pytest.fixture(scope="module")
def exact_logits(audited_model):
    """For each shift the logits of a float64 pass, computed once."""
    return cache(lambda shift: logits(Runner(audited_model, 1024), row(), EXACT, shift))


@pytest.mark.parametrize("shift", SHIFTS)
def test_float32_logits_are_those_of_eager_attention(audited_model, shift):
    model, ids = audited_model.model, row()
    found = logits(Runner(audited_model, 1024), ids, stock_arithmetic(torch.float32), shift)
    expected = stock_logits(model, ids, shift)
    largest = float(expected.abs().max())
    assert largest > 0.1
    assert (found - expected).abs().max() <= units(model, torch.float32) * largest


# Each dtype and each shift once: neither changes what the other does.
@pytest.mark.parametrize(
    ("dtype", "shift"), slow_after(1, [(torch.bfloat16, SHIFTS[0]), (torch.float16, SHIFTS[1])])
)
def test_half_precision_errs_as_eager_attention_does(audited_model, exact_logits, dtype, shift):
    """No more than twice the deviation of the model itself from float64, and no less than half of it."""
    ids = row()
    runner = Runner(audited_model, 1024)
    exact = exact_logits(shift)
    ours = logits(runner, ids, stock_arithmetic(dtype), shift)
    eager = stock_logits(loaded_as(audited_model.model, dtype), ids, shift).double()
    deviation, stock = (float((x - exact).square().mean().sqrt()) for x in (ours, eager))
    # The model rounds its logits once more than we do.
    rounding = torch.finfo(dtype).eps * float(exact.square().mean().sqrt())
    assert deviation <= 2 * stock + rounding
    assert stock <= 2 * deviation + rounding
    assert float((ours - eager).square().mean().sqrt()) <= stock + rounding


@pytest.mark.parametrize("shift", SHIFTS)
def test_attention_received_is_the_column_sum_of_the_models_own(audited_model, shift):
    model, ids = audited_model.model, row()
    with torch.no_grad():
        out = model(
            ids[None], position_ids=shifted(LENGTH, shift)[None], use_cache=False, output_attentions=True
        )
    expected = torch.stack([attention[0].double().sum(-2) for attention in out.attentions])
    found = (
        Runner(audited_model, 1024).run(ids, stock_arithmetic(torch.float32), shifted(LENGTH, shift)).received
    )
    # Each of LENGTH weights of at most 1.
    assert (found - expected).abs().max() <= LENGTH * units(model, torch.float32)
    assert (expected - expected.mean(-1, keepdim=True)).abs().max() > 1


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mistral", {"sliding_window": 7}),
        ("gemma2", {"sliding_window": 7}),
        ("gemma3", {"sliding_window": 7}),
        ("cohere2", {"sliding_window": 7}),
        ("phi3", {"sliding_window": 7}),
        ("starcoder2", {"sliding_window": 7}),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_a_sliding_window_shorter_than_the_row_is_the_models_own(family, more):
    model, ids = tiny(family, **more), row()
    runner = Runner(AuditedModel.of(model), LENGTH)
    expected = stock_logits(model, ids)
    found = logits(runner, ids, stock_arithmetic(torch.float32))
    assert (found - expected).abs().max() <= units(model, torch.float32) * expected.abs().max()
    # Float64 takes the same window.
    exact = logits(runner, ids, EXACT)
    assert (exact - expected).abs().max() <= units(model, torch.float32) * expected.abs().max()


def rotations(family):
    return [(one.rotary_dim, one.style) for one in AuditedModel.of(tiny_model(family)).layers]


def test_layers_without_positions_are_found():
    config = tiny_model("smollm3").config
    assert rotations("smollm3") == [(8 if on else 0, "halves") for on in config.no_rope_layers]
    assert 0 in config.no_rope_layers
    sliding = [kind == "sliding_attention" for kind in tiny_model("cohere2").config.layer_types]
    assert rotations("cohere2") == [(8, "interleaved") if on else (0, "halves") for on in sliding]
    assert not all(sliding)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", (8, "halves")),
        ("glm4", (4, "interleaved")),
        ("phi", (4, "halves")),
        ("gpt_neox", (4, "halves")),
    ],
)
def test_rotated_dimensions_and_their_pairs_are_found(family, expected):
    assert set(rotations(family)) == {expected}


def test_each_layer_has_the_frequencies_of_its_type():
    audited_model = AuditedModel.of(tiny_model("gemma3"))
    assert [one.layer_type for one in audited_model.layers] == audited_model.model.config.layer_types
    assert len(set(audited_model.model.config.layer_types)) == 2


@pytest.mark.parametrize(
    ("name", "more"), [("Olmo3Config", {"sliding_window": 16}), ("Gemma3TextConfig", {"head_dim": 8})]
)
def test_a_config_may_name_layer_types_that_no_layer_has(name, more):
    model = other(name, num_hidden_layers=2, **more)
    expected = stock_logits(model, row())
    found = logits(Runner(AuditedModel.of(model), LENGTH), row(), stock_arithmetic(torch.float32))
    assert (found - expected).abs().max() <= units(model, torch.float32) * expected.abs().max()


def far(runner, ids, near=0, distant=1_000_003):
    a, b = (logits(runner, ids, EXACT, shift) for shift in (near, distant))
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "qwen3_moe"])
def test_float64_logits_do_not_depend_on_where_the_row_stands(family):
    """Norms and routers of these families compute in float32 whatever the model's dtype, unless told otherwise."""
    model, ids = tiny(family), row()
    runner = Runner(AuditedModel.of(model), 1_100_000)
    # An angle of a million radians is off by 1e6 * 2^-53 = 1e-10; norms of small queries amplify it.
    assert far(runner, ids) <= 1e-9
    if family != "qwen3_moe":  # The experts' grouped product has no float64.
        stock = copy.deepcopy(model).double()
        a, b = (stock_logits(stock, ids, shift) for shift in (0, 1_000_003))
        assert (a - b).abs().max() / a.abs().max() > 1e-6


@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5", "olmo_hybrid", "lfm2", "granitemoehybrid", "bamba", "falcon_h1"]
)
def test_recurrent_mixers_run_in_the_dtype_of_the_pass(family):
    """They read the weights of their convolution, which is no call that a hook could cast for."""
    model, ids = tiny_model(family, sharp=True), row()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = stock_logits(model, ids)
    runner = Runner(AuditedModel.of(model), 1_100_000)
    found = logits(runner, ids, stock_arithmetic(torch.float32))
    assert (found - expected).abs().max() <= units(model, torch.float32) * expected.abs().max()
    # An angle of a million radians is off by 1e-10; a float32 left anywhere would amplify to 1e-6 and more.
    assert far(runner, ids) <= 1e-7
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "qwen3_moe"])
def test_without_the_rule_that_keeps_float64_the_norms_would_round(family, monkeypatch):
    model, ids = tiny(family), row()
    runner = Runner(AuditedModel.of(model), 1024)
    # One position further: angles lose nothing, so only float64 roundings are left, some of them amplified.
    assert far(runner, ids, 0, 1) <= 2**14 * torch.finfo(torch.float64).eps
    kept = logits(runner, ids, EXACT)

    def as_asked(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(float64.KeepFloat64, "__torch_function__", as_asked)
    difference = (logits(runner, ids, EXACT) - kept).abs().max() / kept.abs().max()
    unit = torch.finfo(torch.float32).eps
    assert unit / 8 < difference <= units(model, torch.float32)


def test_sinks_that_are_rounded_elsewhere_are_refused_by_name():
    with pytest.raises(
        EngineError,
        match="GraniteSWAForCausalLM has learned attention sinks, and the audit knows how a model rounds",
    ):
        AuditedModel.of(tiny_model("granite_swa", sharp=True))


@pytest.mark.parametrize(
    ("name", "gives", "expected"),
    [
        ("gpt_oss", "pairs", {LayerRotation(None, 16, "halves")}),
        ("cohere2", "interleaved", {LayerRotation(None, 8, "interleaved"), LayerRotation(None, 0, "halves")}),
        ("deepseek_v2", "complex", {LayerRotation(None, 8, "interleaved", 8)}),
        ("deepseek_v3", "halves", {LayerRotation(None, 8, "halves", 8)}),
        ("glm4_moe_lite", "halves", {LayerRotation(None, 8, "halves", 8)}),
        (
            "llama4 without norm",
            "complex",
            {LayerRotation(None, 8, "interleaved"), LayerRotation(None, 0, "halves")},
        ),
    ],
)
def test_angles_are_mapped_to_the_dimensions_that_the_layers_rotate(name, gives, expected):
    """However the rotary module lays them out; in latent attention they are the last ones of a head."""
    audited_model = AuditedModel.of(sharp(name))
    assert audited_model.gives == gives
    assert set(audited_model.layers) == expected


@pytest.mark.parametrize("name", ["deepseek_v2", "llama4 without norm"])
def test_a_complex_rotation_in_float32_is_known_though_its_sums_are_fused(name):
    runner = Runner(AuditedModel.of(sharp(name)), 1024)
    assert runner.stock(torch.float32) == stock_arithmetic(torch.float32)
    found = runner.stock(torch.bfloat16)
    assert (found.cos_sin, found.rotation) == (torch.float32, torch.float32)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2", "deepseek_v3", "llama4 without norm"])
def test_ropewalks_rotary_module_is_audited_as_transformers_own(name):
    model = sharp(name)
    own = AuditedModel.of(model)
    swap_rotary(model, ModelConfig.of(model.config).methods)
    ours = AuditedModel.of(model)
    assert (ours.gives, ours.layers) == (own.gives, own.layers)
    found, exact = (
        logits(Runner(ours, 2**20), row(), arithmetic, 2**19)
        for arithmetic in (replace(EXACT, angles="model"), EXACT)
    )
    # Its cos and sin are exact but for their rounding to float32.
    assert (found - exact).abs().max() <= units(model, torch.float32) * exact.abs().max()


@pytest.mark.parametrize("name", SHARP)
def test_drift_beyond_the_window_is_that_of_the_keys_that_are_seen(name):
    """D from transformers' own attention weights, in which hidden keys have none."""
    model, ids, shifts = sharp(name), row(), (0, 2**26)
    runner = Runner(AuditedModel.of(model), longest(shifts, LENGTH))
    own = [dense_attention(model, ids, shift) for shift in shifts]
    expected = float(((own[0] - own[1]).abs().sum(-2) / queries_from(LENGTH)).sum())
    a, b = (
        runner.run(ids, stock_arithmetic(torch.float32), shifted(LENGTH, shift), keep=("layers",))
        for shift in shifts
    )
    found = differences(runner, {0: ((1, a), (-1, b))})[0]
    # Each weight is off by roundings of its layer in each of four passes; D divides a column's sum by its queries.
    columns = own[0].shape[0] * own[0].shape[1] * LENGTH
    assert abs(found.D - expected) <= columns * units(model, torch.float32)
    # Angles of 2^26 radians are off by some radians in float32, so there is something to see.
    assert expected > 10 * columns * units(model, torch.float32)
    for layer, locality in enumerate(ModelConfig.of(model.config).localities):
        seen = own[0][layer].sum(0) > 0
        reach = LENGTH if locality.reach is None else locality.reach
        assert int(seen.sum(1).max()) <= reach
        assert bool((a.seen_by[layer] >= seen.sum(0)).all())
        assert int(a.seen_by[layer].max()) <= reach
        assert locality.reach in (None, WINDOW)


@pytest.mark.parametrize("pattern", slow_after(1, ["anchor", "intra_document"]))
@pytest.mark.parametrize("name", SHARP)
def test_documents_that_are_laid_out_anew_attend_as_packed_rows_do(name, pattern):
    """Windows and chunks count inside a run: a document, with the anchor in front of it."""
    model, ids = sharp(name), row()
    # Segments of one document need not be neighbours, so a place in a run is no place in the row.
    sizes = [8, 11, 9, 10] if pattern == "anchor" else [8, 11, 9, 12]
    layout = PackedLayout.from_segments(sizes, [0, 1, 0, 1], pattern, 2 if pattern == "anchor" else 0)
    packed = copy.deepcopy(model)
    attach(packed, exact_rope=False)
    with torch.no_grad():
        expected = packed(ids[None], layout=layout).logits[0]
    runner = Runner(AuditedModel.of(model), 1024)
    found = runner.run(ids, stock_arithmetic(torch.float32), layout.position_ids, layout)
    ours = torch.cat(list(runner.logits(found)))
    assert (ours - expected).abs().max() <= units(model, torch.float32) * expected.abs().max()


def test_each_layer_type_is_rotated_with_its_own_frequencies():
    audited_model, ids = AuditedModel.of(sharp("gemma3")), row()
    sliding, full = audited_model.methods["sliding_attention"], audited_model.methods["full_attention"]
    assert sliding.rope_theta != full.rope_theta
    expected = stock_logits(audited_model.model, ids)
    found = logits(Runner(audited_model, LENGTH), ids, EXACT)
    allowed = units(audited_model.model, torch.float32) * expected.abs().max()
    assert (found - expected).abs().max() <= allowed
    swapped = replace(audited_model, methods={"sliding_attention": full, "full_attention": sliding})
    assert (logits(Runner(swapped, LENGTH), ids, EXACT) - expected).abs().max() > 1000 * allowed


def test_norms_after_the_rotation_are_refused():
    with pytest.raises(
        EngineError, match="layer 0 of HunYuanDenseV1ForCausalLM does more to queries and keys"
    ):
        AuditedModel.of(other("HunYuanDenseV1Config", head_dim=8))


def test_a_model_without_rope_is_refused():
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=97)
    with pytest.raises(RopewalkError, match="does not use RoPE"):
        AuditedModel.of(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def test_llama_4_is_refused_for_its_norm_after_the_rotation():
    with pytest.raises(EngineError, match=r"Llama4ForCausalLM normalises .* after rotating.*use_qk_norm"):
        AuditedModel.of(tiny_model("llama4", sharp=True))


def test_a_model_that_takes_no_attention_from_outside_is_refused_by_name():
    config = transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, max_position_embeddings=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(EngineError, match="FalconForCausalLM"):
        AuditedModel.of(model)


def test_layers_that_cannot_run_in_float64_are_refused_by_name():
    model, weight = tiny("llama"), torch.zeros(32, 32)
    # A weight that is no parameter stays in float32.
    model.model.layers[1].mlp.forward = lambda hidden: hidden @ weight
    with pytest.raises(
        EngineError, match="the audit runs LlamaForCausalLM in float64, but the model fails in this dtype"
    ):
        AuditedModel.of(model)


def test_a_quantised_model_is_refused():
    model = tiny_model("llama")
    model.is_quantized = True
    with pytest.raises(EngineError, match="LlamaForCausalLM is quantised"):
        AuditedModel.of(model)


def test_a_config_that_is_not_causal_is_refused():
    model = tiny_model("llama")
    model.config.is_causal = False
    with pytest.raises(EngineError, match="LlamaForCausalLM attends in both directions"):
        AuditedModel.of(model)


def test_bidirectional_attention_is_refused_however_the_config_says_it():
    model = other("Gemma3TextConfig", head_dim=8, num_hidden_layers=6, use_bidirectional_attention=True)
    with pytest.raises(EngineError, match=r"Gemma3.* attends in both directions"):
        AuditedModel.of(model)


def refused_or_right(model, length=LENGTH, shift=0):
    """A model that is not refused must give its own logits."""
    ids = row(length)
    name, found, message = type(model).__name__, None, ""
    try:
        runner = Runner(AuditedModel.of(model), 4096)
        found = logits(runner, ids, stock_arithmetic(torch.float32), shift)
    except EngineError as error:
        message = str(error)
    if found is None:
        # PhimoeForCausalLM, or its PhimoeAttention.
        assert name.removesuffix("ForCausalLM") in message
        return
    expected = stock_logits(model, ids, shift)
    assert (found - expected).abs().max() <= units(model, torch.float32) * expected.abs().max()


def test_stablelm_runs_as_it_is():
    for norms in (False, True):
        model = other("StableLmConfig", qk_layernorm=norms)
        assert {(one.rotary_dim, one.style) for one in AuditedModel.of(model).layers} == {(2, "halves")}
        refused_or_right(model, shift=137)


def test_a_window_that_only_the_mask_knows_is_refused_or_right():
    refused_or_right(other("PhimoeConfig", num_local_experts=4, sliding_window=7))


def test_a_mask_of_the_layers_own_is_refused_or_right():
    refused_or_right(other("DogeConfig", keep_window_size=8))


@pytest.mark.skipif(not hasattr(transformers, "BeamConfig"), reason="this transformers has no Beam")
def test_queries_scaled_by_their_position_are_refused_or_right():
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    }
    refused_or_right(other("BeamConfig", head_dim=8, num_hidden_layers=6, **experts), shift=1000)


def test_a_model_with_a_rotary_module_a_layer_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].rotary = type(model.model.rotary_emb)(model.config)
    with pytest.raises(
        RopewalkError, match="exactly one rotary module, but LlamaForCausalLM has none or several"
    ):
        AuditedModel.of(model)


def test_blocks_do_not_change_a_pass():
    """One query a block or all in one: float64 sums differ by their order alone."""
    audited_model = AuditedModel.of(tiny("gemma2"))
    a, b = (logits(Runner(audited_model, LENGTH, size), row(), EXACT) for size in (1, 2**30))
    assert (a - b).abs().max() <= 2**12 * torch.finfo(torch.float64).eps * a.abs().max()


@pytest.mark.parametrize("step", ["cos_sin", "rotation", "scores", "softmax", "weights", "rest"])
def test_every_step_alone_changes_the_logits_by_its_own_rounding(step):
    audited_model = AuditedModel.of(tiny("llama"))
    runner = Runner(audited_model, LENGTH)
    exact = logits(runner, row(), EXACT)
    errors = [
        float((logits(runner, row(), replace(EXACT, **{step: dtype})) - exact).abs().max())
        for dtype in (torch.float32, torch.bfloat16)
    ]
    # 16 bits lie between the two dtypes; logits are near 1.
    assert 0 < errors[0] <= units(audited_model.model, torch.float32)
    assert 2**10 * errors[0] < errors[1] <= units(audited_model.model, torch.bfloat16)
