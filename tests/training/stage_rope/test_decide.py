"""What a stage's RoPE may become before a run: one method, the candidates of auto, or a search's stand-in."""

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, LongRope, NoRope, Yarn, candidate
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.base import Before
from ropewalk.training.stage_rope.decide import bounds_of, possible_methods, provisional_method

CHECKPOINT = (Default(8, 1e4), 128)
AUTO = {"method": "auto", "candidates": ["ntk", "theta=5e6", "current"]}
SEARCH = {"method": "longrope", "search": {"budget": 20, "documents": 2}}


def recipe_of(*ropes, **changed):
    stages = [
        {"context": 256 << number, "steps": 1, "pattern": "full", "rope": rope}
        for number, rope in enumerate(ropes)
    ]
    values = {"model": "m", "output": "o", "data": {"sources": ["a"]}, "stages": stages}
    return Recipe.model_validate({**values, **changed})


def possible(rope, **changed):
    return possible_methods(recipe_of(rope, **changed), 0, Before.first(CHECKPOINT))


def test_a_given_method_is_the_only_one():
    assert possible({"method": "yarn", "factor": 2.0}) == {"yarn": Yarn(8, 1e4, 2.0, 128)}


def test_auto_has_one_base_a_candidate_in_the_order_of_the_recipe():
    found = possible(AUTO)
    assert list(found) == AUTO["candidates"]
    assert found["current"] == CHECKPOINT[0]
    assert found["theta=5e6"] == Default(8, 5e6)
    assert found["ntk"].rope_theta == candidate("ntk", *CHECKPOINT, 256).rope_theta


def test_a_search_stands_with_factors_of_one():
    (method,) = possible(SEARCH).values()
    assert isinstance(method, LongRope)
    assert method.long_factor == (1.0,) * 4


@pytest.mark.parametrize("rope", [AUTO, SEARCH], ids=["auto", "search"])
def test_what_is_measured_needs_our_rotary_module(rope):
    with pytest.raises(RopewalkError, match=r"stages\.0\.rope: .* exact_rope: false disables"):
        possible(rope, exact_rope=False)


def test_bounds_are_the_extremes_of_all_candidates_and_reach_into_the_next_stage():
    first, second = bounds_of(recipe_of(AUTO, {"method": "yarn", "factor": 2.0}), CHECKPOINT)
    assert (first.low, first.high) == (CHECKPOINT[0], Default(8, 5e6))
    assert (second.low, second.high) == (Yarn(8, 1e4, 2.0, 256), Yarn(8, 5e6, 2.0, 256))
    assert first.method is second.method is None
    (known,) = bounds_of(recipe_of({"method": "yarn", "factor": 2.0}), CHECKPOINT)
    assert known.low == known.high == known.method


def test_a_stage_without_rope_may_train_at_the_length_that_the_model_has():
    length = CHECKPOINT[1]

    def first(rope, context):
        stage = {"context": context, "steps": 1, "rope": rope}
        return recipe_of(rope, stages=[stage])

    (still,) = bounds_of(first("none", length), CHECKPOINT)
    assert still.low == still.high == still.method == NoRope(8, 1e4, length)
    (kept,) = bounds_of(first("default", length), (still.method, length))
    assert kept.method == still.method
    with pytest.raises(RopewalkError, match=f"must be at least the trained length of {length} tokens"):
        bounds_of(first("none", length - 1), CHECKPOINT)
    with pytest.raises(RopewalkError, match=f"must be longer than the trained length of {length} tokens"):
        bounds_of(first("default", length), CHECKPOINT)


def test_nothing_that_a_search_has_yet_to_find_counts_as_known():
    searched, kept, after = bounds_of(
        recipe_of(SEARCH, {"method": "default"}, {"method": "default"}), CHECKPOINT
    )
    assert searched.method is kept.method is after.method is None
    assert searched.origin == CHECKPOINT
    assert kept.origin is after.origin is None


@pytest.mark.parametrize(
    ("rope", "remark"),
    [
        ({"method": "yarn", "factor": 2.0}, "verified with the method of the run"),
        (AUTO, "verified with its first candidate, ntk"),
        (SEARCH, "verified with NTK, an initial candidate of the search"),
    ],
    ids=["given", "auto", "search"],
)
def test_a_recipe_is_verified_with_a_method_that_the_stage_may_get(rope, remark):
    method, said = provisional_method(recipe_of(rope), 0, Before.first(CHECKPOINT), None)
    assert remark in said
    if rope is not SEARCH:
        assert method == next(iter(possible(rope).values()))
    else:
        assert max(method.long_factor) > 1
