"""Intervals against published tables, exact distributions and simulated coverage."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import (
    Z_95,
    mean_score_interval,
    paired_score_interval,
    ratio_interval,
    score_interval,
    wilson_interval,
)


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score, no continuity correction).
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_is_the_published_one(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


counted = st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counted)
def test_wilson_ends_are_where_the_score_test_just_rejects(case: tuple[int, int]) -> None:
    successes, n = case
    for end in wilson_interval(successes, n):
        # The definition: |share - p| = z sqrt(p (1 - p) / n), squared and free of division.
        assert (successes / n - end) ** 2 == pytest.approx(Z_95**2 * end * (1 - end) / n, abs=1e-12)


@given(counted)
def test_wilson_interval_contains_the_share_and_mirrors(case: tuple[int, int]) -> None:
    successes, n = case
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert low < high
    mirrored = wilson_interval(n - successes, n)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


def test_wilson_of_no_trials_is_missing_and_of_impossible_counts_an_error() -> None:
    assert all(map(math.isnan, wilson_interval(0, 0)))
    for successes in (-1, 6):
        with pytest.raises(RopewalkError, match=f"0 to 5, the number of trials, got {successes}"):
            wilson_interval(successes, 5)


@given(st.integers(1, 600), st.floats(0, 1))
def test_wilson_of_a_sum_of_shares_stays_within_0_and_1(n: int, share: float) -> None:
    """A mean over checkpoints may lie ever so close to none or to all."""
    low, high = wilson_interval(share * n, n)
    assert 0 <= low <= high <= 1


@pytest.mark.parametrize(
    ("successes", "n"),
    [(1e-16, 1), (4.641588833612773e-09, 10), (499.99999999999784, 500), (math.nextafter(3, 0), 3)],
)
def test_wilson_of_almost_none_or_almost_all_stays_within_0_and_1(successes: float, n: int) -> None:
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= high <= 1


scores_of_a_task = st.lists(st.sampled_from([0, 0.25, 1 / 3, 0.5, 2 / 3, 1]), min_size=1, max_size=30)


@given(counted.filter(lambda case: case[1] < 600))
def test_right_and_wrong_answers_have_wilson_s_interval(case: tuple[int, int]) -> None:
    successes, n = case
    found = score_interval([1] * successes + [0] * (n - successes))
    assert found == pytest.approx(wilson_interval(successes, n), abs=1e-12)


@pytest.mark.parametrize("spread", [[0, 1 / 3, 2 / 3, 1], [0.4, 0.6], [0.25, 1, 1, 1]])
def test_interval_of_shares_is_as_wide_as_their_spread_asks_for(spread: list[float]) -> None:
    for scores in (np.array(spread * 25), np.array(spread * 2500)):
        low, high = score_interval(scores)
        error = float(scores.std()) / math.sqrt(len(scores))
        guarded = math.hypot(error, Z_95 / len(scores))
        assert 2 * Z_95 * error < high - low < 2 * Z_95 * guarded
        wilson = wilson_interval(scores.sum(), len(scores))
        assert wilson[0] < low < scores.mean() < high < wilson[1]


@pytest.mark.parametrize("score", [0, 0.001, 0.25, 0.75, 0.97, 1])
@pytest.mark.parametrize("n", [10, 20, 100, 500])
def test_equal_scores_are_not_taken_for_certain(score: float, n: int) -> None:
    """Where the share ``unseen`` would have scored 0, or 1, n samples show none of it once in twenty times."""
    unseen = 1 - 0.05 ** (1 / n)
    low, high = score_interval([score] * n)
    assert low <= score * (1 - unseen) + 1e-9
    assert high >= score + (1 - score) * unseen - 1e-9


def test_score_interval_of_no_scores_is_missing_and_of_impossible_ones_an_error() -> None:
    assert all(map(math.isnan, score_interval([])))
    for scores in ([0.5, 1.1], [-0.1], [math.nan], [[0.5]]):
        with pytest.raises(RopewalkError, match="from 0 to 1"):
            score_interval(scores)


@given(st.lists(scores_of_a_task, min_size=1, max_size=6))
def test_interval_of_a_mean_over_tasks_holds_the_mean_and_mirrors(tasks: list[list[float]]) -> None:
    low, high = mean_score_interval(tasks)
    mean = sum(sum(task) / len(task) for task in tasks) / len(tasks)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert high - low > 0.001
    mirrored = mean_score_interval([[1 - score for score in task] for task in tasks])
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-9)


def test_equal_tasks_of_right_answers_are_one_large_task() -> None:
    """Agresti and Coull: 2 successes and 2 failures more (z² / 2 each), then the normal interval."""
    n = 13 * 20
    share = (n + Z_95**2 / 2) / (n + Z_95**2)
    low = share - Z_95 * math.sqrt(share * (1 - share) / (n + Z_95**2))
    assert mean_score_interval([[1] * 20] * 13) == pytest.approx((low, 1))
    assert low == pytest.approx(0.9825, abs=1e-4)


def test_what_tasks_differ_in_is_no_variance() -> None:
    """The error of each task is sqrt(0.4 * 0.6 / n), whatever the mean over the tasks."""
    tasks = [[0] * 600 + [1] * 400, [0] * 400 + [1] * 600, [0] * 1000, [1] * 1000]
    low, high = mean_score_interval(tasks)
    error = math.sqrt(2 * 0.24 / 1000) / 4
    assert (high - low) / (2 * Z_95 * error) == pytest.approx(1, abs=0.01)


def test_tasks_weigh_alike_however_many_samples_they_have() -> None:
    low, high = mean_score_interval([[0, 1] * 5000, [0, 1] * 50])
    assert (low + high) / 2 == pytest.approx(0.5)
    # Nearly all of the error is the smaller task's.
    assert high - low == pytest.approx(Z_95 * math.sqrt(0.25 / 100 + 0.25 / 10_000), rel=0.02)


def test_interval_of_a_mean_needs_tasks_and_scores() -> None:
    assert all(map(math.isnan, mean_score_interval([[0.5, 1], []])))
    with pytest.raises(RopewalkError, match="at least one task"):
        mean_score_interval([])
    with pytest.raises(RopewalkError, match="from 0 to 1"):
        mean_score_interval([[1, 0], [50, 100]])
    # One sample says nothing of its task's spread: as wide as if it could be anything.
    low, high = mean_score_interval([[1]] * 4)
    assert (low, high) == (pytest.approx(0.45, abs=0.01), 1)


@pytest.mark.parametrize(
    ("shares", "parts"),
    [
        ([0.95] * 13, 1),
        ([0.98] * 13, 1),
        ([1.0] * 7 + [0.98] * 3 + [0.9, 0.7, 0.4], 1),
        ([0.98] * 13, 4),
    ],
)
def test_interval_of_a_mean_over_13_tasks_covers_it(shares: Sequence[float], parts: int) -> None:
    """Adding each task's distances in squares (MOVER) covers 89, 86, 96 and 95 % here."""
    rng = np.random.default_rng(13)
    draws = rng.binomial(parts, np.array(shares)[:, None], (1000, 13, 20)) / parts
    ends = np.array([mean_score_interval(draw) for draw in draws])
    truth = float(np.mean(shares))
    covered = float(np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1])))
    assert covered >= 0.94
    # Not bought by width: no more than 1.1 times what the true spread asks for, and what 20 scores leave open.
    error = math.sqrt(sum(share * (1 - share) / parts / 20 for share in shares)) / 13
    assert np.diff(ends).mean() < 2 * Z_95 * error * 1.1 + 2 * Z_95**2 / (13 * 20)


def test_paired_interval_of_equal_answers_has_width() -> None:
    assert paired_score_interval([[0] * 20]) == pytest.approx(
        (-Z_95 * math.sqrt(2) / 20, Z_95 * math.sqrt(2) / 20)
    )
    low, high = paired_score_interval([[1] * 20] * 2)
    assert (low, high) == (pytest.approx(1 - Z_95 * math.sqrt(2) / 40), 1)
    assert all(map(math.isnan, paired_score_interval([[0.5, 1], [0]])))


@pytest.mark.parametrize("n", [10, 20])
@pytest.mark.parametrize(
    ("better", "worse"), [(0, 0), (0.02, 0), (0.05, 0.05), (0.1, 0), (0.2, 0.2), (0.3, 0.05), (0.9, 0)]
)
def test_paired_interval_covers_by_exact_enumeration(n: int, better: float, worse: float) -> None:
    """Of n pairs b are better and w worse, with trinomial probability. A bootstrap covers 32 % at 0.02 and 0."""
    covered = 0.0
    for b, w in itertools.product(range(n + 1), repeat=2):
        if b + w > n:
            continue
        low, high = paired_score_interval([[1] * b + [-1] * w + [0] * (n - b - w)])
        ways = math.comb(n, b) * math.comb(n - b, w)
        if low <= better - worse <= high:
            covered += ways * better**b * worse**w * (1 - better - worse) ** (n - b - w)
    assert covered >= 0.94


def test_ratio_of_equal_counts_has_student_s_interval() -> None:
    # t of 4 degrees of freedom is 2.776445, of 1 it is 12.706205 (tables); the error is sd / sqrt(n).
    assert ratio_interval([1, 2, 3, 4, 5]) == pytest.approx(
        (3 - 2.776445 * math.sqrt(0.5), 3 + 2.776445 * math.sqrt(0.5))
    )
    assert ratio_interval([70, 90], [10, 10]) == pytest.approx((8 - 12.706205, 8 + 12.706205))
    assert ratio_interval([70, 90], [10, 10], at_least=0) == pytest.approx((0, 8 + 12.706205))
    assert ratio_interval([5.0, 5.0, 5.0]) == (5, 5)


def test_ratio_of_unequal_counts_leaves_out_whole_samples() -> None:
    totals, counts = [30.0, 410.0, 11.0, 95.0], [10, 200, 6, 40]
    whole, n = sum(totals) / sum(counts), 4
    without = [(sum(totals) - x) / (sum(counts) - c) for x, c in zip(totals, counts, strict=True)]
    mean = sum(without) / n
    error = math.sqrt((n - 1) / n * sum((each - mean) ** 2 for each in without))
    low, high = ratio_interval(totals, counts)
    assert (low + high) / 2 == pytest.approx(whole)
    # 256² / 41736 = 1.57 samples in effect: no less than 1 degree of freedom.
    assert (high - low) / 2 == pytest.approx(12.706205 * error)


def test_ten_documents_of_which_one_has_most_tokens_are_hardly_more_than_one() -> None:
    losses = np.random.default_rng(4).normal(2.5, 0.3, 10)
    alike, lopsided = np.full(10, 1000.0), np.array([9000.0] + [100.0] * 9)
    widths = [float(np.diff(ratio_interval(losses * counts, counts))[0]) for counts in (alike, lopsided)]
    assert widths[1] > 5 * widths[0]


@pytest.mark.parametrize(("rows", "sigma"), [(4, 0.0), (16, 0.0), (4, 0.8), (16, 0.8)])
def test_ratio_interval_covers_over_few_rows(rows: int, sigma: float) -> None:
    """Losses normal, lengths alike or lognormal; a percentile bootstrap covers 78 to 91 %."""
    rng = np.random.default_rng(rows)
    simulations, covered = 2000, 0
    for _ in range(simulations):
        counts = np.exp(rng.normal(6, sigma, rows))
        low, high = ratio_interval(rng.normal(2.5, 0.3, rows) * counts, counts)
        covered += low <= 2.5 <= high
    assert covered / simulations >= 0.94


def test_equal_counts_are_a_plain_mean_and_empty_samples_are_none() -> None:
    values = np.random.default_rng(1).normal(size=12)
    plain = ratio_interval(values)
    assert ratio_interval(7 * values, np.full(12, 7)) == pytest.approx(plain)
    assert ratio_interval([*values, 0.0, 0.0], [1] * 12 + [0, 0]) == pytest.approx(plain)


@pytest.mark.parametrize("totals", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_interval_without_a_spread_is_missing(totals: list[float]) -> None:
    assert all(map(math.isnan, ratio_interval(totals)))


def test_ratio_interval_refuses_what_is_no_sample() -> None:
    with pytest.raises(RopewalkError, match="shapes"):
        ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(RopewalkError, match="0 or more, got -1"):
        ratio_interval([1.0, 2.0], [1.0, -1.0])


SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(SCORES)
def test_samples_with_texts_of_their_own_are_independent(scores: list[float]) -> None:
    assert score_interval(scores, list(range(len(scores)))) == score_interval(scores)


@given(SCORES, st.integers(2, 5))
def test_questions_about_a_text_that_agree_count_as_one(scores: list[float], questions: int) -> None:
    repeated = [score for score in scores for _ in range(questions)]
    texts = [text for text in range(len(scores)) for _ in range(questions)]
    assert score_interval(repeated, texts) == pytest.approx(score_interval(scores), abs=1e-12)


def test_questions_about_a_text_are_covered_like_independent_ones() -> None:
    draw = np.random.default_rng(0)
    held = {"texts": 0, "alone": 0}
    for _ in range(1000):
        # Each text is easy or hard, and four questions are asked about each.
        easy = draw.choice([0.1, 0.9], 30)
        scores = (draw.random((30, 4)) < easy[:, None]).astype(float).ravel()
        for name, contexts in (("texts", [n // 4 for n in range(120)]), ("alone", None)):
            low, high = score_interval(scores, contexts)
            held[name] += low <= 0.5 <= high
    # 95 % within four standard errors of 1,000 trials; intervals that take questions as independent are too narrow.
    assert 920 <= held["texts"] <= 980
    assert held["alone"] < 850
