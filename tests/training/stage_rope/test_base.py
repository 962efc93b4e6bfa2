"""A stage's RoPE before a run: what it begins with, what it may get, and what cannot be is refused."""

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default
from ropewalk.training.recipe.recipe import Rope, Stage
from ropewalk.training.stage_rope.base import (
    Before,
    factors_file,
    refuse_start_tokens,
    stage_name,
    takes_recommended_base,
)

CHECKPOINT = (Default(8, 1e4), 128)


def stage(context, **rope):
    return Stage(context=context, steps=1, rope=Rope(**rope))


def test_bases_that_are_recommended_one_after_another_follow_from_what_came_before_the_first():
    first = Before.first(CHECKPOINT)
    assert (first.method, first.length, first.origin, first.checkpoint) == (
        *CHECKPOINT,
        CHECKPOINT,
        CHECKPOINT,
    )
    after = first
    for context, base in ((256, 5e4), (512, 2e5)):
        after = after.after(stage(context, method="theta", rope_theta="auto"), Default(8, base))
    assert after.method == Default(8, 2e5)
    assert after.length == 512
    assert after.origin == CHECKPOINT


def test_a_base_that_is_named_is_what_later_ones_follow_from():
    named = stage(256, method="theta", rope_theta=7e4)
    after = Before.first(CHECKPOINT).after(named, Default(8, 7e4))
    assert after.origin == (Default(8, 7e4), 256)
    assert after.checkpoint == CHECKPOINT


@pytest.mark.parametrize(
    ("rope", "recommended"),
    [
        ({"method": "theta", "rope_theta": "auto"}, True),
        ({"method": "theta", "rope_theta": 1e6}, False),
        ({"method": "default"}, False),
    ],
)
def test_a_base_is_recommended_where_nobody_names_one(rope, recommended):
    assert takes_recommended_base(Rope(**rope)) is recommended


def test_start_tokens_are_refused_because_no_config_can_hold_them():
    refuse_start_tokens(Rope(method="default"))
    factors = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
    refuse_start_tokens(Rope(method="longrope", start_tokens=0, **factors))
    with pytest.raises(RopewalkError, match="a transformers config cannot store start_tokens 4"):
        refuse_start_tokens(Rope(method="longrope", start_tokens=4, **factors))


def test_files_of_stages_are_counted_from_one():
    assert [stage_name(number) for number in (0, 1)] == ["stage1", "stage2"]
    assert factors_file(stage_name(1)) == "factors-stage2.json"
