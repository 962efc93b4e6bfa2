"""Teacher-forced retrieval: an answer is right where each of its tokens is the likeliest after those before it.

One pass a prompt and no generation, which is far cheaper at long lengths. Greedy generation says a token exactly where
it is the likeliest after all before; as long as it has said the true ones, the two read the same context, so it says
the whole answer exactly where each token is found right. At the first that is not, generation goes another way, and
both call the answer wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.samples import Sample, prompt_digest
from ropewalk.evaluation.statistics import score_interval
from ropewalk.evaluation.tasks.needle import scores_by_depth
from ropewalk.evaluation.tasks.suite import FORCED
from ropewalk.io.digests import digest

if TYPE_CHECKING:
    from ropewalk.evaluation.backends import Likelihoods
    from ropewalk.evaluation.backends.protocol import Progress
    from ropewalk.evaluation.model_under_test import ModelUnderTest

READ_TOKENS = 1 << 23
"""Tokens of prompts that are held at once: 64 prompts of 128K."""


def forced_target(sample: Sample) -> str:
    """What a model that knows the number says after the answer prefix: a space and the number."""
    return f" {sample.references[0]}"


def forced_ids(encoder: PromptEncoder, sample: Sample) -> tuple[tuple[int, ...], int]:
    """Prompt and target as token ids, and where the target begins.

    The two are read as one text, as the model would have met them: a tokenizer that writes the space apart, or
    joined to what follows, does here as it does everywhere. Where it joins the last letters of the prompt to the
    target, the target begins with that token.

    Args:
        encoder: the one that the sample was made with.
        sample: of the grid.

    Returns:
        All token ids, and the index of the first one of the target.
    """
    prompt = encoder.encode(sample.text, sample.answer_prefix).input_ids
    whole = encoder.encode(sample.text, sample.answer_prefix + forced_target(sample)).input_ids
    same = (index for index, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)
    return whole, next(same, min(len(prompt), len(whole) - 1))


@dataclass(frozen=True)
class ForcedPrompt:
    """A sample that has lost its text, the digest of that, prompt and target as ids, and where the target begins."""

    sample: Sample
    digest: str
    input_ids: tuple[int, ...]
    start: int


def forced_result(
    under_test: ModelUnderTest,
    encoder: PromptEncoder,
    samples: Iterable[Sample],
    progress: Progress | None = None,
    details: Mapping[str, Any] | None = None,
    by_depth: bool = False,
) -> TaskResult:
    """Samples scored without generation: right where each token of the answer is the likeliest after those before.

    Args:
        under_test: a model with likelihoods.
        encoder: the one that the samples were made with.
        samples: of one length, at least one.
        progress: called after each prompt, with the prompts so far and those seen so far.
        details: facts that go into the result, such as the task's settings.
        by_depth: give the scores by the depth that stands in the samples' details, too.

    Returns:
        Percent of the prompts whose answer was said in full; ``tokens_right`` in the details is the mean share of
        its tokens, in percent.

    Raises:
        RopewalkError: if there are no samples.
        RunFailure: if the memory gives out.
    """
    likelihoods = under_test.likelihoods
    assert likelihoods is not None
    asked: list[ForcedPrompt] = []
    shares: list[float] = []
    stream = iter(samples)
    while group := under_test.on_rank_0(lambda: _prompts(encoder, likelihoods, stream)):
        pairs = [(prompt.input_ids, prompt.start) for prompt in group]
        for matches in likelihoods.matches(pairs, group[0].sample.length):
            shares.append(sum(matches) / len(matches))
            if progress is not None:
                progress(len(shares), len(asked) + len(group))
        # The prompts are long and have done their work.
        asked += [replace(prompt, input_ids=()) for prompt in group]
    return forced_task(
        [prompt.sample for prompt in asked], [prompt.digest for prompt in asked], shares, details, by_depth
    )


def _prompts(
    encoder: PromptEncoder, likelihoods: Likelihoods, stream: Iterator[Sample]
) -> list[ForcedPrompt]:
    """The next prompts, as many of one length as are held at once; none where the stream has ended."""
    first = next(stream, None)
    if first is None:
        return []
    found = []
    for sample in (first, *islice(stream, max(1, READ_TOKENS // first.length) - 1)):
        ids, start = forced_ids(encoder, sample)
        likelihoods.check_ids(ids)
        found.append(ForcedPrompt(replace(sample, text=""), prompt_digest(sample), ids, start))
    return found


def forced_task(
    asked: Sequence[Sample],
    prompts: Sequence[str],
    shares: Sequence[float],
    details: Mapping[str, Any] | None = None,
    by_depth: bool = False,
) -> TaskResult:
    """The result of teacher-forced samples.

    Args:
        asked: samples of one length, at least one.
        prompts: digest of each.
        shares: share of each target's tokens that were the likeliest; right is 1 alone.
        details: facts that go into the result.
        by_depth: give the scores by depth, too.

    Raises:
        RopewalkError: if there are no samples.
    """
    if not asked:
        raise RopewalkError("a result needs at least one sample, got none")
    scores = [float(share == 1) for share in shares]
    low, high = score_interval(scores)
    tokens = [each.prompt_tokens for each in asked]
    depths = [float(each.details["depth"]) for each in asked] if by_depth else []
    return TaskResult(
        suite=asked[0].suite,
        task=FORCED,
        length=asked[0].length,
        n=len(asked),
        score=100 * sum(scores) / len(scores),
        ci95=(100 * low, 100 * high),
        details={
            "prompt_tokens": [min(tokens), max(tokens)],
            "least_fill": min(each.fill for each in asked),
            "bos_count": sorted({each.bos_count for each in asked}),
            SAMPLES: digest(list(prompts)),
            "tokens_right": 100 * sum(shares) / len(shares),
            **(details or {}),
            **({"depths": scores_by_depth(depths, scores)} if by_depth else {}),
        },
        samples=tuple(
            {"index": each.index, "score": 100 * score} for each, score in zip(asked, scores, strict=True)
        ),
    )
