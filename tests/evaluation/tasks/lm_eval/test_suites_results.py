import math
from dataclasses import replace

import numpy as np
import pytest

from ropewalk.evaluation.statistics import (
    mean_score_interval,
    ratio_interval,
    score_interval,
    wilson_interval,
)
from ropewalk.evaluation.tasks.lm_eval.suites import scored, task_result

pytest.importorskip("lm_eval")

from ropewalk.evaluation.tasks.lm_eval.harness import Outcome, TaskOutcome


def outcome(values, aggregation="mean", value=None, name="t"):
    return TaskOutcome(
        name=name,
        metric="acc",
        value=float(np.mean(values)) if value is None else value,
        metrics={"acc": 0.5, "other": math.nan},
        aggregation=aggregation,
        values=tuple(values),
        indices=tuple(range(len(values))),
        answers=(),
        truncated=0,
        num_fewshot=0,
        version="1.0",
        higher_is_better=True,
        prompt_digests=tuple(map(str, range(len(values)))),
    )


def percent(ends):
    return tuple(100 * end for end in ends)


def test_right_or_wrong_has_wilsons_interval_and_anything_between_one_as_wide_as_its_spread():
    assert scored(outcome([1.0, 0, 0, 1])).ci95 == percent(wilson_interval(2, 4))
    shares = [0.5, 0.25, 1.0, 0.0]
    found = scored(outcome(shares))
    assert found.ci95 == percent(score_interval(shares))
    assert found.score == 43.75
    assert [sample["score"] for sample in found.samples] == [50, 25, 100, 0]


@pytest.mark.parametrize("numbers", [np.float64, np.float32, np.int64, bool, int])
def test_any_kind_of_number_counts(numbers):
    found = scored(outcome([numbers(1), numbers(0)]))
    assert found.score == 50
    assert {type(sample["score"]) for sample in found.samples} == {float}


def test_what_is_no_mean_has_a_score_and_no_interval_and_says_so():
    found = scored(outcome([(0, 1), (1, 1)], "f1_score", 0.4))
    assert found.score == 40
    assert all(math.isnan(end) for end in found.ci95)
    assert found.samples == ()
    assert found.remark == "no interval: acc is not a mean over documents of values from 0 to 1"
    assert scored(outcome([("a", "b")], "bleu", 31.5)).score == 31.5


def test_what_is_neither_share_nor_perplexity_is_not_run():
    result = task_result("lm_eval", "t", Outcome((outcome([2.0, 4.0]),)), {"dataset": "x"}, ["a remark"])
    assert result.status == "not run"
    assert math.isnan(result.score)
    assert result.reason == "a remark; its metric acc is 3, which is neither from 0 to 1 nor a perplexity"
    assert result.details["metrics"] == {"acc": 0.5, "other": None}
    assert result.details["dataset"] == "x"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_perplexity_that_is_no_number_is_not_run(value):
    values = [(-5.0, 2), (-math.inf, 1)]
    result = task_result("lm_eval", "t", Outcome((outcome(values, "weighted_perplexity", value),)), {}, [])
    assert result.status == "not run"
    assert result.reason == "the acc is not a finite number"


def test_a_perplexity_weights_its_words():
    values = [(-6.0, 2), (-1.0, 4), (-3.0, 3)]
    found = scored(outcome(values, "weighted_perplexity", math.exp(10 / 9)))
    low, high = ratio_interval([6, 1, 3], [2, 4, 3], at_least=0)
    assert found.ci95 == (math.exp(low), math.exp(high))
    total = sum(s["nats"] for s in found.samples) / sum(s["tokens"] for s in found.samples)
    assert math.exp(total) == pytest.approx(found.score)
    alone = scored(outcome([-2.0, -4.0], "perplexity", math.exp(3)))
    assert [sample["tokens"] for sample in alone.samples] == [1, 1]


def test_a_group_counts_documents_or_tasks_alike():
    tasks = (outcome([1.0, 0, 0, 0], name="a"), outcome([1.0, 1], name="b"))
    by_size = task_result("short", "g", Outcome(tasks, 0.5, True), {}, [])
    assert by_size.ci95 == percent(wilson_interval(3, 6))
    assert np.mean([s["score"] for s in by_size.samples]) == by_size.score == 50
    assert [(s["index"], s["task"], s["document"]) for s in by_size.samples][3:5] == [
        (3, "a", 3),
        (4, "b", 0),
    ]
    by_task = task_result("short", "g", Outcome(tasks, 0.625, False), {}, [])
    assert by_task.ci95 == percent(mean_score_interval([task.values for task in tasks]))
    assert by_task.samples == ()
    assert by_task.details["tasks"] == ["a", "b"]
    same = (tasks[0], replace(tasks[1], values=(1.0, 1.0, 0.0, 1.0), indices=(0, 1, 2, 3)))
    equal = task_result("short", "g", Outcome(same, 0.5, False), {}, [])
    assert np.mean([s["score"] for s in equal.samples]) == equal.score
    assert "tasks" not in equal.details


def test_answers_go_into_the_samples():
    answers = ("yes", 'a "quoted" \ud800 line\n')
    found = scored(replace(outcome([1.0, 0.0]), answers=answers))
    assert tuple(sample["prediction"] for sample in found.samples) == answers
