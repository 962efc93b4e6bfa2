"""RULER's frequent words extraction (fwe): which three made-up words of a text appear most often."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

from ropewalk.evaluation.fitting import Draft, Drafts, Form, fitted_samples, sample_random
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample import Sample
from ropewalk.evaluation.tasks.ruler.templates import FWE

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
        """See :class:`~ropewalk.evaluation.sample.Task`."""
        return {"alpha": ALPHA}

    def unavailable(self) -> str | None:
        """The task needs nothing that is not here."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.sample.Task`."""
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

        return fitted_samples(form, encoder, length, count, drafts_at(length), 0, drafts_at)

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
