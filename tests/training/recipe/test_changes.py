"""What --resume may change in a recipe: every key says it, and a refusal says why."""

import pytest

from ropewalk import RopewalkError
from ropewalk.io.settings import Settings, model_in
from ropewalk.training.recipe.changes import Progress, changes, declared_on_resume, is_group, on_resume
from ropewalk.training.recipe.recipe import Recipe


def keys_of(model: type[Settings], holder=None):
    for name, field in model.model_fields.items():
        if not is_group(field):
            yield model, name, holder
        inner = model_in(field.annotation)
        # A RoPE holds others by layer type, with the same keys.
        if inner is not None and inner is not model:
            yield from keys_of(inner, declared_on_resume(model, name, holder))


def test_every_key_says_what_resume_does_with_it():
    found = {
        (model.__name__, name): on_resume(model, name, holder) for model, name, holder in keys_of(Recipe)
    }
    assert len(found) > 70
    assert {rule.kind for rule in found.values()} == {"free", "same", "onward", "fixed"}
    assert all(rule.why for rule in found.values() if rule.kind == "fixed")


def test_a_new_key_that_does_not_say_it_is_our_mistake():
    class More(Settings):
        key: int = 0

    with pytest.raises(TypeError, match=r"More\.key does not say what --resume does with it"):
        on_resume(More, "key")


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
    assert {change.key for change in found.onward} == {
        "stages.1.context",
        "stages.1.rope.method",
        "stages.1.steps",
    }
    assert found.stages == (1,)
    assert changes(plain(stages=two), plain(stages=two[:1]), Progress(0, 4, 1)).stages == (1,)
    with pytest.raises(RopewalkError, match="stage 2 has started, but the new recipe has no stage 2"):
        changes(plain(stages=two), plain(stages=two[:1]), Progress(1, 0, 2))
    steps = changes(plain(stages=two), plain(stages=[two[0], {**two[1], "steps": 11}]), Progress(0, 4, 1))
    assert steps.stages == ()


def test_more_steps_of_a_decaying_schedule_say_what_becomes_of_the_rate():
    linear = {"context": 64, "steps": 10, "learning_rate": 1.0, "schedule": "linear"}
    old, new = plain(stages=[linear]), plain(stages=[{**linear, "steps": 20}])
    told = changes(old, new, Progress(0, 10, 1)).sentences(old, new)
    assert told[1] == (
        "the learning rate of stage 1 is 0.1 in step 10, and 0.5 in step 11; linear, it is 0.05 in the last step, 20"
    )
    constant = {**linear, "schedule": "constant"}
    old, new = plain(stages=[constant]), plain(stages=[{**constant, "steps": 20}])
    assert len(changes(old, new, Progress(0, 10, 1)).sentences(old, new)) == 1


def test_names_of_the_users_own_in_a_recipe_belong_to_the_key_above_them():
    weighted = [plain(data={"sources": ["a"], "mixture": {"weights": {"a.b": w}}}) for w in (1.0, 2.0)]
    with pytest.raises(
        RopewalkError,
        match=r"data\.mixture\.weights\.a\.b 1\.0 -> 2\.0 \(the rows of this run are already packed",
    ):
        changes(*weighted, Progress(0, 1, 1))
    assert changes(plain(), plain(parallel={"shard": 2}), Progress(0, 1, 1)).onward[0].key == "parallel"
