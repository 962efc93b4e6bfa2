"""Advice: each rule's setting with its bound, a recommendation that follows from them, stages that a recipe takes."""

import json
import math
import re
from dataclasses import replace

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.planning import advise, compare_settings, plan_stages
from ropewalk.planning.advice import Checkpoint, explained
from ropewalk.planning.stages import recipe_stages
from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    LongRope,
    Proportional,
    RopeMethod,
    Yarn,
    bound_at,
    replace_methods,
)
from tests.planning.planning_cases import DEEPSEEK_CODER, LLAMA_2, LLAMA_3, LLAMA_3_1, QWEN_YARN

PHI_3 = LongRope(96, 1e4, (1.0,) * 48, tuple(1.0 + i for i in range(48)), 1.19, 4096)


def test_llama_3_is_recommended_the_base_that_gradient_used() -> None:
    advice = advise(LLAMA_3, 8192, 262144)
    assert advice.chosen is not None
    assert advice.chosen.rule == "critical-dimension"
    assert advice.action == (
        "Set rope_theta to 283,461,213 in the last stage, and train in 2 stages: at 65,536 and then 262,144 tokens."
    )
    assert advice.current_bound == 18437
    said = " ".join(advice.reasons)
    assert "Its context bound of 896,529 tokens covers the target." in said
    assert "29 of its 64 rotary pairs did not complete a turn within 8,192 tokens" in said
    assert "29 pairs would reach angles not seen in training (0 with the new setting)" in said
    assert "the recommended base is 11.3 times the median" in said
    assert sum(pair.new_angles > 0 for pair in advice.exposure_now) == 29
    assert advice.exposure_then is not None
    assert sum(pair.new_angles > 0 for pair in advice.exposure_then) == 0


def test_where_the_law_asks_for_less_the_length_floor_is_taken() -> None:
    advice = explained(advise(LLAMA_2, 4096, 32768), 128)
    by_rule = {setting.rule: setting for setting in advice.settings}
    assert by_rule["critical-dimension"].reaches_target is False
    assert advice.chosen == by_rule["length-floor"]
    assert advice.chosen.reaches_target
    assert [stage.context for stage in advice.stages] == [32768]
    assert advice.feasible is not None
    assert advice.feasible.infimum == advice.recommendation.floor == advice.chosen.method.rope_theta
    assert advice.feasible.infimum < advice.feasible.wide_from <= advice.feasible.safe_base
    assert {each.model for each in advice.published} >= {"LWM", "Llama 2 Long 7B", "Qwen2 7B"}


def test_narrow_heads_follow_the_law_and_the_bound_is_no_argument() -> None:
    """stories260K: 8 rotary dimensions; the safe base of 2,048 tokens is 1.03e11, the law's base trains well."""
    advice = advise(Default(8, 1e4), 512, 2048)
    assert advice.chosen.rule == "critical-dimension"
    assert advice.chosen.method.rope_theta == pytest.approx(182_029, rel=1e-5)
    assert any("this model's 8 rotary dimensions its context bound is 65 tokens" in r for r in advice.reasons)


def test_a_model_that_training_refuses_gets_the_reason_and_no_recipe() -> None:
    winged = Checkpoint(refusals=["has wings", "has fins"])
    advice = advise(LLAMA_2, 4096, 32768, winged)
    assert advice.action == (
        "ropewalk extend does not train this model at 32,768 tokens: it has wings; it has fins."
    )
    assert (advice.chosen, advice.recommendation, list(advice.stages)) == (None, None, [])
    assert not any("base" in reason for reason in advice.reasons)
    assert advise(LLAMA_2, 4096, 4096, winged).action.startswith("Change nothing")
    assert advise(LLAMA_2, 4096, 4096, winged).action.endswith("the target of 4,096 fits.")
    assert advise(LLAMA_2, 4096, 128, winged).action.endswith("the target of 128 fits; did you mean 128k?")


@pytest.mark.parametrize(
    ("method", "trained", "factor"),
    [(LLAMA_3_1, 131072, 32.0), (QWEN_YARN, 131072, 16.0), (DEEPSEEK_CODER, 16384, 16.0)],
)
def test_a_scaled_checkpoint_goes_on_with_its_own_method(method, trained: int, factor: float) -> None:
    advice = advise(method, trained, 4 * trained)
    assert advice.chosen is not None
    assert advice.chosen.rule == method.name
    assert advice.chosen.method.factor == factor
    assert advice.recommendation is None
    assert [stage.recipe_method for stage in advice.stages] == [method.name]
    assert f"factor {factor:g}" in advice.action
    if not advice.chosen.reaches_target:
        assert any("does not cover the target" in reason for reason in advice.reasons)
    refused = {
        setting.rule for setting in compare_settings(method, trained, 4 * trained) if not setting.method
    }
    assert {"critical-dimension", "ntk", "length-floor"} <= refused


def test_longrope_is_told_to_search() -> None:
    advice = advise(PHI_3, 131072, 262144)
    assert advice.chosen is None
    assert advice.action.startswith("Search new rescale factors for 262,144 tokens")
    with pytest.raises(RopewalkError, match="search for the factors with `ropewalk search`"):
        plan_stages(PHI_3, 131072, 262144)


def test_dynamic_ntk_was_trained_unscaled_and_counts_so() -> None:
    advice = advise(DynamicNtk(128, 5e5, 2.0, 8192), 8192, 65536)
    assert advice.chosen is not None
    assert advice.chosen.rule == "critical-dimension"


@pytest.mark.parametrize("target", [2048, 4096])
def test_a_target_that_fits_already_changes_nothing(target: int) -> None:
    advice = advise(LLAMA_2, 4096, target)
    assert advice.action.startswith("Change nothing")
    assert (advice.chosen, advice.stages, advice.settings) == (None, (), ())


def test_a_scaled_checkpoint_whose_method_falls_short_is_told_a_base_that_does_not() -> None:
    advice = advise(LLAMA_3_1, 131072, 2**20)
    (said,) = (reason for reason in advice.reasons if "does not cover the target" in reason)
    base = float(re.search(r"theta=([0-9.e+]+)", said)[1])
    assert bound_at(replace(LLAMA_3_1, rope_theta=base), 2**20) >= 2**20
    assert bound_at(replace(LLAMA_3_1, rope_theta=base / 1.3), 2**20) < 2**20


def test_beyond_the_longest_search_the_feasible_bases_are_left_out_and_it_says_so() -> None:
    advice = explained(advise(LLAMA_3, 8192, 2**23), 128)
    assert "takes many minutes" in advice.feasible.reason
    with pytest.raises(RopewalkError, match="may be at most 1073741824 tokens"):
        advise(LLAMA_3, 8192, 2**31)


def test_windows_and_partial_rotation_are_noted() -> None:
    config = {
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "max_position_embeddings": 32768,
    }
    assert "64 of 128 dimensions" in ModelConfig(config).planning_notes[0]
    windowed = {"head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 32768, "sliding_window": 4096}
    assert ModelConfig(windowed).context_layers(32768) == []
    assert ModelConfig(windowed).context_layers(4096) == [0]
    some = {**windowed, "layer_types": ["sliding_attention", "full_attention"]}
    assert "sees only the last 4,096 tokens" in ModelConfig(some).planning_notes[0]
    assert ModelConfig(some).context_layers(32768) == [1]
    assert ModelConfig({**some, "model_type": "cohere2"}).context_layers(32768) == []
    assert ModelConfig({**windowed, "use_sliding_window": False}).planning_notes == []
    assert ModelConfig({"head_dim": 64, "rope_theta": 1e4}, given_length=4096).trained_length == 4096


def test_dual_chunk_attention_states_the_trained_length() -> None:
    chunks = {"chunk_size": 262144, "original_max_position_embeddings": 262144}
    config = {"head_dim": 128, "rope_theta": 1e7, "max_position_embeddings": 1010000}
    assert ModelConfig({**config, "dual_chunk_attention_config": chunks}).trained_length == 262144
    with pytest.raises(RopewalkError, match="original_max_position_embeddings in tokens, got '262144'"):
        _ = ModelConfig(
            {**config, "dual_chunk_attention_config": {"original_max_position_embeddings": "262144"}}
        ).trained_length


def test_advice_is_json() -> None:
    said = json.loads(json.dumps(advise(LLAMA_3, 8192, 65536).to_json()))
    assert said["recommended"] == "critical-dimension"
    assert said["recommendation"]["rope_theta"] == said["stages"][-1]["rope_theta"]
    assert len(said["exposure_now"]) == len(said["exposure_then"]) == 64
    assert {"context", "method", "rope_theta", "reason"} <= set(said["stages"][0])


def test_the_layers_with_full_attention_are_planned_for() -> None:
    config = {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert ModelConfig(config).full_attention_rope == Linear(256, 1e6, 8.0)
    assert "sliding_attention" in ModelConfig(config).planning_notes[0]


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_yarn_without_an_original_length_is_trained_for_the_stated_length(spelling: str) -> None:
    heads = {"head_dim": 64, "max_position_embeddings": 131072, "rope_theta": 1e6}
    config = ModelConfig({**heads, spelling: {"rope_type": "yarn", "factor": 4.0}})
    assert config.trained_length == 131072
    advice = advise(config.full_attention_rope, config.trained_length, 262144)
    # The target is twice the stated length, so the factor doubles; transformers reads 131072 as the original length.
    assert advice.chosen is not None
    assert advice.chosen.method == Yarn(64, 1e6, 8.0, 131072)


def test_the_trained_length_of_yarn_is_its_factor_times_the_original() -> None:
    def trained(method: RopeMethod, length: int) -> int:
        heads = {"head_dim": method.rotary_dim, "max_position_embeddings": length}
        return ModelConfig(replace_methods(heads, method)).trained_length

    assert trained(QWEN_YARN, 32768) == 131072
    assert trained(LLAMA_3, 8192) == 8192
    with pytest.raises(RopewalkError, match="must state max_position_embeddings in tokens, got None"):
        _ = ModelConfig({"head_dim": 64, "rope_theta": 1e4}).trained_length


GEMMA_4 = Proportional(512, 1e6, 0.25)


def test_proportional_rope_stays_where_all_pairs_that_rotate_have_turned() -> None:
    slowest = 2 * math.pi * 1e6 ** (2 * 63 / 512)
    advice = advise(GEMMA_4, 262144, 2**20)
    assert advice.action == "Leave RoPE unchanged, and train at 1,048,576 tokens."
    assert [stage.method for stage in advice.stages] == [GEMMA_4]
    (reason,) = advice.reasons
    assert f"the slowest of the 64 pairs that rotate turns once in {slowest:,.0f} tokens" in reason.lower()
    assert "the other 192 pairs of a head do not depend on the distance" in reason
    assert recipe_stages(advice.stages).count("method: default") == 1


def test_pairs_that_never_rotate_are_not_counted_as_incomplete() -> None:
    """Of a method with slow pairs that rotate: the others have no angle to see."""
    method = Proportional(64, 1e6, 0.75)
    incomplete = sum(2 * math.pi * 1e6 ** (2 * pair / 64) > 4096 for pair in range(24))
    advice = advise(method, 4096, 32768)
    assert incomplete > 0
    assert f"{incomplete} of its 24 pairs that rotate did not complete a turn" in " ".join(advice.reasons)
    assert advice.stages == ()
    assert advice.action == "There is no recommendation for 32,768 tokens."
