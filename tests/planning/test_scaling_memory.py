"""Memory and communication on paper: against counted tensors and keys, and how they move with the mesh."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import EngineError, PackedLayout
from ropewalk.integrations import losses
from ropewalk.parallel import MeshShape, row_shards
from ropewalk.parallel.ring_plan import ring_bytes as planned_ring_bytes
from ropewalk.parallel.ring_plan import ring_plan
from ropewalk.planning import memory as memory_module
from ropewalk.planning.communication import (
    fsdp_bytes,
    packed_ring_bytes,
    replica_bytes,
    ring_bytes,
    ring_pieces,
    step_communication,
    ulysses_bytes,
)
from ropewalk.planning.memory import estimate_memory
from ropewalk.planning.model_shape import ModelShape, ShardedRun
from scaling_cases import LLAMA_8B, LLAMA_70B, SMALL, saved_by_a_layer

GB = 10**9


def run(**changes):
    mesh = changes.pop("mesh", MeshShape(sequence=8))
    return ShardedRun(**{"model": LLAMA_8B, "mesh": mesh, "row_length": 2**17, **changes})


def test_the_chunk_of_logits_is_the_one_of_the_loss():
    assert memory_module.LOGITS_BYTES == losses.LOGITS_BYTES


def test_a_layer_saves_what_autograd_keeps():
    shape = ModelShape.from_config(SMALL)
    query, kv = 4 * 6, 2 * 6
    # On a CPU without packing there are no copies in runs; each norm keeps a float32 factor, which is left out.
    copies = (query + 2 * kv + query) * 2
    assert saved_by_a_layer(64) == memory_module._saved(shape, 1, 2) - copies + 2 * 4


def test_states_are_sixteen_bytes_a_parameter_over_the_ranks():
    shape = ModelShape(2, 64, 128, 8, 4, 8, 256)
    for ranks in (1, 2, 4, 8):
        found = estimate_memory(run(model=shape, mesh=MeshShape(replicate=2, sequence=ranks)))
        assert found.states == 16 * shape.parameters // ranks
        assert found.parameters == found.gradients == found.moments // 2


def test_inputs_of_layers_are_kept_or_offloaded():
    kept, moved = estimate_memory(run()), estimate_memory(run(offload=True))
    inputs = 32 * 2**14 * 4096 * 2
    assert (kept.activations, kept.host) == (inputs, 0)
    assert (moved.activations, moved.host) == (inputs // 16, inputs)
    assert moved.peak < kept.peak < estimate_memory(run(checkpointing=False)).peak


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


MESHES = st.builds(
    MeshShape,
    replicate=st.integers(1, 3),
    shard=st.integers(1, 4),
    ring=st.integers(1, 4),
    sequence=st.sampled_from([1, 2, 4, 8]),
)


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


@given(MESHES, st.integers(64, 10**5), st.booleans(), st.integers(1, 3))
def test_communication_is_none_alone_and_grows_with_passes(mesh, length, checkpointing, passes):
    here = run(mesh=mesh, row_length=length, checkpointing=checkpointing)
    once, more = step_communication(here), step_communication(here, passes)
    assert vars(more) == {name: passes * sent for name, sent in vars(once).items()}
    assert (once.fsdp == 0) == (mesh.shard_degree == 1)
    assert (once.replicas == 0) == (mesh.replicate == 1)
    assert (once.ulysses == 0) == (mesh.sequence == 1)
    assert (once.ring == 0) == (mesh.ring == 1)


def test_fsdp_sends_eight_bytes_a_parameter_almost():
    # Gathered twice in bfloat16 and reduced in float32, of which a rank sends all but its own part.
    sent = fsdp_bytes(LLAMA_70B.units, MeshShape(shard=64), 2)
    root = 2 * 2 * LLAMA_70B.head_parameters
    assert sent == pytest.approx((8 * LLAMA_70B.parameters - root) * 63 / 64, rel=1e-5)
    # A sum over replicas sends twice the shard, but for a replica's own part.
    shard = 4 * LLAMA_70B.parameters / 64
    assert replica_bytes(LLAMA_70B.units, MeshShape(replicate=4, shard=64)) == pytest.approx(1.5 * shard)


def test_ulysses_repeats_key_heads_that_are_fewer_than_ranks():
    places = 1000
    four, eight, sixteen = (ulysses_bytes(LLAMA_8B, p, places, 2, checkpointing=True) for p in (4, 8, 16))
    each = 32 * 3 * places * 128 * 2
    assert four == each * (64 + 16) * 3 // 4
    assert eight == each * (64 + 16) * 7 // 8
    assert sixteen == each * (64 + 32) * 15 // 16
    with pytest.raises(
        EngineError, match=r"parallel.sequence 5 does not divide the model's 32 attention heads"
    ):
        ulysses_bytes(LLAMA_8B, 5, places, 2, checkpointing=True)


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_the_ring_sends_keys_that_some_query_sees(ring):
    pieces = [(rank, 2 * ring - 1 - rank) for rank in range(ring)]
    for rank, mine in enumerate(pieces):
        others = [piece for other, piece in enumerate(pieces) if other != rank]
        # Piece a is seen by a rank whose last piece is not before it.
        sent = sum(max(theirs) >= piece for theirs in others for piece in mine)
        received = sum(max(mine) >= piece for theirs in others for piece in theirs)
        assert ring_pieces(ring, rank) == (sent, received)


@pytest.mark.parametrize("balance", ["zigzag", "auto"])
@pytest.mark.parametrize(("ring", "sequence"), [(2, 1), (4, 1), (3, 2), (2, 4)])
def test_the_ring_sends_what_its_plan_says(ring, sequence, balance):
    length = 2 * ring * sequence * 8
    layout = PackedLayout.from_lengths([length], "full", anchor_length=0)
    row = row_shards(layout, ring, sequence, balance)
    mesh = MeshShape(ring=ring, sequence=sequence)
    shape = ModelShape.from_config({**SMALL, "num_hidden_layers": 1})
    kv_heads = max(2, sequence) // sequence
    most = 0
    for rank in range(ring):
        forward, backward = planned_ring_bytes(
            ring_plan((layout,), (row,), rank), kv_heads, shape.head_dim, shape.head_dim, torch.bfloat16
        )
        for again in (False, True):
            paper = ring_bytes(shape, mesh, row.shard_length, 2, again, rank)
            assert paper == (2 if again else 1) * forward + backward
        most = max(most, forward * 2 + backward)
    assert step_communication(ShardedRun(shape, mesh, length)).ring == most


@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
@pytest.mark.parametrize("document", [1, 3, 8, 11, 16, 40, 96])
def test_packed_documents_send_no_more_than_their_bound(document, balance):
    length, ring = 96, 3
    lengths = [document] * (length // document) + [length % document] * (length % document > 0)
    layout = PackedLayout.from_lengths(lengths, "intra_document", anchor_length=0)
    row = row_shards(layout, ring, 1, balance)
    shape = ModelShape.from_config({**SMALL, "num_hidden_layers": 1})
    run = ShardedRun(shape, MeshShape(ring=ring), length)
    bound = packed_ring_bytes(run, document)
    for rank in range(ring):
        forward, backward = planned_ring_bytes(ring_plan((layout,), (row,), rank), 2, 6, 6, torch.bfloat16)
        assert 2 * forward + backward <= bound
    full = step_communication(run)
    packed = step_communication(run, document_length=document)
    assert packed.ring == min(bound, full.ring)
    assert replace(packed, ring=0) == replace(full, ring=0)


def test_documents_that_end_within_a_shard_would_send_nothing():
    layout = PackedLayout.from_lengths([16] * 4, "intra_document", anchor_length=0)
    row = row_shards(layout, 2, 1, "contiguous")
    plan = ring_plan((layout,), (row,), 0)
    assert planned_ring_bytes(plan, 2, 6, 6, torch.bfloat16) == (0, 0)
