"""Predictions line by line, so that a killed run goes on and a score can be computed again without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.sample import Sample
from ropewalk.evaluation.scoring import METRICS
from ropewalk.io.json_lines import append_line, check_types, read_lines

Key = tuple[str, str, int, int]


_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("suite", "task", "prompt_sha256", "prediction", "metric"), (str,)),
    **dict.fromkeys(("length", "index", "prompt_tokens", "bos_count"), (int,)),
    **dict.fromkeys(("score", "fill"), (int, float)),
    "references": (list, tuple),
    "new_tokens": (int, _NONE),
    "finished": (bool, _NONE),
    "details": (dict,),
}
"""Types of a prediction's values in JSON."""


@dataclass(frozen=True)
class Prediction:
    """What a model made of one sample: all that scoring it needs, and no prompt.

    Attributes:
        suite, task, length, index: of the sample.
        prompt_sha256: of its text and answer prefix, so that a prediction is never taken for another prompt's.
        prediction: the text of the new tokens alone.
        references: what a right answer holds.
        metric: how it is judged.
        score: share of 1.
        prompt_tokens, bos_count: of the prompt as the model read it.
        fill: share of the length that prompt and room for the answer take.
        new_tokens: tokens of the answer; None where a server does not say.
        finished: whether the model ended by itself; None where unknown.
        details: of the sample.
    """

    suite: str
    task: str
    length: int
    index: int
    prompt_sha256: str
    prediction: str
    references: tuple[str, ...]
    metric: str
    score: float
    prompt_tokens: int
    bos_count: int
    fill: float
    new_tokens: int | None
    finished: bool | None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.suite, self.task, self.length, self.index

    def scored_again(self) -> Prediction:
        """The same prediction, judged by the metric as it is now."""
        score = METRICS[self.metric](self.prediction, self.references)
        return Prediction(**{**self.__dict__, "score": score})

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prediction:
        """What :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: if it is something else.
        """
        check_types(value, _TYPES)
        if not all(isinstance(each, str) for each in value["references"]):
            raise TypeError(f"references are {value['references']!r}")
        if value["metric"] not in METRICS:
            raise ValueError(f"there is no metric {value['metric']!r}")
        if not 0 <= value["score"] <= 1:
            raise ValueError(f"score is {value['score']!r}, and not from 0 to 1")
        return cls(**{**value, "references": tuple(value["references"])})


def predicted(sample: Sample, answer: Answer) -> Prediction:
    """An answer to a sample, judged."""
    return Prediction(
        sample.suite,
        sample.task,
        sample.length,
        sample.index,
        prompt_digest(sample),
        answer.text,
        sample.references,
        sample.metric,
        METRICS[sample.metric](answer.text, sample.references),
        sample.prompt_tokens,
        sample.bos_count,
        sample.fill,
        answer.new_tokens,
        answer.finished,
        sample.details,
    )


def prompt_digest(sample: Sample) -> str:
    """SHA-256 of what the model is asked."""
    parts = f"{len(sample.text)}:{sample.text}{sample.answer_prefix}"
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


class PredictionLog:
    """A JSONL file of predictions that grows by whole lines; without a path it is kept in memory alone.

    Raises:
        RopewalkError: as :func:`read_predictions`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known = {} if path is None else {each.key: each for each in read_predictions(path)}

    def get(self, sample: Sample) -> Prediction | None:
        """What is known of a sample.

        Raises:
            RopewalkError: if the file holds a prediction for another prompt under this sample's name.
        """
        found = self.known.get(sample.key)
        if found is not None and found.prompt_sha256 != prompt_digest(sample):
            raise RopewalkError(
                f"{self.path} holds an answer to another prompt for {sample.task} at {sample.length} tokens, sample "
                f"{sample.index}; give another --out"
            )
        return found

    def add(self, prediction: Prediction) -> None:
        """Write one line.

        Raises:
            RopewalkError: if the sample has a prediction already.
            RunFailure: if it cannot be written; the lines before it stay.
        """
        if prediction.key in self.known:
            raise RopewalkError(f"{prediction.task}, sample {prediction.index}, was answered twice")
        if self.path is not None:
            append_line(self.path, prediction.to_json())
        self.known[prediction.key] = prediction


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions of a file, in its order; none if there is no file. An unfinished last line is passed over.

    Raises:
        RopewalkError: if the file cannot be read, or naming a line that is no prediction, or a sample's second.
    """
    seen: set[Key] = set()

    def parse(number: int, values: dict[str, Any]) -> Prediction:
        prediction = Prediction.from_json(values)
        if prediction.key in seen:
            raise ValueError(f"it repeats sample {prediction.index} of {prediction.task}")
        seen.add(prediction.key)
        return prediction

    return list(
        read_lines(path, parse, "restore the file, or delete the line: its sample is then asked again")
    )
