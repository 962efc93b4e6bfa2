"""LongBench Pro without its summaries: questions in English and Chinese about real documents of 8K to 256K tokens.

Prompts and scores are the authors'. A prompt that is too long loses the middle of its document; upstream cuts the
middle of the whole prompt. The two tasks of summaries (T4) are left out: their score needs an embedding model of 8
billion parameters. With tokens to think, models get the questions that upstream calls thinking ones.

Source: arXiv:2601.02872; caskcsg/longcontext at 88fbeb8, ``LongBench-Pro/modules/utils.py``; the questions
https://huggingface.co/datasets/caskcsg/LongBench-Pro (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from ropewalk.evaluation.samples import NO_DETAILS
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.helmet_scores import gain
from ropewalk.evaluation.tasks.published.rows import PublishedTask, Question, suite_of
from ropewalk.evaluation.tasks.suite import BenchmarkSettings

NAME = "longbench_pro"
ORIGIN = "longbench_pro.json of https://huggingface.co/datasets/caskcsg/LongBench-Pro"
ROOM = 1024
BETWEEN = "\n\n\n\n"
SUMMARIES = "T4"
GROUPINGS = ("primary_task", "token_length", "contextual_requirement", "difficulty", "language")
MARKS = ("[Answer]", "[答案]")
"""What stands before the answer; the English one wins."""
NDCG, ORDER, FIRST, F1, FOUND = "ndcg", "order", "first", "f1", "found"
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("T1.1", "T1.2"), NDCG),
    **dict.fromkeys(("T2.1", "T2.2", "T6.3"), ORDER),
    **dict.fromkeys(("T3.1", "T3.2", "T11.1", "T11.2"), FIRST),
    **dict.fromkeys(("T5.1", "T5.2", "T6.2", "T7.1", "T7.2", "T7.3", "T9.1", "T9.2"), F1),
    **dict.fromkeys(("T6.1", "T8.1", "T8.2", "T8.3", "T10.1", "T10.2"), FOUND),
}
"""Kind of the score by the number of the secondary task."""


def question(row: Row, file: str, asked: str) -> Question | None:
    """The question of a row; None for a summary."""
    number = row["secondary_task"].partition(" ")[0]
    if number.partition(".")[0] == SUMMARIES:
        return None
    if number not in KINDS or not row["answer"]:
        raise ValueError(f"its task is {row['secondary_task']!r}, with {len(row['answer'])} answers")
    return Question(
        row["context"],
        tuple(row["answer"]),
        after=f"{BETWEEN}{row[asked]}",
        details={"kind": KINDS[number], "groups": {name: row[name] for name in GROUPINGS}},
    )


def score(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """The published score of the answer's kind, of the lines after the last mark of the answer."""
    if not answer.strip():
        return 0.0
    found = SCORES[details["kind"]]([_plain(each) for each in references], lines_of(answer))
    # Upstream counts what is above 1 as a failed evaluation.
    return found if found <= 1 else 0.0


def in_order(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """The same, but two lines in the right order are not all of an order: pairs that the answer leaves out count."""
    if details["kind"] != ORDER:
        return score(answer, references, details)
    right, said = [_plain(each) for each in references], lines_of(answer)
    return pairs_in_order(right, said) / max(_pairs(right), _pairs(said), 1)


def lines_of(answer: str) -> list[str]:
    """The lines after the last mark of the answer, in lower case and with single spaces."""
    for mark in MARKS:
        if mark in answer:
            answer = answer.rpartition(mark)[2]
            break
    return [_plain(line) for line in answer.strip().split("\n")]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def pairs_in_order(right: Sequence[str], said: Sequence[str]) -> int:
    """Pairs of right lines that stand in the right order; of a line that is said twice, the last one counts."""
    place = {line: at for at, line in enumerate(said)}
    return sum(a in place and b in place and place[a] < place[b] for a, b in combinations(right, 2))


def _pairs(lines: Sequence[str]) -> int:
    return len(lines) * (len(lines) - 1) // 2


def _order(right: Sequence[str], said: Sequence[str]) -> float:
    if len(right) < 2 or len(said) < 2:
        return 0.0
    return pairs_in_order(right, said) / _pairs(said)


def _f1(right: Sequence[str], said: Sequence[str]) -> float:
    return 2 * len({*right} & {*said}) / (len({*right}) + len({*said}))


def _found(right: Sequence[str], said: Sequence[str]) -> float:
    return sum(each in said for each in right) / len(right)


def _ndcg(right: Sequence[str], said: Sequence[str]) -> float:
    """NDCG at the number of right lines, of which the first is worth most."""
    worth = {line: len(right) - at for at, line in enumerate(right)}
    # Of a line that is said twice, the last one counts.
    ranked = [line for at, line in enumerate(said) if line not in said[at + 1 :]]
    best = gain(sorted(worth.values(), reverse=True), len(right))
    return gain([worth.get(each, 0) for each in ranked], len(right)) / best


SCORES: Mapping[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    NDCG: _ndcg,
    ORDER: _order,
    FIRST: lambda right, said: float(right[0] == said[0]),
    F1: _f1,
    FOUND: _found,
}


def _task(path: Path | None, settings: BenchmarkSettings) -> PublishedTask:
    asked = "question_thinking" if settings.thinking_tokens else "question_nonthinking"
    return PublishedTask(NAME, NAME, NAME, ROOM, ORIGIN, partial(question, asked=asked), path, cut=True)


SUITE = suite_of(
    NAME,
    "LongBench Pro without summaries",
    _task,
    {NAME: score, "longbench_pro_order": in_order},
    {NAME: ("longbench_pro_order",)},
)
