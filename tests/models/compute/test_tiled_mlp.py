"""MLPs and experts in tiles against the same ones at once."""

import copy

import pytest
import torch
from torch import nn

from ropewalk import RopewalkError
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.compute import tiles
from ropewalk.models.compute.float64 import run_experts_one_by_one
from ropewalk.models.compute.routing import recorded_routing
from ropewalk.models.compute.tiled_mlp import tile_mlps
from ropewalk.models.load import checkpoint_activations
from ropewalk.models.sharding import decoder_layers
from tests.models.families import tiny_model

WAYS = ["starcoder2", "phi3", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "gemma4 with experts"]
"""Biases, one matrix for gate and up, a norm after the MLP; experts, alone and beside shared and dense ones."""
ROUNDING = 1e-13
"""Of sums of a few hundred float64 products in another order."""


def gradients(model, rows=2):
    ids = torch.randint(3, 90, (rows, 21), generator=torch.Generator().manual_seed(0))
    logits = model(ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_within(found, expected, rounding=ROUNDING):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            assert float((found[name] - value).norm()) <= rounding * float(value.norm()), name


@pytest.mark.parametrize("family", WAYS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
def test_tiles_change_no_logit_and_no_gradient(family, checkpointing):
    model = tiny_model(family, torch.float64, sharp=family != "phi3")
    run_experts_one_by_one(model)
    model.train()
    expected = gradients(copy.deepcopy(model))
    if checkpointing:
        checkpoint_activations(model)
    # 42 tokens in tiles that end inside rows.
    tile_mlps(model, 8)
    assert_within(gradients(model), expected)


def test_frozen_weights_get_no_gradient_and_those_beside_them_do():
    """As under an adapter: the input of the first MLP needs no gradient, and only one matrix is trained."""
    model = tiny_model("llama", torch.float64).train().requires_grad_(False)
    for trained in ("layers.0.mlp.up_proj.weight", "layers.2.mlp.down_proj.weight"):
        model.model.get_parameter(trained).requires_grad_()
    expected = gradients(copy.deepcopy(model))
    tile_mlps(model, 8)
    assert_within(gradients(model), expected)


def test_an_adapter_trains_as_without_tiles():
    model = tiny_model("llama", torch.float64).train()
    NewAdapter(AdapterSettings(rank=4), 0, "base", 0, 0).add_to(model, torch.float64)
    with torch.no_grad():
        # B is zero at first, and so would be the gradient of A.
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    expected = gradients(copy.deepcopy(model))
    assert all(value.norm() > 0 for name, value in expected.items() if "mlp.up_proj.lora_A" in name)
    tile_mlps(model, 8)
    assert_within(gradients(model), expected)


def test_a_tile_and_no_more_exists_at_a_time(monkeypatch):
    model, most = tiny_model("llama").train(), []
    for layer in decoder_layers(model):
        layer.mlp.act_fn.register_forward_hook(lambda module, given, out: most.append(out.shape[-2]))
    tile_mlps(model, 8)
    gradients(model)
    assert max(most) <= 8
    # 6 tiles of each of 3 layers, forward and backward.
    assert len(most) == 2 * 3 * 6


def test_checkpointing_computes_a_tiled_mlp_twice_as_it_does_a_whole_one():
    """The recomputation of a layer ends at its last saved tensor, the MLP's input; the backward computes the tiles."""
    calls = {}
    for tokens in (10**6, 8):
        model, calls[tokens] = tiny_model("llama").train(), []
        for layer in decoder_layers(model):
            layer.mlp.act_fn.register_forward_hook(
                lambda module, given, out, to=tokens: calls[to].append(out.shape[-2])
            )
        checkpoint_activations(model)
        tile_mlps(model, tokens)
        gradients(model, rows=1)
    assert sum(calls[8]) == sum(calls[10**6]) == 2 * 3 * 21


def test_rows_shorter_than_a_tile_run_as_without():
    model = tiny_model("llama").train()
    expected = gradients(copy.deepcopy(model))
    tile_mlps(model, 42)
    for name, value in gradients(model).items():
        assert torch.equal(value, expected[name])


def mlp_gradients(dtype, tokens=None, autocast=False):
    """Weight gradients of a wide sum: 4,096 tokens whose gradients mostly have one sign."""
    generator = torch.Generator().manual_seed(0)
    model = tiny_model("llama", dtype).train()
    mlp = model.model.layers[0].mlp
    hidden, weights = (torch.rand(1, 4096, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    if tokens is not None:
        tile_mlps(model, tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = mlp(hidden.to(torch.bfloat16).to(dtype))
    out.backward(weights.to(torch.bfloat16).to(out.dtype))
    return {name: p.grad.double() for name, p in mlp.named_parameters()}


def errors(found, expected):
    return [float((found[name] - value).norm() / value.norm()) for name, value in expected.items()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "autocast"])
def test_gradients_of_32_tiles_are_summed_in_float32(dtype, monkeypatch):
    """Tiles may add their own rounding to that of the whole product, but the sum over them adds none."""
    autocast = dtype == torch.float32
    model_in_float64 = mlp_gradients(torch.float64)
    whole = errors(mlp_gradients(dtype, None, autocast), model_in_float64)
    tiled = errors(mlp_gradients(dtype, 128, autocast), model_in_float64)
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(tiled, whole, strict=True))
    if not autocast:
        monkeypatch.setattr(tiles, "_added", lambda total, part: part if total is None else total + part)
        summed_narrow = errors(mlp_gradients(dtype, 128), model_in_float64)
        assert all(narrow > 2 * theirs for narrow, theirs in zip(summed_narrow, whole, strict=True))


def test_routers_see_every_token_once():
    counts = []
    for tokens in (None, 8):
        model = tiny_model("qwen3_moe", torch.float64).train()
        run_experts_one_by_one(model)
        if tokens:
            tile_mlps(model, tokens)
        with recorded_routing(model, balancing=False) as recorder:
            recorder.begin(torch.ones(2, 21, dtype=torch.bool))
            gradients(model)
        counts.append(torch.stack(recorder.totals()))
    assert torch.equal(*counts)


def test_dropout_in_an_mlp_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    with pytest.raises(RopewalkError, match=r"dropout of 0.1 in LlamaMLP.act_fn.1 .* set the dropout to 0"):
        tile_mlps(model, 8)


def test_experts_that_take_no_tokens_are_refused():
    with pytest.raises(RopewalkError, match="tiled_mlp cannot divide the tokens of Llama4TextExperts"):
        tile_mlps(tiny_model("llama4", sharp=True), 8)
