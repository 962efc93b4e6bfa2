"""Memory and communication on paper: against counted tensors and keys, and how they move with the mesh."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import PackedLayout
from ropewalk.models.compute import losses
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import BALANCES, MeshShape, row_shards
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import most_ring_keys
from ropewalk.parallel.ring.traffic import ring_bytes as planned_ring_bytes
from ropewalk.planning.sizing import memory as memory_module
from ropewalk.planning.sizing.memory import estimate_memory
from ropewalk.planning.sizing.model_shape import Experts, Latent, ModelShape, ShardedRun
from ropewalk.planning.sizing.traffic import step_communication
from ropewalk.testing import random_layout
from tests.models import every_family
from tests.planning.sizing.sizing_cases import (
    DEEPSEEK_V3,
    LLAMA_4_SCOUT,
    LLAMA_8B,
    MESHES,
    ONE_LAYER,
    QWEN3_30B_A3B,
    SMALL,
    SMALL_EXPERTS,
    saved_by_a_layer,
    saved_by_first_layer,
    sent_in_a_pass,
)
from tests.versions import NEWEST, needs_transformers

GB = 10**9


def run(**changes):
    mesh = changes.pop("mesh", MeshShape(sequence=8))
    return ShardedRun(**{"model": LLAMA_8B, "mesh": mesh, "row_length": 2**17, **changes})


def test_the_chunk_of_logits_is_the_one_of_the_loss():
    assert memory_module.LOGITS_BYTES == losses.LOGITS_BYTES


def test_a_layer_saves_what_autograd_keeps():
    shape = ModelShape.from_config(ModelConfig(SMALL))
    query, kv = 4 * 6, 2 * 6
    # On a CPU without packing there are no copies in runs; each norm keeps a float32 factor, which is left out.
    copies = (query + 2 * kv + query) * 2
    assert saved_by_a_layer(64) == memory_module._saved(shape, 1, 2) - copies + 2 * 4


def test_a_layer_of_latent_attention_saves_what_autograd_keeps():
    config = every_family.tiny_config("deepseek_v3")
    # Values as wide as keys, for which torch has a kernel on a CPU that keeps no scores.
    config.v_head_dim, config.first_k_dense_replace = config.qk_head_dim, 4
    shape = replace(ModelShape.from_config(ModelConfig.of(config)), experts=None)
    query = shape.heads * shape.head_dim
    # Without packing neither q, k nor v is copied; the values are a view of a tensor that has the keys' other part too.
    copies = 3 * query * 2 - shape.heads * config.qk_nope_head_dim * 2
    assert saved_by_first_layer(config, 64) == memory_module._saved(shape, 1, 2) - copies + 4 * 4


def test_latent_vectors_and_narrow_values_are_counted():
    """Narrower values take less everywhere, wider vectors more, and torch's varlen kernel is not among the engines."""
    here = run(model=replace(DEEPSEEK_V3, layers=4, experts=None))
    narrow = estimate_memory(replace(here, model=replace(here.model, value_dim=64)))
    wide = estimate_memory(replace(here, model=replace(here.model, latent=Latent(2048, 64, 1536))))
    assert narrow.layer < estimate_memory(here).layer < wide.layer
    assert memory_module._flash_bytes(here.model, 1, 2) == 0
    assert memory_module._flash_bytes(replace(here.model, value_dim=192), 1, 2) > 0


def test_all_experts_of_llama_4_copy_every_token():
    once = replace(LLAMA_4_SCOUT, experts=replace(LLAMA_4_SCOUT.experts, every_token=False))
    every, some = (memory_module._saved(shape, 1, 2) for shape in (LLAMA_4_SCOUT, once))
    copy = (4 * 8192 + 2 * 5120) * 2 + memory_module.COPY_BYTES
    assert every - some == 15 * copy


def test_a_layer_of_experts_saves_what_autograd_keeps():
    needs_transformers(NEWEST, "experts that keep what is counted")
    shape = ModelShape.from_config(ModelConfig({**SMALL_EXPERTS, "model_type": "mixtral"}))
    query, kv = 4 * 6, 2 * 6
    copies = (query + 2 * kv + query) * 2
    # Left out: a float32 factor of each norm and of the experts' weights, and where each expert's tokens end (int32).
    left_out = 3 * 4 + 5 * 4 / 64
    assert saved_by_a_layer(64, experts=True) == memory_module._saved(shape, 1, 2) - copies + left_out


def test_a_dense_layer_that_saves_more_than_experts_is_counted():
    experts = Experts(4, 1, 16, 1)
    shape = ModelShape(2, 64, 4096, 8, 4, 8, 256, experts=experts)
    dense = replace(shape, experts=None)
    assert memory_module._saved(shape, 1, 2) == memory_module._saved(dense, 1, 2)
    assert memory_module._saved(replace(shape, layers=1), 1, 2) < memory_module._saved(dense, 1, 2)


def test_experts_are_held_whole_and_computed_for_their_tokens_alone():
    """Memory of states grows with all experts, that of activations with those of a token."""
    few, many, more = (
        estimate_memory(run(model=replace(QWEN3_30B_A3B, experts=Experts(number, per_token, 768, 48))))
        for number, per_token in ((64, 8), (128, 8), (128, 16))
    )
    assert many.states > 1.8 * few.states
    assert many.activations == few.activations
    assert many.gathered > 1.8 * few.gathered
    assert more.states == many.states
    assert more.layer > many.layer


def test_states_are_sixteen_bytes_a_parameter_over_the_ranks():
    shape = ModelShape(2, 64, 128, 8, 4, 8, 256)
    for ranks in (1, 2, 4, 8):
        found = estimate_memory(run(model=shape, mesh=MeshShape(replicate=2, sequence=ranks)))
        assert found.states == 16 * shape.parameters // ranks
        assert found.parameters == found.gradients == found.moments // 2


def test_an_adapter_leaves_gradients_and_moments_of_its_own_parameters_alone():
    whole, adapted = estimate_memory(run()), estimate_memory(run(trained=10**7))
    # Frozen weights in the two bytes of bfloat16; of the trained ones float32 masters, gradients and two moments.
    assert whole.states == pytest.approx(16 * LLAMA_8B.parameters / 8, rel=1e-3)
    assert adapted.states == pytest.approx((2 * LLAMA_8B.parameters + 16 * 10**7) / 8, rel=1e-3)
    assert (adapted.gradients, adapted.moments) == (4 * 10**7 / 8, 8 * 10**7 / 8)
    assert adapted.peak < whole.peak


def test_inputs_of_layers_are_kept_or_offloaded():
    kept, moved = estimate_memory(run()), estimate_memory(run(offload=True))
    inputs = 32 * 2**14 * 4096 * 2
    assert (kept.activations, kept.host) == (inputs, 0)
    assert (moved.activations, moved.host) == (inputs // 16, inputs)
    assert moved.peak < kept.peak < estimate_memory(run(checkpointing=False)).peak


@pytest.mark.parametrize("document", [128, 342, 2**17])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (32, 32, 80), (16, 4, 192)])
def test_the_backward_of_attention_holds_what_its_kernel_allocates(document, heads, kv_heads, head_dim):
    """A model of attention alone, whose backward is its peak: every tensor of torch's mha_varlen_bwd, by its shape."""
    tokens, rows = 2**17, 2**17 + 128 * (2**17 // document)
    rounded = {128: 128, 80: 96, 192: 192}[head_dim]
    dq_accum, softmax_d = 4 * rows * heads * rounded, 4 * rows * heads
    expanded = 0 if heads == kv_heads else 2 * 2 * tokens * heads * head_dim
    results = 2 * tokens * (heads + 2 * kv_heads) * head_dim
    inputs = 2 * tokens * (3 * heads + 2 * kv_heads) * head_dim + 4 * tokens * heads
    shape = ModelShape(1, 8, 8, heads, kv_heads, head_dim, 8)
    held = estimate_memory(run(model=shape, mesh=MeshShape(), row_length=tokens)).layer
    allocated = dq_accum + softmax_d + expanded + results + inputs
    assert held >= allocated
    # Not much more: the gathered copies of queries, keys and values, and the exchange's of the output.
    assert (
        held
        <= allocated
        + 4 * tokens * heads * (rounded + 1)
        + 2 * tokens * (3 * heads + 2 * kv_heads) * head_dim * 1.1
    )
    # In float32 another engine attends.
    assert memory_module._flash_bytes(shape, 1, 4) == 0


def test_the_peak_is_the_worst_moment():
    # Short rows: the root's reduction; many tokens: a layer's backward; a large vocabulary: the loss.
    def worst(each):
        found = estimate_memory(each)
        moments = found.moments_of_most
        assert found.peak == max(moments.values())
        return max(moments, key=moments.__getitem__)

    assert worst(run(row_length=1024)) == "the root's reduction"
    assert worst(run(row_length=2**20)) == "a layer's backward"
    wide = ModelShape(1, 64, 64, 1, 1, 64, 500_000)
    assert worst(run(model=wide, mesh=MeshShape(), row_length=4096, dtype="float32")) == "the loss"
    assert worst(run(model=replace(wide, vocab=8, layers=99), mesh=MeshShape(), row_length=1)) in (
        "the update",
        "a layer's backward",
    )


def test_one_rank_alone_gathers_nothing():
    found = estimate_memory(run(mesh=MeshShape(), dtype="float32"))
    assert found.root == found.gathered == found.root_reduction == 0


def test_one_rank_alone_keeps_narrow_parameters_beside_their_masters():
    here = run(mesh=MeshShape(), row_length=1)
    found = estimate_memory(here)
    # Two bytes and four of each parameter, four of its gradient and eight of its moments; AdamW's temporary four.
    assert found.states == 18 * here.model.parameters
    assert found.moments_of_most["the update"] == 22 * here.model.parameters
    assert estimate_memory(replace(here, dtype="float32")).states == 16 * here.model.parameters
    adapted = estimate_memory(replace(here, trained=1000))
    assert adapted.parameters == 2 * here.model.parameters + 6 * 1000


@given(MESHES, st.integers(64, 10**6), st.booleans())
def test_memory_moves_as_it_must(mesh, length, checkpointing):
    here = run(mesh=mesh, row_length=length, checkpointing=checkpointing)
    peak = estimate_memory(here).peak
    assert all(part >= 0 for part in vars(estimate_memory(here)).values())
    assert estimate_memory(replace(here, row_length=2 * length)).peak >= peak
    assert estimate_memory(replace(here, rows_per_batch=2)).peak >= peak
    if mesh.world_size > 1:
        assert estimate_memory(replace(here, mesh=replace(mesh, replicate=mesh.replicate + 1))).peak == peak
        assert estimate_memory(replace(here, mesh=replace(mesh, shard=mesh.shard * 2))).peak <= peak


def test_padding_is_counted():
    assert run(row_length=2**17 + 1).shard_length == 2**14 + 1
    # The longest of three ring parts has 4 of 10 tokens, which two ranks hold.
    assert run(row_length=10, mesh=MeshShape(ring=3, sequence=2)).shard_length == 2


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 5]), st.sampled_from(BALANCES))
@settings(deadline=None, max_examples=60)
def test_no_documents_in_any_cut_send_more_keys_than_their_longest_allows(seed, ring, balance):
    layout = random_layout(97, random.Random(seed), 9, ("full", "intra_document"), max_anchor=0)
    longest = 97 if layout.pattern == "full" else int(layout.document_lengths.max())
    row = row_shards(layout, ring, 1, balance)
    for rank, (sent, received) in enumerate(most_ring_keys(row.chunks, longest)):
        plan = ring_plan((layout,), (row,), rank)
        found = plan.sent_to_others, plan.received_from_others
        assert found[0] <= sent
        assert found[1] <= received
        if layout.pattern == "full":
            assert found == (sent, received)


@pytest.mark.parametrize(
    ("document", "most"), [(1, 0), (2, 1), (17, 16), (33, 32), (40, 39), (64, 63), (65, 64)]
)
def test_some_place_of_a_document_reaches_the_bound(document, most):
    # Two pieces: a document that ends with its last place in the second leaves the others in the first.
    assert most_ring_keys((((0, 64),), ((64, 128),)), document) == ((most, 0), (0, most))
    if document > 1:
        before = [65 - document] * (document < 65)
        layout = PackedLayout.from_lengths([*before, document, 63], "intra_document", anchor_length=0)
        row = row_shards(layout, 2, 1, "contiguous")
        assert ring_plan((layout,), (row,), 0).sent_to_others == most


def test_a_document_that_reaches_far_leaves_less_in_its_first_piece():
    # Of 40 tokens, one stands in the third piece and 32 in the second: 7 are left for the first.
    found = most_ring_keys((((0, 32),), ((32, 64),), ((64, 96),)), 40)
    assert found == ((32 + 7, 0), (32, 32), (0, 7 + 32))


def test_a_cut_by_cost_may_send_more_than_one_document_but_no_more_than_all():
    layout = PackedLayout.from_lengths([193, 1, 318], "anchor", anchor_length=0)
    for checkpointing, ratio in ((True, 6 / 5), (False, 4 / 3)):
        here = ShardedRun(ONE_LAYER, MeshShape(ring=2), 512, checkpointing=checkpointing)
        one = step_communication(here).ring
        # At the very most every rank sends every key to every other.
        assert one < sent_in_a_pass(layout, 2, checkpointing=checkpointing) <= ratio * one


@pytest.mark.parametrize(("ring", "sequence"), [(2, 1), (8, 1), (4, 2), (8, 8), (2, 16)])
@pytest.mark.parametrize("length", [2**12 + 6, 2**17, 2**22])
def test_the_ring_holds_the_slots_of_its_plan(ring, sequence, length):
    here = run(mesh=MeshShape(ring=ring, sequence=sequence), row_length=length)
    slots = length + -(-here.places * sequence // 2)
    if length < 2**20:
        layout = PackedLayout.from_lengths([length], "full", anchor_length=0)
        row = row_shards(layout, ring, sequence, "zigzag")
        most = max(len(ring_plan((layout,), (row,), rank).slots) for rank in range(ring))
        # Pieces differ by a token, and places of a rank are padded to a multiple of Ulysses' ranks.
        assert abs(slots - most) <= ring + sequence
    # At 4M tokens a key/value head by itself is more than one exchange may bring.
    kv_heads = max(8, sequence) // sequence
    heads = max(1, min(kv_heads, 2**30 // (length * 512)))
    query_heads = 32 // max(8, sequence)
    kept, exchange = slots * kv_heads * 512, slots * heads * 512 * max(4, 1 + query_heads)
    assert memory_module._ring_bytes(here) == (kept, exchange)
    # Attention's backward, in which the exchange takes place, begins when the MLP's has ended.
    held, of_mlp, of_attention = memory_module._layer_bytes(here)
    found = estimate_memory(here)
    assert found.layer + found.ring == held + max(of_mlp, of_attention + exchange) + kept
    assert kept <= found.ring <= kept + exchange
    # Without checkpointing every layer keeps what it has received.
    one = replace(here, checkpointing=False)
    assert estimate_memory(one).ring == found.ring - kept
    without = replace(one, mesh=MeshShape(sequence=sequence), row_length=here.places * sequence)
    assert without.places == one.places
    assert estimate_memory(one).activations == estimate_memory(without).activations + 32 * kept


def test_documents_that_end_within_a_shard_would_send_nothing():
    layout = PackedLayout.from_lengths([16] * 4, "intra_document", anchor_length=0)
    row = row_shards(layout, 2, 1, "contiguous")
    plan = ring_plan((layout,), (row,), 0)
    assert planned_ring_bytes(plan, 2, 6, 6, torch.bfloat16) == (0, 0)
