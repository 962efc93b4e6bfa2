"""RULER's common words extraction (cwe): which ten words of a numbered list appear most often."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from operator import add
from typing import Any

import numpy as np

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.ruler.templates import CWE, FWE
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
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"common": COMMON, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Why there are no words here, or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            repeats = repeats_at(length)
            return lambda index, units: self.draft(
                sample_random(seed, self.name, length, index), units, repeats
            )

        # One word besides the common ones, or none of them would be more common than any.
        return fitted_samples(form, encoder, length, count, drafts_at, COMMON + 1)

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


ALPHA = 2.0
ZETA = math.pi**2 / 6
"""Riemann's zeta function at ``ALPHA``."""
WORD_LETTERS = 6
TOKENS_PER_WORD = 50
"""Tokens of the budget for each word of the vocabulary."""
DOTS = "..."
MEASURED = 64
"""Words whose tokens are counted; all others together are a hundredth of the text."""
ANSWERS = 3
FEWEST = 53
"""From so many words on, the three that answer and the one after them never appear equally often."""


@dataclass(frozen=True)
class FrequentWordsTask:
    """Words by Zipf's law, the first of them dots that do not count.

    A unit is the text of a token, on average over a sample's words.

    Source: NVIDIA/RULER at c3f5e3b, ``freq_words_extraction.py``.
    """

    name: str = "fwe"

    suite = "ruler"
    max_new_tokens = 50

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"alpha": ALPHA}

    def unavailable(self) -> str | None:
        """The task needs nothing that is not here."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            tokens: dict[int, float] = {}

            def draft(index: int, units: int) -> Draft:
                draw = sample_random(seed, self.name, length, index)
                vocabulary = self.vocabulary(draw, length)
                if index not in tokens:
                    tokens[index] = tokens_of_a_word(encoder, vocabulary)
                # A few words make up most of the text, and some are twice as many tokens as others: in units of
                # words one sample would have room for a tenth more than another.
                return self.draft(draw, vocabulary, FEWEST + int(units / tokens[index]))

            return draft

        return fitted_samples(form, encoder, length, count, drafts_at)

    def vocabulary(self, draw: random.Random, length: int) -> list[str]:
        """The dots and the other words of a sample, from the most frequent on."""
        size = max((length - self.max_new_tokens) // TOKENS_PER_WORD, ANSWERS + 2)
        words: dict[str, None] = {}
        while len(words) < size:
            words[draw_coded_word(draw)] = None
        return [DOTS, *list(words)[1:]]

    def draft(self, draw: random.Random, vocabulary: Sequence[str], words: int) -> Draft:
        """A prompt of so many words, or a few less."""
        counts = word_counts(words, len(vocabulary))
        entries = coded_words(vocabulary, counts)
        draw.shuffle(entries)
        details = {
            "unit": "word",
            "units": len(entries),
            "vocabulary": len(vocabulary),
            "counts": counts[1 : ANSWERS + 2],
        }
        text = FWE.text(context=" ".join(entries))
        return Draft(text, FWE.prefix(), tuple(vocabulary[1 : ANSWERS + 1]), details)


def word_counts(units: int, vocabulary: int) -> list[int]:
    """How often the word of each rank appears: int(units / rank^2 / zeta(2))."""
    ranks = np.arange(1, vocabulary + 1)
    counts: list[int] = (units * (ranks**-ALPHA) / ZETA).astype(int).tolist()
    return counts


def coded_words(vocabulary: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Each word as often as it appears, not yet shuffled."""
    return list(chain.from_iterable(map(repeat, vocabulary, counts)))


def draw_coded_word(draw: random.Random) -> str:
    """Small letters."""
    return "".join(draw.choices(string.ascii_lowercase, k=WORD_LETTERS))


def tokens_of_a_word(encoder: PromptEncoder, vocabulary: Sequence[str]) -> float:
    """Tokens of a word of the text and the space before it, on average by how often words appear."""
    words = [f" {word}" for word in vocabulary[:MEASURED]]
    encoded = encoder.tokenizer(words, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    shares = np.arange(1, len(words) + 1) ** -ALPHA
    return float(np.average([len(each) for each in encoded], weights=shares))
