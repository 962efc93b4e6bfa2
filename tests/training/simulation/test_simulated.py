"""The simulated device has a backward, autocast and a mesh like a GPU's, and no other code takes it for one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchgen
import yaml

from ropewalk.errors import RopewalkError
from ropewalk.parallel import MeshShape
from ropewalk.training.simulation.simulated import CAST_DOWN, FUSED, simulated_rank
from tests.training.simulation import recording_cases as cases


def test_autograd_runs_on_it_and_it_is_no_accelerator_to_others(aside):
    assert aside(cases.differentiates) == ("simulated", False)


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_the_backward_of_an_activation_allocates_its_result_alone_as_on_cuda(aside, name):
    assert aside(cases.operators_of, getattr(F, name)) == [f"aten.{name}_backward"]


def test_all_operators_that_torch_fuses_on_cuda_alone_are_known():
    """By the table of kernels that torch is generated from; a structured operator has its kernels at its delegate."""
    table = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    functions = yaml.load(table.read_text(), yaml.CSafeLoader)
    kernels = {
        each["func"].split("(")[0]: {
            key.strip() for keys in each.get("dispatch", {}) for key in keys.split(",")
        }
        for each in functions
    }
    delegates = {each["func"].split("(")[0]: each.get("structured_delegate") for each in functions}
    fused = {
        name
        for name, found in kernels.items()
        if "CompositeImplicitAutograd" in found and "CUDA" in found | kernels.get(delegates[name], set())
    }
    assert fused == set(FUSED)


@pytest.mark.parametrize("backward", [False, True])
def test_autocast_casts_as_on_cuda(aside, backward):
    products, reductions, others, gradient = aside(cases.casts, backward)
    assert products == others == {torch.bfloat16}
    assert reductions == {torch.float32}
    assert gradient == (torch.float32 if backward else None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_autocast_casts_the_same_operators_as_this_gpu():
    x = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        for name in set(CAST_DOWN) & {"mm", "matmul", "bmm"}:
            arguments = (x[None], x[None]) if name == "bmm" else (x, x)
            assert getattr(torch, name)(*arguments).dtype == torch.bfloat16
        assert x.bfloat16().softmax(-1).dtype == x.bfloat16().sum().dtype == torch.float32


def test_one_rank_of_a_large_mesh():
    shape = MeshShape(replicate=2, shard=2, ring=16, sequence=8)
    with simulated_rank(shape, 200, "cpu") as mesh:
        assert dist.get_world_size() == 512
        assert mesh.rank == 200
        assert (mesh.groups.ring_rank, mesh.groups.sequence_rank) == (9, 0)
        assert mesh.device_mesh.get_group("shard_all").size() == 256
    assert not dist.is_initialized()


def test_a_single_rank_needs_no_group():
    with simulated_rank(MeshShape(), 0, "cpu") as mesh:
        assert mesh is None
        assert not dist.is_initialized()


def test_within_a_process_group_it_is_refused():
    with (
        simulated_rank(MeshShape(shard=2), 0, "cpu"),
        pytest.raises(RopewalkError, match="start the dry run without torchrun"),
        simulated_rank(MeshShape(shard=2), 0, "cpu"),
    ):
        pass
