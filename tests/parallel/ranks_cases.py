"""What ranks run in the tests of the pool; spawned processes import it by name."""

import os
import time

import torch
import torch.distributed as dist

from ropewalk import RopewalkError
from ropewalk.parallel import joined, make_mesh


def own_rank():
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"]


def refusing(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")


def dying(rank, with_signal):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), with_signal)


def late(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def threads_after(shapes):
    """How many threads this process has after a mesh of each shape has been used by a joined run."""
    for shape in shapes:
        with joined("cpu") as world:
            mesh = make_mesh(shape, "cpu")
            groups = (mesh.groups.ring_group, mesh.groups.sequence_group)
            for group in (*groups, *mesh.device_mesh.get_all_groups(), world.control):
                if group is not None:
                    dist.all_reduce(torch.ones(1), group=group)
    return threads()


def threads_after_refusals(number):
    for _ in range(number):
        try:
            with joined("cpu") as world:
                world.barrier()
                raise world.known_to_all(RopewalkError("no such thing"))
        except RopewalkError:
            pass
    return threads()


def threads():
    return len(os.listdir("/proc/self/task"))
