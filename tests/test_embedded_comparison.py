"""The benchmark that compares choices on the embedded models: its grids are valid, its differences paired."""

import json
from pathlib import Path

import pytest

from benchmarks.embedded_comparison import QUESTIONS, ROPE_THETA, ROTARY_DIM, TRAINED_LENGTH, compared
from ropewalk.data.read.embedded import resolve_model
from ropewalk.training import load_recipe


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_cell_is_a_valid_recipe_unlike_the_others(question):
    cells = [
        load_recipe("retrieval", [f"{key}={value}" for key, value in given.items()])
        for given in QUESTIONS[question]().values()
    ]
    texts = [str(cell) for cell in cells]
    assert len(set(texts)) == len(texts)


def test_differences_are_paired_by_seed():
    # The seeds differ by far more than the cells do: only a paired difference sees that they differ by exactly 2.
    cells = [
        {"cell": cell, "seed": seed, "scores": {"vt 256": 10 * seed + more}}
        for seed in (1, 2, 3)
        for cell, more in (("full", 0), ("anchor", 2))
    ]
    first, second = compared(cells)
    assert (first["values"], first["mean"]) == ([10, 20, 30], 20)
    assert "difference" not in first
    assert second["difference"] == 2
    assert second["difference_ci95"] == [2, 2]


def test_the_interval_is_students():
    cells = [
        {"cell": cell, "seed": seed, "scores": {"vt 256": value}}
        for cell, values in (("full", (0, 0, 0)), ("anchor", (1, 2, 6)))
        for seed, value in enumerate(values)
    ]
    # Mean 3, standard error sqrt(7 / 3), and 4.3027 of them with two degrees of freedom.
    assert compared(cells)[1]["difference_ci95"] == pytest.approx([-3.572, 9.572], abs=1e-3)


def test_one_seed_has_no_interval():
    cells = [{"cell": cell, "seed": 0, "scores": {"vt 256": 1.0}} for cell in ("full", "anchor")]
    assert compared(cells)[1]["difference_ci95"] is None


@pytest.mark.parametrize("model", ["embedded", "embedded:retrieval"])
def test_bases_are_computed_for_the_embedded_models(model):
    config = json.loads((Path(resolve_model(model)) / "config.json").read_text())
    assert config["head_dim"] == ROTARY_DIM
    assert config["rope_parameters"]["rope_theta"] == ROPE_THETA
    assert config["max_position_embeddings"] == TRAINED_LENGTH
