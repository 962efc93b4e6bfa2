"""World: the processes that torchrun started, work that rank 0 does for all of them, and a joint shutdown on errors.

torch is imported where several processes talk: a job in one process may need none of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk.errors import Echo, EngineError, RopewalkError, RunFailure, Stopped, first_line
from ropewalk.io.signals import Ended, ended_by_signals
from ropewalk.parallel.mesh import Mesh, forget_groups

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

PATIENCE = timedelta(days=30)
"""Timeout of the other ranks while rank 0 works alone; packing a large corpus takes hours."""
LAST_WORDS = 1.0
"""Seconds that the other ranks give rank 0 to print its error after it has left the process group."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, eq=False)
class World:
    """Rank of this process, and the size of the run.

    Attributes:
        rank, size: rank and number of processes over all machines.
        local_rank, local_size: rank and number of processes on this machine.
        control: gloo process group for Python objects and barriers; None in a run of one process.
        restarts: number of times torchrun has restarted the processes after a failure.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    control: Any = None
    restarts: int = 0

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which writes the run's files and prints messages."""
        return self.rank == 0

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 and broadcast its result; every rank must call this method.

        Raises:
            RopewalkError: the error that the function raised; the other ranks raise it as an
                :class:`~ropewalk.errors.Echo`.
        """
        if self.size == 1:
            return function()
        import torch.distributed as dist

        if not self.is_rank_0:
            box: list[Any] = [None, None]
            dist.broadcast_object_list(box, src=0, group=self.control)
            value, error = box
            if error is not None:
                raise Echo(error, box[0])
            return value  # type: ignore[no-any-return]
        try:
            result = function()
        except RopewalkError as error:
            dist.broadcast_object_list([error.status, str(error)], src=0, group=self.control)
            error.known_to_all = True
            raise
        dist.broadcast_object_list([result, None], src=0, group=self.control)
        return result

    def device_on(self, mesh: Mesh) -> torch.device:
        """Device of this process on a mesh: its own CUDA device, or the CPU."""
        import torch

        kind: str = mesh.device_mesh.device_type
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    def known_to_all(self, error: RopewalkError) -> RopewalkError:
        """Exception to raise for an error that every rank detects itself: rank 0 reports it, the others stay silent."""
        error.known_to_all = True
        return error if self.is_rank_0 else Echo(str(error), error.status)

    def gather(self, value: T) -> list[T]:
        """Gather one picklable value per rank, in rank order; every rank must call this method."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def gather_from(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank and gather its picklable results in rank order; every rank must call this.

        Raises:
            RopewalkError: the error of the lowest rank on which the function raised. The other ranks raise it as an
                :class:`~ropewalk.errors.Echo`, so no rank waits for one that has failed.
        """
        if self.size == 1:
            return [function()]
        own: RopewalkError | None = None
        brought: tuple[Any, tuple[str, int] | None]
        try:
            brought = function(), None
        except RopewalkError as error:
            own, brought = error, (None, (str(error), error.status))
        gathered = self.gather(brought)
        for rank, (_, failure) in enumerate(gathered):
            if failure is not None:
                if own is not None and rank == self.rank:
                    own.known_to_all = True
                    raise own
                # The lowest failing rank speaks for all, so that a common error is printed once.
                raise Echo(failure[0], failure[1]) from own
        values: list[Any] = [value for value, _ in gathered]
        return values

    def highest(self, number: int) -> int:
        """Largest of one whole number per rank; every rank must call this method."""
        return number if self.size == 1 else _highest(number, self.control)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.control)


def world_from_environment() -> World:
    """Read the environment variables that torchrun sets; without them, the run has one process.

    Raises:
        RopewalkError: if only some of the variables are set, or if one is not a number.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "WORLD_SIZE" not in given and "RANK" not in given:
        return World()
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise RopewalkError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}; start the processes with "
            f"torchrun, or, to run a single process, unset {', '.join(given)}"
        )
    try:
        rank, size, local_rank, local_size = (int(given[name]) for name in VARIABLES)
    except ValueError:
        variables = ", ".join(f"{name}={value}" for name, value in given.items())
        raise RopewalkError(
            f"the environment sets {variables}, but all of these must be whole numbers; start the processes with "
            "torchrun"
        ) from None
    return World(
        rank, size, local_rank, local_size, None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    )


def require_devices(world: World, device: torch.device) -> None:
    """Raise if this machine has fewer CUDA devices than processes.

    Raises:
        RopewalkError: with the number of devices that torch sees.
    """
    import torch

    if world.size > 1 and device.type == "cuda" and torch.cuda.device_count() < world.local_size:
        raise RopewalkError(
            f"{world.local_size} processes on this machine need {world.local_size} CUDA devices, but torch sees "
            f"{torch.cuda.device_count()}; lower torchrun's --nproc-per-node, or set device to cpu"
        )


@contextmanager
def joined(device_type: str = "auto", advice: str = "start it again") -> Iterator[World]:
    """Join the run's process group while the context is open; a run of one process needs no group.

    Args:
        device_type: ``cpu``, ``cuda``, or ``auto``, which is CUDA if this machine has a device for each process.
        advice: how to resume after a process was lost; the last part of the error message.

    Raises:
        RunFailure: if the block fails because another process ended, or SIGTERM arrived.
        Stopped: if SIGUSR1 arrived.
        RopewalkError: the error of the block; ranks other than 0 put their rank number before the message.
    """
    world = world_from_environment()
    if world.size == 1:
        yield world
        return
    import torch.distributed as dist

    started = not dist.is_initialized()
    if started:
        _start(world, device_type)
    control = _control_group()
    # Each torchrun counts the failures of its own machine only, but any one restarts all.
    world = replace(world, control=control, restarts=_highest(world.restarts, control))
    try:
        with ended_by_signals():
            yield world
    except Ended as error:
        if error.name != "SIGTERM":
            raise Stopped(f"rank {world.rank} was stopped by {error.name}; {advice}") from None
        # torchrun sends SIGTERM when another process fails, so this is not a reason to start again.
        raise RunFailure(
            f"rank {world.rank} was terminated because another process failed or the job was cancelled; {advice}"
        ) from None
    except Echo:
        if started:
            _outlast_rank_0(world)
        else:
            dist.destroy_process_group(control)
        raise
    except RopewalkError as error:
        if not started:
            dist.destroy_process_group(control)
        if world.is_rank_0:
            raise
        kind = next(
            each for each in (RunFailure, Stopped, EngineError, RopewalkError) if isinstance(error, each)
        )
        raise kind(f"rank {world.rank}: {error}") from error
    except RuntimeError as error:
        if not _is_lost_contact(error):
            raise
        raise RunFailure(
            f"rank {world.rank} lost contact with the other processes: one of them exited or hangs, and its own "
            f"message says why; {advice}"
        ) from error
    # Only after success: destroying a group whose other processes have died may hang.
    if started:
        dist.destroy_process_group()
        forget_groups()
    else:
        # The default group belongs to the caller, and this process may join again.
        dist.destroy_process_group(control)


def _outlast_rank_0(world: World) -> None:
    """Wait until rank 0 has exited: torchrun kills all processes when one fails, and rank 0 prints the error."""
    import torch.distributed as dist

    with suppress(RuntimeError):
        # Rank 0 never enters this barrier; the wait ends when rank 0 exits and its connection closes.
        dist.barrier(group=world.control)
    time.sleep(LAST_WORDS)


def _start(world: World, device_type: str) -> None:
    import torch
    import torch.distributed as dist

    # With too few CUDA devices the processes still join over gloo, so that rank 0 can report the problem.
    enough = torch.cuda.device_count() >= world.local_size
    device_type = "cuda" if device_type in ("auto", "cuda") and enough else "cpu"
    # Before the group exists, because NCCL uses the current device.
    if device_type == "cuda":
        torch.cuda.set_device(world.local_rank)
    try:
        store = _fresh_store(world)
        where: dict[str, Any] = (
            {} if store is None else {"store": store, "rank": world.rank, "world_size": world.size}
        )
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", **where)
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise RopewalkError(f"rank {world.rank} cannot join the other processes: {reason}") from error


def _fresh_store(world: World) -> Any:
    """Key-value store without the keys of processes before a restart; None if torch's default store is fine.

    torchrun keeps one store across restarts, so gloo would read the addresses of processes that have exited. The number
    of restarts identifies an attempt on one machine only: with several, each machine counts its own failures.
    """
    if not world.restarts or world.local_size < world.size:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore(f"attempt{world.restarts}", store)


def _highest(number: int, group: Any) -> int:
    import torch
    import torch.distributed as dist

    most = torch.tensor(number)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def _control_group() -> Any:
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _is_lost_contact(error: RuntimeError) -> bool:
    """Whether an error means that a peer exited: gloo raises a plain RuntimeError, NCCL and the store a DistError."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return "gloo" in text or "connection closed by peer" in text or "connection reset" in text
