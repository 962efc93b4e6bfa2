"""Differences between two evaluations: known answers, exact enumeration, and nothing compared that is not paired."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.comparison import RESAMPLES, ScoreDifference, compare
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.statistics import Z_95, ratio_interval
from ropewalk.evaluation.tasks.ruler.tasks import overall_results
from ropewalk.io.digests import digest
from tests.evaluation.core_cases import percent_result, perplexity_result, through_json


def exact_p_value(strata: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Share of all swaps within samples whose difference is as large as the observed; every one is enumerated."""

    def statistic(signed: Sequence[Sequence[float]]) -> float:
        return sum(
            math.fsum(deltas) / sum(weights) for deltas, (_, weights) in zip(signed, strata, strict=True)
        )

    observed = abs(statistic([deltas for deltas, _ in strata]))
    swaps = itertools.product(
        *(itertools.product((1, -1), repeat=len(deltas)) for deltas, _ in strata),
    )
    found = [
        abs(
            statistic(
                [
                    [s * d for s, d in zip(each, deltas, strict=True)]
                    for each, (deltas, _) in zip(signs, strata, strict=True)
                ]
            )
        )
        for signs in swaps
    ]
    return sum(value >= observed - 1e-9 for value in found) / len(found)


def within_four_errors(share: float) -> Any:
    """What a share of so many random draws is to be equal to; the observed swap counts as one more."""
    return pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / RESAMPLES) + 1 / RESAMPLES)


def one(a: TaskResult, b: TaskResult, seed: int = 0) -> ScoreDifference:
    (found,) = compare([a], [b], seed)
    return found


def test_equal_evaluations_differ_by_nothing() -> None:
    for result in (
        percent_result([0, 100, 50, 25]),
        percent_result([100 / 3, 200 / 3, 100 / 7]),
        perplexity_result([20.0, 31.0, 5.5], [10, 12, 3], 7.0),
    ):
        found = one(result, result)
        assert (found.difference, found.p_value, found.p_adjusted, found.real) == (0, 1, 1, False)
        low, high = found.ci95
        # Equal answers of a few samples leave room for other ones; equal losses of every row leave none.
        assert (low, high) == (0, 0) if result.unit == "perplexity" else low == -high < -50
        assert found.score_a == found.score_b == result.score
        assert (found.n, found.reason) == (result.n, None)


def test_all_samples_better_is_a_real_difference() -> None:
    a, b = percent_result([0] * 20), percent_result([100] * 20)
    found = one(a, b)
    assert (found.difference, found.n, found.real) == (100, 20, True)
    assert found.ci95 == (pytest.approx(100 - 100 * Z_95 * math.sqrt(2) / 20), 100)
    # Two of 2^20 swaps are as large; the least that so many draws can say is one of them and the observed.
    assert found.p_value == found.p_adjusted == pytest.approx(1 / (RESAMPLES + 1))
    assert (found.score_a, found.score_b, found.unit) == (0, 100, "percent")
    assert one(b, a).difference == -100
    assert one(b, a).real


def test_four_samples_are_too_few_for_a_real_difference() -> None:
    """Even if all are better: 2 of 16 swaps are as large."""
    found = one(percent_result([0] * 4), percent_result([100] * 4))
    assert found.p_value == within_four_errors(2 / 16)
    assert not found.real


@settings(max_examples=25)
@given(
    st.lists(st.tuples(*[st.sampled_from([0, 25, 100 / 3, 50, 200 / 3, 100])] * 2), min_size=2, max_size=9)
)
def test_p_value_is_that_of_all_swaps(pairs: list[tuple[float, float]]) -> None:
    a, b = (percent_result(side) for side in zip(*pairs, strict=True))
    found = one(a, b)
    deltas = [y - x for x, y in pairs]
    assert found.p_value == within_four_errors(exact_p_value([(deltas, [1] * len(deltas))]))
    assert found.difference == pytest.approx(b.score - a.score)


@pytest.mark.parametrize(
    ("thirds_a", "thirds_b"),
    [
        ((3, 0), (0, 3)),
        ((1, 1, 2), (2, 1, 1)),
        ((3, 3, 0, 1), (1, 0, 3, 3)),
        ((3, 0, 1, 3, 3, 1), (3, 3, 3, 1, 1, 0)),
    ],
)
def test_equal_scores_in_another_order_have_a_p_value_of_1(
    thirds_a: tuple[int, ...], thirds_b: tuple[int, ...]
) -> None:
    """Every swap is as large as a difference of 0, whatever the rounding of thirds makes of it."""
    a, b = (percent_result([100 * (third / 3) for third in side]) for side in (thirds_a, thirds_b))
    found = one(a, b)
    assert found.difference == pytest.approx(0, abs=1e-12)
    assert found.p_value == 1


def test_perplexity_s_difference_is_the_exact_ratio() -> None:
    tokens = [10, 20, 30, 41]
    a, b = [20.0, 44.0, 60.0, 99.0], [21.0, 40.0, 63.5, 90.0]
    scores = [math.exp(sum(nats) / sum(tokens)) for nats in (a, b)]
    found = one(perplexity_result(a, tokens, scores[0]), perplexity_result(b, tokens, scores[1]))
    assert found.difference == pytest.approx(100 * (scores[1] / scores[0] - 1), rel=1e-12)
    assert (found.score_a, found.score_b, found.unit) == (*scores, "perplexity")
    deltas = [y - x for x, y in zip(a, b, strict=True)]
    assert found.p_value == within_four_errors(exact_p_value([(deltas, tokens)]))
    assert found.ci95[0] < found.difference < found.ci95[1]
    assert found.ci95 == pytest.approx([100 * math.expm1(end) for end in ratio_interval(deltas, tokens)])


def test_perplexity_that_doubles_in_every_row_is_100_percent_more() -> None:
    tokens = [10, 20, 30] * 7
    a = [2.0 * n for n in tokens]
    b = [(2.0 + math.log(2)) * n for n in tokens]
    found = one(perplexity_result(a, tokens, math.exp(2)), perplexity_result(b, tokens, 2 * math.exp(2)))
    assert found.difference == pytest.approx(100)
    assert found.ci95 == pytest.approx((100, 100))
    assert found.real


def symmetric(n: int, centre: float, seed: int) -> list[float]:
    """Values without skewness, whose mean of many is normal but for 1 in n."""
    half = np.random.default_rng(seed).normal(size=n // 2)
    return [float(value) for value in np.concatenate([half, -half]) + centre]


def test_interval_of_many_samples_is_the_normal_one() -> None:
    deltas = symmetric(400, 0.3, seed=1)
    found = one(percent_result([50.0] * 400), percent_result([50 + delta for delta in deltas]))
    # Two more differences, of -100 and of 100, of 400.
    error = math.hypot(float(np.std(deltas, ddof=1)) / 20, 100 * math.sqrt(2) / 400)
    for end, sign in zip(found.ci95, (-1, 1), strict=True):
        assert (end - 0.3) / error == pytest.approx(sign * Z_95, rel=1e-12)


def overall_case(
    scores: dict[str, tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[TaskResult], list[TaskResult]]:
    sides = []
    for side in (0, 1):
        tasks = [percent_result(both[side], task) for task, both in scores.items()]
        sides.append([*tasks, *overall_results(tasks, {})])
    return sides[0], sides[1]


def test_overall_is_the_mean_of_the_tasks_differences_whatever_their_samples() -> None:
    a, b = overall_case(
        {
            "vt": ([0, 50, 100], [100, 50, 100]),
            "niah": ([0] * 5, [0, 0, 0, 0, 100]),
            "cwe": ([40.0, 30.0], [10.0, 60.0]),
        }
    )
    found = compare(a, b)
    assert [each.task for each in found] == ["vt", "niah", "cwe", "overall"]
    assert [each.difference for each in found] == pytest.approx([100 / 3, 20, 0, (100 / 3 + 20) / 3])
    overall = found[-1]
    assert overall.n == 10
    assert overall.difference == pytest.approx(overall.score_b - overall.score_a)
    strata = [([100, 0, 0], [1] * 3), ([0, 0, 0, 0, 100], [1] * 5), ([-30, 30], [1] * 2)]
    assert overall.p_value == within_four_errors(exact_p_value(strata))


def test_interval_of_an_overall_is_the_normal_one_of_its_strata() -> None:
    deltas = {"vt": symmetric(400, 1.0, 2), "niah": symmetric(200, -0.5, 3)}
    a, b = overall_case(
        {name: ([50.0] * len(each), [50 + delta for delta in each]) for name, each in deltas.items()}
    )
    overall = compare(a, b)[-1]
    variance = sum(np.var(each, ddof=1) / len(each) for each in deltas.values()) / 4
    # Two more differences, of -100 and of 100, for both tasks together, which weigh as 4 / (1/400 + 1/200) samples.
    error = math.hypot(math.sqrt(variance), 100 * math.sqrt(2) * (1 / 400 + 1 / 200) / 4)
    for end, sign in zip(overall.ci95, (-1, 1), strict=True):
        assert (end - 0.25) / error == pytest.approx(sign * Z_95, rel=1e-12)


def test_overall_of_other_tasks_or_of_unpaired_ones_is_not_compared() -> None:
    a, b = overall_case({"vt": ([0, 50], [100, 50]), "niah": ([0, 0], [0, 100])})
    other = replace(b[-1], details={**b[-1].details, "tasks": ["vt", "cwe"]})
    assert compare(a, [*b[:2], other])[-1].reason == "the results have no samples to pair"
    assert compare(a, [b[0], b[2]])[-1].reason == "the results have no samples to pair"
    unlike = replace(b[0], details={SAMPLES: "others"})
    last = compare(a, [unlike, *b[1:]])[-1]
    assert last.reason == "vt: the samples differ in prompts, text or tokenizer"
    assert math.isnan(last.difference)


UNPAIRED = {
    "digest": (percent_result([0, 100], details={SAMPLES: "other"}), "the samples differ in prompts"),
    "one without a digest": (percent_result([0, 100], details={}), "the samples differ in prompts"),
    "indices": (
        percent_result([0, 100], samples=({"index": 0, "score": 0.0}, {"index": 7, "score": 100.0})),
        "the samples differ: 2 in A, 2 in B",
    ),
    "number": (
        percent_result([0, 100, 100], details={SAMPLES: "other", "rejected": [{"index": 3, "reason": "x"}]}),
        "A has 2 samples and B has 4; run both",
    ),
    "fewer": (percent_result([0, 100], samples=({"index": 0, "score": 0.0},)), "2 in A, 1 in B"),
    "none": (percent_result([0, 100], samples=()), "the results have no samples to pair"),
    "not run": (TaskResult.not_run("ruler", "niah", 4096, "no memory"), "not run in B: no memory"),
}


@pytest.mark.parametrize("name", UNPAIRED)
def test_what_cannot_be_paired_has_a_reason_and_no_numbers(name: str) -> None:
    other, reason = UNPAIRED[name]
    a = percent_result([100, 100])
    found = one(a, other)
    assert found.reason is not None
    assert reason in found.reason
    assert (found.n, found.real) == (0, False)
    assert all(map(math.isnan, (found.difference, found.p_value, found.p_adjusted, *found.ci95)))
    assert one(other, a).reason is not None
    through_json(found.to_json())


def test_results_that_do_not_say_what_was_asked_are_not_compared() -> None:
    bare = percent_result([0, 100], details={})
    assert one(bare, bare).reason is not None


def test_perplexities_of_other_tokens_are_not_compared() -> None:
    a = perplexity_result([20.0, 30.0], [10, 20], 4.0, details={SAMPLES: "same"})
    b = perplexity_result([20.0, 30.0], [10, 21], 4.0, details={SAMPLES: "same"})
    assert one(a, b).reason == "different tokens were scored in A and B"


def test_order_of_samples_does_not_matter() -> None:
    a, b = percent_result([0, 100, 50, 0]), percent_result([100, 100, 0, 50])
    shuffled = replace(b, samples=b.samples[::-1])
    assert one(a, b) == one(a, shuffled)


def test_one_sample_has_a_difference_and_no_p_value() -> None:
    found = one(percent_result([0]), percent_result([100]))
    assert (found.difference, found.n, found.real, found.reason) == (100, 1, False, None)
    assert all(map(math.isnan, (found.p_value, found.p_adjusted, *found.ci95)))


def test_perplexity_that_is_infinite_is_no_difference_and_can_be_written() -> None:
    good = perplexity_result([20.0, 44.0], [10, 20], math.exp(64 / 30))
    bad = perplexity_result([20.0, None], [10, 20], math.inf)
    for a, b in ((good, bad), (bad, good), (bad, bad)):
        found = one(a, b)
        value = through_json(found.to_json())
        assert value["difference"] is None
        assert value["p_value"] is None
        assert not found.real


def test_tasks_of_one_side_alone_are_left_out_and_nothing_in_common_is_refused() -> None:
    vt, niah = percent_result([0, 100], "vt"), percent_result([0, 100], "niah")
    longer = percent_result([0, 100], "vt", 8192)
    found = compare([niah, vt, longer], [longer, vt])
    assert [(each.task, each.length) for each in found] == [("vt", 4096), ("vt", 8192)]
    for b in ([longer], []):
        with pytest.raises(RopewalkError, match="no task and length in common"):
            compare([vt], b)


def test_comparison_depends_on_the_seed_alone() -> None:
    a, b = percent_result([0, 100, 50, 0] * 5), percent_result([100, 100, 0, 50] * 5)
    assert one(a, b, 1) == one(a, b, 1)
    assert one(a, b, 1).p_value != one(a, b, 2).p_value
    # A task's numbers do not depend on which other tasks were measured.
    beside = compare([percent_result([0, 100], "vt"), a], [percent_result([50, 100], "vt"), b], 1)[1]
    assert (beside.ci95, beside.p_value) == (one(a, b, 1).ci95, one(a, b, 1).p_value)


def test_swapping_the_sides_swaps_the_sign() -> None:
    a, b = percent_result([0, 100, 50, 0] * 5), percent_result([100, 100, 0, 50] * 5)
    there, back = one(a, b), one(b, a)
    assert there.difference == -back.difference
    assert there.ci95 == pytest.approx((-back.ci95[1], -back.ci95[0]))
    assert there.p_value == back.p_value


def test_many_samples_are_swapped_in_blocks() -> None:
    """Fourteen thousand questions: the same numbers as the normal distribution says."""
    found = one(percent_result([50.0] * 2000), percent_result([150.0] * 700 + [-50.0] * 640 + [50.0] * 660))
    # The difference is 3, and swaps have the error of the 1,340 that are not 0.
    error = 100 * math.sqrt(1340) / 2000
    tail = math.erfc(3 / error / math.sqrt(2))
    assert found.p_value == pytest.approx(tail, abs=4 * math.sqrt(tail * (1 - tail) / RESAMPLES) + 0.005)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values by their definition: the largest, of all that are no larger, of (m - k) p_k."""
    m = len(p_values)
    ranks = sorted(range(m), key=lambda i: p_values[i])
    steps = [min(1.0, (m - k) * p_values[i]) for k, i in enumerate(ranks)]
    return [max(steps[: ranks.index(i) + 1]) for i in range(m)]


def test_adjusted_p_values_are_holm_s() -> None:
    # The textbook's example: R's p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm").
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    better = {"t6": 6, "t9": 9, "t5": 5, "t7": 7, "t1": 1, "t0": 0}
    a = [percent_result([0] * 12, name) for name in better]
    b = [percent_result([100] * n + [0] * (12 - n), name) for name, n in better.items()]
    alone = percent_result([0], "alone")
    missing = TaskResult.not_run("ruler", "missing", 4096, "why")
    found = compare([alone, *a, missing], [alone, *b, missing])
    # What was not tested is no hypothesis.
    assert math.isnan(found[0].p_adjusted)
    assert math.isnan(found[-1].p_adjusted)
    tested = found[1:-1]
    assert [each.p_adjusted for each in tested] == pytest.approx(holm([each.p_value for each in tested]))
    assert [each.real for each in tested] == [each.p_adjusted < 0.05 for each in tested]
    # 2 of 2^6 and of 2^5 swaps: 0.031 and 0.063. Alone the first would be real.
    assert tested[0].p_value < 0.05 < tested[0].p_adjusted
    assert tested[1].real


def test_chance_is_called_real_as_rarely_as_it_should_be() -> None:
    """Two models that answer at random: of 100 comparisons of one task about 5 % at most are called real."""
    rng = np.random.default_rng(11)
    called = 0
    for number in range(100):
        a, b = (percent_result([float(v) for v in 100 * rng.integers(0, 2, 12)]) for _ in range(2))
        called += one(a, b, number).real
    # Four standard errors of a share of 5 % among 100.
    assert called / 100 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 100)


def test_samples_digest_of_equal_numbers_stands_for_equal_samples() -> None:
    """What the cases of this file rest on."""
    assert percent_result([1, 2]).details[SAMPLES] == digest(["niah", 4096, 2])


def test_what_was_measured_otherwise_is_not_compared() -> None:
    details = {SAMPLES: "the same", "stride": 64}
    samples = ({"index": 0, "nats": 3.0, "tokens": 2}, {"index": 1, "nats": 4.0, "tokens": 2})
    a = TaskResult(
        "perplexity", "sliding", 512, 2, 5.0, (4.0, 6.0), details=details, unit="perplexity", samples=samples
    )
    (found,) = compare([a], [replace(a, details={**details, "stride": 256})])
    assert found.reason == "the settings differ: stride is 64 in A and 256 in B"
    own = replace(a, details={**details, "evaluator": "the model itself"})
    (found,) = compare([own], [own])
    assert "run both with the same --evaluator" in (found.reason or "")


def test_questions_about_one_text_are_one_pair() -> None:
    scores = [[0.0, 0.0, 100.0], [100.0, 0.0, 100.0]]

    def repeated(values: Sequence[float], times: int) -> TaskResult:
        samples = [
            {"index": text * times + n, "score": value, "context": text}
            for text, value in enumerate(values)
            for n in range(times)
        ]
        return percent_result([value for value in values for _ in range(times)], samples=tuple(samples))

    one, four = (compare(*([repeated(each, times)] for each in scores))[0] for times in (1, 4))
    assert replace(one, n=0) == replace(four, n=0)
    assert one.difference == pytest.approx(100 / 3)
