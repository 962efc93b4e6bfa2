"""Runs that stop after a stage or start one again, and a run whose stages decide everything that they may."""

import json
import random
import signal
from pathlib import Path

import pytest
import yaml

from ropewalk import RopewalkError, training
from ropewalk.io.progress import Silent
from ropewalk.parallel import joined
from ropewalk.parallel.context import RunContext
from ropewalk.reporting.run.training import write_run_report
from ropewalk.training.folder import StageRange
from ropewalk.training.recipe.file import parse_recipe
from tests.programs import run_program
from tests.training.resume_cases import Notes, recipe_of, refused, weights_of, with_stage, write
from tests.training.run_cases import cut_off_after, extend, extended
from tests.training.test_run_during import KILLED, steps_of

POINTS = 1
"""Points at which the slow test kills the run; more take longer, and find no more in most runs."""


@pytest.fixture
def two_stages(recipe_values, tmp_path):
    """A run whose second stage decides all that it may."""
    lines = Path(recipe_values["data"]["sources"][0]).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:80]]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"text": f"fid {text}"}) + "\n" for text in texts))
    stage = {"rows_per_step": 2, "learning_rate": 1e-2}
    second = {
        "context": 128,
        "steps": 4,
        "data": {"sources": [str(own)], "mixture": {"shuffle": True}},
        "optimizer": {"beta2": 0.99, "weight_decay": 0.0},
        "moments": "rewarm",
        "precision": "bfloat16",
        "seed": 5,
    }
    stages = [{**stage, "context": 64, "steps": 3}, {**stage, **second}]
    return {**recipe_values, "stages": stages, "checkpoints": {"every": 2, "keep": 5}}


def beside(values, tmp_path, name):
    return {**values, "output": str(tmp_path / name)}


def result_of(values):
    return steps_of(values["output"]), weights_of(values["output"])


def stopped(values, until, resume=False, reporter=None):
    context = RunContext(reporter=reporter or Silent())
    return training.extend_until(recipe_of(values), until, context, resume)


def stopped_of_ranks(values, until, resume=False):
    """What a run of the ranks that stops after a stage says."""
    with joined("cpu") as world:
        recipe = parse_recipe(yaml.safe_dump(values), "test")
        return training.extend_until(recipe, until, RunContext(world), resume).to_json()


@pytest.mark.slow
def test_a_run_that_stops_after_a_stage_goes_on_to_the_same_result(two_stages, tmp_path):
    whole = beside(two_stages, tmp_path, "whole")
    first, second = extend(recipe_of(whole))["stages"]
    assert "own" not in first
    assert second["own"]["optimizer"] == {"beta2": 0.99, "weight_decay": 0.0}
    page = write_run_report(Path(whole["output"]))[0].read_text()
    assert "moments rewarm, precision bfloat16, seed 5" in page
    values = beside(two_stages, tmp_path, "parts")
    output = Path(values["output"])
    for resume in (False, True):
        found = stopped(values, 1, resume)
        assert (found.stage, found.stages) == (1, 2)
        assert found.checkpoint == output / "checkpoints" / "stage0-step000003"
        assert not (output / "model").exists()
    with pytest.raises(RopewalkError, match=r"is not empty; either add --resume"):
        stopped(values, 1)
    assert extend(recipe_of(values), resume=True)["stages"][1]["steps"] == 4
    assert result_of(values) == result_of(whole)
    with pytest.raises(
        RopewalkError, match=r"--until-stage is 1, but the run in .* has reached step 4 of stage 2"
    ):
        stopped(values, 1, resume=True)


@pytest.mark.slow
def test_a_stage_that_starts_again_with_other_settings_is_as_if_it_had_had_them(two_stages, tmp_path):
    values = beside(two_stages, tmp_path, "run")
    extend(recipe_of(values))
    before, output = result_of(values), Path(values["output"])
    other = with_stage(values, 1, learning_rate=3e-3, moments="keep", precision="float32", steps=2)
    with pytest.raises(RopewalkError, match="4 steps of stage 2 are done"):
        extend(recipe_of(other), resume=True)
    notes = Notes()
    context = RunContext(reporter=notes)
    training.extend(recipe_of(other), context, True, from_stage=2)
    assert any(line.startswith("stage 2 starts again from stage0-step000003") for line in notes.told)
    expected = beside(other, tmp_path, "expected")
    extend(recipe_of(expected))
    assert result_of(other) == result_of(expected)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == sorted(
        path.name for path in (Path(expected["output"]) / "checkpoints").iterdir()
    )
    earlier = output / "earlier"
    assert (earlier / "model" / "model" / "model.safetensors").read_bytes() == before[1]
    assert (earlier / "train-2" / "checkpoints" / "stage1-step000004").is_dir()
    changed = {each["key"] for each in json.loads((output / "run.json").read_text())["history"]}
    assert {"stages.1.moments", "stages.1.precision", "stages.1.steps"} <= changed
    # Once more without a change, the result is the same.
    training.extend(recipe_of(other), RunContext(), True, from_stage=2)
    assert result_of(other) == result_of(expected)


@pytest.mark.slow
def test_a_base_that_was_chosen_is_chosen_again(two_stages, tmp_path):
    auto = {"method": "auto", "probe_rows": 1, "candidates": ["theta=5e4", "theta=1e5"]}
    values = with_stage(with_stage(two_stages, 0, rope=auto), 1, rope=auto)
    extend(recipe_of(values))
    choices = Path(values["output"]) / "rope-choices.json"
    first = json.loads(choices.read_text())
    found = result_of(values)
    damaged = [first[0], {**first[1], "name": "theta=2e5", "rope_theta": 2e5}]
    choices.write_text(json.dumps(damaged))
    training.extend(recipe_of(values), RunContext(), True, from_stage=2)
    assert json.loads(choices.read_text()) == first
    assert result_of(values) == found


@pytest.mark.parametrize(
    ("first", "last", "resume", "said"),
    [
        (3, None, True, "--from-stage is 3, but the recipe has 2 stages; give 2"),
        (0, None, True, "--from-stage is 0, but the recipe has 2 stages"),
        (None, 3, False, "--until-stage is 3, but the recipe has 2 stages"),
        (None, -1, False, "--until-stage is -1, but the recipe has 2 stages"),
        (2, 1, True, "--until-stage 1 comes before --from-stage 2; give --until-stage 2 or more"),
        (1, None, True, "--from-stage 1 would train all stages again; start a new run"),
        (
            2,
            None,
            False,
            "--from-stage 2 needs --resume, because the stage continues from a checkpoint of a run",
        ),
    ],
)
def test_stages_that_a_recipe_does_not_have_are_refused(two_stages, first, last, resume, said):
    with pytest.raises(RopewalkError, match=said):
        StageRange(first, last).check(recipe_of(two_stages), resume)


def test_a_stage_can_start_again_only_from_a_checkpoint_that_is_there(two_stages, tmp_path, capsys):
    values = {**beside(two_stages, tmp_path, "run"), "checkpoints": {"every": 1, "keep": 2}}
    with cut_off_after(1):
        extend(recipe_of(values))
    said = refused(capsys, tmp_path, values, "--from-stage", "2")
    assert "--from-stage is 2, but the run in" in said
    assert said.endswith("has not completed stage 1; omit --from-stage to resume where the run stopped")
    extend(recipe_of(values), resume=True)
    said = refused(capsys, tmp_path, values, "--from-stage", "2")
    assert "--from-stage 2 needs the checkpoint stage0-step000003, which the run in" in said
    assert not (Path(values["output"]) / "earlier").exists()


def test_the_command_stops_and_says_how_it_goes_on(two_stages, tmp_path, capsys):
    from ropewalk.cli.app import main

    recipe = write(tmp_path / "recipe.yaml", two_stages)
    assert main(["extend", recipe, "--until-stage", "1"]) == 0
    said = capsys.readouterr().out
    assert "stopped after stage 1 of 2 because of --until-stage" in said
    assert "the same command with --resume, and without --until-stage, trains stage 2" in said
    assert main(["extend", recipe, "--until-stage", "1", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stage"] == 1
    assert main(["extend", recipe, "--until-stage", "2", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 128


@pytest.mark.slow
def test_one_process_trains_the_first_stage_and_two_the_second(two_stages, tmp_path, two_ranks):
    values = with_stage(two_stages, 1, precision="float32", moments="keep")
    alone = beside(values, tmp_path, "alone")
    extend(recipe_of(alone))
    values = with_stage(beside(values, tmp_path, "parts"), 1, parallel={"shard": 2})
    stopped(values, 1)
    two_ranks.run(extended, values, True)
    found, expected = steps_of(values["output"]), steps_of(alone["output"])
    assert found[:3] == expected[:3]
    assert [step[2] for step in found] == pytest.approx([step[2] for step in expected], rel=1e-5)
    with pytest.raises(RopewalkError, match=r"stages\.1\.parallel {shard: 2} needs 2 processes"):
        extend(recipe_of(beside(values, tmp_path, "refused")))


@pytest.mark.slow
def test_a_run_whose_stages_decide_everything_is_killed_at_random_points(two_stages, tmp_path):
    def killed(values, at, *options):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return run_program(KILLED, values["output"], at, "extend", tmp_path / "recipe.yaml", *options)

    whole = beside(two_stages, tmp_path, "whole")
    events = int(killed(whole, 0).stderr.split("events")[-1])
    for number, point in enumerate(random.Random(7).sample(range(events // 4, events), POINTS)):
        values = beside(two_stages, tmp_path, f"run{number}")
        assert killed(values, point).returncode == -signal.SIGKILL
        assert killed(values, 0, "--resume").returncode == 0
        assert result_of(values) == result_of(whole), point
