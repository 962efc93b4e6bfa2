"""A Ray that is started, joined and left; what cannot work is refused before the tasks begin."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.io import orphan
from ropewalk.runs import executors, tasks
from ropewalk.runs.executors import on_ray
from ropewalk.runs.tasks import wait_until


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RopewalkError, match=r"run pip install 'ropewalk\[ray\]'"), on_ray(None, 1, []):
        pass


@pytest.mark.parametrize(
    "address",
    ["ray://head:10001", "head", "head:port", "http://head:8265", "head:0", "head:65536", "head:99999"],
)
def test_addresses_of_another_kind_are_refused(address: str) -> None:
    with pytest.raises(RopewalkError, match=f"{re.escape(repr(address))} must be 'auto' or HOST:PORT"):
        executors._check_address(address)


def test_an_address_without_ray_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            RopewalkError, match=f"no Ray cluster answers at '{address}': .*; start a cluster with ray"
        ):
            executors._check_address(address)


@pytest.mark.slow
def test_another_program_at_the_address_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_HEALTH_SECONDS", 2.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RopewalkError, match=f"the program at '{address}' is not the head of a Ray"):
            executors._check_address(address)


def test_a_node_says_what_keeps_it_from_taking_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "VISIBLE_SECONDS", 0.01)
    versions, marker = executors._versions(["tokenizers"]), tmp_path / "marker"
    marker.touch()
    assert executors._probe(versions, [marker]) is None
    problem = executors._probe({**versions, "tokenizers": "0.1"}, [marker])
    assert problem == (
        f"has tokenizers {versions['tokenizers']}, but this process has 0.1; install the same version on all nodes"
    )
    marker.unlink()
    assert str(executors._probe(versions, [marker])).startswith(f"does not share the folder {tmp_path}; set")


def test_files_that_never_appear_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    wait_until(lambda: next(answers), tmp_path)
    monkeypatch.setattr(tasks, "VISIBLE_SECONDS", 0.01)
    with pytest.raises(RopewalkError, match="the files do not appear on this machine; set --out"):
        wait_until(lambda: False, tmp_path)


DRIVER = """
import os, sys, time
from ropewalk.runs.executors import RAY_FOLDER, on_ray

def wait(shared, item):
    open(os.path.join(shared, "begun"), "w").close()
    time.sleep(600)

with on_ray(None, 1, []) as ray:
    folder = os.environ[RAY_FOLDER]
    print(folder, flush=True)
    if sys.argv[1] == "killed":
        list(ray.run(wait, folder, [1]))
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_ray_ends_with_the_process_that_started_it(tmp_path: Path, how: str) -> None:
    # Too long for sockets in it, as folders of jobs often are.
    (temporary := tmp_path / ("long" * 20)).mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip())
        if how == "killed":
            until(lambda: (folder / "begun").exists())
        mark = f"{executors.RAY_FOLDER}={folder}".encode()
        # The node and its head at least.
        assert len(orphan._processes_with(mark)) >= 2
        if how == "killed":
            driver.kill()
        driver.communicate()
        end = time.monotonic() + 10
        while orphan._processes_with(mark) or folder.exists():
            assert time.monotonic() < end
            time.sleep(0.05)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)
