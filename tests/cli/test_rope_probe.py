"""``ropewalk rope probe`` through the program's own main, on a tiny random checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.cli import app as program
from tests.cli.byte_checkpoint import save_byte_checkpoint

Run = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, 64 tokens of stated context, weights large enough for RoPE to matter."""
    return save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny", 64, initializer_range=0.3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"text": f"{n * n} " + "abc de fgh " * 60}) + "\n" for n in range(6))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command."""
    return lambda *arguments: program.main(["rope", "probe", *map(str, arguments)])


def altered(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    import shutil

    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_json_holds_results_and_nothing_else(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, "--to", "0.25k", "--text", text, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    results = said.pop("results")
    assert said.pop("versions")["ropewalk"]
    assert said == {
        "model": str(checkpoint),
        "trained_length": 64,
        "target_length": 256,
        "text": str(text),
        "rows": 4,
        "dtype": "float32",
        "device": said["device"],
        "best": results[0]["name"],
    }
    assert {r["name"] for r in results} == {"current", "critical-dimension", "ntk", "linear", "yarn"}
    assert [r["loss"] for r in results] == sorted(r["loss"] for r in results)
    by_name = {r["name"]: r for r in results}
    assert by_name["ntk"]["rope_theta"] == pytest.approx(1e4 * 4 ** (8 / 6))
    assert by_name["ntk"]["method"] == "default"
    assert by_name["yarn"]["method"] == "yarn"
    assert by_name["current"]["context_bound"] == 90
    assert results[0]["difference"] == 0
    assert {"ci95", "within_loss", "beyond_loss", "beyond_ci95", "difference_ci95"} < set(results[0])


def test_table_sentence_and_picture(
    run: Run,
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    picture = tmp_path / "probe.png"
    rules = "theta=5e6,current,schedule:lwm,ntk"
    assert (
        run(checkpoint, "--to", "256", "--from", "32", "--text", text, "--rules", rules, "--plot", picture)
        == 0
    )
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert (
        lines[0]
        == "Loss before training in nats per token, over 4 sequences of 256 tokens, with 95 % interval over sequences"
    )
    # Notes on the columns, then the table.
    assert lines[1] == "beyond 32: loss of the tokens after the first 32"
    header = next(number for number, line in enumerate(lines) if line.startswith("setting"))
    assert "beyond 32" in lines[header]
    assert "…" not in printed.out
    assert {line.split()[0] for line in lines[header + 1 : header + 5]} == {
        "theta=5e6",
        "current",
        "schedule:lwm",
        "ntk",
    }
    assert "5,000,000" in printed.out
    (verdict,) = (line for line in lines if " has the lowest loss, " in line)
    assert verdict.startswith(lines[header + 1].split()[0])
    assert "significant across sequences" in verdict
    assert "does not show which one is best after training" in verdict
    assert picture.stat().st_size > 1000
    assert str(picture) in printed.out


def test_what_has_no_meaning_is_not_run(
    run: Run, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled = altered(
        checkpoint,
        tmp_path / "scaled",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )
    arguments = (scaled, "--to", "128", "--text", text, "--rules", "ntk,current,linear", "--rows", "1")
    assert run(*arguments, "--json") == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results[2]["name"] == "ntk"
    assert results[2]["status"] == "not run"
    assert "unscaled RoPE" in results[2]["reason"]
    assert {results[2][key] for key in ("loss", "difference", "rope_theta", "context_bound")} == {None}
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert "ntk did not run: " in printed
    assert "one sequence cannot show whether that is chance" in printed
    assert run(*arguments[:-4], "--rules", "ntk") == 2
    assert "no RoPE setting is left to probe (ntk: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "ntk,yarrn"], "unknown rule 'yarrn'"),
        (["--rules", "theta=big"], "theta=big is not a number"),
        (["--rules", ","], "--rules: ',' is empty; give one or more values"),
        (["--to", "12q"], "'12q' is not a length"),
        (["--to", "32"], "--to 32 is shorter than the trained length of 64 tokens"),
        (["--from", "0"], "'0' is 0 tokens"),
        (["--to", "1M"], "too few for one row of 1048576"),
        (["--rows", "0"], "rows must be 1 or more, got 0"),
        (["--text", "no/such.jsonl"], "no/such.jsonl"),
        (["--dtype", "int8"], "unknown --dtype 'int8'"),
        (["--device", "gpu0"], "unknown device 'gpu0'"),
        (["--plot", "probe.pdf"], ".png or .svg"),
    ],
)
def test_bad_input_is_one_sentence_before_the_model_is_loaded(
    run: Run,
    checkpoint: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("ropewalk.evaluation.rope_probe.load_model", None)
    assert run(checkpoint, "--to", "128", "--text", text, *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_missing_models_are_named(
    run: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "nowhere", "--to", "128", "--text", text) == 2
    assert "nowhere" in capsys.readouterr().err
