"""Ulysses over NCCL on two CUDA devices: given the same q, k, v nothing differs from one device."""

import os
import random
import socket
from functools import partial
from pathlib import Path

import pytest
import torch

from ropewalk import attend
from ropewalk.attention.oracle import attention_errors, cotangent_of
from ropewalk.parallel import MeshShape, ShardedLayouts, joined, make_mesh, sharded_attend
from ropewalk.testing import random_layout

TWO_DEVICES = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
HEADS, HEAD_DIM = 4, 64


def against_one_device(device_type, engine, dtype, kv_heads, seeds):
    """On this rank, for some rows: the output's largest difference from attend on the whole row, and that of the
    gradients as a share of what both may err: the budget of ``attention_errors``, and the one device's own error."""
    found = []
    with joined(device_type) as world:
        device = torch.device(device_type, world.local_rank if device_type == "cuda" else None)
        groups = make_mesh(MeshShape(sequence=2), device_type).groups
        for seed in seeds:
            layout = random_layout(257, random.Random(seed), interleaved=seed % 2 == 1)
            sharded = ShardedLayouts.of([layout], groups)
            shard = partial(shard_of, sharded)
            torch.manual_seed(seed)
            # Made on the CPU, so that every rank has the same.
            q, k, v = (
                torch.randn(1, heads, 257, HEAD_DIM).to(device, dtype)
                for heads in (HEADS, kv_heads, kv_heads)
            )
            one = partial(attend, layout=layout, engine=engine)
            errors = attention_errors(one, q, k, v, [layout])
            cotangent = cotangent_of(q, v)
            whole = values(one, q, k, v, cotangent)
            several = partial(sharded_attend, sharded=sharded, engine=engine)
            mine = values(several, *map(shard, (q, k, v, cotangent)))
            output, *gradients = (
                float((a.double() - shard(b).double()).abs().max()) for a, b in zip(mine, whole, strict=True)
            )
            bounds = [b + e for b, e in zip(errors.budgets, errors.engine, strict=True)]
            found.append((output, max(d / bound for d, bound in zip(gradients, bounds[1:], strict=True))))
    return found


def values(attention, q, k, v, cotangent):
    """Output, and gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    output = attention(*inputs)
    return [x.detach() for x in (output, *torch.autograd.grad(output, inputs, cotangent))]


def shard_of(sharded, x):
    """``[1, H, T, D]`` to this rank's ``[1, H, s, D]``."""
    groups = sharded.groups
    held = sharded.rows[0].take(x[0].transpose(1, 2), groups.ring_rank, groups.sequence_rank, 0)
    return held.transpose(1, 2)[None].contiguous()


def spawned(rank, port, out, args):
    """One of two processes as torchrun starts them; its result in a file."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.save(against_one_device(*args), Path(out) / f"{rank}.pt")


def on_two_devices(folder, *args):
    """What each of two new processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (port, str(folder), args), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_equal(together):
    for found in together:
        assert [output for output, _ in found] == [0.0] * len(found)
        # Kernels add up gradients in any order, and so do the two ranks that hold one key/value head.
        assert max(share for _, share in found) <= 1


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("device", "engine", "dtype"),
    [
        ("cpu", "sdpa", torch.float32),
        pytest.param("cuda", "sdpa", torch.float32, marks=TWO_DEVICES),
        pytest.param("cuda", "sdpa", torch.bfloat16, marks=TWO_DEVICES),
        pytest.param("cuda", "varlen", torch.bfloat16, marks=TWO_DEVICES),
    ],
    ids=str,
)
def test_the_output_of_two_devices_has_no_difference_at_all(
    request, tmp_path, device, engine, dtype, kv_heads
):
    args = (device, engine, dtype, kv_heads, range(4))
    if device == "cpu":
        together = request.getfixturevalue("two_ranks").run(against_one_device, *args)
    else:
        together = on_two_devices(tmp_path, *args)
    assert_equal(together)
