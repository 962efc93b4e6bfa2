"""RULER's needle-in-a-haystack tasks (niah): retrieve values for given keys from a long text.

A needle is a sentence that gives the value of a key. The haystack is a repeated line of noise, prose, or distractor
needles. The tasks differ in the haystack and in the kinds and numbers of keys and values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.haystack_sources import (
    Prose,
    essays_unavailable,
    prose_of,
    prose_words,
    words_digest,
)
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.words import key_names, word_lists, words_unavailable

Haystack = Literal["noise", "essay", "needle", "embedded"]
Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class NeedleTask:
    """A needle task; a unit is a line of the haystack, or a word of its prose.

    Args:
        name: name of the task.
        haystack: ``noise``, ``needle``, ``essay``, or ``embedded`` (prose in the package).
        key_kind: kind of the keys; ``words`` are ``adjective-noun``.
        value_kind: kind of the hidden values.
        keys: number of keys with needles, at least ``queries``.
        values: number of values per key.
        queries: number of keys that the prompt asks for.
        essays: folder or file of essays; None for those that are installed or fetched.

    Raises:
        RopewalkError: if a field has an invalid value.

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
                raise RopewalkError(
                    f"unknown {what} {value!r} of the task {self.name!r}; choose from {', '.join(known)}"
                )
        if not (1 <= self.queries <= self.keys and self.values >= 1 and self.needles <= len(DEPTHS)):
            raise RopewalkError(
                f"the task {self.name!r} cannot ask for {self.queries} of {self.keys} keys with {self.values} values "
                f"each; 'queries' must be from 1 to 'keys', 'values' at least 1, and 'keys' x 'values' at most "
                f"{len(DEPTHS)}"
            )

    @property
    def needles(self) -> int:
        """Number of needles in a prompt, including those that it does not ask for."""
        return self.keys * self.values

    @property
    def in_prose(self) -> bool:
        """Whether needles are placed between sentences of prose instead of between lines."""
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
        if self.in_prose:
            source = "essays" if self.haystack == "essay" else "embedded"
            found[source] = words_digest(prose_words(self.haystack, self.essays))
        return found

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no word lists or no essays), or None."""
        if "words" in (self.key_kind, self.value_kind) and (reason := words_unavailable()):
            return reason
        return essays_unavailable(self.essays) if self.haystack == "essay" else None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self.draft(sample_random(seed, self.name, length, index), units)

        # In lines, each needle has a position of its own; between sentences of prose, several may share one.
        fewest = 0 if self.in_prose else self.needles
        return fitted_samples(form, encoder, length, count, drafts_at, fewest)

    def draft(self, draw: random.Random, units: int) -> Draft:
        """Build a prompt with this number of units; keys, values and the query do not depend on it."""
        taken: set[str] = set()
        # Keys and values are drawn before the haystack, so that they are the same at every number of units.
        keys = [_fresh(self.key_kind, draw, taken) for _ in range(self.keys)]
        values = [[_fresh(self.value_kind, draw, taken) for _ in range(self.values)] for _ in keys]
        queried = draw.sample(range(self.keys), self.queries)
        needles = needle_lines(self.value_kind, keys, values)
        draw.shuffle(needles)
        if self.in_prose:
            depths = draw.sample(DEPTHS, len(needles))
            prose = prose_of(self.haystack, self.essays)
            context = hide_in_prose(prose, units, needles, depths)
        else:
            positions = sorted(draw.sample(range(units), len(needles)))
            context = hide_in_lines(self._lines(draw, units, taken), needles, positions)
        text, prefix = niah_prompt(self.value_kind, [keys[at] for at in queried], self.values, context)
        references = tuple(value for at in queried for value in values[at])
        # The generated lines again, in the order of the query, to find the depth of each in the context.
        hidden = [line for at in queried for line in needle_lines(self.value_kind, [keys[at]], [values[at]])]
        details = {
            "unit": "word" if self.in_prose else "line",
            "units": units,
            "keys": [keys[at] for at in queried],
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
    """Draw a key or a value: ``adjective-noun``, a number of seven digits, or a UUID of version 4."""
    if kind == "words":
        return draw.choice(key_names())
    if kind == "numbers":
        return str(draw.randint(1_000_000, 9_999_999))
    return uuid4(draw.getrandbits(128))


def uuid4(number: int) -> str:
    """Return the UUID of version 4 with the bits of a number below 2^128, as text."""
    # Version 4 in the four bits of the version, and binary 10 in the two of the variant (RFC 4122).
    digits = f"{number & ~(0xF000 << 64) & ~(0xC000 << 48) | 0x4000 << 64 | 0x8000 << 48:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def needle_lines(plural: str, keys: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """Return the sentences with each key's values."""
    return [needle_line(plural, key, value) for key, some in zip(keys, values, strict=True) for value in some]


def hide_in_prose(prose: Prose, words: int, needles: Sequence[str], depths: Sequence[int]) -> str:
    """Return the first ``words`` words of a text, with needles between its sentences at depths in percent."""
    text = prose.words(words)
    starts = [0, *prose.sentence_ends(words)]

    def stretch(start: int, end: int) -> str:
        return " ".join(text[starts[start] : starts[end]])

    return hide_in_sentences(stretch, len(starts) - 1, needles, depths)


def _fresh(kind: Kind, draw: random.Random, taken: set[str]) -> str:
    """Draw a word that is not in ``taken``, and add it."""
    word = _other(kind, draw, taken)
    taken.add(word)
    return word


def _other(kind: Kind, draw: random.Random, taken: set[str]) -> str:
    """Draw a key or a value that is not in ``taken``."""
    # A distractor with a requested key would give the question a second correct answer.
    while (word := draw_word(kind, draw)) in taken:
        pass
    return word


DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Depths of needles in prose, in percent: 40 even steps from 0 to 100, rounded to integers."""


def hide_in_lines(lines: Sequence[str], hidden: Sequence[str], positions: Sequence[int]) -> str:
    """Insert lines into a haystack of lines.

    Args:
        lines: the haystack.
        hidden: lines to insert, in the order of their positions.
        positions: for each hidden line, the index of the haystack line that it precedes, ascending.

    Returns:
        All lines, joined by newlines.
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
    """Insert sentences into a haystack of prose.

    Args:
        prose: returns the haystack's sentences from a start to an end index (exclusive), joined by spaces; empty if
            both are equal.
        sentences: number of sentences in the haystack.
        hidden: sentences to insert, in the order of their depths.
        depths: percentage of the haystack's sentences before each.

    Returns:
        Prose and hidden sentences, joined by spaces. Empty prose at either end is joined too, as in upstream's code, so
        the text may begin or end with a space.
    """
    parts: list[str] = []
    done = 0
    # Cut one after the other, so the depths must ascend; the sentences keep their order.
    for line, depth in zip(hidden, sorted(depths), strict=True):
        # Truncated, as in upstream's code.
        position = int(sentences * (depth / 100))
        parts += [prose(done, position), line]
        done = position
    return " ".join([*parts, prose(done, sentences)])


def depth_of(line: str, context: str) -> float:
    """Return the share of the context's characters before a line; 0 is the beginning."""
    return round(context.index(line) / len(context), 4)
