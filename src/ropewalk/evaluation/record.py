"""Records of evaluations: write them to a folder, rescore them and compare them, all without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import further_results, summarise, task_result
from ropewalk.evaluation.comparison import ScoreDifference, compare
from ropewalk.evaluation.predictions import Prediction, read_predictions
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.score_rows import score_records
from ropewalk.evaluation.settings import CompareSettings
from ropewalk.evaluation.tasks.ruler.tasks import OVERALL, overall_results
from ropewalk.evaluation.tasks.suite import WAITING
from ropewalk.io.files import field_fault, parse_json, write_json
from ropewalk.io.json_lines import check_types
from ropewalk.io.results import Result
from ropewalk.runs import held
from ropewalk.runs.store import RUN, Store

EVALUATION = "evaluation"
"""What the folder of an evaluation holds, as its records say."""
SCORES = "scores"
"""The step that measures a single model; those of a mean bear the names of their checkpoints."""
PREDICTIONS = "predictions.jsonl"
RESULT_LOG = "finished.jsonl"
RESULTS = "results.json"


def answers_file(when: str) -> str:
    """Name of the file with the answers of a training run ``before`` or ``after`` training."""
    return f"predictions-{when}.jsonl"


@dataclass(frozen=True)
class EvaluationResult(Result):
    """The result of an evaluation.

    Attributes:
        record: contents of results.json: model, settings, results, summary, versions.
        results: results of the model, or their mean over checkpoints.
        checkpoints: for a mean, the identity and the results of each checkpoint; empty for one model.
    """

    record: Mapping[str, Any]
    results: tuple[TaskResult, ...]
    checkpoints: tuple[tuple[Mapping[str, Any], tuple[TaskResult, ...]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the contents of results.json, with None for NaN and infinity, which JSON does not have."""
        # dumps writes NaN and Infinity, which are not JSON; reading them back makes them None.
        plain: dict[str, Any] = json.loads(json.dumps(self.record), parse_constant=lambda name: None)
        return plain

    def scores(self) -> list[dict[str, Any]]:
        return score_records({str(self.record["model"]): self.results})

    def write(self, out: Path) -> None:
        """Write results.json atomically; for a mean, first those of the checkpoints in subfolders."""
        for known, found in self.checkpoints:
            # Without the mean's list and summary: a checkpoint has its own summary, and no list.
            own = {key: value for key, value in self.record.items() if key not in ("checkpoints", "summary")}
            own |= {**known, "model": str(Path(str(self.record["model"])) / known["name"])}
            own["results"] = [result.to_json() for result in found]
            own["summary"] = summarise(found, self.record["settings"]["threshold"])
            write_json(out / known["name"] / RESULTS, EvaluationResult(own, found).to_json())
        # Last, so that a folder with this file has the files of all checkpoints too.
        write_json(out / RESULTS, self.to_json())


@dataclass(frozen=True)
class ComparisonResult(Result):
    """Two evaluations on the same samples.

    Attributes:
        a, b: ``path`` and ``model`` of each evaluation.
        seed: random seed of the permutation test.
        differences: B compared with A, for each task and length.
        notes: what differs between the prompts of the two, although they are paired; a sentence each.
    """

    a: Mapping[str, str]
    b: Mapping[str, str]
    seed: int
    differences: tuple[ScoreDifference, ...]
    notes: tuple[str, ...] = ()


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


def compare_folders(config: CompareSettings) -> ComparisonResult:
    """Compare evaluation B with evaluation A, paired by sample.

    Args:
        config: the folders of two finished evaluations, and the random seed.

    Raises:
        RopewalkError: if a folder has no finished evaluation, or the two have no task and length in common.
    """
    a, b, seed = config.a, config.b, config.seed
    (record_a, results_a), (record_b, results_b) = read_record(a), read_record(b)
    found = compare(results_a, results_b, seed)
    sides = [{"path": str(path), "model": str(r["model"])} for path, r in ((a, record_a), (b, record_b))]
    return ComparisonResult(sides[0], sides[1], seed, tuple(found), tuple(_other_bos(results_a, results_b)))


def _other_bos(a: Sequence[TaskResult], b: Sequence[TaskResult]) -> Iterator[str]:
    """A sentence if prompts of the same text began with BOS in one of two evaluations only.

    Whether they do depends on what counted the tokens: a server's ``/tokenize`` may add no BOS where the tokenizer's
    files say one.
    """
    counts = [
        {n for each in results for n in each.details.get("bos_count", ()) if each.status == "ok"}
        for results in (a, b)
    ]
    if all(counts) and counts[0] != counts[1]:
        one, other = (" or ".join(map(str, sorted(each))) for each in counts)
        yield (
            f"prompts have {one} BOS tokens in A and {other} in B, which may change scores; evaluate both with the "
            "same --tokenizer"
        )


def rescore(folder: Path) -> EvaluationResult:
    """Score the stored predictions of an evaluation again, without a model.

    Results without predictions, such as perplexities, are kept.

    Args:
        folder: folder of a finished evaluation; not modified.

    Returns:
        The record with the new results.

    Raises:
        RopewalkError: if the folder has no results or predictions, or the predictions of a result are incomplete.
    """
    record, results = read_record(folder)
    groups: dict[tuple[str, str, int | None], list[Prediction]] = {}
    for prediction in read_predictions(folder / PREDICTIONS):
        groups.setdefault((prediction.suite, prediction.task, prediction.length), []).append(prediction)
    if not groups:
        raise RopewalkError(f"{folder} has no predictions to score again: {PREDICTIONS} is missing or empty")
    found = [
        again
        for result in results
        # Further results of the same answers follow from them too.
        if "answers_of" not in result.details
        for again in _rescored(result, groups.get((result.suite, result.task, result.length)))
    ]
    # Overall scores have no predictions of their own and follow from the tasks scored again.
    overall = {
        (each.suite, each.length): each
        for suite in {r.suite for r in found if r.task == OVERALL}
        for own in [[r for r in found if r.suite == suite]]
        for each in overall_results([r for r in own if r.task != OVERALL], _left_out(own))
    }
    found = [overall.get((r.suite, r.length), r) if r.task == OVERALL else r for r in found]
    threshold = record["settings"]["threshold"]
    anew = {"results": [r.to_json() for r in found], "summary": summarise(found, threshold)}
    return EvaluationResult({**record, **anew}, tuple(found))


def held_evaluation(folder: Path) -> AbstractContextManager[Store]:
    """The store of a finished evaluation, of which no other process writes meanwhile.

    Args:
        folder: folder of the evaluation, or of a checkpoint in that of a mean.

    Raises:
        RopewalkError: on entry, if another process writes to the folder.
    """
    return held(folder if (folder / RUN).is_file() else folder.parent, EVALUATION, resume=True)


def rescore_folder(folder: Path, present: Callable[[EvaluationResult], None]) -> EvaluationResult:
    """Score the stored predictions of an evaluation again, and write the results to its folder.

    Args:
        folder: folder of a finished evaluation, or of a checkpoint in that of a mean.
        present: called with the result before ``results.json`` is written, for example to draw figures.

    Raises:
        RopewalkError: as for :func:`rescore`, or if another process writes to the folder.
    """
    # First, because it says best what is missing.
    rescore(folder)
    with held_evaluation(folder) as store:
        result = rescore(folder)
        present(result)
        result.write(folder)
        name = SCORES if (folder / RUN).is_file() else folder.name
        record = store.record(name)
        if record is not None and record.done is not None:
            store.renew(name, {**record.done.value, "results": result.to_json()["results"]})
    return result


def _rescored(result: TaskResult, predictions: Sequence[Prediction] | None) -> list[TaskResult]:
    # Answers that wait for a judge have no score yet.
    if predictions is None or not all(each.has_score for each in predictions):
        return [result]
    if len(predictions) != result.n:
        raise RopewalkError(
            f"the result of {result.task} at {result.length} tokens was computed from {result.n} predictions, but "
            f"{PREDICTIONS} has {len(predictions)}; run the evaluation again to complete the predictions"
        )
    # Answers were logged as they arrived, in any order.
    ordered = sorted((each.scored_again() for each in predictions), key=lambda each: each.index)
    rejected = {each["index"]: each["reason"] for each in result.details.get("rejected", ())}
    again = task_result(ordered, {}, rejected)
    if again.details[SAMPLES] != result.details.get(SAMPLES):
        raise RopewalkError(
            f"{PREDICTIONS} and {RESULTS} have different samples of {result.task} at {result.length} tokens; restore "
            f"{PREDICTIONS}, or run the evaluation again in a new folder"
        )
    # Facts about the task stay; what follows from the predictions is replaced.
    details = {key: each for key, each in {**result.details, **again.details}.items() if key != WAITING}
    return [replace(again, details=details), *further_results(ordered, details)]


def _left_out(results: Sequence[TaskResult]) -> dict[str, str]:
    """Return the tasks of a suite that its earlier overall score left out, apart from those not run, with reasons."""
    not_run = {r.task for r in results if r.status != "ok"}
    overall = next((r for r in results if r.task == OVERALL), None)
    left_out = overall.details.get("left_out", {}) if overall is not None else {}
    return {task: reason for task, reason in left_out.items() if task not in not_run}
