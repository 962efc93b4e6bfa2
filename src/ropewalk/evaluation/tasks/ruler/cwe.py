"""RULER's common words extraction (cwe): which ten words of a numbered list appear most often."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import Any

from ropewalk.evaluation.fitting import Draft, Drafts, Form, fitted_samples, sample_random
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample import Sample
from ropewalk.evaluation.tasks.ruler.templates import CWE
from ropewalk.evaluation.tasks.words import listed_words, made_up_words, word_lists, words_unavailable

COMMON = 10


@dataclass(frozen=True)
class Repeats:
    """How often words are repeated, in the list and in the answered example before it.

    Attributes:
        common, other: times that a common word and any other stand in the list.
        example_words: distinct words of the example.
        example_common, example_other: the same times in the example.
    """

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


SHORT = Repeats(common=6, other=1, example_words=20, example_common=3, example_other=1)
LONG = Repeats(common=30, other=3, example_words=40, example_common=10, example_other=3)
LONG_FROM = 4096
"""Tokens from which the list has the repeats that the paper reports."""


@dataclass(frozen=True)
class CommonWordsTask:
    """A numbered list with ten common words; a unit is a distinct word.

    Up to about 128K tokens all words are wonderwords'; a longer list goes on with made-up ones, which are never
    the common ones, and says so in its details.

    Source: NVIDIA/RULER at c3f5e3b, ``common_words_extraction.py``, which goes on with another list of words.
    """

    name: str = "cwe"

    suite = "ruler"
    max_new_tokens = 120

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.sample.Task`."""
        return {"common": COMMON, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Why there are no words here, or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.sample.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            repeats = repeats_at(length)
            return lambda index, units: self.draft(
                sample_random(seed, self.name, length, index), units, repeats
            )

        # One word besides the common ones, or none of them would be more common than any.
        return fitted_samples(form, encoder, length, count, drafts_at(length), COMMON + 1, drafts_at)

    def draft(self, draw: random.Random, units: int, repeats: Repeats) -> Draft:
        """A prompt of so many units. The example and the common words do not depend on their number."""
        words = listed_words()
        shown = draw.sample(words, repeats.example_words)
        example_list = word_list(shown, repeats.example_common, repeats.example_other)
        draw.shuffle(example_list)
        common = draw.sample(words, COMMON)
        others = [word for word in draw.sample(words, min(units, len(words))) if word not in common]
        made_up = made_up_words(max(units - len(words), 0))
        mixed = [*common, *others[: units - COMMON], *made_up]
        entries = word_list(mixed, repeats.common, repeats.other)
        draw.shuffle(entries)
        text = answered_example(numbered(example_list), shown[:COMMON]) + CWE.text(context=numbered(entries))
        details = {"unit": "word", "units": units, "made_up_words": len(made_up)}
        return Draft(text, CWE.prefix(), tuple(common), details)


def repeats_at(length: int) -> Repeats:
    """Fewer repeats under 4096 tokens."""
    return SHORT if length < LONG_FROM else LONG


def word_list(words: Sequence[str], common: int, other: int) -> list[str]:
    """Each of the first ten words so many times, and the others so many times, not yet shuffled."""
    return list(words[:COMMON]) * common + list(words[COMMON:]) * other


def numbered(words: Sequence[str]) -> str:
    """``1. word 2. word`` and so on."""
    return " ".join(map(add, _numbers(1 << len(words).bit_length()), words))


def answered_example(context: str, common: Sequence[str]) -> str:
    """The example with its answer, and the newline after it."""
    return f"{CWE.text(context=context)}{CWE.prefix()} {numbered(common)}\n"


@lru_cache(maxsize=8)
def _numbers(count: int) -> tuple[str, ...]:
    return tuple(f"{number}. " for number in range(1, count + 1))
