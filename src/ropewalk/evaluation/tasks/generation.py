"""Generation: from samples to answers and predictions; what is known already is not asked again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import Backend, GenerationRequest
from ropewalk.evaluation.backends.protocol import Progress
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import LengthTooShort, Sample, Task
from ropewalk.evaluation.store import Prediction, PredictionLog, predicted
from ropewalk.evaluation.tasks.suite import FORCED


def check_lengths(
    tasks: Sequence[tuple[str, Task, Sequence[int]]], encoder: PromptEncoder, count: int, seed: int
) -> None:
    """Raise if a prompt does not fit into a length; one message names every task and what it needs.

    Args:
        tasks: those that can run, each with its name and its lengths in tokens.
        encoder, count, seed: of the samples.
    """
    short: dict[int, dict[tuple[str, str], int]] = {}
    for name, task, lengths in tasks:
        for length in lengths:
            try:
                task.samples(encoder, length, count, seed)
            except LengthTooShort as error:
                short.setdefault(length, {})[task.suite, name] = error.shortest
    if short:
        length, needs = next(iter(short.items()))
        # Several suites have a teacher-forced task.
        told = ", ".join(
            f"{suite} {name} needs {tokens}" if name == FORCED else f"{name} needs {tokens}"
            for (suite, name), tokens in needs.items()
        )
        names = sorted({name for group in short.values() for _, name in group})
        raise RopewalkError(
            f"prompts do not fit in {length} tokens with this tokenizer: {told}; give longer lengths, or leave tasks "
            f"out with --exclude {','.join(names)}"
        )


ASKED_TOKENS = 1 << 23
"""Tokens of prompts that wait for their answers at once: 64 prompts of 128K, or all of a shorter length."""


def generated_predictions(
    backend: Backend,
    encoder: PromptEncoder,
    samples: Iterable[Sample],
    log: PredictionLog,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Ask a backend for what the log does not hold yet.

    Args:
        backend: a model or a server.
        encoder: the one that the samples were made with.
        samples: of one task and length, in order of their index.
        log: gets each prediction as soon as it is there.
        progress: called after each answer, with the answers so far and the samples seen so far.

    Returns:
        One prediction a sample, in order of their index.

    Raises:
        RopewalkError: if a prompt does not have the tokens that its sample states, or the log cannot be written.
        RunFailure: if the backend gives up; the log holds what was answered.
    """
    found: list[Prediction] = []
    stream = iter(samples)
    first = next(stream, None)
    if first is None:
        return found
    at_once = max(1, ASKED_TOKENS // first.length)
    group = [first, *islice(stream, at_once - 1)]
    while group:
        found += _group(backend, encoder, group, log, len(found), progress)
        group = list(islice(stream, at_once))
    return found


def _group(
    backend: Backend,
    encoder: PromptEncoder,
    group: list[Sample],
    log: PredictionLog,
    before: int,
    progress: Progress | None,
) -> list[Prediction]:
    unknown = [sample for sample in group if log.get(sample) is None]
    requests = [_request(encoder, sample) for sample in unknown]
    done = before + len(group) - len(unknown)
    for given in backend.answers(requests):
        if not 0 <= given.index < len(unknown) or unknown[given.index].key in log.known:
            raise RunFailure(
                f"the backend answered prompt {given.index} of {len(unknown)} of {group[0].task}, which was not asked"
            )
        log.add(predicted(unknown[given.index], given))
        done += 1
        if progress is not None:
            progress(done, before + len(group))
    forgotten = [sample for sample in unknown if sample.key not in log.known]
    if forgotten:
        raise RunFailure(
            f"the backend gave no answer to {len(forgotten)} of {len(unknown)} prompts of {forgotten[0].task}"
        )
    return [log.known[sample.key] for sample in group]


def _request(encoder: PromptEncoder, sample: Sample) -> GenerationRequest:
    prompt = encoder.encode(sample.text, sample.answer_prefix)
    if (len(prompt.input_ids), prompt.bos_count) != (sample.prompt_tokens, sample.bos_count):
        raise RopewalkError(
            f"sample {sample.index} of {sample.task} has {len(prompt.input_ids)} tokens with {prompt.bos_count} BOS "
            f"and was made with {sample.prompt_tokens} and {sample.bos_count}: another tokenizer made it"
        )
    # Upstream counts neither BOS nor template: its prompts may pass the length by as much.
    room = max(sample.length, len(prompt.input_ids) + sample.max_new_tokens)
    return GenerationRequest(prompt.input_ids, sample.max_new_tokens, room)
