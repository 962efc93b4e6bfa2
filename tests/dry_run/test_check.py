"""A recipe is checked without a run: what it would train, what is missing, and what is wrong with it."""

from dataclasses import replace

import pytest
import torch

from ropewalk import RopewalkError
from ropewalk.dry_run import check as module
from ropewalk.dry_run.check import check
from ropewalk.dry_run.settings import TrainingMachine
from ropewalk.training import load_recipe
from ropewalk.training.preflight import resolve
from tests.dry_run.cases import model_folder


def test_a_recipe_whose_model_is_here_is_compared_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = check(load_recipe("demo"))
    assert found.missing == ()
    assert any("trained for 256 tokens" in line for line in found.resolved)
    assert found.tokens == sum(stage.tokens for stage in found.stages) == 60 * 8 * 1024
    assert not list(tmp_path.iterdir())


def test_what_the_model_cannot_do_is_refused():
    with pytest.raises(RopewalkError, match=r"lift\.0 is 'windows', but the model has no such limit"):
        check(load_recipe("demo", ["lift=[windows]"]))


def test_what_is_not_here_is_said_and_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    found = check(load_recipe("llama-64k", ["data.validation_sources=[held-out.jsonl]"]))
    assert found.resolved is None
    assert [line.partition(":")[0] for line in found.missing] == [
        "model meta-llama/Llama-2-7b-hf",
        "data.sources.0 documents",
        "data.validation_sources.0 held-out.jsonl",
    ]
    (tmp_path / "documents").mkdir()
    assert len(check(load_recipe("llama-64k")).missing) == 1


def test_all_that_a_folder_with_a_config_alone_lacks_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = f"model={model_folder(tmp_path / 'model')}"
    found = check(load_recipe("demo", [own, "data.sources=[documents]"]))
    assert [line.partition(":")[0].split(" in ")[0] for line in found.missing] == [
        "weights (model.safetensors)",
        "a tokenizer (tokenizer.json)",
        "data.sources.0 documents",
    ]
    assert any("trained for 256 tokens" in line for line in found.resolved)
    assert not found.ready
    with pytest.raises(RopewalkError, match=r"lift\.0 is 'windows'"):
        check(load_recipe("demo", [own, "lift=[windows]"]))


def test_what_lies_elsewhere_by_design_is_not_missing():
    recipe = load_recipe("demo", ["data.sources=['hf:owner/name', embedded]"])
    assert check(recipe).missing == ()


LEAST = 16 * 966_016 + 5 * (2 * 1024) * 128 * 4
"""Bytes of the demo's step: parameters, gradients and moments, and what 5 layers get of 2 rows of 1,024 tokens."""
NEEDED = -(-LEAST * 10 // 9)
"""Nine tenths of the memory may be filled."""


def test_a_recipe_that_this_machine_has_no_memory_for_is_not_ready(monkeypatch):
    monkeypatch.setattr(module, "device_bytes", lambda device: NEEDED)
    assert check(load_recipe("demo")).ready
    monkeypatch.setattr(module, "device_bytes", lambda device: NEEDED - 2)
    found = check(load_recipe("demo"))
    assert not found.ready
    assert found.missing == (
        "memory for stages.0: a step takes 0.02 GB or more, but a run on this machine may fill 0.02 GB of its CPU; "
        "--gpus and --gpu check for another machine, and ropewalk plan says what others take",
    )
    # A stage without steps takes no memory.
    searched = ["stages.0.steps=0", "stages.0.rope={method: longrope, search: {}}", "stages.0.warmup_steps=0"]
    assert check(load_recipe("demo", searched)).ready


def test_the_gpus_of_a_machine_share_what_a_step_takes(monkeypatch):
    on_gpu = replace(resolve(load_recipe("demo")), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(module, "device_bytes", lambda device: NEEDED // 8 + 1)
    assert list(module._missing_memory(on_gpu, None)) == []
    monkeypatch.setattr(module, "device_bytes", lambda device: NEEDED // 8 - 1)
    (line,) = module._missing_memory(on_gpu, None)
    assert line.startswith("memory for stages.0: a step takes 0.02 GB or more")
    assert "0.02 GB of its 8 GPUs; --gpus and --gpu check" in line


def test_a_recipe_is_checked_for_the_gpus_that_are_named(tmp_path):
    own = [f"model={model_folder(tmp_path / 'model')}", "data.sources=[embedded]", "stages.0.context=1k"]
    found = check(load_recipe("demo", own), TrainingMachine(gpus=2, gpu="h100"))
    assert any(line.startswith("2 processes: ") for line in found.resolved)
    assert not any(line.startswith("memory") for line in found.missing)
    # What the stages ask for is compared with those GPUs, and with no processes of this machine.
    asked = load_recipe("demo", [*own, "parallel={sequence: 4}"])
    assert any("4 processes" in line for line in check(asked, TrainingMachine(gpus=4)).resolved)
    with pytest.raises(RopewalkError, match=r"{sequence: 4} needs 4 ranks, but 2"):
        check(asked, TrainingMachine(gpus=2))
    for recipe in (load_recipe("demo", own), asked):
        tiny = check(recipe, TrainingMachine(gpus=4, memory_gb=0.0001))
        assert not tiny.ready
        assert any(line.startswith("memory") for line in tiny.missing)


def test_documents_that_are_short_or_few_are_warned_of(tmp_path):
    (tmp_path / "a.txt").write_text("a few words")
    short, few = check(load_recipe("demo", [f"data.sources=[{tmp_path / 'a.txt'}]"])).warnings
    assert short.startswith("None of these documents reaches 1,024 tokens")
    assert "tokens are few: published runs" in few
    # Nothing is downloaded to look at it.
    assert check(load_recipe("demo", ["data.sources=['hf:owner/name', embedded]"])).warnings == ()
