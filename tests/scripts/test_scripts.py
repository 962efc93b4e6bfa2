"""Every script is run by some test."""

import pytest

from tests.places import ROOT

TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
PARTS = {"command_outputs": "recorded_cases", "retrieval_rows": "train_retrieval_model"}
"""Scripts that tests reach through another module."""


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_every_script_has_a_test(name):
    assert PARTS.get(name, name) in TESTS
