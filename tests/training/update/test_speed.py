"""Operations of a step against torch's own counter, and against the entries of dense masks."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from ropewalk.attention import PackedLayout
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.attention.hooks import localities_by_layer
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.compute.products import layer_products
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach
from ropewalk.planning.sizing.recurrent import recurrent_shapes
from ropewalk.planning.sizing.time import GPUS, gpu_named
from ropewalk.training.update.speed import Speed, adapter_flops, products_of_pairs
from tests.marks import slow_after
from tests.models.families import HYBRIDS, tiny_model

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="eager",
)
with torch.device("meta"):
    IN_LAYERS = layer_products(LlamaForCausalLM(CONFIG))
PRODUCTS = IN_LAYERS + 61 * 32
LENGTH = 24
PAIR = 4 * (8 + 8)
"""Multiply-adds of a pair in one layer: a score and a value of 8 dimensions in each of 4 heads."""


def batch(layout):
    return SimpleNamespace(layouts=(layout,))


def counted(layout, pairs):
    """Operations in 1 second of one row, by products with parameters and by pairs."""
    return Speed(PRODUCTS, pairs).of([batch(layout)], 1.0)["flops_per_second"]


def whole_row(length=LENGTH):
    return PackedLayout.from_lengths([length], "full", 0)


def masked(length):
    """Pairs that eager attention computes and masks."""
    return length * length - length * (length + 1) // 2


def test_operations_are_those_of_torchs_counter_but_for_pairs_that_are_masked():
    model = LlamaForCausalLM(CONFIG)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None], use_cache=False).logits.sum().backward()
    # Eager attention computes all pairs: a score and a value, twice more in the backward.
    every = counter.get_total_flops() - 3 * masked(LENGTH) * 3 * 2 * PAIR
    assert counted(whole_row(), {EVERYTHING: 3 * PAIR}) == every


@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
@pytest.mark.parametrize("window", [None, 5])
def test_pairs_are_the_entries_of_the_mask(pattern, window):
    row = PackedLayout.from_lengths(
        [7, 12, 4], anchor_length=1 if pattern == "anchor" else 0, pattern=pattern
    )
    locality = Locality(window=window)
    pairs = int(row.dense_mask(locality).sum())
    none = counted(row, {})
    assert counted(row, Counter({locality: 2 * PAIR}) + Counter({EVERYTHING: PAIR})) - none == (
        (2 * pairs + int(row.dense_mask(EVERYTHING).sum())) * 3 * 2 * PAIR
    )


def test_ranks_that_share_a_row_take_equal_parts_and_the_peak_makes_a_share():
    layers = {EVERYTHING: 3 * PAIR}
    found = Speed(PRODUCTS, layers, (), 2, 1e6).of([batch(whole_row())] * 4, 3.0)
    assert found["flops_per_second"] == pytest.approx(4 * counted(whole_row(), layers) / 2 / 3.0)
    assert found["mfu"] == found["flops_per_second"] / 1e6
    assert Speed(None, layers, (), 1, 1e6).of([batch(whole_row())], 1.0) == {}


@pytest.mark.parametrize("family", slow_after(4, ["minimax", "bamba", "lfm2", "qwen3_5", *HYBRIDS]))
def test_recurrent_layers_count_with_their_products(family):
    """Of whole rows: with weights and pairs as torch counts them, and with states as their formula says."""
    model = tiny_model(family, sharp=True, shallow=True)
    if any(type(each).__name__.endswith("Experts") for each in model.modules()):
        model.set_experts_implementation("eager")
    length = 64
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None], use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    with_weights = sum(counts.get(each, 0) for each in (torch.ops.aten.mm, torch.ops.aten.addmm))
    attach(model, engine="sdpa", exact_rope=False)
    speed = Speed.of_stage(LossModel(model, OutputHead.unchecked(model)), None)
    found = speed.of([batch(whole_row(length))], 1.0)["flops_per_second"]
    config = ModelConfig.of(model.config)
    recurrent = sum(each.flops(length) for each in recurrent_shapes(model, config))
    attending = [layer for layer in config.layers if layer.attends]
    # Windows of seven tokens see fewer pairs, which the test above has.
    pairs = products_of_pairs(config, localities_by_layer(model))
    seen = {each: int(whole_row(length).dense_mask(each).sum()) for each in pairs}
    of_pairs = sum(number * seen[each] for each, number in pairs.items())
    assert sum(pairs.values()) == sum(4 * (each.key_dim + each.value_dim) for each in attending)
    assert 0 < len(attending) < len(config.layers) or family == "falcon_h1"
    assert found == with_weights + 3 * recurrent + 3 * 2 * of_pairs
    assert recurrent > 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A10", None),
    ],
)
def test_peaks_are_of_the_modules_they_were_published_for(name, kind):
    assert gpu_named(name) == (None if kind is None else GPUS[kind])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_operations_of_an_adapter_are_those_that_are_done(tied, targets):
    config = LlamaConfig(**CONFIG.to_dict() | {"tie_word_embeddings": tied})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    NewAdapter(AdapterSettings(rank=4, targets=[targets]), 0, "base", 0, 0).add_to(model)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None], use_cache=False).logits.sum().backward()
    extra = adapter_flops(IN_LAYERS, LossModel(model, OutputHead.unchecked(model)))
    speed = Speed(PRODUCTS, {EVERYTHING: 3 * PAIR}, adapter=extra)
    found = speed.of([batch(whole_row())], 1.0)["flops_per_second"]
    assert found == counter.get_total_flops() - 3 * masked(LENGTH) * 3 * 2 * PAIR
