"""Results survive JSON, and a missing score is never a number."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        "unit": "percent",
        "ci95": [None, None],
        "status": "not run",
        "reason": "no tokenizer",
        "details": {},
    }
    with pytest.raises(RopewalkError, match="must have a reason and a score of NaN"):
        TaskResult("passkey", "passkey", 512, 0, 0.0, (0.0, 1.0), "not run", "because")
    with pytest.raises(RopewalkError, match="must have a reason"):
        TaskResult("passkey", "passkey", 512, 0, math.nan, (0.0, 1.0), "not run")
    with pytest.raises(RopewalkError, match="unknown status 'failed'"):
        TaskResult("passkey", "passkey", 512, 0, 0.5, (0.0, 1.0), "failed")  # type: ignore[arg-type]


def test_samples_survive_json_and_are_left_out_where_there_are_none() -> None:
    samples = ({"index": 0, "score": 50.0}, {"index": 1, "score": 100.0})
    result = TaskResult("passkey", "passkey", None, 2, 75.0, (20.0, 95.0), samples=samples)
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert value["samples"] == list(samples)
    assert TaskResult.from_json(value) == result
    bare = replace(result, samples=()).to_json()
    assert "samples" not in bare
    assert "positions" not in bare
    assert "predictions" not in bare


texts = st.text(st.characters(), max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
bins = st.builds(
    PositionBin,
    st.integers(0, 99),
    st.integers(100, 999),
    st.integers(0),
    st.integers(0),
    numbers,
    st.tuples(numbers, numbers),
)
results = st.builds(
    TaskResult,
    texts,
    texts,
    st.none() | st.integers(1),
    st.integers(0),
    numbers,
    st.tuples(numbers, numbers),
    st.just("ok"),
    st.none() | texts,
    st.dictionaries(texts, st.none() | numbers | texts | st.lists(st.integers(), max_size=3), max_size=3),
    st.lists(bins, max_size=3).map(tuple),
    st.sampled_from(["percent", "perplexity"]),
    st.lists(st.fixed_dictionaries({"index": st.integers(0), "score": numbers}), max_size=3).map(tuple),
)


@given(results)
def test_any_result_survives_json(result: TaskResult) -> None:
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert TaskResult.from_json(value) == result
    assert TaskResult.from_json(value).to_json() == value


def test_not_run_keeps_its_unit_and_its_reason() -> None:
    for unit in ("percent", "perplexity"):
        result = TaskResult.not_run("perplexity", "sliding", None, "no text", unit)  # type: ignore[arg-type]
        back = TaskResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False)))
        assert (back.unit, back.status, back.reason, back.n) == (unit, "not run", "no text", 0)
        assert all(map(math.isnan, (back.score, *back.ci95)))


def test_result_without_a_unit_is_refused() -> None:
    """Shares of 1 must not be read as percent."""
    value = TaskResult("passkey", "passkey", 64, 1, 1.0, (0.2, 1.0)).to_json()
    del value["unit"]
    with pytest.raises(RopewalkError, match="the result of passkey has no unit, because an older ropewalk"):
        TaskResult.from_json(value)


@pytest.mark.parametrize("value", [[], 5, "text", None])
def test_what_is_no_object_is_no_result(value: object) -> None:
    """What readers of files catch, and nothing else."""
    with pytest.raises((ValueError, TypeError, KeyError)):
        TaskResult.from_json(value)  # type: ignore[arg-type]
