"""How far a run has come, as its folder says while it trains and afterwards."""

import json
from pathlib import Path

import pytest
import yaml

from ropewalk.errors import RopewalkError
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.so_far import RECENT, so_far, tokens_left
from tests.training.resume_cases import recipe_of

STAGES = [
    {"context": 64, "steps": 3, "rows_per_step": 2, "learning_rate": 1e-2},
    {"context": 128, "steps": 30, "rows_per_step": 4, "learning_rate": 1e-2},
]


@pytest.fixture
def folder(recipe_values, tmp_path):
    """The folder of a run of two stages whose training is about to begin."""
    run = tmp_path / "watched"
    run.mkdir()
    values = {**recipe_values, "output": str(run), "stages": STAGES}
    (run / "recipe.yaml").write_text(
        yaml.safe_dump(parse_recipe(yaml.safe_dump(values), "x").model_dump(mode="json"))
    )
    return run


def with_steps(run, places):
    """Lines of a log: each step of a stage has twice the tokens per second of the one before."""
    tokens = 0
    with (run / "metrics.jsonl").open("w") as file:
        for number, (stage, step) in enumerate(places):
            tokens += STAGES[stage]["rows_per_step"] * STAGES[stage]["context"]
            line = {"stage": stage, "step": step, "loss": 5.0 - number, "tokens": tokens}
            speed = {"tokens_per_second": 100.0 * 2**number, "peak_process_memory": 1000 + number}
            file.write(json.dumps(line | speed) + "\n")


def test_a_run_is_watched_from_its_first_file_on(folder):
    before = so_far(folder)
    assert (before.state, before.step, before.losses, before.seconds_left) == ("before training", 0, (), None)
    with_steps(folder, [(0, 1), (0, 2)])
    found = so_far(folder)
    assert (found.state, found.stage, found.stages, found.step, found.steps) == ("training", 1, 2, 2, 3)
    assert found.losses == (5.0, 4.0)
    assert (found.tokens, found.tokens_per_second, found.memory) == (2 * 2 * 64, 150.0, 1001)
    # One step of the first stage and thirty of the second.
    assert found.seconds_left == (2 * 64 + 30 * 4 * 128) / 150.0
    assert 0 <= found.silent_seconds < 60


def test_the_present_speed_is_that_of_the_last_steps_of_the_stage(folder):
    with_steps(folder, [(0, 1), (0, 2), (0, 3), (1, 1)])
    assert so_far(folder).tokens_per_second == 800.0
    with_steps(folder, [(1, step) for step in range(1, 31)])
    found = so_far(folder)
    # The mean of the two in the middle.
    middle = 30 - RECENT // 2
    assert found.tokens_per_second == 100.0 * (2**middle + 2 ** (middle - 1)) / 2
    assert found.seconds_left == 0


def test_an_unfinished_line_is_not_a_step_yet(folder):
    with_steps(folder, [(0, 1), (0, 2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": 0, "step": 3, "lo')
    assert so_far(folder).step == 2


def test_tokens_left_are_those_of_the_steps_that_follow(recipe_values):
    recipe = recipe_of({**recipe_values, "stages": STAGES})
    assert tokens_left(recipe, 0, 0) == 3 * 2 * 64 + 30 * 4 * 128
    assert tokens_left(recipe, 1, 29) == 4 * 128
    assert tokens_left(recipe, 1, 30) == 0


def test_a_finished_run_says_what_it_measured(finished):
    folder = Path(finished[0]["output"])
    found = so_far(folder)
    assert (found.state, found.seconds_left) == ("finished", 0)
    assert len(found.losses) == len(MetricsLog(folder / "metrics.jsonl").read()) > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert [each.score for each in found.measured if each.when == "after"] == [
        each["score"] for each in summary["after"]
    ]
    assert {each.when for each in found.measured} >= {"before", "after"}
    json.dumps(found.to_json(), allow_nan=False)


def test_a_finished_run_that_goes_on_with_more_steps_trains_again(finished):
    folder = Path(finished[0]["output"])
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["stages"][0]["steps"] += 3
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    found = so_far(folder)
    assert (found.state, found.step, found.steps) == ("training", 4, 7)
    assert found.seconds_left > 0


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RopewalkError, match=r"has no run to watch: there is no recipe\.yaml"):
        so_far(tmp_path)
