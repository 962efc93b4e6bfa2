"""Every method against transformers' own function, its published structure, and exact arithmetic."""

import math
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    unscaled_inv_freq,
)
from tests.rope.rope_cases import (
    FLOAT32_ORACLE,
    PUBLISHED,
    assert_close,
    dims,
    examples,
    llama_config,
    methods,
    thetas,
)


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_equal_transformers_as_it_is(name: str) -> None:
    method, keys, max_length = PUBLISHED[name]
    config = llama_config(method, max_length, **keys)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[method.name](config, None)
    inv_freq, ours = method.frequencies()
    assert_close(inv_freq, expected, FLOAT32_ORACLE)
    assert ours == pytest.approx(attention_factor, rel=1e-15)


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
        (lambda: Ntk(2, 1e4, 2.0), "rotary_dim must be at least 4, got 2"),
        (lambda: DynamicNtk(8, 1e4, 2.0, 0), "original_max_position_embeddings must be .* got 0"),
        (
            lambda: DynamicNtk(8, 1e4, 2.0, 64).frequencies(0),
            "sequence_length must be at least 1 token, got 0",
        ),
        (
            lambda: Yarn(8, 1e4, 2.0, 512, beta_fast=1, beta_slow=2),
            "beta_fast must be at least beta_slow 2, got 1",
        ),
        (lambda: Yarn(8, 1e4, 2.0, 512, attention_factor=0), "attention_factor .* got 0"),
        (lambda: Yarn(8, 1e4, 2.0, 512, mscale=-1), "mscale must be 0 or more, or absent, got -1"),
        (lambda: Yarn(8, 1e4, 2.0, 6), "above 2·pi·beta_slow = 6.3 tokens, got 6"),
        (
            lambda: Llama3(8, 1e4, 2.0, 4.0, 1.0, 512),
            "high_freq_factor must be at least low_freq_factor 4.0, got 1.0",
        ),
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
