"""Products counted from a model's modules against those that torch counts, and against dimensions in configs."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.models.adapter import NewAdapter
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.compute.products import layer_products
from ropewalk.models.config.model import ModelConfig
from ropewalk.planning.sizing.model_shape import MIXTURES, ModelShape
from tests.marks import slow_after
from tests.models import every_family
from tests.models.families import ATTENTIONS, HYBRIDS, tiny_model

LENGTH = 24
COUNTED = [name for name in (*HYBRIDS, *ATTENTIONS) if name not in ("gemma3n", "llama4")]
"""Gemma 3n runs its routers of streams twice for a token, and Llama 4 its experts as batches, which torch counts apart;
dimensions of Llama 4 are compared below."""


def products_by_torch(model):
    """Multiply-adds of a token with weights, which are products of two matrices; those of states are batches."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(LENGTH)[None], use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(each, 0) for each in (torch.ops.aten.mm, torch.ops.aten.addmm)) / (2 * LENGTH)


@pytest.mark.parametrize("family", slow_after(len(HYBRIDS), COUNTED))
def test_a_token_is_multiplied_with_what_torch_counts(family):
    model = tiny_model(family, sharp=True)
    if any(type(each).__name__.endswith("Experts") for each in model.modules()):
        # torch does not count grouped products.
        model.set_experts_implementation("eager")
    assert layer_products(model) == products_by_torch(model) - model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("family", slow_after(2, ["llama4_text", "minicpm3", *MIXTURES]))
def test_experts_and_narrow_vectors_are_those_of_the_config(family):
    config = every_family.tiny_config(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert layer_products(model) == ModelShape.from_config(ModelConfig.of(config)).layer_matrices


def test_an_adapter_adds_nothing():
    model = tiny_model("llama")
    before = layer_products(model)
    NewAdapter(AdapterSettings(rank=2, targets=["all-linear"]), 0, "base", 0, 0).add_to(model)
    assert layer_products(model) == before


def test_encoders_are_no_part_of_the_decoder():
    config = every_family.tiny_config("gemma3")
    model = every_family.tiny_model("gemma3", torch.float32)
    assert any("vision" in name for name, _ in model.named_modules())
    alone = transformers.Gemma3ForCausalLM(config.text_config)
    assert layer_products(model) == layer_products(alone) == products_by_torch(alone) - 97 * 32


@pytest.mark.parametrize("shape", [(4, 32), (2, 4, 32), (2, 2, 4, 8)])
def test_weights_of_an_unknown_kind_are_not_counted(shape):
    model = tiny_model("llama")
    model.model.layers[1].more = nn.ParameterList([torch.ones(shape)])
    assert layer_products(model) is None


def test_a_model_without_a_list_of_its_layers_is_not_counted():
    model = tiny_model("llama")
    model.config.num_hidden_layers += 1
    assert layer_products(model) is None
