"""Store predictions line by line, so that an interrupted run can resume and be rescored without a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.data.tokens.tokenise import tokenizer_identity
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.prompt import PromptEncoder, answer_in
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.samples import Sample, Task, prompt_digest
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.io.digests import digest
from ropewalk.io.files import field_fault, parse_json, replacing
from ropewalk.io.json_lines import check_types
from ropewalk.models.checkpoint.origin import cached_folder
from ropewalk.models.checkpoint.weights import weight_files
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
}
"""Accepted types of a prediction's values in JSON."""


@dataclass(frozen=True)
class Prediction:
    """A model's answer to one sample, with everything that scoring needs but without the prompt.

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

    @property
    def answer(self) -> str:
        """The part of the text that is scored: what follows the thoughts of a thinking model."""
        return answer_in(self.prediction, self.thoughts_opened)

    @property
    def key(self) -> SampleKey:
        return self.suite, self.task, self.length, self.index

    def scored_again(self) -> Prediction:
        """Return the prediction with a score computed anew by its metric."""
        score = METRICS[self.metric](self.answer, self.references)
        return Prediction(**{**self.__dict__, "score": score})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; ``thoughts_opened`` only if it is known."""
        values = asdict(self)
        return (
            values
            if self.thoughts_opened is not None
            else {k: v for k, v in values.items() if k != "thoughts_opened"}
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prediction:
        """Rebuild a prediction from the output of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: if a field is missing or has a wrong type or value.
        """
        check_types({"thoughts_opened": None, **value}, _PREDICTION_TYPES)
        if not all(isinstance(each, str) for each in value["references"]):
            raise TypeError(f"references must be strings, got {value['references']!r}")
        if value["metric"] not in METRICS:
            raise ValueError(f"unknown metric {value['metric']!r}")
        if not 0 <= value["score"] <= 1:
            raise ValueError(f"score must be from 0 to 1, got {value['score']!r}")
        return cls(**{**value, "references": tuple(value["references"])})


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
        METRICS[sample.metric](answer_in(answer.text, thoughts_opened), sample.references),
        sample.prompt_tokens,
        sample.bos_count,
        sample.fill,
        answer.new_tokens,
        answer.finished,
        sample.details,
        thoughts_opened,
    )


_PREDICTIONS = Lines[SampleKey, Prediction](
    key=lambda prediction: prediction.key,
    write=Prediction.to_json,
    read=Prediction.from_json,
    repeated=lambda old, new: f"it is a second prediction for sample {new.index} of {new.task}",
    advice="restore the file, or delete the line to generate that sample's answer again",
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


SAMPLES_FORMAT = 1
"""Version of the sample files and generators; increase it with every change that alters a task's prompts."""


def sample_identity(task: Task, encoder: PromptEncoder, length: int, count: int, seed: int) -> dict[str, Any]:
    """Return everything that the samples depend on, as JSON values."""
    return {
        "format": SAMPLES_FORMAT,
        "suite": task.suite,
        "task": task.name,
        "settings": dict(task.settings()),
        "tokenizer": tokenizer_identity(encoder.tokenizer)["sha256"],
        # The tokenizer's digest covers its backend, which does not say which token is BOS.
        "bos": encoder.tokenizer.bos_token_id,
        "chat_template": digest(encoder.tokenizer.chat_template) if encoder.chat else None,
        # Samples of prompts without a template are those of earlier versions.
        **({"system": encoder.system, "thinking": encoder.thinking} if encoder.chat else {}),
        **({"as_turns": True} if encoder.as_turns else {}),
        "length": length,
        "count": count,
        "seed": seed,
    }


def stored_samples(
    task: Task, encoder: PromptEncoder, length: int, count: int, seed: int, folder: Path | None
) -> Iterator[Sample]:
    """Read the samples of a task and length from the cache, or generate and cache them.

    Args:
        task: generates the samples.
        encoder: encodes the prompts and counts their tokens.
        length: maximum number of tokens of prompt and answer together.
        count: number of samples.
        seed: random seed.
        folder: folder of cached samples; None disables the cache.

    Raises:
        RopewalkError: if the length is too short, or the folder or a file in it cannot be used.
    """
    if folder is None:
        yield from task.samples(encoder, length, count, seed)
        return
    identity = sample_identity(task, encoder, length, count, seed)
    # The digest covers everything that decides the samples, so a changed task never reads another's file.
    path = folder / f"{task.suite}-{task.name}-{length}-{digest(identity)[:16]}.jsonl"
    # Two processes may both generate them: each renames a file of its own into place, and both are equal.
    if not path.is_file():
        made = task.samples(encoder, length, count, seed)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(identity) + "\n")
            written = 0
            for sample in made:
                file.write(json.dumps(sample.to_json()) + "\n")
                written += 1
            # The count at the end shows a reader that the file is complete.
            file.write(json.dumps({"samples": written}) + "\n")
    yield from _read_samples(path, identity)


def _read_samples(path: Path, identity: dict[str, Any]) -> Iterator[Sample]:
    try:
        with path.open("rb") as file:
            if parse_json(file.readline(), strict=True) != identity:
                raise RopewalkError(
                    f"the samples in {path} were generated with settings that do not match the file's name; delete "
                    "the file to generate the samples again"
                )
            value: Any = {}
            read = 0
            # One line at a time, because a file of long prompts may not fit in memory.
            for line in file:
                value = parse_json(line, strict=True)
                if not isinstance(value, dict):
                    raise TypeError("a line is not a JSON object")
                # Every line is a sample but the last, which has their number.
                if "samples" not in value:
                    yield Sample.from_json(value)
                    read += 1
            if value.get("samples") != read:
                raise RopewalkError(f"{path} is incomplete; delete the file to generate the samples again")
    # RopewalkError is a ValueError, which the next clause would wrap.
    except RopewalkError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RopewalkError(
            f"cannot read the samples in {path} ({field_fault(error)}); delete the file to generate the samples again"
        ) from error


ResultKey = tuple[str, str, int | None]

_RESULTS = Lines[ResultKey, TaskResult](
    key=lambda result: (result.suite, result.task, result.length),
    write=TaskResult.to_json,
    read=TaskResult.from_json,
    # A later result replaces an earlier one: an incomplete group of lm_eval is measured again.
    repeated=lambda old, new: None,
    advice="restore the file, or delete the line to measure its task again",
)


class ResultCache:
    """A JSONL file of results that grows by whole lines; without a path, results stay in memory.

    Raises:
        RopewalkError: if the file cannot be read or a line is not a result; the message gives the line number.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._log = Log(path, _RESULTS)

    @property
    def known(self) -> dict[ResultKey, TaskResult]:
        """The results so far."""
        return self._log.known

    def get(self, suite: str, task: str, length: int | None) -> TaskResult | None:
        """Return the stored result, or None."""
        return self.known.get((suite, task, length))

    def add(self, result: TaskResult) -> None:
        """Append a result to the file.

        Raises:
            RunFailure: if the line cannot be written; earlier lines stay intact.
        """
        self._log.add(result)


EVALUATION = "evaluation"
"""What the folder of an evaluation holds, as its records say."""
SCORES = "scores"
"""The step that measures a single model; those of a mean bear the names of their checkpoints."""
PREDICTIONS = "predictions.jsonl"
RESULT_CACHE = "finished.jsonl"
RESULTS = "results.json"


def read_record(folder: Path) -> tuple[dict[str, Any], list[TaskResult]]:
    """Read the record of a finished evaluation and its results.

    Args:
        folder: the folder that was given to ``--out``, or its results.json.

    Raises:
        RopewalkError: if there is no finished evaluation, or its results.json is not valid.
    """
    path = folder / RESULTS if folder.is_dir() else folder
    if not folder.exists():
        raise RopewalkError(
            f"the folder {str(folder)!r} does not exist; name the folder of a finished evaluation"
        )
    if not path.is_file():
        raise RopewalkError(
            f"{folder} has no finished evaluation, because {path.name} is missing; run the evaluation to its end first"
        )
    record = _read_json(path)
    try:
        # Check only what rescoring and comparing read; records of older versions differ in the rest.
        check_types(record, {"model": (str,), "settings": (Mapping,), "results": (list,)})
        check_types(record["settings"], {"threshold": (int, float)})
        return record, [TaskResult.from_json(each) for each in record["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RopewalkError(f"{path} is not the result of an evaluation: {field_fault(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RopewalkError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RopewalkError(f"{path} is not a record of an evaluation: it must contain a JSON object")
    return value


def model_digest(path_or_id: str) -> str | None:
    """Compute the SHA-256 digest of a checkpoint's configs, index and files of weights, over names and contents.

    Args:
        path_or_id: a folder, or a Hub id whose files are in the local cache.

    Returns:
        The digest; None if the weights are not on this machine.

    Raises:
        RopewalkError: if a file cannot be read, or as :func:`ropewalk.models.checkpoint.weights.weight_files` does.
    """
    folder, weights = cached_folder(path_or_id), weight_files(path_or_id)
    if folder is None or not weights:
        return None
    # The generation config affects the results: it lists the tokens that end an answer.
    files = [*folder.glob("config.json"), *folder.glob("generation_config.json"), *weights]
    try:
        return digest([[path.relative_to(folder).as_posix(), _sha256(path)] for path in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {folder}: {error.strerror or error}") from error


def path_digest(path: Path) -> str:
    """Compute the SHA-256 digest of a file, or of the names and contents of all files in a folder.

    Raises:
        RopewalkError: if a file cannot be read.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    try:
        return digest([[each.relative_to(path).as_posix(), _sha256(each)] for each in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
