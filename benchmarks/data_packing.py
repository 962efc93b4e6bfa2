"""Packing beside the bare tokenizer, and how much memory it takes from 10 MB to 1 GB of text.

    python -m benchmarks.data_packing [--tokenizers embedded,bpe32k] [--megabytes 128] [--memory 10,100,1000]

The bound of the speed is the tokenizer itself: ``encode_batch_fast`` of texts that are in memory already, on all
cores by its own threads, its ids not even looked at. Packing reads the same documents from a JSON lines file, checks,
tokenises, hashes, stores and packs them, and writes rows, a manifest and digests. Both run in a process of their own,
one after the other, several times; the ratio is of each one's best. The corpus is this Python's standard library, each
file whole ("long documents") or cut into pieces of about 1 KB ("short documents"), repeated with a counter in front.

``bpe32k`` is a byte-level BPE of 32,000 tokens that is trained on the corpus first; the embedded checkpoint's has
4,096. The smaller the vocabulary, the faster a tokenizer makes tokens, and the more the rest counts.

The ratio of CPU seconds is given beside that of wall-clock seconds: on a machine that others use too it is the
steadier. Starting the workers is part of packing.

Memory is the peak resident size of the packing process; Python with the libraries that packing needs, and nothing
packed, is given beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import parsed, parser_of, program_says, write
from ropewalk.versions import software_versions

BARE = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "true"
from tokenizers import Tokenizer
from ropewalk.data import load_tokenizer
path, name = sys.argv[1:]
tokenizer = Tokenizer.from_str(load_tokenizer(name).backend_tokenizer.to_str())
tokenizer.no_truncation(); tokenizer.no_padding()
texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
batches, size = [[]], 0
for text in texts:
    batches[-1].append(text)
    size += len(text)
    if size > 1 << 22:
        batches.append([])
        size = 0
start, cpu = time.perf_counter(), time.process_time()
for batch in batches:
    tokenizer.encode_batch_fast(batch, add_special_tokens=False)
print(json.dumps({"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}))
"""

PACKING = """
import json, os, resource, sys, time
from ropewalk.data import load_tokenizer, pack_rows
from ropewalk.data.settings import PackConfig
import pyarrow, ropewalk.data.mixture.mixture, ropewalk.data.statistics
path, name, out, context, workers = sys.argv[1:]
if __name__ == "__main__":
    tokenizer = load_tokenizer(name)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    before, used = peak(), cpu()
    start = time.perf_counter()
    config = PackConfig(
        sources=[path], tokenizer=name, rows={"context": context}, work={"workers": workers}
    )
    rows = pack_rows(config, out, tokenizer=tokenizer)
    print(json.dumps({
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu() - used,
        "tokens": rows.manifest["counts"]["reading"]["tokens"],
        "documents": rows.manifest["counts"]["reading"]["documents"],
        "rows": len(rows),
        "bytes_before": before,
        "bytes_peak": peak(),
    }))
"""


def corpus(path: Path, size: int, short: bool) -> None:
    """Write JSON lines of about ``size`` bytes of text."""
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        for text in _texts(short):
            number += 1
            file.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")
            written += len(text)
            if written >= size:
                return


def _texts(short: bool) -> Iterator[str]:
    from ropewalk.data.read.embedded import embedded_documents

    texts = [document.text for document in embedded_documents("all")]
    if short:
        texts = [text[start : start + 1024] for text in texts for start in range(0, len(text), 1024)]
    while True:
        yield from texts


def _pack(path: Path, tokenizer: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        arguments = (path, tokenizer, Path(out) / "rows", given.context, given.workers)
        return _measured(PACKING, arguments, given)


def _measured(code: str, arguments: Sequence[object], given: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(program_says(code, arguments, given.small))
    return result


def speed(tokenizer: str, folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Packing against the bare tokenizer, alternately."""
    results = []
    for kind in given.documents:
        path = folder / "speed.jsonl"
        corpus(path, given.megabytes * 10**6, kind == "short")
        bare, packing = [], []
        for _ in range(given.rounds):
            bare.append(_measured(BARE, (path, tokenizer), given))
            packing.append(_pack(path, tokenizer, folder, given))
            for what, each in (("bare", bare[-1]), ("packing", packing[-1])):
                print(f"{what} {each['seconds']:.1f} s, {each['cpu_seconds']:.1f} s of CPU", flush=True)
        best, bound = (min(runs, key=lambda each: each["seconds"]) for runs in (packing, bare))
        cpu = [min(each["cpu_seconds"] for each in runs) for runs in (bare, packing)]
        results.append(
            {
                "documents": kind,
                "bytes": path.stat().st_size,
                "num_documents": best["documents"],
                "tokens": best["tokens"],
                **{
                    f"{name}_{key}": [each[key] for each in runs]
                    for name, runs in (("bare", bare), ("packing", packing))
                    for key in ("seconds", "cpu_seconds")
                },
                "bare_tokens_per_second": best["tokens"] / bound["seconds"],
                "packing_tokens_per_second": best["tokens"] / best["seconds"],
                "ratio": bound["seconds"] / best["seconds"],
                "ratio_of_cpu_time": cpu[0] / cpu[1],
            }
        )
        path.unlink()
    return results


def memory(tokenizer: str, folder: Path, sizes: list[int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory by size of the input."""
    results = []
    for kind in given.documents:
        for megabytes in sizes:
            path = folder / "memory.jsonl"
            corpus(path, megabytes * 10**6, kind == "short")
            result = _pack(path, tokenizer, folder, given)
            results.append({"documents_are": kind, "megabytes": megabytes, **result})
            print(f"{megabytes} MB: {result['bytes_peak'] / 2**20:.0f} MiB", flush=True)
            path.unlink()
    return results


def bpe32k(folder: Path) -> str:
    """Train a byte-level BPE of 32,000 tokens on the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from ropewalk.data.read.embedded import embedded_documents

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=32000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((document.text for document in embedded_documents("all")), trainer)
    path = str(folder / "bpe32k")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tokenizers", default="embedded,bpe32k", help="models or folders; bpe32k is trained"
    )
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--memory", default="10,100,1000", help="megabytes; the first tokenizer packs them")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", nargs="+", choices=("long", "short"), default=["long", "short"])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    small = {
        "tokenizers": "embedded",
        "megabytes": 1,
        "memory": "1",
        "rounds": 1,
        "documents": ["short"],
        "workers": 1,
    }
    given = parsed(parser, small, arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = given.tokenizers.split(",")
        paths = {each: bpe32k(folder) if each == "bpe32k" else each for each in names}
        sizes = [int(size) for size in given.memory.split(",") if size]
        result = {
            "context": given.context,
            "versions": software_versions(),
            "bound": "the tokenizer's own speed on the same cores: ratio 1",
            "speed": {each: speed(path, folder, given) for each, path in paths.items()},
            "memory": memory(paths[names[0]], folder, sizes, given),
        }
    write("data_packing", result, given)


if __name__ == "__main__":
    main()
