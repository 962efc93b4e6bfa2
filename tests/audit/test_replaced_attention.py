"""Attention taken out of a model leaves no trace, whatever fails."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from ropewalk import EngineError, RopewalkError
from ropewalk.attention.options import Locality
from ropewalk.audit import replaced_attention
from ropewalk.audit.arithmetic import stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.passes import Runner, shifted
from ropewalk.audit.replaced_attention import replacing_attention
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import load_model
from tests.audit.peaked_models import LENGTH, row, sharp, state_of, stock_logits, tiny
from tests.models.families import WINDOW, tiny_model

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

    with (
        pytest.raises(RuntimeError, match="the answer fails"),
        replacing_attention(traced.model, answer, dtype),
    ):
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
    with replacing_attention(model, lambda call: call.value, torch.float64):
        found = model.model.embed_tokens(input=row())
    assert found.dtype == torch.float64
    assert model.model.embed_tokens.padding_idx == 0


def test_the_models_own_attention_outside_of_an_audit_is_not_ours():
    model = tiny("llama")
    AuditedModel.of(model)
    expected = stock_logits(model, row())
    model.set_attn_implementation(replaced_attention.NAME)
    with pytest.raises(EngineError, match="LlamaAttention was called with the audit's attention outside"):
        stock_logits(model, row())
    model.set_attn_implementation("eager")
    assert torch.equal(stock_logits(model, row()), expected)


def test_the_answer_may_round_to_float32_where_the_rest_may_not():
    model = tiny("llama")
    seen = []

    def answer(call):
        seen.append((call.query.dtype, call.query.float().dtype, call.query.to(torch.float32).dtype))
        return call.value.repeat_interleave(2, dim=0)

    with replacing_attention(model, answer, torch.float64):
        hidden = model.model(row()[None], use_cache=False).last_hidden_state
    assert hidden.dtype == torch.float64
    assert seen == [(torch.float64, torch.float32, torch.float32)] * 3


def test_chunks_are_no_windows():
    """The same tokens in a window and in chunks: transformers tells both to its masks by one name."""
    model = sharp("llama4 without norm")
    found = {}

    def answer(call):
        found[call.layer] = call.options.locality
        return call.value.repeat_interleave(2, dim=0)

    with replacing_attention(model, answer, torch.float32):
        model.model(row()[None], use_cache=False)
    assert tuple(found.values()) == ModelConfig.of(model.config).localities
    assert {locality.chunk for locality in found.values()} == {WINDOW, None}


def test_a_window_that_contradicts_the_config_is_refused():
    model = sharp("llama4 without norm")
    with replacing_attention(model, lambda call: call.value.repeat_interleave(2, dim=0), torch.float32):
        replaced_attention._active[-1].localities = (
            Locality(chunk=WINDOW + 1),
        ) * model.config.num_hidden_layers
        with pytest.raises(EngineError, match="is 7 in the model but 8 in the config; correct the config"):
            model.model(row()[None], use_cache=False)


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
        replacing_attention(model, answer, torch.float64),
    ):
        model.model(row(8)[None], use_cache=False)
    assert model.get_experts_implementation() == grouped


def test_a_batch_of_two_rows_is_refused():
    model = tiny_model("llama")
    with (
        pytest.raises(RopewalkError, match="one row at a time, got a batch of 2"),
        replacing_attention(model, lambda call: call.value, torch.float32),
    ):
        model.model(row(8)[None].repeat(2, 1), use_cache=False)
