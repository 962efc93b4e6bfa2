"""A stage makes its rows one step ahead, in their order, and ends where they cannot be made."""

import json
from pathlib import Path

import pytest

from ropewalk import RopewalkError
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage import made_ahead
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


def metrics_of(values):
    return [json.loads(line) for line in (Path(values["output"]) / "metrics.jsonl").read_text().splitlines()]


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
