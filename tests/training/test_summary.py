"""The summary of a run is what its function returns, and is written whatever else there was to do."""

import json
from pathlib import Path

from ropewalk.training.summary import RunResult
from tests.training.resume_cases import recipe_of
from tests.training.run_cases import extend


def test_it_is_written_again_where_it_is_gone_and_says_the_same(finished):
    values, summary = finished
    path = Path(values["output"]) / "summary.json"
    assert json.loads(path.read_text())["after"] == summary["after"]
    path.unlink()
    again = extend(recipe_of(values), resume=True)
    assert json.loads(path.read_text()) == again
    differing = {key for key in {**summary, **again} if summary.get(key) != again.get(key)}
    # Of the folder, which is a copy here, and of the process.
    assert differing <= {"output", "model", "seconds"}


def test_parts_that_a_run_does_not_have_are_left_out(finished):
    _, summary = finished
    left_out = {"during", "adapter", "exported", "softmax_scale", "files", "readers"}
    assert not left_out & summary.keys()
    assert RunResult.__dataclass_fields__.keys() == summary.keys() | left_out
