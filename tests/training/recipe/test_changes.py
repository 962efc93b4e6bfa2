"""What --resume may change in a recipe: every key says it, and a refusal says why."""

import pytest

from ropewalk import RopewalkError
from ropewalk.io.settings import FREE, ONWARD, deciding, free_mark
from ropewalk.training.recipe.changes import Progress, changes, refuse_lost_tables, sentences
from ropewalk.training.recipe.recipe import Export, Recipe, Stage


def test_every_key_is_free_or_decides_and_a_free_one_may_be_told():
    assert free_mark(Recipe, "output") == FREE
    assert free_mark(Stage, "learning_rate") == ONWARD
    assert free_mark(Export, "average_of") == FREE
    assert free_mark(Recipe, "seed") is None
    first = plain(
        stages=[{"context": 64, "steps": 10, "learning_rate": 1e-3, "gradient_checkpointing": True}]
    )
    decided = deciding(first, ("data",))
    assert decided["stages"][0]["context"] == 64
    assert not {"steps", "learning_rate", "gradient_checkpointing"} & decided["stages"][0].keys()
    assert not {"data", "output", "checkpoints", "export", "parallel"} & decided.keys()
    assert deciding(first) == deciding(plain(parallel={"shard": 2}, output="elsewhere"))


def plain(**changed):
    stage = {"context": 64, "steps": 10}
    return Recipe.model_validate(
        {"model": "m", "output": "o", "data": {"sources": ["a"]}, "stages": [stage], **changed}
    )


@pytest.mark.parametrize(
    ("new", "progress", "why"),
    [
        (
            {"learning_rate": 1e-6},
            Progress(0, 10, 1),
            "all steps of stage 1 are done, so the change has no effect",
        ),
        ({"learning_rate": 1e-6}, Progress(1, 3, 2), "stage 1 is done"),
        ({"steps": 12}, Progress(1, 3, 2), "stage 1 is done"),
    ],
)
def test_a_change_that_comes_too_late_is_refused(new, progress, why):
    two = [{"context": 64, "steps": 10}, {"context": 128, "steps": 10}]
    with pytest.raises(RopewalkError, match=why):
        changes(plain(stages=two), plain(stages=[{**two[0], **new}, two[1]]), progress)


def test_a_stage_that_has_not_begun_may_become_another_or_go():
    two = [{"context": 64, "steps": 10}, {"context": 128, "steps": 10}]
    other = plain(stages=[two[0], {"context": 256, "steps": 5, "rope": "yarn"}])
    found = changes(plain(stages=two), other, Progress(0, 4, 1))
    assert {change.key for change in found} == {
        "stages.1.context",
        "stages.1.rope.method",
        "stages.1.steps",
    }
    (gone,) = changes(plain(stages=two), plain(stages=two[:1]), Progress(0, 4, 1))
    assert (gone.key, gone.new) == ("stages.1", None)
    with pytest.raises(RopewalkError, match="stage 2 has started, but the new recipe has no stage 2"):
        changes(plain(stages=two), plain(stages=two[:1]), Progress(1, 0, 2))


def test_more_steps_of_a_decaying_schedule_say_what_becomes_of_the_rate():
    linear = {"context": 64, "steps": 10, "learning_rate": 1.0, "schedule": "linear"}
    old, new = plain(stages=[linear]), plain(stages=[{**linear, "steps": 20}])
    told = sentences(changes(old, new, Progress(0, 10, 1)), old, new)
    assert told[1] == (
        "the learning rate of stage 1 is 0.1 in step 10, and 0.5 in step 11; linear, it is 0.05 in the last step, 20"
    )
    constant = {**linear, "schedule": "constant"}
    old, new = plain(stages=[constant]), plain(stages=[{**constant, "steps": 20}])
    assert len(sentences(changes(old, new, Progress(0, 10, 1)), old, new)) == 1


def test_names_of_the_users_own_in_a_recipe_belong_to_the_key_above_them():
    weighted = [plain(data={"sources": ["a"], "mixture": {"weights": {"a.b": w}}}) for w in (1.0, 2.0)]
    (found,) = changes(*weighted, Progress(0, 1, 1))
    assert (found.key, found.old, found.new) == ("data.mixture.weights.a.b", 1.0, 2.0)
    assert changes(plain(), plain(parallel={"shard": 2}), Progress(0, 1, 1))[0].key == "parallel"
    assert changes(plain(), plain(output="elsewhere"), Progress(0, 1, 1)) == []


def test_a_table_that_the_recipe_does_not_name_any_more_is_refused_by_its_name():
    rope = {"method": "longrope", "factors": "found.json"}
    old = plain(stages=[{"context": 64, "steps": 10, "rope": rope}])
    with pytest.raises(
        RopewalkError,
        match=r"the run started with stages\.0\.rope\.factors found\.json, but the recipe has none; restore",
    ):
        refuse_lost_tables(old, plain(), 1)
    refuse_lost_tables(old, plain(), 0)
    rope = {**rope, "factors": "elsewhere.json"}
    refuse_lost_tables(old, plain(stages=[{"context": 64, "steps": 10, "rope": rope}]), 1)
