"""The average of checkpoints is numpy's mean of their files, from one process and from several."""

import numpy as np
import pytest
from safetensors.torch import load_file

from ropewalk.models.sharding import gathered_state
from ropewalk.parallel import World, make_mesh
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.mesh import MeshShape
from ropewalk.parallel.world import joined
from ropewalk.training.checkpoint.average import load_average
from ropewalk.training.checkpoint.files import Position
from ropewalk.training.checkpoint.sharded import ShardedCheckpoints
from ropewalk.training.checkpoint.single import save_checkpoint
from tests.training.checkpoint.rank_cases import Trainee


def three(trainee, save):
    """Three checkpoints, a step between them."""
    paths = []
    for step in (1, 2, 3):
        trainee.train(1)
        paths.append(save(Position(0, step, 0)))
    return paths


def mean_of(files):
    """numpy's mean, as an oracle that knows neither torch nor the order of sums."""
    tensors = [load_file(path) for path in files]
    return {name: np.mean([each[name].double().numpy() for each in tensors], axis=0) for name in tensors[0]}


def assert_is_mean(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert np.array_equal(tensor.numpy(), expected[name].astype(np.float32)), name


@pytest.fixture(scope="module")
def three_whole(tied_llama, rows, tmp_path_factory):
    """Three checkpoints of one process, and numpy's mean of them."""
    one, folder = Trainee(tied_llama, rows), tmp_path_factory.mktemp("three")
    paths = three(one, lambda at: save_checkpoint(folder, one.model.model, None, one.optimizer, at, 3))
    return paths, mean_of([path / "model.safetensors" for path in paths])


def test_the_average_is_numpys_mean_of_the_files(tied_llama, rows, three_whole):
    paths, expected = three_whole
    other = Trainee(tied_llama, rows)
    load_average(paths, other.model, World())
    assert_is_mean(gathered_state(other.model.model, World()), expected)
    # It is none of those that it was made of.
    last = load_file(paths[-1] / "model.safetensors")
    assert not all(np.array_equal(last[name].numpy(), expected[name].astype(np.float32)) for name in last)


def averaged(shape, folder, rows, out, whole):
    """On ranks: their own three checkpoints' mean beside each of these, and the mean of one process's."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        one = Trainee(folder, rows, "float32", mesh, world)
        each = []
        with ShardedCheckpoints(out, one.model, one.optimizer, RunContext(world, mesh), keep=3) as writer:
            paths = []
            for step in (1, 2, 3):
                one.train(1)
                paths.append(writer.save(Position(0, step, 0)))
                each.append(one.masters())
        load_average(paths, one.model, world, mesh)
        mean = gathered_state(one.model.model, world)
        load_average(whole, one.model, world, mesh)
        return {"each": each, "mean": mean, "of one": gathered_state(one.model.model, world)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_ranks_average_their_shards(two_ranks, tied_llama, rows, tmp_path, three_whole, shape):
    paths, expected = three_whole
    found, _ = two_ranks.run(averaged, shape, tied_llama, rows, tmp_path, paths)
    each = [{name: tensor.double().numpy() for name, tensor in one.items()} for one in found["each"]]
    assert_is_mean(found["mean"], {name: np.mean([one[name] for one in each], axis=0) for name in each[0]})
    assert_is_mean(found["of one"], expected)
