"""Ray as an executor: tasks on the cores of this machine or of a cluster's nodes.

Ray places the tasks, repeats those of workers and nodes that die, and spills what does not fit into memory. Tasks hand
their data over as files in folders that all nodes share, so Ray itself carries only small values.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.files import check_writable, writing
from ropewalk.io.orphan import clean_up_after_this_process
from ropewalk.runs.tasks import Failed, attempt, wait_until
from ropewalk.versions import VERSION

RETRIES = 8
"""How often Ray repeats a task whose worker or node died."""

OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a Ray that ropewalk starts itself."""

RAY_FOLDER = "ROPEWALK_RAY_FOLDER"
"""Environment variable of the processes of a Ray that ropewalk starts itself: its temporary folder."""

_LONGEST_FOLDER = 40
"""Ray puts sockets into the folder, adding up to 67 of the 107 bytes that the path of a socket may have."""

_CONNECT_SECONDS, _HEALTH_SECONDS, _NODE_SECONDS, _STOP_SECONDS = 5.0, 20.0, 60.0, 30.0
_HOST_AND_PORT = re.compile(r"(?P<host>[^:/\s]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")
_LAST_PORT = 65535

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")


class RayCluster:
    """Runs tasks on a connected Ray; made by :func:`on_ray`."""

    def __init__(self, ray: Any, workers: int) -> None:
        self._ray = ray
        self._workers = workers
        self._remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_task)

    def run(
        self, function: Callable[[Shared, Item], Result], shared: Shared, items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | Failed]]:
        """As :meth:`ropewalk.runs.tasks.Executor.run`; errors of tasks have the name of the node.

        Args:
            function: a function of a module of ropewalk. Its tasks may be repeated, and must give the same files.
            shared: a value for all tasks, which each node receives once.
            items: read only as far ahead as the tasks in flight: two for each core, or ``workers``.

        Raises:
            RopewalkError: if Ray gives a task up.
        """
        from ray.exceptions import RayError, RayTaskError

        common = self._ray.put(shared)
        waiting = iter(items)
        flying: dict[Any, Item] = {}
        try:
            while True:
                # Nodes may join and leave while the tasks run.
                while len(flying) < self._most_in_flight():
                    try:
                        item = next(waiting)
                    except StopIteration:
                        break
                    flying[self._remote.remote(function, common, item, os.getcwd())] = item
                if not flying:
                    return
                for reference in self._ray.wait(list(flying), num_returns=1)[0]:
                    item = flying.pop(reference)
                    yield item, self._ray.get(reference)
        except RayTaskError:
            # An error of our own code on a node; its traceback is what a report needs.
            raise
        except RayError as error:
            raise RopewalkError(
                f"Ray gave up on a task whose worker died {RETRIES + 1} times, perhaps for lack of memory: "
                f"{first_line(error)}"
            ) from error
        finally:
            # Tasks that are ended here remove their temporary files.
            for reference in flying:
                self._ray.cancel(reference)
            if flying:
                self._ray.wait(list(flying), num_returns=len(flying), timeout=_STOP_SECONDS)

    def _most_in_flight(self) -> int:
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        return self._workers or max(2, 2 * cores)

    def check_nodes(self, folders: Sequence[Path], packages: Sequence[str]) -> None:
        """Make sure that every node has these versions of packages and sees the folders that this process writes to.

        Raises:
            RopewalkError: naming the node and what it lacks.
        """
        from ray.exceptions import GetTimeoutError, RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        probe = self._ray.remote(num_cpus=0, max_retries=0)(_probe)
        places = sorted({_existing(folder) for folder in folders})
        markers = [place / f".ropewalk.{uuid.uuid4().hex}" for place in places]
        try:
            for marker in markers:
                with writing(marker.parent):
                    marker.touch()
            # Nodes without cores, as many head nodes are, run no tasks.
            nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            asked = []
            for node in nodes:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                reference = probe.options(scheduling_strategy=there).remote(_versions(packages), markers)
                asked.append((node["NodeManagerAddress"], reference))
            for name, reference in asked:
                try:
                    problem = self._ray.get(reference, timeout=_NODE_SECONDS)
                except GetTimeoutError as error:
                    raise RopewalkError(
                        f"node {name} of the Ray cluster has not answered in {_NODE_SECONDS:.0f} seconds; remove it "
                        "or try again"
                    ) from error
                except RayError as error:
                    raise RopewalkError(
                        f"node {name} of the Ray cluster cannot run ropewalk; install version {VERSION} there: "
                        f"{first_line(error)}"
                    ) from error
                if problem is not None:
                    raise RopewalkError(f"node {name} of the Ray cluster {problem}")
        finally:
            for marker in markers:
                with suppress(OSError):
                    marker.unlink()


@contextmanager
def on_ray(
    address: str | None, workers: int, folders: Sequence[Path], packages: Sequence[str] = ()
) -> Iterator[RayCluster]:
    """Connect to a Ray, or start one on this machine.

    A Ray that the calling program has already connected to is used, and stays connected. One that is started here ends
    with the block.

    Args:
        address: ``auto`` or HOST:PORT; None for that of the environment variable RAY_ADDRESS, or else a new Ray.
        workers: number of tasks at a time; 0 for two for each core. A new Ray has as many cores.
        folders: those that tasks will write to, which all nodes must share.
        packages: packages that must have the same versions on all nodes, besides ropewalk.

    Raises:
        RopewalkError: if the package is missing, the address is wrong or unreachable, or a node cannot take part.
    """
    # Ray sends usage statistics to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise RopewalkError(
            "engine ray needs the package ray, which is not installed; run pip install 'ropewalk[ray]'"
        ) from error
    own = not ray.is_initialized()
    address = address or os.environ.get("RAY_ADDRESS")
    started = own and address is None
    with _ray_folder() if started else nullcontext() as folder, _left(ray, own):
        if own:
            _start(ray, address, workers, folder)
        cluster = RayCluster(ray, workers)
        cluster.check_nodes([each.absolute() for each in folders], packages)
        yield cluster


@contextmanager
def _left(ray: Any, own: bool) -> Iterator[None]:
    """Leave a Ray after the block that this process has joined or started."""
    try:
        yield
    finally:
        if own:
            ray.shutdown()


@contextmanager
def _ray_folder() -> Iterator[Path]:
    """A temporary folder for a Ray that is started in the block.

    After the block, and if this process is killed in it, the Ray's processes end and the folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="ropewalk-ray-"))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="ropewalk-ray-", dir="/tmp"))
    cleaner = clean_up_after_this_process(folder, RAY_FOLDER)
    # Only now, so that it is not the cleaner's too.
    os.environ[RAY_FOLDER] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[RAY_FOLDER]
        cleaner.communicate()


def _start(ray: Any, address: str | None, workers: int, folder: Path | None) -> None:
    # Only what the user can act on: Ray reports its own start and end at length.
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is None:
            ray.init(
                "local",
                num_cpus=workers or os.cpu_count() or 1,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=str(folder),
                **quiet,
            )
        else:
            _check_address(address)
            ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, OSError) as error:
        where = "start Ray on this machine" if address is None else f"connect to Ray at {address!r}"
        raise RopewalkError(f"cannot {where}: {first_line(error)}") from error


def _check_address(address: str) -> None:
    """Refuse an address at once at which Ray itself would wait for minutes."""
    if address == "auto":
        return
    found = _HOST_AND_PORT.fullmatch(address)
    # The system's resolver takes a larger port modulo 65536, and another program may answer there.
    if found is None or not 1 <= int(found["port"]) <= _LAST_PORT:
        raise RopewalkError(
            f"the Ray address {address!r} must be 'auto' or HOST:PORT with a port from 1 to {_LAST_PORT}; run this "
            "command on a node of the cluster with --address auto"
        )
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), _CONNECT_SECONDS).close()
    except OSError as error:
        raise RopewalkError(
            f"no Ray cluster answers at {address!r}: {getattr(error, 'strerror', None) or error}; start a cluster "
            "with ray start --head"
        ) from error
    # In a process of its own: where another program answers, Ray ends the process that asks.
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    with suppress(subprocess.TimeoutExpired):
        if subprocess.run(command, capture_output=True, timeout=_HEALTH_SECONDS).returncode != 1:
            return
    raise RopewalkError(
        f"the program at {address!r} is not the head of a Ray cluster; give the port of ray start --head"
    )


def _task(function: Callable[[Any, Any], Any], shared: Any, item: Any, folder: str) -> Any:
    # A task has one core; the tokenizer's threads would compete with the other tasks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Sources may be named relative to the folder in which the command was started.
    with suppress(OSError):
        os.chdir(folder)
    result = attempt(function, shared, item)
    if isinstance(result, Failed):
        return Failed(RopewalkError(f"{result.error} (on node {platform.node()})"))
    return result


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """What all nodes must have in common: other versions may give other files."""
    return {
        "ropewalk": VERSION,
        **{name: version(name) for name in packages},
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _probe(versions: dict[str, str], markers: Sequence[Path]) -> str | None:
    """What keeps this node from taking part, as the end of a sentence; None if nothing does."""
    for name, here in _versions(versions.keys() - {"ropewalk", "Python"}).items():
        if here != versions[name]:
            return f"has {name} {here}, but this process has {versions[name]}; install the same version on all nodes"
    for marker in markers:
        try:
            wait_until(marker.exists, marker.parent)
            check_writable(marker)
        except RopewalkError as error:
            if marker.exists():
                return f"cannot write to the folder {marker.parent}: {error}"
            return (
                f"does not share the folder {marker.parent}; set --out and --token-store to folders that all nodes "
                "mount at the same path"
            )
    return None


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())
