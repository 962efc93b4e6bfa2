"""What ranks run in the tests of the world; spawned processes import it by name."""

import os

from ropewalk.errors import RopewalkError
from ropewalk.parallel import joined


def led():
    with joined("cpu") as world:
        return world.lead(os.getpid), world.lead(os.getpid)


def refused_by(rank):
    """(kind, message) of what leaves the block on this rank."""

    def refuse():
        raise RopewalkError("no such thing")

    try:
        with joined("cpu") as world:
            if rank == 0:
                world.lead(refuse)
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
