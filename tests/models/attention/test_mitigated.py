"""Mitigated attention: each mitigation computes what it says, on a copy, and leaves the model as it was."""

import copy

import pytest
import torch
import transformers
from torch import nn

from ropewalk import EngineError, RopewalkError
from ropewalk.audit.arithmetic import EXACT
from ropewalk.audit.passes import Runner
from ropewalk.models.attention import mitigated as mitigated_attention
from ropewalk.models.attention.intercept import AuditedModel
from ropewalk.models.attention.mitigated import (
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
from ropewalk.models.load import attach, rotary_module
from ropewalk.models.losses import decoder_of
from tests.models.mitigation_cases import LENGTH, hidden, rms, row, tiny

ATTENDED = ("fused attention", *FUSED_MITIGATIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "deepseek_v2", "deepseek_v3"])
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


@pytest.mark.parametrize(
    ("family", "dtypes"), [("llama", {torch.float32}), ("deepseek_v3", {torch.bfloat16})]
)
def test_what_arrives_is_the_narrower_of_queries_and_keys(family, dtypes):
    """Latent attention puts its rotated keys into a tensor of the model's dtype, and its queries not."""
    model = copy_in_dtype(tiny(family), torch.bfloat16)
    with mitigated(model, "float32 attention", exact_rotary(model)) as arrived, torch.no_grad():
        decoder_of(model)(row()[None], use_cache=False)
    assert arrived == dtypes


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


def test_unknown_mend():
    model = copy_in_dtype(tiny("llama"), torch.float32)
    with pytest.raises(RopewalkError, match="unknown mitigation 'prayer'"), mitigated(model, "prayer", None):
        pass


def test_engine_error_where_scores_are_not_a_softmax_of_products():
    query, key, value, _ = raw(torch.bfloat16, 0)
    for option in ({"s_aux": torch.zeros(4)}, {"softcap": 50.0}):
        with pytest.raises(EngineError, match="Layer changes its attention scores"):
            split_product(Layer(), query, key, value, None, **option)
