"""What mitigations cost: that each computes what it says, on a copy, and is measured with the right ruler."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from ropewalk import EngineError, PackedLayout, RopewalkError
from ropewalk.audit import mitigation_costs as cost
from ropewalk.audit.arithmetic import EXACT, stock_arithmetic
from ropewalk.audit.mitigation_costs import Cost, TimeLimit, mitigation_costs, peak_bytes
from ropewalk.audit.mitigations import anchored, changes, separated
from ropewalk.audit.passes import Runner
from ropewalk.models import mitigated_attention
from ropewalk.models.intercept import AuditedModel
from ropewalk.models.load import attach, rotary_module
from ropewalk.models.losses import decoder_of
from ropewalk.models.mitigated_attention import (
    FUSED_MITIGATIONS,
    attending,
    copy_in_dtype,
    exact_rotary,
    float32_attention,
    float32_rotation,
    mitigated,
    split_product,
    tf32_attention,
)

CPU = torch.device("cpu")
LENGTH = 96
LAYOUT = PackedLayout.from_lengths([40, 30, 26], "full", 0)
MITIGATIONS = tuple(changes(stock_arithmetic(torch.bfloat16), LAYOUT))
ATTENDED = ("fused attention", *FUSED_MITIGATIONS)

# Weights so large that scores spread over several units: a scale or a mask that is wrong would show.
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "attn_implementation": "sdpa",
    "pad_token_id": None,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 20}),
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": 128, "attn_implementation": "eager", "query_pre_attn_scalar": 8},
    ),
    "cohere": (transformers.CohereConfig, {"bos_token_id": 0, "eos_token_id": 1}),
}


def tiny(family):
    torch.manual_seed(0)
    config_class, more = FAMILIES[family]
    values = {**COMMON, **more}
    implementation = values.pop("attn_implementation")
    config = config_class(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.eval()


def row(length=LENGTH):
    return torch.randint(2, 64, (length,), generator=torch.Generator().manual_seed(1))


def rms(x):
    return float(x.double().square().mean().sqrt())


def hidden(model, name, ids):
    context = (
        attending(model, "sdpa") if name == "fused attention" else mitigated(model, name, exact_rotary(model))
    )
    with context, torch.no_grad():
        return decoder_of(model)(ids[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_every_mend_attends_as_the_model_does(family, dtype):
    model = copy_in_dtype(tiny(family), dtype)
    ids = row()
    runner = Runner(AuditedModel.of(model), LENGTH)
    exact = runner.run(ids, EXACT, torch.arange(LENGTH)).hidden
    errors = {name: rms(hidden(model, name, ids) - exact) for name in ATTENDED}
    # The rule of all engines here: twice the error of stock attention in the same dtype, and one rounding.
    budget = 2 * errors["fused attention"] + torch.finfo(dtype).eps * rms(exact)
    assert all(error <= budget for error in errors.values()), errors
    # That error is small beside the hidden states themselves, so that the budget says something.
    assert budget < rms(exact) / 4


def test_exact_angles_mend_what_far_positions_break():
    """Far out the stock angles are off by a float32 rounding of the position, and exact ones are not."""
    model = copy_in_dtype(tiny("llama"), torch.float32)
    ids = row()
    runner = Runner(AuditedModel.of(model), 2**22)
    far = torch.arange(2**21, 2**21 + LENGTH)
    exact = runner.run(ids, EXACT, far).hidden

    def error(name):
        context = attending(model, "sdpa") if name is None else mitigated(model, name, exact_rotary(model))
        with context, torch.no_grad():
            found = decoder_of(model)(ids[None], position_ids=far[None], use_cache=False)
        return rms(found.last_hidden_state[0] - exact)

    # Angles of up to 2^21 rad in float32 are off by 0.07 rad; cos and sin in float32 by 6e-8.
    assert error("exact angles") < error(None) / 100
    assert error("float32 rotation") < error(None) / 100


class Layer(nn.Module):
    num_key_value_groups = 2
    is_causal = True


def raw(dtype, seed, head_dim=16, length=256):
    """Queries and keys whose scores have a standard deviation of 3.2² = 10, and float64 attention over them."""
    generator = torch.Generator().manual_seed(seed)
    query = 3.2 * torch.randn(1, 4, length, head_dim, generator=generator)
    key = 3.2 * torch.randn(1, 2, length, head_dim, generator=generator)
    value = torch.randn(1, 2, length, head_dim, generator=generator).to(dtype)
    wide_key, wide_value = (x.double().repeat_interleave(2, 1) for x in (key, value))
    scores = query.double() @ wide_key.transpose(-1, -2) * head_dim**-0.5
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    return query, key, value, (scores.softmax(-1) @ wide_value).transpose(1, 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_split_product_is_as_good_as_float32(dtype, seed):
    query, key, value, exact = raw(dtype, seed)
    errors = []
    for function in (float32_rotation, split_product, float32_attention):
        output, weights = function(Layer(), query, key, value, None, scaling=None)
        assert output.dtype == dtype
        assert output.shape == exact.shape
        assert weights is None
        errors.append(rms(output - exact))
    plain, split, float32 = errors
    rounding = rms(exact.to(dtype) - exact)
    # float32 attention leaves the rounding of the output alone; a split's weights are rounded once more.
    assert float32 < 1.1 * rounding
    assert split < 1.5 * rounding
    # Scores of 10 with a relative error of 2^-9 each: several roundings of the output.
    assert plain > 3 * rounding


def test_split_product_keeps_only_the_smallest_of_four_products_out():
    """In scores alone: 16 mantissa bits of a sum of two bfloat16 numbers, against 8 of one."""
    query, key, _, _ = raw(torch.bfloat16, 0, length=16)
    # One-hot values lay the attention weights open, and scores two apart make them differ by e².
    value = torch.eye(16).expand(1, 2, 16, 16).to(torch.float16)
    output, _ = split_product(Layer(), query, key, value, None, scaling=0.05)
    exact = (query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.05).masked_fill(
        ~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf
    )
    weights = exact.softmax(-1).transpose(1, 2)
    # Weights of at most 1 in float16, rounded as weights and again as output.
    assert float((output.double() - weights).abs().max()) <= 2 * torch.finfo(torch.float16).eps


def test_copy_is_the_model_in_another_dtype():
    model = tiny("llama")
    before = copy.deepcopy(model.state_dict())
    frequencies = rotary_module(model)[2].inv_freq.clone()
    copied = copy_in_dtype(model, torch.bfloat16)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert rotary_module(copied)[2].inv_freq.dtype == torch.float32
    assert torch.equal(rotary_module(copied)[2].inv_freq, frequencies)
    shared = copy_in_dtype(model, torch.float32)
    for ours, theirs in zip(shared.parameters(), model.parameters(), strict=True):
        assert ours is theirs
    assert shared.config is not model.config
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_copy_of_a_loaded_checkpoint_is_the_checkpoint_loaded_in_that_dtype(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path, dtype=torch.bfloat16).eval()
    copied = copy_in_dtype(load(tmp_path, dtype=torch.float32), torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(copied(row()[None]).logits, loaded(row()[None]).logits)


def test_tied_weights_stay_tied():
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    copied = copy_in_dtype(model, torch.bfloat16)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def test_copying_an_attached_model_is_refused():
    model = tiny("llama")
    attach(model)
    with pytest.raises(RopewalkError, match="exact_rope=False"):
        copy_in_dtype(model, torch.float32)


@pytest.mark.parametrize("name", FUSED_MITIGATIONS)
def test_all_is_as_before_even_if_the_pass_fails(name, monkeypatch):
    model = copy_in_dtype(tiny("llama"), torch.float32)
    own, before = rotary_module(model)[2], model.config._attn_implementation
    exact = exact_rotary(model)
    assert rotary_module(model)[2] is own
    precision = torch.backends.cuda.matmul.fp32_precision

    def fails(*args, **kwargs):
        raise KeyError("out of order")

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", fails)
    with pytest.raises(KeyError, match="out of order"), mitigated(model, name, exact):
        decoder_of(model)(row()[None], use_cache=False)
    assert rotary_module(model)[2] is own
    assert model.config._attn_implementation == before
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert mitigated_attention._arrived == []


def test_tf32_is_allowed_during_its_attention_alone(monkeypatch):
    seen = []
    real = nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.matmul.fp32_precision
    query, key, value, _ = raw(torch.bfloat16, 0)
    for function in (tf32_attention, float32_attention):
        function(Layer(), query, key, value, None, scaling=None)
        assert torch.backends.cuda.matmul.fp32_precision == before
    assert seen == ["tf32", "ieee"]


def test_model_that_takes_no_attention_function(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *_: False)
    costs = mitigation_costs(
        model, row(), LAYOUT, torch.bfloat16, ["float32 attention", "fused attention"], TimeLimit(1)
    )
    assert costs["float32 attention"] == "LlamaForCausalLM takes no attention function from outside"
    assert isinstance(costs["fused attention"], Cost)


def test_unknown_mend():
    model = copy_in_dtype(tiny("llama"), torch.float32)
    with pytest.raises(RopewalkError, match="unknown mitigation 'prayer'"), mitigated(model, "prayer", None):
        pass


def test_peak_of_known_allocations(capfd):
    """If the profiler counts otherwise some day, this says so: three tensors, of which two live at once."""

    def run():
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(1250, dtype=torch.float64)
        return second, third

    # 4 bytes each of 1000 and 500, then of 500 with 8 each of 1250.
    assert peak_bytes(run, CPU) == 4 * 500 + 8 * 1250
    assert peak_bytes(lambda: None, CPU) == 0
    # The profiler would write to the error stream, which belongs to a progress bar.
    assert capfd.readouterr().err == ""


def test_peak_sees_the_scratch_memory_of_a_kernel():
    x = torch.randn(1, 4, 512, 16)
    output = x.numel() * x.element_size()
    assert (
        peak_bytes(lambda: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), CPU) > output
    )


def test_peak_counts_materialised_scores_and_is_the_same_twice():
    model = copy_in_dtype(tiny("llama"), torch.float32)
    ids = row()[None]

    def run():
        with torch.no_grad():
            decoder_of(model)(ids, use_cache=False)

    with attending(model, "sdpa"):
        run()
        fused = peak_bytes(run, CPU)
        assert peak_bytes(run, CPU) == fused
    with attending(model, "eager"):
        eager = peak_bytes(run, CPU)
    scores = 4 * LENGTH**2 * 4
    assert eager - fused > scores


def test_costs_of_a_model_with_everything():
    model = tiny("llama")
    state = copy.deepcopy(model.state_dict())
    rotary, hooks = rotary_module(model)[2], len(model._forward_pre_hooks)
    costs = mitigation_costs(model, row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(3))
    assert tuple(costs) == MITIGATIONS
    assert costs["tf32 attention"] == "this machine's cpu has no TF32"
    measured = {name: value for name, value in costs.items() if isinstance(value, Cost)}
    assert set(measured) == set(MITIGATIONS) - {"tf32 attention"}
    assert all(value.seconds > 0 and value.peak_bytes > 0 for value in measured.values())
    assert costs["fused attention"].time_ratio == costs["fused attention"].memory_ratio == 1
    # Scores of four heads, 2 x 4 x 96 x 96 bytes, beside hidden states of 2 x 96 x 32.
    assert costs["eager attention"].memory_ratio > 1.5
    assert costs["split product"].memory_ratio > costs["float32 rotation"].memory_ratio
    # The model that was given is the model that was given.
    assert rotary_module(model)[2] is rotary
    assert len(model._forward_pre_hooks) == hooks
    assert model.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_rounds_end_with_the_time_but_not_before_the_third(monkeypatch):
    turns = []
    monkeypatch.setattr(cost._Bench, "seconds", lambda bench, name: turns.append(name) or 1.0)
    mitigation_costs(tiny("llama"), row(), LAYOUT, torch.float32, ["fused attention"], TimeLimit(9, 0))
    assert len(turns) == 3


def test_reference_is_measured_even_if_nobody_asked_for_it():
    costs = mitigation_costs(tiny("llama"), row(), LAYOUT, torch.float32, ["eager attention"], TimeLimit(1))
    assert list(costs) == ["eager attention"]
    assert costs["eager attention"].memory_ratio > 1


def test_eager_attention_is_not_tried_where_its_scores_would_not_fit(monkeypatch):
    monkeypatch.setattr(cost, "EAGER_BYTES", 1000)
    costs = mitigation_costs(tiny("llama"), row(), LAYOUT, torch.float32, ["eager attention"], TimeLimit(1))
    assert costs["eager attention"].startswith("eager attention would materialise")


def test_sliding_window_is_refused_by_the_layout_mends_alone():
    costs = mitigation_costs(tiny("mistral"), row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    for name in ("anchor layout", "positions reset"):
        assert "sliding window of 20 tokens" in costs[name]
    assert isinstance(costs["split product"], Cost)


def test_soft_cap_leaves_eager_attention_to_compare_with():
    costs = mitigation_costs(tiny("gemma2"), row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    for name in set(MITIGATIONS) - {"eager attention", "anchor layout", "positions reset"}:
        assert costs[name] == (
            "Gemma2ForCausalLM caps its attention scores at 50, which PyTorch's fused attention cannot do"
        )
    assert costs["eager attention"].time_ratio == 1
    assert isinstance(costs["anchor layout"], Cost)
    assert isinstance(costs["positions reset"], Cost)


def test_nothing_to_compare_with(monkeypatch):
    monkeypatch.setattr(cost, "EAGER_BYTES", 1000)
    costs = mitigation_costs(
        tiny("gemma2"), row(), LAYOUT, torch.bfloat16, ["anchor layout", "eager attention"], TimeLimit(1)
    )
    assert "nothing to compare with" in costs["anchor layout"]
    assert "would materialise" in costs["eager attention"]


def test_a_model_that_rounds_after_its_rotation_has_no_float32_attention():
    costs = mitigation_costs(tiny("cohere"), row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    for name in ("split product", "float32 attention"):
        assert "CohereForCausalLM round queries and keys to bfloat16" in costs[name]
    assert isinstance(costs["float32 rotation"], Cost)


def test_what_does_not_fit_is_a_reason(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(mitigated_attention._FUNCTIONS, "float32 attention", full)
    costs = mitigation_costs(
        tiny("llama"), row(), LAYOUT, torch.bfloat16, ["float32 attention"], TimeLimit(1)
    )
    assert costs["float32 attention"] == "cpu memory is too small for float32 attention with 96 tokens"


def test_layouts_of_the_layout_mends():
    layout = PackedLayout.from_segments([1, 3, 2, 4], [0, 1, 2, 1], "full", 0)
    found = anchored(layout)
    assert (found.pattern, found.anchor_length, found.total_length) == ("anchor", 1, 10)
    # The first document was one token, which is the anchor now.
    assert found.document_ids.tolist() == [-1, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert found.position_ids.tolist() == list(range(10))
    found = separated(layout)
    assert (found.pattern, found.anchor_length) == ("intra_document", 0)
    assert found.document_ids.tolist() == layout.document_ids.tolist()
    assert found.position_ids.tolist() == [0, 0, 1, 2, 0, 1, 3, 4, 5, 6]
    layout = PackedLayout.from_lengths([3, 2], "full", 2)
    assert anchored(layout).document_ids.tolist() == layout.document_ids.tolist()
    assert separated(layout).document_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_real_checkpoint(stories260k: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.bfloat16).eval()
    costs = mitigation_costs(model, row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    assert [name for name, value in costs.items() if not isinstance(value, Cost)] == ["tf32 attention"]
    runner = Runner(AuditedModel.of(model), LENGTH)
    exact = runner.run(row(), EXACT, torch.arange(LENGTH)).hidden
    copied = copy_in_dtype(model, torch.bfloat16)
    errors = {name: rms(hidden(copied, name, row()) - exact) for name in ATTENDED}
    budget = 2 * errors["fused attention"] + torch.finfo(torch.bfloat16).eps * rms(exact)
    assert all(error <= budget for error in errors.values()), errors


def test_engine_error_where_scores_are_not_a_softmax_of_products():
    query, key, value, _ = raw(torch.bfloat16, 0)
    for option in ({"s_aux": torch.zeros(4)}, {"softcap": 50.0}):
        with pytest.raises(EngineError, match="Layer does to its scores"):
            split_product(Layer(), query, key, value, None, **option)
