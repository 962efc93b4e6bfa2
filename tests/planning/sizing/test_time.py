"""Parameters, operations and expected time on paper, against small cases that are counted otherwise."""

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import PackedLayout
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100, Cluster, estimate_step, flops
from tests.models import every_family
from tests.planning.sizing.sizing_cases import LLAMA_8B, LLAMA_70B, SMALL


@given(st.integers(1, 60), st.integers(1, 70))
def test_operations_of_attention_follow_the_dense_mask(length, document):
    whole, rest = divmod(length, document)
    lengths = [document] * whole + [rest] * (rest > 0)
    shape = ModelShape.from_config(ModelConfig(SMALL))
    per_pair = flops(shape, 1).attention
    for documents, document_length in ((lengths, document), ([length], None)):
        layout = PackedLayout.from_lengths(documents, "intra_document", anchor_length=0)
        pairs = int(layout.dense_mask().sum())
        assert flops(shape, length, document_length=document_length).attention == pairs * per_pair


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    shape = ModelShape.from_config(ModelConfig(SMALL))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation="eager"))
    length = 16
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    counted = flops(shape, length, checkpointing=False)
    # Eager attention computes masked pairs, too.
    square = counted.attention * length**2 // (length * (length + 1) // 2)
    # transformers 5.17 multiplies positions and frequencies as matrices, later versions elementwise.
    angles = sum(counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {}).values())
    assert counter.get_total_flops() - angles == counted.dense + square


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
    counted = flops(shape, length, checkpointing=False)
    square = counted.attention * length**2 // (length * (length + 1) // 2)
    found = counter.get_flop_counts()
    angles = sum(sum(each.values()) for name, each in found.items() if name.endswith(".rotary_emb"))
    assert counter.get_total_flops() - angles == counted.dense + square


def test_dense_operations_keep_the_rule_of_six():
    for shape in (LLAMA_8B, LLAMA_70B):
        tokens = 8192
        counted = flops(shape, tokens)
        # All but the embedding and the norms are matrices that a token is multiplied with.
        embedding = shape.vocab * shape.hidden
        norms = (2 * shape.layers + 1) * shape.hidden
        assert counted.dense == 6 * tokens * (shape.parameters - embedding - norms)
        assert counted.hardware_dense * 6 == counted.dense * 8
        assert 0 < 1 - counted.dense / (6 * tokens * shape.parameters) < 0.07


def test_recomputation_is_no_work_of_the_model():
    kept, again = (flops(LLAMA_8B, 4096, checkpointing=checkpointing) for checkpointing in (False, True))
    assert kept.model == again.model
    assert again.hardware_attention - kept.hardware_attention == kept.attention // 3
    assert again.hardware_dense - kept.hardware_dense == 2 * 4096 * LLAMA_8B.layer_matrices
    assert flops(LLAMA_8B, 4096, rows=3).model == 3 * kept.model


def run(world=8, length=2**17, **changes):
    return ShardedRun(
        **{"model": LLAMA_8B, "mesh": MeshShape(sequence=world), "row_length": length, **changes}
    )


def test_expected_time_is_the_sum_of_its_parts():
    one = estimate_step(run(1, 4096, checkpointing=False), 2)
    work = one.flops
    assert one.exchange_seconds == one.exposed_seconds == one.sent.total == 0
    seconds = work.hardware_dense / (989.4e12 * 0.75) + work.hardware_attention / (989.4e12 * 0.33)
    assert one.seconds == pytest.approx(seconds, rel=1e-12)
    assert one.tokens_per_second == pytest.approx(8192 / seconds, rel=1e-12)
    assert one.model_flops_utilisation == pytest.approx(work.model / seconds / 989.4e12, rel=1e-12)


def test_ulysses_takes_its_bytes_by_the_bandwidth_and_a_latency_a_step():
    expected = estimate_step(run(), 1)
    # Two exchanges in forward, recomputation and backward of 32 layers, with seven ranks to send to.
    assert expected.exchange_seconds == pytest.approx(
        expected.sent.ulysses / (450e9 * 0.8) + 6 * 32 * 7 * 3.4e-6, rel=1e-12
    )


def test_what_stays_within_a_node_is_not_bound_by_the_network():
    slow = replace(H100, network=1e9, network_latency=1.0)
    assert estimate_step(run(), 1, slow) == estimate_step(run(), 1)
    across = ShardedRun(LLAMA_8B, MeshShape(ring=2, sequence=8), 2**17)
    assert estimate_step(across, 1, slow).seconds > estimate_step(across, 1).seconds


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("peak_flops", 5e14),
        ("matmul_efficiency", 0.3),
        ("attention_efficiency", 0.2),
        ("nvlink", 1e11),
        ("network", 1e10),
        ("host_link", 1e9),
        ("link_efficiency", 0.4),
        ("overlap", 0.1),
        ("nvlink_latency", 1e-3),
        ("network_latency", 1e-3),
    ],
)
def test_every_assumption_of_speed_matters(name, slower):
    mesh = MeshShape(replicate=2, shard=2, ring=2, sequence=8)
    each = ShardedRun(LLAMA_8B, mesh, 2**17, offload=True)
    assert (
        estimate_step(each, 4, replace(Cluster(), **{name: slower})).seconds > estimate_step(each, 4).seconds
    )


@given(st.integers(10, 22), st.integers(0, 3))
def test_no_more_than_the_peak_is_expected(exponent, degree):
    expected = estimate_step(run(2**degree, 2**exponent), 1)
    assert 0 < expected.model_flops_utilisation < 0.75
    documents = estimate_step(run(2**degree, 2**exponent), 1, document_length=1024)
    # Equal where attention is hidden, up to the order of sums.
    assert documents.seconds <= expected.seconds * (1 + 1e-12)
