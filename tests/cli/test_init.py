"""``ropewalk init`` writes a recipe that ``recipe check`` accepts."""

import json
from pathlib import Path

import pytest
import yaml

from ropewalk.cli.app import main


def test_a_recipe_is_written_checked_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    command = ["init", "embedded", "--documents", "embedded:validation", "--target", "1k", "--out", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"ropewalk extend {out}" in shown
    assert "steps    stage 1: " in shown
    assert yaml.safe_load(out.read_text())["stages"][0]["context"] == "1k"
    assert main(["recipe", "check", str(out)]) == 0
    assert "The recipe is valid and fits the model" in capsys.readouterr().out
    before = out.read_bytes()
    assert main(command) == 2
    assert "already exists; give a new file with --out" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_recipe_that_would_teach_little_here_is_warned_about_before_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "short.jsonl").write_text('{"text": "one short document"}\n' * 1000)
    out = tmp_path / "mine.yaml"
    command = ["init", "embedded", "--documents", str(tmp_path / "short.jsonl"), "--target", "1k"]
    assert main([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    short, gpu = "None of these documents reaches 1,024 tokens", "This machine has no GPU"
    assert 0 < shown.index(f"warning  {short}") < shown.index(f"warning  {gpu}") < shown.index("next ")
    assert f"# {short}" in out.read_text()
    assert f"# {gpu}" in out.read_text()
    assert main([*command, "--out", str(tmp_path / "other.yaml"), "--json"]) == 0
    assert [line[: len(short)] for line in json.loads(capsys.readouterr().out)["warnings"][:1]] == [short]


def test_json_says_what_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    asked = ["--documents", "embedded:validation", "--target", "1k", "--out", str(out), "--json"]
    assert main(["init", "embedded", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == out.read_text()
    assert found["documents"]["tokens"] > 1024
