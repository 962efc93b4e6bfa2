"""``ropewalk verify`` as a user meets it: a table, JSON, a file, and the exit status."""

import json
import os
import signal
import tempfile

import pytest
import yaml

import ropewalk.verification.run
from ropewalk.cli.app import main
from tests.cli.verify_command_cases import command, run_with_a_cast


@pytest.fixture
def recipe(tmp_path):
    """The embedded model cut to one layer by --layers, on a few documents of its own kind."""
    text = "def strand(rope):\n    return [yarn for yarn in rope if yarn.twist > 0]\n"
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": text * n}) + "\n" for n in (1, 2, 3, 1, 4, 2, 5, 1, 2, 3, 2, 4))
    )
    values = {
        "model": "embedded",
        "output": str(tmp_path / "run"),
        "data": {"sources": [str(documents)]},
        "stages": [{"context": 512, "steps": 2, "rows_per_step": 2}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


SMALL = ["--layers", "1", "--length", "32"]
NARROW = ["--set", "exact_rope=false", "--set", "precision=bfloat16"]


@pytest.mark.slow
def test_a_recipe_passes_and_leaves_nothing_behind(recipe, tmp_path, capsys):
    out = tmp_path / "verify.json"
    assert main(["verify", recipe, *SMALL, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found == json.loads(out.read_text())
    assert (found["failed"], found["layers"], found["length"], found["rows"]) == (0, 1, 32, 4)
    assert {"model", "mesh", "device", "versions"} <= found.keys()
    for check in found["checks"]:
        assert check.keys() == {"name", "compared", "error", "budget", "passed", "seconds", "note"}
    assert "the first layer of 5" in captured.err
    assert not any("1 layers" in check["note"] for check in found["checks"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_failure_is_in_the_table_and_in_the_status(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(ropewalk.verification.run, "run_planned", run_with_a_cast)
    assert main(["verify", recipe, *SMALL, *NARROW]) == 1
    captured = capsys.readouterr()
    assert "failed: RoPE as loaded: in bfloat16 the model's RoPE angles are not those of" in captured.out
    assert "NO" in captured.out
    title, _budget, *table = captured.out.partition("\n\n")[0].splitlines()
    assert "embedded, first layer: 4 sequences" in title
    assert len(table) > 15
    assert max(map(len, table)) <= 80
    assert captured.err.splitlines()[-1].endswith(" 1 of 20 checks failed: 'RoPE as loaded'")


def test_sigterm_leaves_nothing_behind(recipe, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    seen = []

    def told_to_end(*_):
        seen.extend((tmp_path / "temporary").glob("ropewalk-verify-*"))
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal is handled before the next line")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ropewalk.verification.run, "planned_checks", told_to_end)
    assert main(["verify", recipe, *SMALL]) == 1
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: verify was ended by SIGTERM, and left nothing behind"
    )
    assert len(seen) == 1
    assert not list((tmp_path / "temporary").iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_the_processes_of_torchrun_are_used(two_ranks, recipe):
    """In bfloat16 and with the RoPE of transformers, which passes every check."""
    (status, text), (other, nothing) = two_ranks.run(command, ["verify", recipe, *SMALL, *NARROW, "--json"])
    assert (status, other, nothing) == (0, 0, "")
    found = json.loads(text)
    assert found["mesh"] == "2 processes of torchrun, cpu"
    (rope,) = [check for check in found["checks"] if check["name"] == "RoPE as loaded"]
    assert "in bfloat16" in rope["note"]
    assert found["recipe_mesh"] in {check["name"].partition(", ")[2] for check in found["checks"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "1k"], "--length must be from 32 to the stage's context of 512, got 1024"),
        (["--layers", "6"], "--layers must be from 1 to the model's 5 layers, got 6"),
        (["--length", "512"], "the documents fill"),
        (["--out", "."], "--out: . is a folder, but must be a file"),
        (["--set", "model=nowhere/at/all"], "there is no folder or file nowhere/at/all"),
        (["--ranks", "1"], "--ranks"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(recipe, arguments, message, capsys):
    assert main(["verify", recipe, *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("error: ")
    assert message in errors[-1]
