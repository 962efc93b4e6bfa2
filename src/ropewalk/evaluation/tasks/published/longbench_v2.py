"""LongBench v2: 503 questions with four choices about long texts, of which no answer can be looked up.

The prompts are the published ones without reasoning (``0shot.txt``). A prompt that is too long loses the middle of its
text; upstream cuts the middle of the whole prompt, at 120,000 tokens for most models.

Source: Bai et al., arXiv:2412.15204; THUDM/LongBench at 2e00731, ``pred.py``, ``result.py`` and ``prompts`` (MIT).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.evaluation.samples import NO_DETAILS
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.rows import PublishedTask, Question, suite_of

NAME = "longbench_v2"
ORIGIN = "data.json of https://huggingface.co/datasets/THUDM/LongBench-v2"
ROOM = 128
LETTERS = "ABCD"
BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
AFTER = """
</text>

What is the correct answer to this question: {question}
Choices:
(A) {A}
(B) {B}
(C) {C}
(D) {D}

Format your response as follows: "The correct answer is (insert answer here)".\
"""
GROUPINGS = ("difficulty", "length", "domain")


def question(row: Row, file: str = "") -> Question:
    """The question of a row."""
    if row["answer"] not in LETTERS:
        raise ValueError(f"its answer is {row['answer']!r}")
    choices = {letter: row[f"choice_{letter}"].strip() for letter in LETTERS}
    return Question(
        row["context"].strip(),
        (row["answer"],),
        BEFORE,
        AFTER.format(question=row["question"].strip(), **choices),
        {"groups": {name: row[name] for name in GROUPINGS}, "id": row["_id"]},
    )


def right_choice(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer names the right letter as asked for, without regard to asterisks, else 0."""
    without = answer.replace("*", "")
    # The form in brackets wins even if the other stands before it.
    found = re.search(r"The correct answer is \(([A-D])\)", without) or re.search(
        r"The correct answer is ([A-D])", without
    )
    return float(found is not None and found[1] == references[0])


SUITE = suite_of(
    NAME,
    "LongBench v2",
    lambda path, _: PublishedTask(NAME, NAME, "choice", ROOM, ORIGIN, question, path, cut=True),
    {"choice": right_choice},
)
