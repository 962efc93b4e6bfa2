"""Scores of many samples, tasks, lengths and checkpoints: means by hand, and nothing that is missing counted."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import (
    effective_length,
    effective_lengths,
    further_results,
    mean_over_checkpoints,
    task_result,
)
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import SAMPLES, PositionBin, TaskResult
from ropewalk.evaluation.statistics import (
    mean_score_interval,
    ratio_interval,
    score_interval,
    wilson_interval,
)
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.ruler.tasks import OVERALL, overall_results, weighted_averages
from ropewalk.io.digests import digest
from tests.evaluation.core_cases import (
    answered,
    asked_sample,
    byte_tokenizer,
    percent_result,
    perplexity_result,
    through_json,
)

ENCODER = PromptEncoder(byte_tokenizer())
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


def score_at(length: int | None, score: float, low: float = 0.0, **extra: Any) -> TaskResult:
    fields = {"suite": "ruler", "task": OVERALL, **extra}
    return TaskResult(**{**fields, "length": length, "n": 10, "score": score, "ci95": (low, 100.0)})


def ladder(scores: Sequence[float]) -> list[TaskResult]:
    return [score_at(length, score, score - 5) for length, score in zip(LENGTHS, scores, strict=False)]


def test_result_of_a_task_counts_its_predictions() -> None:
    samples = [asked_sample(ENCODER, index) for index in range(9, 13)]
    said = [" 9", "", " 11.", "\n \t"]
    predictions = [answered(sample, text) for sample, text in zip(samples, said, strict=True)]
    predictions[2] = replace(predictions[2], finished=False)
    predictions[3] = replace(predictions[3], finished=None)
    result = task_result(predictions, {"depths": 3, "fill": "x"})
    assert (result.suite, result.task, result.length, result.n) == ("ruler", "niah", 64, 4)
    assert (result.score, result.unit, result.status, result.reason) == (50, "percent", "ok", None)
    low, high = wilson_interval(2, 4)
    assert result.ci95 == (100 * low, 100 * high)
    # BOS, 31 or 32 letters, 6 of the prefix; and room for 8.
    tokens = [sample.prompt_tokens for sample in samples]
    assert result.details["prompt_tokens"] == [min(tokens), max(tokens)] == [tokens[0], tokens[0] + 1]
    assert result.details["least_fill"] == (min(tokens) + 8) / 64
    assert result.details["bos_count"] == [1]
    assert (result.details["cut_off"], result.details["empty"]) == (1, 2)
    assert (result.details["depths"], result.details["fill"]) == (3, "x")
    assert result.samples == tuple(
        {"index": index, "score": score} for index, score in zip(range(9, 13), (100, 0, 100, 0), strict=True)
    )
    assert TaskResult.from_json(through_json(result.to_json())) == result


def test_digest_of_samples_is_of_what_was_asked_and_not_of_what_was_said() -> None:
    samples = [asked_sample(ENCODER, index) for index in range(3)]
    right = task_result([answered(each, f"{each.index}") for each in samples], {})
    wrong = task_result([answered(each, "") for each in samples], {})
    assert right.details[SAMPLES] == wrong.details[SAMPLES]
    others = [[*samples[:2], asked_sample(ENCODER, 2, "another text")], samples[:2]]
    for other in others:
        assert (
            task_result([answered(each, "") for each in other], {}).details[SAMPLES] != right.details[SAMPLES]
        )


def test_an_overall_score_says_how_many_prompts_were_rejected() -> None:
    sample = asked_sample(ENCODER)
    some = task_result([answered(sample, "0")], {}, {3: "too long", 7: "too long"})
    (overall,) = overall_results([some, percent_result([100], "vt", length=some.length)], {})
    assert overall.reason == "without 2 prompts that the server rejected"


def test_result_of_no_predictions_is_refused() -> None:
    with pytest.raises(RopewalkError, match="at least one prediction, got none"):
        task_result([], {})


@given(st.lists(st.sampled_from([0, 1 / 3, 2 / 3, 0.1, 0.7, 1]), min_size=1, max_size=30))
def test_shares_of_references_are_averaged(shares: list[float]) -> None:
    sample = asked_sample(ENCODER)
    predictions = [replace(answered(sample, ""), index=i, score=share) for i, share in enumerate(shares)]
    result = task_result(predictions, {})
    assert result.score == pytest.approx(100 * sum(shares) / len(shares))
    assert 0 <= result.ci95[0] <= result.score <= result.ci95[1] <= 100
    assert [each["score"] for each in result.samples] == [100 * share for share in shares]


def test_overall_is_the_unweighted_mean_of_the_tasks_of_each_length() -> None:
    results = [
        percent_result([100, 0], "vt", 8192),
        percent_result([100] * 9 + [0], "niah", 8192),
        percent_result([100] * 4, "vt", 4096),
        percent_result([0] * 4, "niah", 4096),
        percent_result([50], "hellaswag", None),
    ]
    short, long = overall_results(results, {})
    assert (short.length, short.score, short.n) == (4096, 50, 8)
    assert (long.length, long.score, long.n) == (8192, 70, 12)
    assert (long.suite, long.task, long.unit, long.status) == ("ruler", "overall", "percent", "ok")
    assert long.reason is None
    assert long.details == {"tasks": ["vt", "niah"], "left_out": {}}
    low, high = mean_score_interval([[1, 0], [1] * 9 + [0]])
    assert long.ci95 == pytest.approx((100 * low, 100 * high))


def test_overall_names_what_was_not_run_and_counts_it_nowhere() -> None:
    results = [
        percent_result([100, 0], "vt"),
        TaskResult.not_run("ruler", "qa_1", 4096, "no SQuAD"),
        percent_result([0, 0], "niah"),
    ]
    (overall,) = overall_results(results, {"cwe": "left out by --exclude"})
    assert (overall.score, overall.n, overall.status) == (25, 4, "ok")
    assert overall.details["tasks"] == ["vt", "niah"]
    assert overall.details["left_out"] == {"qa_1": "no SQuAD", "cwe": "left out by --exclude"}
    assert overall.reason == "mean of 2 tasks without qa_1, cwe"


def test_one_task_or_none_has_no_overall() -> None:
    missing = TaskResult.not_run("ruler", "qa_1", 4096, "no SQuAD")
    assert overall_results([percent_result([100], "vt"), missing], {}) == []
    assert overall_results([missing], {}) == []
    assert overall_results([], {"vt": "why"}) == []


def test_weighted_averages_are_those_of_ruler_s_table() -> None:
    """Llama 3.1 70B: 96.5 95.8 95.4 94.8 88.4 66.6 give 85.5 increasing and 93.7 decreasing (RULER's README)."""
    found = weighted_averages(ladder([96.5, 95.8, 95.4, 94.8, 88.4, 66.6])[::-1])
    assert found is not None
    assert round(found["increasing"], 1) == 85.5
    assert round(found["decreasing"], 1) == 93.7


def test_one_length_is_no_average_over_lengths() -> None:
    assert weighted_averages(ladder([90.0])) is None
    assert weighted_averages([]) is None
    assert weighted_averages(ladder([30.0, 60.0])) == {"increasing": 50, "decreasing": 40}


@pytest.mark.parametrize(
    ("scores", "length", "certain"),
    [
        ([96.5, 95.8, 95.4, 94.8, 88.4, 66.6], 65536, 32768),
        ([90, 80, 90, 90], 4096, None),
        ([80, 99, 99], None, None),
        ([99, 99], 8192, 8192),
        ([85.6, 99], None, None),
        ([85.6000001, 85.6], 4096, None),
        ([90.6], 4096, None),
        ([90.6000001], 4096, 4096),
        ([0, 0], None, None),
    ],
)
def test_effective_length_is_the_longest_before_the_first_that_falls(
    scores: list[float], length: int | None, certain: int | None
) -> None:
    found = effective_length(ladder(scores)[::-1])
    assert found is not None
    assert (found.length, found.certain) == (length, certain)
    assert (found.threshold, found.longest) == (85.6, LENGTHS[len(scores) - 1])
    assert (found.suite, found.task) == ("ruler", OVERALL)
    assert through_json(found.to_json())["length"] == length


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0, 100), st.floats(0, 100))
def test_effective_length_never_grows_with_the_threshold(scores: list[float], a: float, b: float) -> None:
    low, high = (effective_length(ladder(scores), threshold) for threshold in sorted((a, b)))
    assert low is not None
    assert high is not None
    assert (low.length or 0) >= (high.length or 0)
    assert (low.certain or 0) <= (low.length or 0)
    # By hand: how many scores in a row lie above it.
    above = 0
    while above < len(scores) and scores[above] > max(a, b):
        above += 1
    assert high.length == (LENGTHS[above - 1] if above else None)


def test_lengths_that_were_not_run_are_passed_over() -> None:
    missing = TaskResult.not_run("ruler", OVERALL, 8192, "no memory")
    longer = TaskResult.not_run("ruler", OVERALL, 131072, "no memory")
    found = effective_length([score_at(4096, 90.0), missing, score_at(16384, 90.0), longer])
    assert found is not None
    assert (found.length, found.certain, found.longest) == (16384, None, 16384)
    assert effective_length([missing, longer]) is None
    assert effective_length([]) is None
    assert effective_length([score_at(None, 90.0)]) is None


@pytest.mark.parametrize(
    ("scores", "length", "threshold"),
    [
        # 80 % of 60 answers up to 1,024 tokens are right, so 68 % are enough.
        ({256: 100, 512: 60, 1024: 80, 4096: 70, 8192: 68, 16384: 67, 32768: 100}, 256, 68),
        ({256: 90, 512: 80, 1024: 70, 4096: 70, 8192: 68, 16384: 67, 32768: 100}, 8192, 68),
        ({1024: 80, 2048: 67}, 1024, 68),
        ({512: 0, 1024: 0, 2048: 0}, None, 0),
        ({512: 40, 1024: 40, 2048: 100}, 2048, 34),
    ],
)
def test_effective_length_relative_to_the_base_score(
    scores: dict[int, float], length: int | None, threshold: float
) -> None:
    def result(tokens: int, score: float) -> TaskResult:
        samples = [{"index": i, "score": 100.0 * (i < score)} for i in range(100)]
        low, high = wilson_interval(score, 100)
        return TaskResult(
            "nolima", "nolima", tokens, 100, score, (100 * low, 100 * high), samples=tuple(samples)
        )

    results = [result(tokens, score) for tokens, score in scores.items()]
    (found,) = effective_lengths(results)
    assert (found.length, found.threshold) == (length, pytest.approx(threshold))
    short = [score for tokens, score in scores.items() if tokens <= 1024]
    low, high = wilson_interval(sum(short), 100 * len(short))
    assert found.base == pytest.approx((threshold / 0.85, 100 * low, 100 * high))
    assert (found.certain or 0) <= (found.length or 0)
    assert found.to_json()["base"] == found.base
    # Without short lengths there is no base score, and other suites have none.
    assert effective_lengths([each for each in results if (each.length or 0) > 1024]) == []
    (other,) = effective_lengths([replace(each, suite="passkey") for each in results])
    assert (other.threshold, other.base) == (85.6, None)
    assert "base" not in other.to_json()


def test_score_whose_interval_is_missing_is_never_certain() -> None:
    found = effective_length([score_at(4096, 99.0, math.nan)])
    assert found is not None
    assert (found.length, found.certain) == (4096, None)


@pytest.mark.parametrize("threshold", [-1.0, 100.5, math.nan, math.inf])
def test_threshold_that_is_no_percentage_is_refused(threshold: float) -> None:
    with pytest.raises(RopewalkError, match="percentage from 0 to 100, got"):
        effective_length(ladder([90.0]), threshold)


def test_extreme_thresholds_will_do_and_are_strict() -> None:
    zero, full = (effective_length(ladder([100.0, 0.0]), threshold) for threshold in (0, 100))
    assert zero is not None
    assert full is not None
    assert (zero.length, full.length) == (4096, None)


def test_effective_length_of_several_tasks_at_once_is_refused() -> None:
    with pytest.raises(RopewalkError, match="of a single task, got several"):
        effective_length([score_at(4096, 90.0, task="vt"), score_at(8192, 90.0, task="niah")])


def test_effective_lengths_are_by_each_task_and_by_ruler_s_overall() -> None:
    results = [
        score_at(4096, 90.0, task="vt"),
        *ladder([90.0, 80.0]),
        score_at(4096, 99.0, suite="passkey", task="passkey"),
        TaskResult.not_run("longeval", "lines", 4096, "why"),
        score_at(None, 99.0, suite="short", task="mmlu"),
        perplexity_result([1.0], [1], math.e),
        score_at(4096, 99.0, suite="needle", task="generated"),
    ]
    found = effective_lengths(results)
    assert [(each.suite, each.task, each.length) for each in found] == [
        ("ruler", "overall", 4096),
        ("passkey", "passkey", 4096),
        ("needle", "generated", 4096),
    ]
    assert [each.length for each in effective_lengths(results, 95)] == [None, 4096, 4096]


def test_mean_over_checkpoints_averages_each_sample_first() -> None:
    scores = {"a": [100, 0, 100, 0], "b": [100, 100, 100, 0], "c": [100, 50, 100, 0]}
    (mean,) = mean_over_checkpoints({name: [percent_result(each)] for name, each in scores.items()})
    assert mean.score == pytest.approx((50 + 75 + 62.5) / 3)
    assert [each["score"] for each in mean.samples] == pytest.approx([100, 50, 100, 0])
    assert [each["index"] for each in mean.samples] == [0, 1, 2, 3]
    low, high = score_interval([1, 0.5, 1, 0])
    assert mean.ci95 == pytest.approx((100 * low, 100 * high))
    # 50, 62.5 and 75: deviations 12.5, 0 and 12.5, over two degrees of freedom.
    assert mean.details["spread"] == pytest.approx({"sd": 12.5, "min": 50, "max": 75})
    assert mean.details["checkpoints"] == [
        {"name": "a", "score": 50},
        {"name": "b", "score": 75},
        {"name": "c", "score": 62.5},
    ]
    assert mean.details[SAMPLES] == percent_result(scores["a"]).details[SAMPLES]
    assert (mean.n, mean.length, mean.status) == (4, 4096, "ok")
    assert TaskResult.from_json(through_json(mean.to_json())) == mean


def test_one_checkpoint_is_its_own_mean_and_has_no_spread() -> None:
    result = task_result([answered(asked_sample(ENCODER, i), "1") for i in range(5)], {"depths": 3})
    (mean,) = mean_over_checkpoints({"only": [result]})
    assert mean.score == result.score
    assert mean.ci95 == pytest.approx(result.ci95)
    assert mean.samples == result.samples
    assert mean.details["spread"] == {"sd": None, "min": 20, "max": 20}
    assert mean.details["depths"] == 3


def test_scores_by_depth_are_averaged_with_the_interval_of_the_mean() -> None:
    depths = {"a": (100, 0), "b": (50, 0)}
    results = {
        name: [
            percent_result([100, 0], details={"depths": [{"depth": d, "n": 10, "score": s} for d, s in each]})
        ]
        for name, each in (
            (name, list(zip((0.0, 1.0), scores, strict=True))) for name, scores in depths.items()
        )
    }
    (mean,) = mean_over_checkpoints(results)
    low, high = wilson_interval(7.5, 10)
    assert [(each["depth"], each["n"], each["score"]) for each in mean.details["depths"]] == [
        (0.0, 10, 75),
        (1.0, 10, 0),
    ]
    assert mean.details["depths"][0]["ci95"] == pytest.approx([100 * low, 100 * high])


def test_facts_that_differ_between_checkpoints_are_left_out() -> None:
    a, b = (
        percent_result([100, 0], details={SAMPLES: "x", "least_fill": 0.97, "cut_off": cut}) for cut in (0, 1)
    )
    (mean,) = mean_over_checkpoints({"a": [a], "b": [b]})
    assert mean.details["least_fill"] == 0.97
    assert "cut_off" not in mean.details


def test_results_keep_the_first_checkpoint_s_order() -> None:
    a = [percent_result([100], "vt"), percent_result([0], "niah"), percent_result([0], "niah", 8192)]
    b = [percent_result([0], "niah", 8192), percent_result([100], "niah"), percent_result([0], "vt")]
    found = mean_over_checkpoints({"a": a, "b": b})
    assert [(each.task, each.length, each.score) for each in found] == [
        ("vt", 4096, 50),
        ("niah", 4096, 50),
        ("niah", 8192, 0),
    ]


def test_task_that_one_checkpoint_did_not_run_has_no_mean() -> None:
    ran = percent_result([100, 0])
    missing = TaskResult.not_run("ruler", "niah", 4096, "the memory is full")
    (mean,) = mean_over_checkpoints({"step 10": [ran], "step 20": [missing]})
    assert (mean.status, mean.reason) == ("not run", "checkpoint step 20: the memory is full")
    assert math.isnan(mean.score)
    (none,) = mean_over_checkpoints({"step 10": [missing], "step 20": [missing]})
    assert none.reason == "the memory is full"
    unread = TaskResult.not_run("perplexity", "perplexity", 64, "no text", "perplexity")
    (none,) = mean_over_checkpoints({"a": [unread]})
    assert none.unit == "perplexity"


def test_checkpoints_with_other_tasks_or_without_any_are_refused() -> None:
    with pytest.raises(RopewalkError, match="at least one checkpoint, got none"):
        mean_over_checkpoints({})
    a, b = percent_result([100]), percent_result([100], length=8192)
    for others in ([b], [], [a, b]):
        with pytest.raises(RopewalkError, match="checkpoints one and two have results of different tasks"):
            mean_over_checkpoints({"one": [a], "two": others})


def test_checkpoints_that_answered_other_samples_are_refused() -> None:
    """Sample 3 of the one is another question than sample 3 of the other."""
    a, b = (percent_result([100, 0, 50], details={SAMPLES: digest(name)}) for name in ("a", "b"))
    with pytest.raises(RopewalkError, match="niah"):
        mean_over_checkpoints({"a": [a], "b": [b]})


def test_mean_perplexity_has_each_row_s_mean_loss_and_its_interval_s_ratio() -> None:
    tokens = [10, 20, 30, 40]
    nats = {"a": [20.0, 44.0, 60.0, 90.0], "b": [22.0, 40.0, 70.0, 80.0]}
    scores = {name: math.exp(sum(each) / 100) for name, each in nats.items()}
    results = {name: [perplexity_result(nats[name], tokens, scores[name])] for name in nats}
    (mean,) = mean_over_checkpoints(results)
    assert mean.score == pytest.approx((scores["a"] + scores["b"]) / 2)
    assert [each["nats"] for each in mean.samples] == [21, 42, 65, 85]
    assert [each["tokens"] for each in mean.samples] == tokens
    low, high = ratio_interval([21, 42, 65, 85], tokens, at_least=0)
    # The perplexity of the mean loss is exp(2.13); the interval keeps its ratio to that.
    assert mean.ci95 == pytest.approx((mean.score * math.exp(low - 2.13), mean.score * math.exp(high - 2.13)))
    assert mean.details["spread"]["sd"] == pytest.approx(abs(scores["a"] - scores["b"]) / math.sqrt(2))
    assert mean.unit == "perplexity"
    assert TaskResult.from_json(through_json(mean.to_json())) == mean


def test_one_checkpoint_s_perplexity_keeps_its_interval() -> None:
    tokens, nats = [10, 20, 30], [20.0, 44.0, 60.0]
    score = math.exp(sum(nats) / sum(tokens))
    ends = tuple(math.exp(end) for end in ratio_interval(nats, tokens, at_least=0))
    (mean,) = mean_over_checkpoints({"a": [perplexity_result(nats, tokens, score, ci95=ends)]})  # type: ignore[misc]
    assert mean.ci95 == pytest.approx(ends)


def test_perplexity_that_is_infinite_in_one_checkpoint_can_be_written() -> None:
    good = perplexity_result([20.0, 44.0], [10, 20], math.exp(64 / 30))
    bad = perplexity_result([20.0, None], [10, 20], math.inf, ci95=(math.nan, math.nan))
    (mean,) = mean_over_checkpoints({"a": [good], "b": [bad]})
    through_json(mean.to_json())
    assert not math.isfinite(mean.score)


def test_position_bins_are_averaged_one_by_one() -> None:
    a = (PositionBin(0, 8, 16, 2, 4.0, (3.0, 5.0)), PositionBin(8, 16, 16, 2, 2.0, (1.0, 3.0)))
    b = (PositionBin(0, 8, 16, 2, 6.0, (5.0, 9.0)), PositionBin(8, 16, 16, 2, 4.0, (3.0, 6.0)))
    results = {
        name: [perplexity_result([5.0, 6.0], [8, 8], 3.0, positions=bins)]
        for name, bins in (("a", a), ("b", b))
    }
    (mean,) = mean_over_checkpoints(results)
    assert mean.positions == (
        PositionBin(0, 8, 16, 2, 5.0, (4.0, 7.0)),
        PositionBin(8, 16, 16, 2, 3.0, (2.0, 4.5)),
    )


def test_checkpoints_with_other_position_bins_are_refused() -> None:
    """As when their configs state other trained lengths."""
    bins = (PositionBin(0, 8, 16, 2, 4.0, (3.0, 5.0)), PositionBin(8, 16, 16, 2, 2.0, (1.0, 3.0)))
    a = perplexity_result([5.0, 6.0], [8, 8], 3.0, positions=bins)
    for other in (bins[:1], (replace(bins[0], end=4), replace(bins[1], start=4))):
        with pytest.raises(RopewalkError):
            mean_over_checkpoints({"a": [a], "b": [replace(a, positions=other)]})


def overall_of(results: Sequence[TaskResult]) -> list[TaskResult]:
    return [*results, *overall_results(results, {})]


def test_overall_of_checkpoints_is_the_mean_of_their_overalls() -> None:
    a = overall_of([percent_result([100, 100], "vt"), percent_result([100, 0], "niah")])
    b = overall_of([percent_result([100, 0], "vt"), percent_result([0, 0], "niah")])
    found = mean_over_checkpoints({"a": a, "b": b})
    assert [(each.task, each.score) for each in found] == [("vt", 75), ("niah", 25), (OVERALL, 50)]
    assert found[-1].ci95 == pytest.approx(tuple(np.mean([a[-1].ci95, b[-1].ci95], axis=0)))
    assert found[-1].details["tasks"] == ["vt", "niah"]
    assert found[-1].samples == ()


def test_overalls_of_other_tasks_have_no_mean() -> None:
    """Where one checkpoint did not run a task, its overall is a mean over other tasks than the others' are."""
    ran = [percent_result([100], "vt"), percent_result([100], "niah"), percent_result([0], "cwe")]
    a = overall_of(ran)
    b = overall_of([*ran[:2], TaskResult.not_run("ruler", "cwe", 4096, "the memory is full")])
    *_, overall = mean_over_checkpoints({"a": a, "b": b})
    # Left out with a reason, or over the tasks that both ran; 83.3 is the mean of nothing.
    assert overall.status == "not run" or overall.score == 100


def test_tasks_over_another_haystack_have_no_part_in_the_overall_score() -> None:
    published = [percent_result([0, 100], "niah_single_1"), percent_result([0, 100], "vt")]
    (overall,) = overall_results([*published, percent_result([100, 100], "niah_single_2_embedded")], {})
    assert overall.score == 50
    assert overall.details["tasks"] == ["niah_single_1", "vt"]


def test_questions_about_one_text_are_not_independent() -> None:
    samples = [asked_sample(ENCODER, index, details={"context": index // 4}) for index in range(40)]
    right = [answered(each, str(each.index) if each.index // 4 % 2 else "none") for each in samples]
    result = task_result(right, {})
    assert result.score == 50
    assert result.ci95 == pytest.approx([100 * end for end in wilson_interval(5, 10)])
    assert [each["context"] for each in result.samples] == [index // 4 for index in range(40)]


def test_further_metrics_score_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = replace(BY_NAME["ruler"], further={"first integer": ("last integer",)})
    monkeypatch.setitem(BY_NAME, "ruler", suite)
    samples = [asked_sample(ENCODER, index) for index in range(4)]
    answers = [answered(each, f"{each.index % 2} or {each.index}") for each in samples]
    (further,) = further_results(answers, {"seed": 3})
    assert (task_result(answers, {}).score, further.score) == (50, 100)
    assert (further.task, further.details["answers_of"], further.details["seed"]) == (
        "niah.last integer",
        "niah",
        3,
    )


def test_scores_by_difficulty_are_those_of_its_samples() -> None:
    samples = [
        asked_sample(ENCODER, index, details={"difficulty": 1 + index % 2, "context": index // 4})
        for index in range(12)
    ]
    right = [
        answered(each, str(each.index) if each.index % 2 == 0 or each.index < 4 else "none")
        for each in samples
    ]
    easy, hard = task_result(right, {}).details["difficulties"]
    assert (easy["difficulty"], easy["n"], easy["score"]) == (1, 6, 100)
    assert (hard["difficulty"], hard["n"], hard["score"]) == (2, 6, pytest.approx(100 / 3))
    # Two questions of each level share a text.
    assert easy["ci95"] == pytest.approx([100 * end for end in wilson_interval(3, 3)])


def test_scores_by_fifths_of_the_text_need_enough_samples() -> None:
    samples = [asked_sample(ENCODER, index, details={"depth": index / 29}) for index in range(30)]
    right = [
        answered(each, str(each.index) if each.index < 6 or each.index > 23 else "none") for each in samples
    ]
    fifths = task_result(right, {}).details["fifths"]
    assert [each["depth"] for each in fifths] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert [each["n"] for each in fifths] == [6] * 5
    assert [each["score"] for each in fifths] == [100, 0, 0, 0, 100]
    assert "fifths" not in task_result(right[:24], {}).details
