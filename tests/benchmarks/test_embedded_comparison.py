"""The benchmark that compares choices on the embedded models: its grids are valid, its bases those of the rules."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.embedded_comparison import (
    BASES,
    QUESTIONS,
    ROPE_THETA,
    ROTARY_DIM,
    TRAINED_LENGTH,
    Comparison,
)
from ropewalk.data.read.embedded import resolve_model
from ropewalk.experiments.grid import make_grid
from ropewalk.rope.theory import feasible_bases, theta_by_rule
from tests.benchmarks.benchmark_cases import small
from tests.experiments.test_run import ForkedRun

GRIDS = {name: each for grids in QUESTIONS.values() for name, each in grids.items()}


@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_is_valid_and_has_its_reference(name, tmp_path):
    grid = make_grid("retrieval", GRIDS[name].vary, 1, GRIDS[name].overrides, tmp_path)
    assert len(grid.cells) == len(set(grid.cells)) in (3, 6, 7)
    assert GRIDS[name].reference in {None, *(run.folder.parent.name for run in grid.runs)}


@pytest.mark.parametrize("length", BASES)
def test_bases_are_those_of_the_rules(length):
    by_rule = BASES[length]
    for rule in ("ntk", "lower-bound", "critical-dimension"):
        given = theta_by_rule(rule, ROTARY_DIM, ROPE_THETA, TRAINED_LENGTH, length)
        assert by_rule[rule] == pytest.approx(given, rel=1e-5)
    feasible = feasible_bases(length, ROTARY_DIM, 1e7).feasible
    # Rounded up, but still inside: a base of four digits may miss a narrow interval.
    assert feasible[0][0] < by_rule["infimum"] < min(feasible[0][1], 1.01 * feasible[0][0])
    wide = next(each for each in feasible if each[1] > 1.1 * each[0])
    assert wide[0] < by_rule.get("interval", by_rule["infimum"]) < min(wide[1], 1.01 * wide[0])


@pytest.mark.parametrize("model", ["embedded", "embedded:retrieval"])
def test_bases_are_computed_for_the_embedded_models(model):
    config = json.loads((Path(resolve_model(model)) / "config.json").read_text())
    assert config["head_dim"] == ROTARY_DIM
    assert config["rope_parameters"]["rope_theta"] == ROPE_THETA
    assert config["max_position_embeddings"] == TRAINED_LENGTH


@pytest.mark.slow  # two runs
def test_it_runs_on_small_sizes(tmp_path, monkeypatch):
    # Forks have imported the libraries, as in the tests of grids.
    started = SimpleNamespace(Popen=ForkedRun, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("ropewalk.experiments.run.subprocess", started)
    monkeypatch.setitem(QUESTIONS, "patterns", {"patterns": Comparison(("stages.*.pattern=full,anchor",))})
    grids = small("embedded_comparison", tmp_path, "patterns", "--runs", str(tmp_path / "runs"))["grids"]
    assert len(grids["patterns"]["cells"]) == 2
