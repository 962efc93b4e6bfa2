"""Learning rates and tokens with which published models were made longer, as advice for a model of some size.

``practice.json`` in this folder has the runs, each with its source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import median_low

NEAR = 2.5
"""Factor of the number of parameters within which a run is comparable."""
FEWEST = 3
"""Runs that are compared at least: the nearest in size, where fewer are near."""
USUAL_SIZE = 7_000_000_000
"""Parameters of most of these models, for a model whose size is not known."""
ADAPTER = 10
"""Factor of an adapter's learning rate; LongLoRA took the same rate as for all weights, most others a higher one."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run that trained a model on longer sequences, or without RoPE.

    Attributes:
        model: name.
        parameters: number of parameters.
        before: tokens of a sequence that the model was trained for; None if the source does not say.
        target: tokens of a sequence of the run; None if they are not longer (DroPE).
        learning_rate: peak learning rate.
        tokens: tokens of the run; None if its source does not say.
        adapter: whether only an adapter was trained.
        carries_on: whether it carries on pretraining, at its rate, instead of beginning anew with a finished model.
        source: where these values stand.
    """

    model: str
    parameters: int
    before: int | None
    target: int | None
    learning_rate: float
    tokens: int | None
    adapter: bool
    carries_on: bool
    source: str


@dataclass(frozen=True)
class Practice:
    """What published runs of models of about the same size did.

    Attributes:
        learning_rate: peak learning rate; for an adapter, :data:`ADAPTER` times that of all weights.
        reason: where it comes from, in a sentence without its full stop.
        told: runs of finished models that tell their tokens, of about this size or else the nearest in size.
        runs: these runs, the nearest in size first.
    """

    learning_rate: float
    reason: str
    told: tuple[PublishedRun, ...]
    runs: tuple[PublishedRun, ...]

    @property
    def whose(self) -> str:
        """These runs in words."""
        return f"published runs of models of {_sizes(self.runs)} parameters"

    @property
    def tokens_words(self) -> str:
        """How many tokens such runs took, in words."""
        return (
            f"published runs of finished models of {_sizes(self.told)} parameters took {self.least_tokens:,} to "
            f"{self.most_tokens:,} tokens"
        )

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of these runs."""
        return min(run.tokens for run in self.told if run.tokens is not None)

    @property
    def most_tokens(self) -> int:
        """Most tokens of these runs."""
        return max(run.tokens for run in self.told if run.tokens is not None)


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All runs that are known, from the smallest model to the largest."""
    text = resources.files("ropewalk.planning").joinpath("practice.json").read_text(encoding="utf-8")
    return tuple(PublishedRun(**each) for each in json.loads(text))


def practice_for(parameters: int | None, adapter: bool = False) -> Practice:
    """Learning rate and tokens for a model.

    Runs of finished models decide, by their median. Where there are too few of about the model's size, the lowest rate
    of all runs of that size is taken: the others carry on pretraining, from which they come.

    Args:
        parameters: its number of parameters; None or 0 if it is not known.
        adapter: whether an adapter is trained instead of all weights.

    Example:
        >>> practice_for(8_000_000_000).learning_rate
        2e-05
    """
    size = parameters or USUAL_SIZE
    runs = sorted((run for run in published_runs() if not run.adapter), key=lambda run: _distance(run, size))
    near = [run for run in runs if _distance(run, size) <= math.log(NEAR)]
    finished = [run for run in near if not run.carries_on]
    if len(finished) >= FEWEST:
        compared, rate = finished, median_low(run.learning_rate for run in finished)
        what = "the median"
    else:
        compared = near if len(near) >= FEWEST else runs[:FEWEST]
        rate, what = min(run.learning_rate for run in compared), "the lowest"
    # What carries on pretraining reads as much as there is: how little is enough is seen of finished models alone.
    told = [run for run in finished if run.tokens is not None]
    if len(told) < FEWEST:
        told = [run for run in runs if run.tokens is not None and not run.carries_on][:FEWEST]
    practice = Practice(rate * (ADAPTER if adapter else 1), "", tuple(told), tuple(compared))
    reason = f"{rate:g} is {what} of {len(compared)} {practice.whose}"
    if adapter:
        reason = f"{ADAPTER} times that of all weights, as usual for adapters; {reason}"
    return replace(practice, reason=reason)


def _distance(run: PublishedRun, size: int) -> float:
    return abs(math.log(run.parameters / size))


def _sizes(runs: Sequence[PublishedRun]) -> str:
    """The smallest and the largest number of parameters in words: ``0.15 to 1.7 billion``."""
    parameters = [run.parameters for run in runs]
    ends = dict.fromkeys(f"{each / 1e9:,.3g}" for each in (min(parameters), max(parameters)))
    return f"{' to '.join(ends)} billion"
