"""What inspect finds in a checkpoint's config, without loading it."""

import json

import pytest

from ropewalk.planning import InspectSettings, inspect
from ropewalk.planning.sizing.model_shape import ModelShape
from tests.planning.planning_cases import LLAMA, printed


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


def test_the_numbers_of_a_config_are_those_of_the_shape(whole: str) -> None:
    found = inspect(InspectSettings(model=whole))
    shape = ModelShape.from_config(found.config)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)
