"""A part of HELMET's long-document question answering: NarrativeQA, whose answers a judge grades.

Prompt, grades and the judge's prompt are HELMET's. The two examples that HELMET shows before the story are left out:
it draws them without a seed. A story that is too long loses its end, as there. HELMET's judge is GPT-4o 2024-05-13.

Source: Yen et al., arXiv:2410.02694; princeton-nlp/HELMET at 4526dfb, ``data.py`` and ``scripts/eval_gpt4_longqa.py``
(MIT).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.rows import PublishedTask, Question, suite_of
from ropewalk.evaluation.tasks.suite import JUDGED, Judge, judged_grade

NAME = "helmet_narrativeqa"
ORIGIN = "the test split of https://huggingface.co/datasets/deepmind/narrativeqa, in parquet"
ROOM = 100
BEFORE = (
    "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
    "concisely as you can, using a single phrase if possible.\n\n"
)
AFTER = "\n\nQuestion: {question}\nAnswer:"
ENDING = " ... [the rest of the text is omitted]"
JUDGE = """\
Please act as an impartial judge and evaluate the quality of the provided answer which attempts to answer the \
provided question based on a provided context.
Although you are not given the context, you will be given a set of correct answers that achieves full scores on all \
metrics, and you need to assess the provided answers using the correct answers.

Below is your grading rubric:

Fluency:
- Score 0 (incoherent, repetitive, or incomplete): Incoherent sentences, repetitive sentences (even if not by exact \
words), incomplete answers, or gibberish. Note that even if the answer is coherent, if it is repetitive or \
incomplete, it should be given a score of 0.
- Score 1 (coherent, non-repetitive answer): Coherent, non-repetitive, fluent, grammatically correct answers.

Correctness:
- Score 0 (Incorrect): The answer does not agree with the provided correct answers at all.
- Score 1 (partly correct): Partly agree with one of the provided correct answers (for example, the question asks for\
 a date and a person; the answer gets the date right but the person wrong).
- Score 2 (correct but not fully relevant): Fully agrees with one of the provided correct answers but mentions other \
completely irrelevant information. Note that extra details provided in the answer, even if not mentioned in the \
correct answers, should NOT be seen as irrelevant as long as they are relevant to the question to a reasonable \
extend.
- Score 3 (correct and relevant): Fully agrees with one of the provided correct answers and only provides information\
 relevant to the question. Note that if the answer is longer than the correct answer, as long as everything in the \
answer is relevant to the question, it should still be given score 3. For example, if the correct answer is "the \
North Pole" and the answer is "They are headed for the North Pole", it should still be given a score of 3.

Now, read the following question, answer, and correct answers. First think step-by-step and provide your reasoning \
and assessment on the answer. Then output your score in the following json format: {{"fluency": 0, "correctness": \
1}}.

Question: {question}
Correct answers: {official}
Answer: {candidate}
"""
HIGHEST = 3
"""Highest product of fluency and correctness."""


def question(row: Row, file: str = "") -> Question:
    """The question of a row, with the beginning of its story."""
    asked, answers = row["question"]["text"], tuple(each["text"] for each in row["answers"])
    return Question(
        row["document"]["text"],
        answers,
        BEFORE,
        AFTER.format(question=asked),
        {"question": asked},
        ending=ENDING,
    )


def judge_prompt(answer: str, references: Sequence[str], details: Mapping[str, Any]) -> str:
    """What the judge reads: of the answer, the first line, or what follows ``Answer:``, as HELMET cuts it."""
    one_line = answer.replace("\n", " ")
    after = re.search("answer:(.*)", one_line, re.IGNORECASE)
    candidate = (after[1] if after else one_line).strip()
    candidate = re.sub("^answer:", "", candidate, flags=re.IGNORECASE).strip()
    return JUDGE.format(question=details["question"], official=list(references), candidate=candidate)


def verdict(said: str) -> float | None:
    """Fluency times correctness in the last JSON object, as a share of their highest; None if there is none."""
    objects = re.findall(r"\{.*?\}", said, re.DOTALL)
    try:
        grades = json.loads(objects[-1])
        grade = float(grades["fluency"]) * float(grades["correctness"]) / HIGHEST
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    return grade if 0 <= grade <= 1 else None


SUITE = suite_of(
    NAME,
    "HELMET NarrativeQA (a part of HELMET)",
    lambda path, _: PublishedTask(NAME, NAME, JUDGED, ROOM, ORIGIN, question, path, cut=True),
    {JUDGED: judged_grade},
    judge=Judge(JUDGE, judge_prompt, verdict),
)
