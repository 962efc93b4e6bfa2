"""The engine of a stage: measured once, the same on all ranks, recorded, and measured again on other hardware."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropewalk import RopewalkError
from ropewalk.attention.measuring import Candidate, LayersAlike, Measured
from ropewalk.attention.options import Locality
from ropewalk.models.config.model import ModelConfig
from ropewalk.training import stage_engine
from ropewalk.training.preflight import announcement, resolve
from ropewalk.training.stage_engine import (
    CHOICES,
    candidates_for,
    choices_in,
    layers_alike,
    measures_engine,
)
from tests.checkpoint_cases import path_of
from tests.training.engine_cases import engines_used, measured_by, measured_on_ranks
from tests.training.resume_cases import Notes, recipe_of, weights_of
from tests.training.run_cases import extend

SECONDS = {"sdpa": 0.25, "reference": 0.125}
"""The reference is never a candidate in a run: here it is, so that a CPU has two."""


@pytest.fixture
def run(done, tmp_path):
    """The recipe of a finished run, for another folder."""
    values, _ = done
    return {**values, "output": str(tmp_path / "run")}


def test_the_fastest_is_taken_named_recorded_and_taken_again(run, done, tmp_path):
    notes = Notes()
    with measured_by(SECONDS) as order, engines_used() as used:
        summary = extend(recipe_of(run), reporter=notes)
    taken = summary["stages"][0]["engine"]
    assert (taken["name"], [each["ms"] for each in taken["measured"]]) == ("reference", [500.0, 250.0])
    assert order == ["sdpa", "reference"]
    assert used == ["reference"]
    # Two layers; 64 tokens in the one row of a batch.
    line = (
        "stage 1: attention engine reference (dense mask) (auto), the fastest in forward and backward of all layers "
        "over 64 tokens of its first rows on cpu: reference (dense mask) 250.0 ms, sdpa (CPU flash) 500.0 ms"
    )
    assert line in notes.told
    (choice,) = json.loads((tmp_path / "run" / CHOICES).read_text())
    assert (choice["stage"], choice["engine"], choice["flash"]) == (0, "reference", "FA2")
    explicit = {**run, "output": str(tmp_path / "explicit"), "engine": "reference"}
    extend(recipe_of(explicit))
    assert weights_of(run["output"]) == weights_of(explicit["output"])

    notes, more = Notes(), {**run, "stages": [{**run["stages"][0], "steps": 6}]}
    with measured_by({**SECONDS}) as order, engines_used() as used:
        extend(recipe_of(more), resume=True, reporter=notes)
    assert (order, used) == ([], ["reference"])
    again = "stage 1: attention engine reference (dense mask) (auto), as measured when the stage began"
    assert again in notes.told


def test_on_other_hardware_it_is_measured_again(run, tmp_path):
    with measured_by(SECONDS):
        extend(recipe_of(run))
    path = tmp_path / "run" / CHOICES
    (choice,) = json.loads(path.read_text())
    choice["measured_on"]["gpu"] = "NVIDIA H200"
    path.write_text(json.dumps([choice]))
    notes, more = Notes(), {**run, "stages": [{**run["stages"][0], "steps": 6}]}
    with measured_by({"sdpa": 0.125, "reference": 0.25}) as order, engines_used() as used:
        extend(recipe_of(more), resume=True, reporter=notes)
    assert (order, used) == (["sdpa", "reference"], ["sdpa"])
    assert "stage 1: attention engines are measured again: gpu was NVIDIA H200 and is cpu" in notes.told
    assert choices_in(tmp_path / "run")[0].engine == "sdpa"


def test_without_a_gpu_nothing_is_measured(done):
    values, _ = done
    assert not (Path(values["output"]) / CHOICES).exists()
    resolved = resolve(recipe_of(values))
    assert not measures_engine(resolved, 0)
    assert announcement(resolved)[1] == "attention engine sdpa (auto) on cpu, float32"
    on_gpu = replace(resolved, device=torch.device("cuda"))
    assert measures_engine(on_gpu, 0)
    assert announcement(on_gpu)[1] == (
        "attention engine sdpa (auto; measured anew before each stage) on cuda, float32"
    )
    assert not measures_engine(replace(on_gpu, recipe=recipe_of(values, engine="sdpa")), 0)


@pytest.mark.parametrize("damage", ["[{]", "[{}]", "[3]", '[{"stage": 0, "engine": "fast"}]'])
def test_a_damaged_record_is_named(tmp_path, damage):
    (tmp_path / CHOICES).write_text(damage)
    with pytest.raises(RopewalkError, match=rf"{CHOICES} is damaged .* delete the file, and the engines are"):
        choices_in(tmp_path)


@pytest.mark.slow
def test_all_ranks_take_the_one_whose_slowest_rank_is_fastest(done, two_ranks, tmp_path):
    values, _ = done
    both = {**values, "output": str(tmp_path / "run"), "parallel": {"sequence": 2}}
    times = [{"sdpa": 0.2, "reference": 0.1}, {"sdpa": 0.2, "reference": 0.3}]
    assert two_ranks.run(measured_on_ranks, both, times) == [["sdpa"], ["sdpa"]]
    (choice,) = json.loads((tmp_path / "run" / CHOICES).read_text())
    assert [(each["engine"], each["ms"]) for each in choice["results"]] == [
        ("sdpa", pytest.approx(400)),
        ("reference", pytest.approx(600)),
    ]


def test_an_engine_that_fails_on_one_rank_is_not_taken():
    fine, failed = (
        Measured(Candidate("flex"), (), 1.0),
        Measured(Candidate("flex"), (), None, "out of memory"),
    )
    slow = Measured(Candidate("flex"), (), 2.0)
    assert stage_engine._slowest([fine, slow, failed]) == failed
    assert stage_engine._slowest([fine, slow]) == slow


@pytest.mark.slow
def test_a_ring_is_measured_over_its_ranks(done, two_ranks, tmp_path):
    values, _ = done
    both = {**values, "output": str(tmp_path / "run"), "parallel": {"ring": 2}}
    assert two_ranks.run(measured_on_ranks, both, [{"sdpa": 0.2}] * 2) == [["sdpa"], ["sdpa"]]


def test_layers_of_equal_shape_are_measured_once():
    gemma = ModelConfig(json.loads(path_of("gemma-3-1b").read_text()))
    found = layers_alike(gemma)
    assert found == [
        LayersAlike(22, 4, 1, 256, 256, Locality(window=512)),
        LayersAlike(4, 4, 1, 256, 256, Locality()),
    ]
    (sinks, _) = layers_alike(ModelConfig(json.loads(path_of("gpt-oss-20b").read_text())))
    assert sinks.sinks
    assert sinks.layers == 12


def test_candidates_are_what_the_model_and_the_device_allow(monkeypatch):
    def names(name, device, dtype, ring=False, keeps_attention=False):
        values = json.loads(path_of(name).read_text())
        if name == "gemma-2-9b":
            values["attn_logit_softcapping"] = 50.0
        config = ModelConfig(values)
        found = candidates_for(config, torch.device(device), dtype, ring, keeps_attention)
        return [f"{each.engine} {each.flash}" for each in found]

    assert names("llama-3-8b", "cpu", torch.float32) == ["sdpa FA2"]
    assert names("llama-3-8b", "meta", torch.bfloat16) == ["sdpa FA2", "flex FA2", "varlen FA2"]
    assert names("llama-3-8b", "meta", torch.bfloat16, ring=True) == ["sdpa FA2", "varlen FA2"]
    # flex has a backward of its own, from which no result can be kept.
    assert names("llama-3-8b", "meta", torch.bfloat16, keeps_attention=True) == ["sdpa FA2", "varlen FA2"]
    assert names("gemma-2-9b", "meta", torch.bfloat16) == ["sdpa FA2", "flex FA2"]
    monkeypatch.setattr(stage_engine, "installed_flash", lambda major: ["FA2", "FA4"])
    cuda = ["sdpa FA2", "flex FA2", "varlen FA2", "varlen FA4"]
    assert names("llama-3-8b", "cuda", torch.bfloat16) == cuda
    assert names("gemma-2-9b", "cuda", torch.bfloat16) == cuda[:2]
