"""Communication on paper against bytes that ranks sent."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropewalk import EngineError, PackedLayout
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape, row_shards
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import ring_bytes as planned_ring_bytes
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.traffic import (
    fsdp_bytes,
    packed_ring_bytes,
    replica_bytes,
    ring_bytes,
    ring_pieces,
    step_communication,
    ulysses_bytes,
)
from tests.planning.sizing.sizing_cases import (
    LLAMA_8B,
    LLAMA_70B,
    MESHES,
    ONE_LAYER,
    SMALL,
    counted_fsdp_bytes,
    counted_ulysses_bytes,
    sent_in_a_pass,
)

SHAPE = ModelShape.from_config(ModelConfig(SMALL))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_sends_what_the_formula_says(four_ranks, tied, checkpointing):
    shape = ModelShape.from_config(ModelConfig({**SMALL, "tie_word_embeddings": tied}))
    expected = fsdp_bytes(shape.units, MeshShape(shard=4), 2)
    assert four_ranks.run(counted_fsdp_bytes, tied, checkpointing) == [expected] * 4


@pytest.mark.parametrize(("rows", "length", "value_dim"), [(1, 16, 6), (2, 21, 6), (2, 21, 4)])
def test_ulysses_sends_what_the_formula_says(four_ranks, rows, length, value_dim):
    one_layer = ModelShape.from_config(
        ModelConfig({**SMALL, "num_hidden_layers": 1, "v_head_dim": value_dim})
    )
    for places, sent in four_ranks.run(counted_ulysses_bytes, rows, length, value_dim):
        assert places == -(-length // 4)
        assert sent == ulysses_bytes(one_layer, 4, rows * places, 4, checkpointing=False)


def run(**changes):
    mesh = changes.pop("mesh", MeshShape(sequence=8))
    return ShardedRun(**{"model": LLAMA_8B, "mesh": mesh, "row_length": 2**17, **changes})


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
@pytest.mark.parametrize(
    ("ring", "sequence", "value_dim"), [(2, 1, 6), (4, 1, 6), (3, 2, 6), (2, 4, 6), (3, 2, 4)]
)
def test_the_ring_sends_what_its_plan_says(ring, sequence, value_dim, balance):
    length = 2 * ring * sequence * 8
    layout = PackedLayout.from_lengths([length], "full", anchor_length=0)
    row = row_shards(layout, ring, sequence, balance)
    mesh = MeshShape(ring=ring, sequence=sequence)
    shape = ModelShape.from_config(ModelConfig({**SMALL, "num_hidden_layers": 1, "v_head_dim": value_dim}))
    kv_heads = max(2, sequence) // sequence
    most = 0
    for rank in range(ring):
        forward, backward = planned_ring_bytes(
            ring_plan((layout,), (row,), rank), kv_heads, shape.head_dim, value_dim, torch.bfloat16
        )
        for again in (False, True):
            paper = ring_bytes(shape, mesh, row.shard_length, 2, again, rank)
            assert paper == (2 if again else 1) * forward + backward
        most = max(most, forward * 2 + backward)
    assert step_communication(ShardedRun(shape, mesh, length)).ring == most


# The first three are cut by cost, into 4, 4 and 3 pieces a rank.
@example(1024, 8, 100)
@example(2048, 8, 200)
@example(1024, 2, 647)
@example(96, 3, 96)
@given(st.integers(64, 1024), st.sampled_from([2, 3, 4, 8]), st.integers(1, 1100))
@settings(deadline=None, max_examples=60)
def test_packed_documents_send_no_more_than_their_bound(length, ring, document):
    lengths = [document] * (length // document) + [length % document] * (length % document > 0)
    layout = PackedLayout.from_lengths(lengths, "intra_document", anchor_length=0)
    here = ShardedRun(ONE_LAYER, MeshShape(ring=ring), length)
    bound = packed_ring_bytes(here, document)
    found = sent_in_a_pass(layout, ring)
    assert found <= bound
    if document >= length:
        assert found == bound
    packed, full = step_communication(here, document_length=document), step_communication(here)
    assert packed.ring == bound
    assert replace(packed, ring=0) == replace(full, ring=0)
