"""Tasks on Ray write the files that one process writes, whatever happens to the nodes; what cannot work is refused."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from ropewalk.data import cluster
from ropewalk.data.cluster import RayCluster, connected, wait_until
from ropewalk.data.read.documents import Document, Record
from ropewalk.data.read.input_splits import InputSplit
from ropewalk.data.rows.store import pack_rows
from ropewalk.data.settings import SourceSpec, WorkSettings
from ropewalk.data.tokens.corpus import tokenise_splits
from ropewalk.errors import RopewalkError
from ropewalk.io import orphan
from tests.data.cases import changed
from tests.data.rows.rows_cases import job, tree

WORK = WorkSettings(engine="ray", workers=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "ray", "shard": "0/2"}, "engine ray divides the work among its nodes; omit shard"),
        ({"address": "auto"}, "address auto is that of a Ray cluster; set engine to ray"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        WorkSettings(**settings)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RopewalkError, match=r"run pip install 'ropewalk\[ray\]'"), connected(WORK, []):
        pass


@pytest.mark.parametrize(
    "address",
    ["ray://head:10001", "head", "head:port", "http://head:8265", "head:0", "head:65536", "head:99999"],
)
def test_addresses_of_another_kind_are_refused(address: str) -> None:
    with pytest.raises(RopewalkError, match=f"{re.escape(repr(address))} must be 'auto' or HOST:PORT"):
        cluster._check_address(address)


def test_an_address_without_ray_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            RopewalkError, match=f"no Ray cluster answers at '{address}': .*; start a cluster with ray"
        ):
            cluster._check_address(address)


@pytest.mark.slow
def test_another_program_at_the_address_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_HEALTH_SECONDS", 2.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RopewalkError, match=f"the program at '{address}' is not the head of a Ray"):
            cluster._check_address(address)


def test_a_node_says_what_keeps_it_from_taking_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_VISIBLE_SECONDS", 0.01)
    versions, marker = cluster._versions(), tmp_path / "marker"
    marker.touch()
    assert cluster._probe(versions, [marker]) is None
    problem = cluster._probe({**versions, "tokenizers": "0.1"}, [marker])
    assert problem == (
        f"has tokenizers {versions['tokenizers']}, but this process has 0.1; install the same version on all nodes"
    )
    marker.unlink()
    assert str(cluster._probe(versions, [marker])).startswith(f"does not share the folder {tmp_path}; set")


def test_files_that_never_appear_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    wait_until(lambda: next(answers), tmp_path)
    monkeypatch.setattr(cluster, "_VISIBLE_SECONDS", 0.01)
    with pytest.raises(RopewalkError, match="the files do not appear on this machine; set --out"):
        wait_until(lambda: False, tmp_path)


DRIVER = """
import os, sys, time
from ropewalk.data.cluster import RAY_FOLDER, connected
from ropewalk.data.settings import WorkSettings

def wait(shared, item):
    open(os.path.join(shared, "begun"), "w").close()
    time.sleep(600)

with connected(WorkSettings(engine="ray", workers=1), []) as ray:
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
        mark = f"{cluster.RAY_FOLDER}={folder}".encode()
        # The node and its head at least.
        assert len(orphan._processes_with(mark)) >= 2
        if how == "killed":
            driver.kill()
        driver.communicate()
        end = time.monotonic() + 10
        while orphan._processes_with(mark) or folder.exists():
            assert time.monotonic() < end
            time.sleep(0.05)


@dataclass(frozen=True)
class Slow:
    """Reads documents that are made up; notes who reads which split, and waits where it is told to.

    Attributes:
        folder: for the notes, and for the file ``wait``: as long as it exists, no split ends.
        limit: bytes of the largest file that the reading process may write.
    """

    folder: Path
    limit: int = resource.RLIM_INFINITY

    def __call__(self, split: InputSplit, skip: int = 0) -> Iterator[Record]:
        number = split.identity["number"]
        with (self.folder / "notes").open("a") as notes:
            notes.write(f"{number} {os.getpid()}\n")
        # Always, because Ray uses its workers again.
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
        for document in range(40):
            while document == 20 and (self.folder / "wait").exists():
                time.sleep(0.02)
            if document >= skip:
                yield Record((Document(f"split {number} document {document} " * 30, "made", "up"),))

    def asked(self) -> list[tuple[int, int]]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), int(process)) for number, process in map(str.split, lines)]

    @property
    def splits(self) -> list[InputSplit]:
        return [InputSplit(SourceSpec(path="made up"), (), 0, None, {"number": n}, 0) for n in range(8)]


@dataclass
class Nodes:
    """Two nodes of one core each, and the connection to them."""

    made: Any
    second: Any
    ray: RayCluster


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    try:
        second = made.add_node(**small)
        cluster._check_address(made.address)
        ray.init(made.address, logging_level="ERROR", log_to_driver=False)
        with connected(WorkSettings(engine="ray"), [tmp_path_factory.mktemp("checked")]) as found:
            assert found is not None
            yield Nodes(made, second, found)
    finally:
        ray.shutdown()
        made.shutdown()


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
class TestNodes:
    """In this order: the second node is killed at the end of the last test."""

    def test_rows_are_those_of_one_process(
        self, nodes: Nodes, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        (tmp_path / "documents").mkdir()
        for file in range(3):
            texts = (f"file {file} line {line} " * (1 + line % 7) for line in range(60))
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (tmp_path / "documents" / f"{file}.jsonl").write_text(lines)
        work = job(tmp_path / "documents", tokenizer, validation={"documents": 3})
        work.pack(tmp_path / "alone")
        config = changed(work.config, work={"engine": "ray"})
        seen: list[tuple[int, int]] = []
        made = pack_rows(
            config, tmp_path / "ray", tokenizer=tokenizer, progress=lambda *counts: seen.append(counts)
        )
        assert len(made) > 10
        assert [documents for documents, _ in seen] == [60, 120, 180]
        assert tree(tmp_path / "ray") == tree(tmp_path / "alone")

    def test_a_full_disk_is_one_sentence(
        self, nodes: Nodes, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        reader = Slow(tmp_path, limit=1000)
        with pytest.raises(RopewalkError, match=r"^cannot write .*: File too large \(on node "):
            tokenise_splits(reader.splits, tokenizer, tmp_path / "out", cluster=nodes.ray, read=reader)
        assert tree(tmp_path / "out") == {}

    def test_a_killed_node_costs_only_its_task(
        self, nodes: Nodes, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        (tmp_path / "alone").mkdir()
        alone = Slow(tmp_path / "alone")
        expected = tokenise_splits(alone.splits, tokenizer, tmp_path / "one", read=alone)
        reader = Slow(tmp_path)
        (tmp_path / "wait").touch()

        def kill() -> None:
            # One core each: when two splits have been begun, each node works on one.
            until(lambda: len(reader.asked()) == 2)
            nodes.made.remove_node(nodes.second, allow_graceful=False)
            # A worker outlives its node for a moment, in which it could end its split.
            until(lambda: not all(lives(process) for _, process in reader.asked()))
            (tmp_path / "wait").unlink()

        killer = threading.Thread(target=kill)
        killer.start()
        made = tokenise_splits(reader.splits, tokenizer, tmp_path / "two", cluster=nodes.ray, read=reader)
        killer.join()
        assert made.digest == expected.digest
        assert tree(tmp_path / "two") == tree(tmp_path / "one")
        times = Counter(number for number, _ in reader.asked())
        assert sorted(times.values()) == [1] * 7 + [2]
