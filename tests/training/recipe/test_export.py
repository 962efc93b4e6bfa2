"""The export of a recipe: a plain word or keys, and what cannot be exported is refused with what can."""

from typing import Any

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.training.recipe.export import Export
from ropewalk.training.recipe.file import dump_recipe, parse_recipe
from ropewalk.training.recipe.recipe import Recipe


def recipe_with(**keys: Any) -> Recipe:
    values = {
        "model": "some/model",
        "output": "runs/x",
        "data": {"sources": ["a.jsonl"]},
        "stages": [{"context": 8192, "steps": 100}],
        **keys,
    }
    return parse_recipe(yaml.safe_dump(values), "x")


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("last", "last"),
        ("average", "average"),
        ({"weights": "average"}, "average"),
        ({"weights": "average", "average_of": 3}, {"weights": "average", "average_of": 3, "by": None}),
    ],
)
def test_a_plain_word_is_enough(said: Any, written: Any) -> None:
    recipe = recipe_with(export=said)
    assert recipe.export == Export.model_validate(said)
    assert yaml.safe_load(dump_recipe(recipe))["export"] == written
    assert parse_recipe(dump_recipe(recipe), "x").export == recipe.export


BEST = {"weights": "best", "by": "passkey/1024"}
LONGROPE = {"context": 8192, "steps": 0, "rope": "longrope"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"export": "lsat"}, r"unknown export\.weights 'lsat'; did you mean last\?"),
        (
            {"export": 5},
            r"export must be 'last', 'best', 'average' or a mapping with the keys 'weights', 'average_of' and 'by'",
        ),
        ({"export": {"weight": "last"}}, r"unknown key export\.weight; did you mean weights\?"),
        (
            {"export": {"average_of": 3}},
            r"average_of is 3, which has no effect if 'weights' is 'last'; remove average_of",
        ),
        (
            {"export": {"weights": "average", "by": "passkey"}},
            r"the key 'by' \(passkey\) has no effect if 'weights' is 'average'",
        ),
        ({"export": {"weights": "average", "average_of": 1}}, r"export\.average_of must be 2 or more, got 1"),
        (
            {"export": "average", "checkpoints": {"keep": 3}},
            r"export averages 5 checkpoints, but checkpoints\.keep is 3; set checkpoints\.keep to 5",
        ),
        (
            {"export": "average", "checkpoints": {"every": 40}},
            r"export averages 5 checkpoints, but the last stage writes only 3 in its 100 steps",
        ),
        ({"export": "average", "adapter": {"rank": 4}}, r"export 'average' is not possible with an adapter"),
        ({"export": "average", "stages": [LONGROPE]}, r"export 'average' needs training in the last stage"),
        ({"export": BEST}, r"export 'best' needs evaluation during training; set evaluation\.every"),
        (
            {"export": "best", "evaluation": {"every": 10}},
            r"export 'best' needs export\.by, since evaluation during training measures perplexity, passkey; set",
        ),
        (
            {"export": BEST, "evaluation": {"every": 10, "during": {"suites": ["perplexity"]}}},
            r"export\.by is passkey/1024, but evaluation during training measures only perplexity; "
            r"set it to perplexity, or to one score such as perplexity/1024",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RopewalkError, match=message) as refusal:
        recipe_with(**keys)
    assert "\n" not in str(refusal.value)


def test_a_score_is_selected_by_whole_parts_of_its_name() -> None:
    names = ["passkey/1024", "passkey/10240", "ruler/vt/1024", "passkey"]
    picked = {
        by: [
            name for name in names if Export.model_validate({"weights": "best", "by": by}).selects(name, "x")
        ]
        for by in ("passkey", "passkey/1024", "ruler/vt", "pass")
    }
    assert picked == {
        "passkey": ["passkey/1024", "passkey/10240", "passkey"],
        "passkey/1024": ["passkey/1024"],
        "ruler/vt": ["ruler/vt/1024"],
        "pass": [],
    }
    assert [name for name in names if Export(weights="best").selects(name, "ruler")] == ["ruler/vt/1024"]
