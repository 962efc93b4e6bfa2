"""Stored answers are judged once by each judge, and the results say by whom."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk import evaluate
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.judging import JUDGEMENTS, judge_folder
from ropewalk.evaluation.predictions import read_predictions
from ropewalk.evaluation.record import PREDICTIONS, EvaluationResult, read_record, rescore
from ropewalk.evaluation.reproduction import verify_result
from ropewalk.evaluation.settings import JudgeSettings
from ropewalk.evaluation.tasks.published import aa_lcr
from tests.completion_server import CompletionServer, Reply, message, refusal
from tests.evaluation.tasks.published.lcr_cases import write_lcr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    data = write_lcr(folder / "data", questions=4)
    with pytest.MonkeyPatch.context() as patched:
        # The answers of a tiny model are worth no time.
        patched.setattr(aa_lcr, "ROOM", 8)
        evaluate(
            "embedded:retrieval",
            suites=("aa_lcr", "passkey"),
            lengths={"aa_lcr": (512,), "passkey": (256,)},
            samples=4,
            benchmark_data={"aa_lcr": data},
            beyond_config=True,
            out=folder / "out",
        )
    return folder / "out"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def by_question(said: Callable[[int], str]) -> Callable[[dict[str, Any], int], Reply]:
    def reply(value: dict[str, Any], number: int) -> Reply:
        text = value["messages"][-1]["content"]
        return message(said(next(n for n in range(4) if f"How much {n}?" in text)))

    return reply


def judged(folder: Path, name: str, said: Callable[[int], str]) -> tuple[EvaluationResult, int]:
    """The result, and how many answers the judge was given."""
    with CompletionServer(by_question(said), models=[name]) as server:
        found = judge_folder(JudgeSettings(folder=folder, url=server.url))
        return found, len(server.requests)


def lcr(result: EvaluationResult) -> Any:
    return next(each for each in result.results if each.suite == "aa_lcr")


def test_verdicts_are_scores_and_the_judge_is_named(folder: Path) -> None:
    others = [each for each in read_record(folder)[1] if each.suite != "aa_lcr"]
    found, asked = judged(
        folder, "first", lambda n: ["CORRECT", "INCORRECT", "<think>CORRECT</think>INCORRECT", "?"][n]
    )
    result = lcr(found)
    assert (asked, result.status, result.n, result.score) == (4, "ok", 4, 25)
    assert result.reason == "judged by first; 1 unclear verdicts count as wrong"
    assert result.details["judge"]["model"] == "first"
    assert "{candidate}" in result.details["judge"]["prompt"]
    assert "waiting_for_judge" not in result.details
    assert [each for each in found.results if each.suite != "aa_lcr"] == others
    # What is stored says the same, again and without the judge.
    assert rescore(folder).results == found.results == tuple(read_record(folder)[1])
    (scores,) = (each for each in verify_result(folder).findings if each.what == "scores")
    assert scores.status == "reproduced"


def test_a_second_judge_counts_and_agreement_is_stated(folder: Path) -> None:
    judged(folder, "first", lambda n: "CORRECT" if n < 2 else "INCORRECT")
    found, _ = judged(folder, "second", lambda n: "CORRECT" if n < 3 else "INCORRECT")
    result = lcr(found)
    assert (result.score, result.reason) == (75, "judged by second")
    assert result.details["judge"]["agreement"]["first"] == {"n": 4, "equal": 75, "kappa": pytest.approx(0.5)}
    # The first one again: nothing is asked, and its verdicts count.
    found, asked = judged(folder, "first", lambda n: pytest.fail("asked again"))
    assert (asked, lcr(found).score) == (0, 50)


def test_an_interrupted_judge_resumes(folder: Path) -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if "How much 3?" in value["messages"][-1]["content"]:
            return refusal(400, "too long")
        return message("CORRECT")

    with (
        CompletionServer(reply, models=["judge"]) as server,
        pytest.raises(RunFailure, match="rejected 1 of 4"),
    ):
        judge_folder(JudgeSettings(folder=folder, url=server.url))
    assert len((folder / JUDGEMENTS).read_text().splitlines()) == 3
    # Nothing was scored with some verdicts missing.
    assert next(each for each in read_record(folder)[1] if each.suite == "aa_lcr").status == "not run"
    found, asked = judged(folder, "judge", lambda n: "CORRECT")
    assert (asked, lcr(found).score) == (1, 100)


def test_a_changed_answer_is_judged_again_and_an_empty_one_is_wrong(folder: Path) -> None:
    judged(folder, "judge", lambda n: "CORRECT")
    lines = [json.loads(line) for line in (folder / PREDICTIONS).read_text().splitlines()]
    own = [line for line in lines if line["suite"] == "aa_lcr"]
    own[0]["prediction"], own[1]["prediction"] = "something else", "  "
    (folder / PREDICTIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, asked = judged(folder, "judge", lambda n: "CORRECT")
    assert (asked, lcr(found).score) == (1, 75)
    assert [each.score for each in read_predictions(folder / PREDICTIONS) if each.suite == "aa_lcr"] == [
        1,
        0,
        1,
        1,
    ]


def test_answers_without_need_of_a_judge_are_refused(tmp_path: Path) -> None:
    evaluate("embedded", suites=("passkey",), lengths=128, samples=1, out=tmp_path / "out")
    with pytest.raises(RopewalkError, match=r"no answer in .* needs a judge"):
        judge_folder(JudgeSettings(folder=tmp_path / "out", url="http://127.0.0.1:9/v1"))
