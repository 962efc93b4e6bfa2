"""Grids: every combination once, names that are folders, and only additions to an earlier grid."""

import json
from pathlib import Path

import pytest

from ropewalk import RopewalkError
from ropewalk.experiments.grid import Varied, make_grid, read_grid

OUT = Path("out")


def test_cells_are_all_combinations_with_each_seed_and_the_first_is_the_reference():
    grid = make_grid("demo", ["stages.*.pattern=full,anchor", "stages.0.steps=7,8"], 3, ["seed=5"], OUT)
    assert grid.cells == [
        "pattern full, steps 7",
        "pattern full, steps 8",
        "pattern anchor, steps 7",
        "pattern anchor, steps 8",
    ]
    assert grid.seeds == (5, 6, 7)
    assert len({run.folder for run in grid.runs}) == len(grid.runs) == 12
    for run in grid.runs:
        (stage,) = run.recipe.stages
        assert run.cell == f"pattern {stage.pattern}, steps {stage.steps}"
        assert run.folder.parent.name == f"pattern={stage.pattern},steps={stage.steps}"
        assert (run.recipe.seed, run.recipe.output) == (run.seed, str(run.folder))
        assert run.recipe.data.cache == "out/data"


def test_a_stage_with_its_own_seed_would_be_the_same_in_all_runs():
    with pytest.raises(
        RopewalkError, match=r"sets stages\.0\.seed to 3, so the 2 runs of --seeds would have the same seed"
    ):
        make_grid("demo", ["stages.0.steps=7,8"], 2, ["stages.0.seed=3"], OUT)
    assert len(make_grid("demo", ["stages.0.seed=3,4"], 1, [], OUT).runs) == 2


def test_a_key_of_what_is_auto_can_vary():
    grid = make_grid("demo", ["parallel.sequence=1,8"], 1, [], OUT)
    assert [run.recipe.parallel.sequence for run in grid.runs] == [1, 8]


def test_a_star_is_every_stage():
    grid = make_grid("longrope", ["stages.*.rows_per_step=2,4"], 1, [], OUT)
    assert [[stage.rows_per_step for stage in run.recipe.stages] for run in grid.runs] == [[2] * 3, [4] * 3]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=a,b", ("a", "b")),
        ("k=1,2.5", (1, 2.5)),
        (
            "k={method: theta, factor: 2},{method: yarn}",
            ({"method": "theta", "factor": 2}, {"method": "yarn"}),
        ),
        ("k='a,b',c", ("a,b", "c")),
        ("k=[],[windows]", ([], ["windows"])),
        # YAML reads 1e4 as text.
        ("k=1e4,2.5e-5,1e4x,{a: [3e5]}", (10_000.0, 2.5e-5, "1e4x", {"a": [3e5]})),
    ],
)
def test_values_are_yaml(text, values):
    assert Varied.parse(text) == Varied("k", values)


def test_bases_and_methods_are_values_of_a_stages_rope():
    grid = make_grid("demo", ["stages.*.rope=1e4,40_000,theta,yarn"], 1, [], OUT)
    assert grid.cells == ["base 1e4", "base 4e4", "base auto", "yarn"]
    ropes = [run.recipe.stages[0].rope for run in grid.runs]
    assert [(rope.method, rope.rope_theta) for rope in ropes] == [
        ("theta", 1e4),
        ("theta", 4e4),
        ("theta", "auto"),
        ("yarn", "auto"),
    ]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (["stages.*.pattern"], "KEY=VALUE"),
        (["=full,anchor"], "KEY=VALUE"),
        (["stages.*.pattern=full"], "fewer than two"),
        (["stages.*.pattern=full,full"], "twice"),
        (["stages.*.pattern=[full,anchor"], "is not YAML"),
        (["seed=1,2"], "'seed'; give the number of seeds with --seeds"),
        (["output=a,b"], "'output'; each run gets its own folder"),
        (["stages.*.rope.rope_theta=1e4,yarn"], r"vary both with --vary 'stages\.\*\.rope=1e4,yarn'"),
        (["stages.*.rope=8,yarn"], "write {method: theta, rope_theta: 8} or {method: yarn, factor: 8}"),
        (["stages.*.rope.rope_theta=1e4,10000.0"], "10000.0 twice"),
        (["model.*.x=1,2"], "entries of a list"),
        (["stages.0.steps=1,2", "stages.0.steps=3,4"], "is given twice"),
        (
            ["stages.*.patern=full,anchor"],
            "^--vary stages.0.patern=.full.: unknown key .*did you mean pattern",
        ),
        (["stages.*.pattern=full,anchr"], "did you mean anchor"),
    ],
)
def test_mistakes_are_named(vary, message):
    with pytest.raises(RopewalkError, match=message):
        make_grid("demo", vary, 1, [], OUT)


def test_more_runs_than_anyone_means_are_refused():
    steps = ",".join(map(str, range(7, 207)))
    with pytest.raises(RopewalkError, match="1,200 runs"):
        make_grid("demo", [f"stages.0.steps={steps}"], 6, [], OUT)


def test_names_are_short_unique_and_safe():
    hostile = json.dumps("../../x; rm -rf " + "y" * 200)
    grid = make_grid("demo", [f"model={hostile},'../../x? rm -rf',embedded"], 1, [], OUT)
    assert len(set(grid.cells)) == 3
    for run in grid.runs:
        assert run.folder.parent.parent == OUT / "cells"
        assert len(run.cell) < 100
        assert not {*run.cell, *run.folder.parent.name} & set("/\\;*?'\"")
        assert " " not in run.folder.parent.name


def test_a_grid_is_read_back_from_its_folder(tmp_path):
    vary = ["stages.*.rope=1e4,{method: yarn, factor: 4}", "stages.0.steps=5,6"]
    made = make_grid("demo", vary, 2, ["seed=3", "stages.0.warmup_steps=0"], tmp_path)
    (tmp_path / "grid.json").write_text(json.dumps(made.record()))
    found = read_grid(tmp_path / "grid.json")
    assert (found.cells, found.seeds) == (made.cells, (3, 4))
    assert [run.recipe for run in found.runs] == [run.recipe for run in made.runs]
    (tmp_path / "grid.json").write_text("{}")
    with pytest.raises(RopewalkError, match=r"grid\.json is damaged"):
        read_grid(tmp_path / "grid.json")
