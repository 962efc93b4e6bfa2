"""RULER's variable tracking (vt): find all variables that a value was assigned to, directly or through others."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder, largest_that_fits
from ropewalk.evaluation.samples import Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.ruler.niah import depth_of, hide_in_lines
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, VT

NAME_LETTERS = 5
# Shorter than the task's, so that no name of the example is also one of the task's.
EXAMPLE_NAME_LETTERS = 3
EXAMPLE_TOKENS = 500
"""Maximum tokens of the in-context example, if that leaves room for one line of noise per statement."""
LEAST_VALUE, MOST_VALUE = 10_000, 99_998


@dataclass(frozen=True)
class TrackingTask:
    """One chain of assignments, after a solved example; a unit is a line of noise.

    Args:
        name: name of the task.
        hops: number of assignments from variable to variable, at least 1.

    Raises:
        RopewalkError: if ``hops`` is less than 1.

    Source: NVIDIA/RULER at c3f5e3b, ``variable_tracking.py``.
    """

    name: str = "vt"
    hops: int = 4

    suite = "ruler"
    max_new_tokens = 30

    def __post_init__(self) -> None:
        if self.hops < 1:
            raise RopewalkError(f"the number of hops of {self.name} must be 1 or more, got {self.hops}")

    @property
    def statements(self) -> int:
        """Number of assignments in a prompt."""
        return self.hops + 1

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"hops": self.hops}

    def unavailable(self) -> str | None:
        """Return None: the task needs no external data."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)

        def drafts_at(length: int) -> Drafts:
            # Once for each length, not for each sample.
            lines = self._example_lines(encoder, length, seed)
            return lambda index, units: self.draft(
                sample_random(seed, self.name, length, index), units, lines
            )

        return fitted_samples(form, encoder, length, count, drafts_at, self.statements)

    def draft(self, draw: random.Random, units: int, example_lines: int) -> Draft:
        """Build a prompt with this number of units; names and values do not depend on it."""
        example = self._example(draw, example_lines)
        names, value = _names(draw, self.statements, NAME_LETTERS), draw.randint(LEAST_VALUE, MOST_VALUE)
        chain = chain_statements(names, str(value))
        positions = sorted(draw.sample(range(units), len(chain)))
        context = hide_in_lines([NOISE_LINE] * units, chain, positions)
        text, prefix = tracking_prompt(context, str(value), len(names))
        details = {
            "unit": "line",
            "units": units,
            "depths": [depth_of(statement, context) for statement in chain],
            "example_units": example_lines,
        }
        return Draft(example + text, prefix, tuple(names), details)

    def _example(self, draw: random.Random, lines: int) -> str:
        """Return the solved example, followed by an empty line."""
        names = _names(draw, self.statements, EXAMPLE_NAME_LETTERS)
        value = str(draw.randint(LEAST_VALUE, MOST_VALUE))
        positions = sorted(draw.sample(range(lines), len(names)))
        context = hide_in_lines([NOISE_LINE] * lines, chain_statements(names, value), positions)
        return answered(*tracking_prompt(context, value, len(names)), names) + "\n\n"

    def _example_lines(self, encoder: PromptEncoder, length: int, seed: int) -> int:
        """Return the number of noise lines in the example, which may have 500 tokens but at most half the length."""
        # Determined with one set of names and used for all samples, as upstream does.
        budget = min(EXAMPLE_TOKENS, length // 2)

        def tokens(more: int) -> int:
            # The same names in every trial, so that only the lines differ.
            draw = sample_random(seed, f"{self.name} example", length, 0)
            text = self._example(draw, self.statements + more)
            ids = encoder.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
            return len(ids["input_ids"])

        # Even the shortest example is needed, so it may exceed the budget.
        if tokens(0) > budget:
            return self.statements
        return self.statements + largest_that_fits(tokens, budget)


def chain_statements(names: Sequence[str], value: str) -> list[str]:
    """Return the chain ``VAR A = 12345``, ``VAR B = VAR A ``, and so on; all but the first end in a space."""
    handed_on = [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    return [f"VAR {names[0]} = {value}", *handed_on]


def tracking_prompt(context: str, value: str, names: int) -> tuple[str, str]:
    """Return the task text and the beginning of the answer."""
    return VT.text(context=context, query=value), VT.prefix(num=names, query=value)


def answered(text: str, prefix: str, names: Sequence[str]) -> str:
    """Join a prompt with its answer; there are two spaces between them, as in upstream's prompts."""
    return text + prefix + " " + " ".join(names)


def draw_name(draw: random.Random, letters: int) -> str:
    """Draw a name of capital letters."""
    return "".join(draw.choices(string.ascii_uppercase, k=letters))


def _names(draw: random.Random, count: int, letters: int) -> list[str]:
    """Draw distinct names, none of which is the keyword ``VAR``."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = draw_name(draw, letters)
        if name != "VAR":
            names[name] = None
    return list(names)
