"""Advice on published configs: what it comes to, against formulas written out here and against what is documented."""

import json
import math

import pytest

from ropewalk.models.config.file import ROTARY_DIM_SINCE
from ropewalk.rope import Default, bound_at
from ropewalk.rope.theory.published import LARGEST_PUBLISHED
from tests.places import ROOT
from tests.planning.published_cases import (
    MORE,
    NAMES,
    TARGETS,
    advice_of,
    config_of,
    row,
    stored,
    table,
)
from tests.versions import needs_transformers

FLOORS = {each["length"]: each["infimum"] for each in json.loads((ROOT / "docs" / "bases.json").read_text())}
REFUSED = {
    "nemotron-3-nano-30b-a3b": "has no RoPE that a config can describe",
}
LIMITING = {
    "command-r7b": [],
    "deepseek-v3": range(61),
    "deepseek-v4-flash": range(2, 43),
    "exaone-4.0-32b": [],
    "falcon-h1-0.5b": range(36),
    "gemma-2-9b": range(1, 42, 2),
    "gemma-3-4b": range(5, 34, 6),
    "gemma-4-31b": range(5, 60, 6),
    "gpt-oss-20b": range(1, 24, 2),
    "laguna-xs.2": range(0, 40, 4),
    "lfm2.5-1.2b": [2, 5, 8, 10, 12, 14],
    "llama-4-scout": [],
    "mistral-7b-v0.1": [],
    "olmo-3-7b": range(3, 32, 4),
    "phi-3.5-mini-instruct": range(32),
    "qwen3-next-80b-a3b": range(3, 48, 4),
    "qwen3.5-27b": range(3, 64, 4),
    "smollm3-3b": [number for number in range(36) if number % 4 != 3],
    "starcoder2-7b": [],
}
WINDOWS = {"mistral-7b-v0.1": (32, 4096), "starcoder2-7b": (32, 4096)}
NO_BASE = ("command-r7b", "exaone-4.0-32b", "gemma-4-31b")

both = [
    pytest.param(target, marks=[pytest.mark.slow] if name == "1M" else [], id=name)
    for name, target in TARGETS.items()
]


def needs_minimax(name: str) -> None:
    if name.startswith("minimax-m2"):
        needs_transformers(ROTARY_DIM_SINCE["minimax_m2"], f"the config of {name}")


def law(base: float, trained: int, target: int) -> float:
    """The critical-dimension law, written out again."""
    return base ** (math.log(target / (2 * math.pi)) / math.log(trained / (2 * math.pi)))


def wanted_base(base: float, rotary_dim: int, trained: int, target: int) -> float:
    """The larger of law and floor; the present base where it covers the target and the law exceeds all published."""
    asked = law(base, trained, target)
    floor = FLOORS[target]
    above = asked > max(floor, LARGEST_PUBLISHED)
    # The bound of a long row takes seconds, so it comes last.
    return base if above and bound_at(Default(rotary_dim, base), target) >= target else max(asked, floor)


def test_there_are_enough_configs_and_each_of_the_added_ones_names_its_source() -> None:
    assert len(NAMES) >= 60
    assert all(each["source"] for each in MORE.values())


@pytest.mark.parametrize("target", both)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_the_advice_is_what_the_formulas_ask_for(name: str, target: int) -> None:
    needs_minimax(name)
    config, advice = config_of(name), advice_of(name, target)
    assert not isinstance(config, str), config
    method, trained = config.full_attention_rope, config.trained_length
    if target <= trained:
        assert advice.action.startswith("Change nothing")
        assert (list(advice.stages), advice.chosen, list(advice.refusals)) == ([], None, [])
        return
    if advice.lifted is not None:
        assert advice.chosen is None
        assert [window < target for window in {layer.window for layer in config.layers}] == [True]
        advice = advice.lifted
    if method.name == "longrope":
        assert advice.action.startswith("Search new rescale factors")
    elif name in NO_BASE:
        assert {stage.recipe_method for stage in advice.stages} == {"default"}
        assert {stage.method for stage in advice.stages} == {method}
    elif method.name in ("default", "dynamic"):
        plain = method.plain
        base = advice.chosen.method.rope_theta
        assert base == pytest.approx(
            wanted_base(plain.rope_theta, plain.rotary_dim, trained, target), rel=1e-8
        )
        assert plain.rope_theta <= base
        assert advice.stages[-1].method.rope_theta == base
        assert [stage.method.rope_theta for stage in advice.stages] == sorted(
            stage.method.rope_theta for stage in advice.stages
        )
    else:
        new = advice.chosen.method
        assert type(new) is type(method)
        assert new.rope_theta == method.rope_theta
        assert new.factor == pytest.approx(method.factor * target / trained)
        if method.name == "yarn":
            assert new.factor * new.original_max_position_embeddings == pytest.approx(target)
            assert f"relative to the original {new.original_max_position_embeddings:,} tokens" in " ".join(
                advice.reasons
            )
    if advice.stages:
        assert advice.stages[-1].context == target


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_what_has_no_rope_to_change_is_refused_by_name(name: str, said: str) -> None:
    config = config_of(name)
    assert isinstance(config, str)
    assert said in config


@pytest.mark.parametrize(("name", "layers"), LIMITING.items())
def test_the_layers_that_limit_the_context(name: str, layers: list[int]) -> None:
    config = config_of(name)
    assert not isinstance(config, str)
    assert config.context_layers(config.trained_length) == list(layers)
    said = " ".join(config.planning_notes)
    assert ("these layers limit the context" in said) == (0 < len(layers) < len(config.layers))


@pytest.mark.parametrize(("name", "shape"), WINDOWS.items())
def test_windows_everywhere_are_lifted_or_kept(name: str, shape: tuple[int, int]) -> None:
    layers, window = shape
    advice = advice_of(name, 2**17)
    (refused,) = advice.refusals
    for part in (
        f"a sliding window of {window:,} tokens in every layer",
        f"the windows of all {layers} layers together reach {1 + layers * (window - 1):,};",
        "lift: [windows]",
        f"lower the context from 131,072 to at most {window:,} tokens",
    ):
        assert part in refused
    assert advice.lifted.lift == ("windows",)
    assert not any("context bound" in reason for reason in advice.reasons)
    assert f"did not complete a turn within {window:,} tokens" in " ".join(advice.lifted.reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepseek-v3", "kimi-k2", "glm-4.5-air", "qwen3-next-80b-a3b", "minimax-m2.5"]
)
def test_heads_that_are_half_still_or_more_are_told_no_bound_to_reach(name: str) -> None:
    needs_minimax(name)
    advice = advice_of(name, 2**20)
    said = " ".join(advice.reasons)
    assert not advice.chosen.reaches_target
    assert "at least as much attention as random ones at any distance" in said
    assert "expect retrieval to weaken" not in said


@pytest.mark.slow
def test_limits_that_extend_refuses_are_in_the_recipe_or_come_first() -> None:
    assert advice_of("qwen2.5-7b-instruct-1m", 2**20).lift == ("dual_chunk_attention",)
    (first,) = advice_of("seed-oss-36b", 2**20).first
    assert first.startswith("set attention_dropout to 0")


@pytest.mark.slow
def test_the_table_of_the_documentation_is_what_comes_out() -> None:
    for name in NAMES:
        needs_minimax(name)
    assert stored() == table(), "run python -m tests.planning.published_cases"


@pytest.mark.parametrize("name", ["command-r7b", "deepseek-v4-flash", "llama-4-scout"])
def test_rows_of_the_table(name: str) -> None:
    assert row(name) in stored()
