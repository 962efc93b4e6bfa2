"""Results survive JSON, and a missing score is never a number."""

import json
import math

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import PositionBin, TaskResult


def test_result_survives_json() -> None:
    bins = (PositionBin(0, 8, 16, 2, 3.5, (3.0, 4.0)), PositionBin(8, 16, 16, 2, 2.5, (2.0, 3.0)))
    result = TaskResult("perplexity", "perplexity", 16, 2, 3.0, (2.5, 3.5), details={"a": 1}, positions=bins)
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert TaskResult.from_json(value) == result
    assert value["ci95"] == [2.5, 3.5]
    assert value["positions"][0] == {
        "start": 0,
        "end": 8,
        "n_tokens": 16,
        "n_windows": 2,
        "perplexity": 3.5,
        "ci95": [3.0, 4.0],
    }


def test_missing_numbers_are_null_and_come_back_as_nan() -> None:
    empty = PositionBin(0, 8, 0, 0, math.nan, (math.nan, math.nan))
    result = TaskResult(
        "perplexity",
        "perplexity",
        8,
        1,
        math.inf,
        (math.nan, math.nan),
        positions=(empty,),
        reason="not finite",
    )
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert value["score"] is None
    assert value["ci95"] == [None, None]
    back = TaskResult.from_json(value)
    assert math.isnan(back.score)
    assert math.isnan(back.positions[0].perplexity)


def test_not_run_has_a_reason_and_no_score() -> None:
    result = TaskResult.not_run("passkey", "passkey", 512, "no tokenizer")
    assert result.to_json() == {
        "suite": "passkey",
        "task": "passkey",
        "length": 512,
        "n": 0,
        "score": None,
        "ci95": [None, None],
        "status": "not run",
        "reason": "no tokenizer",
        "details": {},
    }
    with pytest.raises(RopewalkError, match="needs a reason and has no score"):
        TaskResult("passkey", "passkey", 512, 0, 0.0, (0.0, 1.0), "not run", "because")
    with pytest.raises(RopewalkError, match="needs a reason"):
        TaskResult("passkey", "passkey", 512, 0, math.nan, (0.0, 1.0), "not run")
    with pytest.raises(RopewalkError, match="unknown status 'failed'"):
        TaskResult("passkey", "passkey", 512, 0, 0.5, (0.0, 1.0), "failed")  # type: ignore[arg-type]


def test_predictions_are_kept_apart() -> None:
    result = TaskResult("passkey", "passkey", 512, 1, 1.0, (0.2, 1.0), predictions=({"key": 5},))
    assert "predictions" not in result.to_json()
