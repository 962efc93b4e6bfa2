"""World: the processes of a run that torchrun started, what one of them does for all, and how they end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ropewalk.errors import Echo, EngineError, RopewalkError, RunFailure
from ropewalk.parallel.mesh import Mesh, forget_groups

T = TypeVar("T")

PATIENCE = timedelta(days=30)
"""How long the others wait for what rank 0 does alone: packing a large corpus takes hours."""
LAST_WORDS = 1.0
"""Seconds that rank 0 has to print its error after it has left the group."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, eq=False)
class World:
    """This process among all of a run.

    Attributes:
        rank, size: over all machines.
        local_rank, local_size: on this machine.
        control: process group for messages between the processes themselves; None where there is one.
        restarts: how often torchrun has started the processes anew after a failure.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    control: Any = None
    restarts: int = 0

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which writes the run's files and talks to the user."""
        return self.rank == 0

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """What a function returned on rank 0, which alone calls it; every rank must call this.

        Raises:
            RopewalkError: what it raised there; on the other ranks as an :class:`~ropewalk.errors.Echo` of it.
        """
        if self.size == 1:
            return function()
        if not self.is_rank_0:
            box: list[Any] = [None, None]
            dist.broadcast_object_list(box, src=0, group=self.control)
            value, error = box
            if error is not None:
                raise Echo(error, failed=box[0])
            return value  # type: ignore[no-any-return]
        try:
            result = function()
        except RopewalkError as error:
            dist.broadcast_object_list([isinstance(error, RunFailure), str(error)], src=0, group=self.control)
            raise
        dist.broadcast_object_list([result, None], src=0, group=self.control)
        return result

    def device_on(self, mesh: Mesh) -> torch.device:
        """Where this process computes on a mesh: its own CUDA device, or the CPU."""
        kind: str = mesh.device_mesh.device_type
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    def known_to_all(self, error: RopewalkError) -> RopewalkError:
        """What to raise where every rank finds the same error by itself: rank 0 says it, the others end in silence."""
        return error if self.is_rank_0 else Echo(str(error), failed=isinstance(error, RunFailure))

    def gather(self, value: T) -> list[T]:
        """What every rank brings, by rank; every rank must call this. Values must be picklable."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def gather_from(self, function: Callable[[], T]) -> list[T]:
        """What a function returned on every rank, by rank; every rank must call this. Values must be picklable.

        Raises:
            RopewalkError: what it raised on the first rank that it raised on; on the others an
                :class:`~ropewalk.errors.Echo` of it, so that none waits for one that has given up.
        """
        if self.size == 1:
            return [function()]
        own: RopewalkError | None = None
        brought: tuple[Any, tuple[str, bool] | None]
        try:
            brought = function(), None
        except RopewalkError as error:
            own, brought = error, (None, (str(error), isinstance(error, RunFailure)))
        gathered = self.gather(brought)
        for rank, (_, failure) in enumerate(gathered):
            if failure is not None:
                if own is not None and rank == self.rank:
                    raise own
                raise Echo(failure[0], failed=failure[1]) from own
        values: list[Any] = [value for value, _ in gathered]
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.control)


def world_from_environment() -> World:
    """What torchrun says in the environment; one process where it says nothing.

    Raises:
        RopewalkError: if only some of its variables are there, or one is no number.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "WORLD_SIZE" not in given and "RANK" not in given:
        return World()
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise RopewalkError(
            f"the environment has {', '.join(given)} but no {', '.join(missing)}; start several processes with torchrun"
        )
    try:
        rank, size, local_rank, local_size = (int(given[name]) for name in VARIABLES)
    except ValueError:
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        raise RopewalkError(f"the environment says {told}, which are not all whole numbers") from None
    return World(
        rank, size, local_rank, local_size, None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    )


def require_devices(world: World, device: torch.device) -> None:
    """Raise if the processes of this machine would have to share a CUDA device.

    Raises:
        RopewalkError: with the number of devices that there are.
    """
    if world.size > 1 and device.type == "cuda" and torch.cuda.device_count() < world.local_size:
        raise RopewalkError(
            f"{world.local_size} processes on this machine need as many CUDA devices, torch sees "
            f"{torch.cuda.device_count()}; lower --nproc-per-node, or set device to cpu"
        )


@contextmanager
def joined(device_type: str = "auto", go_on: str = "start it again") -> Iterator[World]:
    """Join the run's processes while the context is open: nothing to do where there is one.

    Args:
        device_type: ``cpu``, ``cuda``, or ``auto``: CUDA where there is a device for each process of this machine.
        go_on: what a user can do after a process was lost.

    Raises:
        RunFailure: where the block raised because another process ended.
        RopewalkError: what the block raised, on ranks but the first with the rank's number before it.
    """
    world = world_from_environment()
    if world.size == 1:
        yield world
        return
    started = not dist.is_initialized()
    if started:
        _start(world, device_type)
    control = _control_group()
    world = replace(world, control=control, restarts=_most_restarts(world.restarts, control))
    try:
        with _ending_on_sigterm():
            yield world
    except _Ended:
        raise RunFailure(
            f"rank {world.rank} was told to end, because another process failed or the job was cancelled; {go_on}"
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
        kind = next(each for each in (RunFailure, EngineError, RopewalkError) if isinstance(error, each))
        raise kind(f"rank {world.rank}: {error}") from error
    except RuntimeError as error:
        if not _is_lost_contact(error):
            raise
        raise RunFailure(
            f"rank {world.rank} lost contact with the other processes: one of them has ended or hangs; its own message "
            f"says why; {go_on}"
        ) from error
    # Only in good order: a group whose other processes have died may never come back from this.
    if started:
        dist.destroy_process_group()
        forget_groups()
    else:
        # This process lives on, and may join again.
        dist.destroy_process_group(control)


def _outlast_rank_0(world: World) -> None:
    """torchrun ends all processes as soon as one of them fails: rank 0, which says why, must be the first."""
    with suppress(RuntimeError):
        # Nobody comes: the wait ends when rank 0 has gone.
        dist.barrier(group=world.control)
    time.sleep(LAST_WORDS)


def _start(world: World, device_type: str) -> None:
    # With too few devices the processes meet over gloo, where one of them can say so.
    enough = torch.cuda.device_count() >= world.local_size
    device_type = "cuda" if device_type in ("auto", "cuda") and enough else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(world.local_rank)
    try:
        store = _fresh_store(world)
        where: dict[str, Any] = (
            {} if store is None else {"store": store, "rank": world.rank, "world_size": world.size}
        )
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", **where)
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RopewalkError(f"rank {world.rank} cannot join the other processes: {reason}") from error


def _fresh_store(world: World) -> Any:
    """A store without what processes before a restart have left in it; None where torch's own does.

    torchrun keeps one store over its restarts, and gloo would look for its neighbours where the last ones were. The
    count of restarts names an attempt on one machine only: of several, each counts the failures of its own processes.
    """
    if not world.restarts or world.local_size < world.size:
        return None
    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore(f"attempt{world.restarts}", store)


def _most_restarts(restarts: int, group: Any) -> int:
    """Each machine's torchrun counts the failures of its own processes; the run has been started again for any."""
    most = torch.tensor(restarts)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def _control_group() -> Any:
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _is_lost_contact(error: RuntimeError) -> bool:
    """gloo says it as a plain RuntimeError, NCCL and the store as torch's own kinds."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return "gloo" in text or "connection closed by peer" in text or "connection reset" in text


class _Ended(BaseException):
    """SIGTERM came; not an Exception, so that nothing on the way mistakes it for its own failure."""


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """torchrun ends the other processes with SIGTERM when one has failed: they say so, and files stay whole."""

    def end(*_: Any) -> None:
        raise _Ended

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:
        # Only the main thread may; elsewhere whoever started the thread decides.
        yield
        return
    try:
        yield
    except BaseException:
        # What went wrong is still to be said, and this process is to end anyway: torchrun kills those that do not.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)
