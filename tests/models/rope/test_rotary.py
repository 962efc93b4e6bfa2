"""A loaded model with a RoPE method a row of the batch: each row as in a model with that method alone."""

import copy

import pytest
import torch
import transformers

from ropewalk import RopewalkError
from ropewalk.models.load import attach
from ropewalk.models.rope.rotary import rope_of, rope_of_rows, rotary_module
from ropewalk.rope import Default, LongRope, RotaryEmbedding, RotaryRows, Yarn, methods_from_config
from tests.models.families import COMMON, FAMILIES, tiny_model

LENGTHS = (48, 120)
ORIGINAL = 64
TOLERANCE = 120 * 2**-24
"""Of the largest logit: transformers rounds angles of up to 120 rad to float32. (Found: a twentieth of it.)"""
OF_LAYERS = {"gemma3"}
"""Families with a RoPE method for each layer type."""


def scaled(family, dtype=torch.float64):
    """A model of a family in which attention counts: at the usual start its scores are next to nothing."""
    model = tiny_model(family, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(6)
    return model


def methods_for(method):
    """Methods of different kinds for a model."""
    dim, theta = method.rotary_dim, method.rope_theta
    pairs = dim // 2
    return [
        method,
        Yarn(dim, theta, 2.0, ORIGINAL),
        LongRope(dim, theta, (1.0,) * pairs, tuple(1.0 + i / 2 for i in range(pairs)), 1.1, ORIGINAL),
        LongRope(dim, theta, (1.1,) * pairs, (3.0,) * pairs, 1.1, ORIGINAL, start_tokens=4),
    ]


def ids_of(length):
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module", params=sorted(set(FAMILIES) - OF_LAYERS))
def ours(request):
    # torch multiplies the experts of a mixture in float32 at most.
    model = scaled(request.param, torch.float32 if "moe" in request.param else torch.float64)
    attach(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_as_the_model_with_each_method_alone(ours, length):
    own = rotary_module(ours)[2]
    methods = methods_for(own.methods[None])
    ids = ids_of(length)
    with rope_of_rows(ours, methods, length):
        together = ours(ids.expand(len(methods), -1), use_cache=False).logits
    found = []
    for row, method in enumerate(methods):
        with rope_of(ours, method):
            alone = ours(ids, use_cache=False).logits[0]
        found.append(alone)
        # Products of other shapes sum in another order: some hundred terms, each rounded to the unit.
        unit = torch.finfo(ours.dtype).eps
        error = (together[row] - alone).abs().max()
        assert error <= 1000 * unit * alone.abs().max(), method.name
    # The methods differ by far more, or the test would say nothing.
    assert min(float((a - found[0]).abs().max()) for a in found[1:]) > 1e-3 * float(found[0].abs().max())
    assert rotary_module(ours)[2] is own
    assert own.total_length is None


def test_a_model_with_a_method_for_each_row_is_found_and_not_changed_again():
    model = scaled("llama")
    attach(model)
    method = rotary_module(model)[2].methods[None]
    with rope_of_rows(model, methods_for(method), 48):
        assert isinstance(rotary_module(model)[2], RotaryRows)
        with pytest.raises(RopewalkError, match="leave rope_of_rows"), rope_of(model, method):
            pass


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", ["llama", "cohere2", "glm4", "gpt_neox", "qwen3"])
def test_a_row_is_as_transformers_runs_the_config(family, length):
    model = scaled(family)
    stock = copy.deepcopy(model)
    attach(model)
    method = methods_for(rotary_module(model)[2].methods[None])[2]
    _, extra = FAMILIES[family]
    told = model.config.to_dict()
    parameters = {
        **(told.get("rope_parameters") or {}),
        "rope_type": "longrope",
        "short_factor": list(method.short_factor),
        "long_factor": list(method.long_factor),
        "attention_factor": method.attention_factor,
        "original_max_position_embeddings": ORIGINAL,
        "factor": 4.0,
    }
    config = type(model.config)(
        **{**COMMON, **extra, "rope_parameters": parameters, "max_position_embeddings": 4 * ORIGINAL}
    )
    theirs = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    )
    theirs.load_state_dict(stock.state_dict())
    ids = ids_of(length)
    with rope_of_rows(model, [Default(method.rotary_dim, 5000.0), method], length):
        mine = model(ids.expand(2, -1), use_cache=False).logits
    expected = theirs(ids, use_cache=False).logits[0]
    worst = expected.abs().max()
    assert (mine[1] - expected).abs().max() <= TOLERANCE * worst
    assert (mine[0] - expected).abs().max() > 1e-2 * worst


def test_a_block_that_raises_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    attach(model)
    own = rotary_module(model)[2]
    model.train()
    with (
        pytest.raises(KeyError, match="RotaryRows"),
        rope_of_rows(model, methods_for(own.methods[None]), 100),
    ):
        raise KeyError(type(model.base_model.rotary_emb).__name__)
    assert rotary_module(model)[2] is own
    assert own.training
    assert own.total_length is None


def test_models_whose_rope_cannot_be_exchanged_are_refused():
    stock = tiny_model("llama")
    method = next(iter(methods_from_config(stock.config.to_dict()).values()))
    with (
        pytest.raises(RopewalkError, match=r"runs transformers' own .*load the model with exact_rope=True"),
        rope_of_rows(stock, [method], 10),
    ):
        pass
    attach(stock)
    with (
        pytest.raises(RopewalkError, match="has rotary_dim 16, but LlamaForCausalLM rotates 8 dimensions"),
        rope_of_rows(stock, [method, Default(16, 10000.0)], 10),
    ):
        pass


def test_another_rope_is_for_the_layers_that_limit_the_context():
    """Gemma 3 rotates its windowed layers otherwise: they keep their own method."""
    model = tiny_model("gemma3")
    attach(model)
    own = rotary_module(model)[2].methods
    other = Default(own["full_attention"].rotary_dim, 3e7)
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        before = model(ids).logits
        with rope_of(model, other):
            inside = rotary_module(model)[2].methods
            changed = model(ids).logits
        assert torch.equal(model(ids).logits, before)
    assert inside == {"full_attention": other, "sliding_attention": own["sliding_attention"]}
    assert not torch.equal(before, changed)


def test_layer_types_that_no_layer_has_need_no_frequencies_of_the_stock_module():
    """Mellum's class states a RoPE for layers with a window, and a small model may have none of them."""
    config = transformers.MellumConfig(
        **{**COMMON, "layer_types": ["full_attention"] * 3},
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    assert "sliding_attention" in config.rope_parameters
    model = transformers.AutoModelForCausalLM.from_config(config)
    attach(model, engine="sdpa")
    assert set(rotary_module(model)[2].methods) == {"full_attention"}


def test_a_rotary_module_that_takes_positions_with_axes_alone_is_replaced():
    """As that of Qwen3.5 before transformers 5.19."""
    model = tiny_model("qwen3_5", sharp=True)
    stock = rotary_module(model)[2]
    own = stock.forward

    def forward(x, position_ids):
        assert position_ids.shape[0] == 3
        return own(x, position_ids)

    stock.forward = forward
    attach(model, engine="sdpa")
    assert isinstance(rotary_module(model)[2], RotaryEmbedding)
