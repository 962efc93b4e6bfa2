"""How a checkpoint's RoPE and a plan are shown: the facts of the config, the stages, and what goes into a recipe."""

import io

import pytest
from rich.console import Console

from ropewalk.planning import inspect, plan
from ropewalk.planning.settings import InspectSettings, PlanSettings
from ropewalk.reporting.planning import (
    describe_inspection,
    describe_plan,
    inspection_figure,
)
from tests.places import CONFIGS
from tests.reporting.axes_cases import lines, only

LLAMA = str(CONFIGS / "llama-3-8b.json")


def shown(parts):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_without_a_target_the_facts_of_the_config_are_shown():
    config = InspectSettings(model=LLAMA)
    result = inspect(config)
    said = shown(describe_inspection(result, config))
    assert "500000" in said.replace(",", "")
    assert "8192" in said.replace(",", "")
    assert "recipe" not in said


def test_with_a_target_the_answer_comes_first_and_the_sources_where_they_are_asked_for():
    config = InspectSettings(model=LLAMA, target=16384)
    result = inspect(config)
    said = shown(describe_inspection(result, config))
    assert said.startswith("To reach 16,384 tokens\n")
    assert result.advice.action.split(".")[0] in said
    assert "arXiv:2405.14591" not in said
    asked = InspectSettings(model=LLAMA, target=16384, explain=True)
    explained = shown(describe_inspection(inspect(asked), asked))
    assert explained.startswith(said[:200])
    assert "arXiv:2405.14591" in explained


def test_the_periods_drawn_are_those_trained_and_those_recommended():
    result = inspect(InspectSettings(model=LLAMA, target=65536))
    drawn = lines(only(inspection_figure(result)))
    assert "as trained" in drawn
    (recommended,) = (name for name in drawn if name.startswith("recommended"))
    assert drawn["as trained"].y[-1] < drawn[recommended].y[-1]
    assert drawn["as trained"].y[0] == pytest.approx(drawn[recommended].y[0])


def test_a_plan_shows_every_stage_and_ends_with_its_recipe():
    config = PlanSettings(model=LLAMA, target=65536)
    result = plan(config)
    said = shown(describe_plan(result, config))
    for stage in result.stages:
        assert f"{stage.context:,}" in said
        assert f"{stage.method.rope_theta:,.10g}" in said
    assert said.rstrip().endswith(result.recipe.rstrip().splitlines()[-1].strip())
    assert said.startswith("Stages from 8,192 to 65,536 tokens")
