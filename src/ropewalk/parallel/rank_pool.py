"""Ranks: a pool of gloo processes on this machine, for testing code that runs on several ranks.

The processes stay alive between calls. Each starts as a fork of a server process that has already imported torch, which
saves seconds per rank. The class is public so that users can test their own collectives with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 300.0
"""Default timeout of a call, and the timeout of collectives, in seconds."""


LIBRARIES = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_loader",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "rich.progress",
    "cyclopts",
    "pydantic.json_schema",
]
"""Modules that most processes need and that take seconds to import."""


class RankFailure(AssertionError):
    """A function raised on some rank; the message contains the traceback of every rank that reported one."""


class Ranks:
    """``world_size`` processes with a default process group over gloo.

    A script that starts a pool must guard its entry point with ``if __name__ == "__main__":``, because each process
    imports the main module again.

    Example:
        >>> with Ranks(2) as ranks:
        ...     ranks.run(torch.distributed.get_rank)
        [0, 1]
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """Call a function on every rank at once and return the results in rank order.

        Args:
            function: function defined at the top level of an importable module. The function, its arguments and its
                results must be picklable.
            args: arguments, the same on all ranks; the function gets its rank from torch.distributed.
            seconds: timeout of the call.

        Returns:
            One result per rank.

        Raises:
            RankFailure: if the function raises on a rank, or if a rank dies or exceeds the timeout. The next call
                starts new processes.
        """
        if not all(process.is_alive() for process in self._processes):
            # A process was killed between two calls; no result is pending, so the pool can be replaced.
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        # The first failure ends the wait: the other ranks would hang in a collective with the failed one.
        while waiting and not failures:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                failures = dict.fromkeys(waiting.values(), f"no answer within {seconds:g} seconds")
            for pipe in [each for each in waiting if each in ready]:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died; the machine may have run out of memory"
                (results if ok else failures)[rank] = value
        if failures:
            self.close()
            raise RankFailure("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            # The fork server reaps its children at once, so the pid of a finished one may belong to another program.
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = process_context()
        # A file store: unlike a TCP store, it needs no free port, which parallel test runs would compete for.
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            where = (theirs, rank, self.world_size, self._folder.name, dict(os.environ))
            process = context.Process(target=_serve, args=where, daemon=True)
            process.start()
            # The child must hold the only copy of its end: closing it on exit is what raises EOFError in run().
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def process_context(libraries: Sequence[str] = LIBRARIES) -> Any:
    """Multiprocessing context whose processes are forks of a server that has only imported large libraries.

    The server is a child of this process and ends with it. On systems that cannot fork, each process imports the
    libraries itself.

    Args:
        libraries: names of the modules that the server imports.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # No effect if the program has already started the fork server for its own processes.
    context.set_forkserver_preload([*libraries])
    return context


def _serve(
    pipe: Connection, rank: int, world_size: int, folder: str, environment: Mapping[str, str] | None = None
) -> None:
    # The fork server keeps the environment it was started with, so later changes must be passed explicitly.
    os.environ.update(environment or {})
    import torch
    import torch.distributed as dist

    # The variables that torchrun sets for its processes.
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ[name] = str(value)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    # The imported modules live as long as the process; freezing them spares every collection hundreds of thousands of
    # objects.
    gc.freeze()
    # The ranks share the machine's cores with each other and with gloo's threads.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            # The parent process has exited.
            return
        try:
            answer = (True, function(*args))
        except Exception:
            # Any exception goes back to the caller, which raises it as a RankFailure.
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except ConnectionError:
            return
