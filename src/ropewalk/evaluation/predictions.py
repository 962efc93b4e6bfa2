"""Predictions: a model's answers with their scores, line by line, so that a run resumes and is scored again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.backends.protocol import END_OF_THOUGHTS
from ropewalk.evaluation.excerpts import Part, excerpt, gaps
from ropewalk.evaluation.prompt import answer_in
from ropewalk.evaluation.samples import Sample, prompt_digest
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.suite import JUDGED, VERDICTS
from ropewalk.io.files import write_text
from ropewalk.io.json_lines import check_types
from ropewalk.runs import Lines, Log

SampleKey = tuple[str, str, int, int]

_NoneType = type(None)
_PREDICTION_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("suite", "task", "prompt_sha256", "prediction", "metric"), (str,)),
    **dict.fromkeys(("length", "index", "prompt_tokens", "bos_count"), (int,)),
    **dict.fromkeys(("score", "fill"), (int, float)),
    "references": (list, tuple),
    "new_tokens": (int, _NoneType),
    **dict.fromkeys(("finished", "thoughts_opened"), (bool, _NoneType)),
    "details": (dict,),
    "prompt": (list, tuple),
    "prompt_characters": (int, _NoneType),
}
"""Accepted types of a prediction's values in JSON."""


@dataclass(frozen=True)
class Prediction:
    """A model's answer to one sample, with everything that scoring needs and an excerpt of the prompt.

    Attributes:
        suite, task, length, index: suite, task, length in tokens and number of the sample.
        prompt_sha256: SHA-256 of the prompt, with which ropewalk detects answers to a different prompt.
        prediction: the text as generated, without the prompt.
        references: strings that a correct answer contains.
        metric: name of the metric.
        score: score from 0 to 1.
        prompt_tokens, bos_count: number of tokens in the prompt as the model read it, and number of these tokens that
            are BOS.
        fill: tokens of the prompt plus tokens of the longest allowed answer, as a fraction of ``length``.
        new_tokens: number of tokens of the answer; None if a server does not report it.
        finished: whether the model ended the answer before it reached the token limit; None if unknown.
        details: what the task records about the sample, such as the depth of a needle.
        thoughts_opened: whether the prompt ended inside the model's thoughts, which are not scored; None, and left out
            of files, if the whole text is the answer: without a chat template.
        prompt: parts of the prompt's text, each with the index of its first character and, in a chat of several turns,
            the role of its turn: all of a short prompt; otherwise the beginning, the place of what the answer needs,
            and the end. Empty, and left out of files, in evaluations of earlier versions.
        prompt_characters: length of the prompt's text in characters; None, and left out of files, where ``prompt`` is.
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
    thoughts_opened: bool | None = None
    prompt: tuple[Part, ...] = ()
    prompt_characters: int | None = None

    @property
    def answer(self) -> str:
        """The part of the text that is scored: what follows the thoughts of a thinking model."""
        return answer_in(self.prediction, self.thoughts_opened)

    @property
    def thoughts(self) -> str:
        """A thinking model's thoughts before its answer; all of the text if they did not end."""
        if self.thoughts_opened is None:
            return ""
        before, ended, _ = self.prediction.rpartition(END_OF_THOUGHTS)
        return before if ended else "" if self.answer else self.prediction

    @property
    def has_score(self) -> bool:
        """Whether the answer has a score; without a verdict, an answer that a judge must read has none yet."""
        return self.metric != JUDGED or VERDICTS in self.details

    @property
    def key(self) -> SampleKey:
        return self.suite, self.task, self.length, self.index

    def scored_again(self) -> Prediction:
        """Return the prediction with a score computed anew by its metric."""
        score = METRICS[self.metric](self.answer, self.references, self.details)
        return Prediction(**{**self.__dict__, "score": score})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; those that are not known are left out."""
        # Without asdict, which would copy every part of the prompt.
        parts = [[start, text, *([role] if role else [])] for start, text, role in self.prompt]
        values = {**self.__dict__, "references": list(self.references), "details": dict(self.details)}
        values["prompt"] = parts or None
        optional = ("thoughts_opened", "prompt", "prompt_characters")
        return {key: value for key, value in values.items() if value is not None or key not in optional}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prediction:
        """Rebuild a prediction from the output of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: if a field is missing or has a wrong type or value.
        """
        parts, characters = value.get("prompt", []), value.get("prompt_characters")
        check_types(
            {"thoughts_opened": None, "prompt": parts, "prompt_characters": None, **value}, _PREDICTION_TYPES
        )
        if not all(isinstance(each, str) for each in value["references"]):
            raise TypeError(f"references must be strings, got {value['references']!r}")
        if value["metric"] not in METRICS:
            raise ValueError(f"unknown metric {value['metric']!r}")
        if not 0 <= value["score"] <= 1:
            raise ValueError(f"score must be from 0 to 1, got {value['score']!r}")
        return cls(
            **{**value, "references": tuple(value["references"]), "prompt": _read_parts(parts, characters)}
        )


def _read_parts(values: Sequence[Any], characters: int | None) -> tuple[Part, ...]:
    """Parts of a prompt from their JSON values; raises for what :meth:`Prediction.to_json` cannot have written."""
    if (characters is None) != (not values):
        raise TypeError("a prompt's parts and its number of characters must stand together")
    parts = tuple((start, text, *(role or [""])) for start, text, *role in values)
    if not all(list(map(type, part)) == [int, str, str] for part in parts):
        raise TypeError("each part of the prompt must have a number, a text, and perhaps a role")
    # In order and without overlap, or gaps() would count negative lengths.
    if any(left_out < 0 for _, left_out in gaps(parts, characters or 0)) or (parts and parts[0][0] < 0):
        raise ValueError("the parts of the prompt overlap or exceed it")
    return parts


def predicted(sample: Sample, answer: Answer, thoughts_opened: bool | None = None) -> Prediction:
    """Score an answer to a sample.

    Args:
        sample, answer: the sample, and its answer as generated.
        thoughts_opened: as in :class:`Prediction`.
    """
    return Prediction(
        sample.suite,
        sample.task,
        sample.length,
        sample.index,
        prompt_digest(sample),
        answer.text,
        sample.references,
        sample.metric,
        METRICS[sample.metric](answer_in(answer.text, thoughts_opened), sample.references, sample.details),
        sample.prompt_tokens,
        sample.bos_count,
        sample.fill,
        answer.new_tokens,
        answer.finished,
        sample.details,
        thoughts_opened,
        excerpt(sample),
        len(sample.whole),
    )


_PREDICTIONS = Lines[SampleKey, Prediction](
    key=lambda prediction: prediction.key,
    write=Prediction.to_json,
    read=Prediction.from_json,
    repeated=lambda old, new: f"it is a second prediction for sample {new.index} of {new.task}",
    advice="restore the file, or delete the line to generate that sample's answer again",
    # A fast server gives hundreds of answers a second; the file is written again, and synced, at the end.
    sync_seconds=1.0,
)


class PredictionLog:
    """A JSONL file of predictions that grows by whole lines; without a path, predictions stay in memory.

    Raises:
        RopewalkError: if the file cannot be read or a line of it is damaged, see :func:`read_predictions`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._log = Log(path, _PREDICTIONS)
        self.path = path
        self.rejected: dict[SampleKey, str] = {}
        """Samples that a server rejected in this run, with its reasons. Not written: a resumed run asks again."""

    @property
    def known(self) -> dict[SampleKey, Prediction]:
        """The predictions so far."""
        return self._log.known

    def has(self, key: SampleKey) -> bool:
        """Whether a sample was answered or rejected."""
        return key in self.known or key in self.rejected

    def rejected_of(self, suite: str, task: str, length: int) -> dict[int, str]:
        """The rejected samples of one task and length by their index, with the server's reason."""
        return {
            key[3]: reason
            for key, reason in sorted(self.rejected.items())
            if key[:3] == (suite, task, length)
        }

    def get(self, sample: Sample) -> Prediction | None:
        """Return the stored prediction for a sample, or None.

        Raises:
            RopewalkError: if the stored prediction for this sample's key answers another prompt.
        """
        found = self.known.get(sample.key)
        if found is not None and found.prompt_sha256 != prompt_digest(sample):
            raise RopewalkError(
                f"the answer to sample {sample.index} of {sample.task} at {sample.length} tokens in {self.path} "
                "belongs to a different prompt; give another --out"
            )
        return found

    def add(self, prediction: Prediction) -> None:
        """Append a prediction to the file.

        Raises:
            RopewalkError: if the sample has a prediction already.
            RunFailure: if the line cannot be written; earlier lines stay intact.
        """
        if prediction.key in self.known:
            raise RopewalkError(
                f"sample {prediction.index} of {prediction.task} at {prediction.length} tokens already has an "
                "answer; add one answer per sample"
            )
        self._log.add(prediction)


def read_predictions(path: Path) -> list[Prediction]:
    """Read the predictions of a file in order; none if there is no file. An incomplete last line is skipped.

    Raises:
        RopewalkError: if the file cannot be read, a line is not a prediction, or two lines are for the same sample;
            the message gives the line number.
    """
    return list(Log(path, _PREDICTIONS).known.values())


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write the predictions of a finished evaluation, those of each task and length in the order of their index.

    Args:
        path: the file; not written if there are no predictions.
        predictions: task by task and length by length, answers in any order.

    Raises:
        RopewalkError: if the file cannot be written.
    """
    groups = [
        sorted(own, key=lambda each: each.index) for _, own in groupby(predictions, lambda each: each.key[:3])
    ]
    if groups:
        lines = [json.dumps(each.to_json(), allow_nan=False) + "\n" for own in groups for each in own]
        write_text(path, "".join(lines))
