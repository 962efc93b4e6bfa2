"""A stage makes its rows one step ahead, in their order, and ends where they cannot be made."""

import json
import shutil
import time
from pathlib import Path

import pytest

from ropewalk import RopewalkError
from ropewalk.training.checkpoint.files import read_record
from ropewalk.training.checkpoint.single import WholeCheckpoints
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage import made_ahead, waited_for
from tests.training.resume_cases import Notes, recipe_of, weights_of, with_stage
from tests.training.run_cases import extend, extended


def test_rows_are_made_one_step_ahead_in_their_order():
    made, used = [], []
    for step, value in zip(
        range(3, 8), made_ahead(lambda step: made.append(step) or step * 10, range(3, 8)), strict=True
    ):
        used.append(value)
        assert value == step * 10
        # The next step's may be under way, none further.
        assert len(made) <= len(used) + 1
    assert made == [3, 4, 5, 6, 7]
    assert list(made_ahead(made.append, range(4, 4))) == []


def test_rows_that_cannot_be_made_end_the_run_in_their_step():
    def make(step):
        if step == 2:
            raise RopewalkError("row 2 is damaged")
        return step

    steps = made_ahead(make, range(4))
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(RopewalkError, match="row 2 is damaged"):
        next(steps)


def test_each_item_comes_with_the_time_that_it_was_waited_for():
    def slow():
        for each in range(3):
            time.sleep(0.05 * each)
            yield each

    found = []
    for item, seconds in waited_for(slow()):
        found.append((item, seconds))
        # What is done with an item is not waiting for the next.
        time.sleep(0.2)
    assert [item for item, _ in found] == [0, 1, 2]
    assert all(0.05 * item <= seconds < 0.05 * item + 0.05 for item, seconds in found)


def metrics_of(values):
    return [json.loads(line) for line in (Path(values["output"]) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_metrics_say_how_long_each_checkpoint_took(recipe_values, monkeypatch, asynchronous):
    tracked, write = [], WholeCheckpoints._write

    def slowly(writer, position, *more):
        time.sleep(1.0 if position.step == 6 else 0.01)
        write(writer, position, *more)

    monkeypatch.setattr(WholeCheckpoints, "_write", slowly)
    monkeypatch.setattr(MetricsLog, "track", lambda log, values, step: tracked.append((values, step)))
    recipe_values["checkpoints"] = {"every": 2, "asynchronous": asynchronous}
    notes = Notes()
    extend(recipe_of(recipe_values), reporter=notes)
    waits = [line["step"] for line in metrics_of(recipe_values) if "checkpoint_wait" in line]
    # After steps 2, 4 and 6, whose own lines were written before.
    assert waits == [3, 5]
    (last, step), lines = tracked[-1], metrics_of(recipe_values)
    assert step == 6
    for line in lines:
        assert 0 < line["forward_backward"] + line["optimizer_update"] <= line["seconds"]
        assert line["rows_wait"] >= 0
    assert 1.0 <= last["checkpoint_wait"] < 60.0
    writes = [each["checkpoint_write"] for each in (*lines, last) if "checkpoint_write" in each]
    assert bool(writes) == asynchronous
    assert sum(writes) >= 1.02 * asynchronous
    assert [line for line in notes.told if "waited" in line] == [
        "stage 1: waited 1 s for the last checkpoint"
    ]


@pytest.mark.slow
def test_metrics_say_how_experts_are_loaded_and_two_processes_say_the_same(
    recipe_values, tiny_experts, tmp_path, two_ranks
):
    stage = {**recipe_values["stages"][0], "steps": 2, "router_aux_loss": 0.5}
    values = {**recipe_values, "model": str(tiny_experts), "stages": [stage]}
    extend(Recipe.model_validate(values))
    alone = metrics_of(values)
    for line in alone:
        # Two of four experts a token: 2 where all is even.
        assert 1.9 < line["router_aux_loss"] < 2.5
        routers = line["routers"]
        assert [len(each) for each in routers.values()] == [2, 2, 2]
        assert line["max_violation"] == pytest.approx(max(routers["max_violation"]), abs=1e-4)
        assert 0 < line["expert_entropy"] <= 1
    together = {**values, "output": str(tmp_path / "two"), "parallel": {"ring": 2}}
    two_ranks.run(extended, together)
    for line, other in zip(alone, metrics_of(together), strict=True):
        # A token whose experts are almost equally good may go elsewhere after a step.
        assert line["router_aux_loss"] == pytest.approx(other["router_aux_loss"], rel=1e-4)
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
    without = {**values, "output": str(tmp_path / "without"), "stages": [{**stage, "router_aux_loss": 0}]}
    extend(Recipe.model_validate(without))
    plain = metrics_of(without)
    assert [line["router_aux_loss"] for line in plain] == [None, None]
    assert plain[0]["loss"] == alone[0]["loss"]
    assert plain[0]["routers"] == alone[0]["routers"]
    assert plain[0]["grad_norm"] != alone[0]["grad_norm"]


STEADY = {"context": 128, "steps": 3, "learning_rate": 3e-3, "pattern": "full", "rope": {"rope_theta": 5e4}}


@pytest.fixture
def all_rows_each_step(recipe_values, tmp_path):
    """A run of two stages in which each step reads all rows, so that their order does not matter."""
    values = {**recipe_values, "checkpoints": {"every": 1, "keep": 9}, "output": str(tmp_path / "two")}
    values["data"] = {"sources": [{"path": recipe_values["data"]["sources"][0], "max_documents": 40}]}
    values["data"]["validation_documents"] = 20
    stage = {**STEADY, "rows_per_step": 5}
    return {**values, "stages": [stage, stage], "optimizer": {"beta2": 0.99}}


def results_of(values):
    lines = [(line["stage"], line["step"], line["loss"], line["grad_norm"]) for line in metrics_of(values)]
    return lines, weights_of(values["output"])


@pytest.mark.slow
def test_kept_moments_make_two_stages_one(all_rows_each_step, tmp_path):
    two, (stage, _) = all_rows_each_step, all_rows_each_step["stages"]
    rows = extend(recipe_of(two))["stages"][0]["rows"]
    assert rows == stage["rows_per_step"]
    one = {**two, "output": str(tmp_path / "one"), "stages": [{**stage, "steps": 6}]}
    extend(recipe_of(one))
    losses = [line["loss"] for line in metrics_of(two)]
    assert losses == pytest.approx([line["loss"] for line in metrics_of(one)], rel=1e-6)
    others = {}
    for moments in ("reset", "rewarm"):
        values = with_stage({**two, "output": str(tmp_path / moments)}, 1, moments=moments)
        extend(recipe_of(values))
        others[moments] = [line["loss"] for line in metrics_of(values)]
        # The first step of the stage begins with the same weights; only its update differs.
        assert others[moments][:4] == losses[:4]
        assert abs(others[moments][4] - losses[4]) > 1e-4
    assert others["reset"][4:] != others["rewarm"][4:]


def test_a_stage_trains_with_its_own_optimizer_and_seed(all_rows_each_step, tmp_path):
    first, second = all_rows_each_step["stages"]
    own = {"optimizer": {"beta1": 0.5, "max_grad_norm": 0.1}, "seed": 11, "moments": "reset"}
    second = {**second, "context": 256, "rows_per_step": 2}
    stages = [{**first, "rows_per_step": 2}, {**second, **own}]
    values = {**all_rows_each_step, "stages": stages}
    extend(recipe_of(values))
    # A run whose own settings they are, from the checkpoint at the end of the first stage, is the same stage.
    run = Path(values["output"])
    alone = {
        **values,
        "model": str(run / "checkpoints" / "stage0-step000003"),
        "output": str(tmp_path / "alone"),
        "stages": [second],
        "optimizer": {**values["optimizer"], **own["optimizer"]},
        "seed": 11,
        "data": {"rows": [str(path) for path in (run / "data").iterdir() if path.name != "tokens"]},
    }
    extend(recipe_of(alone))
    assert [(x["loss"], x["grad_norm"]) for x in metrics_of(alone)] == [
        (x["loss"], x["grad_norm"]) for x in metrics_of(values)[3:]
    ]


@pytest.mark.parametrize("moments", ["keep", "rewarm"])
def test_a_run_that_is_resumed_at_the_end_of_a_stage_goes_on_with_its_moments(
    all_rows_each_step, tmp_path, moments
):
    own = {"moments": moments, "precision": "bfloat16", "optimizer": {"beta1": 0.8}}
    values = with_stage(all_rows_each_step, 1, **own)
    extend(recipe_of(values))
    cut = without_the_second_stage(values, tmp_path / "cut")
    extend(recipe_of(cut), resume=True)
    assert results_of(cut) == results_of(values)
    kinds = [line["loss"] for line in metrics_of(values)]
    assert kinds[2] != kinds[3]


def without_the_second_stage(values, output):
    """A copy of a run as it was at the end of its first stage."""
    copy = Path(shutil.copytree(values["output"], output))
    for path in copy.glob("checkpoints/stage1-*"):
        shutil.rmtree(path)
    shutil.rmtree(copy / "model")
    return {**values, "output": str(output)}


@pytest.mark.slow
def test_a_run_with_an_adapter_goes_on_with_its_moments(all_rows_each_step, tmp_path):
    values = {**all_rows_each_step, "adapter": {"rank": 2}}
    values = with_stage(values, 1, moments="rewarm", optimizer={"beta2": 0.9})
    extend(recipe_of(values))
    cut = without_the_second_stage(values, tmp_path / "cut")
    shutil.rmtree(Path(cut["output"]) / "adapter")
    extend(recipe_of(cut), resume=True)
    assert results_of(cut) == results_of(values)
    reset = with_stage({**values, "output": str(tmp_path / "reset")}, 1, moments="reset")
    extend(recipe_of(reset))
    assert metrics_of(reset)[3]["loss"] == metrics_of(values)[3]["loss"]
    assert metrics_of(reset)[4]["loss"] != metrics_of(values)[4]["loss"]


@pytest.mark.slow
def test_stages_arrange_two_processes_as_each_asks(all_rows_each_step, tmp_path, two_ranks):
    alone = with_stage(all_rows_each_step, 1, moments="keep", optimizer={"beta1": 0.8})
    stages = [{**stage, "rows_per_step": 4} for stage in alone["stages"]]
    alone = {**alone, "stages": stages}
    extend(recipe_of(alone))
    stages = [{**stages[0], "parallel": {"shard": 2}}, {**stages[1], "parallel": {"ring": 2}}]
    values = {**alone, "output": str(tmp_path / "ranks"), "stages": stages}
    two_ranks.run(extended, values)
    checkpoints = Path(values["output"]) / "checkpoints"
    meshes = [read_record(checkpoints / f"stage{n}-step000003").mesh for n in (0, 1)]
    assert [(mesh["shard"], mesh["ring"]) for mesh in meshes] == [(2, 1), (1, 2)]
    for line, other in zip(metrics_of(values), metrics_of(alone), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-5)
    # From one process to two, the weights and the moments of a whole checkpoint are sharded.
    cut = without_the_second_stage(alone, tmp_path / "cut")
    cut = {**cut, "stages": [alone["stages"][0], stages[1]]}
    two_ranks.run(extended, cut, True)
    for line, other in zip(metrics_of(cut), metrics_of(alone), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-5)
