"""The automatic mesh: what it returns can be trained and fits by the estimate; what it refuses, it says how to mend."""

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import EngineError, RopewalkError
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.memory import estimate_memory
from ropewalk.planning.sizing.mesh_choice import USABLE, WORTH, DoesNotFit, check_mesh, choose_mesh
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100, estimate_step
from tests.planning.sizing.sizing_cases import LLAMA_8B, LLAMA_70B

SMALL = ModelShape(4, 256, 512, 12, 4, 32, 1000)


def choose(model=LLAMA_8B, world=8, length=2**17, rows=128, **changes):
    machines = {key: changes.pop(key) for key in ("ranks_per_node", "bytes_per_rank") if key in changes}
    cluster = replace(changes.pop("cluster", H100), **machines)
    return choose_mesh(ShardedRun(model, MeshShape(), length, **changes), rows, world, cluster)


CASES = st.fixed_dictionaries(
    {
        "world": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        "ranks_per_node": st.sampled_from([1, 2, 4, 8]),
        "length": st.integers(1, 200_000),
        "rows": st.sampled_from([1, 2, 3, 4, 6, 8, 16, 48, 64, 128]),
        "bytes_per_rank": st.sampled_from([10**8, 3 * 10**8, 10**9, 10**10]),
        "checkpointing": st.booleans(),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
    }
)


def chosen(case, model=SMALL):
    """The mesh, or None where it is refused; a refusal is one sentence that says what would do."""
    try:
        return choose(model, **case)
    except RopewalkError as error:
        said = str(error)
    assert "\n" not in said
    assert re.search(r"; (use|set|even [\d,]+ ranks would not suffice)", said)
    return None


def candidates(case):
    """Every mesh without replicas that could be taken, by definition: (degree, mesh) pairs, ascending."""
    world, node = case["world"], case["ranks_per_node"]
    for degree in range(1, min(world, case["length"]) + 1):
        if world % degree == 0:
            sequence = max(
                d
                for d in range(1, degree + 1)
                if degree % d == 0 and SMALL.heads % d == 0 and d <= node and (world <= node or node % d == 0)
            )
            yield MeshShape(shard=world // degree, ring=degree // sequence, sequence=sequence)


def suits(mesh, case):
    run = ShardedRun(SMALL, mesh, case["length"], 1, case["checkpointing"], False, case["dtype"])
    return (
        estimate_memory(run).peak <= USABLE * case["bytes_per_rank"] and case["rows"] % mesh.data_degree == 0
    )


@given(CASES)
def test_the_least_degree_that_suits_is_chosen(case):
    mesh = chosen(case)
    first = next((each for each in candidates(case) if suits(each, case)), None)
    assert (mesh is None) == (first is None)
    if mesh is not None:
        assert (mesh.ring, mesh.sequence) == (first.ring, first.sequence)
        check_mesh(mesh, case["world"], SMALL.heads, case["length"], case["rows"], 1)
        assert suits(mesh, case)


def test_the_mesh_grows_with_the_row():
    degrees = [choose(world=16, length=2**n, rows=16).sequence_degree for n in range(13, 21)]
    assert degrees == sorted(degrees)
    assert degrees[0] == 1
    assert choose(world=16, length=2**20, rows=16) == MeshShape(ring=2, sequence=8)


def test_rows_that_are_few_are_cut_finer():
    assert choose(world=64, rows=64, length=8192) == MeshShape(shard=64)
    assert choose(world=64, rows=16, length=8192) == MeshShape(shard=16, sequence=4)
    assert choose(world=64, rows=1, length=8192) == MeshShape(ring=8, sequence=8)


def test_replicas_are_taken_where_they_save_time_alone():
    assert choose(world=64, length=8192, rows=64).replicate == 1
    slow = replace(H100, network=5e9, network_latency=1e-3)
    mesh = choose(world=64, length=8192, rows=64, cluster=slow)
    assert mesh.replicate > 1
    assert mesh.shard_degree % 8 == 0
    run = ShardedRun(LLAMA_8B, mesh, 8192)
    alone = replace(run, mesh=MeshShape(shard=64))
    assert estimate_step(run, 64, slow).seconds < (1 - WORTH) * estimate_step(alone, 64, slow).seconds
    # Within a node there are none, however slow its steps.
    assert choose(world=8, length=8192, rows=8, cluster=replace(H100, nvlink_latency=1e-2)).replicate == 1
    # A 70B model does not fit on one node, so its shards span several.
    assert choose(LLAMA_70B, world=64, length=8192, rows=64, cluster=slow).shard_degree > 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"length": 2**20, "rows": 16},
            r"rows of 1,048,576 tokens do not fit on 8 ranks: even with parallel: {sequence: 8}, "
            r"a rank needs an estimated [\d.]+ GB, but has 80\.0 GB, of which 72\.0 GB are usable; set "
            r"offload_activations to true$",
        ),
        ({"length": 2**17, "checkpointing": False}, r"; set gradient_checkpointing to true$"),
        (
            {"length": 2**22, "rows": 4},
            r"; use 64 ranks, or 32 ranks with offload_activations$",
        ),
        (
            {"length": 3 * 2**19, "rows": 16, "offload": True},
            r"; set tiled_mlp to 16,384$",
        ),
        (
            {"length": 2**21, "rows": 16, "offload": True},
            r"; set tiled_mlp to 16,384, and offload_optimizer to true$",
        ),
        ({"bytes_per_rank": 10**9}, r"; even 65,536 ranks would not suffice$"),
        (
            {"rows": 3, "rows_per_batch": 2},
            r"rows_per_step must be a positive multiple of rows_per_batch 2, got 3$",
        ),
        ({"rows": 0}, r"rows_per_step must be a positive multiple of .*, got 0"),
        ({"rows_per_batch": 0}, r"rows_per_batch must be 1 or more, got 0"),
        ({"world": 0}, r"the number of ranks must be 1 or more, got 0"),
        (
            {"world": 8, "length": 4, "rows": 3},
            r"no mesh of 8 ranks both divides rows_per_step 3 evenly and has enough memory for rows of 4 tokens; set "
            r"rows_per_step to a multiple of 2, which divides evenly over parallel {shard: 2, sequence: 4}$",
        ),
    ],
)
def test_what_does_not_suit_is_said_with_what_would(changes, message):
    with pytest.raises(RopewalkError, match=message):
        choose(**changes)


def test_what_is_proposed_would_do():
    assert choose(length=2**20, rows=16, offload=True) == MeshShape(sequence=8)
    assert choose(length=2**22, rows=4, world=64)
    assert choose(length=2**22, rows=4, world=32, offload=True)
    with pytest.raises(DoesNotFit, match=r"do not fit"):
        choose(length=2**22, rows=4, world=32)


def check(mesh, world=8, heads=32, length=1024, rows=16, rows_per_batch=1):
    check_mesh(mesh, world, heads, length, rows, rows_per_batch)


def test_a_mesh_that_suits_passes():
    check(MeshShape(replicate=2, shard=2, sequence=2))


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (
            MeshShape(sequence=4),
            {},
            r"parallel {sequence: 4} needs 4 ranks, but 8 were started; start 4, or set parallel to "
            r"{shard: 2, sequence: 4}$",
        ),
        (
            MeshShape(replicate=3, sequence=4),
            {},
            r"parallel {replicate: 3, sequence: 4} needs 12 ranks, but 8 were started; start 12, or set parallel to "
            r"{shard: 2, sequence: 4}$",
        ),
        (
            MeshShape(ring=3, sequence=4),
            {},
            r"parallel {ring: 3, sequence: 4} needs 12 ranks, but 8 were started; start 12, or set parallel to "
            r"{shard: 2, sequence: 4}$",
        ),
        (
            MeshShape(shard=2),
            {"world": 1},
            r"needs 2 ranks, but 1 was started; start 2, or set parallel to {shard: 1}$",
        ),
        (
            MeshShape(sequence=8),
            {"heads": 12},
            r"parallel.sequence 8 does not divide the model's 12 attention heads; set "
            r"parallel.sequence to one of 1, 2, 3, 4, 6, 12; to",
        ),
        (
            MeshShape(ring=2, sequence=4),
            {"length": 7},
            r"parallel.ring x parallel.sequence is 8, but a row of 7 tokens can be split over at most 7 ranks; lower",
        ),
        (
            MeshShape(replicate=2, shard=4),
            {"rows": 20},
            r"rows_per_step must be a positive multiple of 8 \(8 data-parallel groups x rows_per_batch 1\), got 20; "
            r"use 16 or 24$",
        ),
        (
            MeshShape(shard=4, sequence=2),
            {"rows": 6, "rows_per_batch": 2},
            r"rows_per_step must be a positive multiple of 8 \(4 data-parallel groups x rows_per_batch 2\), got 6; "
            r"use 8$",
        ),
        (MeshShape(shard=8), {"rows_per_batch": 0}, r"rows_per_batch must be 1 or more, got 0$"),
    ],
)
def test_a_mesh_that_does_not_suit_is_refused_with_one_that_would(mesh, changes, message):
    with pytest.raises(RopewalkError, match=message):
        check(mesh, **changes)


def test_heads_are_an_engine_error():
    with pytest.raises(EngineError):
        check(MeshShape(sequence=8), heads=4)


@given(
    st.builds(
        MeshShape,
        replicate=st.integers(1, 4),
        shard=st.integers(1, 4),
        ring=st.integers(1, 4),
        sequence=st.integers(1, 4),
    ),
    st.integers(1, 64),
)
def test_the_proposed_mesh_has_as_many_ranks_as_were_started(mesh, world):
    if mesh.world_size == world:
        return
    with pytest.raises(RopewalkError) as caught:
        check_mesh(mesh, world, 12, 10**6, 64, 1)
    proposed = re.search(r"or set parallel to (.*)", str(caught.value))[1]
    assert MeshShape(**yaml.safe_load(proposed)).world_size == world
