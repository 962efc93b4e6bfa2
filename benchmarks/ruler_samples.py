"""Time of RULER's samples, beside the bare tokenizer and NVIDIA's own scripts.

    python -m benchmarks.ruler_samples [--upstream CLONE --upstream-python PYTHON]

The tasks that need no download, with a byte-level BPE of 16384 tokens trained on the embedded corpus. The bars
stated beside each: the bare tokenizer reads the same texts, all cores, in `encode_batch_fast` (tokens alone, the
strictest and the one that counts), `encode_batch` and the plain call `tokenizer(texts)`; and upstream's script makes
as many samples of the same length with the same tokenizer, its start counted once a task, and also left out. Then the
time of a sample by length. Processor seconds are of all threads together; other load on the machine does not
lengthen them as it does seconds.

CLONE is a checkout of NVIDIA/RULER with the large files of its scripts/data/synthetic/json; PYTHON has what its scripts
import.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import runpy
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import parsed, parser_of, write
from ropewalk.data.read.embedded import embedded_documents
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.ruler.tasks import RULER
from ropewalk.io.lengths import parse_length

TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
LENGTHS = tuple(2**power for power in range(13, 18))
SEED = 42
BATCH = 32


def trained_tokenizer(vocabulary: int, corpus_bytes: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts: list[str] = []
    room = corpus_bytes
    for document in embedded_documents():
        texts.append(document.text)
        room -= len(document.text)
        if room < 0:
            break
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def processor_seconds() -> float:
    """Of this process and of those that it waited for, all threads: what other load does not lengthen."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def timed(function: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    began, used = time.perf_counter(), processor_seconds()
    result = function()
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": processor_seconds() - used,
    }, result


def ours(encoder: PromptEncoder, name: str, length: int, count: int) -> tuple[dict[str, float], list[Sample]]:
    return timed(lambda: list(RULER[name].samples(encoder, length, count, SEED)))


def bare(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds of each way to read the same texts; in batches, as the encodings of all would fill the memory."""
    batches = [list(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    backend = tokenizer.backend_tokenizer
    ways: dict[str, Callable[[list[str]], Any]] = {
        "encode_batch_fast": lambda batch: backend.encode_batch_fast(batch, add_special_tokens=False),
        "encode_batch": lambda batch: backend.encode_batch(batch, add_special_tokens=False),
        "tokenizer": lambda batch: tokenizer(batch, add_special_tokens=False, verbose=False),
    }

    def read_all(read: Callable[[list[str]], Any]) -> None:
        for batch in batches:
            read(batch)

    return {name: timed(partial(read_all, read))[0] for name, read in ways.items()}


def upstream(
    clone: Path, python: str, name: str, length: int, count: int, tokenizer: Path
) -> dict[str, float]:
    """Seconds of upstream's script, and of its loop over samples alone."""
    folder = clone / "scripts" / "data" / "synthetic"
    config = yaml.safe_load((clone / "scripts" / "synthetic.yaml").read_text())[name]
    base = runpy.run_path(str(folder / "constants.py"))["TASKS"][config["task"]]
    with tempfile.TemporaryDirectory() as out:
        command = [python, str(folder / f"{config['task']}.py"), "--save_dir", out, "--save_name", name]
        command += ["--tokenizer_type", "hf", "--tokenizer_path", str(tokenizer)]
        command += ["--max_seq_length", str(length), "--num_samples", str(count)]
        command += ["--tokens_to_generate", str(base["tokens_to_generate"])]
        command += ["--template", base["template"] + base["answer_prefix"]]
        command += [part for key, value in config["args"].items() for part in (f"--{key}", str(value))]
        taken, done = timed(lambda: subprocess.run(command, capture_output=True, text=True, check=True))
    # What the progress bar says last of its own time.
    minutes, rest = re.findall(rf"{count}/{count} \[(\d+):(\d+)", done.stderr)[-1]
    return {**taken, "samples_alone_seconds": int(minutes) * 60 + int(rest)}


def ratios(above: dict[str, float], below: dict[str, float]) -> dict[str, float]:
    return {kind: above[kind] / below[kind] for kind in ("seconds", "processor_seconds")}


def compared(options: argparse.Namespace, encoder: PromptEncoder, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name in TASKS:
        taken, samples = ours(encoder, name, options.length, options.samples)
        texts = [sample.text + sample.answer_prefix for sample in samples]
        reading = bare(encoder.tokenizer, texts)
        row: dict[str, Any] = {
            "task": name,
            **taken,
            "samples_per_second": len(samples) / taken["seconds"],
            "fill": [min(sample.fill for sample in samples), max(sample.fill for sample in samples)],
            "bare_tokenizer": reading,
            "times_the_bare_tokenizer": ratios(taken, reading["encode_batch_fast"]),
        }
        if options.upstream:
            theirs = upstream(
                options.upstream, options.upstream_python, name, options.length, options.samples, folder
            )
            row["upstream"] = theirs
            row["times_upstreams_rate"] = ratios(theirs, taken)
            row["times_upstreams_rate_without_its_start"] = theirs["samples_alone_seconds"] / taken["seconds"]
        rows.append(row)
        print(row, flush=True)
    return rows


def by_length(options: argparse.Namespace, encoder: PromptEncoder) -> list[dict[str, Any]]:
    rows = []
    for name in TASKS:
        for length in options.lengths:
            taken, samples = ours(encoder, name, length, options.samples_by_length)
            tokens = sum(sample.prompt_tokens for sample in samples)
            rows.append(
                {
                    "task": name,
                    "length": length,
                    "seconds_a_sample": taken["seconds"] / len(samples),
                    "processor_microseconds_a_token": taken["processor_seconds"] / tokens * 1e6,
                }
            )
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=parse_length, default=2**15)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--samples-by-length", type=int, default=16)
    parser.add_argument("--upstream", type=Path)
    parser.add_argument("--upstream-python", default="python")
    parser.add_argument("--lengths", type=parse_length, nargs="+", default=LENGTHS)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--corpus-bytes", type=int, default=20_000_000)
    small = {
        "length": 8192,
        "samples": 2,
        "samples_by_length": 1,
        "lengths": [8192],
        "vocabulary": 2000,
        "corpus_bytes": 200_000,
    }
    options = parsed(parser, small, arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = PromptEncoder(trained_tokenizer(options.vocabulary, options.corpus_bytes))
    with tempfile.TemporaryDirectory() as folder:
        encoder.tokenizer.save_pretrained(folder)
        rows = compared(options, encoder, Path(folder))
    result = {
        "length": options.length,
        "samples": options.samples,
        "vocabulary": options.vocabulary,
        "upstream": "NVIDIA/RULER c3f5e3b" if options.upstream else None,
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
        "most_times_the_bare_tokenizer": max(row["times_the_bare_tokenizer"]["seconds"] for row in rows),
        "least_times_upstreams_rate": min(row["times_upstreams_rate"]["seconds"] for row in rows)
        if options.upstream
        else None,
        "results": rows,
        "samples_by_length": options.samples_by_length,
        "by_length": by_length(options, encoder),
    }
    write("ruler_samples", result, options)


if __name__ == "__main__":
    main()
