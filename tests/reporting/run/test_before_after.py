"""The sentence about a run says what its numbers say, worse scores among them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.reporting.run.before_after import conclusion, run_differences

N = 40


def result(right: int, task: str = "passkey", length: int = 1024, n: int = N) -> TaskResult:
    """The first ``right`` of ``n`` samples are correct."""
    samples = tuple({"index": i, "score": 100.0 * (i < right)} for i in range(n))
    score = 100 * right / n
    return TaskResult(
        "ruler", task, length, n, score, (score, score), details={SAMPLES: "same"}, samples=samples
    )


def perplexity(nats: float) -> TaskResult:
    samples = tuple({"index": i, "nats": 10 * nats + i / 10, "tokens": 10} for i in range(N))
    score = math.exp(nats)
    return TaskResult(
        "perplexity",
        "perplexity",
        1024,
        N,
        score,
        (score, score),
        details={SAMPLES: "same"},
        unit="perplexity",
        samples=samples,
    )


def said(before, after, trained=256, context=1024):
    summary = {
        "before": [each.to_json() for each in before],
        "after": [each.to_json() for each in after],
    }
    return conclusion(trained, context, run_differences(summary))


def test_what_rose_fell_and_got_worse_is_named_with_its_interval():
    before = [perplexity(3), result(4, "niah"), result(36, "vt", 256), result(20, "qa")]
    after = [perplexity(2), result(36, "niah"), result(8, "vt", 256), result(20, "qa")]
    sentence = said(before, after)
    assert sentence.startswith(
        "After the context was extended from 256 to 1,024 tokens, niah at 1,024 tokens rose from 10.0 % to 90.0 % "
        "(+80.0 points, 95 % interval +6"
    )
    assert "; perplexity at 1,024 tokens fell from 20.09 to 7.39 (-63.2 %, " in sentence
    assert "; vt at 256 tokens fell from 90.0 % to 20.0 % (-70.0 points, " in sentence
    assert sentence.endswith("; qa at 1,024 tokens did not change by more than chance.")
    assert sentence.count(".\n") == 0


def test_a_run_that_only_got_worse_does_not_sound_good():
    assert said([result(36), perplexity(2)], [result(4), perplexity(2)]).startswith(
        "After the context was extended from 256 to 1,024 tokens, passkey at 1,024 tokens fell from 90.0 % to 10.0 %"
    )


def test_the_longest_inputs_come_first():
    before = [result(4, "vt", length) for length in (256, 512, 1024)]
    after = [result(36, "vt", length) for length in (256, 512, 1024)]
    assert "tokens, vt at 1,024 tokens rose" in said(before, after)
    assert said(before, after).endswith("of 2 other scores, 2 improved by more than chance.")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            [],
            [],
            "Nothing was measured both before and after the context was extended from 256 to 1,024 tokens.",
        ),
        (
            [result(20)],
            [result(21)],
            "After the context was extended from 256 to 1,024 tokens, no score differs by more than chance "
            "(1 compared).",
        ),
        (
            [result(20)],
            [replace(result(20), details={SAMPLES: "others"})],
            "No score after the context was extended from 256 to 1,024 tokens can be compared with that before: the "
            "samples differ in prompts, text or tokenizer.",
        ),
    ],
)
def test_what_cannot_be_said_is_not_said(before, after, sentence):
    assert said(before, after) == sentence


def test_no_effect_is_seldom_announced():
    rng = np.random.default_rng(0)
    announced = 0
    for _ in range(100):
        draws = rng.random((2, 3, N)) < 0.5
        sides = [
            [
                replace(
                    result(0, f"task{t}"),
                    samples=tuple({"index": i, "score": 100.0 * x} for i, x in enumerate(task)),
                    score=100 * float(task.mean()),
                )
                for t, task in enumerate(side)
            ]
            for side in draws
        ]
        announced += "no score differs" not in said(*sides)
    assert announced <= 5 + 2 * math.sqrt(100 * 0.05 * 0.95)


@pytest.mark.parametrize(("n", "few"), [(5, True), (6, False)])
def test_a_score_of_too_few_samples_to_differ_by_more_than_chance_is_named(n, few):
    # All samples wrong before and right after: the largest difference there is.
    before, after = ([result(right, "niah", n=n)] for right in (0, n))
    (niah,) = run_differences(
        {name: [each[0].to_json()] for name, each in (("before", before), ("after", after))}
    )
    assert (niah.p_value < 0.05) is not few
    told = (
        " No difference in niah at 1,024 tokens could be more than chance, because fewer than 6 samples were measured "
        "(5)."
    )
    assert said(before, after).endswith(told) is few
