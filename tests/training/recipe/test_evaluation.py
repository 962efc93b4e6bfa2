"""The evaluation of a recipe: every suite can be named, and its settings are keys."""

from typing import Any

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.evaluation.settings import OWN, Settings
from ropewalk.evaluation.tasks.registry import BY_NAME, SUITES
from ropewalk.evaluation.tasks.suite import LikelihoodSuite
from ropewalk.io.settings import free_mark
from ropewalk.training.recipe.evaluation import Evaluation
from ropewalk.training.recipe.file import dump_recipe, parse_recipe

NAMES = {"lm_eval": {"lm_eval": {"harness_names": ["mine"]}}}
"""What a suite needs to be asked for."""
OTHERS: dict[str, Any] = {
    "ruler": {"compat": "nvidia"},
    "questions": {"hotpotqa": "hub"},
    "published": {"benchmark_data": {"ruler2": "."}},
    "prose": {"essays": "."},
    "longeval": {"lines": [200]},
    "needle": {"depths": 3},
    "perplexity": {"stride": 64},
    "longppl": {"short_context": 512},
    "harness_run": {"harness_limit": 3},
    "lm_eval": {"harness_names": ["mine"]},
}
"""A setting of each suite that is not its default."""


def recipe_with(**evaluation: Any) -> str:
    values = {
        "model": "some/model",
        "output": "runs/x",
        "data": {"sources": ["a.jsonl"]},
        "stages": [{"context": 8192, "steps": 10}],
        "evaluation": evaluation,
    }
    return yaml.safe_dump(values)


def evaluation_of(**evaluation: Any) -> Evaluation:
    return parse_recipe(recipe_with(**evaluation), "x").evaluation


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_suite_can_be_named(name: str) -> None:
    found = evaluation_of(suites=[name], **NAMES.get(name, {}))
    assert found.chosen == [BY_NAME[name]]
    assert found.reads_text == isinstance(BY_NAME[name], LikelihoodSuite)
    assert found.settings().suites == (name,)


def test_the_settings_of_every_suite_are_keys() -> None:
    assert set(OTHERS) == set(OWN)
    for name, kind in OWN.items():
        assert Evaluation.model_fields[name].annotation is kind
        assert {free_mark(kind, field) for field in kind.model_fields} == {None}


@pytest.mark.parametrize("name", list(OWN))
def test_a_setting_reaches_the_evaluation_and_is_refused_where_no_suite_reads_it(name: str) -> None:
    (setting,) = OTHERS[name]
    reader = next(suite.name for suite in SUITES if name in suite.settings)
    told = evaluation_of(suites=[reader], **{name: OTHERS[name]}).settings()
    assert told == Settings(suites=(reader,), samples=10, beyond_config=True, **{name: OTHERS[name]})
    with pytest.raises(RopewalkError, match=rf"{name}\.{setting} has no effect without the suite .*{reader}"):
        evaluation_of(suites=["passkey"], **{name: OTHERS[name]})


def test_a_recipe_is_written_with_the_settings_of_suites_that_are_not_their_defaults() -> None:
    recipe = parse_recipe(recipe_with(suites=["needle"], needle={"haystack": "embedded"}), "x")
    written = yaml.safe_load(dump_recipe(recipe))["evaluation"]
    assert written["needle"] == {"depths": 11, "haystack": "embedded"}
    assert written.keys() == {"suites", "rows", "samples", "lengths", "needle"}
    assert parse_recipe(dump_recipe(recipe), "y") == recipe


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        ({"suites": ["rulr"]}, r"unknown evaluation\.suites\.0 'rulr'; did you mean ruler\?"),
        ({"suites": ["lm_eval"]}, "the suite lm_eval needs the names of its tasks"),
        ({"tasks": ["slidng"]}, "unknown task 'slidng'; did you mean sliding"),
        ({"lengths": [64, 64]}, "give each length only once, got 64, 64"),
        ({"needle": {"depth": 3}}, r"unknown key evaluation\.needle\.depth; did you mean depths\?"),
        (
            {"suites": ["needle"], "prose": {"essays": "missing"}},
            r"evaluation\.prose\.essays: the file or folder 'missing' does not exist",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_sentence(
    evaluation: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RopewalkError, match=sentence) as caught:
        evaluation_of(**evaluation)
    assert "\n" not in str(caught.value)


def test_tasks_of_suites_that_are_not_run_are_left_out() -> None:
    found = evaluation_of(tasks=["passkey", "sliding"])
    assert found.settings().tasks == ("passkey", "sliding")
    assert found.settings(["perplexity"]).tasks == ("sliding",)


@pytest.mark.parametrize(
    ("evaluation", "whole"),
    [
        ({}, False),
        ({"suites": ["passkey"]}, False),
        ({"suites": []}, False),
        ({"tasks": ["sliding"]}, True),
        ({"suites": ["longppl"]}, True),
    ],
)
def test_documents_are_read_whole_by_all_tasks_but_perplexity_of_rows(
    evaluation: dict[str, Any], whole: bool
) -> None:
    assert evaluation_of(**evaluation).reads_documents is whole


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (
            {"during": {"samples": 2}},
            r"during\.samples has no effect without evaluation\.every; set evaluation\.every to a number",
        ),
        ({"every": 0}, r"evaluation\.every must be 1 or more, got 0"),
        ({"every": True}, r"evaluation\.every must be a whole number"),
        (
            {"every": 2, "suites": []},
            r"evaluation\.every is 2, but evaluation\.suites is empty; add a suite, or omit evaluation\.every",
        ),
        (
            {"every": 2, "during": {"suites": ["ruler"]}},
            r"during\.suites has ruler, but evaluation\.suites has only perplexity, passkey; add ruler",
        ),
        (
            {"every": 2, "rows": 3, "during": {"rows": 4}},
            r"during\.rows is 4, more than evaluation\.rows 3; raise evaluation\.rows as well",
        ),
        ({"every": 2, "during": {"suites": []}}, r"evaluation\.during\.suites must not be empty$"),
        (
            {"every": 2, "during": {"sample": 2}},
            r"unknown key evaluation\.during\.sample; did you mean samples\?",
        ),
    ],
)
def test_evaluation_during_training_that_makes_no_sense_is_refused(evaluation, message) -> None:
    with pytest.raises(RopewalkError, match=message):
        evaluation_of(**evaluation)


def test_the_evaluation_during_training_is_that_before_and_after_but_for_its_own_keys() -> None:
    said = {"suites": ["passkey", "ruler"], "tasks": ["passkey", "fwe"], "samples": 20, "every": 5}
    whole = evaluation_of(**said)
    assert whole.in_training().settings() == whole.settings()
    smaller = evaluation_of(
        **said, during={"suites": ["ruler"], "samples": 3, "lengths": [4096]}
    ).in_training()
    assert (smaller.suites, smaller.samples, smaller.lengths) == (["ruler"], 3, [4096])
    assert tuple(smaller.settings().tasks) == ("fwe",)
    assert "every" not in yaml.safe_load(dump_recipe(parse_recipe(recipe_with(), "x")))["evaluation"]
