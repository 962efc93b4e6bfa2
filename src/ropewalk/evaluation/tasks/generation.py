"""Generate answers to samples and score them; answers in the log are reused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import Backend, GenerationRequest
from ropewalk.evaluation.backends.protocol import PAIR, TRIAL, Progress, Rejection
from ropewalk.evaluation.predictions import Prediction, PredictionLog, predicted
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import LengthTooShort, Sample, Task
from ropewalk.evaluation.tasks.suite import TEACHER_FORCED


def check_lengths(tasks: Sequence[tuple[str, Task, Sequence[int], int, PromptEncoder]], seed: int) -> None:
    """Raise if a prompt does not fit in a length; the message lists every such task with the length it needs.

    Args:
        tasks: tasks that can run, each with its name, its lengths in tokens, its number of samples, and the encoder
            that counts its tokens.
        seed: random seed of the samples.
    """
    short: dict[int, dict[tuple[str, str], int]] = {}
    for name, task, lengths, count, encoder in tasks:
        for length in lengths:
            try:
                # The call itself raises; its samples are lazy and never generated here.
                task.samples(encoder, length - encoder.thinking, count, seed)
            except LengthTooShort as error:
                short.setdefault(length, {})[task.suite, name] = error.shortest + encoder.thinking
    if short:
        # The message is about one length; the names to exclude are those of all lengths.
        length, needs = next(iter(short.items()))
        # Name the suite too for teacher-forced tasks: several suites have one.
        shortages = ", ".join(
            f"{name} of the suite {suite} needs {tokens}"
            if name == TEACHER_FORCED
            else f"{name} needs {tokens}"
            for (suite, name), tokens in needs.items()
        )
        names = sorted({name for group in short.values() for _, name in group})
        raise RopewalkError(
            f"prompts do not fit in {length} tokens with this tokenizer: {shortages}; give longer lengths, or skip "
            f"these tasks with --exclude {','.join(names)}"
        )


ASKED_TOKENS = 1 << 23
"""Maximum number of prompt tokens that are passed to the backend together: 64 prompts of 128K, for example."""


def generated_predictions(
    backend: Backend,
    encoder: PromptEncoder,
    samples: Iterable[Sample],
    log: PredictionLog,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Generate and score the answers that are not in the log yet.

    Args:
        backend: a model or a server.
        encoder: the encoder that the samples were generated with.
        samples: samples of one task and length, in the order of their index.
        log: stores each prediction as soon as it is available.
        progress: called after each answer with the number of answers and of samples so far.

    Returns:
        One prediction per answered sample, in the order of the index. ``log.rejected`` has the others, which a server
        rejected.

    Raises:
        RopewalkError: if a prompt does not have the number of tokens that its sample states, or the log cannot be
            written.
        RunFailure: if the backend fails; the log contains the answers so far.
    """
    found: list[Prediction] = []
    stream = iter(samples)
    first = next(stream, None)
    if first is None:
        return found
    # Bounded in tokens: prompts of 1M tokens would fill the memory if a whole task were held.
    at_once = max(1, ASKED_TOKENS // first.length)
    group = [first, *islice(stream, at_once - 1)]
    before = 0
    while group:
        found += _group(backend, encoder, group, log, before, progress)
        before += len(group)
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
    # log.get also refuses answers to another prompt of the same key.
    unknown = [sample for sample in group if log.get(sample) is None]
    requests = [_request(encoder, sample) for sample in unknown]
    done = before + len(group) - len(unknown)
    for given in backend.answers(requests):
        if not 0 <= given.index < len(unknown) or log.has(unknown[given.index].key):
            raise RunFailure(
                f"the backend returned an answer for {group[0].task} that was not requested: prompt {given.index} "
                f"was answered before, or is not one of the prompts 0 to {len(unknown) - 1}"
            )
        done += 1
        if progress is not None:
            progress(done, before + len(group))
        if isinstance(given, Rejection):
            log.rejected[unknown[given.index].key] = given.reason
            continue
        log.add(predicted(unknown[given.index], given, encoder.thoughts_opened))
    # A backend that ends early without an error would make a result over fewer samples.
    forgotten = [sample for sample in unknown if not log.has(sample.key)]
    if forgotten:
        raise RunFailure(
            f"the backend did not answer {len(forgotten)} of {len(unknown)} prompts of {forgotten[0].task}"
        )
    return [log.known[sample.key] for sample in group if sample.key in log.known]


def _request(encoder: PromptEncoder, sample: Sample) -> GenerationRequest:
    prompt = encoder.encode(sample.text, sample.answer_prefix, sample.earlier)
    if (len(prompt.input_ids), prompt.bos_count) != (sample.prompt_tokens, sample.bos_count):
        raise RopewalkError(
            f"sample {sample.index} of {sample.task} has {len(prompt.input_ids)} tokens ({prompt.bos_count} of them "
            f"BOS) with this tokenizer, but had {sample.prompt_tokens} ({sample.bos_count} of them BOS) when it was "
            "generated; use the earlier tokenizer, or another --samples-dir"
        )
    # NVIDIA's scripts count neither BOS nor chat template, so their prompts may exceed the length by that many tokens.
    room = max(sample.length, len(prompt.input_ids) + sample.max_new_tokens)
    if not encoder.as_turns:
        return GenerationRequest(prompt.input_ids, sample.max_new_tokens, room, text=prompt.text)
    turns = encoder.turns(sample.text, sample.answer_prefix, sample.earlier)
    # The template writes as many tokens around empty turns.
    around = encoder.count("", "", tuple((role, "") for role, _ in sample.earlier))
    request = GenerationRequest(
        prompt.input_ids, sample.max_new_tokens, room, turns, len(prompt.input_ids) - around
    )
    if not sample.earlier:
        return request
    pair = encoder.count(TRIAL, "", PAIR) - encoder.count(TRIAL)
    return replace(request, around_earlier=around - encoder.count("", ""), pair_tokens=pair)
