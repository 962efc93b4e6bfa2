"""In-context learning with many shots: texts of made-up categories with their labels, and one text without.

The form is that of the ICL tasks of HELMET: balanced shots, labels that are numbers, a permutation of the labels for
each sample, exact answers. HELMET classifies texts of public data sets (TREC, NLU, Banking77, CLINC150). Here, each
category has made-up words of its own instead, so the shots say all that there is to know, and nothing is known before.

Source: arXiv:2410.02694; princeton-nlp/HELMET (MIT).
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    DRAWS,
    NO_DETAILS,
    Draft,
    Drafts,
    Form,
    Sample,
    grouped_samples,
    sample_random,
)
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.evaluation.tasks.words import made_up_words, word_lists, words_unavailable

Labels = Literal["permuted", "natural"]

CATEGORIES = 20
WORDS = 24
"""Words of each category; a text has three of them."""
QUESTIONS: Mapping[Labels, int] = {"permuted": 1, "natural": 10}
"""Questions about the same shots."""

INTRODUCTION = (
    "Each text below is followed by the label of its category, a number. Learn from them how to label a text. "
    'Answer with "label: " and the number, and nothing else.\n\n'
)
TEMPLATES = (
    "The {} near the {} has a {}.",
    "A {} met the {} before the {} came.",
    "Every {} and every {} is like a {}.",
    "Once a {} and a {} made a {}.",
)
"""Sentences of all categories."""
PREFIX = "label:"
# Chat models may repeat it.
_BEFORE_LABEL = re.compile(rf"^(?:.*?{PREFIX})?\s*(?:{PREFIX})?", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True)
class Shot:
    """A text of a category, with the words that it has of it."""

    category: int
    words: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class InContextLearning:
    """Label a text by labelled ones; a unit is a shot.

    Args:
        name: ``permuted``: a permutation of the labels for each sample; ``natural``: category k has label k, and ten
            questions share their shots.
    """

    name: Labels

    suite = "icl"
    max_new_tokens = 20

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        sizes = {
            "categories": CATEGORIES,
            "words_per_category": WORDS,
            "questions_per_text": QUESTIONS[self.name],
        }
        return {**sizes, "chance": 100 / CATEGORIES, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no word lists), or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "label", self.max_new_tokens, least_fill=0.99, draws=DRAWS)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(length, index, seed, units)

        return grouped_samples(form, encoder, length, count, QUESTIONS[self.name], drafts_at, CATEGORIES)

    def _draft(self, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a prompt with ``units`` shots; more shots begin with the same ones."""
        text = index // QUESTIONS[self.name]
        shots = shots_of(vocabulary(seed), sample_random(seed, self.name, length, text), units)
        labels = list(range(CATEGORIES))
        if self.name == "permuted":
            sample_random(seed, "labels", length, text).shuffle(labels)
        question = question_about(shots, sample_random(seed, "question", length, index))
        prompt, places = INTRODUCTION, []
        for shot in shots:
            places.append([len(prompt), len(prompt) + len(shot.text)])
            prompt += f"{shot.text}\n{PREFIX} {labels[shot.category]}\n\n"
        last = {word: place for shot, place in zip(shots, places, strict=True) for word in shot.words}
        details = {
            "shots": units,
            # The last shot that has each of the question's words.
            "spans": sorted(map(list, {tuple(last[word]) for word in question.words})),
            **({"context": text} if QUESTIONS[self.name] > 1 else {}),
        }
        return Draft(f"{prompt}{question.text}\n", PREFIX, (str(labels[question.category]),), details)


def vocabulary(seed: int) -> list[list[str]]:
    """The words of each category; categories share none."""
    words = list(made_up_words(CATEGORIES * WORDS))
    sample_random(seed, "vocabulary", 0, 0).shuffle(words)
    return [words[start : start + WORDS] for start in range(0, len(words), WORDS)]


def shots_of(words: Sequence[Sequence[str]], draw: random.Random, count: int) -> list[Shot]:
    """So many shots, in rounds of one of each category in random order."""
    shots: list[Shot] = []
    while len(shots) < count:
        shots += [
            _shot(category, words[category], draw) for category in draw.sample(range(CATEGORIES), CATEGORIES)
        ]
    return shots[:count]


def question_about(shots: Sequence[Shot], draw: random.Random) -> Shot:
    """A text that is no shot, of a category's words that shots have."""
    category, told = draw.randrange(CATEGORIES), {shot.text for shot in shots}
    # Sorted, because the order of a set is another in each process.
    known = sorted({word for shot in shots if shot.category == category for word in shot.words})
    while (question := _shot(category, known, draw)).text in told:
        pass
    return question


def _shot(category: int, words: Sequence[str], draw: random.Random) -> Shot:
    chosen = tuple(draw.sample(words, 3))
    return Shot(category, chosen, draw.choice(TEMPLATES).format(*chosen))


def label(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the first line of the answer is the label, else 0 (HELMET's exact match).

    Only what follows ``label:`` counts, if the line has it, and neither case nor punctuation nor articles do.
    """
    first = answer.strip().partition("\n")[0]
    return float(normalised_words(_BEFORE_LABEL.sub("", first, count=1)) == references[0].split())


def normalised_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles, as HELMET compares answers."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


SUITE = GeneratedSuite(
    name="icl",
    titles={
        "permuted": "In-context learning, permuted labels",
        "natural": "In-context learning, natural labels",
    },
    figure="by length",
    tasks=lambda settings: {name: InContextLearning(name) for name in QUESTIONS},
    metrics={"label": label},
)
