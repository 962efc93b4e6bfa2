"""InfiniteBench: twelve tasks about texts of more than 100,000 tokens.

The prompts are the published ones: those for open models without a chat template, and GPT-4's with ``--chat``. A prompt
that is too long loses the middle of its text; upstream cuts the middle of the whole prompt.

Source: Zhang et al., arXiv:2402.13718; OpenBMB/InfiniteBench at 88b3daa, ``src/prompt.py`` and ``src/eval_utils.py``
(MIT).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.infinitebench_scores import FURTHER, LETTERS, METRICS
from ropewalk.evaluation.tasks.published.rows import PublishedSettings, PublishedTask, Question
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite

NAME = "infinitebench"
ORIGIN = "a folder with the .jsonl files of https://huggingface.co/datasets/xinrongzhang2022/InfiniteBench"
_CHOICES = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
_QUIZ = " I will quiz you about the important information"
_MASK = (
    "Below is a dialogue script where one random occurrence of a character name is replaced with "
    '"$$MASK$$", and you should try to guess who that character is.\n\n'
)


@dataclass(frozen=True)
class Form:
    """A task: its metric, and its prompts with the tokens of room for their answers.

    The room without a chat template is the published one. The API models that get the prompts for chats had no limit;
    theirs is what 99 % of the published answers of GPT-4 take.
    """

    metric: str
    base: str
    room: int
    chat: str
    chat_room: int = 128


FORMS: Mapping[str, Form] = {
    "passkey": Form("integer",
        _HIDDEN + " and memorize it." + _QUIZ + ".\n\n{context}\n\n{input}\n\nThe pass key is",
        6,
        _HIDDEN + " and memorize them." + _QUIZ + " there.\n\n{context}\n\n{input}",
    ),
    "number_string": Form("integer",
        _HIDDEN + "." + _QUIZ + " there.\n\n{context}\n\n{input}\n\nThe sequence of digits is",
        12,
        _HIDDEN + "." + _QUIZ + " there.\n\n{context}\n\n{input}",
    ),
    "kv_retrieval": Form("word",
        kv := "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        50,
        kv,
    ),
    "longbook_choice_eng": Form("choice",
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
        + _CHOICES
        + "\n\nThe letter of the correct answer is",
        40,
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n\nOnly one of the following options "
        "is correct, tell me the answer using one single letter (A, B, C, or D). Don't say anything else.\n"
        + _CHOICES,
    ),
    "longbook_sum_eng": Form("summary",
        "Summarize the book below.\n\n{context}\n\nSummary:",
        1200,
        "Summarize the following book.\n\n{context}",
        1200,
    ),
    "longbook_qa_eng": Form("f1",
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {input}\n"
        "Answer:",
        40,
        "Read the book below and answer a question.\n\n{context}\n\nQuestion: {input}\n\nBe very concise.",
    ),
    "longbook_qa_chn": Form("f1_chinese",
        "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
        40,
        "请根据以下书籍回答我的问题。\n\n{context}\n\n问题：{input}\n请尽量简短地回答。",
        256,
    ),
    "longdialogue_qa_eng": Form("name",
        _MASK + "{context}\n\nThe name that has been replaced with $$MASK$$ is likely",
        40,
        _MASK
        + "The dialogue:\n\n---\n\n{context}\n\n---\n\nEnd of dialogue.\n\nWhich character is most likely "
        '"$$MASK$$"? '
        "Just say the name used by the scriptwriter (before the colon marks) of one single character and nothing else.",
    ),
    "math_find": Form("number", find := "{prefix}\n\n{context}\n\n{input}", 3, find, 1024),
    "math_calc": Form("values",
        calc := "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]"
        "\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
        30_000,
        calc,
        30_000,
    ),
    "code_run": Form("returned",
        "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the exact "
        "value of {func_call}. The value of {func_call} is",
        5,
        "Following is a set of Python functions. There is a function called named {func}.\n\n{context}\n\nPlease give "
        "me the exact number of the return value of {func_call}. Be concise. Your response must end with the final "
        "returned value.",
        1024,
    ),
    "code_debug": Form("function",
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\nOptions:\n" + _CHOICES + "\n\nThe correct option is:",
        5,
        "There is ONLY ONE function in the large project that is deliberately made to include an obvious error. Please "
        "find the function that contains the most obvious errors. I will give you four options to narrow your scope. "
        "You can inspect the options and think. Eventually, tell me the answer using one single letter (A, B, C, or D)."
        "\n\n{context}\n\nWhich funtion has deliberate error?\n"  # codespell:ignore funtion
        + _CHOICES
        + "\n\nYou should first find the functions in the options. Repeat their content, inspect through code, and at "
        "last give me your answer for the function that has the deliberate and obvious error in A, B, C, or D.",
        2048,
    ),
}  # fmt: skip


def question(row: Row, file: str, task: str, template: str) -> Question | None:
    """The question of a row of the task's file; None for rows of other files."""
    if file != task:
        return None
    asked = row["input"]
    fields = {"input": asked}
    if "options" in row:
        fields |= {
            f"OPTION_{letter}": option for letter, option in zip(LETTERS, row["options"], strict=False)
        }
    if task == "math_find":
        fields["prefix"] = f"What is {_found(r'The .+ of', asked).lower()[:-3]} in the following list?"
    if task == "code_run":
        fields["func_call"] = _found(r"func_[0-9]+\(-?[0-9]+\)", asked)
        fields["func"] = fields["func_call"].partition("(")[0]
    before, after = (part.format(**fields) for part in template.split("{context}"))
    # Older files have another name for the text.
    text = row["content"] if "content" in row else row["context"]
    return Question(text, references(row, task), before, after, {"id": row.get("id")})


def _found(pattern: str, text: str) -> str:
    if (found := re.search(pattern, text)) is None:
        raise ValueError(f"its input is {text!r}")
    return found[0]


def references(row: Row, task: str) -> tuple[str, ...]:
    """The right answers of a row: names, texts, or an option and its letter; numbers as JSON."""
    answer = row["answer"]
    # Numbers and texts are alone in older files, and in a list in newer ones.
    answers = list(answer) if isinstance(answer, list) else [answer]
    if task == "math_calc":
        return (json.dumps(answers[0] if isinstance(answers[0], list) else answers),)
    if FORMS[task].metric in ("choice", "function") and not (len(answers) == 2 and answers[1] in [*LETTERS]):
        return answers[0], LETTERS[row["options"].index(answers[0])]
    return tuple(map(str, answers))


def _tasks(settings: BenchmarkSettings) -> Mapping[str, PublishedTask]:
    path = settings.of(PublishedSettings).benchmark_data.get(NAME)
    found = {}
    for task, form in FORMS.items():
        template, room = (form.chat, form.chat_room) if settings.chat else (form.base, form.room)
        asks = partial(question, task=task, template=template)
        found[task] = PublishedTask(
            NAME, task, f"{NAME}_{form.metric}", room, ORIGIN, asks, path, cut=True, files=(task,)
        )
        if form.metric == "summary":
            found[task] = replace(found[task], package="rouge_score", extra=NAME)
    return found


SUITE = GeneratedSuite(
    name=NAME,
    title="InfiniteBench",
    figure="tasks",
    # An answer of Math.Calc takes up to 30,000 tokens, and no published model has 1 %.
    default=tuple(task for task in FORMS if task != "math_calc"),
    settings={"published": PublishedSettings},
    tasks=_tasks,
    metrics=METRICS,
    further=FURTHER,
    from_file=True,
)
