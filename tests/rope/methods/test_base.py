"""Every method against transformers' own function, its published structure, and exact arithmetic."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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
    Theta,
    Yarn,
    config_entries,
    longrope_attention_factor,
    unscaled_inv_freq,
)
from tests.rope.rope_cases import (
    FLOAT32_ORACLE,
    FLOAT64_ORACLE,
    PUBLISHED,
    defaults,
    dims,
    dynamics,
    examples,
    linears,
    llama3s,
    llama_config,
    longropes,
    methods,
    ntks,
    thetas,
    transformers_in_float64,
    yarns,
)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    torch.testing.assert_close(actual, expected.double(), rtol=relative, atol=0)


def oracle(
    method: RopeMethod,
    parameters: dict[str, Any],
    max_length: int = 131072,
    sequence_length: int | None = None,
) -> tuple[torch.Tensor, float]:
    """transformers' function of the same rope type on parameters written out here."""
    parameters = {"rope_type": method.name, "rope_theta": method.rope_theta, **parameters}
    config = llama_config(method, max_length, rope_parameters=parameters)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[method.name](config, None, seq_len=sequence_length)
    return inv_freq, attention_factor


@examples
@given(defaults)
def test_default_equals_transformers(method: Default) -> None:
    parameters = {"rope_type": "default", "rope_theta": method.rope_theta}
    config = llama_config(method, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    assert_close(method.frequencies().inv_freq, rotary.inv_freq, FLOAT32_ORACLE)
    assert method.frequencies().attention_factor == rotary.attention_scaling == 1


@examples
@given(dims, thetas)
def test_unscaled_frequencies_are_exact_in_float64(rotary_dim: int, rope_theta: float) -> None:
    with localcontext() as context:
        context.prec = 40
        exact = [
            float(Decimal(rope_theta) ** (Decimal(-2 * pair) / rotary_dim)) for pair in range(rotary_dim // 2)
        ]
    inv_freq = unscaled_inv_freq(rotary_dim, rope_theta)
    assert inv_freq.dtype == torch.float64
    # Rounding the exponent (at most 2^-54 below 1) times ln(1e9), and one unit in the power's last place.
    assert_close(inv_freq, torch.tensor(exact, dtype=torch.float64), 21 * 2**-54 + 2**-52)


@examples
@given(linears)
def test_linear_equals_transformers(method: Linear) -> None:
    parameters = {"factor": method.factor}
    assert_close(method.frequencies().inv_freq, oracle(method, parameters)[0], FLOAT32_ORACLE)
    with transformers_in_float64():
        assert_close(method.frequencies().inv_freq, oracle(method, parameters)[0], FLOAT64_ORACLE)


@examples
@given(ntks)
def test_ntk_equals_transformers_dynamic_at_the_same_scale(method: Ntk) -> None:
    # dynamic's scale is factor·L/T - (factor - 1): with factor 1 it is L/T, so L = s·T gives s.
    length = 2**20
    stretched = round(length * method.factor)
    method = replace(method, factor=stretched / length)
    dynamic = DynamicNtk(method.rotary_dim, method.rope_theta, 1.0, length)
    with transformers_in_float64():
        expected, _ = oracle(dynamic, {"factor": 1.0}, length, stretched)
    assert_close(method.frequencies().inv_freq, expected, FLOAT64_ORACLE)


@examples
@given(ntks)
def test_ntk_divides_the_slowest_pair_by_the_factor_and_keeps_the_fastest(method: Ntk) -> None:
    plain = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    scaled = method.frequencies().inv_freq
    assert scaled[0] == plain[0] == 1
    assert float(plain[-1] / scaled[-1]) == pytest.approx(method.factor, rel=FLOAT64_ORACLE)
    assert torch.equal(scaled, method.as_default().frequencies().inv_freq)


@examples
@given(dynamics, st.none() | st.integers(1, 10**6))
def test_dynamic_equals_transformers_at_every_length(method: DynamicNtk, sequence_length: int | None) -> None:
    with transformers_in_float64():
        expected, attention_factor = oracle(
            method, {"factor": method.factor}, method.original_max_position_embeddings, sequence_length
        )
    inv_freq, ours = method.frequencies(sequence_length)
    assert_close(inv_freq, expected, FLOAT64_ORACLE)
    assert ours == attention_factor == 1


@examples
@given(yarns())
def test_yarn_equals_transformers(method: Yarn) -> None:
    names = (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    parameters = {name: getattr(method, name) for name in names if getattr(method, name) is not None}
    with transformers_in_float64():
        expected, attention_factor = oracle(method, parameters)
    inv_freq, ours = method.frequencies()
    assert_close(inv_freq, expected, FLOAT64_ORACLE)
    assert ours == pytest.approx(attention_factor, rel=FLOAT64_ORACLE)


@examples
@given(llama3s)
def test_llama3_equals_transformers(method: Llama3) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    with transformers_in_float64():
        expected, attention_factor = oracle(method, {name: getattr(method, name) for name in names}, 2**20)
    inv_freq, ours = method.frequencies()
    assert_close(inv_freq, expected, FLOAT64_ORACLE)
    assert ours == attention_factor == 1


@examples
@given(longropes(), st.none() | st.integers(1, 10**6))
def test_longrope_equals_transformers_at_every_length(method: LongRope, sequence_length: int | None) -> None:
    parameters = {
        "short_factor": list(method.short_factor),
        "long_factor": list(method.long_factor),
        "attention_factor": method.attention_factor,
        "original_max_position_embeddings": method.original_max_position_embeddings,
        "factor": 1.0,
    }
    expected, attention_factor = oracle(method, parameters, 2**20, sequence_length)
    inv_freq, ours = method.frequencies(sequence_length)
    assert_close(inv_freq, expected, FLOAT32_ORACLE)
    assert ours == attention_factor


@examples
@given(st.floats(1, 256), st.integers(64, 131072))
def test_longrope_attention_factor_equals_transformers(factor: float, original: int) -> None:
    method = LongRope(4, 10000.0, (1.0, 1.0), (2.0, 2.0), 1.0, original)
    parameters = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "factor": factor}
    _, expected = oracle(method, {**parameters, "original_max_position_embeddings": original})
    assert longrope_attention_factor(factor, original) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_equal_transformers_as_it_is(name: str) -> None:
    method, keys, max_length = PUBLISHED[name]
    config = llama_config(method, max_length, **keys)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[method.name](config, None)
    inv_freq, ours = method.frequencies()
    assert_close(inv_freq, expected, FLOAT32_ORACLE)
    assert ours == pytest.approx(attention_factor, rel=1e-15)


def assert_yarn_structure(inv_freq: torch.Tensor, method: Yarn) -> None:
    """The paper's three bands, by the number of turns of each pair over the original length."""
    plain = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    turns = method.original_max_position_embeddings * plain / (2 * math.pi)
    fast, slow = turns > method.beta_fast, turns < method.beta_slow
    assert torch.equal(inv_freq[fast], plain[fast])
    assert torch.equal(inv_freq[slow], plain[slow] / method.factor)
    between = inv_freq / plain
    assert bool((between.diff() <= 2**-50).all())
    # The bounds themselves carry the rounding of 1 - scaled + scaled / s.
    assert bool((between <= 1 + 2**-50).all())
    assert bool((between >= (1 - 2**-50) / method.factor).all())


@examples
@given(yarns())
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(method: Yarn) -> None:
    assert_yarn_structure(method.frequencies().inv_freq, method)


def test_yarn_structure_fails_for_a_swapped_ramp() -> None:
    method = Yarn(128, 10000.0, 16.0, 4096)
    inv_freq = method.frequencies().inv_freq
    plain = unscaled_inv_freq(128, 10000.0)
    swapped = plain + plain / method.factor - inv_freq
    with pytest.raises(AssertionError):
        assert_yarn_structure(swapped, method)


def test_yarn_ramp_of_llama_2_runs_from_pair_20_to_46() -> None:
    # 64·log_10000(4096 / (32·2π)) = 20.9445 and 64·log_10000(4096 / 2π) = 45.0269, rounded outward.
    method = Yarn(128, 10000.0, 16.0, 4096)
    assert method.ramp_range() == (20, 46)
    low, high = replace(method, truncate=False).ramp_range()
    assert (low, high) == pytest.approx((20.9445, 45.0269), abs=5e-5)
    ratio = method.frequencies().inv_freq / unscaled_inv_freq(128, 10000.0)
    # Halfway along the ramp the factor is the mean of 1 and 1/16.
    assert float(ratio[33]) == pytest.approx((1 + 1 / 16) / 2, rel=1e-14)


def test_yarn_attention_factor_is_that_of_the_paper() -> None:
    assert Yarn(128, 10000.0, 16.0, 4096).frequencies().attention_factor == 0.1 * math.log(16) + 1
    assert Yarn(128, 10000.0, 1.0, 4096).frequencies().attention_factor == 1


@examples
@given(llama3s)
def test_llama3_keeps_fast_pairs_and_divides_slow_ones(method: Llama3) -> None:
    plain = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
    turns = method.original_max_position_embeddings * plain / (2 * math.pi)
    inv_freq = method.frequencies().inv_freq
    fast, slow = turns > method.high_freq_factor, turns < method.low_freq_factor
    assert torch.equal(inv_freq[fast], plain[fast])
    assert torch.equal(inv_freq[slow], plain[slow] / method.factor)


@examples
@given(methods)
def test_frequencies_are_pure_positive_and_float64(method: RopeMethod) -> None:
    inv_freq, attention_factor = method.frequencies(100_000)
    again, _ = method.frequencies(100_000)
    assert torch.equal(inv_freq, again)
    assert inv_freq.dtype == torch.float64
    assert inv_freq.shape == (method.rotary_dim // 2,)
    assert bool((inv_freq > 0).all())
    assert attention_factor > 0
    if not isinstance(method, LongRope):
        assert bool((inv_freq.diff() < 0).all())
    if not method.length_dependent:
        assert torch.equal(inv_freq, method.frequencies().inv_freq)
    assert hash(method) == hash(replace(method))


def test_frequencies_ignore_the_default_device_and_dtype() -> None:
    with torch.device("meta"):
        values = [
            method.frequencies().inv_freq
            for method in (
                Default(8, 10000.0),
                Yarn(8, 10000.0, 2.0, 512),
                LongRope(4, 10000.0, (1.0, 1.0), (2.0, 2.0), 1.0, 512),
            )
        ]
    assert all(value.device.type == "cpu" and value.dtype == torch.float64 for value in values)


def test_every_method_has_its_name_and_theta_is_default() -> None:
    assert Theta is Default
    assert {name: cls.name for name, cls in METHODS.items() if name != "theta"} == {
        name: name for name in METHODS if name != "theta"
    }
    assert [name for name, cls in METHODS.items() if not cls.trainable] == ["dynamic"]
    assert [name for name, cls in METHODS.items() if cls.length_dependent] == ["dynamic", "longrope"]


def test_methods_are_frozen_and_have_no_theta_of_their_own() -> None:
    with pytest.raises(FrozenInstanceError):
        Default(8, 10000.0).rope_theta = 5.0  # type: ignore[misc]
    for cls in METHODS.values():
        with pytest.raises(TypeError, match="rope_theta"):
            cls(rotary_dim=8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Default(7, 1e4), "rotary_dim must be an even whole number, at least 2, got 7"),
        (lambda: Default(0, 1e4), "got 0"),
        (lambda: Default(8, 1.0), "rope_theta must be a finite number above 1, got 1.0"),
        (lambda: Default(8, math.inf), "got inf"),
        (lambda: Linear(8, 1e4, 0.5), "factor must be a finite number, at least 1, got 0.5"),
        (lambda: Linear(8, 1e4, "2"), "got '2'"),
        (lambda: Ntk(2, 1e4, 2.0), "needs at least 4, got 2"),
        (lambda: DynamicNtk(8, 1e4, 2.0, 0), "original_max_position_embeddings must be .* got 0"),
        (
            lambda: DynamicNtk(8, 1e4, 2.0, 64).frequencies(0),
            "sequence_length must be at least 1 token, got 0",
        ),
        (lambda: Yarn(8, 1e4, 2.0, 512, beta_fast=1, beta_slow=2), "beta_fast .* got 1 and 2"),
        (lambda: Yarn(8, 1e4, 2.0, 512, attention_factor=0), "attention_factor .* got 0"),
        (lambda: Yarn(8, 1e4, 2.0, 512, mscale=-1), "mscale must be 0 or more, or absent, got -1"),
        (lambda: Yarn(8, 1e4, 2.0, 6), "above 2·pi·beta_slow = 6.3 tokens, got 6"),
        (lambda: Llama3(8, 1e4, 2.0, 4.0, 1.0, 512), "high_freq_factor must be at least .* got 1.0 and 4.0"),
        (lambda: LongRope(8, 1e4, (1.0,) * 3, (1.0,) * 4, 1.0, 512), "rotary_dim / 2 = 4 entries, got 3"),
        (lambda: LongRope(4, 1e4, (1.0, 1.0), (1.0, 0.0), 1.0, 512), r"long_factor\[1\] .* got 0.0"),
        (lambda: LongRope(4, 1e4, 1.0, (1.0, 1.0), 1.0, 512), "short_factor must be a list of numbers"),
        (lambda: LongRope(4, 1e4, (1.0, 1.0), (1.0, 1.0), 1.0, 512, -1), "start_tokens .* got -1"),
        (lambda: LongRope(4, 1e4, (1.0, 1.0), (1.0, 1.0), 1.0, 512, 1.5), "start_tokens .* got 1.5"),
    ],
)
def test_bad_fields_are_refused_with_their_value(build: Any, said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        build()


def test_llama3_with_equal_factors_is_that_of_transformers() -> None:
    """Llama 4: both factors are 1, so nothing is blended."""
    method = Llama3(128, 5e5, 16.0, 1.0, 1.0, 8192)
    config = llama_config(method, **config_entries(method, 128))
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    torch.testing.assert_close(method.frequencies().inv_freq, inv_freq.double(), rtol=FLOAT32_ORACLE, atol=0)
