"""Ranks: a pool of processes on this machine that talk over gloo, to test what several ranks compute together.

The processes stay alive between calls, and start as forks of one that has imported torch. Public, like the oracles:
users test their own collectives with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 300.0
"""How long a call may take; collectives give up after as long."""


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
"""What most processes need, and takes seconds to import."""


class RankFailure(AssertionError):
    """A function raised on some rank; the message holds every rank's traceback that came in."""


class Ranks:
    """``world_size`` processes with a default process group over gloo.

    A script that starts one needs ``if __name__ == "__main__":`` around it: each process imports the main module again.

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
        """Call a function on every rank at once, and give what each returned, in order of rank.

        Args:
            function: defined at the top of an importable module; it, its arguments and its results are pickled.
            args: the same for all ranks; a function asks torch.distributed for its rank.
            seconds: after which the call fails.

        Raises:
            RankFailure: if it raises on a rank, or a rank dies or is late. The pool starts afresh at the next call.
        """
        if not all(process.is_alive() for process in self._processes):
            # Ended between two calls, by whoever; nothing of theirs is awaited.
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting and not failures:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                failures = dict.fromkeys(waiting.values(), f"no answer within {seconds:g} seconds")
            for pipe in [each for each in waiting if each in ready]:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else failures)[rank] = value
        if failures:
            self.close()
            raise RankFailure("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            # The server reaps its forks at once: the number of one that has ended may be another program's by now.
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
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            where = (theirs, rank, self.world_size, self._folder.name, dict(os.environ))
            process = context.Process(target=_serve, args=where, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def process_context() -> Any:
    """How new processes start: as forks of a server that has imported large libraries and done nothing else.

    The server is a child of this process and ends with it. Where the system cannot fork, each process imports what it
    needs.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Without effect where the program has started the server before, for processes of its own.
    context.set_forkserver_preload(LIBRARIES)
    return context


def _serve(
    pipe: Connection, rank: int, world_size: int, folder: str, environment: Mapping[str, str] | None = None
) -> None:
    # The server keeps the environment that it was started in.
    os.environ.update(environment or {})
    import torch
    import torch.distributed as dist

    # As torchrun says it to its processes.
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ[name] = str(value)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    # What is loaded stays: hundreds of thousands of objects need not be looked through for garbage again and again.
    gc.freeze()
    # Ranks share the machine's cores; gloo needs some of them too.
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
            # Whoever started this process has ended.
            return
        try:
            answer = (True, function(*args))
        except Exception:
            # The test reads what went wrong, whatever it was.
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except ConnectionError:
            return
