"""A sharded step on CUDA devices equals the one of a whole model; the same on the CPU shows that the test works."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import checkpoint_activations, load_model
from ropewalk.models.sharding import gathered_state, load_sharded
from ropewalk.parallel import MeshShape, World, joined, make_mesh
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step
from tests.training.sharded_cases import packed_rows, save_tied_llama

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=GPU)]
# As in test_sharded_step: sums in another order, and Adam divides by a root of them.
LOSS, NORM, WEIGHT = 1e-6, 1e-5, 1e-4


@pytest.fixture
def tied_llama(tmp_path):
    save_tied_llama(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def world_of_one(tmp_path):
    """A process group of this process alone, as torchrun's processes have it; NCCL where there is a CUDA device."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield World()
    dist.destroy_process_group()


def whole_model(folder, device, precision):
    model = load_model(folder, dtype=torch.float32, device=device)
    whole = LossModel(model, OutputHead.of(model))
    masters = None
    if precision == "bfloat16":
        masters = {name: p.detach().clone() for name, p in whole.named_parameters()}
        whole.to(torch.bfloat16)
    return whole, masters


def steps(model, masters, rows, precision, mesh, offload):
    """(loss, gradient norm) of two steps, and the optimizer, which holds the weights after them."""
    model.train()
    if offload:
        checkpoint_activations(model.model)
    optimizer = MasterAdamW(model.named_parameters(), Optimizer(), masters)
    batches, forward = micro_batches(rows, 1, mesh), ForwardPass(precision, offload)
    results = [train_step(model, batches, optimizer, 1e-2, forward, mesh) for _ in range(2)]
    assert all(result.applied for result in results)
    return [(result.loss, result.grad_norm) for result in results], optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", [False, True], ids=["", "checkpointed and offloaded"])
def test_one_device_over_its_own_process_group_trains_as_a_whole_model(
    world_of_one, tied_llama, device, offload
):
    rows = packed_rows(4)
    alone, optimizer = steps(
        *whole_model(tied_llama, device, "float32"), rows, "float32", None, offload=False
    )
    mesh = make_mesh(MeshShape(), device)
    model = load_sharded(tied_llama, mesh, world_of_one)
    together, _ = steps(model, None, rows, "float32", mesh, offload)
    for (loss_n, norm_n), (loss_1, norm_1) in zip(together, alone, strict=True):
        assert loss_n == pytest.approx(loss_1, rel=LOSS)
        assert norm_n == pytest.approx(norm_1, rel=NORM)
    weights = gathered_state(model.model, world_of_one)
    masters = {name.removeprefix("model."): p.detach().cpu() for name, p in optimizer.masters.items()}
    assert len(masters) == len(weights)
    for name, value in weights.items():
        expected = masters[name] if name in masters else masters[name.removeprefix("model.")]
        assert float((value - expected).abs().max()) < WEIGHT, name


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_differs_from_a_whole_model_by_its_own_rounding(world_of_one, tied_llama, device):
    rows, unit = packed_rows(4), torch.finfo(torch.bfloat16).eps
    alone, _ = steps(*whole_model(tied_llama, device, "bfloat16"), rows, "bfloat16", None, offload=False)
    mesh = make_mesh(MeshShape(), device)
    model = load_sharded(tied_llama, mesh, world_of_one, compute_dtype=torch.bfloat16)
    together, _ = steps(model, None, rows, "bfloat16", mesh, offload=False)
    assert together[0][0] == pytest.approx(alone[0][0], rel=unit)
    assert together[0][1] == pytest.approx(alone[0][1], rel=4 * unit)


def steps_on_ranks(shape, folder, rows, device_type):
    """Every rank's (loss, gradient norm) of two steps; inside torchrun, or what looks like it."""
    with joined(device_type) as world:
        mesh = make_mesh(MeshShape(**shape), device_type)
        model = load_sharded(folder, mesh, world)
        mine = rows[mesh.data_rank :: mesh.shape.data_degree]
        return steps(model, None, mine, "float32", mesh, offload=False)[0]


def spawned(rank, port, out, world_size, function, args):
    """One process as torchrun starts it; its result in a file."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, (rank, rank, world_size, world_size), strict=True):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.save(function(*args), Path(out) / f"{rank}.pt")


def on_ranks(world_size, folder, function, *args):
    """What a function returned on each of so many new processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (port, str(folder), world_size, function, args), nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize("shape", [{"sequence": 2}, {"ring": 2}, {"shard": 2}, {"replicate": 2}], ids=str)
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_train_as_one_does(tied_llama, tmp_path, shape):
    rows = packed_rows(4)
    alone, _ = steps(*whole_model(tied_llama, "cuda", "float32"), rows, "float32", None, offload=False)
    for found in on_ranks(2, tmp_path, steps_on_ranks, shape, tied_llama, rows, "cuda"):
        for (loss_n, norm_n), (loss_1, norm_1) in zip(found, alone, strict=True):
            assert loss_n == pytest.approx(loss_1, rel=LOSS)
            assert norm_n == pytest.approx(norm_1, rel=NORM)


def test_two_processes_on_the_cpu_go_the_same_way(two_ranks, tied_llama):
    rows = packed_rows(4)
    alone, _ = steps(*whole_model(tied_llama, "cpu", "float32"), rows, "float32", None, offload=False)
    for found in two_ranks.run(steps_on_ranks, {"sequence": 2}, tied_llama, rows, "cpu"):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in alone], rel=LOSS)
