"""Configs that a plan is made of."""

import json
from pathlib import Path

import pytest

from tests.planning.planning_cases import LLAMA


@pytest.fixture
def whole(tmp_path: Path) -> str:
    """A config with the widths that a size follows from, which the published one here leaves out."""
    values = json.loads(Path(LLAMA).read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, "intermediate_size": 14336, "vocab_size": 128256}))
    return str(path)
