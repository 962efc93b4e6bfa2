"""A suite says which tasks it knows and at which lengths, and runs them."""

from typing import Any, get_args

import pytest

from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.tasks.registry import METRICS, SUITES, chosen_tasks
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
