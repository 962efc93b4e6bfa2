"""Predictions line by line, so that a killed run goes on and a score can be computed again without a model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.sample import Sample
from ropewalk.evaluation.scoring import METRICS

Key = tuple[str, str, int, int]


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
        """What :meth:`to_json` wrote."""
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

    A line that a killed run left unfinished is cut off when the file is opened again.

    Raises:
        RopewalkError: if the file holds what is no prediction, or the same sample twice.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[Key, Prediction] = {}
        self._file: Any = None
        if path is not None:
            for prediction in read_predictions(path, mend=True):
                self.known[prediction.key] = prediction

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
            RunFailure: if it cannot be written; the lines before it stay.
        """
        if prediction.key in self.known:
            raise RopewalkError(f"{prediction.task}, sample {prediction.index}, was answered twice")
        if self.path is not None:
            line = json.dumps(prediction.to_json()) + "\n"
            try:
                if self._file is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self.path.open("ab", buffering=0)
                append_line(self._file, line)
            except OSError as error:
                raise RunFailure(
                    f"cannot write {self.path}: {error.strerror or error}; the answers before are kept, and the same "
                    "command goes on from them"
                ) from error
        self.known[prediction.key] = prediction

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def append_line(file: Any, line: str) -> None:
    """Write a whole ASCII line at the end of an unbuffered file, or nothing of it.

    Raises:
        OSError: if the disk is full, say; what was written of the line is cut off again.
    """
    end = file.seek(0, os.SEEK_END)
    view = memoryview(line.encode("ascii"))
    try:
        while view:
            view = view[file.write(view) :]
    except OSError:
        file.truncate(end)
        raise


def read_predictions(path: Path, mend: bool = False) -> Iterable[Prediction]:
    """The predictions of a file, in its order; none if there is no file.

    Args:
        path: of the JSONL file.
        mend: cut an unfinished last line off; otherwise it is passed over.

    Raises:
        RopewalkError: if the file cannot be read, holds what is no prediction, or the same sample twice.
    """
    if not path.exists():
        return
    seen: set[Key] = set()
    complete = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                complete += len(line)
                try:
                    prediction = Prediction.from_json(json.loads(line))
                    known = prediction.key in seen
                except (ValueError, TypeError, KeyError) as error:
                    raise RopewalkError(f"line {number} of {path} is no prediction: {error}") from error
                if known:
                    raise RopewalkError(f"line {number} of {path} repeats a sample of {prediction.task}")
                seen.add(prediction.key)
                yield prediction
        if mend and path.stat().st_size > complete:
            os.truncate(path, complete)
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
