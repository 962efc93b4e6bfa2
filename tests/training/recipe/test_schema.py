"""The JSON Schema of recipes accepts what people write, and refuses what an editor should underline."""

import copy
import re

import jsonschema
import pytest
import yaml

from ropewalk.recipes import SCHEMA_LINE, schema_text, shipped_recipes
from ropewalk.training.recipe import schema
from ropewalk.training.recipe.file import parse_recipe


class EditorsLoader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2, as editors do: 8.0e6 is a number."""


EditorsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def problems(text):
    found = jsonschema.Draft202012Validator(schema.recipe_schema()).iter_errors(
        yaml.load(text, EditorsLoader)
    )
    return [list(each.path) for each in found]


SMALL = """
model: m
output: out
data: {sources: [texts]}
stages: [{context: 128k, steps: 20, learning_rate: 1e-5, rows_per_step: 1}]
"""
CASES = {
    "a name for a mapping": {"adapter": "lora", "export": "last"},
    "mappings": {
        "adapter": {"rank": 4, "targets": "all-linear"},
        "export": {"weights": "last"},
        "parallel": {"ring": 2},
    },
    "lengths": {"evaluation": {"suites": ["passkey"], "lengths": ["4k", 8192]}},
    "sources": {"data": {"sources": [{"path": "a", "name": "b"}, "c"], "interleave": True}},
    "a mixture": {
        "data": {"sources": ["a"], "mixture": {"weights": {"a": 2}, "length_shares": "0=0.3,4k=0.7"}}
    },
    "rope": {"stages": [{"rope": "yarn"}]},
    "rope by layers": {
        "stages": [{"rope": {"full_attention": {"rope_theta": 8.0e6}, "sliding_attention": "default"}}]
    },
    "a search": {"stages": [{"rope": {"method": "longrope", "search": {"budget": 64, "largest": 8}}}]},
}


def with_values(values):
    recipe = yaml.safe_load(SMALL)
    for key, value in copy.deepcopy(values).items():
        if key == "stages":
            recipe["stages"][0] |= value[0]
        else:
            recipe[key] = value
    return yaml.safe_dump(recipe)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_keep_to_the_schema_that_their_first_line_names(name):
    text = shipped_recipes()[name]
    assert text.startswith(SCHEMA_LINE)
    assert not problems(text)


@pytest.mark.parametrize("case", CASES)
def test_what_a_recipe_accepts_the_schema_accepts(case):
    text = with_values(CASES[case])
    parse_recipe(text, "test")
    assert not problems(text)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"modle": "m"}, []),
        ({"stages": [{"context": "128kb"}]}, ["stages", 0, "context"]),
        ({"stages": [{"steps": -1}]}, ["stages", 0, "steps"]),
        ({"stages": [{"context": 2**40}]}, ["stages", 0, "context"]),
        ({"export": "worst"}, ["export"]),
        ({"adapter": {"rnk": 4}}, ["adapter"]),
        ({"data": {"sources": [3]}}, ["data", "sources", 0]),
    ],
)
def test_mistakes_are_refused_where_they_are(values, place):
    assert problems(with_values(values)) == [place]


def test_without_what_validators_accept_no_shipped_recipe_keeps_to_it(monkeypatch):
    monkeypatch.setattr(schema, "_AsWritten", schema.GenerateJsonSchema)
    assert all(problems(text) for text in shipped_recipes().values())


def test_the_file_is_a_schema_of_draft_2020_12():
    import json

    stated = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(stated)
    assert stated == schema.recipe_schema()
