"""Intervals against published tables, exact distributions and simulated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.statistics import (
    NO_INTERVAL,
    Z_95,
    bootstrap_interval,
    mean_interval,
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
        with pytest.raises(RopewalkError, match=f"0 to the number of trials 5, got {successes}"):
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


def test_wilson_of_shares_is_no_narrower_than_their_spread_asks_for() -> None:
    """Scores of 0 and 1 vary most of all that have their mean."""
    thirds = [0, 1 / 3, 2 / 3, 1] * 25
    low, high = wilson_interval(sum(thirds), 100)
    spread = Z_95 * float(np.std(thirds)) / 10
    assert high - low > 2 * spread
    assert wilson_interval(sum(thirds), 100) == pytest.approx(wilson_interval(50, 100))


# Newcombe, Statistics in Medicine 17 (1998), 873-890, table II, method 10: difference of two proportions by
# squaring and adding Wilson's distances. It is twice the mean of the one and the other's complement, less 1.
@pytest.mark.parametrize(
    ("a", "m", "b", "n", "low", "high"),
    [
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (6, 7, 2, 7, 0.0582, 0.8062),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (0, 10, 0, 20, -0.1611, 0.2775),
        (10, 10, 0, 20, 0.6791, 1.0000),
    ],
)
def test_interval_of_a_mean_is_the_published_one(
    a: int, m: int, b: int, n: int, low: float, high: float
) -> None:
    intervals = [wilson_interval(a, m), wilson_interval(n - b, n)]
    ends = mean_interval([a / m, 1 - b / n], intervals)
    assert tuple(2 * end - 1 for end in ends) == pytest.approx((low, high), abs=5e-5)


def test_interval_of_a_mean_adds_distances_in_squares() -> None:
    # Below 10 and 10, above 5 and 15: 70 - sqrt(200) / 2 and 70 + sqrt(250) / 2.
    low, high = mean_interval([80, 60], [(70, 85), (50, 75)])
    assert (low, high) == pytest.approx((62.928932, 77.905694), abs=1e-6)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=6),
    st.integers(2, 5),
)
def test_interval_of_a_mean_narrows_with_equal_ones_and_holds_the_mean(
    cases: list[tuple[float, float, float]], copies: int
) -> None:
    means = [mean for mean, _, _ in cases]
    intervals = [(mean - below, mean + above) for mean, below, above in cases]
    low, high = mean_interval(means, intervals)
    centre = sum(means) / len(means)
    assert low <= centre + 1e-9
    assert high >= centre - 1e-9
    repeated = mean_interval(means * copies, intervals * copies)
    assert (centre - repeated[0], repeated[1] - centre) == pytest.approx(
        ((centre - low) / math.sqrt(copies), (high - centre) / math.sqrt(copies)), abs=1e-9
    )
    mirrored = mean_interval([-mean for mean in means], [(-high, -low) for low, high in intervals])
    assert (-mirrored[1], -mirrored[0]) == pytest.approx((low, high), abs=1e-9)


def test_interval_of_one_mean_is_its_own_and_missing_where_one_is_missing() -> None:
    assert mean_interval([40.0], [(30.0, 45.0)]) == pytest.approx((30, 45))
    assert all(map(math.isnan, mean_interval([40.0, 50.0], [(30.0, 45.0), NO_INTERVAL])))
    # Even where all are right: width is left.
    assert mean_interval([100.0, 100.0], [(80.0, 100.0)] * 2) == pytest.approx((100 - 20 / math.sqrt(2), 100))


def test_interval_of_no_mean_or_without_intervals_is_an_error() -> None:
    with pytest.raises(RopewalkError, match="got 0 means and 0 intervals"):
        mean_interval([], [])
    with pytest.raises(RopewalkError, match="got 2 means and 1 intervals"):
        mean_interval([1.0, 2.0], [(0.0, 3.0)])


def test_bootstrap_of_many_is_the_normal_interval() -> None:
    """Symmetric values have no skewness, and 400 of them leave their mean normal to 1 in 400."""
    half = np.random.default_rng(5).normal(size=200)
    values = np.concatenate([half, -half]) + 7
    resamples = 20_000
    low, high = bootstrap_interval(values, resamples=resamples)
    error = float(values.std()) / math.sqrt(len(values))
    # Four standard errors of a 2.5 % quantile of so many draws, in units of the mean's own error.
    density = math.exp(-(Z_95**2) / 2) / math.sqrt(2 * math.pi)
    slack = 4 * math.sqrt(0.025 * 0.975 / resamples) / density
    assert (low - 7) / error == pytest.approx(-Z_95, abs=slack + 1 / 400)
    assert (high - 7) / error == pytest.approx(Z_95, abs=slack + 1 / 400)


@pytest.mark.parametrize(("ones", "n"), [(12, 40), (3, 9), (50, 64)])
def test_bootstrap_of_a_proportion_has_the_quantiles_of_the_binomial(ones: int, n: int) -> None:
    """Resampling k ones out of n draws from Binomial(n, k/n) / n, whose quantiles are known exactly."""
    resamples = 20_000
    low, high = bootstrap_interval([1] * ones + [0] * (n - ones), resamples=resamples)
    p = ones / n
    cumulative = np.cumsum([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])
    for end, level in ((low, 0.025), (high, 0.975)):
        # A sample quantile lies between the exact quantiles of levels four standard errors apart.
        slack = 4 * math.sqrt(level * (1 - level) / resamples)
        ends = [int(np.searchsorted(cumulative, level + sign * slack)) / n for sign in (-1, 1)]
        assert ends[0] - 1e-12 <= end <= ends[1] + 1e-12


def test_bootstrap_covers_as_often_as_its_theory_says() -> None:
    """A percentile bootstrap of n normal values covers as mean ± z · sd (ddof 0) / sqrt(n) does."""
    n, trials = 40, 500
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(trials):
        low, high = bootstrap_interval(rng.normal(3.0, 2.0, n), seed=trial, resamples=500)
        covered += low <= 3.0 <= high
    reach = Z_95 * math.sqrt((n - 1) / n)
    t = np.linspace(-reach, reach, 20_001)
    density = (1 + t**2 / (n - 1)) ** (-n / 2)
    constant = math.gamma(n / 2) / (math.sqrt((n - 1) * math.pi) * math.gamma((n - 1) / 2))
    expected = constant * np.trapezoid(density, t)
    assert expected == pytest.approx(0.940, abs=0.005)
    # Four standard errors of the share, and 0.01 for quantiles of 500 resamples.
    assert abs(covered / trials - expected) < 4 * math.sqrt(expected * (1 - expected) / trials) + 0.01


def test_equal_counts_are_a_plain_mean_and_empty_samples_are_none() -> None:
    values = np.random.default_rng(1).normal(size=12)
    plain = bootstrap_interval(values, seed=3)
    assert bootstrap_interval(7 * values, np.full(12, 7), seed=3) == pytest.approx(plain)
    with_empty = bootstrap_interval([*values, 0.0, 0.0], [1] * 12 + [0, 0], seed=3)
    assert with_empty == pytest.approx(plain)


def test_a_sample_weighs_as_much_as_it_holds() -> None:
    low, high = bootstrap_interval([10.0, 900.0], [10, 300])
    # The resamples are (a, a), (a, b) and (b, b); the mixed one has mean 910 / 310, not the mean of means.
    assert (low, high) == pytest.approx((1.0, 3.0))
    assert bootstrap_interval([10.0] * 4 + [900.0] * 4, [10] * 4 + [300] * 4)[0] > 2


def test_bootstrap_depends_on_the_seed_alone() -> None:
    values = np.random.default_rng(2).normal(size=9)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


@pytest.mark.parametrize("totals", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_bootstrap_without_a_spread_is_missing(totals: list[float]) -> None:
    assert all(map(math.isnan, bootstrap_interval(totals)))


def test_bootstrap_refuses_what_is_no_sample() -> None:
    with pytest.raises(RopewalkError, match="shapes"):
        bootstrap_interval([1.0, 2.0], [1.0])
    with pytest.raises(RopewalkError, match="0 or more, got -1"):
        bootstrap_interval([1.0, 2.0], [1.0, -1.0])
