"""Recipes of published models: a head carries the stored figures of its plans, and these belong to what is shipped."""

import json

import pytest
import torch
import yaml

from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.planning import PlanSettings, plan
from ropewalk.recipes import recipe_text
from ropewalk.training import load_recipe
from ropewalk.training.memory_need import USABLE
from ropewalk.training.preflight import Machine, resolve
from scripts import recipe_plans
from tests.places import CONFIGS
from tests.versions import NEWEST, needs_transformers

CASES = recipe_plans.stored()
NAMES = sorted({case["recipe"] for case in CASES})
WITHOUT_A_PAPER = [case for case in CASES if "\n# Without training: " in recipe_text(case["recipe"])]
"""Those of recipes that set what ropewalk recommends; the others reproduce a paper or a model card."""
QUICK = ("Qwen/Qwen3-1.7B", "ibm-granite/granite-4.1-8b-base", "HuggingFaceTB/SmolLM3-3B")
"""Models whose plans are made again here; each takes some ten seconds."""


def of_model(case):
    return case["model"]


@pytest.mark.parametrize("name", NAMES)
def test_a_head_carries_the_stored_figures(name):
    text = recipe_text(name)
    lines = recipe_plans.head_lines(name, [case for case in CASES if case["recipe"] == name])
    assert recipe_plans.with_head(text, lines) == text
    assert yaml.safe_load(text)["model"] in [case["model"] for case in CASES if case["recipe"] == name]


def test_figures_belong_to_the_recipe_and_the_config_that_are_stored():
    stale = [case["model"] for case in CASES if case["digest"] != recipe_plans.digest(case)]
    assert stale == [], "plan again, with python -m scripts.recipe_plans"


def test_another_value_of_a_recipe_or_config_needs_new_figures(monkeypatch):
    case = CASES[0]
    text = recipe_text(case["recipe"])
    for module_text in (text.replace("rows_per_step: 8", "rows_per_step: 16"), text + "seed: 5\n"):
        monkeypatch.setattr(recipe_plans, "recipe_text", lambda name, found=module_text: found)
        assert recipe_plans.digest(case) != case["digest"]
    # Figures in the head are no part of the digest, or writing them would make it stale.
    monkeypatch.setattr(recipe_plans, "recipe_text", lambda name: text.replace("GB", "bytes"))
    assert recipe_plans.digest(case) == case["digest"]
    monkeypatch.setattr(recipe_plans, "config_of", lambda case: {"hidden_size": 8})
    assert recipe_plans.digest(case) != case["digest"]


@pytest.mark.parametrize("case", CASES, ids=of_model)
def test_a_stored_plan_fits_its_machine_or_says_why_there_is_none(case):
    if "refused" in case:
        assert case["refused"]
        return
    memory = HardwareSettings(gpu=case["gpu"]).cluster.bytes_per_rank
    assert case["memory_gb"] == round(memory / 1e9)
    assert all(stage["peak_gb"] * 1e9 <= USABLE * memory for stage in case["stages"])
    trained = [stage for stage in load_recipe(case["recipe"]).stages if stage.steps]
    for stage, found in zip(trained, case["stages"], strict=True):
        tokens = stage.steps * stage.rows_per_step * stage.context
        # Both are stored with three digits.
        assert found["hours"] == pytest.approx(tokens / found["tokens_per_second"] / 3600, rel=0.01)


@pytest.mark.parametrize("case", CASES, ids=of_model)
def test_every_check_before_a_run_accepts_a_recipe_for_each_of_its_models(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(recipe_plans.config_of(case)))
    recipe = load_recipe(case["recipe"], [f"model={tmp_path}", *case.get("set", ())])
    resolved = resolve(recipe, machine=Machine(torch.device("cpu"), 2**60))
    assert [stage.settings.stage.context for stage in resolved.stages] == [
        each.context for each in recipe.stages
    ]


def test_what_cannot_be_planned_is_said_in_the_head(tmp_path):
    case = {"recipe": "qwen3-128k", "model": "a/model", "config": "qwen3-0.6b", "gpus": 1, "gpu": "h100"}
    case["set"] = ["lift=[windows]"]
    found = recipe_plans.planned(case, tmp_path)
    assert "lift.0 is 'windows', but the model has no such limit" in found["refused"]
    *_, line = " ".join(recipe_plans.head_lines("qwen3-128k", [case | found])).split("# - ")
    said = f"a/model on 1 x h100 with lift=[windows]: cannot be planned ({found['refused']})"
    assert line.replace("#   ", "") == said


@pytest.mark.parametrize("case", WITHOUT_A_PAPER, ids=of_model)
def test_a_recipe_sets_the_rope_that_inspect_recommends_for_each_of_its_models(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(recipe_plans.config_of(case)))
    (stage,) = load_recipe(case["recipe"]).stages
    advised = plan(PlanSettings(model=str(tmp_path), target=stage.context))
    (last,) = advised.stages
    assert last.recipe_method == stage.rope.limiting.method
    key, _, value = last.recipe_parameter.removeprefix(", ").partition(": ")
    # A recipe has a whole base.
    assert getattr(stage.rope.limiting, key) == round(float(value))
    assert advised.advice.lift == ()
    assert load_recipe(case["recipe"]).evaluation.lengths == [advised.config.trained_length, stage.context]


def test_configs_have_sources_and_agree_with_what_else_is_known_of_them():
    """``tests/configs`` has the keys of the same configs that say something of positions, by other sources."""
    compared = 0
    for path in recipe_plans.CONFIGS.glob("*.json"):
        published = json.loads(path.read_text())
        assert published["source"].startswith("https://")
        other = CONFIGS / path.name
        if other.exists():
            known = json.loads(other.read_text())
            both = published["config"].keys() & known.keys()
            assert {key: published["config"][key] for key in both} == {key: known[key] for key in both}
            compared += len(both)
    assert compared > 60


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case["model"] in QUICK], ids=of_model)
def test_a_plan_made_again_has_the_stored_figures(case, tmp_path):
    needs_transformers(NEWEST, "what the stored figures were planned with")
    again = recipe_plans.planned(case, tmp_path)
    assert again == {key: case[key] for key in ("memory_gb", "stages")}
