"""Means and differences over seeds: textbook formulas, no effect announced by chance, real effects found."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.comparison_nulls import EFFECTS, NULLS, Design, announced, grid
from ropewalk.evaluation.results import SAMPLES, TEXT, PositionBin, TaskResult
from ropewalk.evaluation.statistics import exp_nats, ratio_interval
from ropewalk.experiments.statistics import differences, means_over_seeds


def answers(scores, digest="a", length=1024, task="task"):
    samples = tuple({"index": i, "score": float(score)} for i, score in enumerate(scores))
    return TaskResult(
        "suite",
        task,
        length,
        len(scores),
        float(np.mean(scores)),
        (0, 100),
        details={SAMPLES: digest},
        samples=samples,
    )


def losses(nats, tokens):
    samples = tuple(
        {"index": i, "nats": n, "tokens": t} for i, (n, t) in enumerate(zip(nats, tokens, strict=True))
    )
    score, details = math.exp(sum(nats) / sum(tokens)), {SAMPLES: "rows"}
    return TaskResult(
        "text",
        "perplexity",
        512,
        len(nats),
        score,
        (0, 9),
        details=details,
        unit="perplexity",
        samples=samples,
    )


def cells(rng, count=3, seeds=4, samples=2000, luck=0.1):
    """Scores whose samples are so many that the seeds alone matter."""
    means = 0.5 + luck * rng.standard_normal((count, seeds))
    return {
        f"c{c}": {s: [answers(100.0 * (rng.random(samples) < means[c, s]), f"{s}")] for s in range(seeds)}
        for c in range(count)
    }


def test_a_difference_of_even_cells_is_that_of_randomised_blocks():
    # In this draw the three cells vary alike, so neither their shares nor Box's epsilon change anything.
    found = cells(np.random.default_rng(70))
    values = np.array([[results[0].score for results in cell.values()] for cell in found.values()])
    residual = values - values.mean(0) - values.mean(1)[:, None] + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    pooled = 2 * np.square(residual).sum() / freedom / values.shape[1]
    for number, name in enumerate(["c1", "c2"], start=1):
        (difference,) = differences(found)[name]
        delta = values[number] - values[0]
        error = math.sqrt(max(pooled, delta.var(ddof=1) / len(delta)))
        assert difference.difference == pytest.approx(delta.mean())
        assert difference.freedom == freedom
        assert difference.p_value == pytest.approx(2 * stats.t.sf(abs(delta.mean()) / error, freedom))
        half = stats.t.ppf(0.975, freedom) * error
        assert difference.ci95 == pytest.approx((delta.mean() - half, delta.mean() + half))


def shares_by_hand(tasks):
    """Shares of the cells in the variance and Box's epsilon, by loops over differences of pairs (Grubbs 1948)."""
    (cells, seeds), shares, scaled = tasks[0].shape, [], []
    for values in tasks:
        # For three cells: var(a) = (var(a-b) + var(a-c) - var(b-c)) / 2, each as sample variances.
        v = {(i, j): np.var(values[i] - values[j], ddof=1) for i in range(cells) for j in range(cells)}
        a, b, c = range(3)
        each = [(v[x, y] + v[x, z] - v[y, z]) / 2 for x, y, z in ((a, b, c), (b, a, c), (c, a, b))]
        each = [max(one, 0.0) for one in each]
        shares.append([one / (sum(each) / cells) for one in each])
        residual = [
            values[i, s] - values[:, s].mean() - values[i].mean() + values.mean()
            for i in range(cells)
            for s in range(seeds)
        ]
        scaled.append(np.array(residual) / np.linalg.norm(residual))
    mean = np.mean(shares, axis=0)
    alike = np.mean([(x @ y) ** 2 for x in scaled for y in scaled])
    return mean, min(1.0, cells * (1 + 2 / (seeds - 1) * alike) / (mean**2).sum())


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_an_uneven_cell_has_its_share_of_the_variance_and_the_mean_square_fewer_degrees_of_freedom(tasks):
    rng = np.random.default_rng(1 + tasks)
    luck = np.array([0.02, 0.02, 0.2])[:, None]
    every = 0.5 + luck * rng.standard_normal((tasks, 3, 4)) + 0.1 * rng.standard_normal((tasks, 1, 4))
    # Losses of rows that are alike within a run, so only seeds vary.
    found = {
        f"c{c}": {
            s: [replace(losses([x] * 3, [1] * 3), task=f"{t}") for t, x in enumerate(every[:, c, s])]
            for s in range(4)
        }
        for c in range(3)
    }
    shares, epsilon = shares_by_hand(every)
    assert shares[2] > 2
    assert epsilon < 0.9
    for number, name in enumerate(["c1", "c2"], start=1):
        for values, difference in zip(every, differences(found)[name], strict=True):
            residual = values - values.mean(0) - values.mean(1)[:, None] + values.mean()
            pooled = 2 * np.square(residual).sum() / 6 / 4
            delta = values[number] - values[0]
            share = (shares[0] + shares[number]) / 2
            error = math.sqrt(max(pooled, pooled * share, delta.var(ddof=1) / 4))
            freedom = max(1.0, 6 * epsilon)
            assert difference.p_value == pytest.approx(2 * stats.t.sf(abs(delta.mean()) / error, freedom))


def test_tasks_without_luck_and_tasks_of_other_cells_have_no_part_in_the_shares():
    found = cells(np.random.default_rng(1))
    alone = [differences(found)[name][0].p_value for name in ("c1", "c2")]
    for name, cell in found.items():
        for seed, results in cell.items():
            results.append(answers([100.0] * 9 + [0.0], f"{seed}", task="equal everywhere"))
            if name != "c2":
                results.append(answers(np.random.default_rng(seed).random(9), f"{seed}", task="not of all"))
    assert [differences(found)[name][0].p_value for name in ("c1", "c2")] == alone


def test_two_cells_are_a_paired_t_test_over_seeds():
    found = cells(np.random.default_rng(2), count=2)
    a, b = ([results[0].score for results in cell.values()] for cell in found.values())
    assert differences(found)["c1"][0].p_value == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_the_mean_of_a_cell_is_students_over_seeds():
    cell = cells(np.random.default_rng(3))["c0"]
    (mean,) = means_over_seeds(cell)
    values = [results[0].score for results in cell.values()]
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert (mean.score, mean.n) == (pytest.approx(np.mean(values)), 4 * 2000)
    assert mean.ci95 == pytest.approx((low, high))


def test_one_seed_is_reported_as_it_was_measured():
    result = answers([0.0, 100.0, 100.0])
    assert means_over_seeds({7: [result]}) == [result]


def test_perplexities_are_averaged_and_compared_in_nats():
    cell = {s: [losses([100.0 + s, 220.0], [50, 100])] for s in range(3)}
    (mean,) = means_over_seeds(cell)
    assert mean.score == pytest.approx(math.exp(np.mean([(320 + s) / 150 for s in range(3)])))
    worse = {s: [losses([101.0 + s, 223.0], [50, 100])] for s in range(3)}
    (difference,) = differences({"a": cell, "b": worse})["b"]
    assert difference.difference == pytest.approx(100 * math.expm1(4 / 150))
    assert difference.score_a < difference.score_b


def test_no_interval_of_a_perplexity_goes_below_1():
    def of_seed(nats):
        result = losses([nats * 100, nats * 100], [100, 100])
        bins = (PositionBin(0, 512, 200, 2, math.exp(nats), (1.0, 50.0)),)
        return [replace(result, positions=bins)]

    (mean,) = means_over_seeds({0: of_seed(0.5), 1: of_seed(1.5)})
    # Student's quantile for two seeds, 12.7, times the standard error, 0.5 nats, is more than the mean of 1 nat.
    assert mean.ci95 == pytest.approx((1.0, math.exp(1 + stats.t.ppf(0.975, 1) / 2)))
    assert mean.positions[0].ci95[0] == 1.0


def test_equal_scores_everywhere_announce_nothing_and_are_not_certain():
    cell = {s: [answers([100.0] * 10, f"{s}")] for s in range(3)}
    (difference,) = differences({"a": cell, "b": cell})["b"]
    assert (difference.difference, difference.real) == (0, False)
    assert difference.ci95[0] < 0 < difference.ci95[1]


def test_the_same_difference_with_every_seed_is_not_certain():
    a = {s: [answers([100.0] * 9 + [0.0], f"{s}")] for s in range(3)}
    b = {s: [answers([100.0] * 10, f"{s}")] for s in range(3)}
    (difference,) = differences({"a": a, "b": b})["b"]
    assert difference.difference == pytest.approx(10)
    assert not difference.real


def test_rows_that_all_seeds_share_add_their_own_variance():
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 10, 20)
    a = {s: [losses(list(1000 + rng.normal(0, 0.01, 20)), [500] * 20)] for s in range(4)}
    b = {s: [losses(list(1000 + rows + rng.normal(0, 0.01, 20)), [500] * 20)] for s in range(4)}
    (difference,) = differences({"a": a, "b": b})["b"]
    nats = np.log1p(np.array(difference.ci95) / 100)
    assert np.diff(nats)[0] > 2 * 1.96 * rows.std() / 500 / math.sqrt(20)


def by_position(texts, rng, tokens=100, luck=0.0):
    """Losses of texts in two bins: each text has its own loss, and each measurement some luck."""
    nats = np.array([[np.random.default_rng(text).normal(200, 20), 100.0] for text in texts])
    nats += luck * rng.standard_normal(nats.shape)
    bins = tuple(
        PositionBin(
            at * tokens,
            (at + 1) * tokens,
            tokens * len(texts),
            len(texts),
            exp_nats(nats[:, at].mean() / tokens),
            tuple(exp_nats(end) for end in ratio_interval(nats[:, at], [tokens] * len(texts))),
        )
        for at in (0, 1)
    )
    whole = losses(list(nats.sum(1)), [2 * tokens] * len(texts))
    samples = tuple({**each, TEXT: str(text)} for each, text in zip(whole.samples, texts, strict=True))
    return replace(whole, positions=bins, samples=samples, details={SAMPLES: str(list(texts))})


@pytest.mark.parametrize(
    ("texts", "distinct"),
    [
        ([range(8), range(8)], 8),
        ([range(8), range(8, 16)], 16),
        ([range(8), range(6, 14)], 14),
        ([range(8), range(8), range(8, 16)], 16),
    ],
)
def test_a_mean_over_seeds_has_positions_and_counts_distinct_texts(texts, distinct):
    rng = np.random.default_rng(0)
    cell = {seed: [by_position(each, rng, luck=1.0)] for seed, each in enumerate(texts)}
    (mean,) = means_over_seeds(cell)
    assert mean.n == distinct
    assert mean.details["n_tokens"] == 200 * distinct
    (difference,) = differences({"a": cell, "b": cell})["b"]
    assert difference.n == distinct
    for spread, *of_seeds in zip(
        mean.details["position_spreads"], *(results[0].positions for results in cell.values()), strict=True
    ):
        found = sorted(each.perplexity for each in of_seeds)
        assert spread == {"min": found[0], "max": found[-1]}
    for number, found in enumerate(mean.positions):
        of_seeds = [results[0].positions[number].perplexity for results in cell.values()]
        assert found.perplexity == pytest.approx(math.exp(np.log(of_seeds).mean()))
        assert (found.start, found.end) == (100 * number, 100 * (number + 1))
        assert (found.n_tokens, found.n_windows) == (100 * distinct, distinct)
        assert found.ci95[0] < found.perplexity < found.ci95[1]


def test_texts_that_seeds_have_in_common_make_a_mean_no_more_certain():
    rng = np.random.default_rng(0)
    one = {seed: [by_position(range(8), rng)] for seed in range(3)}
    (mean,) = means_over_seeds(one)
    for found, single in zip(mean.positions, one[0][0].positions, strict=True):
        # The variance over texts is that of one seed; Student's factor is that of three seeds instead of eight texts.
        factor = stats.t.ppf(0.975, 2) / stats.t.ppf(0.975, 7)
        assert np.log(found.ci95) - math.log(found.perplexity) == pytest.approx(
            factor * (np.log(single.ci95) - math.log(single.perplexity))
        )
    other = {seed: [by_position(range(8 * seed, 8 * seed + 8), rng)] for seed in range(3)}
    overlapping = {seed: [by_position(range(seed, seed + 8), rng)] for seed in range(3)}
    widths = [np.diff(np.log(means_over_seeds(cell)[0].ci95))[0] for cell in (other, overlapping)]
    assert widths[0] < widths[1]


def test_seeds_with_other_bins_or_an_empty_bin_have_a_mean_all_the_same():
    rng = np.random.default_rng(0)
    a, b = by_position(range(4), rng), by_position(range(4), rng)
    (mean,) = means_over_seeds({0: [a], 1: [replace(b, positions=b.positions[:1])]})
    assert mean.positions == ()
    empty = replace(a.positions[1], n_tokens=0, n_windows=0, perplexity=math.nan, ci95=(math.nan, math.nan))
    cell = {seed: [replace(each, positions=(each.positions[0], empty))] for seed, each in enumerate((a, b))}
    (mean,) = means_over_seeds(cell)
    assert math.isnan(mean.positions[1].perplexity)
    assert mean.details["position_spreads"][1] == {"min": None, "max": None}
    assert mean.positions[1].n_tokens == 0


@pytest.mark.parametrize(
    ("b", "reason"),
    [
        ({1: [answers([0.0, 100.0])]}, "no seed in common"),
        ({0: [answers([0.0, 100.0], "other")]}, "differ in prompts"),
        ({0: [TaskResult.not_run("suite", "task", 1024, "too long")]}, "too long"),
    ],
)
def test_what_cannot_be_compared_says_why(b, reason):
    (difference,) = differences({"a": {0: [answers([0.0, 100.0])]}, "b": b})["b"]
    assert reason in difference.reason
    assert not difference.real


def test_holms_correction_is_over_all_cells():
    rng = np.random.default_rng(0)
    found = differences(grid(Design(4, 3, 3, 30), rng))
    every = [each for some in found.values() for each in some]
    assert len(every) == 9
    smallest = min(every, key=lambda each: each.p_value)
    assert smallest.p_adjusted == pytest.approx(min(1, 9 * smallest.p_value))


QUICK = [NULLS[3], NULLS[7], NULLS[-5], NULLS[-3]]


@pytest.mark.parametrize("design", QUICK)
def test_grids_without_an_effect_announce_none(design):
    assert announced(design, 60) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 60)


# A reference that varies more than the others is the known limit. Two tasks vary as four do, in half the time.
UNEVEN = [replace(each, tasks=2) for each in NULLS if each.uneven > 1 and each.uneven_cell]


@pytest.mark.slow
@pytest.mark.parametrize("design", UNEVEN + NULLS[1::8])
def test_300_grids_without_an_effect_announce_one_in_at_most_20(design):
    assert announced(design, 300, seed=1) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)


def test_a_large_effect_is_found():
    assert announced(EFFECTS[-1], 20) >= 0.9
