"""N ranks compute what one process does: losses, gradient norms and weights of two steps."""

from functools import cache

import pytest
import torch

from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.traffic import fsdp_bytes, replica_bytes, ulysses_bytes
from tests.marks import slow_after
from tests.training.sharded_cases import (
    packed_rows,
    save_mixtral,
    save_tied_llama,
    step_traffic,
    trained,
    trained_on_ranks,
    trained_wrongly,
)

# A sequence of four is that of the test of one key-value head.
MESHES = [
    {"ring": 2, "sequence": 2},
    {"shard": 2, "sequence": 2},
    {"replicate": 2, "shard": 2},
    {"ring": 4},
    {"shard": 4},
    {"replicate": 2, "sequence": 2},
]
PLAIN = (2, 1, "float32", False)
"""Two steps, one row a pass, float32, no checkpointing."""
IN_PAIRS = (2, 2, "float32", False)
"""The same with two rows a pass."""
# The gradient of a weight is a sum over 195 targets, in other orders; Adam's second step divides by its root.
LOSS, NORM, WEIGHT = 1e-6, 1e-5, 1e-4


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "llama"
    save_tied_llama(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tied_llama):
    """What one process computes, by the options of ``trained``."""

    @cache
    def run(options):
        return trained(tied_llama, packed_rows(4), *options)

    return run


def assert_same(together, expected, loss=LOSS, norm=NORM, weight=WEIGHT):
    steps, weights = expected
    for found, _ in together:
        for (loss_n, norm_n, *counts_n), (loss_1, norm_1, *counts_1) in zip(found, steps, strict=True):
            assert loss_n == pytest.approx(loss_1, rel=loss)
            assert norm_n == pytest.approx(norm_1, rel=norm)
            assert counts_n[:2] == counts_1[:2]
    gathered = together[0][1]
    assert gathered.keys() == weights.keys()
    for name, value in weights.items():
        assert float((gathered[name] - value).abs().max()) < weight, name


@pytest.mark.parametrize("shape", slow_after(3, MESHES), ids=str)
def test_a_mesh_of_four_trains_as_one_process_does(four_ranks, tied_llama, alone, shape):
    # Two passes a step at most: what each sends takes longest.
    options = PLAIN if MeshShape(**shape).data_degree > 1 else IN_PAIRS
    together = four_ranks.run(trained_on_ranks, shape, tied_llama, packed_rows(4), *options)
    assert_same(together, alone(PLAIN))
    # Only rank 0 has held the whole weights.
    assert [bool(weights) for _, weights in together] == [True, False, False, False]


@pytest.mark.parametrize(
    "options",
    [
        (2, 1, "float32", True, True),
        (2, 2, "float32", False, False, None, True),
        (2, 2, "float32", True, False, 16),
    ],
    ids=[
        "checkpointed and offloaded",
        "optimizer on the host",
        "in tiles and checkpointed",
    ],
)
def test_micro_batches_checkpointing_and_offloading_change_nothing(four_ranks, tied_llama, alone, options):
    shape = {"shard": 2, "sequence": 2}
    assert_same(four_ranks.run(trained_on_ranks, shape, tied_llama, packed_rows(4), *options), alone(PLAIN))


def test_kept_attention_changes_no_bit_on_ranks(four_ranks, tied_llama):
    """With Ulysses around a ring, of which each part is kept; test_kept.py has rows that are attended to at once."""
    shape, rows = {"ring": 2, "sequence": 2}, packed_rows(2)
    plain, kept = (
        four_ranks.run(trained_on_ranks, shape, tied_llama, rows, 1, 2, "float32", how, offload)
        for how, offload in ((True, False), ("attention kept", True))
    )
    assert [steps for steps, _ in kept] == [steps for steps, _ in plain]
    assert all(torch.equal(value, plain[0][1][name]) for name, value in kept[0][1].items())


def test_one_key_value_head_serves_four_ranks(four_ranks, tmp_path):
    save_tied_llama(tmp_path, kv_heads=1)
    rows = packed_rows(4)
    together = four_ranks.run(trained_on_ranks, {"sequence": 4}, tmp_path, rows, *IN_PAIRS)
    assert_same(together, trained(tmp_path, rows, *PLAIN))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "mixtral"
    save_mixtral(folder)
    return folder


@pytest.mark.parametrize("shape", [{"shard": 4}, {"replicate": 2, "sequence": 2}], ids=str)
def test_experts_that_are_cut_train_as_whole_ones_do(four_ranks, mixtral, shape):
    rows, options = packed_rows(4), (1, 1, "float32", True)
    together = four_ranks.run(trained_on_ranks, shape, mixtral, rows, *options)
    assert_same(together, trained(mixtral, rows, *options))


def test_bytes_of_experts_are_those_of_the_formula(four_ranks, mixtral):
    """Three of them over four ranks, each cut: padded ones would be four."""
    mesh = MeshShape(shard=4)
    config, found = four_ranks.run(step_traffic, {"shard": 4}, mixtral, packed_rows(4), True)[0]
    model = ModelShape.from_config(ModelConfig(config))
    assert found.bytes["all_gather"] + found.bytes["reduce_scatter"] == fsdp_bytes(model.units, mesh, 4)


@pytest.mark.parametrize("precision", ["bfloat16-autocast", "bfloat16"])
def test_bfloat16_differs_from_one_process_by_its_own_rounding(four_ranks, tied_llama, alone, precision):
    together = four_ranks.run(
        trained_on_ranks, {"sequence": 4}, tied_llama, packed_rows(4), 1, 4, precision, False
    )
    unit = torch.finfo(torch.bfloat16).eps
    (loss_n, norm_n, *_), (loss_1, norm_1, *_) = together[0][0][0], alone((1, 1, precision, False))[0][0]
    assert loss_n == pytest.approx(loss_1, rel=unit)
    assert norm_n == pytest.approx(norm_1, rel=4 * unit)


@pytest.mark.parametrize(
    "fault", ["positions local to the shard", "labels shifted after sharding", "mean of means"]
)
def test_what_is_wrong_on_ranks_shows(four_ranks, tied_llama, alone, fault):
    rows, one_step = packed_rows(4), (1, 4, "float32", False)
    together = four_ranks.run(trained_wrongly, fault, {"sequence": 4}, tied_llama, rows, *one_step)
    with pytest.raises(AssertionError):
        assert_same(together, alone(one_step))


# Each shape, and each with and without; parameters are sharded over the ranks of a sequence too, and gathered alike.
@pytest.mark.parametrize(
    ("shape", "checkpointing", "tiles"),
    slow_after(
        3,
        [
            ({"sequence": 4}, False, None),
            ({"sequence": 4}, True, None),
            ({"sequence": 4}, True, 16),
            ({"replicate": 2, "sequence": 2}, True, None),
            ({"shard": 4}, False, None),
        ],
    ),
    ids=str,
)
def test_bytes_sent_in_a_step_are_those_of_the_formulas(four_ranks, tied_llama, shape, checkpointing, tiles):
    mesh = MeshShape(**shape)
    # Two passes are enough to tell what is sent once a pass from what is sent once a step.
    rows = packed_rows(2 if mesh.data_degree == 1 else 4)
    config, found = four_ranks.run(step_traffic, shape, tied_llama, rows, checkpointing, tiles)[0]
    model = ModelShape.from_config(ModelConfig(config))
    passes = len(rows) // mesh.data_degree
    places = -(-rows[0].layout.total_length // mesh.sequence)
    assert found.bytes.get("all_to_all", 0) == passes * ulysses_bytes(
        model, mesh.sequence, places, 4, checkpointing
    )
    sent = found.bytes["all_gather"] + found.bytes["reduce_scatter"]
    assert sent == passes * fsdp_bytes(model.units, mesh, 4)
    # Beside the gradients of replicas, three numbers are summed over all ranks: targets, loss, and norm.
    assert found.bytes["all_reduce"] - passes * replica_bytes(model.units, mesh) < 3 * 2 * 8
