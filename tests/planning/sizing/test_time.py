"""Operations on paper against those that torch counts, and the time of transfers."""

from dataclasses import replace

import pytest
import torch
import transformers

from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.time import H100, Cluster, Transfers, model_flops, waiting_seconds
from tests.models import every_family
from tests.planning.sizing.sizing_cases import LLAMA_8B, LLAMA_70B, SMALL


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    shape = ModelShape.from_config(ModelConfig(SMALL))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation="eager"))
    length = 16
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    # Eager attention computes masked pairs, too.
    counted = sum(model_flops(shape, length, shape.layers * length**2))
    # transformers 5.17 multiplies positions and frequencies as matrices, later versions elementwise.
    angles = sum(counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {}).values())
    assert counter.get_total_flops() - angles == counted


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "llama4_text"]
)
def test_operations_of_experts_are_those_that_torch_counts(family):
    """One after the other: torch does not count grouped products."""
    from torch.utils.flop_counter import FlopCounterMode

    config = every_family.tiny_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    model.set_experts_implementation("eager")
    shape = ModelShape.from_config(ModelConfig.of(config))
    length = 16
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    counted = sum(model_flops(shape, length, shape.layers * length**2))
    found = counter.get_flop_counts()
    angles = sum(sum(each.values()) for name, each in found.items() if name.endswith(".rotary_emb"))
    assert counter.get_total_flops() - angles == counted


def test_dense_operations_keep_the_rule_of_six():
    for shape in (LLAMA_8B, LLAMA_70B):
        tokens = 8192
        dense, _ = model_flops(shape, tokens, 0)
        # All but the embedding and the norms are matrices that a token is multiplied with.
        embedding = shape.vocab * shape.hidden
        norms = (2 * shape.layers + 1) * shape.hidden
        assert dense == 6 * tokens * (shape.parameters - embedding - norms)
        assert 0 < 1 - dense / (6 * tokens * shape.parameters) < 0.07


TRANSFERS = Transfers((10**11, 200), (10**10, 66), (10**10, 192), (10**10, 64), 10**10)
MESH = MeshShape(replicate=2, shard=2, ring=2, sequence=8)


def test_ulysses_takes_its_bytes_by_the_bandwidth_and_a_latency_a_step():
    sent = replace(TRANSFERS, ring=(0, 0))
    exchange, _ = waiting_seconds(sent, MeshShape(sequence=8), 1.0, H100)
    assert exchange == pytest.approx(10**10 / (450e9 * 0.8) + 192 * 7 * 3.4e-6, rel=1e-12)


def test_what_stays_within_a_node_is_not_bound_by_the_network():
    slow = replace(H100, network=1e9, network_latency=1.0)
    within, across = MeshShape(sequence=8), MeshShape(ring=2, sequence=8)
    assert waiting_seconds(TRANSFERS, within, 1.0, slow) == waiting_seconds(TRANSFERS, within, 1.0, H100)
    assert sum(waiting_seconds(TRANSFERS, across, 1.0, slow)) > sum(
        waiting_seconds(TRANSFERS, across, 1.0, H100)
    )


def test_computation_hides_a_share_of_what_can_overlap_and_no_more_than_it_lasts():
    mesh = MeshShape(shard=8)
    sent = replace(TRANSFERS, host=0)
    alone = sum(sent.seconds(mesh, H100)[:1])
    assert waiting_seconds(sent, mesh, 100 * alone, H100)[1] == pytest.approx(0.2 * alone)
    assert waiting_seconds(sent, mesh, alone / 2, H100)[1] == pytest.approx(alone / 2)
    assert waiting_seconds(sent, MeshShape(), 1.0, H100) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("nvlink", 1e11),
        ("network", 1e10),
        ("host_link", 1e9),
        ("link_efficiency", 0.4),
        ("overlap", 0.1),
        ("nvlink_latency", 1e-3),
        ("network_latency", 1e-3),
    ],
)
def test_every_assumption_of_links_matters(name, slower):
    there = replace(Cluster(), **{name: slower})
    assert sum(waiting_seconds(TRANSFERS, MESH, 1.0, there)) > sum(
        waiting_seconds(TRANSFERS, MESH, 1.0, Cluster())
    )
