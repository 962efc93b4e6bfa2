"""A suite says which tasks it knows and at which lengths, and runs them."""

from typing import Any, get_args

import pytest

from ropewalk.evaluation.aggregate import effective_lengths
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.statistics import score_interval
from ropewalk.evaluation.tasks.registry import METRICS, SUITES, chosen_tasks
from ropewalk.evaluation.tasks.ruler.tasks import EMBEDDED, PUBLISHED
from ropewalk.evaluation.tasks.suite import (
    TEACHER_FORCED,
    Figure,
    GeneratedSuite,
    HarnessSuite,
    LikelihoodSuite,
    Suite,
)

NAMES = {"lm_eval": {"harness_names": ("mine",)}}
"""What a suite needs to be asked for."""


def asked(suite: Suite, **more: Any) -> Settings:
    return Settings(suites=(suite.name,), **{**NAMES.get(suite.name, {}), **more})


def suites() -> list[Any]:
    return [pytest.param(suite, id=suite.name) for suite in SUITES]


def test_a_suite_without_tasks_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract method"):
        Suite(name="none")  # type: ignore[abstract]


@pytest.mark.parametrize("suite", suites())
def test_a_suite_runs_what_it_knows(suite: Suite) -> None:
    settings = asked(suite)
    known = suite.known(settings)
    assert len(known) == len(set(known)) > 0
    assert chosen_tasks(settings)[suite.name] == list(suite.default or known)
    assert set(suite.default) <= set(known)
    assert suite.sharded in (None, TEACHER_FORCED, *known)
    assert suite.figure in (None, *get_args(Figure))
    # A teacher-forced task has the samples of the first one.
    if isinstance(suite, GeneratedSuite):
        assert next(iter(suite.tasks(settings).values())).suite == suite.name
        assert set(suite.metrics) <= set(METRICS)
    else:
        assert isinstance(suite, LikelihoodSuite | HarnessSuite)


def perfect(suite: GeneratedSuite, settings: Settings) -> list[TaskResult]:
    """Results of a model without mistakes, at one length."""
    found = []
    for task in chosen_tasks(settings)[suite.name]:
        # The prompts of a grid are counted at each depth.
        depths = settings.needle.depths if suite.name == "needle" else 1
        n = suite.samples_of(settings) * depths
        low, high = score_interval([1.0] * n)
        samples = tuple({"index": i, "score": 100.0} for i in range(n))
        found.append(TaskResult(suite.name, task, 128, n, 100.0, (100 * low, 100 * high), samples=samples))
    return found if suite.mean is None else [*found, *suite.mean(found, ())]


@pytest.mark.parametrize(
    ("name", "more", "each"),
    [
        ("passkey", {}, 50),
        ("longeval", {}, 50),
        ("needle", {}, 20),
        ("needle", {"depths": 2}, 20),
        ("needle", {"depths": 1}, 50),
        ("ruler", {}, 20),
        ("ruler", {"tasks": ("vt", "cwe")}, 20),
        ("ruler", {"tasks": ("vt",)}, 50),
        ("ruler", {"exclude": tuple(name for name in PUBLISHED if name != "fwe")}, 50),
        # Variants over other prose have no part in the overall score.
        ("ruler", {"tasks": ("vt", *EMBEDDED)}, 50),
        ("ruler", {"tasks": EMBEDDED}, 50),
        ("passkey", {"samples": 7}, 7),
    ],
)
def test_by_default_a_perfect_score_confirms_its_length(name: str, more: dict[str, Any], each: int) -> None:
    (suite,) = [suite for suite in SUITES if suite.name == name]
    settings = asked(suite, **more)
    assert isinstance(suite, GeneratedSuite)
    assert suite.samples_of(settings) == settings.sample_counts() == each
    found = effective_lengths(perfect(suite, settings), settings.threshold)
    assert found
    # 23 is what the help of --threshold says.
    assert {result.certain for result in found} == {128 if each >= 20 else None}
    alone = [score_interval([1.0] * n)[0] > settings.threshold / 100 for n in (22, 23)]
    assert alone == [False, True]


def test_suites_differ_in_samples_only_by_default() -> None:
    several = ("ruler", "passkey", "perplexity")
    assert Settings(suites=several).sample_counts() == {"ruler": 20, "passkey": 50}
    assert Settings(suites=several, samples=30).identity()["samples"] == 30
    assert Settings(suites=("perplexity",)).sample_counts() is None
    # What is given is the same evaluation as the default that it equals.
    assert Settings(suites=("passkey",)).identity() == Settings(suites=("passkey",), samples=50).identity()
