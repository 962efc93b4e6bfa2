"""Prompts and answers of a run's evaluations before and after training, kept so that people can read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ropewalk.evaluation.predictions import Prediction, SampleKey
from ropewalk.evaluation.samples import Sample
from ropewalk.io.files import write_text
from ropewalk.runs import Lines, Log

AT_EACH_END = 1000
"""Characters kept of the beginning and of the end of a long prompt."""
AROUND = 300
"""Characters kept on each side of an expected answer within a long prompt."""
MOST_PLACES = 8
"""Most places within a long prompt that are kept."""


@dataclass(frozen=True)
class AnsweredSample:
    """One sample with the model's answer: a prediction and what its prompt was.

    Attributes:
        prediction: the answer and its score, whose keys stand beside the others in JSON.
        prompt: parts of the prompt's text, each with the index of its first character: all of a short prompt; otherwise
            the beginning, the place of the first expected answer that occurs in it, and the end.
        prompt_characters: length of the whole prompt's text.
    """

    prediction: Prediction
    prompt: tuple[tuple[int, str], ...]
    prompt_characters: int

    def to_json(self) -> dict[str, Any]:
        """JSON values: those of the prediction, and the prompt's."""
        parts = [list(part) for part in self.prompt]
        return {**self.prediction.to_json(), "prompt": parts, "prompt_characters": self.prompt_characters}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AnsweredSample:
        """Rebuild from the output of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: if a field is missing or has a wrong type or value.
        """
        rest = dict(value)
        parts, length = rest.pop("prompt"), rest.pop("prompt_characters")
        if not isinstance(length, int) or not isinstance(parts, list):
            raise TypeError("prompt must be a list of parts, and prompt_characters a number")
        prompt = tuple((start, text) for start, text in parts)
        if not all(isinstance(start, int) and isinstance(text, str) for start, text in prompt):
            raise TypeError("each part of the prompt must be a pair of a number and a text")
        # In order and without overlap, or gaps() would count negative lengths.
        ends = [0, *(start + len(text) for start, text in prompt)]
        starts = [*(start for start, _ in prompt), length]
        if any(start < end for end, start in zip(ends, starts, strict=True)):
            raise ValueError("the parts of the prompt overlap or exceed it")
        return cls(Prediction.from_json(rest), prompt, length)


_LINES = Lines[SampleKey, AnsweredSample](
    key=lambda answered: answered.prediction.key,
    write=AnsweredSample.to_json,
    read=AnsweredSample.from_json,
    repeated=lambda old, new: (
        f"it is a second answer to sample {new.prediction.index} of {new.prediction.task}"
    ),
    advice="restore the file, or delete it to go on without its answers",
)


class Prompts:
    """Parts of the prompts that an evaluation asks, by sample."""

    def __init__(self) -> None:
        self._known: dict[SampleKey, tuple[tuple[tuple[int, str], ...], int]] = {}

    def add(self, sample: Sample) -> None:
        """Keep parts of a sample's prompt, its answer prefix included."""
        text = sample.whole
        spans = sample.details.get("spans", ())
        self._known[sample.key] = (prompt_parts(text, sample.references, spans), len(text))

    def answered(self, predictions: Mapping[SampleKey, Prediction]) -> list[AnsweredSample]:
        """The samples with their predictions, in the order in which they were asked."""
        return [AnsweredSample(predictions[key], *prompt) for key, prompt in self._known.items()]


def prompt_parts(
    text: str, references: Sequence[str], spans: Sequence[Sequence[int]] = ()
) -> tuple[tuple[int, str], ...]:
    """Parts of a prompt as in :class:`AnsweredSample`.

    Args:
        text: the whole prompt.
        references: strings that a correct answer contains.
        spans: first and last character (exclusive) of what the answer needs, if the task says so.
    """
    wanted = [(0, AT_EACH_END), (len(text) - AT_EACH_END, len(text))]
    found = [(start, end - start) for start, end in spans]
    if not found:
        places = [(text.find(each), len(each)) for each in references if each]
        # The first place in the text, of whichever reference it is.
        found = sorted((place, length) for place, length in places if place >= 0)[:1]
    # A long reference, such as a whole sentence, is cut as well.
    wanted += [
        (place - AROUND, place + min(length, AROUND) + AROUND) for place, length in found[:MOST_PLACES]
    ]
    # In a prompt that is little longer than the parts to keep, they overlap.
    merged: list[tuple[int, int]] = []
    for start, end in sorted((max(0, start), min(len(text), end)) for start, end in wanted):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple((start, text[start:end]) for start, end in merged)


def gaps(sample: AnsweredSample) -> Iterator[tuple[str, int]]:
    """Each part of a prompt with the number of characters left out after it."""
    starts = [*(start for start, _ in sample.prompt), sample.prompt_characters]
    for (_, text), (start, following) in zip(sample.prompt, pairwise(starts), strict=True):
        yield text, following - start - len(text)


def answers_file(when: str) -> str:
    """Name of the file with the prompts and answers ``before`` or ``after`` training."""
    return f"predictions-{when}.jsonl"


def write_answers(output: Path, when: str, answers: Sequence[AnsweredSample]) -> None:
    """Write prompts and answers into a run's folder, one JSON object a line; nothing if there are none."""
    if answers:
        lines = [json.dumps(each.to_json(), allow_nan=False) + "\n" for each in answers]
        write_text(output / answers_file(when), "".join(lines))


def read_answers(output: Path, when: str) -> list[AnsweredSample]:
    """Read what :func:`write_answers` wrote; empty if there is no such file.

    Raises:
        RopewalkError: if the file cannot be read, or a line is damaged.
    """
    return list(Log(output / answers_file(when), _LINES).known.values())
