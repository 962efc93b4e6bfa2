"""The folder of an evaluation: what was measured, how, what came out; written so that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import (
    OVERALL,
    effective_lengths,
    overall_results,
    task_result,
    weighted_averages,
)
from ropewalk.evaluation.predictions import Prediction, read_predictions
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.tasks.needle import depth_details
from ropewalk.io.files import parse_json, write_json
from ropewalk.io.json_lines import check_types

RUN = "run.json"
PREDICTIONS = "predictions.jsonl"
FINISHED = "finished.jsonl"
RESULTS = "results.json"
FORMAT = 1


def begin(out: Path, identity: Mapping[str, Any]) -> None:
    """Begin an evaluation in a folder, or see that it goes on with the same one.

    Args:
        out: the folder; made if need be.
        identity: all that the results depend on, JSON values.

    Raises:
        RopewalkError: if the folder holds another evaluation (the message says in what it differs) or anything
            else, or cannot be used.
    """
    saved = out / RUN
    if out.exists() and not out.is_dir():
        raise RopewalkError(f"{out} is a file; --out names a folder")
    wanted = json.loads(json.dumps({"format": FORMAT, **identity}))
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
    """The keys in which two identities differ; of the settings, each one with both values."""
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


def summarise(results: Sequence[TaskResult], threshold: float) -> dict[str, Any]:
    """The few numbers that stand for the results: effective lengths, and RULER's averages over lengths."""
    overall = [r for r in results if r.suite == "ruler" and r.task == OVERALL]
    return {
        "effective_length": [each.to_json() for each in effective_lengths(results, threshold)],
        "ruler_weighted_average": weighted_averages(overall),
    }


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


def rescore(folder: Path) -> tuple[dict[str, Any], list[TaskResult]]:
    """Judge a folder's predictions again, without a model; results that have no predictions stay as they are.

    Args:
        folder: of a finished evaluation.

    Returns:
        The record with new results in it, and these.

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
    return {**record, "results": [r.to_json() for r in found], "summary": summarise(found, threshold)}, found


def _rescored(result: TaskResult, predictions: Sequence[Prediction] | None) -> TaskResult:
    if predictions is None:
        return result
    if len(predictions) != result.n:
        raise RopewalkError(
            f"{result.task} at {result.length} tokens has {len(predictions)} predictions and was made of {result.n}; "
            "run the evaluation again to complete it"
        )
    ordered = sorted((each.scored_again() for each in predictions), key=lambda each: each.index)
    more = depth_details(ordered) if result.suite == "needle" else {}
    again = task_result(ordered, {})
    if again.details[SAMPLES] != result.details.get(SAMPLES):
        raise RopewalkError(
            f"the predictions of {result.task} at {result.length} tokens are of other samples"
        )
    return replace(again, details={**result.details, **again.details, **more})


def _left_out(results: Sequence[TaskResult]) -> dict[str, str]:
    """What an earlier overall score did without, beyond the tasks that were not run."""
    not_run = {r.task for r in results if r.status != "ok"}
    overall = next((r for r in results if r.suite == "ruler" and r.task == OVERALL), None)
    left_out = overall.details.get("left_out", {}) if overall is not None else {}
    return {task: reason for task, reason in left_out.items() if task not in not_run}


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
