"""Predictions line by line, so that a killed run goes on and a score can be computed again without a model."""

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
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import TASKS_BEFORE, TaskResult
from ropewalk.evaluation.samples import Sample, Task, prompt_digest
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.io.digests import digest
from ropewalk.io.files import parse_json, replacing, write_json
from ropewalk.io.json_lines import append_line, check_types, read_lines

SampleKey = tuple[str, str, int, int]
KEYS_BEFORE = {"materials": "haystack_sources"}
"""Keys of an identity that had another name in version 0.1.0."""


_NoneType = type(None)
_PREDICTION_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("suite", "task", "prompt_sha256", "prediction", "metric"), (str,)),
    **dict.fromkeys(("length", "index", "prompt_tokens", "bos_count"), (int,)),
    **dict.fromkeys(("score", "fill"), (int, float)),
    "references": (list, tuple),
    "new_tokens": (int, _NoneType),
    "finished": (bool, _NoneType),
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
    def key(self) -> SampleKey:
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
        check_types(value, _PREDICTION_TYPES)
        if not all(isinstance(each, str) for each in value["references"]):
            raise TypeError(f"references are {value['references']!r}")
        if value["metric"] not in METRICS:
            raise ValueError(f"there is no metric {value['metric']!r}")
        if not 0 <= value["score"] <= 1:
            raise ValueError(f"score is {value['score']!r}, and not from 0 to 1")
        task = TASKS_BEFORE.get(value["task"], value["task"])
        return cls(**{**value, "task": task, "references": tuple(value["references"])})


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
    seen: set[SampleKey] = set()

    def parse(number: int, values: dict[str, Any]) -> Prediction:
        prediction = Prediction.from_json(values)
        if prediction.key in seen:
            raise ValueError(f"it repeats sample {prediction.index} of {prediction.task}")
        seen.add(prediction.key)
        return prediction

    return list(
        read_lines(path, parse, "restore the file, or delete the line: its sample is then asked again")
    )


SAMPLES_FORMAT = 1
"""Of the files and of the generators: what changes the prompts of a task raises it."""


def sample_identity(task: Task, encoder: PromptEncoder, length: int, count: int, seed: int) -> dict[str, Any]:
    """All that samples depend on, as JSON values."""
    return {
        "format": SAMPLES_FORMAT,
        "suite": task.suite,
        "task": task.name,
        "settings": dict(task.settings()),
        "tokenizer": tokenizer_identity(encoder.tokenizer)["sha256"],
        # Which token is BOS stands beside the backend, not in it.
        "bos": encoder.tokenizer.bos_token_id,
        "chat_template": digest(encoder.tokenizer.chat_template) if encoder.chat else None,
        "length": length,
        "count": count,
        "seed": seed,
    }


def stored_samples(
    task: Task, encoder: PromptEncoder, length: int, count: int, seed: int, folder: Path | None
) -> Iterator[Sample]:
    """The samples of a task and length: read where they were made before, else made and kept.

    Args:
        task, encoder, length, count, seed: as in :meth:`Task.samples`.
        folder: where samples are kept; None keeps none.

    Raises:
        RopewalkError: if the length is too short, or the folder or a file in it cannot be used.
    """
    if folder is None:
        yield from task.samples(encoder, length, count, seed)
        return
    identity = sample_identity(task, encoder, length, count, seed)
    path = folder / f"{task.suite}-{task.name}-{length}-{digest(identity)[:16]}.jsonl"
    if not path.is_file():
        made = task.samples(encoder, length, count, seed)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(identity) + "\n")
            written = 0
            for sample in made:
                file.write(json.dumps(sample.to_json()) + "\n")
                written += 1
            file.write(json.dumps({"samples": written}) + "\n")
    yield from _read_samples(path, identity)


def _read_samples(path: Path, identity: dict[str, Any]) -> Iterator[Sample]:
    try:
        with path.open("rb") as file:
            if parse_json(file.readline(), strict=True) != identity:
                raise RopewalkError(f"{path} holds other samples than its name says; delete it")
            value: Any = {}
            read = 0
            for line in file:
                value = parse_json(line, strict=True)
                if not isinstance(value, dict):
                    raise TypeError("a line of it is not a JSON object")
                if "samples" not in value:
                    yield Sample.from_json(value)
                    read += 1
            if value.get("samples") != read:
                raise RopewalkError(f"{path} ends early; delete it to make the samples again")
    except RopewalkError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RopewalkError(
            f"cannot read the samples in {path} ({error}); delete it to make them again"
        ) from error


ResultKey = tuple[str, str, int | None]


class ResultCache:
    """A JSONL file of results that grows by whole lines; without a path it is kept in memory alone.

    Raises:
        RopewalkError: if the file cannot be read, or naming a line that is no result.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[ResultKey, TaskResult] = {}
        if path is not None:
            advice = "restore the file, or delete the line: its task is then measured again"
            for result in read_lines(path, lambda _, values: TaskResult.from_json(values), advice):
                self._keep(result)

    def get(self, suite: str, task: str, length: int | None) -> TaskResult | None:
        """A result that is known."""
        return self.known.get((suite, task, length))

    def add(self, result: TaskResult) -> None:
        """Write one line.

        Raises:
            RunFailure: if it cannot be written; the lines before it stay.
        """
        if self.path is not None:
            append_line(self.path, result.to_json())
        self._keep(result)

    def _keep(self, result: TaskResult) -> None:
        self.known[result.suite, result.task, result.length] = result


RUN_FILE = "run.json"
PREDICTIONS = "predictions.jsonl"
RESULT_CACHE = "finished.jsonl"
RESULTS = "results.json"
RECORD_FORMAT = 1


def begin(out: Path, identity: Mapping[str, Any]) -> None:
    """Begin an evaluation in a folder, or see that it goes on with the same one.

    Args:
        out: the folder; made if need be.
        identity: all that the results depend on, JSON values.

    Raises:
        RopewalkError: if the folder holds another evaluation (the message says in what it differs) or anything
            else, or cannot be used.
    """
    saved = out / RUN_FILE
    if out.exists() and not out.is_dir():
        raise RopewalkError(f"{out} is a file; --out names a folder")
    wanted = json.loads(json.dumps({"format": RECORD_FORMAT, **identity}))
    if saved.is_file():
        begun = _read_json(saved)
        changed = _differences(begun, wanted)
        if changed:
            raise RopewalkError(
                f"{out} holds another evaluation: it differs in {', '.join(changed[:5])}; give another --out, or the "
                "same settings to go on with it"
            )
    elif out.is_dir() and any(not each.name.startswith(".") for each in out.iterdir()):
        raise RopewalkError(f"{out} is not empty and holds no evaluation; give another --out")
    else:
        write_json(saved, wanted)


def _differences(begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The keys in which two identities differ; of the settings, each one with both values.

    A folder of an earlier version also holds settings of suites that it does not run, and names its sources otherwise.
    """
    begun = {KEYS_BEFORE.get(key, key): value for key, value in begun.items()}
    there, asked = begun.get("settings") or {}, wanted.get("settings") or {}
    if isinstance(there, Mapping):
        begun = {**begun, "settings": {key: there[key] for key in asked if key in there}}
    changed = [key for key in sorted({*begun, *wanted}) if begun.get(key) != wanted.get(key)]
    if "settings" not in changed:
        return changed
    there, asked = begun.get("settings") or {}, wanted.get("settings") or {}
    if not isinstance(there, Mapping):
        return changed
    told = [
        f"{key} ({there.get(key)} there, {asked.get(key)} asked for)"
        for key in sorted({*there, *asked})
        if there.get(key) != asked.get(key)
    ]
    return told + [key for key in changed if key != "settings"]


def read_record(folder: Path) -> tuple[dict[str, Any], list[TaskResult]]:
    """A finished evaluation: its record, and the results in it.

    Args:
        folder: as given to ``--out``, or its results.json.

    Raises:
        RopewalkError: if there is none.
    """
    path = folder / RESULTS if folder.is_dir() else folder
    if not folder.exists():
        raise RopewalkError(f"{folder} does not exist; name the folder of a finished evaluation")
    if not path.is_file():
        raise RopewalkError(f"{folder} holds no finished evaluation: there is no {path.name} in it")
    record = _read_json(path)
    try:
        # What every record of an evaluation has; scoring again and comparing read them.
        check_types(record, {"model": (str,), "settings": (Mapping,), "results": (list,)})
        check_types(record["settings"], {"threshold": (int, float)})
        return record, [TaskResult.from_json(each) for each in record["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RopewalkError(f"{path} is no result of an evaluation: {error!r} is missing or wrong") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RopewalkError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RopewalkError(f"{path} is no record of an evaluation")
    return value


def model_digest(path_or_id: str) -> str | None:
    """SHA-256 over a checkpoint's configs and safetensors files, by their names and contents.

    Args:
        path_or_id: a folder, or a hub id whose files lie in the local cache.

    Returns:
        None where the weights are not at hand, as for a model behind a server.

    Raises:
        RopewalkError: if a file cannot be read.
    """
    folder = _folder(path_or_id)
    if folder is None:
        return None
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return None
    # The generation config names the tokens that end an answer.
    files = [*folder.glob("config.json"), *folder.glob("generation_config.json"), *weights]
    try:
        return digest([[path.name, _sha256(path)] for path in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {folder}: {error.strerror or error}") from error


def path_digest(path: Path) -> str:
    """SHA-256 over a file, or over all files of a folder with their names.

    Raises:
        RopewalkError: if something cannot be read.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    try:
        return digest([[each.relative_to(path).as_posix(), _sha256(each)] for each in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


def _folder(path_or_id: str) -> Path | None:
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path_or_id, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
