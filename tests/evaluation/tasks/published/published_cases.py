"""Evaluate a model that answers by the prompt on a suite whose questions are the rows of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.evaluation import ModelUnderTest, Settings, TaskResult, evaluate_model
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.published.rows import PublishedTask
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.task_cases import Reader, Say


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def task_of(suite: str, path: Path, task: str = "") -> PublishedTask:
    found = BY_NAME[suite]
    assert isinstance(found, GeneratedSuite)
    made = found.tasks(Settings(suites=(suite,), benchmark_data={suite: path}))[task or suite]
    assert isinstance(made, PublishedTask)
    return made


def samples_of(
    suite: str, path: Path, length: int, task: str = "", count: int = 1000, seed: int = 0
) -> list[Sample]:
    """Samples of a task, counted in words."""
    return list(task_of(suite, path, task).samples(PromptEncoder(word_tokenizer()), length, count, seed))


def results_of(
    suite: str, path: Path, length: int, say: Say, tasks: Sequence[str] = ()
) -> dict[str, TaskResult]:
    """Results of a model that answers by the prompts' text, by task."""
    settings = Settings(suites=(suite,), tasks=tuple(tasks), lengths=(length,), benchmark_data={suite: path})
    results = evaluate_model(ModelUnderTest(word_tokenizer(), Reader(say)), settings)
    return {result.task: result for result in results}
