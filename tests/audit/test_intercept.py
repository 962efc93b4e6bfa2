"""Attention taken out of a model: it computes what the model computes, in any precision, and leaves no trace."""

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from ropewalk import EngineError, PackedLayout, RopewalkError
from ropewalk.attention.options import Locality
from ropewalk.audit import intercept
from ropewalk.audit.arithmetic import EXACT, stock_arithmetic
from ropewalk.audit.intercept import (
    AuditedModel,
    LayerRotation,
    intercepted,
    random_parameters,
)
from ropewalk.audit.passes import Runner, difference, longest, queries_from, shifted
from ropewalk.models.compute import float64
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach, load_model
from ropewalk.models.rope.rotary import rotary_module, swap_rotary
from tests.audit.audit_cases import dense_attention
from tests.marks import slow_after
from tests.models.families import ATTENTIONS, COMMON, FAMILIES, WINDOW, tiny_model

LENGTH = 40
SHIFTS = (0, 137)
ROUNDINGS_A_LAYER = 8
"""A layer rounds the hidden states about this often: two norms, q·k, weights, values, two projections, two sums."""


def row(length=LENGTH, vocab=97):
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(1))


def peaked(model):
    """Matrices three times as large: scores of several units, so that attention is far from even."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def tiny(family, **more):
    if not more:
        return peaked(tiny_model(family))
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **extra, **more})
    torch.manual_seed(0)
    return peaked(
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    ).eval()


def other(name, **more):
    config = getattr(transformers, name)(**{**COMMON, **more})
    torch.manual_seed(0)
    return peaked(
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    ).eval()


def stock_logits(model, ids, shift=0, **options):
    with torch.no_grad():
        return model(
            ids[None], position_ids=shifted(len(ids), shift)[None], use_cache=False, **options
        ).logits[0]


def logits(runner, ids, arithmetic, shift=0):
    return torch.cat(list(runner.logits(runner.run(ids, arithmetic, shifted(len(ids), shift)))))


def units(model, dtype):
    """What roundings to a dtype may add up to, over all layers, relative to the largest logit."""
    return ROUNDINGS_A_LAYER * model.config.num_hidden_layers * torch.finfo(dtype).eps


def loaded_as(model, dtype):
    """The model as from_pretrained gives it in a dtype: parameters rounded, frequencies in float32."""
    ours, (_, _, own) = copy.deepcopy(model).to(dtype), rotary_module(model)
    for name, buffer in rotary_module(ours)[2].named_buffers():
        buffer.data = own.get_buffer(name).data.clone()
    return ours


REFUSED = {"granite_swa", "llama4"}
"""Of the families with windows, sinks, chunks or latent attention, those whose roundings the audit does not know."""
SHARP = [*sorted(ATTENTIONS.keys() - REFUSED), "llama4 without norm"]


def sharp(name):
    """One of ``SHARP``, whose windows and chunks are shorter than the rows here."""
    if name in ATTENTIONS:
        return tiny_model(name, sharp=True)
    return other("Llama4TextConfig", **ATTENTIONS["llama4"][1], use_qk_norm=False)


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


def state_of(model):
    """Everything of a model that a pass could change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "experts": model.get_experts_implementation(),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "padding": [m.padding_idx for m in model.modules() if isinstance(m, torch.nn.Embedding)],
        "training": [m.training for m in model.modules()],
        "places": {name: (id(x), x.data_ptr(), x.dtype, x.requires_grad) for name, x in tensors.items()},
        "bytes": {
            name: x.detach().clone().flatten().view(torch.uint8).tolist() for name, x in tensors.items()
        },
        "default dtype": torch.get_default_dtype(),
        "active": len(intercept._active),
    }


TRACED = {
    "llama": {"pad_token_id": 0},
    "gemma3": {"pad_token_id": 0, "tie_word_embeddings": True},
    "qwen3_moe": {"pad_token_id": 0},
}


@pytest.fixture(scope="module", params=sorted(TRACED))
def traced(request):
    """A audited_model with a padding token, under the attention that transformers takes by default."""
    model = tiny(request.param, **TRACED[request.param])
    model.set_attn_implementation("sdpa")
    return AuditedModel.of(model)


@contextmanager
def broken(module, error):
    def forward(*args, **kwargs):
        raise error

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@pytest.mark.parametrize("family", sorted(TRACED))
def test_looking_at_a_model_changes_nothing(family):
    model = tiny(family, **TRACED[family]).eval()
    model.set_attn_implementation("sdpa")
    before = state_of(model)
    AuditedModel.of(model)
    assert state_of(model) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_pass_changes_nothing(traced, dtype):
    before = state_of(traced.model)
    Runner(traced, 1024).run(row(), stock_arithmetic(dtype), shifted(LENGTH, 3))
    assert state_of(traced.model) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_failure_of_the_answer_changes_nothing(traced, dtype):
    before = state_of(traced.model)

    def answer(call):
        raise RuntimeError("the answer fails")

    with pytest.raises(RuntimeError, match="the answer fails"), intercepted(traced.model, answer, dtype):
        traced.model.base_model(row()[None], use_cache=False)
    assert state_of(traced.model) == before


@pytest.mark.parametrize("error", [RuntimeError("the model fails"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["embed_tokens", "layers.1.self_attn.o_proj", "norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_failure_of_the_model_changes_nothing(traced, dtype, where, error):
    before = state_of(traced.model)
    module = traced.model.base_model.get_submodule(where)
    kept = {name: parameter.data for name, parameter in traced.model.named_parameters()}
    try:
        with broken(module, error), pytest.raises(type(error)):
            Runner(traced, 1024).run(row(), stock_arithmetic(dtype), shifted(LENGTH, 3))
        assert state_of(traced.model) == before
    finally:
        for name, parameter in traced.model.named_parameters():
            parameter.data = kept[name]


def test_an_embedding_called_by_keyword_keeps_its_padding_token():
    model = tiny("llama", pad_token_id=0)
    with intercepted(model, lambda call: call.value, torch.float64):
        found = model.model.embed_tokens(input=row())
    assert found.dtype == torch.float64
    assert model.model.embed_tokens.padding_idx == 0


def test_the_models_own_attention_outside_of_an_audit_is_not_ours():
    model = tiny("llama")
    AuditedModel.of(model)
    expected = stock_logits(model, row())
    model.set_attn_implementation(intercept.NAME)
    with pytest.raises(EngineError, match="LlamaAttention was called with the audit's attention outside"):
        stock_logits(model, row())
    model.set_attn_implementation("eager")
    assert torch.equal(stock_logits(model, row()), expected)


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


def test_the_answer_may_round_to_float32_where_the_rest_may_not():
    model = tiny("llama")
    seen = []

    def answer(call):
        seen.append((call.query.dtype, call.query.float().dtype, call.query.to(torch.float32).dtype))
        return call.value.repeat_interleave(2, dim=0)

    with intercepted(model, answer, torch.float64):
        hidden = model.model(row()[None], use_cache=False).last_hidden_state
    assert hidden.dtype == torch.float64
    assert seen == [(torch.float64, torch.float32, torch.float32)] * 3


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
    found = difference(runner, (1, a), (-1, b))
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


def test_chunks_are_no_windows():
    """The same tokens in a window and in chunks: transformers tells both to its masks by one name."""
    model = sharp("llama4 without norm")
    found = {}

    def answer(call):
        found[call.layer] = call.options.locality
        return call.value.repeat_interleave(2, dim=0)

    with intercepted(model, answer, torch.float32):
        model.model(row()[None], use_cache=False)
    assert tuple(found.values()) == ModelConfig.of(model.config).localities
    assert {locality.chunk for locality in found.values()} == {WINDOW, None}


def test_a_window_that_contradicts_the_config_is_refused():
    model = sharp("llama4 without norm")
    with intercepted(model, lambda call: call.value.repeat_interleave(2, dim=0), torch.float32):
        intercept._active[-1].localities = (Locality(chunk=WINDOW + 1),) * model.config.num_hidden_layers
        with pytest.raises(EngineError, match="is 7 in the model but 8 in the config; correct the config"):
            model.model(row()[None], use_cache=False)


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


@pytest.mark.parametrize("fails", [False, True])
def test_experts_in_float64_are_switched_back_and_no_other_model_notices(tmp_path, fails):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    model, other = load_model(tmp_path), load_model(tmp_path)
    grouped = other.get_experts_implementation()
    assert grouped == model.get_experts_implementation() != {"": "eager"}

    def answer(call):
        assert model.get_experts_implementation() == {"": "eager"}
        assert (
            other.get_experts_implementation() == load_model(tmp_path).get_experts_implementation() == grouped
        )
        return call.value.new_zeros(()) if fails else call.value.repeat_interleave(2, dim=0)

    with (
        pytest.raises(IndexError) if fails else nullcontext(),
        intercepted(model, answer, torch.float64),
    ):
        model.model(row(8)[None], use_cache=False)
    assert model.get_experts_implementation() == grouped


def test_a_batch_of_two_rows_is_refused():
    model = tiny_model("llama")
    with (
        pytest.raises(RopewalkError, match="one row at a time, got a batch of 2"),
        intercepted(model, lambda call: call.value, torch.float32),
    ):
        model.model(row(8)[None].repeat(2, 1), use_cache=False)


def test_a_model_with_a_rotary_module_a_layer_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].rotary = type(model.model.rotary_emb)(model.config)
    with pytest.raises(
        RopewalkError, match="exactly one rotary module, but LlamaForCausalLM has none or several"
    ):
        AuditedModel.of(model)


def parameters_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_a_random_control_lasts_as_long_as_its_context(dtype, fails):
    model = tiny_model("qwen2", dtype)
    before, logits_before = parameters_of(model), stock_logits(model, row())
    try:
        with random_parameters(model, seed=5):
            inside = parameters_of(model)
            changed = stock_logits(model, row())
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    matrices = [name for name, parameter in before.items() if parameter.dim() > 1]
    assert len(matrices) > 10
    assert not any(torch.equal(inside[name], before[name]) for name in matrices)
    assert all(inside[name].dtype == dtype for name in inside)
    assert (changed - logits_before).abs().max() > 1e-3
    assert equal(parameters_of(model), before)
    assert torch.equal(stock_logits(model, row()), logits_before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_random_control_leaves_config_and_attention_as_they_were(fails):
    model = tiny("llama", pad_token_id=0)
    model.set_attn_implementation("sdpa")
    before = state_of(model)
    try:
        with random_parameters(model, seed=5):
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert state_of(model) == before


def test_a_seed_has_one_random_control():
    model = tiny_model("llama")
    drawn = []
    for seed in (1, 1, 2):
        with random_parameters(model, seed):
            drawn.append(parameters_of(model))
    assert equal(drawn[0], drawn[1])
    assert not equal(drawn[0], drawn[2])


def test_a_random_control_draws_nothing_from_the_generator():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    with random_parameters(tiny_without_drawing(), 1):
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(torch.random.get_rng_state(), before)


def tiny_without_drawing():
    with torch.random.fork_rng():
        return tiny_model("llama")


def test_tied_embeddings_stay_tied_in_a_random_control():
    model = tiny("gemma2", tie_word_embeddings=True)
    before = model.model.embed_tokens.weight
    assert model.lm_head.weight is before
    place = before.data_ptr()
    with random_parameters(model, 1):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert before.data_ptr() != place
    assert model.lm_head.weight is model.model.embed_tokens.weight is before
    assert before.data_ptr() == place


def test_a_random_control_attends_almost_evenly_where_the_model_does_not():
    model = tiny("llama")
    runner = Runner(AuditedModel.of(model), LENGTH)
    even = (1 / torch.arange(1, LENGTH + 1, dtype=torch.float64)).sum()

    def unevenness():
        return float((runner.run(row(), EXACT, shifted(LENGTH, 0)).received[..., 0] - even).abs().max())

    trained = unevenness()
    with random_parameters(model, 1):
        assert unevenness() < trained / 10


def test_a_model_that_its_config_does_not_make_has_no_random_control():
    model = tiny_model("llama")
    model.model.layers[0].extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(
        RopewalkError,
        match=r"LlamaForCausalLM of this config has other parameters.*model\.layers\.0\.extra",
    ):
        random_parameters(model, 1).__enter__()


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


def test_the_random_control_has_no_learned_buffer():
    """Routers keep what they learned of balance in a buffer that is saved."""
    config = transformers.Glm4MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    (bias,) = {b for n, b in model.named_buffers() if "e_score_correction_bias" in n and ".0." in n}
    bias.data.fill_(3.0)
    with random_parameters(model, 0):
        assert not bool((bias == 3).any())
    assert bool((bias == 3).all())
