"""What ranks run in the tests of the pool; spawned processes import it by name."""

import os
import time

import torch.distributed as dist


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
