"""What ranks run in the tests of the world; spawned processes import it by name."""

import os

import torch
import torch.distributed as dist

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.parallel import joined
from ropewalk.parallel.heartbeat import outlast_heartbeats


def led():
    with joined("cpu") as world:
        return world.on_rank_0(os.getpid), world.on_rank_0(os.getpid)


def refused_by(rank):
    """(kind, message) of what leaves the block on this rank."""

    def refuse():
        raise RopewalkError("no such thing")

    try:
        with joined("cpu") as world:
            if rank == 0:
                world.on_rank_0(refuse)
            elif world.rank == rank:
                refuse()
    except RopewalkError as error:
        return type(error).__name__, str(error)
    return None


def unexpectedly_failing():
    """As gloo says it when a process has gone."""
    try:
        with joined("cpu"):
            raise RuntimeError(
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
            )
    except RopewalkError as error:
        return type(error).__name__, str(error)


def gathered_ranks():
    with joined("cpu") as world:
        return world.gather({"rank": world.rank, "squares": [world.rank**2]})


def timing_out(timeout):
    """Timeouts in seconds of another group and of the control group."""
    with joined("cpu") as world:
        other = dist.new_group(backend="gloo")
        outlast_heartbeats(world, timeout)
        found = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in (other, world.control)
        ]
        dist.destroy_process_group(other)
        return found


def highest_of(numbers):
    with joined("cpu") as world:
        return world.highest(numbers[world.rank])


def gathered_from(refusing):
    """What every rank returned; (kind, message, status) where some ranks refuse."""
    with joined("cpu") as world:

        def function():
            if world.rank in refusing:
                raise (RunFailure if world.rank % 2 else RopewalkError)(f"not on {world.rank}")
            return world.rank * 10

        try:
            return world.gather_from(function)
        except RopewalkError as error:
            return type(error).__name__, str(error), error.status
