"""The doors of the room: what ``inspect`` and ``plan`` return, beside what the commands print."""

import doctest
import json

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.planning import PlanSettings, inspect, plan
from tests.places import CONFIGS
from tests.planning.planning_cases import LLAMA, printed


def test_plan_returns_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(PlanSettings(model=LLAMA, target=2**20))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False)) == printed(
        capsys, "rope", "plan", LLAMA, "--to", "1M"
    )
    assert [stage.context for stage in found.stages] == [65536, 262144, 1048576]


def test_what_extend_refuses_has_no_plan() -> None:
    with pytest.raises(RopewalkError, match="does not train this model"):
        plan(PlanSettings(model=str(CONFIGS / "mistral-7b-v0.1.json"), target=2**17))


@pytest.mark.parametrize("door", [inspect, plan])
def test_the_examples_run(door: object) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(door, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
