"""Stages of an extension compose, and mean in a recipe what they mean in the plan."""

import pytest
import yaml

from ropewalk.errors import RopewalkError
from ropewalk.planning import advise, plan_stages, recipe_stages
from ropewalk.planning.stages import kept_stages
from ropewalk.rope import Cope, Default, Yarn, bound_at, method_for_target
from ropewalk.rope.theory import recommended_theta
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.decide import bounds_of
from tests.planning.planning_cases import DEEPSEEK_CODER, LLAMA_2, LLAMA_3, LLAMA_3_1, QWEN_YARN


def possible_methods(recipe, checkpoint):
    """The methods of each stage with the smallest and the largest base that it may get."""
    return [(each.low, each.high) for each in bounds_of(recipe, checkpoint)]


def test_stages_compose_and_each_says_whether_its_bound_covers_it() -> None:
    stages = plan_stages(LLAMA_3, 8192, 2**20)
    assert [stage.context for stage in stages] == [65536, 262144, 1048576]
    assert [round(stage.method.rope_theta) for stage in stages] == [22443169, 283461213, 3580165449]
    for stage in stages:
        assert stage.context_bound == bound_at(stage.method, stage.context)
        assert ("covers the stage" in stage.reason) == (stage.context_bound >= stage.context)


def test_an_explicit_rule_is_never_ignored() -> None:
    with pytest.raises(RopewalkError, match="this checkpoint has yarn RoPE"):
        plan_stages(QWEN_YARN, 131072, 2**20, "ntk")
    stages = plan_stages(QWEN_YARN, 131072, 2**20, "theta=1e8")
    assert stages[-1].method == Yarn(128, 1e8, 4.0, 32768)


@pytest.mark.parametrize(
    ("method", "trained"),
    [(LLAMA_2, 4096), (LLAMA_3, 8192), (LLAMA_3_1, 131072), (QWEN_YARN, 131072), (DEEPSEEK_CODER, 16384)],
    ids=lambda value: getattr(value, "name", value),
)
def test_stages_fit_into_a_recipe_and_mean_the_same_there(method, trained: int) -> None:
    stages = plan_stages(method, trained, 16 * trained)
    assert len(stages) == 2
    text = yaml.safe_load(recipe_stages(stages))
    recipe = Recipe.model_validate({"model": "x", "output": "y", "data": {"sources": ["z"]}, **text})
    for ours, (low, high) in zip(stages, possible_methods(recipe, (method, trained)), strict=True):
        assert low == high
        # A recipe holds the base with ten digits.
        assert low.frequencies().inv_freq.numpy() == pytest.approx(
            ours.method.frequencies().inv_freq.numpy(), rel=1e-9
        )


@pytest.mark.parametrize(
    ("method", "trained", "target"),
    [(LLAMA_2, 4096, 32768), (LLAMA_2, 4096, 2**20), (LLAMA_3, 8192, 2**20), (Default(8, 1e4), 512, 2048)],
    ids=["llama-2 to 32k", "llama-2 to 1M", "llama-3 to 1M", "stories to 2k"],
)
def test_inspect_plan_and_extend_take_the_same_bases(method, trained: int, target: int) -> None:
    """One decision: what advice says, what a plan's stages are, and what a recipe that names no base trains with."""
    stages = plan_stages(method, trained, target)
    values = [{"context": stage.context, "steps": 1, "rope": {"method": "theta"}} for stage in stages]
    given = {"model": "x", "output": "y", "data": {"sources": ["z"]}, "stages": values}
    trained_with = possible_methods(Recipe.model_validate(given), (method, trained))
    assert [(stage.method, stage.method) for stage in stages] == trained_with
    advice = advise(method, trained, target)
    assert advice.recommendation.rope_theta == advice.chosen.method.rope_theta == stages[-1].method.rope_theta
    assert method_for_target("theta", method, trained, target) == stages[-1].method


def test_a_base_that_the_recipe_names_is_what_later_stages_build_on() -> None:
    values = [
        {"context": 32768, "steps": 1, "rope": {"method": "theta", "rope_theta": 5e6}},
        {"context": 131072, "steps": 1},
    ]
    given = {"model": "x", "output": "y", "data": {"sources": ["z"]}, "stages": values}
    (_, (last, _)) = possible_methods(Recipe.model_validate(given), (LLAMA_2, 4096))
    assert last.rope_theta == recommended_theta(5e6, 32768, 131072).rope_theta


def test_stages_without_a_change_are_a_recipe_that_leaves_rope_as_it_is() -> None:
    stages = kept_stages(LLAMA_3, 8192, 131072)
    recipe = yaml.safe_load(recipe_stages(stages, ("dual_chunk_attention",)))
    assert recipe["lift"] == ["dual_chunk_attention"]
    assert [stage["rope"] for stage in recipe["stages"]] == [{"method": "default"}] * 2
    checked = Recipe.model_validate({"model": "m", "output": "o", "data": {"sources": ["s"]}, **recipe})
    assert all(stage.rope.method == "default" for stage in checked.stages)
    assert {stage.method for stage in stages} == {LLAMA_3}


def test_a_base_that_stays_in_the_end_stays_on_the_way() -> None:
    """At 512k the law would raise Mistral Small's base to 1.8e10, and at 1.2M the base of 1e9 covers the target."""
    stages = plan_stages(Default(128, 1e9), 131072, 1_200_000)
    assert [(stage.context, stage.method.rope_theta) for stage in stages] == [(524288, 1e9), (1_200_000, 1e9)]
    assert [stage.recipe_method for stage in stages] == ["theta", "theta"]
    raised = plan_stages(Default(128, 1e9), 131072, 524288)
    assert raised[-1].method.rope_theta > 1e9


def test_a_plan_by_cope_names_the_method_and_a_cope_checkpoint_keeps_it() -> None:
    (stage,) = plan_stages(LLAMA_3, 8192, 65536, "cope")
    assert (stage.method, stage.recipe_method) == (Cope(128, 5e5, 20, 65536), "cope")
    assert "cope with base 500,000 from the rule cope" in stage.reason
    assert "rope: {method: cope}" in recipe_stages([stage])
    clipped = Cope(128, 1e7, 12, 65536)
    assert plan_stages(clipped, 65536, 131072)[-1].method == Cope(128, 1e7, 12, 131072)
    advice = advise(clipped, 65536, 131072)
    assert advice.action == "Keep cope (base 10,000,000) and train at 131,072 tokens."
    assert advice.reasons[0] == "The checkpoint was trained with cope scaling, so it keeps cope."
