"""``python -m benchmarks.gpu`` on a CPU: its sections run, and no failure takes what the others have found."""

import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_sizes import SMALL
from tests.benchmarks.benchmark_cases import small

NAMES = [section.name for section in gpu.sections(SMALL, "cpu")]
IN_PROCESSES = ["tests", "several-devices"]


def on_cpu(folder, *names):
    return small("gpu", folder, "--device", "cpu", "--only", *names)


def sections_of(monkeypatch, **works):
    """Let the benchmark have these sections instead, each of a minute."""
    made = [gpu.Section(name.replace("_", "-"), 1, work) for name, work in works.items()]
    monkeypatch.setattr(gpu, "sections", lambda sizes, device: made)


def run(folder, *arguments):
    out = folder / "gpu.json"
    status = gpu.main(["--device", "cpu", "--small", "--out", str(out), *arguments])
    return status, json.loads(out.read_text())


def test_every_section_runs_on_small_sizes(tmp_path):
    names = [name for name in NAMES if name not in IN_PROCESSES]
    found = on_cpu(tmp_path, *names)
    assert list(found["sections"]) == names
    assert found["failed"] == found["left_out"] == []
    figures = {name: each["figures"] for name, each in found["sections"].items()}
    assert figures["check"]["training_step_s"] > 0
    refused = {row["engine"] for row in figures["attention-128"]["rows"] if "refused" in row}
    assert refused == {"varlen", "flex"}
    assert all("seconds" in row for row in figures["training"])
    assert figures["one-rank"]["one_rank"]["loss_difference"] <= figures["one-rank"]["one_rank"]["loss_bound"]


@pytest.mark.slow  # torchrun and pytest start
def test_sections_in_processes_of_their_own_run(tmp_path):
    found = on_cpu(tmp_path, *IN_PROCESSES)["sections"]
    (mesh,) = found["several-devices"]["figures"]
    assert mesh["loss_difference"] <= mesh["loss_bound"]
    assert found["tests"]["figures"]["status"] == 0


def test_a_section_that_fails_takes_nothing_with_it(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"

    def fails():
        assert json.loads(out.read_text())["sections"]["first"]["figures"] == 1
        raise TypeError("train_step() takes no rows")

    sections_of(
        monkeypatch, first=lambda: 1, second=fails, third=lambda: [{"failed": "no end"}], last=lambda: 2
    )
    status, found = run(tmp_path)
    assert status == 1
    assert found["failed"] == ["second", "third"]
    second = found["sections"]["second"]
    assert second["failed"] == "TypeError: train_step() takes no rows"
    assert "in fails" in second["traceback"]
    assert found["sections"]["last"]["figures"] == 2


def test_sections_that_no_longer_fit_are_named(tmp_path, monkeypatch):
    sections_of(monkeypatch, first=lambda: 1, second=lambda: 2)
    status, found = run(tmp_path, "--minutes", "0.5")
    assert (status, found["left_out"], found["sections"]) == (0, ["first", "second"], {})
    status, found = run(tmp_path, "--minutes", "1.5", "--only", "second")
    assert (status, found["left_out"], list(found["sections"])) == (0, [], ["second"])


def test_tests_that_fail_are_a_failure(tmp_path, monkeypatch):
    def ended(command, **options):
        return gpu.subprocess.CompletedProcess(command, 1, "FAILED tests/test_x.py::test_y\n1 failed", "")

    monkeypatch.setattr(gpu.subprocess, "run", ended)
    status, found = run(tmp_path, "--only", "tests")
    assert (status, found["failed"]) == (1, ["tests"])


def test_unknown_sections_and_a_machine_without_a_gpu_are_refused(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--only", "attention"])
    assert "no section attention; choose from check, tests, attention-8192" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--device cpu --small shows that they run" in said
