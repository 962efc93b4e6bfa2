"""Finished runs and evaluations as cells: runs that differ by their seed alone are one."""

import json
from pathlib import Path

import pytest

from ropewalk import RopewalkError
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.experiments.finished_runs import Cost, FinishedRun, cells_of, read_finished
from ropewalk.training import load_recipe
from ropewalk.training.recipe.file import dump_recipe


def result(score=50.0):
    samples = ({"index": 0, "score": score}, {"index": 1, "score": score})
    return TaskResult("passkey", "passkey", 128, 2, score, (0, 100), details={SAMPLES: "a"}, samples=samples)


def finished_run(folder, *overrides):
    """A folder as a finished run leaves it, as far as a comparison reads it."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("demo", [f"output={folder}", *overrides])))
    summary = {"after": [result().to_json()], "versions": {"ropewalk": "0.1.0-of-a-test"}}
    (folder / "summary.json").write_text(json.dumps(summary))
    step = {"stage": 0, "loss": 1.0, "seconds": 1800.0}
    steps = [{**step, "step": n, "tokens": n, "tokens_per_second": 10.0 * n} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_a_run_has_results_a_recipe_a_seed_and_a_cost(tmp_path):
    found = read_finished(finished_run(tmp_path / "run", "seed=3"))
    assert (found.seed, found.results, found.cost) == (3, (result(),), Cost(1.0, 15.0, tokens=54_000))
    assert found.recipe["stages.0.pattern"] == "anchor"
    assert not any(key.startswith(("output", "seed")) for key in found.recipe)


def test_the_peak_of_memory_is_that_of_the_step_with_the_most(tmp_path):
    run = finished_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, peak in zip(lines, (700, 500), strict=True):
        # A resumed run starts to count again.
        line["peak_process_memory"] = peak
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_finished(run).cost == Cost(1.0, 15.0, None, 700, 54_000)


def test_runs_that_differ_by_seed_and_place_are_one_cell(tmp_path):
    runs = [
        finished_run(
            tmp_path / f"{pattern}-{seed}",
            f"seed={seed}",
            f"stages.0.pattern={pattern}",
            "checkpoints.keep=2",
        )
        for pattern in ("full", "anchor")
        for seed in (0, 1)
    ]
    cells = cells_of([read_finished(run) for run in runs])
    assert {name: sorted(cell) for name, cell in cells.items()} == {
        "pattern full": [0, 1],
        "pattern anchor": [0, 1],
    }


def test_recipes_that_differ_in_many_keys_are_named_by_their_folders():
    recipes = [{f"k{n}": side for n in range(9)} for side in (1, 2)]
    runs = [FinishedRun(Path(f"runs/{n}"), (), recipe, 0, None) for n, recipe in enumerate(recipes)]
    assert list(cells_of(runs)) == ["0", "1"]


def test_a_key_that_differs_alike_in_all_stages_is_named_once():
    def names(*recipes):
        return list(cells_of([FinishedRun(Path(f"runs/{n}"), (), r, 0, None) for n, r in enumerate(recipes)]))

    keys = ("stages.0.rope.rope_theta", "stages.1.rope.rope_theta")
    alike = [dict.fromkeys(keys, base) for base in (1e4, 3e5)]
    assert names(*alike) == ["base 1e4", "base 3e5"]
    assert names(alike[0], {keys[0]: 2e4, keys[1]: 3e5}) == [
        "stage 1 base 1e4, stage 2 base 1e4",
        "stage 1 base 2e4, stage 2 base 3e5",
    ]


def test_evaluations_are_cells_of_their_own_by_folder():
    runs = [FinishedRun(Path(f"{name}/eval"), (), None, 0, None) for name in ("a", "b")]
    assert list(cells_of(runs)) == ["a/eval", "b/eval"]


def test_the_same_run_twice_is_refused(tmp_path):
    runs = [read_finished(finished_run(tmp_path / name)) for name in ("a", "b")]
    with pytest.raises(RopewalkError, match="same recipe with the same seed"):
        cells_of(runs)


def test_what_is_not_finished_or_damaged_is_named(tmp_path):
    run = finished_run(tmp_path / "run")
    (run / "summary.json").write_text("{")
    with pytest.raises(RopewalkError, match=r"summary\.json is damaged"):
        read_finished(run)
    (run / "summary.json").unlink()
    with pytest.raises(
        RopewalkError, match=r"run is not finished; finish it with: ropewalk extend .*recipe\.yaml --resume"
    ):
        read_finished(run)
    with pytest.raises(RopewalkError, match="does not exist"):
        read_finished(tmp_path / "nothing")
