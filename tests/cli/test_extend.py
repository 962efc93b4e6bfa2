"""``ropewalk extend``: what it is given reaches the run, and what it says is the run's own."""

from pathlib import Path

import pytest

import ropewalk.recipes
from ropewalk import RopewalkError
from ropewalk.cli.app import main
from ropewalk.training import load_recipe


def test_help_names_every_shipped_recipe(capsys):
    assert main(["extend", "--help"]) == 0
    printed = capsys.readouterr().out
    names = [path.stem for path in Path(ropewalk.recipes.__path__[0]).glob("*.yaml")]
    assert "llama-64k" in names
    assert all(name in printed for name in names)


@pytest.fixture
def run(monkeypatch):
    """What the command hands to the run, which is not begun."""
    given = []

    def refuse(*arguments):
        given.append(arguments)
        raise RopewalkError("not begun")

    monkeypatch.setattr("ropewalk.training.extend", refuse)
    return given


def test_recipe_overrides_and_resume_reach_the_run(run, capsys):
    keys = ["--set", "stages.0.steps=20", "--set", "output=runs/of-mine"]
    assert main(["extend", "llama-64k", *keys, "--resume"]) == 2
    ((recipe, context, resume, from_stage),) = run
    assert recipe == load_recipe("llama-64k", ["stages.0.steps=20", "output=runs/of-mine"])
    assert (recipe.stages[0].steps, recipe.output) == (20, "runs/of-mine")
    assert context.world.size == 1
    assert resume
    assert from_stage is None
    assert capsys.readouterr().err == "error: not begun\n"
    assert main(["extend", "llama-64k"]) == 2
    assert run[1][2] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["llama-64k", "--set", "stages.0.stepz=1"], "stepz"),
        (["llama-64k", "--rope", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_run(run, capsys, arguments, message):
    assert main(["extend", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert run == []


def test_ctrl_c_before_anything_began_says_that_the_same_command_starts_again(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropewalk.training.load_recipe", interrupted)
    assert main(["extend", "llama-64k"]) == 130
    assert "nothing has started yet; run the same command to start again" in capsys.readouterr().err
