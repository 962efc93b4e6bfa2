"""Independent tasks of a step, each of which leaves files behind: run on the cores of this machine, or on a cluster.

Machines that share a folder share the tasks: each runs its own first, and whoever commits a file has done the task for
all. So nobody holds a lock, and a killed machine costs only the time of its tasks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

from ropewalk.errors import RopewalkError
from ropewalk.io.files import writing

VISIBLE_SECONDS = 90.0
"""Longer than network file systems cache names."""

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failed:
    """What a task that raised a RopewalkError gives."""

    error: RopewalkError


class Executor(Protocol):
    """Runs tasks somewhere."""

    def run(
        self, function: Callable[[Shared, Item], Result], shared: Shared, items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | Failed]]:
        """Call ``function(shared, item)`` for every item; yield items and results as they are finished.

        Args:
            function: a function of a module.
            shared: a value for all tasks, which each process receives once.
            items: read only as far ahead as the tasks in progress.
        """
        ...


def own_first(items: Sequence[Item], shard: tuple[int, int]) -> list[Item]:
    """The order in which a machine does tasks that several share: its own, then those of others from the last one.

    Others work from the front of theirs, so two machines meet as late as possible.

    Args:
        items: all tasks; task k belongs to machine k % number.
        shard: (this machine, number of machines), both counted from 0.
    """
    own = items[shard[0] :: shard[1]]
    return list(dict.fromkeys([*own, *reversed(items)]))


def run_tasks(
    executor: Executor,
    function: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Iterable[Item],
    done: Callable[[Item], bool],
    folder: Path,
) -> Iterator[Item]:
    """Run the tasks that are not done when their turn comes; yield each that has been run.

    A task that fails while another process has committed its files counts as done.

    Args:
        executor: where to run them.
        function, shared, items: as for :meth:`Executor.run`. A task that runs twice must leave the same files.
        done: whether the files of a task are there.
        folder: where the files appear, for the message.

    Raises:
        RopewalkError: of a task; or if its files do not appear on this machine.
    """
    for item, result in executor.run(function, shared, (item for item in items if not done(item))):
        if not isinstance(result, Failed):
            wait_until(lambda item=item: done(item), folder)  # type: ignore[misc]
        elif not done(item):
            raise result.error
        yield item


def wait_until(seen: Callable[[], bool], folder: Path) -> None:
    """Wait until this process sees what a task has written to a folder.

    Raises:
        RopewalkError: if it does not see it within a minute and a half, longer than network file systems cache names.
    """
    end, pause = time.monotonic() + VISIBLE_SECONDS, 0.05
    while not seen():
        if time.monotonic() > end:
            raise RopewalkError(
                f"a node of the Ray cluster has written to {folder}, but the files do not appear on this machine; "
                "set --out and --token-store to folders that all nodes mount at the same path"
            )
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def attempt(function: Callable[[Shared, Item], Result], shared: Shared, item: Item) -> Result | Failed:
    """Call the function of a task, and return a RopewalkError in place of raising it."""
    try:
        return function(shared, item)
    except RopewalkError as error:
        return Failed(error)


@dataclass(frozen=True)
class Processes:
    """Runs tasks in processes of this machine.

    Attributes:
        workers: number of processes, at least 1. With 1, or for a single task, this process runs them. With more, a
            script needs the usual ``if __name__ == "__main__"``, because processes are spawned.
    """

    workers: int

    def run(
        self, function: Callable[[Shared, Item], Result], shared: Shared, items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | Failed]]:
        """As :meth:`Executor.run`.

        Raises:
            RopewalkError: if a process dies.
        """
        stream = iter(items)
        # Two, to learn whether there is more than one task; starting a process takes longer than most single ones.
        first = list(islice(stream, 2))
        stream = chain(first, stream)
        if self.workers == 1 or len(first) < 2:
            for item in stream:
                yield item, attempt(function, shared, item)
            return
        # Spawned, not forked: the parent may hold threads and locks (torch, tokenizers) that a fork would copy.
        context = multiprocessing.get_context("spawn")
        running: dict[Future[Any], Item] = {}
        with TemporaryDirectory(prefix="ropewalk-") as folder:
            # A file: a pipe would block this process until every worker has read megabytes from it.
            path = Path(folder) / "shared"
            with writing(path):
                path.write_bytes(pickle.dumps((function, shared)))
            pool = ProcessPoolExecutor(self.workers, context, initializer=_start_worker, initargs=(path,))
            try:
                while True:
                    # One more than workers, so that none waits for this process.
                    for item in islice(stream, self.workers + 1 - len(running)):
                        running[pool.submit(_in_worker, item)] = item
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            except BrokenProcessPool as error:
                raise RopewalkError(
                    "a worker process died; if memory ran out, use fewer workers (--workers); if a script started the "
                    'worker, put the code of the script under `if __name__ == "__main__":`'
                ) from error
            finally:
                # Reached as well when the caller stops early and closes the generator.
                pool.shutdown(wait=True, cancel_futures=True)


_worker_task: tuple[Callable[[Any, Any], Any], Any] | None = None


def _start_worker(path: Path) -> None:
    global _worker_task
    # Ctrl-C signals every process of a command; only the parent handles it and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The workers already use all requested cores; threads of a tokenizer would only compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_task = pickle.loads(path.read_bytes())


def _end_with_parent() -> None:
    """Exit when the parent process is killed; the pool's queue alone would keep a worker waiting forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # Not sys.exit, which in a thread would end that thread alone.
    os._exit(1)


def _in_worker(item: Any) -> Any:
    assert _worker_task is not None
    function, shared = _worker_task
    return attempt(function, shared, item)
