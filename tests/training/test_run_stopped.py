"""A run that a signal stops: it completes its step, writes a checkpoint, and goes on to the same weights."""

import json
import shutil
import signal
from pathlib import Path

import pytest

import ropewalk.training.stage as stage
from ropewalk.cli.app import main
from ropewalk.training.checkpoint.files import checkpoints_in
from tests.training.resume_cases import weights_of, write


def begun(done, tmp_path):
    """A copy of a run before its training, with a checkpoint only at the end of its four steps."""
    values, _ = done
    output = shutil.copytree(values["output"], tmp_path / "run")
    shutil.rmtree(output / "checkpoints")
    for name in (
        "model",
        "summary.json",
        "evaluation-after.json",
        "evaluation-after.digest.json",
        "metrics.jsonl",
    ):
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {**values, "output": str(output), "checkpoints": {"every": 100, "keep": 2}}


def signalled(monkeypatch, number, at_step):
    """Send this process a signal in the middle of a step."""
    step_of, steps = stage.train_step, []

    def train_step(*arguments):
        steps.append(1)
        if len(steps) == at_step:
            signal.raise_signal(number)
        return step_of(*arguments)

    monkeypatch.setattr(stage, "train_step", train_step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_run_goes_on_to_the_same_weights(done, tmp_path, monkeypatch, capsys, number):
    values = begun(done, tmp_path)
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
    monkeypatch.setattr("ropewalk.training.run._shared_rows", lambda *_: signal.raise_signal(signal.SIGUSR1))
    assert main(["extend", write(tmp_path / "recipe.yaml", values), "--resume"]) == 75
    said = capsys.readouterr().err
    assert "stopped by SIGUSR1: the run in" in said
    assert "has no checkpoint yet" in said
