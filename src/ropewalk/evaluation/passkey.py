"""Passkey retrieval: find a number that was said once in a long text of no interest.

Source: Mohtashami and Jaggi, arXiv:2305.16300; the form that LongRoPE (arXiv:2402.13753) reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any, Literal, get_args

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.generation import generate_greedily
from ropewalk.evaluation.prompt import Prompt, encode_prompt, largest_that_fits
from ropewalk.evaluation.running import Progress, evaluating
from ropewalk.evaluation.statistics import Interval, wilson_interval

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
NOISE_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NOISE_WORDS = tuple(word for sentence in NOISE_SENTENCES for word in sentence.split(" "))
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 50_000
NEW_TOKENS = 10
LEAST_FILL = 0.95
"""Share of the length that prompt and answer take, where whole sentences allow it and else to the word."""

Depths = Literal["uniform", "even"]


@dataclass(frozen=True)
class PasskeySample:
    """One prompt and the number that answers it.

    Attributes:
        length: tokens that prompt and answer may take together.
        index: number of the sample at this length.
        key: 1 to 50000.
        depth: share of the noise that stands before the key, as realised.
        prompt: what the model reads.
    """

    length: int
    index: int
    key: int
    depth: float
    prompt: Prompt

    @property
    def fill(self) -> float:
        """Share of the length that prompt and answer take."""
        return (len(self.prompt.input_ids) + NEW_TOKENS) / self.length


@dataclass(frozen=True)
class PasskeyRecord:
    """What a model made of one sample; ``prediction`` is the text of the generated tokens alone."""

    length: int
    index: int
    key: int
    depth: float
    prompt_tokens: int
    bos_count: int
    fill: float
    prediction: str
    correct: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PasskeyResult:
    """All samples of one length.

    Attributes:
        length: tokens.
        score: share of right answers.
        ci95: Wilson's interval.
        records: one a sample, in order.
    """

    length: int
    score: float
    ci95: Interval
    records: tuple[PasskeyRecord, ...]


def passkey(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    depths: Depths = "uniform",
    progress: Progress | None = None,
) -> list[PasskeyResult]:
    """Ask a model for passkeys and count the right answers.

    Args:
        model: a transformers model; it may be asked beyond the length of its config.
        tokenizer: the model's own.
        lengths: tokens of prompt and answer together.
        samples: prompts a length.
        seed: a sample depends on it, on the length and on its own number, and on nothing else.
        depths: where the key stands: ``uniform`` at random, or ``even`` from the beginning to the end.
        progress: called after each sample.

    Returns:
        One result a length, in the order of ``lengths``.

    Raises:
        RopewalkError: if a length is too short for a prompt; all are checked before the model is asked.
    """
    drawn = [passkey_samples(tokenizer, length, samples, seed, depths) for length in lengths]
    results = []
    with evaluating(model):
        for done, (length, group) in enumerate(zip(lengths, drawn, strict=True)):
            records = []
            for sample in group:
                records.append(_answer(model, tokenizer, sample))
                if progress is not None:
                    progress(done * samples + len(records), len(lengths) * samples)
            right = sum(record.correct for record in records)
            results.append(
                PasskeyResult(length, right / samples, wilson_interval(right, samples), tuple(records))
            )
    return results


def passkey_samples(
    tokenizer: Any, length: int, samples: int, seed: int, depths: Depths = "uniform"
) -> Iterator[PasskeySample]:
    """The prompts of one length, each as long as the length allows; each is made when it is asked for.

    Raises:
        RopewalkError: at once, if the length is too short; the message names the shortest that these samples
            can have.
    """
    if samples < 1:
        raise RopewalkError(f"the number of passkey samples must be 1 or more, got {samples}")
    if depths not in get_args(Depths):
        raise RopewalkError(f"unknown depths {depths!r}; choose one of {', '.join(get_args(Depths))}")
    even = np.linspace(0.0, 1.0, samples) if samples > 1 else np.array([0.5])
    draws = [np.random.default_rng([seed, length, index]) for index in range(samples)]
    keys = [int(rng.integers(1, LARGEST_KEY + 1)) for rng in draws]
    shares = [float(rng.random()) for rng in draws] if depths == "uniform" else even.tolist()
    shortest = max(_tokens(tokenizer, passkey_text(key)) for key in keys) + NEW_TOKENS
    if length < shortest:
        raise RopewalkError(
            f"passkey does not fit in {length} tokens; the shortest length with this tokenizer is {shortest}"
        )
    return (
        _fitted(tokenizer, length, index, key, share)
        for index, (key, share) in enumerate(zip(keys, shares, strict=True))
    )


def passkey_text(key: int, before: str = "", after: str = "") -> str:
    """The prompt: task, noise, needle, noise and question, a line each."""
    return "\n".join([TASK, before, NEEDLE.format(key=key), after, QUESTION])


def is_right(prediction: str, key: int) -> bool:
    """Whether the first integer of an answer is the key."""
    found = re.search(r"[0-9]+", prediction)
    return found is not None and int(found[0]) == key


def _fitted(tokenizer: Any, length: int, index: int, key: int, share: float) -> PasskeySample:
    """Noise in whole sentences where they fill the length, else to the word."""
    sample = _fitted_with(NOISE_SENTENCES, tokenizer, length, index, key, share)
    if sample.fill <= LEAST_FILL:
        sample = _fitted_with(NOISE_WORDS, tokenizer, length, index, key, share)
    return sample


def _fitted_with(
    units: Sequence[str], tokenizer: Any, length: int, index: int, key: int, share: float
) -> PasskeySample:
    def text(count: int) -> str:
        before = round(share * count)
        return passkey_text(key, _noise(units, before), _noise(units, count - before))

    count = largest_that_fits(lambda count: _tokens(tokenizer, text(count)), length - NEW_TOKENS)
    depth = round(share * count) / count if count else 0.0
    return PasskeySample(length, index, key, depth, encode_prompt(tokenizer, text(count)))


def _noise(units: Sequence[str], count: int) -> str:
    return " ".join(islice(cycle(units), count))


def _tokens(tokenizer: Any, text: str) -> int:
    return len(encode_prompt(tokenizer, text).input_ids)


def _answer(model: Any, tokenizer: Any, sample: PasskeySample) -> PasskeyRecord:
    new_ids = generate_greedily(model, tokenizer, sample.prompt.input_ids, NEW_TOKENS)
    prediction = tokenizer.decode(new_ids, skip_special_tokens=True)
    return PasskeyRecord(
        sample.length,
        sample.index,
        sample.key,
        sample.depth,
        len(sample.prompt.input_ids),
        sample.prompt.bos_count,
        sample.fill,
        prediction,
        is_right(prediction, sample.key),
    )
