"""Passkey retrieval: find a number hidden in a long text of repeated filler sentences.

Source: Mohtashami and Jaggi, arXiv:2305.16300, in the form that LongRoPE (arXiv:2402.13753) reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal, get_args

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    LEAST_FILL,
    Draft,
    Drafts,
    Form,
    Sample,
    first_integer,
    fitted_samples,
    sample_random,
)
from ropewalk.evaluation.tasks.suite import TEACHER_FORCED, GeneratedSuite

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
NOISE_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NOISE_WORDS = tuple(word for sentence in NOISE_SENTENCES for word in sentence.split(" "))
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 50_000

Depths = Literal["uniform", "even"]


@dataclass(frozen=True)
class PasskeyTask:
    """A number among noise; a unit is a sentence of noise, or a word if sentences leave too much room.

    Args:
        depths: position of the key: ``uniform`` at random, or ``even`` steps from beginning to end. With ``even``, the
            position depends on the number of samples; nothing else about a sample does.

    Raises:
        RopewalkError: for other depths.
    """

    depths: Depths = "uniform"

    suite = "passkey"
    name = "passkey"
    max_new_tokens = 10

    def __post_init__(self) -> None:
        if self.depths not in get_args(Depths):
            raise RopewalkError(f"unknown depths {self.depths!r}; choose from {', '.join(get_args(Depths))}")

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        # Not `depths`: a result's details use that key for the scores by depth.
        return {"asked_depths": self.depths}

    def unavailable(self) -> str | None:
        """Return None: the task needs no external data."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "first integer", self.max_new_tokens)

        def drafts_at(length: int, units: Sequence[str] = NOISE_SENTENCES) -> Drafts:
            return lambda index, number: self._draft(length, index, count, seed, units, number)

        by_sentence = fitted_samples(form, encoder, length, count, drafts_at)
        # At short lengths a whole sentence is a large part of the prompt, and words fill it better.
        by_word = drafts_at(length, NOISE_WORDS)
        return (
            sample if sample.fill > LEAST_FILL else _of_words(form, encoder, by_word, sample)
            for sample in by_sentence
        )

    def _draft(
        self, length: int, index: int, count: int, seed: int, units: Sequence[str], number: int
    ) -> Draft:
        """Build a prompt with ``number`` sentences or words of noise; the key does not depend on it."""
        # All draws before the noise, whose size changes from trial to trial.
        draw = sample_random(seed, self.name, length, index)
        key, share = draw.randint(1, LARGEST_KEY), draw.random()
        if self.depths == "even":
            share = index / (count - 1) if count > 1 else 0.5
        before = round(share * number)
        text = passkey_text(key, _noise(units, before), _noise(units, number - before))
        # At the shortest lengths there may be no noise at all.
        return Draft(text, "", (str(key),), {"depth": before / number if number else 0.0})


def passkey_text(key: int, before: str = "", after: str = "") -> str:
    """Return the prompt: task, noise, needle, noise and question, on one line each."""
    return "\n".join([TASK, before, NEEDLE.format(key=key), after, QUESTION])


def _of_words(form: Form, encoder: PromptEncoder, drafts: Drafts, sample: Sample) -> Sample:
    """Rebuild a sample with noise cut at words instead of sentences, which fills short lengths better."""

    def drafts_at(_: int) -> Drafts:
        return lambda _, units: drafts(sample.index, units)

    alone = fitted_samples(form, encoder, sample.length, 1, drafts_at)
    # fitted_samples counts from 0, and it was asked for one sample only.
    return replace(next(alone), index=sample.index)


def _noise(units: Sequence[str], count: int) -> str:
    return " ".join(islice(cycle(units), count))


SUITE = GeneratedSuite(
    name="passkey",
    titles={"passkey": "Passkey retrieval", TEACHER_FORCED: "Passkey retrieval, teacher-forced"},
    main="passkey",
    figure="by length",
    sharded=TEACHER_FORCED,
    tasks=lambda settings: {"passkey": PasskeyTask()},
    metrics={"first integer": first_integer},
)
