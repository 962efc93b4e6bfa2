"""Samples: what is asked, what answers it, and how the answer is judged. Plain values that go to JSON and back."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import FIRST_PROBE, PromptEncoder

Metric = Callable[[str, Sequence[str]], float]
"""From an answer and its references to a share of 1."""


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        suite: the benchmark, as on the command line.
        task: the task within the suite.
        length: tokens that prompt and answer may take together.
        index: number of the sample among those of its task and length.
        text: what the model is told, without special tokens; the user's turn of a chat.
        answer_prefix: the beginning of the answer, which the model goes on from; often empty.
        references: what a right answer holds.
        metric: how an answer is judged, a name in ``registry.METRICS``.
        max_new_tokens: room for the answer.
        prompt_tokens: tokens of the whole prompt, special tokens and answer prefix included.
        bos_count: BOS tokens among them.
        details: facts about this sample, JSON values, such as the depth of a needle.
    """

    suite: str
    task: str
    length: int
    index: int
    text: str
    answer_prefix: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    prompt_tokens: int
    bos_count: int
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What tells a sample from all others of a run."""
        return self.suite, self.task, self.length, self.index

    @property
    def fill(self) -> float:
        """Share of the length that prompt and answer take."""
        return (self.prompt_tokens + self.max_new_tokens) / self.length

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        # Not asdict, which copies a prompt of a million tokens character by character.
        return {**self.__dict__, "references": list(self.references), "details": dict(self.details)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sample:
        """What :meth:`to_json` wrote."""
        return cls(**{**value, "references": tuple(value["references"])})


class Task(Protocol):
    """A benchmark's task: it makes samples. One frozen dataclass each; its fields are its settings."""

    @property
    def suite(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    def settings(self) -> Mapping[str, Any]:
        """JSON values that the samples depend on besides tokenizer, length, count and seed.

        Material that is read from files comes in by its digest.
        """

    def unavailable(self) -> str | None:
        """Why the task cannot run here (missing essays, say), or None."""

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """``count`` samples of a length, in order of their index, made while they are asked for.

        A sample depends on the encoder, the length, the seed and its own index, and on nothing else.

        Raises:
            RopewalkError: at once, before the first sample is asked for, if the length is too short; the
                message names the task, the length and the shortest length possible.
        """


LEAST_FILL = 0.95
"""Share of the length that prompt and answer take, where the units are small enough."""

BATCH_TOKENS = 1 << 20
"""Tokens of prompts that are made and counted at once."""

MOST_IN_BATCH = 32

SPREAD = 0.005
"""Share of the units that is left out at first: most samples of a long prompt differ by less in their tokens."""

MOST_GUESSES = 4

LEAST_UNIT = 0.25
"""Tokens: some tokenizers join words to one token, none joins four."""


class LengthTooShort(RopewalkError):
    """A length that a task's prompt does not fit into.

    Attributes:
        task: its name.
        shortest: tokens that would do for these samples.
    """

    def __init__(self, task: str, length: int, shortest: int) -> None:
        super().__init__(
            f"{task} does not fit in {length} tokens; the shortest length with this tokenizer is {shortest}"
        )
        self.task, self.shortest = task, shortest


@dataclass(frozen=True)
class Draft:
    """A prompt before it is counted; the fields are those of a Sample."""

    text: str
    answer_prefix: str
    references: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


Drafts = Callable[[int, int], Draft]
"""From a sample's index and a number of units to its draft: the same arguments, the same draft."""


@dataclass(frozen=True)
class Form:
    """What all samples of a task share; the fields are those of a Sample."""

    suite: str
    task: str
    metric: str
    max_new_tokens: int

    def sample(self, encoder: PromptEncoder, length: int, index: int, draft: Draft, tokens: int) -> Sample:
        """A draft of so many tokens as the sample of this number."""
        return Sample(
            self.suite,
            self.task,
            length,
            index,
            draft.text,
            draft.answer_prefix,
            draft.references,
            self.metric,
            self.max_new_tokens,
            tokens,
            encoder.bos_count(draft.text, draft.answer_prefix),
            draft.details,
        )


def sample_random(seed: int, task: str, length: int, index: int) -> random.Random:
    """Random numbers of one sample: of the seed, the task, the length and its index, and of nothing else."""
    # A text as seed goes through SHA-512, the same on every machine; a tuple would be hashed differently.
    return random.Random(f"{seed}/{task}/{length}/{index}")


def counted_samples(
    form: Form, encoder: PromptEncoder, length: int, indices: Sequence[int], drafts: Sequence[Draft]
) -> list[Sample]:
    """Drafts as they are, made samples: for prompts whose units are chosen otherwise than by their number.

    Args:
        form: what the samples share.
        encoder: counts the tokens, all at once.
        length: tokens that prompt and answer may take together; that they do is for the caller to see.
        indices: each sample's number.
        drafts: as many.
    """
    found = zip(indices, drafts, _counts(encoder, drafts), strict=True)
    return [form.sample(encoder, length, index, draft, tokens) for index, draft, tokens in found]


def fitted_samples(
    form: Form,
    encoder: PromptEncoder,
    length: int,
    count: int,
    drafts_at: Callable[[int], Drafts],
    fewest: int = 0,
) -> Iterator[Sample]:
    """Samples with as many units as fit.

    Args:
        form: what the samples share.
        encoder: counts the tokens.
        length: tokens that prompt and answer may take together.
        count: how many samples, at least 1.
        drafts_at: from a length to what makes prompts of so many units for it. So the shortest length that a message
            names is one that works, and one token less does not.
        fewest: units that a prompt has at least.

    Returns:
        The samples in order of their index, made in batches while they are asked for.

    Raises:
        RopewalkError: at once, if ``count`` is less than 1.
        LengthTooShort: at once, if a prompt of the fewest units does not fit; it names the shortest length that
            all these samples have room in.
    """
    if count < 1:
        raise RopewalkError(f"the number of samples must be 1 or more, got {count}")

    def least(drafts: Drafts) -> list[int]:
        return _counts(encoder, [drafts(index, fewest) for index in range(count)])

    drafts = drafts_at(length)
    tokens = least(drafts)
    shortest = max(tokens) + form.max_new_tokens
    if length < shortest:
        shortest = _shortest(lambda length: max(least(drafts_at(length))) + form.max_new_tokens, shortest)
        raise LengthTooShort(form.task, length, shortest)
    return _batches(form, encoder, length, drafts, fewest, tokens)


def _shortest(needed: Callable[[int], int], near: int) -> int:
    """A length near one, at which there is as much as is needed there, and one less is too short."""
    length = near
    while (longer := needed(length)) > length:
        length = longer
    while needed(length - 1) < length:
        length -= 1
    return length


def _batches(
    form: Form, encoder: PromptEncoder, length: int, drafts: Drafts, fewest: int, least: Sequence[int]
) -> Iterator[Sample]:
    """Samples of which the tokens with the fewest units are known: ``least``, one number a sample."""
    budget, count = length - form.max_new_tokens, len(least)
    unit = _tokens_of_a_unit(lambda units: _counts(encoder, [drafts(0, fewest + units)])[0], least[0], budget)
    size = max(1, min(MOST_IN_BATCH, BATCH_TOKENS // length))
    for start in range(0, count, size):
        indices = range(start, min(start + size, count))
        trials = [
            _Trial(index, fewest, least[index], fewest, fewest + _room(budget - least[index], unit))
            for index in indices
        ]
        for trial, draft, tokens in _fitted(encoder, budget, length, trials, drafts):
            yield form.sample(encoder, length, trial.index, draft, tokens)


def _tokens_of_a_unit(tokens_of: Callable[[int], int], least: int, budget: int) -> float:
    """Tokens of a unit, on average over about as many as there is room for besides the fewest."""
    units = FIRST_PROBE
    for _ in range(MOST_GUESSES):
        tokens = tokens_of(units)
        unit = max((tokens - least) / units, LEAST_UNIT)
        if 1 - 2 * SPREAD <= tokens / budget <= 1:
            break
        units = max(_room(budget - least, unit), 1)
    return unit


def _room(tokens: int, unit: float) -> int:
    """Units that there is room for, but for some tokens to spare."""
    return int((1 - SPREAD) * tokens / unit)


@dataclass
class _Trial:
    """How many units one sample has, and what is known of how many it may have.

    ``least`` is its tokens with the fewest units, which fit for certain.
    """

    index: int
    fewest: int
    least: int
    most_that_fit: int
    units: int
    least_too_many: float = math.inf

    def unit(self, tokens: int) -> float:
        """Tokens of one unit of this sample, as it has so many; other samples may have shorter or longer ones."""
        return max((tokens - self.least) / max(self.units - self.fewest, 1), LEAST_UNIT)


_Counted = tuple[_Trial, Draft, int]


def _fitted(
    encoder: PromptEncoder, budget: int, length: int, trials: Sequence[_Trial], drafts: Drafts
) -> list[_Counted]:
    """Each sample with units that fit; only those that need it are counted again."""
    done: dict[int, _Counted] = {}
    open_trials = list(trials)
    while open_trials:
        made = [drafts(trial.index, trial.units) for trial in open_trials]
        rest = []
        for trial, draft, tokens in zip(open_trials, made, _counts(encoder, made), strict=True):
            unit = trial.unit(tokens)
            if tokens > budget:
                trial.least_too_many = trial.units
                fewer = trial.units - math.ceil((tokens - budget) / unit)
                trial.units = min(max(fewer, trial.most_that_fit), trial.units - 1)
                rest.append(trial)
                continue
            # A draft that does not grow with its units has no more to give.
            again = trial.units == trial.most_that_fit
            grew = again or trial.index not in done or tokens > done[trial.index][2]
            trial.most_that_fit = trial.units
            done[trial.index] = trial, draft, tokens
            more = min(trial.units + max(int((budget - tokens) / unit), 1), trial.least_too_many - 1)
            if budget - tokens > (1 - LEAST_FILL) * length and grew and more > trial.units:
                trial.units = int(more)
                rest.append(trial)
        open_trials = rest
    return [done[trial.index] for trial in trials]


def _counts(encoder: PromptEncoder, drafts: Sequence[Draft]) -> list[int]:
    return encoder.counts([(draft.text, draft.answer_prefix) for draft in drafts])


_CONTROL = re.compile(r"[\x00-\x1f]")


def clean_prediction(text: str) -> str:
    """An answer as RULER judges it: stripped, control characters made newlines, stripped again.

    Source: NVIDIA/RULER at c3f5e3b, ``scripts/eval``.
    """
    return _CONTROL.sub("\n", text.strip()).strip()


def share_of_references(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that the answer holds, in any case of letters (RULER's ``all``)."""
    said = clean_prediction(prediction).lower()
    return sum(reference.lower() in said for reference in references) / len(references)


def any_reference(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer holds any reference, in any case of letters (RULER's ``part``)."""
    said = clean_prediction(prediction).lower()
    return float(any(reference.lower() in said for reference in references))


def first_integer(prediction: str, references: Sequence[str]) -> float:
    """1 if the first integer of the answer is the reference (passkey, LongEval of base models)."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and _same_integer(found[0], references[0]))


def last_integer(prediction: str, references: Sequence[str]) -> float:
    """1 if the last integer of the answer is the reference (LongEval of chat models)."""
    found = re.findall(r"[0-9]+", prediction)
    return float(bool(found) and _same_integer(found[-1], references[0]))


def _same_integer(said: str, meant: str) -> bool:
    # As text: Python refuses to turn thousands of digits into a number, and a model may say them.
    return said.lstrip("0") == meant.lstrip("0")


def prompt_digest(sample: Sample) -> str:
    """SHA-256 of what the model is asked."""
    parts = f"{len(sample.text)}:{sample.text}{sample.answer_prefix}"
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
