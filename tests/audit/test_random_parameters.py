"""A random control lasts as long as its context, and leaves no trace."""

import pytest
import torch
import transformers

from ropewalk import RopewalkError
from ropewalk.audit.arithmetic import EXACT
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.passes import Runner, shifted
from ropewalk.audit.random_parameters import random_parameters
from tests.audit.peaked_models import LENGTH, row, state_of, stock_logits, tiny
from tests.models.families import tiny_model


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
