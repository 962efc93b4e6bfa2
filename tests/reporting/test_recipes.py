"""Recipes and their check as lines and a table; text of a recipe is shown harmlessly."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from ropewalk.dry_run.check import RecipeCheck, StageOutline
from ropewalk.recipes import RecipeHead
from ropewalk.reporting.recipes import describe_check, describe_recipes
from ropewalk.reporting.tables import ResultTable

FOUND = RecipeCheck(
    "a/model",
    "runs/a",
    (StageOutline(65_536, "theta 5,000,000", "anchor", 2000, 8, 1_048_576_000, 2e-5),),
    1_048_576_000,
    None,
    ("model a/model: not here",),
    True,
)


def printed(parts):
    console = Console(file=StringIO(), width=200)
    for part in parts:
        console.print(part.text() if isinstance(part, ResultTable) and hasattr(part, "text") else part)
    return console.file.getvalue()


def test_each_recipe_is_a_line_below_its_model():
    heads = {
        "a": RecipeHead("Later", "64K tokens", "A does this"),
        "b": RecipeHead("earlier", "32K tokens", "B does that"),
        "c": RecipeHead("Later", "1M tokens", "C does more"),
    }
    shown = printed(describe_recipes(heads))
    assert shown.startswith(
        "earlier\n  b, 32K tokens: B does that\n"
        "Later\n  a, 64K tokens: A does this\n  c, 1M tokens: C does more\n"
    )


def test_a_check_without_the_model_does_not_say_that_it_fits():
    shown = printed(describe_check(FOUND, "mine.yaml"))
    assert "missing: model a/model: not here" in shown
    assert "The recipe is valid. Run it: ropewalk extend mine.yaml" in shown
    assert "Run it" not in printed(describe_check(replace(FOUND, ready=False), "mine.yaml"))
    fits = printed(describe_check(replace(FOUND, resolved=("engine sdpa",), missing=()), "mine.yaml"))
    assert "engine sdpa" in fits
    assert "The recipe is valid and fits the model." in fits


def test_control_characters_in_names_are_shown_and_not_sent():
    assert "\x1b" not in printed(describe_check(replace(FOUND, model="a\x1b[31mb"), "mine\x1b[2J.yaml"))
