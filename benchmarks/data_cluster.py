"""Packing on Ray beside the embedded engine, on the same cores of one machine.

    python -m benchmarks.data_cluster [--megabytes 64] [--files 16] [--rounds 3]

Both engines pack the same JSON lines files (this Python's standard library, every other file in pieces of 1 KB) with
as many workers as there are cores, each in a process of its own, in turn. The ratio is that of the best rounds: seconds
from the first file to the last row, without starting Ray and checking its nodes, which is stated beside it. Starting
workers is part of both. The ratio of CPU seconds, of all processes, is steadier on a machine that others use too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import parsed, parser_of, program_says, write
from benchmarks.data_packing import corpus
from ropewalk.versions import software_versions

PACKING = """
import json, os, sys, time
import psutil
from ropewalk.data import load_tokenizer, pack_rows
from ropewalk.data.rows import pack
from ropewalk.data.settings import PackConfig
folder, out, engine, workers = sys.argv[1:]
tokenizer, times = load_tokenizer("embedded"), {}
executor = pack._executor

class Timed:
    def __init__(self, *arguments):
        self.block = executor(*arguments)
    def __enter__(self):
        start = time.perf_counter()
        try:
            return self.block.__enter__()
        finally:
            times["start"] = time.perf_counter() - start
            times["began"] = time.perf_counter()
    def __exit__(self, *error):
        times["seconds"] = time.perf_counter() - times.pop("began")
        # Of workers that live on until Ray stops, and of those that have ended.
        living = psutil.Process().children(recursive=True)
        spent = [each.cpu_times() for each in living]
        own = os.times()
        times["cpu_seconds"] = sum(each.user + each.system for each in spent) + sum(own[:4])
        return self.block.__exit__(*error)

pack._executor = Timed
config = PackConfig(
    sources=[folder], tokenizer="embedded", rows={"context": 8192}, work={"engine": engine, "workers": workers}
)
rows = pack_rows(config, out, tokenizer=tokenizer)
print(json.dumps({**times, "rows": len(rows), "counts": rows.manifest["counts"]["reading"]}))
"""


def pack(folder: Path, out: Path, engine: str, workers: int, small: bool) -> dict[str, Any]:
    """Pack in a process of its own; Ray wants a whole interpreter."""
    said = program_says(PACKING, (folder, out, engine, workers), small and engine != "ray")
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parsed(parser, {"megabytes": 1, "files": 2, "rounds": 1, "workers": 1}, arguments)
    runs: dict[str, list[dict[str, Any]]] = {"embedded": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "documents"
        folder.mkdir()
        for file in range(given.files):
            corpus(folder / f"{file:03}.jsonl", given.megabytes * 10**6 // given.files, file % 2 == 0)
        for number in range(given.rounds):
            for engine, results in runs.items():
                results.append(
                    pack(folder, Path(name) / f"{engine}{number}", engine, given.workers, given.small)
                )
                print(engine, results[-1], flush=True)
        # A comparison of two different results would say nothing.
        assert content(Path(name) / "ray0") == content(Path(name) / "embedded0")
    best = {engine: min(each["seconds"] for each in results) for engine, results in runs.items()}
    cpu = {engine: min(each["cpu_seconds"] for each in results) for engine, results in runs.items()}
    tokens = runs["ray"][0]["counts"]["tokens"]
    result = {
        "workers": given.workers,
        "megabytes": given.megabytes,
        "files": given.files,
        "versions": software_versions(),
        "tokens_per_second": {engine: tokens / seconds for engine, seconds in best.items()},
        "ratio": best["embedded"] / best["ray"],
        "ratio_of_cpu_time": cpu["embedded"] / cpu["ray"],
        "seconds_to_start_ray": min(each["start"] for each in runs["ray"]),
        "runs": runs,
    }
    print(json.dumps({key: result[key] for key in ("ratio", "ratio_of_cpu_time", "seconds_to_start_ray")}))
    write("data_cluster", result, given)


if __name__ == "__main__":
    main()
