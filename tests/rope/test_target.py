"""Which method a recipe's name gives on which checkpoint, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    METHODS,
    Default,
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    RopeMethod,
    Yarn,
    method_for_target,
    scaled_theta,
    trainable_methods,
)

PLAIN = Default(8, 500000.0)
ONES, TWOS = (1.0,) * 4, (2.0,) * 4
SCALED = {
    "linear": Linear(8, 500000.0, 2.0),
    "yarn": Yarn(8, 500000.0, 2.0, 4096, beta_fast=16.0),
    "llama3": Llama3(8, 500000.0, 8.0, 1.0, 4.0, 4096),
    "longrope": LongRope(8, 500000.0, ONES, TWOS, 1.2, 4096, start_tokens=4),
}
FACTORS = {"short_factor": ONES, "long_factor": TWOS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", PLAIN),
        ("theta", Default(8, scaled_theta(500000.0, 8192, 65536))),
        ("linear", Linear(8, 500000.0, 8.0)),
        ("ntk", Ntk(8, 500000.0, 8.0)),
        ("yarn", Yarn(8, 500000.0, 8.0, 8192)),
        ("llama3", Llama3(8, 500000.0, 8.0, 1.0, 4.0, 8192)),
        ("longrope", LongRope(8, 500000.0, ONES, TWOS, math.sqrt(1 + math.log(8) / math.log(8192)), 8192)),
    ],
)
def test_method_from_an_unscaled_checkpoint(name: str, expected: RopeMethod) -> None:
    parameters = FACTORS if name == "longrope" else None
    assert method_for_target(name, PLAIN, 8192, 65536, parameters=parameters) == expected


def test_every_trainable_method_can_be_asked_for() -> None:
    assert set(trainable_methods()) == set(METHODS) - {"dynamic"}


def test_given_theta_is_taken_as_it_is() -> None:
    assert method_for_target("theta", PLAIN, 8192, 65536, rope_theta=1e7) == Default(8, 1e7)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_scaling_further_multiplies_the_factor_and_keeps_the_rest(name: str) -> None:
    current = SCALED[name]
    further = method_for_target(name, current, 8192, 32768)
    assert further.factor == 4 * current.factor
    assert {**vars(further), "factor": None} == {**vars(current), "factor": None}


@pytest.mark.parametrize("name", SCALED)
def test_default_keeps_the_scaling_of_the_checkpoint(name: str) -> None:
    assert method_for_target("default", SCALED[name], 8192, 32768) is SCALED[name]


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_theta_on_a_scaled_checkpoint_keeps_the_scaling_and_must_be_given(name: str) -> None:
    current = SCALED[name]
    changed = method_for_target("theta", current, 8192, 32768, rope_theta=4e6)
    assert vars(changed) == {**vars(current), "rope_theta": 4e6}
    with pytest.raises(RopewalkError, match=f"this checkpoint has {name} RoPE; either set rope_theta"):
        method_for_target("theta", current, 8192, 32768)


def test_longrope_starts_from_the_original_length_of_a_longrope_checkpoint() -> None:
    further = method_for_target("longrope", SCALED["longrope"], 8192, 32768, parameters=FACTORS)
    assert further == LongRope(8, 5e5, ONES, TWOS, math.sqrt(1 + math.log(8) / math.log(4096)), 4096)


def test_dynamic_ntk_checkpoint_counts_as_unscaled() -> None:
    dynamic = DynamicNtk(8, 500000.0, 2.0, 8192)
    assert method_for_target("yarn", dynamic, 8192, 16384) == Yarn(8, 500000.0, 2.0, 8192)
    with pytest.raises(
        RopewalkError, match="RoPE method 'dynamic' cannot be used in training; choose theta, linear"
    ):
        method_for_target("default", dynamic, 8192, 16384)


def test_ntk_checkpoint_counts_as_default_with_its_base() -> None:
    ntk = Ntk(8, 500000.0, 2.0)
    linear = method_for_target("linear", ntk, 8192, 16384)
    assert linear == Linear(8, ntk.as_default().rope_theta, 2.0)


def test_parameters_override_what_is_derived() -> None:
    parameters = {"factor": 3.0, "beta_fast": 16.0, "truncate": False, "attention_factor": 1.0}
    assert method_for_target("yarn", PLAIN, 8192, 16384, parameters=parameters) == Yarn(
        8, 500000.0, 3.0, 8192, beta_fast=16.0, truncate=False, attention_factor=1.0
    )
    start = {"short_factor": ONES, "long_factor": TWOS, "attention_factor": 1.5, "start_tokens": 3}
    assert method_for_target("longrope", PLAIN, 8192, 16384, parameters=start) == LongRope(
        8, 500000.0, ONES, TWOS, 1.5, 8192, 3
    )


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("dynamic", PLAIN, 8192, 16384), {}, "inference only: .* choose ntk or theta"),
        (("abf", PLAIN, 8192, 16384), {}, "unknown RoPE method 'abf'; choose one of default, theta"),
        (("linear", PLAIN, 8192, 4096), {}, "at least the original length of 8192 tokens, got 4096"),
        (
            ("linear", PLAIN, 8192, 16384),
            {"rope_theta": 1e6},
            "rope_theta 1000000.0 has no meaning for method 'linear'",
        ),
        (
            ("linear", PLAIN, 8192, 16384),
            {"parameters": {"beta_fast": 1.0}},
            "'beta_fast' has no meaning for method 'linear', which takes only 'factor'",
        ),
        (
            ("theta", PLAIN, 8192, 16384),
            {"parameters": {"factor": 2.0}},
            "'factor' has no meaning for method 'theta', which takes no parameters",
        ),
        (
            ("yarn", SCALED["llama3"], 8192, 16384),
            {},
            "method 'yarn' cannot extend a checkpoint that already has llama3 RoPE; choose 'llama3'",
        ),
        (("ntk", SCALED["linear"], 8192, 16384), {}, "already has linear RoPE"),
        (
            ("theta", SCALED["longrope"], 8192, 16384),
            {"rope_theta": 1e6},
            "factors belong to the present base",
        ),
        (("longrope", PLAIN, 8192, 16384), {}, "longrope needs short_factor"),
        (
            ("longrope", PLAIN, 8192, 16384),
            {"parameters": {"short_factor": ONES}},
            "longrope needs long_factor",
        ),
        (
            ("yarn", Yarn(8, 5e5, 2.0, 4096, attention_factor=1.1), 8192, 16384),
            {},
            "has attention_factor 1.1",
        ),
    ],
)
def test_refusals_say_what_to_do(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        method_for_target(*arguments, **options)


def test_a_stated_attention_factor_of_1_stays() -> None:
    """Laguna XS.2 turns the attention temperature off; the pairs change as for any yarn."""
    laguna = Yarn(64, 5e5, 32.0, 4096, 64.0, 1.0, attention_factor=1.0)
    found = method_for_target("yarn", laguna, 131072, 1048576)
    assert found == replace(laguna, factor=256.0)
    assert found.frequencies().attention_factor == 1
    given = method_for_target("yarn", laguna, 131072, 1048576, parameters={"attention_factor": 1.5})
    assert given.attention_factor == 1.5


def test_a_stated_attention_factor_that_is_the_formula_goes_on_by_the_formula() -> None:
    """OLMo 3 writes 0.1·ln 8 + 1 into its config; at factor 16 it is 0.1·ln 16 + 1."""
    olmo_3 = Yarn(128, 5e5, 8.0, 8192, attention_factor=1.2079441541679836)
    found = method_for_target("yarn", olmo_3, 65536, 131072)
    assert found == Yarn(128, 5e5, 16.0, 8192)
    assert found.frequencies().attention_factor == pytest.approx(1.2772588722239782, rel=1e-12)
    deepseek = Yarn(64, 1e4, 40.0, 4096, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0)
    assert method_for_target("yarn", deepseek, 163840, 327680).attention_factor is None
    near = replace(olmo_3, attention_factor=1.208)
    with pytest.raises(RopewalkError, match=r"has attention_factor 1\.208"):
        method_for_target("yarn", near, 65536, 131072)
    given = method_for_target("yarn", olmo_3, 65536, 131072, parameters={"attention_factor": 1.2})
    assert given.attention_factor == 1.2
