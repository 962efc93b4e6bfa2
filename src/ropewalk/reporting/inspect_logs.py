"""An evaluation as logs of inspect_ai, for its viewer and its data frames. Only this module uses that package.

A log is made of plain values, which inspect_ai's own model of a log checks before it writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.excerpts import Part, gaps, parts_of, unmarked
from ropewalk.evaluation.predictions import Prediction, SampleKey
from ropewalk.evaluation.prompt import turn_starts
from ropewalk.evaluation.record import PREDICTIONS, RESULTS, read_record
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.score_rows import task_words
from ropewalk.evaluation.settings import ExportSettings
from ropewalk.io.digests import digest
from ropewalk.io.files import field_fault, new_folder
from ropewalk.io.json_lines import check_types
from ropewalk.io.results import Result
from ropewalk.training.answers import read_sides, whole_prompts

ROLES = ("system", "user", "assistant")
STOPPED = {True: "stop", False: "max_tokens", None: "unknown"}
"""inspect_ai's words for why a model stopped, by whether it ended its answer."""
ID_CHARACTERS = 22
MOST_IN_NAME = 100

Scores = Mapping[str, tuple[TaskResult, Mapping[int, float]]]
"""By metric, the result of a task and the score of each sample in percent; the task's own metric is the first."""


@dataclass(frozen=True)
class ExportResult(Result):
    """Logs of inspect_ai.

    Attributes:
        folder: folder of the logs.
        logs: name of each log's file: one for each task and length.
        samples: number of samples in all logs.
        whole_prompts: number of samples that have their whole prompt, although an evaluation keeps an excerpt.
        left_out: results without answers, such as perplexities and tasks that were not run.
    """

    folder: Path
    logs: tuple[str, ...]
    samples: int
    whole_prompts: int
    left_out: tuple[str, ...]


def export_logs(settings: ExportSettings) -> ExportResult:
    """Write the answers of an evaluation as logs of inspect_ai, one for each task and length.

    Raises:
        RopewalkError: if inspect_ai is not installed, the evaluation is not finished or has no answers, its files
            contradict each other, prompts cannot be made again, or the folder cannot be written.
    """
    log_model, write_log = _package()
    folder, out = settings.folder, settings.out
    if out.is_dir() and any(out.iterdir()):
        raise RopewalkError(f"{out} holds other files, which the logs would replace; give --out a new folder")
    side, *after = read_sides(folder)
    if after or not (folder / PREDICTIONS).is_file():
        raise RopewalkError(
            f"{folder} is the folder of a training run, whose answers cannot be exported; name the folder of an "
            "evaluation, which ropewalk eval writes"
        )
    record, results = read_record(folder)
    whole = whole_prompts(folder, side, settings.prompts) if settings.prompts else {}
    groups: dict[tuple[str, str, int | None], list[Prediction]] = {}
    for each in side.predictions.values():
        groups.setdefault(each.key[:3], []).append(each)
    logs = {}
    for key, answers in groups.items():
        log = log_of(record, answers, _scores(folder, key, answers, results), whole)
        logs[_file_name(log["eval"])] = log
    with new_folder(out) as temporary:
        for name, log in logs.items():
            write_log(log_model.model_validate(_encodable(log)), str(temporary / name), format="eval")
    left_out = [
        task_words(each.suite, each.task) + ("" if each.length is None else f" at {each.length:,} tokens")
        for each in results
        if (each.suite, each.details.get("answers_of", each.task), each.length) not in groups
    ]
    return ExportResult(out, tuple(logs), len(side.predictions), len(whole), tuple(left_out))


def _package() -> tuple[Any, Any]:
    advice = "run pip install 'ropewalk[inspect-ai]'"
    try:
        from inspect_ai.log import EvalLog, write_eval_log
        from inspect_ai.viewer import ViewerConfig
    except ImportError as error:
        raise RopewalkError(
            f"the export needs the package inspect_ai, which is not installed; {advice}"
        ) from error
    # Without it, the viewer would render answers as Markdown, with their links and images.
    if "trust_content" not in ViewerConfig.model_fields:
        raise RopewalkError(f"the export needs inspect_ai 0.3.275 or later; {advice}")
    return EvalLog, write_eval_log


def _scores(
    folder: Path,
    key: tuple[str, str, int | None],
    answers: Sequence[Prediction],
    results: Sequence[TaskResult],
) -> Scores:
    """The scores of one task and length.

    Raises:
        RopewalkError: if the results are not those of the answers.
    """
    suite, task, length = key
    own = [each for each in results if (each.suite, each.task, each.length) == key]
    own += [
        each
        for each in results
        if (each.suite, each.details.get("answers_of"), each.length) == (suite, task, length)
    ]
    try:
        scores = [_by_sample(each) for each in own]
    except (KeyError, TypeError) as error:
        raise RopewalkError(
            f"{folder / RESULTS} has a sample of {task} without a score: {field_fault(error)}"
        ) from error
    answered = {each.index: 100 * each.score for each in answers}
    known = bool(own) and own[0].task == task
    if not known or scores[0] != answered or any(each.keys() != answered.keys() for each in scores):
        raise RopewalkError(
            f"{PREDICTIONS} and {RESULTS} have different scores of {task} at {length} tokens; run ropewalk eval "
            f"rescore {folder} first"
        )
    names = [answers[0].metric, *(each.task.removeprefix(f"{task}.") for each in own[1:])]
    return dict(zip(names, zip(own, scores, strict=True), strict=True))


def _by_sample(result: TaskResult) -> dict[int, float]:
    for each in result.samples:
        check_types(each, {"index": (int,), "score": (int, float)})
    return {each["index"]: each["score"] for each in result.samples}


def log_of(
    record: Mapping[str, Any],
    answers: Sequence[Prediction],
    scores: Scores,
    whole: Mapping[SampleKey, Sample],
) -> dict[str, Any]:
    """A log of inspect_ai as plain values.

    Args:
        record: contents of results.json.
        answers: those of one task and length.
        scores: their scores.
        whole: samples whose whole prompt is shown in place of the excerpt.

    Raises:
        RopewalkError: if the record has no date.
    """
    suite, task, length, _ = answers[0].key
    try:
        created = datetime.fromisoformat(str(record.get("date"))).isoformat()
    except ValueError as error:
        raise RopewalkError(f"{RESULTS} has no valid date, but {record.get('date')!r}") from error
    facts = {name: each for name, each in record.items() if name not in ("results", "versions")}
    model = str(record["model"])
    # The same evaluation has the same names whenever it is exported.
    run_id, task_id = (digest(each)[:ID_CHARACTERS] for each in (facts, [facts, suite, task, length]))
    rejected = len(next(iter(scores.values()))[0].details.get("rejected", ()))
    samples = [_sample(each, scores, model, whole.get(each.key)) for each in answers]
    return {
        "status": "success",
        "eval": {
            "eval_id": task_id,
            "run_id": run_id,
            "task_id": task_id,
            "created": created,
            # With the length, because a list of logs shows the task alone.
            "task": f"{task_words(suite, task).replace(' ', '-')}-{length}",
            "task_args": {"suite": suite, "task": task, "length": length},
            "dataset": {
                "name": task_words(suite, task),
                "samples": len(answers),
                "sample_ids": [each.index for each in answers],
            },
            "model": model,
            "config": {"epochs": 1},
            "packages": {name: str(each) for name, each in record.get("versions", {}).items()},
            "metadata": facts,
            "viewer": {"trust_content": False},
        },
        "results": {
            "total_samples": len(answers) + rejected,
            "completed_samples": len(answers),
            "scores": [_score(metric, result, rejected) for metric, (result, _) in scores.items()],
        },
        "stats": {"completed_at": created, "model_usage": _total(answers, model)},
        "samples": samples,
    }


def _score(metric: str, result: TaskResult, rejected: int) -> dict[str, Any]:
    """A mean score with its interval, from 0 to 1 as scores of samples are."""
    low, high = result.ci95
    values = {"mean": result.score, "ci95_low": low, "ci95_high": high}
    return {
        "name": metric,
        "scorer": metric,
        "scored_samples": result.n,
        "unscored_samples": rejected,
        "metrics": {
            name: {"name": name, "value": each / 100} for name, each in values.items() if math.isfinite(each)
        },
        "metadata": {name: each for name, each in result.to_json().items() if name != "samples"},
    }


def _sample(answer: Prediction, scores: Scores, model: str, whole: Sample | None) -> dict[str, Any]:
    parts, characters = answer.prompt, answer.prompt_characters or 0
    if whole is not None:
        text = whole.whole
        parts, characters = (
            parts_of(text, [(0, len(text))], turn_starts(whole.earlier, whole.text)),
            len(text),
        )
    kept = "whole" if sum(len(text) for _, text, _ in parts) == characters else "excerpt"
    asked = messages(parts, characters)
    content = [{"type": "reasoning", "reasoning": answer.thoughts}] if answer.thoughts else []
    # As a part of a list, because inspect_ai takes marks of thoughts out of a plain string.
    said = {
        "role": "assistant",
        "content": [*content, {"type": "text", "text": answer.answer}],
        "model": model,
        "source": "generate",
    }
    usage = _usage([answer])
    main, *further = scores
    percents = {name: each[answer.index] for name, (_, each) in scores.items()}
    return {
        "id": answer.index,
        "epoch": 1,
        # One message without turns is shown as it is: a base model reads no turns.
        "input": asked if any(role for _, _, role in parts) else asked[0]["content"],
        "target": list(answer.references),
        "messages": [*asked, said],
        "output": {
            "model": model,
            "choices": [{"message": said, "stop_reason": STOPPED[answer.finished]}],
            "usage": usage,
        },
        "model_usage": {model: usage} if usage else {},
        "scores": {
            main: {"value": answer.score, "answer": answer.answer},
            **{name: {"value": percents[name] / 100} for name in further},
        },
        "metadata": {
            "prompt": kept if parts else "not kept",
            **{
                name: getattr(answer, name)
                for name in ("prompt_characters", "prompt_sha256", "prompt_tokens", "bos_count", "fill")
            },
            "new_tokens": answer.new_tokens,
            "details": dict(answer.details),
        },
    }


def messages(parts: Sequence[Part], characters: int) -> list[dict[str, str]]:
    """A prompt as messages: one for each part of a chat, or a single one of the user; gaps are named within the text.

    Args:
        parts: parts of the prompt, as :class:`~ropewalk.evaluation.predictions.Prediction` has them.
        characters: length of the whole prompt.
    """
    found = []
    as_turns = all(role in ROLES for _, _, role in parts)
    for number, ((start, text, role), left_out) in enumerate(gaps(parts, characters)):
        before = _gap(start) if not number else ""
        shown = f"{before}{unmarked(text, role) if as_turns else text}{_gap(left_out)}"
        # The mark of the assistant's turn stands alone where nothing begins the answer.
        if shown:
            found.append({"role": role if as_turns else "user", "content": shown})
    if as_turns and found:
        return found
    return [{"role": "user", "content": "".join(each["content"] for each in found)}]


def _gap(characters: int) -> str:
    return f"\n[… {characters:,} characters left out …]\n" if characters else ""


def _usage(answers: Sequence[Prediction]) -> dict[str, int] | None:
    """Tokens read and written; None if a server did not report those written."""
    written = [each.new_tokens for each in answers if each.new_tokens is not None]
    if len(written) < len(answers):
        return None
    read = sum(each.prompt_tokens for each in answers)
    return {"input_tokens": read, "output_tokens": sum(written), "total_tokens": read + sum(written)}


def _total(answers: Sequence[Prediction], model: str) -> dict[str, Any]:
    usage = _usage(answers)
    return {model: usage} if usage else {}


def _file_name(spec: Mapping[str, Any]) -> str:
    """The name of a log's file, from which inspect_ai reads its time, task and id: underscores separate the three."""
    task = re.sub(r"[^A-Za-z0-9.]+", "-", spec["task"])[:MOST_IN_NAME]
    return f"{spec['created'].replace(':', '-')}_{task}_{spec['task_id']}.eval"


def _encodable(value: Any) -> Any:
    """A JSON value whose texts UTF-8 can encode: half of a surrogate pair, which JSON can spell, becomes its code."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return list(map(_encodable, value)) if isinstance(value, list | tuple) else value
