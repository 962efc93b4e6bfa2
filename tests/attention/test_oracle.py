"""The budget of an engine: where it comes from, that sound attention keeps within it and that faults do not."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk import PackedLayout, attend
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.oracle import (
    AttentionErrors,
    ExactAttention,
    attention_errors,
    cotangent_of,
    fused_attention,
    oracle_attention,
    values_of,
)

EPS = torch.finfo(torch.float32).eps
LAYOUT = PackedLayout.from_lengths([30, 5, 20], "anchor")


def inputs(dtype, sharpness=1.0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 56, 16, generator=generator) for heads in (4, 2, 2))
    return (sharpness * q).to(dtype), k.to(dtype), v.to(dtype)


def test_the_budget_is_twice_the_plain_error_and_one_rounding():
    errors = AttentionErrors(engine=(0.5, 3.0), plain=(1.0, 1.0), unit=(0.25, 0.5))
    assert errors.budgets == (2.25, 2.5)
    assert errors.worst == (3.0 / 2.5, 3.0, 2.5)
    assert errors.worst_share == 1.2
    assert replace(errors, engine=(0.0, 0.0)).worst_share == 0


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_fused_attention_in_float64_is_the_oracle(softcap):
    q, k, v = inputs(torch.float64)
    options = AttentionOptions(0.7, softcap)
    plain, exact = (
        values_of(
            lambda *qkv, run=run: run(*qkv, [LAYOUT], options),
            (q, k, v),
            cotangent_of(q, v),
        )
        for run in (fused_attention, oracle_attention)
    )
    for found, expected in zip(plain, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 16.0])
def test_sound_attention_keeps_within_the_budget_at_small_and_large_scores(dtype, sharpness):
    q, k, v = inputs(dtype, sharpness)
    found = attention_errors(lambda *qkv: attend(*qkv, LAYOUT, "sdpa"), q, k, v, [LAYOUT])
    assert found.worst_share <= 1, found
    assert found.worst_share > 0


def test_scores_in_bfloat16_are_outside_where_they_are_as_large_as_a_trained_models():
    q, k, v = inputs(torch.bfloat16, 8.0)
    found = attention_errors(lambda *qkv: oracle_attention(*qkv, [LAYOUT]), q, k, v, [LAYOUT])
    assert found.worst_share > 1


@pytest.mark.parametrize("fault", ["a key too many", "a scale a tenth off", "no number"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_faults_are_outside(dtype, fault):
    q, k, v = inputs(dtype, 4.0)
    other = PackedLayout.from_lengths([31, 4, 20], "anchor")

    def broken(q, k, v):
        if fault == "a key too many":
            return attend(q, k, v, other, "sdpa")
        if fault == "no number":
            return attend(q, k, v, LAYOUT, "sdpa") * math.nan
        return attend(q, k, v, LAYOUT, "sdpa", AttentionOptions(1.1 / math.sqrt(16)))

    assert attention_errors(broken, q, k, v, [LAYOUT]).worst_share > 1


def test_a_rounding_is_of_the_largest_score_where_that_is_more():
    """Scores of 4 to 8 have units in the last place of 4 eps in float32, and are rounded by half of one."""
    layout, k, v = PackedLayout.from_lengths([1], "full", 0), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    for score, roundings in ((0.5, 1), (3.9, 1), (4.0, 2), (7.9, 2), (64.0, 32)):
        exact = ExactAttention.of((torch.full((1, 1, 1, 1), score), k, v), [layout], AttentionOptions(1.0))
        assert exact.unit[0] == roundings * EPS
    capped = ExactAttention.of((torch.full((1, 1, 1, 1), 64.0), k, v), [layout], AttentionOptions(1.0, 5.0))
    assert capped.unit[0] == 2 * EPS


@pytest.mark.parametrize(("keys", "roundings"), [(54, 1), (55, 2)])
def test_a_log_sum_exp_counts_where_scores_are_small(keys, roundings):
    """Of n keys whose scores are 0 it is log n, and log 55 is the first above 4."""
    zeros, ones = torch.zeros(1, 1, keys, 1), torch.ones(1, 1, keys, 1)
    layout = PackedLayout.from_lengths([keys], anchor_length=0, pattern="full")
    exact = ExactAttention.of((zeros, zeros, ones), [layout])
    # The average of ones is 1 up to float64's rounding of a sum of as many weights.
    assert exact.unit[0] == pytest.approx(roundings * EPS, rel=keys * 2**-52, abs=0)
    # A sink of the same score is one key more.
    sunk = ExactAttention.of((zeros, zeros, ones), [layout], AttentionOptions(sinks=torch.zeros(1)))
    assert (sunk.unit[0] > exact.unit[0]) == (keys == 54)


def test_an_anchor_is_merged_by_weights_of_two_log_sum_exps():
    q, k, v = torch.zeros(1, 1, 9, 1), torch.zeros(1, 1, 9, 1), torch.ones(1, 1, 9, 1)
    units = [
        ExactAttention.of((q, k, v), [PackedLayout.from_lengths([4, 4], pattern)]).unit[0] / EPS
        for pattern in ("intra_document", "anchor")
    ]
    # log 5 is rounded by half of 2^-23, and twice that is the rounding of a result.
    assert units == pytest.approx([1, 1], rel=9 * 2**-52, abs=0)
    scores = torch.full((1, 1, 9, 1), 1.0)
    units = [
        ExactAttention.of(
            (q + 2.0, scores, v), [PackedLayout.from_lengths([4, 4], pattern)], AttentionOptions(1.0)
        )
        for pattern in ("intra_document", "anchor")
    ]
    # 2 + log 5 is 3.6, which is rounded by half of 2^-22.
    assert [each.unit[0] / EPS for each in units] == [1, 2]


def test_the_cotangent_is_the_same_everywhere_and_touches_no_global_state():
    q, _, v = inputs(torch.bfloat16)
    state = torch.get_rng_state()
    assert torch.equal(cotangent_of(q, v), cotangent_of(q.float(), v.float()).bfloat16())
    assert torch.equal(torch.get_rng_state(), state)
