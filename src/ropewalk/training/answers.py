"""Read the answers in the folder of an evaluation or of a training run, and make their whole prompts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ropewalk.data import load_tokenizer
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.predictions import Prediction, SampleKey, read_predictions
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.record import PREDICTIONS, RESULTS, answers_file, read_record
from ropewalk.evaluation.reproduction import encoder_of_record, samples_again, settings_of
from ropewalk.evaluation.samples import Sample, prompt_digest
from ropewalk.evaluation.settings import Settings
from ropewalk.io.results import Result
from ropewalk.training.folder import MODEL, recipe_so_far

WHEN = ("before", "after")


@dataclass(frozen=True)
class ViewResult(Result):
    """The pages with all answers.

    Attributes:
        page: the page to open in a browser.
        samples: number of samples with an answer of any side.
        paired: number of samples with an answer of each side.
        whole_prompts: number of prompts that are shown in full.
    """

    page: Path
    samples: int
    paired: int
    whole_prompts: int


@dataclass(frozen=True)
class Answers:
    """The answers of one model.

    Attributes:
        name: what the model is called beside the other.
        predictions: by sample, task by task and length by length in the order of their index.
    """

    name: str
    predictions: Mapping[SampleKey, Prediction]


def read_sides(folder: Path, other: Path | None = None) -> list[Answers]:
    """Read the answers of one model, or of two for comparison.

    Args:
        folder: folder of an evaluation, or of a run, which has two sides: before and after training.
        other: another one; of a run, the last answers are compared.

    Raises:
        RopewalkError: if a folder has no answers or a damaged line, or the two have no prompt in common.
    """
    sides = _sides(folder)
    if other is None:
        return sides
    a, b = sides[-1], _sides(other)[-1]
    if not any(
        key in b.predictions and _same(each, b.predictions[key]) for key, each in a.predictions.items()
    ):
        raise RopewalkError(
            f"{folder} and {other} have no prompt in common, so no answers can stand side by side; evaluate both with "
            "the same tasks, lengths, seed and tokenizer"
        )
    names = [folder.resolve().name, other.resolve().name]
    if names[0] == names[1]:
        names = [str(folder), str(other)]
    return [Answers(name, side.predictions) for name, side in zip(names, (a, b), strict=True)]


def _same(a: Prediction, b: Prediction) -> bool:
    return a.prompt_sha256 == b.prompt_sha256


def _sides(folder: Path) -> list[Answers]:
    own = _answers(folder.resolve().name, folder / PREDICTIONS)
    if found := [own] if own else answers_of_run(folder):
        return found
    inside = sorted(each.parent.name for each in folder.glob(f"*/{PREDICTIONS}"))
    if inside:
        raise RopewalkError(
            f"{folder} holds the mean of several checkpoints; name the folder of one, such as {folder / inside[0]}"
        )
    raise RopewalkError(
        f"{folder} has no answers: it has neither {PREDICTIONS} nor {answers_file('after')}; name the folder of an "
        "evaluation or of a training run in which a model generated answers"
    )


def answers_of_run(folder: Path) -> list[Answers]:
    """The answers before and after training in the folder of a run; empty if there are none."""
    return [each for when in WHEN if (each := _answers(when, folder / answers_file(when)))]


def _answers(name: str, path: Path) -> Answers | None:
    groups: dict[tuple[str, str, int], list[Prediction]] = {}
    for each in read_predictions(path):
        groups.setdefault(each.key[:3], []).append(each)
    ordered = [each for own in groups.values() for each in sorted(own, key=lambda each: each.index)]
    return Answers(name, {each.key: each for each in ordered}) if ordered else None


def paired(sides: Sequence[Answers]) -> list[tuple[Prediction | None, ...]]:
    """The answers to each prompt, one of each side: None where a side has no answer to the same prompt."""
    first, *rest = sides
    rows: list[tuple[Prediction | None, ...]] = []
    for key, own in first.predictions.items():
        others = [each.predictions.get(key) for each in rest]
        rows.append((own, *(each if each is not None and _same(own, each) else None for each in others)))
    for place, side in enumerate(rest, start=1):
        for key, each in side.predictions.items():
            if key not in first.predictions or not _same(first.predictions[key], each):
                rows.append((*([None] * place), each, *([None] * (len(rest) - place))))
    # Samples of one side alone stand with their task and length.
    order: dict[tuple[str, str, int], int] = {}
    keys = [next(each.key for each in row if each is not None) for row in rows]
    for found in keys:
        order.setdefault(found[:3], len(order))
    places = sorted(range(len(rows)), key=lambda place: (order[keys[place][:3]], keys[place][3]))
    return [rows[place] for place in places]


def whole_prompts(folder: Path, answers: Answers, first: int) -> dict[SampleKey, Sample]:
    """Make the first prompts of each task and length again.

    Args:
        folder: the folder that has the answers.
        answers: the answers whose prompts are wanted.
        first: number of prompts of each task and length.

    Raises:
        RopewalkError: if the record, the tokenizer or the data of a task is missing, or a prompt is not the one that
            was answered.
    """
    settings, encoder = (
        _of_evaluation(folder) if (folder / PREDICTIONS).is_file() else _of_run(folder, answers)
    )
    found = {}
    for suite, task, length in dict.fromkeys(key[:3] for key in answers.predictions):
        try:
            samples = samples_again(settings, encoder, suite, task, length)
        except RopewalkError as error:
            raise RopewalkError(f"--prompts cannot make prompts again: {error}") from error
        for sample in islice(samples, first):
            key = suite, task, length, sample.index
            answered = answers.predictions.get(key)
            if answered is not None and answered.prompt_sha256 != prompt_digest(sample):
                raise RopewalkError(
                    f"--prompts made another prompt for sample {sample.index} of {suite} {task} at {length} tokens "
                    "than the one that was answered; restore the tokenizer and the data of the evaluation, or leave "
                    "out --prompts"
                )
            if answered is not None:
                found[key] = sample
    return found


def _of_evaluation(folder: Path) -> tuple[Settings, PromptEncoder]:
    """Settings and encoder of an evaluation."""
    record, _ = read_record(folder)
    try:
        settings = settings_of(record)
    except ValidationError as error:
        raise RopewalkError(
            f"--prompts cannot use the settings in {folder / RESULTS}: {error.errors()[0]['msg']}; use the version of "
            "ropewalk that wrote it"
        ) from error
    tokenizer = record["tokenizer"] if "tokenizer" in record else record["model"]
    if tokenizer is None:
        raise RopewalkError(
            "--prompts needs the files of a tokenizer, but the tokens of this evaluation were counted by its server or "
            "estimated from words; leave out --prompts"
        )
    return settings, encoder_of_record(record, _tokenizer(str(tokenizer)))


def _of_run(folder: Path, answers: Answers) -> tuple[Settings, PromptEncoder]:
    """Settings and encoder of the evaluations of a run before and after training."""
    recipe = recipe_so_far(folder)
    if recipe is None:
        raise RopewalkError(
            f"--prompts needs the recipe of the run, which {folder} does not have; leave out --prompts"
        )
    lengths: dict[str, list[int]] = {}
    for suite, _, length, _ in answers.predictions:
        if length not in lengths.setdefault(suite, []):
            lengths[suite].append(length)
    settings = recipe.evaluation.settings(tuple(lengths), lengths, recipe.seed)
    return settings, PromptEncoder(_tokenizer(str(folder / MODEL)), settings.chat)


def _tokenizer(path: str) -> Any:
    try:
        return load_tokenizer(path)
    except RopewalkError as error:
        raise RopewalkError(f"--prompts needs the tokenizer of {path}: {error}") from error
