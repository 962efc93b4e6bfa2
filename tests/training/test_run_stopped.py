"""A run that a signal stops: it completes its step, writes a checkpoint, and goes on to the same weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ropewalk.training.stage as stage
from ropewalk.cli.app import main
from ropewalk.training.checkpoint.files import checkpoints_in
from tests.training.resume_cases import weights_of, write
from tests.training.run_cases import signalled


def begun(done, tmp_path):
    """A copy of a run before its training, with a checkpoint only at the end of its four steps."""
    values, _ = done
    output = shutil.copytree(values["output"], tmp_path / "run")
    shutil.rmtree(output / "checkpoints")
    for name in ("model", "summary.json", "evaluation-after.json", "metrics.jsonl"):
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {**values, "output": str(output), "checkpoints": {"every": 100, "keep": 2}}


@pytest.mark.parametrize(("number", "asynchronous"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_stopped_run_goes_on_to_the_same_weights(done, tmp_path, monkeypatch, capsys, number, asynchronous):
    values = begun(done, tmp_path)
    values["checkpoints"]["asynchronous"] = asynchronous
    recipe = write(tmp_path / "recipe.yaml", values)
    with monkeypatch.context() as patch:
        signalled(patch, number, 3)
        assert main(["extend", recipe, "--resume"]) == 75
    said = capsys.readouterr().err
    checkpoint = Path(values["output"]) / "checkpoints" / "stage0-step000003"
    assert (
        f"error: stopped by {number.name}: the last checkpoint is {checkpoint}; the same command with" in said
    )
    assert checkpoints_in(checkpoint.parent) == [checkpoint]
    assert main(["extend", recipe, "--resume"]) == 0
    lines = (Path(values["output"]) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert weights_of(values["output"]) == weights_of(done[0]["output"])


@pytest.mark.slow
def test_a_signal_in_the_last_step_leaves_the_export_to_the_next_start(done, tmp_path, monkeypatch):
    values = begun(done, tmp_path)
    recipe = write(tmp_path / "recipe.yaml", values)
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGUSR1, 4)
        assert main(["extend", recipe, "--resume"]) == 75
    assert not (Path(values["output"]) / "model").exists()
    assert main(["extend", recipe, "--resume"]) == 0
    assert weights_of(values["output"]) == weights_of(done[0]["output"])


def test_a_signal_outside_of_training_ends_the_run_at_once(done, tmp_path, monkeypatch, capsys):
    values = begun(done, tmp_path)
    monkeypatch.setattr(
        "ropewalk.training.run.refuse_too_little", lambda *_: signal.raise_signal(signal.SIGUSR1)
    )
    assert main(["extend", write(tmp_path / "recipe.yaml", values), "--resume"]) == 75
    said = capsys.readouterr().err
    assert "stopped by SIGUSR1: the run in" in said
    assert "has no checkpoint yet" in said


PARTS_OUTSIDE_OF_TRAINING = {
    "evaluation before": "ropewalk.training.run.measure",
    "export": "ropewalk.training.run.export_model",
    "summary": "ropewalk.training.run.summary",
    "report": "ropewalk.reporting.run.training.write_page",
    "terminal": "ropewalk.reporting.run.training.describe_run",
}


@pytest.mark.slow
def test_a_signal_outside_of_training_says_how_to_go_on(done, tmp_path, monkeypatch, capsys):
    """One part after the other, in the order in which a run comes to them."""
    values = begun(done, tmp_path)
    (Path(values["output"]) / "evaluation-before.json").unlink()
    recipe = write(tmp_path / "recipe.yaml", values)
    for part, name in PARTS_OUTSIDE_OF_TRAINING.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda *_, **__: signal.raise_signal(signal.SIGTERM))
            assert main(["extend", recipe, "--resume"]) == 75, part
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("error: stopped by SIGTERM: "), part
        assert "the same command with --resume" in said, part
    assert main(["extend", recipe, "--resume"]) == 0
    assert weights_of(values["output"]) == weights_of(done[0]["output"])
    assert (Path(values["output"]) / "report.html").is_file()


@pytest.mark.slow
def test_a_signal_after_the_last_step_is_not_forgotten(done, tmp_path, monkeypatch):
    values = begun(done, tmp_path)
    recipe = write(tmp_path / "recipe.yaml", values)
    best = stage._best

    def signalled_later(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return best(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_best", signalled_later)
        assert main(["extend", recipe, "--resume"]) == 75
    assert not (Path(values["output"]) / "model").exists()
    assert main(["extend", recipe, "--resume"]) == 0
    assert weights_of(values["output"]) == weights_of(done[0]["output"])


def test_a_signal_during_the_imports_says_that_nothing_has_started(tmp_path):
    """A process of its own, because an import that is interrupted leaves modules half made."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    found = subprocess.run(
        [sys.executable, "-m", "ropewalk", "extend", "recipe.yaml"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (
        75,
        "error: stopped by SIGTERM: nothing has started yet; run the same command to start again\n",
    )
