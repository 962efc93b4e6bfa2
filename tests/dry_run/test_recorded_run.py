"""Plans by the recorded steps of a run: the factor, and folders that are refused."""

import json

import pytest

from ropewalk.dry_run import plan
from ropewalk.dry_run.recorded_run import WARM_UP, recorded_run
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.errors import RopewalkError
from ropewalk.training.recipe.file import dump_recipe
from ropewalk.training.simulation.rank_costs import play, played_by
from tests.dry_run.cases import model_folder, recipe_of

H200 = {"device": "cuda NVIDIA H200", "processes": "1"}


def line(stage, step, forward, update):
    values = {"stage": stage, "step": step, "tokens": 512 * step, "loss": 1.0, "forward_backward": forward}
    return values if update is None else values | {"optimizer_update": update}


def run_of(folder, recipe, lines, versions=H200):
    """A folder as a run leaves it, with steps that took as long as they are said to."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    (folder / "versions.json").write_text(json.dumps(versions))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def steps(*seconds, stage=0):
    """Steps after the warm-up, whose update takes a quarter."""
    return [line(stage, WARM_UP + n, 0.75 * each, 0.25 * each) for n, each in enumerate(seconds, start=1)]


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(model_folder(tmp_path / "model"))


def test_the_factor_is_the_median_over_steady_steps_of_their_stages(tmp_path, recipe):
    recipe = recipe.model_copy(update={"stages": recipe.stages * 2})
    slow = [line(0, step, 900.0, 100.0) for step in range(1, WARM_UP + 1)]
    without = [line(0, 9, 900.0, None)]
    found = recorded_run(
        run_of(tmp_path / "run", recipe, slow + steps(2, 4) + without + steps(30, stage=1)), recipe, "h200"
    )
    assert (found.ranks, found.gpu, len(found.steps)) == (1, "NVIDIA H200", 3)
    # 2/4, 4/4 and 30/10.
    measured = found.compared({0: 4.0, 1: 10.0})
    assert measured.factor == pytest.approx(1.0)
    assert measured.words == f"in {tmp_path / 'run'} (median of 3 steps on NVIDIA H200)"


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        (
            H200 | {"device": "cuda NVIDIA H100 80GB HBM3"},
            "recorded on cuda NVIDIA H100 80GB HBM3, and .* h200",
        ),
        (H200 | {"device": "cpu x86_64"}, "recorded on cpu x86_64, and the plan is for h200"),
        ({"device": "cuda NVIDIA H200"}, r"versions.json does not say .* \('processes'\)"),
    ],
)
def test_a_run_on_another_device_is_refused(tmp_path, recipe, versions, problem):
    folder = run_of(tmp_path / "run", recipe, steps(1.0), versions)
    with pytest.raises(RopewalkError, match=problem):
        recorded_run(folder, recipe, "h200")


def test_a_run_of_another_architecture_is_refused_but_not_one_with_another_rope(tmp_path, recipe):
    longer = recipe_of(model_folder(tmp_path / "long", max_position_embeddings=4096, rope_theta=500000))
    folder = run_of(tmp_path / "run", longer, steps(1.0))
    assert recorded_run(folder, recipe, "h200").steps == ((0, 1.0),)
    wider = recipe_of(model_folder(tmp_path / "wide", intermediate_size=176))
    with pytest.raises(RopewalkError, match=r"intermediate_size 160, and .*wide has 176"):
        recorded_run(folder, wider, "h200")


@pytest.mark.parametrize(
    "lines", [[], [line(0, WARM_UP, 1.0, 1.0)], [line(0, 9, 1.0, None)], [line(0, 9, 0.0, 1.0)]]
)
def test_a_run_without_steady_steps_is_refused(tmp_path, recipe, lines):
    folder = run_of(tmp_path / "run", recipe, lines)
    with pytest.raises(RopewalkError, match="has no recorded step to measure by"):
        recorded_run(folder, recipe, "h200")
    with pytest.raises(RopewalkError, match=r"nowhere has no recipe\.yaml"):
        recorded_run(tmp_path / "nowhere", recipe, "h200")


@pytest.mark.slow
def test_a_plan_of_the_measured_recipe_takes_the_measured_time(tmp_path, recipe, aside):
    with played_by(lambda *arguments: aside(play, *arguments)):
        hardware = HardwareSettings(gpus=1, gpu="h200", document_length=512)
        (alone,) = plan(recipe, hardware).stages
        folder = run_of(tmp_path / "run", recipe, steps(*[1.5 * alone.time.seconds] * 2))
        result = plan(recipe, hardware.model_copy(update={"measured": folder}))
        (stage,) = result.stages
        # One GPU without transfers: computation is all of the step.
        assert stage.time.seconds == pytest.approx(1.5 * alone.time.seconds)
        assert sum(stage.time.kinds.values()) == pytest.approx(stage.time.compute_seconds)
        assert stage.time.hours == pytest.approx(1.5 * alone.time.hours)
        assert [each for each in result.assumptions if "1.50 times" in each] == [
            f"computation takes 1.50 times as long as that, as the steps in {folder} (median of 2 steps on NVIDIA "
            "H200) did beside a plan of their own recipe"
        ]
