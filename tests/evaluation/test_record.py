"""The record of an evaluation: JSON has all of it, answers are judged again, and two folders are compared."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import CompareSettings, EvaluationResult, TaskResult, compare_folders, rescore
from ropewalk.evaluation.aggregate import task_result
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.predictions import PredictionLog, predicted
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.record import PREDICTIONS, RESULTS, read_record
from ropewalk.evaluation.results import SAMPLES
from ropewalk.reporting.scores.evaluation import describe_comparison
from tests.evaluation.core_cases import CHAT, answered, asked_sample, byte_tokenizer, percent_result


def record_of(results: list[TaskResult], model: str = "of-mine") -> EvaluationResult:
    record = {"format": 1, "model": model, "settings": {"threshold": 85.6}, "summary": {}}
    return EvaluationResult({**record, "results": [each.to_json() for each in results]}, tuple(results))


def answers(folder: Path, said: list[str]) -> list[Any]:
    """The predictions of samples whose answers are their indices, as a run writes them."""
    encoder = PromptEncoder(byte_tokenizer())
    predictions = [answered(asked_sample(encoder, index), text) for index, text in enumerate(said)]
    log = PredictionLog(folder / PREDICTIONS)
    for each in predictions:
        log.add(each)
    return predictions


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    result = EvaluationResult({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}, ())
    assert result.to_json() == {"a": None, "b": [None, 1.5], "c": {"d": None}}
    result.write(tmp_path)
    assert json.loads((tmp_path / RESULTS).read_text(), parse_constant=pytest.fail) == result.to_json()


def test_each_checkpoint_of_a_mean_has_a_record_of_its_own_beside_it(tmp_path: Path) -> None:
    own = {"step-1": percent_result([0, 100]), "step-2": percent_result([100, 100])}
    mean = record_of([percent_result([50, 100])], "runs/7")
    checkpoints = tuple(({"name": name, "weight": 0.5}, (each,)) for name, each in own.items())
    replace(mean, checkpoints=checkpoints).write(tmp_path)
    assert read_record(tmp_path)[1] == list(mean.results)
    for name, each in own.items():
        record, results = read_record(tmp_path / name)
        assert results == [each]
        assert (record["model"], record["weight"]) == (f"runs/7/{name}", 0.5)
        assert "checkpoints" not in record


def test_answers_are_judged_again_from_what_was_said_and_not_from_what_was_scored(tmp_path: Path) -> None:
    predictions = answers(tmp_path, [" 0", " 7", " 2", " 3"])
    right = task_result(predictions, {"of_the_run": "stays"})
    assert right.score == 75
    wrong = replace(right, score=12.0, ci95=(1.0, 20.0))
    other = percent_result([0, 100], task="passkey", suite="passkey")
    record_of([wrong, other]).write(tmp_path)
    before = (tmp_path / RESULTS).read_bytes()
    again = rescore(tmp_path)
    # Results without predictions stay as they are, and so does the folder.
    assert list(again.results) == [right, other]
    assert again.record["results"] == [right.to_json(), other.to_json()]
    assert (tmp_path / RESULTS).read_bytes() == before


def test_thoughts_are_kept_as_generated_and_judged_again(tmp_path: Path) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=CHAT), chat=True)
    said = ["1?</think>0", "no, 1", "<think>2</think>7", "<think>3"]
    log = PredictionLog(tmp_path / PREDICTIONS)
    for index, (text, opened) in enumerate(zip(said, (True, True, False, False), strict=True)):
        log.add(predicted(asked_sample(encoder, index), Answer(0, text), opened))
    # As version 0.1.0 wrote an answer after thoughts: without them.
    log.add(answered(asked_sample(encoder, 4), "4"))
    lines = [json.loads(line) for line in (tmp_path / PREDICTIONS).read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [*said, "4"]
    assert [line["score"] for line in lines] == [1, 0, 0, 0, 1]
    assert "thoughts_opened" not in lines[-1]
    known = list(PredictionLog(tmp_path / PREDICTIONS).known.values())
    result = task_result(known, {})
    record_of([replace(result, score=99.0)]).write(tmp_path)
    assert list(rescore(tmp_path).results) == [result]
    assert result.score == 40
    assert "2 of 5 answers consist of the model's thoughts alone" in (result.reason or "")


def test_answers_that_are_not_all_or_not_the_results_own_are_refused(tmp_path: Path) -> None:
    result = task_result(answers(tmp_path, [" 0", " 1"]), {})
    record_of([replace(result, n=3)]).write(tmp_path)
    with pytest.raises(
        RopewalkError, match=r"niah at 64 tokens was computed from 3 predictions, but .* has 2"
    ):
        rescore(tmp_path)
    others = replace(result, details={**result.details, SAMPLES: "of others"})
    record_of([others]).write(tmp_path)
    with pytest.raises(RopewalkError, match="have different samples of niah at 64 tokens"):
        rescore(tmp_path)
    (tmp_path / PREDICTIONS).unlink()
    with pytest.raises(RopewalkError, match=r"has no predictions to score again"):
        rescore(tmp_path)


def test_b_is_compared_against_a(tmp_path: Path) -> None:
    for name, scores in (("a", [0, 0, 100, 100]), ("b", [100, 100, 100, 0])):
        (tmp_path / name).mkdir()
        record_of([percent_result(scores)], f"model-{name}").write(tmp_path / name)
    there = compare_folders(CompareSettings(a=tmp_path / "a", b=tmp_path / "b", seed=3))
    back = compare_folders(CompareSettings(a=tmp_path / "b", b=tmp_path / "a", seed=3))
    assert (there.a, there.b, there.seed) == (
        {"path": str(tmp_path / "a"), "model": "model-a"},
        {"path": str(tmp_path / "b"), "model": "model-b"},
        3,
    )
    assert [each.difference for each in there.differences] == [25]
    assert [each.difference for each in back.differences] == [-25]


@pytest.mark.parametrize(("a", "b"), [([0], [1]), ([0, 1], [1]), ([1], [1]), (None, [1])])
def test_prompts_with_another_bos_are_paired_with_a_note(
    tmp_path: Path, a: list[int] | None, b: list[int]
) -> None:
    for name, counts in (("a", a), ("b", b)):
        result = percent_result([0, 100])
        known = {} if counts is None else {"bos_count": counts}
        (tmp_path / name).mkdir()
        record_of([replace(result, details={**result.details, **known})]).write(tmp_path / name)
    found = compare_folders(CompareSettings(a=tmp_path / "a", b=tmp_path / "b"))
    assert [each.difference for each in found.differences] == [0]
    one = " or ".join(map(str, a or ()))
    said = (
        [f"prompts have {one} BOS tokens in A and 1 in B, which may change scores; "]
        if a not in (b, None)
        else []
    )
    assert [note.partition("evaluate")[0] for note in found.notes] == said
    assert [note in list(describe_comparison(found)) for note in found.notes] == [True] * len(said)
    assert found.to_json()["notes"] == list(found.notes)


def test_two_evaluations_without_a_difference_say_so_and_count_none(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 4)):
        (tmp_path / name).mkdir()
        record_of([percent_result([0] * count)]).write(tmp_path / name)
    found = compare_folders(CompareSettings(a=tmp_path / "a", b=tmp_path / "b"))
    assert found.differences[0].reason == "A has 2 samples and B has 4; run both with the same --samples"
    last = list(describe_comparison(found))[-1]
    assert last == "no difference could be computed, for the reasons in the table"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"no": "results"}',
        '{"results": [7]}',
        '{"results": 7}',
        '{"model": "m", "settings": {"threshold": "a"}, "results": []}',
        '{"model": "m", "settings": [1], "results": []}',
        '{"model": 7, "settings": {"threshold": 1}, "results": []}',
    ],
)
def test_what_is_no_record_is_said_in_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(RopewalkError, match=r"results\.json|result must be a JSON object"):
        read_record(tmp_path)
