"""Samples of all suites that are made by seed, checked by solvers that read the prompts alone.

    python -m benchmarks.task_samples

Each sample must have one right answer, which is its reference, and whole needles, and prompt and longest answer must
take 99 to 100 % of the length (see `benchmarks.task_checkers`), counted with a byte-level BPE that is trained on the
embedded corpus. A sample that is wrong ends the benchmark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import tokenizers

from benchmarks.common import parsed, parser_of, settings_of, write
from benchmarks.ruler_samples import processor_seconds, trained_tokenizer
from benchmarks.task_checkers import CHECKERS, check
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample, Task
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.io.lengths import parse_length

BLOCK = 100
"""Samples of a seed: all of them are made with the fewest units before the first one is filled."""


@dataclass
class Row:
    """What was checked of a task at a length, and the processor seconds of all threads that it took."""

    suite: str
    task: str
    length: int
    samples: int
    least_fill: float
    most_fill: float
    processor_seconds: float


def tasks_of(suite: str) -> list[Task]:
    """The default tasks of a suite, without those that need data."""
    found = BY_NAME[suite]
    assert isinstance(found, GeneratedSuite)
    tasks = found.tasks(Settings(suites=(suite,)))
    return [tasks[name] for name in found.default or tasks if tasks[name].unavailable() is None]


def endless(task: Task, encoder: PromptEncoder, length: int, most: int) -> Iterator[Sample]:
    """Samples of one seed after the other."""
    for seed in range(-(-most // BLOCK)):
        yield from task.samples(encoder, length, min(BLOCK, most), seed)


def row_of(task: Task, encoder: PromptEncoder, length: int, most: int) -> Row:
    """Make and check so many samples."""
    fills = []
    used = processor_seconds()
    for sample in islice(endless(task, encoder, length, most), most):
        try:
            check(sample)
        except (AssertionError, ValueError) as error:
            raise SystemExit(f"{sample.key} is wrong: {error}") from error
        fills.append(sample.fill)
    used = processor_seconds() - used
    return Row(task.suite, task.name, length, len(fills), min(fills), max(fills), used)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--suites", nargs="+", default=sorted(CHECKERS), choices=sorted(CHECKERS))
    parser.add_argument("--lengths", type=parse_length, nargs="+", default=[2**12, 2**15, 2**17])
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[10_000, 200, 200], help="of a task by length"
    )
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--corpus-bytes", type=int, default=2_000_000)
    small = {"lengths": [4096], "samples": [2], "vocabulary": 2000, "corpus_bytes": 200_000}
    options = parsed(parser, small, arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = PromptEncoder(trained_tokenizer(options.vocabulary, options.corpus_bytes))
    rows = []
    for length, most in zip(options.lengths, options.samples, strict=True):
        for task in (task for suite in options.suites for task in tasks_of(suite)):
            rows.append(row_of(task, encoder, length, most))
            print(rows[-1], flush=True)
    result = {
        **settings_of(options),
        "tokenizers": tokenizers.__version__,
        "least_fill": min(row.least_fill for row in rows),
        "most_fill": max(row.most_fill for row in rows),
        "results": [asdict(row) for row in rows],
    }
    write("task_samples", result, options)


if __name__ == "__main__":
    main()
