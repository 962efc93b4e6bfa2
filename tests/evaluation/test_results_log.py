"""Results of a killed run are there when it goes on, and a damaged file is never taken for one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import PositionBin, ResultKey, TaskResult, result_log
from ropewalk.runs import Log
from tests.disk_cases import files_no_larger_than
from tests.evaluation.core_cases import WILD_TEXTS, percent_result, perplexity_result, through_json

BINS = (PositionBin(0, 8, 16, 2, 3.5, (3.0, 4.0)),)
RESULTS = [
    percent_result([100, 0, 50], length=4096),
    percent_result([100, 0, 50], length=None, suite="short", task="hellaswag"),
    perplexity_result([10.0, 20.0], [5, 5], math.exp(3), positions=BINS, reason=WILD_TEXTS[2]),
]


def add_all(path: Path | None, results: list[TaskResult]) -> Log[ResultKey, TaskResult]:
    finished = result_log(path)
    for result in results:
        finished.add(result)
    return finished


def assert_holds(finished: Log[ResultKey, TaskResult], results: list[TaskResult]) -> None:
    assert list(finished.known.values()) == results
    for result in results:
        assert finished.known.get((result.suite, result.task, result.length)) == result


@pytest.mark.parametrize("on_disk", [True, False])
def test_results_are_known_by_suite_task_and_length(on_disk: bool, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "f.jsonl" if on_disk else None
    assert_holds(add_all(path, RESULTS), RESULTS)
    if path is not None:
        assert_holds(result_log(path), RESULTS)
        assert len(path.read_bytes().splitlines()) == 3
    finished = result_log(path)
    assert finished.known.get(("ruler", "niah", 8192)) is None
    assert finished.known.get(("ruler", "niah", None)) is None


def test_not_run_and_infinite_results_come_back(tmp_path: Path) -> None:
    missing = TaskResult.not_run("ruler", "qa_1", 4096, "no SQuAD")
    infinite = perplexity_result([None, 2.0], [1, 1], math.inf)
    add_all(tmp_path / "f.jsonl", [missing, infinite])
    found = result_log(tmp_path / "f.jsonl")
    back = found.known.get(("ruler", "qa_1", 4096))
    assert back is not None
    assert back.to_json() == missing.to_json()
    assert (back.status, back.reason) == ("not run", "no SQuAD")
    assert math.isnan(back.score)
    again = found.known.get(("perplexity", "perplexity", 64))
    assert again is not None
    assert math.isnan(again.score)


def test_run_that_is_killed_at_any_byte_keeps_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    add_all(path, RESULTS)
    content = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    # Every byte around the ends of lines, and every eleventh of the rest.
    cuts = {*range(0, len(content), 11), *(end + around for end in [0, *ends] for around in range(-4, 5))}
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(content)):
        path.write_bytes(content[:cut])
        complete = sum(end <= cut for end in ends)
        finished = result_log(path)
        assert_holds(finished, RESULTS[:complete])
        for result in RESULTS[complete:]:
            finished.add(result)
        assert path.read_bytes() == content


def test_file_whose_disk_was_full_for_a_while_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    finished = add_all(path, RESULTS[:1])
    with files_no_larger_than(path.stat().st_size + 20), pytest.raises(RopewalkError, match="cannot write"):
        finished.add(RESULTS[1])
    finished.add(RESULTS[2])
    assert_holds(result_log(path), [RESULTS[0], RESULTS[2]])


@pytest.mark.parametrize("line", ["{", "{}", "[]", "5", '"text"', "null", "\x00", '{"unit": "percent"}'])
def test_line_that_is_no_result_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(f"{json.dumps(through_json(RESULTS[0].to_json()))}\n{line}\n")
    with pytest.raises(RopewalkError, match=r"^line 2 of .*f\.jsonl is damaged: "):
        result_log(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"suite": []}, "suite has the wrong type: []"),
        ({"length": "4k"}, "length has the wrong type: '4k'"),
        ({"n": 2.0}, "n has the wrong type: 2.0"),
        ({"score": "3.5"}, "score has the wrong type: '3.5'"),
        ({"score": True}, "score has the wrong type: True"),
        ({"ci95": [1.0]}, "not enough values"),
        ({"ci95": [1.0, "2"]}, "high has the wrong type: '2'"),
        ({"unit": "share"}, "unit must be percent or perplexity, got 'share'"),
        ({"status": "okay"}, "unknown status 'okay'"),
        ({"details": 5}, "details has the wrong type: 5"),
        ({"samples": [7]}, "a position or a sample is not a JSON object"),
        ({"positions": [{"start": 0}]}, "the field 'end' is missing"),
        ({"positions": [{**BINS[0].to_json(), "perplexity": "3"}]}, "perplexity has the wrong type: '3'"),
    ],
)
def test_value_that_no_result_has_is_named(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({**RESULTS[0].to_json(), **change}) + "\n")
    with pytest.raises(RopewalkError) as refused:
        result_log(path)
    assert str(refused.value).startswith(f"line 1 of {path} is damaged: {reason}")


def test_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"cannot read .*: Is a directory"):
        result_log(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RopewalkError, match=r"cannot read .*: Not a directory"):
        result_log(tmp_path / "file" / "f.jsonl")
