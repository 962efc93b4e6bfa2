"""What a stage decides for itself: resolved in one place, written only where it is given, refused by name."""

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.training.recipe.changes import Progress, changes
from ropewalk.training.recipe.file import dump_recipe, parse_recipe
from ropewalk.training.recipe.recipe import Optimizer, StageOptimizer
from ropewalk.training.recipe.stage import describe_own_settings

RUN = {"model": "m", "output": "o", "data": {"sources": ["a"]}, "seed": 7}
STAGE = {"context": 64, "steps": 10}


def recipe_with(*stages, **run):
    return parse_recipe(yaml.safe_dump({**RUN, **run, "stages": list(stages)}), "test")


def test_what_a_stage_does_not_say_is_the_runs():
    recipe = recipe_with(STAGE, STAGE, optimizer={"beta1": 0.8, "epsilon": 1e-6}, precision="float32")
    for number in (0, 1):
        found = recipe.stage(number)
        assert found.optimizer == recipe.optimizer
        assert found.precision == "float32"
        assert found.seed == 7 + number


def test_what_a_stage_says_is_its_own_key_by_key():
    own = {"optimizer": {"beta2": 0.999, "weight_decay": 0.0}, "precision": "bfloat16", "seed": 0}
    recipe = recipe_with(STAGE, {**STAGE, **own}, optimizer={"beta1": 0.8, "epsilon": 1e-6})
    assert recipe.stage(0).optimizer == Optimizer(beta1=0.8, epsilon=1e-6)
    found = recipe.stage(1)
    assert found.optimizer == Optimizer(beta1=0.8, epsilon=1e-6, beta2=0.999, weight_decay=0.0)
    assert (found.precision, found.seed) == ("bfloat16", 0)


def test_documents_of_a_stage_stand_in_place_of_the_runs():
    own = {"data": {"sources": ["b"], "mixture": {"shuffle": True}}}
    run = {"sources": ["a"], "mixture": {"tokens": 5}, "eos": False, "validation_documents": 3}
    recipe = recipe_with(STAGE, {**STAGE, **own}, {**STAGE, "data": {"sources": ["c"]}}, data=run)
    first, second, third = (recipe.stage(number).data for number in range(3))
    assert first == recipe.data
    assert [source.path for source in second.sources] == ["b"]
    assert (second.mixture.shuffle, second.mixture.tokens, second.eos) == (True, None, False)
    assert (third.mixture, third.sources[0].path) == (recipe.data.mixture, "c")
    packed = {"rows": ["p"], "validation_sources": ["v"]}
    recipe = recipe_with({**STAGE, "data": {"rows": ["q"]}}, data=packed)
    assert recipe.stage(0).data.rows == ["q"]
    with pytest.raises(
        RopewalkError, match=r"stages\.0\.data has the key 'sources', but the run's data section has 'rows'"
    ):
        recipe_with({**STAGE, "data": {"sources": ["q"]}}, data=packed)
    with pytest.raises(
        RopewalkError, match=r"stages\.0\.data: 'mixture' has no effect on rows that are packed already"
    ):
        recipe_with({**STAGE, "data": {"mixture": {"shuffle": True}}}, data=packed)


def test_what_a_stage_decides_is_told_in_one_line():
    own = {
        "data": {"sources": ["b"], "mixture": {"shuffle": True}},
        "optimizer": {"beta2": 0.99},
        "moments": "reset",
        "precision": "bfloat16",
        "parallel": {"ring": 2},
        "seed": 0,
    }
    recipe = recipe_with(STAGE, {**STAGE, **own})
    assert recipe.stages[0].own_settings == {}
    found = recipe.stages[1].own_settings
    assert found.keys() == own.keys()
    assert found["optimizer"] == {"beta2": 0.99}
    assert describe_own_settings(found) == (
        "documents b, its own mixture, optimizer beta2 0.99, moments reset, precision bfloat16, parallel 2 ring, seed 0"
    )
    empty = {"data": {}, "optimizer": {}}
    assert recipe_with({**STAGE, **empty}).stages[0].own_settings == {}


def test_a_stage_knows_every_key_of_the_optimizer():
    assert StageOptimizer.model_fields.keys() == Optimizer.model_fields.keys()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"optimizer": {"beta2": 1}}, r"stages\.0\.optimizer\.beta2 must be less than 1, got 1"),
        ({"optimizer": {"beta3": 0}}, r"unknown key stages\.0\.optimizer\.beta3; did you mean beta2\?"),
        ({"optimizer": {"epsilon": True}}, r"stages\.0\.optimizer\.epsilon must be a number, got True"),
        ({"optimizer": {"max_grad_norm": float("nan")}}, r"max_grad_norm must be a finite number, got nan"),
        (
            {"precision": "auto"},
            r"unknown stages\.0\.precision 'auto'; choose from float32, bfloat16-autocast",
        ),
        ({"moments": "kept"}, r"unknown stages\.0\.moments 'kept'; did you mean keep\?"),
        (
            {"data": {"sources": ["b"], "rows": ["c"]}},
            r"stages\.0\.data has the key 'rows', but the run's data section has 'sources'",
        ),
        ({"data": {"rows": ["c"]}}, r"stages\.0\.data has the key 'rows', .* use 'sources' in both"),
        (
            {"data": {"bos": "row"}},
            r"unknown key stages\.0\.data\.bos; known keys are mixture, rows, sources",
        ),
        ({"data": {"mixture": {"weights": 3}}}, r"stages\.0\.data\.mixture\.weights"),
        (
            {"data": {"sources": ["b"]}},
            r"every stage that trains has data\.sources of its own, .*validation_sources",
        ),
        ({"parallel": {"ring": 0}}, r"stages\.0\.parallel\.ring must be 1 or more, got 0"),
        ({"parallel": {"rings": 2}}, r"unknown key stages\.0\.parallel\.rings; did you mean ring\?"),
        ({"parallel": 2}, r"stages\.0\.parallel"),
        ({"seed": -1}, r"stages\.0\.seed must be 0 or more, got -1"),
        ({"seed": 2**32}, r"stages\.0\.seed must be less than 4294967296"),
        ({"seed": 1.5}, r"stages\.0\.seed must be a whole number, got 1\.5"),
    ],
)
def test_wrong_values_are_refused_by_name(own, said):
    with pytest.raises(RopewalkError, match=said):
        recipe_with({**STAGE, **own})


def test_a_recipe_file_has_only_what_was_given():
    own = {"optimizer": {"beta2": 0.99}, "precision": "float32", "seed": 0, "moments": "rewarm"}
    recipe = recipe_with(STAGE, {**STAGE, **own})
    first, second = yaml.safe_load(dump_recipe(recipe))["stages"]
    assert not {"optimizer", "precision", "seed"} & first.keys()
    assert first["moments"] == "keep"
    assert {"precision": "float32", "seed": 0, "moments": "rewarm"}.items() <= second.items()
    assert parse_recipe(dump_recipe(recipe), "again") == recipe


def test_a_change_is_told_with_both_values():
    old, new = recipe_with(STAGE), recipe_with({**STAGE, "optimizer": {"beta2": 0.99}})
    (change,) = changes(old, new, Progress(0, 4, 1))
    assert (change.key, change.old) == ("stages.0.optimizer", None)
    newer = recipe_with({**STAGE, "optimizer": {"beta2": 0.9}})
    (change,) = changes(new, newer, Progress(0, 4, 1))
    assert (change.key, change.old, change.new) == ("stages.0.optimizer.beta2", 0.99, 0.9)
    for own in ({"precision": "bfloat16"}, {"seed": 3}, {"moments": "reset"}):
        (change,) = changes(old, recipe_with({**STAGE, **own}), Progress())
        assert change.key == f"stages.0.{next(iter(own))}"
