"""``ropewalk watch`` looks once where nobody sees a screen change, and until the run ends where somebody does."""

import json

import pytest

from ropewalk.cli import watch as module
from ropewalk.cli.app import main
from ropewalk.training import so_far as source
from tests.reporting.run.test_watched import TRAINING


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run that finishes at the third look."""
    from dataclasses import replace

    looks = []

    def so_far(folder):
        looks.append(folder)
        return replace(TRAINING, state="finished" if len(looks) == 3 else "training")

    monkeypatch.setattr(source, "so_far", so_far)
    return looks


def test_a_pipe_gets_one_look(run, capsys):
    assert main(["watch", "runs/books"]) == 0
    assert "step       40 of 500" in capsys.readouterr().out
    assert len(run) == 1


def test_a_page_is_written_until_the_run_ends_wherever_the_output_goes(run, capsys, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    page = tmp_path / "w.html"
    assert main(["watch", "runs/books", "--page", str(page)]) == 0
    assert (len(run), waits) == (3, [5.0, 5.0])
    out = capsys.readouterr().out
    assert out.count("step       40 of 500") == 1
    assert f"page  {page}" in out


def test_a_page_is_written_once_if_asked(run, capsys, tmp_path):
    page = tmp_path / "w.html"
    assert main(["watch", "runs/books", "--page", str(page), "--once"]) == 0
    out = capsys.readouterr().out
    assert "step       40 of 500" in out
    assert f"page  {page}" in out
    assert page.is_file()
    assert len(run) == 1


def test_json_is_one_object(run, capsys):
    assert main(["watch", "runs/books", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 40


def test_a_terminal_is_drawn_again_until_the_run_ends(run, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    monkeypatch.setattr(module.Terminal, "is_terminal", True)
    assert main(["watch", "runs/books", "--every", "2"]) == 0
    assert (len(run), waits) == (3, [2.0, 2.0])
    assert capsys.readouterr().out.count("40 of 500") == 3


def test_ctrl_c_is_the_usual_end(run, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupted)
    monkeypatch.setattr(module.Terminal, "is_terminal", True)
    assert main(["watch", "runs/books"]) == 0


def test_a_page_has_a_name_that_a_browser_knows(run, capsys):
    assert main(["watch", "runs/books", "--page", "w.txt"]) == 2
    assert "--page must name an .html file" in capsys.readouterr().err
