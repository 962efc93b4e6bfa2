"""Suites in which the model writes an answer: samples, answers, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import task_result
from ropewalk.evaluation.answering import answer
from ropewalk.evaluation.fitting import LengthTooShort
from ropewalk.evaluation.model_under_test import Subject
from ropewalk.evaluation.predictions import PredictionLog
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.running import Progress
from ropewalk.evaluation.sample import Task
from ropewalk.evaluation.sample_store import stored_samples
from ropewalk.evaluation.tasks.needle import depth_details


def check_lengths(
    tasks: Sequence[tuple[Task, Sequence[int]]], encoder: PromptEncoder, count: int, seed: int
) -> None:
    """Raise if a prompt does not fit into a length; one message names every task and what it needs.

    Args:
        tasks: those that can run, each with its lengths in tokens.
        encoder, count, seed: of the samples.
    """
    short: dict[int, dict[str, int]] = {}
    for task, lengths in tasks:
        for length in lengths:
            try:
                task.samples(encoder, length, count, seed)
            except LengthTooShort as error:
                short.setdefault(length, {})[task.name] = error.shortest
    if short:
        length, needs = next(iter(short.items()))
        told = ", ".join(f"{name} needs {tokens}" for name, tokens in needs.items())
        names = sorted({name for group in short.values() for name in group})
        raise RopewalkError(
            f"prompts do not fit in {length} tokens with this tokenizer: {told}; give longer lengths, or leave tasks "
            f"out with --exclude {','.join(names)}"
        )


def run_task(
    subject: Subject,
    encoder: PromptEncoder,
    task: Task,
    length: int,
    count: int,
    seed: int,
    log: PredictionLog,
    samples_folder: Path | None = None,
    details: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> TaskResult:
    """One task at one length.

    Args:
        subject: what is asked.
        encoder: makes its prompts.
        task, length, count, seed: as in :meth:`Task.samples`.
        log: holds what was answered before, and gets what is answered now.
        samples_folder: where samples are kept between runs; None keeps none.
        details: facts that go into the result.
        progress: called after each answer.
    """
    samples = stored_samples(task, encoder, length, count, seed, samples_folder)
    predictions = answer(subject.backend, encoder, samples, log, progress)
    more = depth_details(predictions) if task.suite == "needle" else {}
    return task_result(predictions, {**dict(task.settings()), **more, **(details or {})})
