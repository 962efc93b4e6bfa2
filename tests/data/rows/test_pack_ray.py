"""Rows on Ray are those of one process, whatever happens to the nodes."""

import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data.read.documents import Document, Record
from ropewalk.data.read.input_splits import InputSplit
from ropewalk.data.rows.pack import pack_rows
from ropewalk.data.settings import SourceSpec
from ropewalk.data.tokens.corpus import tokenise_splits
from ropewalk.errors import RopewalkError
from ropewalk.runs.executors import RayCluster, _check_address, on_ray
from tests.data.cases import changed
from tests.data.rows.rows_cases import job, tree


@dataclass(frozen=True)
class Slow:
    """Reads documents that are made up; notes who reads which split, and waits where it is told to.

    Attributes:
        folder: for the notes, and for the file ``wait``: as long as it exists, no split ends.
        limit: bytes of the largest file that the reading process may write.
    """

    folder: Path
    limit: int = resource.RLIM_INFINITY

    def __call__(self, split: InputSplit) -> Iterator[Record]:
        number = split.identity["number"]
        with (self.folder / "notes").open("a") as notes:
            notes.write(f"{number} {os.getpid()}\n")
        # Always, because Ray uses its workers again.
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
        for document in range(40):
            while document == 20 and (self.folder / "wait").exists():
                time.sleep(0.02)
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
        _check_address(made.address)
        ray.init(made.address, logging_level="ERROR", log_to_driver=False)
        with on_ray(None, 0, [tmp_path_factory.mktemp("checked")], ["tokenizers"]) as found:
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
            tokenise_splits(reader.splits, tokenizer, tmp_path / "out", executor=nodes.ray, read=reader)
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
        made = tokenise_splits(reader.splits, tokenizer, tmp_path / "two", executor=nodes.ray, read=reader)
        killer.join()
        assert made.digest == expected.digest
        assert tree(tmp_path / "two") == tree(tmp_path / "one")
        times = Counter(number for number, _ in reader.asked())
        assert sorted(times.values()) == [1] * 7 + [2]
