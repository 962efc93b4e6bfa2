"""YaRN: as transformers and the paper have it, fast pairs kept and slow ones divided."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.rope import Yarn, for_all_readers, methods_from_config, unscaled_inv_freq
from tests.rope.rope_cases import (
    FLOAT64_ORACLE,
    assert_close,
    examples,
    oracle,
    transformers_in_float64,
    yarns,
)


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


@given(st.floats(1.001, 64), st.floats(0.05, 20))
def test_yarn_states_its_attention_factor_for_programs_that_read_only_mscales(
    factor: float, attention: float
) -> None:
    method = Yarn(128, 10000.0, factor, 4096, attention_factor=attention)
    entry = Yarn.for_all_readers(method.to_entry(), 8192)
    mscale, all_dim = entry.get("mscale"), entry.get("mscale_all_dim")
    if mscale is None:
        assert math.isclose(attention, 0.1 * math.log(factor) + 1, rel_tol=2**-24)
        return
    assert min(mscale, all_dim) > 0
    assert math.isclose(
        (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1),
        attention,
        rel_tol=2**-24,
    )
    # They are the same method, read again.
    config = {
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_parameters": {**entry, "rope_type": "yarn"},
    }
    assert methods_from_config(config)[None] == method


def test_yarn_states_no_mscales_where_they_say_nothing_new_or_mean_more() -> None:
    for method in (
        Yarn(128, 10000.0, 4.0, 4096),
        Yarn(128, 10000.0, 4.0, 4096, attention_factor=0.1 * math.log(4) + 1),
        Yarn(128, 10000.0, 4.0, 4096, attention_factor=2.0, mscale=0.5, mscale_all_dim=1.0),
        Yarn(128, 10000.0, 1.0, 4096, attention_factor=2.0),
    ):
        assert Yarn.for_all_readers(method.to_entry(), 8192) == method.to_entry()
    entry = {"rope_type": "yarn", **Yarn(64, 1e4, 4.0, 4096, attention_factor=1.0).to_entry()}
    plain = {"head_dim": 64, "max_position_embeddings": 16384, "rope_parameters": entry}
    # DeepSeek's attention multiplies its scores by mscale_all_dim too.
    latent = {**plain, "qk_rope_head_dim": 64}
    assert for_all_readers(plain)["rope_parameters"] == {**entry, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert for_all_readers(latent) == latent
