"""MMLU and HotpotQA in small for RULERv2, and a reader that solves its prompts from their text alone."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from ropewalk.evaluation import ModelUnderTest, Settings, TaskResult, evaluate_model
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.qa_cases import hotpotqa
from tests.evaluation.ruler_cases import prose
from tests.evaluation.tasks.published.published_cases import write_rows
from tests.evaluation.tasks.task_cases import Reader, Say

TEST_ROWS, TRAINING_ROWS = 6, 150


def mmlu_rows(count: int, kind: str) -> list[dict[str, Any]]:
    draw = random.Random(kind)
    return [
        {
            "question": f"{kind} {number}:\n\n {prose(draw.choice((3, 6, 12)), seed=number)} {{i}}?",
            "subject": "law",
            "choices": [f"{kind} {number} choice {letter}" for letter in "ABCD"],
            "answer": draw.randrange(4),
        }
        for number in range(count)
    ]


def mmlu_folder(folder: Path) -> Path:
    """As the folder ``all`` of cais/mmlu."""
    folder.mkdir()
    for name, rows in {
        "test-00000-of-00001": mmlu_rows(TEST_ROWS, "test"),
        "auxiliary_train-00000-of-00001": mmlu_rows(TRAINING_ROWS, "training"),
        "dev-00000-of-00001": [{"question": "no question of these"}],
    }.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def settings_of(folder: Path, **more: Any) -> Settings:
    """Settings with both data sets, which are written to the folder."""
    if not (folder / "all").exists():
        mmlu_folder(folder / "all")
        (folder / "hotpotqa.json").write_text(json.dumps(hotpotqa(40)))
    return Settings(
        suites=("ruler2",),
        benchmark_data={"ruler2": folder / "all"},
        hotpotqa=str(folder / "hotpotqa.json"),
        **more,
    )


def samples_of(settings: Settings, task: str, length: int, count: int, seed: int = 0) -> list[Sample]:
    found = BY_NAME["ruler2"]
    assert isinstance(found, GeneratedSuite)
    return list(found.tasks(settings)[task].samples(PromptEncoder(word_tokenizer()), length, count, seed))


def results_of(settings: Settings, say: Say) -> dict[str, TaskResult]:
    results = evaluate_model(ModelUnderTest(word_tokenizer(), Reader(say)), settings)
    return {result.task: result for result in results}


def copied(prompt: str) -> tuple[list[str], int | None]:
    """All questions of the number that the end of a prompt names, and the place of the one that it asks for."""
    texts, _, request = prompt.rpartition("\n\n")
    found = re.search(
        r"(?:the (\d)\w\w \(1 indexed\) )?Question (\d{7})(?! from the context and then copy)", request
    )
    assert found is not None
    nth = re.search(r"the (\d)\w\w \(1 indexed\) Question", request)
    number = re.findall(r"Question (\d{7})", request)[-1]
    # Before the examples.
    texts = texts.partition("\n\nHere are some examples")[0]
    return re.findall(rf"^Question {number}: (.+)$", texts, re.MULTILINE), nth and int(nth[1]) - 1


def letter_of(question: str) -> str:
    """The right letter of a question, which the rows tell."""
    kind, number = re.findall(r"(test|training) (\d+):", question)[0]
    rows = mmlu_rows(TEST_ROWS if kind == "test" else TRAINING_ROWS, kind)
    return "ABCD"[rows[int(number)]["answer"]]
