"""Options and result files that all benchmarks share."""

import json
from pathlib import Path

import pytest

from benchmarks.common import RESULTS, parsed, parser_of, settings_of, write
from tests.places import ROOT

BENCHMARKS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "def main(" in path.read_text(encoding="utf-8")
)


def options(*arguments):
    parser = parser_of("Of a test.")
    parser.add_argument("--length", type=int, default=4096)
    return parsed(parser, {"length": 8}, arguments)


def test_a_small_run_has_other_defaults_and_writes_elsewhere():
    assert options().length == 4096
    assert options("--small").length == 8
    assert options("--small", "--length", "9").length == 9
    assert options().out is None
    assert not Path(options("--small").out).is_relative_to(RESULTS)


def test_a_result_says_whether_it_is_small(tmp_path):
    out = tmp_path / "folder" / "result.json"
    for arguments in ([], ["--small"]):
        given = options("--out", str(out), *arguments)
        assert write("name", {"settings": settings_of(given)}, given) == out
        found = json.loads(out.read_text())
        assert found.get("small", False) == bool(arguments)
        assert found["settings"] == {"length": given.length}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_test_of_its_small_run(name):
    text = (ROOT / "tests" / "benchmarks" / f"test_{name}.py").read_text(encoding="utf-8")
    assert "small(" in text
