"""The notebook runs from top to bottom, with fewer steps, in an empty folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_hour.ipynb"
FEWER = (("steps = 60", "steps = 2"), ('"output=first-hour",', '"output=first-hour", *SMALLER,'))
SMALLER = (
    "data.sources=[{path: embedded, max_documents: 50}]",
    "stages.0.rows_per_step=2",
    "evaluation.samples=1",
    "evaluation.rows=2",
)


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def test_it_is_stored_without_results() -> None:
    assert len({cell["id"] for cell in cells()}) == len(cells())
    for cell in cells():
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    code = "\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")
    for text, fewer in FEWER:
        assert code.count(text) == 1
        code = code.replace(text, fewer)
    start = "import os, sys, matplotlib\nos.chdir(sys.argv[1])\nmatplotlib.use('agg')"
    done = run_program(f"{start}\nSMALLER = {SMALLER!r}\n{code}", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained for 256 tokens" in done.stdout
    assert "passkey found in 1,024 tokens" in done.stdout
    assert "vllm serve" in done.stdout
    assert (tmp_path / "first-hour" / "summary.json").is_file()
