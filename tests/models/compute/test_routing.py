"""Routing of experts: transformers' own loss on the tokens of each row, and counts that add up."""

import json
from importlib import resources

import pytest
import torch
from torch import Tensor

from ropewalk import PackedLayout, RopewalkError
from ropewalk.models.compute.float64 import KeepFloat64
from ropewalk.models.compute.routing import (
    MOST_RECORDED_SINCE,
    RECORDED,
    Routing,
    recorded_routing,
    records_routing,
    routers_of,
)
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach, checkpoint_activations
from tests.models import every_family
from tests.models.families import tiny_model
from tests.versions import needs_transformers

LAYOUT = PackedLayout.from_lengths([20, 1, 18], "anchor")
TOKENS = (31, 40)
"""Of two rows of 40 places: the first one is filled up."""
IS_TOKEN = torch.stack([torch.arange(40) < length for length in TOKENS])
PAIRS = ("gpt_oss", "mixtral", "granitemoehybrid", "qwen3_next", "deepseek_v3")


def made(family):
    """A random model in float64 that takes packed rows, and two rows."""
    model = tiny_model(family, torch.float64, sharp=True)
    attach(model)
    if not routers_of(model):
        needs_transformers(MOST_RECORDED_SINCE, f"recording the routers of {family}")
    return model.train(), torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def recorded(model, ids, is_token=IS_TOKEN, layout=LAYOUT):
    """Counts of all passes, and the load-balancing loss of this one, by the tokens of its rows."""
    with KeepFloat64(), recorded_routing(model, balancing=True) as recorder:
        recorder.begin(is_token)
        model.model(ids, layout=[layout] * len(ids))
        recorder.end()
        return recorder.totals(), recorder.balancing_loss(None) / int(is_token.sum())


def logits_of(model, ids):
    with KeepFloat64():
        return model.model(ids, layout=[LAYOUT] * len(ids), output_router_logits=True).router_logits


def one_hot_loss(logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Equations 4 to 6 of Switch Transformer (arXiv:2101.03961) written out, over all layers at once."""
    every = torch.cat(logits)
    chosen = torch.zeros_like(every).scatter(1, every.topk(top_k).indices, 1.0)
    return every.shape[-1] * (chosen.mean(0) * every.softmax(-1).mean(0)).sum()


def by_rows(logits, loss):
    """The loss of each row's tokens alone, weighted with their number."""
    rows = [tuple(each.view(2, 40, -1)[row, :length] for each in logits) for row, length in enumerate(TOKENS)]
    return sum(loss(row) * length for row, length in zip(rows, TOKENS, strict=True)) / sum(TOKENS)


@pytest.mark.parametrize("family", PAIRS)
def test_loss_and_gradient_are_those_of_the_definition_on_the_tokens_of_each_row(family):
    model, ids = made(family)
    _, found = recorded(model, ids)
    expected = by_rows(logits_of(model, ids), lambda row: one_hot_loss(row, 2))
    # A few hundred terms of a sum in another order, 2**-52 each.
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-13)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (found, expected)]
    largest = max(float(g.abs().max()) for g in gradients[1] if g is not None)
    assert largest > 0
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or float((one - other).abs().max()) <= 1e-11 * largest


def test_loss_is_the_one_of_transformers_with_its_attention_mask():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, ids = made("mixtral")
    with torch.no_grad():
        _, found = recorded(model, ids)
        logits = logits_of(model, ids)
    rows = [tuple(each.view(2, 40, -1)[row] for each in logits) for row in range(2)]
    each = [load_balancing_loss_func(row, 4, 2, IS_TOKEN[[n]]) for n, row in enumerate(rows)]
    # Its shares are float32.
    expected = sum(loss * length for loss, length in zip(each, TOKENS, strict=True)) / sum(TOKENS)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


@torch.no_grad()
def test_padding_changes_nothing_and_would_if_it_counted():
    model, ids = made("gpt_oss")
    filled = PackedLayout.from_lengths([20, 10, 10], "anchor")
    short = PackedLayout.from_lengths([20, 10], "anchor")
    length = short.total_length
    is_token = (torch.arange(filled.total_length) < length)[None]
    ids = torch.cat([ids, ids], dim=1)[:1, : filled.total_length]
    counts, loss = recorded(model, ids, is_token, filled)
    alone, expected = recorded(model, ids[:, :length], is_token[:, :length], short)
    assert [each.tolist() for each in counts] == [each.tolist() for each in alone]
    assert float(loss) == pytest.approx(float(expected), rel=1e-13)
    _, counted = recorded(model, ids, torch.ones_like(is_token), filled)
    assert abs(float(counted) - float(expected)) > 1e-4


def test_layers_that_are_computed_again_are_counted_once_and_have_the_same_gradient():
    torch.manual_seed(0)
    found = []
    for again in (False, True):
        model = tiny_model("qwen3_moe").train()
        attach(model)
        if again:
            checkpoint_activations(model)
        ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
        with recorded_routing(model, balancing=True) as recorder:
            recorder.begin(IS_TOKEN)
            hidden = model.model(ids, layout=[LAYOUT] * 2).last_hidden_state
            recorder.end()
            loss = recorder.balancing_loss(None) / sum(TOKENS)
            (hidden.square().mean() + loss).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append(([each.tolist() for each in recorder.totals()], float(loss.detach()), gradients))
    (counts, loss, gradients), (counts_again, loss_again, gradients_again) = found
    assert counts == counts_again
    assert [sum(each) for each in counts] == [2 * sum(TOKENS)] * 3
    assert loss == loss_again
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


def test_nothing_of_the_recording_stays_behind():
    model, ids = made("gpt_oss")
    before = [len(router.module._forward_hooks) for router in routers_of(model)]
    recorded(model, ids)
    assert [len(router.module._forward_hooks) for router in routers_of(model)] == before


def test_a_model_without_experts_has_no_routers():
    model = tiny_model("llama")
    assert routers_of(model) == []
    assert not records_routing(ModelConfig.of(model.config))
    with pytest.raises(RopewalkError, match=r"LlamaForCausalLM has none; set router_aux_loss: 0"):
        recorded_routing(model, balancing=True).__enter__()


def test_the_class_of_a_whole_block_is_not_taken_for_a_router(monkeypatch):
    """As transformers before 5.19 declares Llama 4's: that block's output need not hold the logits."""
    model = tiny_model("mixtral", sharp=True)
    assert records_routing(ModelConfig.of(model.config))
    block = type(model.model.layers[0].mlp)
    for owner in (*type(model).__mro__, type(model.model)):
        if RECORDED in (vars(owner).get("_can_record_outputs") or {}):
            monkeypatch.setattr(owner, "_can_record_outputs", {RECORDED: block})
    assert routers_of(model) == []
    assert not records_routing(ModelConfig.of(model.config))


def test_figures_of_even_and_of_collapsed_routing():
    routing = Routing(((5, 5, 5, 5), (20, 0, 0, 0), (10, 10, 0, 0), (7,)))
    assert routing.max_violation == [0, 3, 1, 0]
    assert routing.entropy == pytest.approx([1, 0, 0.5, 1])
    assert routing.unused == [0, 3, 2, 0]


TESTED = sorted(
    name
    for name, cells in json.loads((resources.files("ropewalk.models") / "families.json").read_text())[
        "families"
    ].items()
    if cells["packed_training"]["status"] == "tested"
)
CHOOSES_BY_MORE = ("ernie4_5_moe",)
"""Families whose tiny model has a random bias that its logits do not show."""


@pytest.mark.slow
@pytest.mark.parametrize("family", TESTED)
def test_every_family_with_experts_is_recorded(family):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = every_family.tiny_model(family, torch.float32)
    routers = routers_of(model)
    # By what the class is called, which is how transformers' own code is written.
    has_experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    if has_experts and not routers:
        needs_transformers(MOST_RECORDED_SINCE, f"recording the routers of {family}")
    assert bool(routers) == has_experts
    if not routers:
        return
    assert records_routing(ModelConfig.of(model.config))
    ids = torch.randint(3, 97, (2, 40))
    with torch.no_grad(), recorded_routing(model, balancing=True) as recorder:
        recorder.begin(IS_TOKEN)
        logits = model(ids, use_cache=False, output_router_logits=True).router_logits
        recorder.end()
        loss = recorder.balancing_loss(None) / sum(TOKENS)
    top_k = recorder._top_k
    assert [int(each.sum()) for each in recorder.totals()] == [sum(TOKENS) * top_k] * len(routers)
    assert len(logits) == len(routers)
    experts = logits[0].shape[-1]
    expected = by_rows(logits, lambda row: load_balancing_loss_func(row, experts, top_k))
    if family not in CHOOSES_BY_MORE:
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
