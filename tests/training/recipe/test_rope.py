"""A stage's RoPE in a recipe: its keys are those that the methods have."""

import subprocess
import sys
from typing import get_type_hints

import pytest

from ropewalk import RopewalkError
from ropewalk.rope.methods import METHODS
from ropewalk.rope.methods.base import trainable_methods
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.rope import Rope

OWN = {"method", "rope_theta", "factors", "search", "parameters", "candidates", "probe_rows", "softmax_scale"}
BY_LAYER = {"full_attention", "sliding_attention"}
RECIPE = """
model: some/model
output: runs/x
data: {sources: [a.jsonl]}
stages: [{context: 32k, steps: 5, rope: {method: %s, %s}}]
"""
NEW_METHOD = '''
from dataclasses import dataclass
from typing import ClassVar
from ropewalk.rope import register
from ropewalk.rope.methods.base import RopeMethod

@register
@dataclass(frozen=True)
class Eased(RopeMethod):
    factor: float
    sharpness: float = 2.0
    name: ClassVar = "eased"
    parameters: ClassVar = {"factor": "", "sharpness": ""}
    frequencies = None

from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.rope import Rope
print(Rope.model_fields["factor"].description)
print(Rope.model_fields["sharpness"].description)
recipe = """RECIPE"""
print(parse_recipe(recipe % ("eased", "sharpness: 3"), "x").stages[0].rope.sharpness)
try:
    parse_recipe(recipe % ("eased", "sharpness: steep"), "x")
except Exception as error:
    print(error)
'''.replace("RECIPE", RECIPE)


def test_each_parameter_of_each_method_is_a_key_and_no_other_key_has_its_name() -> None:
    parameters = {name for method in trainable_methods().values() for name in method.parameters}
    assert not parameters & (OWN | BY_LAYER)
    assert set(Rope.model_fields) == parameters | OWN | BY_LAYER


@pytest.mark.parametrize("name", sorted(trainable_methods()))
def test_a_key_takes_what_the_method_takes_and_says_whose_it_is(name: str) -> None:
    method = METHODS[name]
    for parameter in method.parameters:
        field = Rope.model_fields[parameter]
        types = {**get_type_hints(method), **method.target_parameters}
        assert types[parameter] | None == field.annotation
        assert field.default is None
        meanings = str(field.description).split("; ")
        assert name in [each for meaning in meanings for each in meaning.partition(":")[0].split(", ")]


def test_a_method_that_is_new_in_the_table_brings_its_keys_with_their_types() -> None:
    found = subprocess.run([sys.executable, "-c", NEW_METHOD], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "linear, yarn, llama3: the stage's context divided by the original length (before any extension); "
        "ntk: the stage's context divided by the context before the stage; "
        "proportional: the divisor of the frequencies, without a default; eased",
        "eased: default 2",
        "3.0",
        "recipe x: stages.0.rope.sharpness must be a number, got 'steep'",
    ]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("beta_fast: true", "stages.0.rope.beta_fast must be a number"),
        ("truncate: 1", "stages.0.rope.truncate must be true or false"),
        ("start_tokens: 0.5", "stages.0.rope.start_tokens must be a whole number"),
        ("long_factor: [1, x]", "stages.0.rope.long_factor.1 must be a number, got 'x'"),
    ],
)
def test_a_value_of_another_type_is_refused(said: str, sentence: str) -> None:
    with pytest.raises(RopewalkError, match=sentence.replace(".", r"\.")):
        parse_recipe(RECIPE % ("longrope", said), "x")
