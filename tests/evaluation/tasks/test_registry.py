"""Every benchmark is one value, and whatever asks for benchmarks finds all of it there."""

from typing import Any

import pytest

from ropewalk.cli.binding import settings_of
from ropewalk.cli.eval import evaluate as command
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.option_checks import check_together
from ropewalk.evaluation.settings import OWN, EvaluationSettings, Settings
from ropewalk.evaluation.tasks.registry import BY_NAME, METRICS, SUITES
from ropewalk.evaluation.tasks.suite import GeneratedSuite, Suite

NAMES = {"lm_eval": {"harness_names": ("mine",)}}
"""What a suite needs to be asked for."""


OTHERS = {
    "compat": "nvidia",
    "squad": "hub",
    "hotpotqa": "hub",
    "lines": (200,),
    "depths": 3,
    "haystack": "embedded",
    "stride": 64,
    "most_windows": 2,
    "short_context": 512,
    "evaluator": "other",
    "harness_limit": 3,
    "harness_names": ("mine",),
    "position_bins": 3,
}
"""A value of each setting that is not its default; paths have none here."""


def asked(suite: Suite, **more: Any) -> Settings:
    return Settings(suites=(suite.name,), **{**NAMES.get(suite.name, {}), **more})


def suites() -> list[Any]:
    return [pytest.param(suite, id=suite.name) for suite in SUITES]


def test_names_are_distinct_and_stand_in_the_order_of_tables() -> None:
    assert [*BY_NAME] == [suite.name for suite in SUITES]


@pytest.mark.parametrize("suite", suites())
def test_each_setting_of_a_suite_is_an_option(suite: Suite) -> None:
    options = {setting.path[-2:] for setting in settings_of(command)}
    for name, kind in suite.settings.items():
        assert OWN[name] is kind
        assert {(name, field) for field in kind.model_fields} <= options


def test_no_setting_is_left_out_of_these_tests() -> None:
    own = {field for kind in OWN.values() for field in kind.model_fields}
    assert own - set(OTHERS) == {"essays", "harness", "harness_tasks", "benchmark_data"}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_each_setting_changes_what_a_folder_is_known_by_where_it_is_read_and_is_refused_elsewhere(
    name: str,
) -> None:
    (own,) = [key for key, kind in OWN.items() if name in kind.model_fields]
    readers = [suite for suite in SUITES if own in suite.settings]
    for suite in readers:
        given = {**NAMES.get(suite.name, {}), name: OTHERS[name]}
        plain = asked(suite).identity()
        changed = Settings(suites=(suite.name,), **given).identity()
        if NAMES.get(suite.name, {}).get(name) != OTHERS[name]:
            assert {key for key in changed if changed[key] != plain[key]} == {name}
    other = next(suite for suite in SUITES if suite not in readers and suite.name != "lm_eval")
    config = EvaluationSettings(model="embedded", what=Settings(suites=(other.name,), **{name: OTHERS[name]}))
    readers_named = " or ".join(suite.name for suite in readers)
    with pytest.raises(
        RopewalkError, match=f"has no effect without the suite {readers_named}; add .* to --suite"
    ):
        check_together(config, 1)
    # The default says nothing, wherever it stands.
    default = OWN[own].model_fields[name].get_default()
    check_together(
        EvaluationSettings(model="embedded", what=Settings(suites=(other.name,), **{name: default})), 1
    )


def test_a_metric_has_one_meaning_in_all_suites() -> None:
    named = [pair for suite in SUITES if isinstance(suite, GeneratedSuite) for pair in suite.metrics.items()]
    assert len(named) >= len(METRICS)
    assert all(METRICS[name] is metric for name, metric in named)
