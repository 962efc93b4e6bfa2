"""The record of an evaluation: written to its folder, judged again, and compared, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import summarise, task_result
from ropewalk.evaluation.comparison import ScoreDifference, compare
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.settings import CompareSettings
from ropewalk.evaluation.store import PREDICTIONS, RESULTS, Prediction, read_predictions, read_record
from ropewalk.evaluation.tasks.ruler.tasks import OVERALL, overall_results
from ropewalk.io.files import write_json
from ropewalk.io.results import Result


@dataclass(frozen=True)
class EvaluationResult(Result):
    """What was measured.

    Attributes:
        record: what results.json holds: model, settings, results, summary, versions.
        results: of the model, or the mean of the checkpoints'.
        checkpoints: of a mean, what each one is known by and its own results; empty for one model.
    """

    record: Mapping[str, Any]
    results: tuple[TaskResult, ...]
    checkpoints: tuple[tuple[Mapping[str, Any], tuple[TaskResult, ...]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What results.json holds, with None for numbers that JSON does not have."""
        plain: dict[str, Any] = json.loads(json.dumps(self.record), parse_constant=lambda name: None)
        return plain

    def write(self, out: Path) -> None:
        """Write results.json into a folder, last that of the mean; each is complete or not there."""
        for known, found in self.checkpoints:
            own = {key: value for key, value in self.record.items() if key not in ("checkpoints", "summary")}
            own |= {**known, "model": str(Path(str(self.record["model"])) / known["name"])}
            own["results"] = [result.to_json() for result in found]
            own["summary"] = summarise(found, self.record["settings"]["threshold"])
            write_json(out / known["name"] / RESULTS, EvaluationResult(own, found).to_json())
        write_json(out / RESULTS, self.to_json())


@dataclass(frozen=True)
class ComparisonResult(Result):
    """Two evaluations on the same samples.

    Attributes:
        a, b: ``path`` and ``model`` of each.
        seed: of the permutation test.
        differences: B against A, task by task and length by length.
    """

    a: Mapping[str, str]
    b: Mapping[str, str]
    seed: int
    differences: tuple[ScoreDifference, ...]


def compare_folders(config: CompareSettings) -> ComparisonResult:
    """B against A, paired by sample.

    Args:
        config: folders of finished evaluations.

    Raises:
        RopewalkError: if one holds no finished evaluation, or they have no task and length in common.
    """
    a, b, seed = config.a, config.b, config.seed
    (record_a, results_a), (record_b, results_b) = read_record(a), read_record(b)
    found = compare(results_a, results_b, seed)
    sides = [{"path": str(path), "model": str(r["model"])} for path, r in ((a, record_a), (b, record_b))]
    return ComparisonResult(sides[0], sides[1], seed, tuple(found))


def rescore(folder: Path) -> EvaluationResult:
    """Judge a folder's predictions again, without a model; results that have no predictions stay as they are.

    Args:
        folder: of a finished evaluation.

    Returns:
        The record with new results in it; the folder is left as it is.

    Raises:
        RopewalkError: if the folder has no results or predictions, or a result's predictions are not complete.
    """
    record, results = read_record(folder)
    groups: dict[tuple[str, str, int | None], list[Prediction]] = {}
    for prediction in read_predictions(folder / PREDICTIONS):
        groups.setdefault((prediction.suite, prediction.task, prediction.length), []).append(prediction)
    if not groups:
        raise RopewalkError(f"{folder} holds no predictions to score again: there is no {PREDICTIONS} in it")
    found = [_rescored(result, groups.get((result.suite, result.task, result.length))) for result in results]
    overall = {
        (each.task, each.length): each
        for each in overall_results(
            [r for r in found if r.suite == "ruler" and r.task != OVERALL], _left_out(found)
        )
    }
    found = [overall.get((r.task, r.length), r) if r.suite == "ruler" else r for r in found]
    threshold = record["settings"]["threshold"]
    anew = {"results": [r.to_json() for r in found], "summary": summarise(found, threshold)}
    return EvaluationResult({**record, **anew}, tuple(found))


def _rescored(result: TaskResult, predictions: Sequence[Prediction] | None) -> TaskResult:
    if predictions is None:
        return result
    if len(predictions) != result.n:
        raise RopewalkError(
            f"{result.task} at {result.length} tokens has {len(predictions)} predictions and was made of {result.n}; "
            "run the evaluation again to complete it"
        )
    ordered = sorted((each.scored_again() for each in predictions), key=lambda each: each.index)
    again = task_result(ordered, {})
    if again.details[SAMPLES] != result.details.get(SAMPLES):
        raise RopewalkError(
            f"the predictions of {result.task} at {result.length} tokens are of other samples"
        )
    return replace(again, details={**result.details, **again.details})


def _left_out(results: Sequence[TaskResult]) -> dict[str, str]:
    """What an earlier overall score did without, beyond the tasks that were not run."""
    not_run = {r.task for r in results if r.status != "ok"}
    overall = next((r for r in results if r.suite == "ruler" and r.task == OVERALL), None)
    left_out = overall.details.get("left_out", {}) if overall is not None else {}
    return {task: reason for task, reason in left_out.items() if task not in not_run}
