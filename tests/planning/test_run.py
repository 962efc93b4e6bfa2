"""The doors of the room: what ``inspect`` and ``plan`` return, beside what the commands print."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from ropewalk.cli import app as program
from ropewalk.errors import RopewalkError
from ropewalk.planning import InspectSettings, PlanSettings, inspect, plan
from ropewalk.planning.bases import bound_of
from ropewalk.planning.settings import BoundSettings
from ropewalk.planning.sizing.model_shape import ModelShape
from tests.places import CONFIGS

LLAMA = str(CONFIGS / "llama-3-8b.json")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    assert program.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("target", [None, 32768])
def test_inspect_returns_what_the_command_prints(
    target: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [] if target is None else ["--target", str(target)]
    found = inspect(InspectSettings(model=LLAMA, target=target))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False)) == printed(
        capsys, "inspect", LLAMA, *asked
    )
    assert LLAMA in found._repr_html_()


def test_plan_returns_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(PlanSettings(model=LLAMA, target=2**20))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False)) == printed(
        capsys, "rope", "plan", LLAMA, "--to", "1M"
    )
    assert [stage.context for stage in found.stages] == [65536, 262144, 1048576]


@pytest.fixture
def whole(tmp_path: Path) -> str:
    """A config with the widths that a size follows from, which the published one here leaves out."""
    values = json.loads(Path(LLAMA).read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, "intermediate_size": 14336, "vocab_size": 128256}))
    return str(path)


def test_a_plan_for_a_number_of_processes_sizes_every_stage(whole: str) -> None:
    found = plan(PlanSettings(model=whole, target=2**17, processes=16))
    (stage,) = found.stages[:1]
    assert [size.context for size in found.sizes] == [each.context for each in found.stages]
    sizes = found.to_json()["sizes"]
    assert sizes[0]["context"] == stage.context
    assert all(0 < size["memory"]["peak"] < 80e9 and size["seconds"] > 0 for size in sizes)


def test_what_extend_refuses_has_no_plan() -> None:
    with pytest.raises(RopewalkError, match="does not train this model"):
        plan(PlanSettings(model=str(CONFIGS / "gpt-oss-20b.json"), target=2**18))


def test_the_numbers_of_a_config_are_those_of_the_shape(whole: str) -> None:
    found = inspect(InspectSettings(model=whole))
    shape = ModelShape.from_config(found.config)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)


@pytest.mark.parametrize("door", [inspect, plan])
def test_the_examples_run(door: object) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(door, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_a_base_that_is_compared_with_itself_is_listed_as_asked() -> None:
    said = bound_of(BoundSettings(rope_theta=5e5, rotary_dim=32, compare=(1e6, 5e5))).to_json()
    assert [other["rope_theta"] for other in said["others"]] == [1e6, 5e5]
    assert said["others"][1]["context_bound"] == said["context_bound"]
