"""``ropewalk eval`` through the program's own main, on a tiny random checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from byte_checkpoint import save_byte_checkpoint
from ropewalk.cli import app as program
from ropewalk.cli import evaluate

Run = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, 256 tokens of stated context."""
    return save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny", 256)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + "abc " * 200}) + "\n" for n in range(6)))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program with this one command."""
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    evaluate.register(app)
    monkeypatch.setattr(program, "app", app)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *arguments: program.main(["eval", *map(str, arguments)])


def test_json_holds_results_and_nothing_else(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            checkpoint,
            "--lengths",
            "256,0.5k",
            "--text",
            text,
            "--samples",
            2,
            "--rows",
            3,
            "--json",
            "--suite",
            "perplexity",
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    results = said.pop("results")
    assert said.pop("versions")["ropewalk"]
    assert said == {
        "model": str(checkpoint),
        "suites": ["perplexity"],
        "lengths": [256, 512],
        "text": str(text),
        "seed": 0,
        "engine": "segments",
        "dtype": "float32",
        "device": said["device"],
        "exact_rope": True,
    }
    assert [(r["suite"], r["length"], r["n"], r["status"], r["reason"]) for r in results] == [
        ("perplexity", 256, 3, "ok", None),
        ("perplexity", 512, 3, "ok", None),
    ]
    # A random model of so small weights knows nothing but the vocabulary's size.
    assert results[0]["score"] == pytest.approx(258, rel=0.1)
    assert [(p["start"], p["end"]) for p in results[1]["positions"]] == [(0, 256), (256, 512)]
    assert {"n_tokens", "n_windows", "perplexity", "ci95"} < set(results[1]["positions"][0])


def test_out_holds_results_predictions_and_figures(
    run: Run, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "results"
    # A prompt takes some 330 bytes without any noise.
    assert run(checkpoint, "--lengths", 512, "--text", text, "--samples", 2, "--rows", 2, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "passkey.png",
        "perplexity.png",
        "predictions.jsonl",
        "results.json",
    ]
    record = json.loads((out / "results.json").read_text())
    assert [result["suite"] for result in record["results"]] == ["perplexity", "passkey"]
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 2
    for prediction in predictions:
        assert prediction["suite"] == "passkey"
        assert 0.95 * 512 < prediction["prompt_tokens"] + 10 <= 512
    printed = capsys.readouterr()
    assert "Perplexity by position in 2 rows of 512 tokens" in printed.out
    assert "256 to 511" in printed.out
    assert "Passkey retrieval" in printed.out
    assert str(out) in printed.out.replace("\n", "")
    assert "Traceback" not in printed.err


def test_same_seed_gives_the_same_results(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Any] = []
    for seed in (1, 1):
        assert (
            run(
                checkpoint,
                "--lengths",
                400,
                "--text",
                text,
                "--samples",
                1,
                "--rows",
                2,
                "--seed",
                seed,
                "--json",
            )
            == 0
        )
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]


def test_length_is_the_configs_if_not_given(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(checkpoint, "--suite", "perplexity", "--text", text, "--rows", 1, "--no-exact-rope", "--json")
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["lengths"] == [256]
    assert said["exact_rope"] is False
    # One row says nothing of the spread between rows.
    assert said["results"][0]["ci95"] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "perplexity,pass-key"], "unknown suite 'pass-key'; did you mean passkey"),
        (["--suite", ","], "no suite given"),
        (["--lengths", "12q"], "'12q' is no length"),
        (["--lengths", ","], "--lengths ',' names no length"),
        (["--lengths", "64", "--suite", "passkey"], "passkey does not fit in 64 tokens; the shortest length"),
        (["--lengths", "1M", "--suite", "perplexity"], "too few for one row of 1048576"),
        (["--text", "no/such.jsonl"], "no/such.jsonl"),
        (["--dtype", "int8"], "unknown dtype 'int8'; choose one of auto, float32"),
        (["--device", "gpu0"], "unknown device 'gpu0'"),
        (["--engine", "fast"], "unknown attention engine 'fast'"),
        (["--samples", "0", "--lengths", "512"], "samples must be 1 or more, got 0"),
        (["--rows", "0"], "rows must be 1 or more, got 0"),
        (["--out", __file__], "is a file; --out names a folder"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run,
    checkpoint: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(checkpoint, "--text", text, *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_missing_model_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert "has no config.json" in capsys.readouterr().err
