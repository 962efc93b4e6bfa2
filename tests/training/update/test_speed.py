"""Operations of a step against torch's own counter, and against the entries of dense masks."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from ropewalk.attention import PackedLayout
from ropewalk.attention.options import Locality
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.config.model import ModelConfig
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.time import GPUS, gpu_named
from ropewalk.training.update.speed import Speed, adapter_flops

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="eager",
)
SHAPE = ModelShape.from_config(ModelConfig.of(CONFIG))
LENGTH = 24


def batch(layout):
    return SimpleNamespace(layouts=(layout,))


def counted(layout, layers):
    """Operations in 1 second of one row, by products with parameters and by pairs."""
    return Speed(SHAPE, layers).of([batch(layout)], 1.0)["flops_per_second"]


def test_operations_are_those_of_torchs_counter_but_for_pairs_that_are_masked():
    model = LlamaForCausalLM(CONFIG)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None], use_cache=False).logits.sum().backward()
    # Eager attention computes all pairs: a score and a value of 8 dimensions each, twice more in the backward.
    masked = LENGTH * LENGTH - LENGTH * (LENGTH + 1) // 2
    per_pair = 3 * 2 * 4 * (8 + 8)
    row = PackedLayout.from_lengths([LENGTH], "full", 0)
    assert counted(row, {Locality(): 3}) == counter.get_total_flops() - 3 * masked * per_pair


@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
@pytest.mark.parametrize("window", [None, 5])
def test_pairs_are_the_entries_of_the_mask(pattern, window):
    row = PackedLayout.from_lengths(
        [7, 12, 4], anchor_length=1 if pattern == "anchor" else 0, pattern=pattern
    )
    locality = Locality(window=window)
    pairs = int(row.dense_mask(locality).sum())
    none = counted(row, {})
    assert counted(row, Counter([locality, locality, Locality()])) - none == (
        (2 * pairs + int(row.dense_mask(Locality()).sum())) * 3 * 2 * 4 * (8 + 8)
    )


def test_ranks_that_share_a_row_take_equal_parts_and_the_peak_makes_a_share():
    row = PackedLayout.from_lengths([LENGTH], "full", 0)
    layers = {Locality(): 3}
    found = Speed(SHAPE, layers, 2, 1e6).of([batch(row)] * 4, 3.0)
    assert found["flops_per_second"] == pytest.approx(4 * counted(row, layers) / 2 / 3.0)
    assert found["mfu"] == found["flops_per_second"] / 1e6
    assert Speed(None, layers, 1, 1e6).of([batch(row)], 1.0) == {}


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
        ("NVIDIA GeForce RTX 4090", None),
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
    whole = LossModel(model, OutputHead.unchecked(model))
    extra = adapter_flops(SHAPE, whole)
    row = PackedLayout.from_lengths([LENGTH], "full", 0)
    found = Speed(SHAPE, {Locality(): 3}, adapter=extra).of([batch(row)], 1.0)["flops_per_second"]
    masked = LENGTH * LENGTH - LENGTH * (LENGTH + 1) // 2
    assert found == counter.get_total_flops() - 3 * masked * 3 * 2 * 4 * (8 + 8)
