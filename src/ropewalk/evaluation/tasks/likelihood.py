"""Suites that read the losses of a text's tokens: perplexity in its forms, and LongPPL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.model_under_test import Subject
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.rows import EvaluationRows, Ids, evaluation_rows
from ropewalk.evaluation.running import Progress
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.tasks.longppl import (
    Evaluator,
    check_long_perplexity,
    long_perplexity,
    longppl_task,
    readings,
    too_short,
)
from ropewalk.evaluation.tasks.perplexity import default_bins, perplexity_by_position, perplexity_task
from ropewalk.evaluation.tasks.sliding import sliding_perplexity, sliding_task
from ropewalk.io.digests import digest

STEPS_OF_SHORT_CONTEXT = 4
"""LongPPL's short context of 4096 tokens moves by 1024; a shorter one keeps that ratio."""


def check_texts(
    subject: Subject, settings: Settings, chosen: Mapping[str, Sequence[str]], documents: Sequence[Ids]
) -> None:
    """Raise if the documents do not do for what was chosen.

    Args:
        subject, settings: as for ``evaluate``.
        chosen: names of tasks by their suite.
        documents: int ``[tokens]`` each.
    """
    tokenizer = subject.tokenizer
    for task in chosen.get("perplexity", ()):
        for length in settings.lengths_of("perplexity"):
            if task == "perplexity":
                _rows(tokenizer, settings, documents, length)
            elif task == "sliding" and settings.stride >= length:
                raise RopewalkError(
                    f"--stride {settings.stride} leaves no context in windows of {length} tokens; give a smaller one"
                )
    for length in settings.lengths_of("longppl") if "longppl" in chosen else ():
        _check_long_perplexity(tokenizer, settings, documents[: settings.rows], length)


def _check_long_perplexity(tokenizer: Any, settings: Settings, documents: Sequence[Ids], length: int) -> None:
    """Raise where no text is long enough for LongPPL, in the tokens of whoever chooses the key tokens."""
    step, bos = _step(settings), tokenizer.bos_token_id
    if settings.evaluator is None:
        check_long_perplexity(documents, bos, length, settings.short_context, step)
        return
    from ropewalk.data import load_tokenizer

    room, beginning = length - (bos is not None), settings.short_context + step
    read = readings(documents, tokenizer, load_tokenizer(settings.evaluator), room)
    lengths = [len(other.input_ids) for _, other in read]
    if max(lengths, default=0) <= beginning:
        raise too_short(settings.evaluator, lengths, length, beginning)


def likelihood_result(
    subject: Subject,
    settings: Settings,
    documents: Sequence[Ids],
    suite: str,
    task: str,
    length: int,
    progress: Progress | None = None,
) -> TaskResult:
    """One task of these suites at one length.

    Args:
        subject: with a model in memory.
        settings: rows, stride and short context are read.
        documents: int ``[tokens]`` each, without special tokens.
        suite, task, length: what to measure.
        progress: called after each pass.
    """
    if suite == "longppl":
        found = _longppl(subject, settings, documents, length, progress)
    elif task == "perplexity":
        return _by_position(subject, settings, documents, length, progress)
    else:
        found = _sliding(subject, settings, documents, length, task == "truncated", progress)
    # Only what was read: other documents behind it make no difference.
    most = _most_read(settings, task, length)
    read = digest([document[:most].tolist() for document in documents[: settings.rows]])
    return replace(found, details={**found.details, SAMPLES: read})


def _most_read(settings: Settings, task: str, length: int) -> int | None:
    """Tokens of a document that a task reads at most."""
    if task == "sliding":
        windows = settings.most_windows
        return None if windows is None else length + (windows - 1) * settings.stride
    return length


def _rows(tokenizer: Any, settings: Settings, documents: Sequence[Ids], length: int) -> EvaluationRows:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, settings.rows)


def _step(settings: Settings) -> int:
    return max(1, settings.short_context // STEPS_OF_SHORT_CONTEXT)


def _by_position(
    subject: Subject, settings: Settings, documents: Sequence[Ids], length: int, progress: Progress | None
) -> TaskResult:
    text = _rows(subject.tokenizer, settings, documents, length)
    edges = default_bins(length, settings.trained_length or subject.max_position_embeddings)
    measured = perplexity_by_position(subject.model, subject.head, text.rows, edges, progress)
    return perplexity_task(text, measured)


def _sliding(
    subject: Subject,
    settings: Settings,
    documents: Sequence[Ids],
    length: int,
    truncate: bool,
    progress: Progress | None,
) -> TaskResult:
    return sliding_task(
        sliding_perplexity(
            subject.model,
            subject.head,
            documents[: settings.rows],
            subject.tokenizer.bos_token_id,
            length,
            settings.stride,
            truncate,
            settings.most_windows,
            prefill_chunk=_chunk(subject, length),
            progress=progress,
        )
    )


def _longppl(
    subject: Subject, settings: Settings, documents: Sequence[Ids], length: int, progress: Progress | None
) -> TaskResult:
    return longppl_task(
        long_perplexity(
            subject.model,
            subject.head,
            documents[: settings.rows],
            subject.tokenizer.bos_token_id,
            length,
            settings.short_context,
            _step(settings),
            evaluator=_evaluator(settings.evaluator, subject),
            tokenizer=subject.tokenizer,
            prefill_chunk=_chunk(subject, length),
            progress=progress,
        )
    )


def _evaluator(path: str | None, subject: Subject) -> Evaluator | None:
    if path is None:
        return None
    from ropewalk.data import load_tokenizer
    from ropewalk.models.load import load_model
    from ropewalk.models.losses import OutputHead

    model = load_model(path, dtype=subject.model.dtype, device=subject.model.device)
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Evaluator(path, model, OutputHead.of(model), load_tokenizer(path), stated)


def _chunk(subject: Subject, length: int) -> int | None:
    """Chunks only where the sequence is longer than one."""
    return subject.prefill_chunk if length > subject.prefill_chunk else None
