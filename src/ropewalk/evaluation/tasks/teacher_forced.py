"""Teacher-forced retrieval: an answer is correct if each of its tokens is the most likely one after those before it.

This takes one forward pass per prompt and no generation, which is much cheaper at long lengths. It gives the same score
as greedy generation: as long as the tokens so far are correct, both see the same context, so greedy generation produces
the whole answer exactly if every token is the most likely one. At the first token that is not, both count the answer as
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.samples import Sample, prompt_digest
from ropewalk.evaluation.statistics import score_interval
from ropewalk.evaluation.tasks.needle import scores_by_depth
from ropewalk.evaluation.tasks.suite import TEACHER_FORCED
from ropewalk.io.digests import digest

if TYPE_CHECKING:
    from ropewalk.evaluation.backends import Likelihoods
    from ropewalk.evaluation.backends.protocol import Progress
    from ropewalk.evaluation.model_under_test import ModelUnderTest

READ_TOKENS = 1 << 23
"""Maximum number of prompt tokens in memory: 64 prompts of 128K."""


def target_text(sample: Sample) -> str:
    """Return the expected continuation of the answer prefix: a space and the number."""
    return f" {sample.references[0]}"


def prompt_and_target_ids(encoder: PromptEncoder, sample: Sample) -> tuple[tuple[int, ...], int]:
    """Encode prompt and target together, and find the beginning of the target.

    Both are encoded as one text, as in training data, so the tokenizer merges the space before the target as usual. If
    it merges the last characters of the prompt with the target, the target begins with that token.

    Args:
        encoder: the encoder that the sample was generated with.
        sample: a sample with a single reference.

    Returns:
        All token ids, and the index of the first target token.
    """
    prompt = encoder.encode(sample.text, sample.answer_prefix).input_ids
    whole = encoder.encode(sample.text, sample.answer_prefix + target_text(sample)).input_ids
    same = (index for index, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)
    # If the prompt is the beginning of the whole, the target starts behind it; at least one token is a target.
    return whole, next(same, min(len(prompt), len(whole) - 1))


def teacher_forced_result(
    under_test: ModelUnderTest,
    encoder: PromptEncoder,
    samples: Iterable[Sample],
    progress: Progress | None = None,
    details: Mapping[str, Any] | None = None,
    by_depth: bool = False,
) -> TaskResult:
    """Score samples teacher-forced: an answer is correct if each of its tokens is the most likely one.

    Args:
        under_test: a model with likelihoods.
        encoder: the encoder that the samples were generated with.
        samples: samples of one length, at least one.
        progress: called after each prompt with the number of completed prompts and of prompts so far.
        details: facts to add to the result, such as the task's settings.
        by_depth: also compute the scores by the depth in the samples' details.

    Returns:
        The percentage of prompts with a correct answer; ``tokens_right`` in the details is the mean percentage of
        correct tokens.

    Raises:
        RopewalkError: if there are no samples.
        RunFailure: if memory runs out.
    """
    likelihoods = under_test.likelihoods
    assert likelihoods is not None
    asked: list[Sample] = []
    digests: list[str] = []
    shares: list[float] = []
    stream = iter(samples)
    # Only rank 0 generates samples; the others get each group from it.
    while group := under_test.on_rank_0(lambda: _prompts(encoder, likelihoods, stream)):
        for matches in likelihoods.matches([each.target for each in group], group[0].sample.length):
            shares.append(sum(matches) / len(matches))
            if progress is not None:
                progress(len(shares), len(asked) + len(group))
        # Not the token ids, which nobody needs any more.
        asked += [each.sample for each in group]
        digests += [each.digest for each in group]
    if not asked:
        raise RopewalkError(
            "a result needs at least one sample, got none; pass all samples of one context length"
        )
    # As generation would: one wrong token makes another answer.
    scores = [float(share == 1) for share in shares]
    low, high = score_interval(scores)
    tokens = [each.prompt_tokens for each in asked]
    depths = [float(each.details["depth"]) for each in asked] if by_depth else []
    return TaskResult(
        suite=asked[0].suite,
        task=TEACHER_FORCED,
        length=asked[0].length,
        n=len(asked),
        score=100 * sum(scores) / len(scores),
        ci95=(100 * low, 100 * high),
        details={
            "prompt_tokens": [min(tokens), max(tokens)],
            "least_fill": min(each.fill for each in asked),
            "bos_count": sorted({each.bos_count for each in asked}),
            SAMPLES: digest(digests),
            "tokens_right": 100 * sum(shares) / len(shares),
            **(details or {}),
            **({"depths": scores_by_depth(depths, scores)} if by_depth else {}),
        },
        samples=tuple(
            {"index": each.index, "score": 100 * score} for each, score in zip(asked, scores, strict=True)
        ),
    )


class _Prompt(NamedTuple):
    """A sample without its text, the digest of its prompt, and the ids of prompt and target with the target's start."""

    sample: Sample
    digest: str
    target: tuple[tuple[int, ...], int]


def _prompts(encoder: PromptEncoder, likelihoods: Likelihoods, stream: Iterator[Sample]) -> list[_Prompt]:
    """Return the next group of prompts of one length; empty at the end of the stream."""
    first = next(stream, None)
    if first is None:
        return []
    found = []
    for sample in (first, *islice(stream, max(1, READ_TOKENS // first.length) - 1)):
        ids, start = prompt_and_target_ids(encoder, sample)
        likelihoods.check_ids(ids)
        # Without the text, which is as large as the prompt and no longer needed.
        found.append(_Prompt(replace(sample, text=""), prompt_digest(sample), (ids, start)))
    return found
