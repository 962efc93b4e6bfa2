"""Memory and time of planning rows for very many documents, from their index alone.

    python -m benchmarks.data_index [--documents 1e6,1e7,1e8]

The index (lengths, sources, hashes, ends) is made up: log-normal lengths of 490 tokens in the median in 20 sources, one
document in a thousand a repeat. Each number of documents has a process of its own, which builds the corpus from the
indexes of token shards, holds out 200 documents, counts statistics, mixes if the plan says so, and plans rows of 128k
tokens: all that ``ropewalk data pack`` does between tokenising and writing rows. No token ids are written.

``anonymous`` is the process's peak of memory that is its own, sampled each 20 ms; pages of mapped files, which the
operating system drops when it needs room, are not part of it. ``libraries`` is what it has before the first document.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import in_own_process, parsed, parser_of, write
from ropewalk.versions import software_versions

PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "sequential": {"rows": {}, "mixture": {}},
    "best_fit": {"rows": {"packing": "best_fit"}, "mixture": {}},
    "mixed": {"rows": {}, "mixture": {"shuffle": True, "long_from": 8192, "long_factor": 2.0}},
}
SHARD_DOCUMENTS = 8192


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how much of a process's memory is anonymous")


class Peak:
    """The peak of anonymous memory while a step runs."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, _anonymous())
            time.sleep(0.02)


def _shards(documents: int) -> Iterator[Any]:
    """The indexes of token shards as tokenising keeps them."""
    import numpy as np

    from ropewalk.data.read.readers import ReadingCounts
    from ropewalk.data.tokens.token_shards import TokenShard

    random = np.random.default_rng(0)
    for start in range(0, documents, SHARD_DOCUMENTS):
        count = min(SHARD_DOCUMENTS, documents - start)
        lengths = np.exp(random.normal(6.2, 1.2, count)).astype(np.int64).clip(1, 1 << 20)
        hashes = random.integers(0, 2**64, count, np.uint64)
        hashes[::1000] = hashes[0]
        yield TokenShard(
            path=Path("none"), reading=ReadingCounts(count),
            tokens=int(lengths.sum()), sources=tuple(f"source {n}" for n in range(20)), digest="00" * 32,
            lengths=lengths, source_ids=random.integers(0, 20, count, np.int32), hashes=hashes,
            characters=lengths * 4, first_ids=np.full(count, 5, np.int32), last_ids=np.full(count, 6, np.int32),
        )  # fmt: skip


def measure(documents: int, plan: str) -> dict[str, Any]:
    """Plan rows in this process."""
    from ropewalk.data import load_tokenizer
    from ropewalk.data.rows import pack
    from ropewalk.data.rows.writer import row_files
    from ropewalk.data.settings import PackConfig
    from ropewalk.data.tokens.corpus import Corpus

    tokenizer = load_tokenizer("embedded")
    config = PackConfig(
        sources=["embedded"],
        tokenizer="embedded",
        rows={"context": "128k", **PLANS[plan]["rows"]},
        mixture=PLANS[plan]["mixture"],
        validation={"documents": 200},
    )
    libraries, peak, steps = _anonymous(), Peak(), {}

    def step(name: str, work: Any, *arguments: Any) -> Any:
        start, peak.bytes = time.perf_counter(), _anonymous()
        result = work(*arguments)
        steps[name] = {"seconds": time.perf_counter() - start, "anonymous": max(peak.bytes, _anonymous())}
        return result

    for name in ("hold_out", "mix", "length_states", "pack_documents", "description"):
        work = getattr(pack, name)
        setattr(pack, name, lambda *given, name=name, work=work: step(name, work, *given))
    shards = step("shards", lambda: deque(_shards(documents)))
    corpus = step("corpus", Corpus, shards, 1)
    packed, *_ = pack._planned(config, tokenizer, corpus)
    step("one file's part of the plan", packed.rows, 0, row_files(packed)[0][1])
    return {
        "documents": documents,
        "plan": plan,
        "rows": packed.num_rows,
        "tokens": int(corpus.lengths.sum()),
        "libraries": libraries,
        "anonymous": max(each["anonymous"] for each in steps.values()),
        "seconds": sum(each["seconds"] for name, each in steps.items() if name != "shards"),
        "steps": steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--documents", default="1e6,1e7")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--one", nargs=2, metavar=("DOCUMENTS", "PLAN"), help="measure one in this process")
    given = parsed(parser, {"documents": "1e3", "plans": "mixed"}, arguments)
    if given.one:
        print(json.dumps(measure(int(given.one[0]), given.one[1])))
        return
    runs = []
    for documents in given.documents.split(","):
        for plan in given.plans.split(","):
            each = ["--one", str(int(float(documents))), plan]
            # Always in a process of its own: it wraps the functions of pack.
            runs.append(in_own_process("benchmarks.data_index", each))
            per = (runs[-1]["anonymous"] - runs[-1]["libraries"]) / runs[-1]["documents"]
            print(f"{documents} {plan}: {runs[-1]['seconds']:.1f} s, {per:.1f} bytes a document", flush=True)
    write("data_index", {"versions": software_versions(), "runs": runs}, given)


if __name__ == "__main__":
    main()
