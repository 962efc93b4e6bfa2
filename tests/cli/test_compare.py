"""``ropewalk compare`` through the program's own main."""

import json
import re
import shlex

import pytest

from ropewalk import RopewalkError, compare
from ropewalk.cli import app as program
from ropewalk.experiments import run
from ropewalk.experiments.grid import make_grid
from tests.experiments.test_finished_runs import finished_run
from tests.places import ROOT


@pytest.fixture
def runs(tmp_path):
    return [str(finished_run(tmp_path / p, f"stages.0.pattern={p}")) for p in ("full", "anchor")]


def test_finished_runs_are_compared_and_the_conclusion_comes_first(capsys, runs):
    assert program.main(["compare", *runs]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "No difference from pattern full is more than chance (1 tested); each cell has one seed"
    )
    assert "Cells and what the training of a run cost" in shown


def test_a_page_and_figures_lie_in_the_folder(capsys, runs, tmp_path):
    out = tmp_path / "out"
    assert program.main(["compare", *runs, "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["name"] for cell in result["cells"]] == ["pattern full", "pattern anchor"]
    assert json.loads((out / "comparison.json").read_text()) == result
    page = (out / "report.html").read_text()
    assert result["conclusion"] in page
    assert {path.name for path in out.glob("*.png")} == {"passkey.png", "difference-1.png"}
    assert {path.name for path in out.glob("*.svg")} == {"passkey.svg", "difference-1.svg"}
    assert "0.1.0-of-a-test" in page


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


def test_commands_of_the_page_on_bases_make_the_cells_that_it_names(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "how-to" / "choose-a-base.md").read_text()
    (tmp_path / "recipe.yaml").write_text(
        re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    )
    grids = []

    def made(settings, context):
        grid = make_grid(settings.what[0], settings.vary, settings.seeds, settings.overrides, context.output)
        grids.append(grid)
        raise RopewalkError("the grid is enough")

    monkeypatch.setattr(run, "compare", made)
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"^ *ropewalk (compare .*)$", page, re.MULTILINE):
        assert program.main(shlex.split(command)) == 2
    demo, own, methods = grids
    assert methods.cells == ["base 1e4", "base 4e4", "base auto", "yarn"]
    assert all(f"`{cell}`" in page for cell in methods.cells if cell != "base auto")
    assert all(f"`{cell}`" in page for cell in demo.cells)
    assert len(demo.runs) == len(own.runs) == 6
    assert [[stage.rope.rope_theta for stage in each.recipe.stages] for each in own.runs[::2]] == [
        [6315088.765, base] for base in (4.87e6, 7.98e7, 5e8)
    ]
    assert {each.recipe.stages[1].steps for each in own.runs} == {100}


def test_the_folder_of_a_comparison_is_shown_again(capsys, tmp_path):
    vary, out = ["stages.*.rope=theta,yarn"], tmp_path / "out"
    grid = make_grid("demo", vary, 1, [], out)
    for each in grid.runs:
        finished_run(each.folder, f"stages.0.rope={each.recipe.stages[0].rope.method}")
        (each.folder / "report.html").write_text("")
    (out / "grid.json").write_text(json.dumps(grid.record()))
    before = sorted(out.rglob("*"))
    assert program.main(["compare", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["name"] for cell in result["cells"]] == ["base auto", "yarn"]
    assert compare(str(out)).to_json() == result
    assert sorted(out.rglob("*")) == before
    assert program.main(["compare", str(out), "--set", "stages.0.steps=3"]) == 2
    assert "omit --set" in capsys.readouterr().err
