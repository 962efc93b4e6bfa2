"""``ropewalk compare`` through the program's own main."""

import json

import pytest

from ropewalk.cli import app as program
from tests.experiments.test_finished_runs import finished_run


@pytest.fixture
def runs(tmp_path):
    return [str(finished_run(tmp_path / p, f"stages.0.pattern={p}")) for p in ("full", "anchor")]


def test_finished_runs_are_compared_and_the_conclusion_comes_first(capsys, runs):
    assert program.main(["compare", *runs]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "No difference from pattern full is more than chance (1 tested); each cell has one seed"
    )
    assert "Cells and what a run of each cost" in shown


def test_a_page_and_figures_lie_in_the_folder(capsys, runs, tmp_path):
    out = tmp_path / "out"
    assert program.main(["compare", *runs, "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["name"] for cell in result["cells"]] == ["pattern full", "pattern anchor"]
    assert json.loads((out / "comparison.json").read_text()) == result
    page = (out / "report.html").read_text()
    assert result["conclusion"] in page
    assert {path.name for path in out.glob("*.png")} == {"passkey.png", "difference-1.png"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo"], "nothing to compare"),
        (["demo", "--vary", "stages.*.pattern=full,anchr", "--out", "x"], "did you mean anchor?"),
        (["demo", "--vary", "stages.*.pattern=full,anchor"], "give --out"),
        (["nothing", "nowhere"], "the folder 'nothing' does not exist"),
    ],
)
def test_mistakes_end_with_status_2_and_one_sentence(capsys, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert program.main(["compare", *arguments]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert sentence in error
    assert error.count("error:") == 1
    assert not list(tmp_path.iterdir())
