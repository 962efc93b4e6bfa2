"""RULER's aggregation tasks: the most common words of a list (cwe), and the most frequent words of a text (fwe)."""

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
    """Numbers of repetitions of words, in the list and in the solved example before it.

    Attributes:
        common, other: occurrences in the list of a common word and of any other word.
        example_words: number of distinct words in the example.
        example_common, example_other: occurrences in the example of a common word and of any other word.
    """

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


SHORT = Repeats(common=6, other=1, example_words=20, example_common=3, example_other=1)
LONG = Repeats(common=30, other=3, example_words=40, example_common=10, example_other=3)
LONG_FROM = 4096
"""Length in tokens from which the list uses the paper's numbers of repetitions (``LONG``)."""


@dataclass(frozen=True)
class CommonWordsTask:
    """A numbered list with ten common words; a unit is a distinct word.

    Up to about 128K tokens, all words come from wonderwords. Longer lists also contain made-up words, which are never
    common words; the details give their number.

    Source: NVIDIA/RULER at c3f5e3b, ``common_words_extraction.py``, which uses another list of words for long lists.
    """

    name: str = "cwe"

    suite = "ruler"
    max_new_tokens = 120

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"common": COMMON, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Return why the word lists are missing, or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            repeats = repeats_at(length)
            return lambda index, units: self.draft(
                sample_random(seed, self.name, length, index), units, repeats
            )

        # At least one other word is needed for the common words to be more common than anything.
        return fitted_samples(form, encoder, length, count, drafts_at, COMMON + 1)

    def draft(self, draw: random.Random, units: int, repeats: Repeats) -> Draft:
        """Build a prompt with this number of units; the example and the common words do not depend on it."""
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
    """Return the numbers of repetitions for a length; they are smaller below 4096 tokens."""
    return SHORT if length < LONG_FROM else LONG


def word_list(words: Sequence[str], common: int, other: int) -> list[str]:
    """Repeat the first ten words ``common`` times and the others ``other`` times, without shuffling."""
    return list(words[:COMMON]) * common + list(words[COMMON:]) * other


def numbered(words: Sequence[str]) -> str:
    """Number the words: ``1. word 2. word`` and so on."""
    # Rounded up to a power of two, so that few cached lists of numbers serve all lengths.
    return " ".join(map(add, _numbers(1 << len(words).bit_length()), words))


def answered_example(context: str, common: Sequence[str]) -> str:
    """Return the solved example, ending in a newline."""
    return f"{CWE.text(context=context)}{CWE.prefix()} {numbered(common)}\n"


@lru_cache(maxsize=8)
def _numbers(count: int) -> tuple[str, ...]:
    return tuple(f"{number}. " for number in range(1, count + 1))


ALPHA = 2.0
ZETA = math.pi**2 / 6
"""Riemann's zeta function at ``ALPHA``."""
WORD_LETTERS = 6
TOKENS_PER_WORD = 50
"""Tokens of the budget per word of the vocabulary."""
DOTS = "..."
MEASURED = 64
"""Number of most frequent words whose tokens are counted; all others together are one percent of the text."""
ANSWERS = 3
FEWEST = 53
"""Minimum number of words; from here on, the third answer always occurs more often than the word after it."""


@dataclass(frozen=True)
class FrequentWordsTask:
    """Words with Zipf-distributed frequencies; the most frequent one is dots, which the question excludes.

    A unit is one token of text, on average over the words of a sample.

    Source: NVIDIA/RULER at c3f5e3b, ``freq_words_extraction.py``.
    """

    name: str = "fwe"

    suite = "ruler"
    max_new_tokens = 50

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"alpha": ALPHA}

    def unavailable(self) -> str | None:
        """Return None: the task needs no external data."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            # The search builds a draft several times, and its words need counting only once.
            tokens: dict[int, float] = {}

            def draft(index: int, units: int) -> Draft:
                draw = sample_random(seed, self.name, length, index)
                vocabulary = self.vocabulary(draw, length)
                if index not in tokens:
                    tokens[index] = tokens_of_a_word(encoder, vocabulary)
                # A unit is a token, not a word: a few words make up most of the text, and some have twice the tokens
                # of others, so the number of words that fit would differ by a tenth between samples.
                return self.draft(draw, vocabulary, FEWEST + int(units / tokens[index]))

            return draft

        return fitted_samples(form, encoder, length, count, drafts_at)

    def vocabulary(self, draw: random.Random, length: int) -> list[str]:
        """Return the words of a sample by descending frequency, the dots first."""
        # The dots, the answers, and one word that occurs less often than the answers.
        size = max((length - self.max_new_tokens) // TOKENS_PER_WORD, ANSWERS + 2)
        words: dict[str, None] = {}
        while len(words) < size:
            words[draw_coded_word(draw)] = None
        # As upstream: the dots replace the most frequent word.
        return [DOTS, *list(words)[1:]]

    def draft(self, draw: random.Random, vocabulary: Sequence[str], words: int) -> Draft:
        """Build a prompt with this number of words, or slightly fewer because counts are rounded down."""
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
    """Return the number of occurrences of the word of each rank: int(units / rank^2 / zeta(2))."""
    ranks = np.arange(1, vocabulary + 1)
    counts: list[int] = (units * (ranks**-ALPHA) / ZETA).astype(int).tolist()
    return counts


def coded_words(vocabulary: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Repeat each word by its count, without shuffling."""
    return list(chain.from_iterable(map(repeat, vocabulary, counts)))


def draw_coded_word(draw: random.Random) -> str:
    """Draw a word of lower-case letters."""
    return "".join(draw.choices(string.ascii_lowercase, k=WORD_LETTERS))


def tokens_of_a_word(encoder: PromptEncoder, vocabulary: Sequence[str]) -> float:
    """Return the mean tokens per word, including the space before it, weighted by frequency."""
    words = [f" {word}" for word in vocabulary[:MEASURED]]
    encoded = encoder.tokenizer(words, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    shares = np.arange(1, len(words) + 1) ** -ALPHA
    return float(np.average([len(each) for each in encoded], weights=shares))
