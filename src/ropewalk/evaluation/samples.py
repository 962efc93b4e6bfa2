"""Samples: prompts with their references and metrics, as plain values that convert to JSON and back."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import FIRST_PROBE, PromptEncoder, Turns, plain_chat

Metric = Callable[[str, Sequence[str], Mapping[str, Any]], float]
"""Maps an answer, its references and the details of its sample to a score from 0 to 1."""

NO_DETAILS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Sample:
    """One prompt with its reference answers.

    Attributes:
        suite: name of the suite, as on the command line.
        task: name of the task within the suite.
        length: maximum number of tokens of prompt and answer together.
        index: number of the sample within its task and length.
        text: the prompt without special tokens; for chat models, the user's turn.
        answer_prefix: beginning of the answer, which the model continues; often empty.
        references: strings that a correct answer contains.
        metric: name of the metric in ``registry.METRICS`` that scores the answer.
        max_new_tokens: maximum number of tokens of the answer.
        prompt_tokens: tokens of the whole prompt, including special tokens and answer prefix.
        bos_count: number of BOS tokens in the prompt.
        details: facts about this sample, JSON values, such as the depth of a needle. Two have a meaning for all tasks:
            ``context`` is the number of a text that several samples share, which are then not independent, and
            ``spans`` lists the first and last character (exclusive) of what the answer needs, in :attr:`whole`.
        earlier: turns of a chat before ``text``; mostly none.
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
    earlier: Turns = ()

    @property
    def whole(self) -> str:
        """The prompt as people read it: all turns, and the answer prefix."""
        return plain_chat(self.earlier, self.text, self.answer_prefix)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Key that identifies the sample within a run."""
        return self.suite, self.task, self.length, self.index

    @property
    def fill(self) -> float:
        """Share of the length that the prompt and the maximum answer occupy."""
        return (self.prompt_tokens + self.max_new_tokens) / self.length

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        # Not asdict: it deep-copies every value, which is slow for prompts of a million tokens.
        values = {**self.__dict__, "references": list(self.references), "details": dict(self.details)}
        values["earlier"] = [list(turn) for turn in self.earlier]
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sample:
        """Rebuild a sample from the output of :meth:`to_json`."""
        earlier = tuple((role, text) for role, text in value.get("earlier", ()))
        return cls(**{**value, "references": tuple(value["references"]), "earlier": earlier})


class Task(Protocol):
    """A task of a benchmark, which generates samples. Each task is a frozen dataclass whose fields are its settings."""

    @property
    def suite(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    def settings(self) -> Mapping[str, Any]:
        """Return the JSON values that the samples depend on besides tokenizer, length, count and seed.

        Files that the task reads are represented by their digests.
        """

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (for example, because essays are missing), or None."""

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """Generate ``count`` samples of a length lazily, in the order of their index.

        A sample depends only on the encoder, the length, the seed and its own index.

        Raises:
            RopewalkError: if the length is too short. It is raised by the call itself, before the first sample; the
                message names the task, the length and the shortest possible length.
        """


LEAST_FILL = 0.95
"""Minimum share of the length that prompt and answer occupy, if the units are small enough and a task asks for no
other."""

BATCH_TOKENS = 1 << 20
"""Maximum number of prompt tokens that are generated and counted together."""

# Otherwise thousands of short prompts would be made before the first one is answered.
MOST_IN_BATCH = 32

SPREAD = 0.005
"""Safety margin of the first trial: the token counts of most samples of a long prompt vary by less than this share."""

# Only an estimate: the search of each sample corrects it.
MOST_GUESSES = 4

DRAWS = 16
"""Most draws of a sample whose units, such as lines, are not small beside 1 % of a short length."""

ANOTHER = math.lcm(*range(1, 31))
"""What is added to a sample's index when it is drawn again: tasks take kinds and questions in turn by the index."""

LEAST_UNIT = 0.25
"""Lower bound on the tokens per unit: some tokenizers merge several words into one token, but none merges four."""


class LengthTooShort(RopewalkError):
    """The prompt of a task does not fit in the requested length.

    Attributes:
        task: name of the task.
        shortest: shortest length in tokens that fits these samples.
    """

    def __init__(self, task: str, length: int, shortest: int) -> None:
        super().__init__(
            f"the task {task} does not fit in {length} tokens; the shortest length with this tokenizer is {shortest}"
        )
        self.task, self.shortest = task, shortest


@dataclass(frozen=True)
class Draft:
    """A prompt whose tokens are not counted yet; the fields have the meaning of those of :class:`Sample`."""

    text: str
    answer_prefix: str
    references: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    earlier: Turns = ()

    @property
    def asked(self) -> tuple[str, str, Turns]:
        """What :meth:`PromptEncoder.counts` counts."""
        return self.text, self.answer_prefix, self.earlier


Drafts = Callable[[int, int], Draft]
"""Maps a sample's index and a number of units to its draft; deterministic."""


@dataclass(frozen=True)
class Form:
    """Fields that all samples of a task share; they have the meaning of those of :class:`Sample`.

    ``least_fill`` is the share of the length from which on a sample counts as full. A sample that is not full is drawn
    again, up to ``draws`` times in all, and the fullest is taken. For more than one, drafts must be random, and accept
    any index.
    """

    suite: str
    task: str
    metric: str
    max_new_tokens: int
    least_fill: float = LEAST_FILL
    draws: int = 1

    def sample(self, encoder: PromptEncoder, length: int, index: int, draft: Draft, tokens: int) -> Sample:
        """Build the sample with this index from a draft with this number of tokens."""
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
            encoder.bos_count(*draft.asked),
            draft.details,
            draft.earlier,
        )


def sample_random(seed: int, task: str, length: int, index: int) -> random.Random:
    """Return a generator of random numbers that depends only on the seed, the task, the length and the index."""
    # Python seeds from a string with SHA-512, which is the same on every machine; a tuple's hash is not.
    return random.Random(f"{seed}/{task}/{length}/{index}")


def counted_samples(
    form: Form, encoder: PromptEncoder, length: int, indices: Sequence[int], drafts: Sequence[Draft]
) -> list[Sample]:
    """Turn drafts into samples without fitting them, for tasks that choose the units of a prompt themselves.

    Args:
        form: fields that the samples share.
        encoder: counts the tokens, in one batch.
        length: maximum number of tokens of prompt and answer together; the caller makes sure that they fit.
        indices: index of each sample.
        drafts: draft of each sample.
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
    """Generate samples with as many units as fit in the length.

    Args:
        form: fields that the samples share.
        encoder: counts the tokens.
        length: maximum number of tokens of prompt and answer together.
        count: number of samples, at least 1.
        drafts_at: maps a length to its function of drafts. Drafts may depend on the length, so the search for the
            shortest possible length calls this with other lengths too.
        fewest: minimum number of units of a prompt.

    Returns:
        The samples in the order of their index, generated lazily in batches.

    Raises:
        RopewalkError: by the call itself, if ``count`` is less than 1.
        LengthTooShort: by the call itself, if a prompt with the fewest units does not fit; it gives the shortest
            length that fits all these samples.
    """
    fitter, least = _fitter(form, encoder, length, count, drafts_at, fewest)

    def again(index: int) -> list[Sample]:
        return [replace(sample, index=index % ANOTHER) for sample in fitter.samples([index])]

    batches = fitter.batches(least)
    return (_fullest(form, [sample], sample.index, again)[0] for sample in batches)


def grouped_samples(
    form: Form,
    encoder: PromptEncoder,
    length: int,
    count: int,
    group: int,
    drafts_at: Callable[[int], Drafts],
    fewest: int = 0,
) -> Iterator[Sample]:
    """Generate samples of which ``group`` at a time share a text, with as many units of it as fit the longest question.

    Args:
        form, encoder, length, count, fewest: as for :func:`fitted_samples`.
        group: number of samples about a text; sample i is about text ``i // group``.
        drafts_at: as for :func:`fitted_samples`. With the same number of units, drafts about a text differ in their
            question alone.

    Returns:
        The samples in the order of their index, generated lazily.

    Raises:
        RopewalkError: as :func:`fitted_samples`.
    """

    def about(text: int) -> range:
        first = group * text
        return range(first, first + min(group, max(count, 1) - group * (text % ANOTHER)))

    def longest_at(length: int) -> Drafts:
        drafts = drafts_at(length)

        def longest(text: int, units: int) -> Draft:
            each = [drafts(index, units) for index in about(text)]
            # Tokens decide only where nothing can be left out: counting all questions takes many times as long.
            sizes = _counts(encoder, each) if units <= fewest else [len(draft.text) for draft in each]
            chosen = each[sizes.index(max(sizes))]
            return replace(chosen, details={"units": units})

        return longest

    fitter, least = _fitter(form, encoder, length, math.ceil(count / group), longest_at, fewest)
    drafts = drafts_at(length)

    def all_about(text: int, units: int) -> list[Sample]:
        each = [drafts(index, units) for index in about(text)]
        if text >= ANOTHER:
            each = [replace(d, details={**d.details, "context": text % ANOTHER}) for d in each]
        return counted_samples(form, encoder, length, about(text % ANOTHER), each)

    def whole(longest: Sample) -> list[Sample]:
        # The question with the most characters may have a few tokens less than another.
        text, units = longest.index, longest.details["units"]
        found = all_about(text, units)
        while units > fewest and any(sample.fill > 1 for sample in found):
            units -= 1
            found = all_about(text, units)
        return found

    def again(text: int) -> list[Sample]:
        return [sample for longest in fitter.samples([text]) for sample in whole(longest)]

    # A generator of its own, so that errors are raised by the call itself.
    texts = fitter.batches(least)
    return (sample for longest in texts for sample in _fullest(form, whole(longest), longest.index, again))


def _shortest(needed: Callable[[int], int], near: int) -> int:
    """Find a length near ``near`` that is long enough for its own prompts, while one token less is too short."""
    length = near
    # Prompts may depend on the length they are made for, so the length found for one may not fit its own prompts.
    while (longer := needed(length)) > length:
        length = longer
    while needed(length - 1) < length:
        length -= 1
    return length


def _fullest(
    form: Form, samples: list[Sample], index: int, again: Callable[[int], list[Sample]]
) -> list[Sample]:
    """The samples, or those of another draw if they are fuller; ``again`` maps another index to them, if they fit."""

    def fill(each: Sequence[Sample]) -> float:
        return min((sample.fill for sample in each), default=0)

    for draw in range(1, form.draws):
        if fill(samples) >= form.least_fill:
            break
        samples = max(samples, again(index + draw * ANOTHER), key=fill)
    return samples


def _fitter(
    form: Form,
    encoder: PromptEncoder,
    length: int,
    count: int,
    drafts_at: Callable[[int], Drafts],
    fewest: int,
) -> tuple[_Fitter, list[int]]:
    """The fitter of a length, and the tokens of each sample with the fewest units; see :func:`fitted_samples`."""
    if count < 1:
        raise RopewalkError(f"the number of samples must be 1 or more, got {count}")

    def least_at(length: int) -> list[int]:
        return _Fitter(form, encoder, length, drafts_at(length), fewest).least(range(count))

    least = least_at(length)
    shortest = max(least) + form.max_new_tokens
    if length < shortest:
        # Only after a failure, because each length that is tried encodes all prompts.
        raise LengthTooShort(
            form.task, length, _shortest(lambda length: max(least_at(length)) + form.max_new_tokens, shortest)
        )
    return _Fitter(form, encoder, length, drafts_at(length), fewest), least


@dataclass(frozen=True)
class _Fitter:
    """Makes samples of a length with as many units as fit; see :func:`fitted_samples`."""

    form: Form
    encoder: PromptEncoder
    length: int
    drafts: Drafts
    fewest: int

    @property
    def budget(self) -> int:
        return self.length - self.form.max_new_tokens

    def least(self, indices: Sequence[int]) -> list[int]:
        """Tokens of samples with the fewest units."""
        return _counts(self.encoder, [self.drafts(index, self.fewest) for index in indices])

    @cached_property
    def unit(self) -> float:
        """Tokens of a unit: measured once for all samples; each sample then corrects it with its own count."""
        return _tokens_of_a_unit(
            lambda units: _counts(self.encoder, [self.drafts(0, self.fewest + units)])[0],
            self.least([0])[0],
            self.budget,
        )

    def batches(self, least: Sequence[int]) -> Iterator[Sample]:
        """Generate samples in batches; ``least`` gives each one's tokens with the fewest units."""
        size = max(1, min(MOST_IN_BATCH, BATCH_TOKENS // self.length))
        for start in range(0, len(least), size):
            indices = range(start, min(start + size, len(least)))
            yield from self._fitted(indices, least[start : start + size])

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """Make samples; those that do not fit with the fewest units are left out."""
        found = zip(indices, self.least(indices), strict=True)
        fitting = {index: tokens for index, tokens in found if tokens <= self.budget}
        return self._fitted(list(fitting), list(fitting.values()))

    def _fitted(self, indices: Sequence[int], least: Sequence[int]) -> list[Sample]:
        trials = [
            _Trial(
                index, self.fewest, tokens, self.fewest, self.fewest + _room(self.budget - tokens, self.unit)
            )
            for index, tokens in zip(indices, least, strict=True)
        ]
        # Tokens that may stay free.
        slack = (1 - self.form.least_fill) * self.length
        return [
            self.form.sample(self.encoder, self.length, trial.index, draft, tokens)
            for trial, draft, tokens in _fitted(self.encoder, self.budget, slack, trials, self.drafts)
        ]


def _tokens_of_a_unit(tokens_of: Callable[[int], int], least: int, budget: int) -> float:
    """Estimate the mean tokens per unit, measured near the number of units that fill the budget."""
    units = FIRST_PROBE
    for _ in range(MOST_GUESSES):
        tokens = tokens_of(units)
        unit = max((tokens - least) / units, LEAST_UNIT)
        if 1 - 2 * SPREAD <= tokens / budget <= 1:
            break
        units = max(_room(budget - least, unit), 1)
    return unit


def _room(tokens: int, unit: float) -> int:
    """Return the number of units that fit in ``tokens``, with a safety margin."""
    return int((1 - SPREAD) * tokens / unit)


@dataclass
class _Trial:
    """Search state of one sample: its current number of units and the bounds known so far.

    ``least`` is its number of tokens with the fewest units, which always fit.
    """

    index: int
    fewest: int
    least: int
    most_that_fit: int
    units: int
    least_too_many: float = math.inf

    def unit(self, tokens: int) -> float:
        """Return the tokens per unit of this sample, given its total; units of other samples may differ in length."""
        return max((tokens - self.least) / max(self.units - self.fewest, 1), LEAST_UNIT)


_Counted = tuple[_Trial, Draft, int]


def _fitted(
    encoder: PromptEncoder, budget: int, slack: float, trials: Sequence[_Trial], drafts: Drafts
) -> list[_Counted]:
    """Return each sample with a number of units that fits; only samples that change are counted again."""
    done: dict[int, _Counted] = {}
    open_trials = list(trials)
    while open_trials:
        # All open drafts are encoded in one batch, because fast tokenizers use every core on a batch and one
        # core on a text.
        made = [drafts(trial.index, trial.units) for trial in open_trials]
        rest = []
        for trial, draft, tokens in zip(open_trials, made, _counts(encoder, made), strict=True):
            # Tokens per unit, measured on this draft: tokenizers and tasks differ too much for a constant.
            unit = trial.unit(tokens)
            if tokens > budget:
                # Always move strictly between the bounds, so that the search ends even if the estimate is off.
                trial.least_too_many = trial.units
                fewer = trial.units - math.ceil((tokens - budget) / unit)
                trial.units = min(max(fewer, trial.most_that_fit), trial.units - 1)
                rest.append(trial)
                continue
            # Stop if more units did not add tokens: such a draft has reached its maximum.
            again = trial.units == trial.most_that_fit
            grew = again or trial.index not in done or tokens > done[trial.index][2]
            trial.most_that_fit = trial.units
            done[trial.index] = trial, draft, tokens
            more = min(trial.units + max(int((budget - tokens) / unit), 1), trial.least_too_many - 1)
            if budget - tokens > slack and grew and more > trial.units:
                trial.units = int(more)
                rest.append(trial)
        open_trials = rest
    return [done[trial.index] for trial in trials]


def _counts(encoder: PromptEncoder, drafts: Sequence[Draft]) -> list[int]:
    return encoder.counts([draft.asked for draft in drafts])


_CONTROL = re.compile(r"[\x00-\x1f]")


def clean_prediction(text: str) -> str:
    """Clean an answer as RULER does before scoring: strip it, replace control characters by newlines, strip again.

    Source: NVIDIA/RULER at c3f5e3b, ``scripts/eval``.
    """
    return _CONTROL.sub("\n", text.strip()).strip()


def share_of_references(
    prediction: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS
) -> float:
    """Return the share of references that the answer contains, ignoring case (RULER's ``all``)."""
    answer = clean_prediction(prediction).lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def any_reference(
    prediction: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS
) -> float:
    """Return 1 if the answer contains any reference, ignoring case, else 0 (RULER's ``part``)."""
    answer = clean_prediction(prediction).lower()
    return float(any(reference.lower() in answer for reference in references))


def first_integer(
    prediction: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS
) -> float:
    """Return 1 if the first integer of the answer is the reference, else 0 (passkey, LongEval of base models)."""
    # Not \d, which matches digits of every script.
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and _same_integer(found[0], references[0]))


def last_integer(
    prediction: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS
) -> float:
    """Return 1 if the last integer of the answer is the reference, else 0 (LongEval of chat models)."""
    found = re.findall(r"[0-9]+", prediction)
    return float(bool(found) and _same_integer(found[-1], references[0]))


def _same_integer(answer: str, reference: str) -> bool:
    # Compare as text: Python refuses to convert thousands of digits to int, and a model may write that many.
    return answer.lstrip("0") == reference.lstrip("0")


def prompt_digest(sample: Sample) -> str:
    """Return the SHA-256 digest of the prompt's text and answer prefix."""
    # The lengths keep the borders: moving characters from the text to the prefix gives another digest.
    turns = "".join(f"{role}:{len(text)}:{text}" for role, text in sample.earlier)
    parts = f"{turns}{len(sample.text)}:{sample.text}{sample.answer_prefix}"
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
