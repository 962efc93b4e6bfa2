"""The section of a recipe on softmax scales, and where it may stand."""

import pytest

from ropewalk import RopewalkError
from ropewalk.training.recipe.softmax_scale import SoftmaxScale
from tests.training.resume_cases import recipe_of, with_stage


@pytest.fixture
def without_rope():
    stage = {"context": 32, "rope": "none", "steps": 2}
    return {"model": "m", "output": "o", "data": {"sources": ["a"]}, "stages": [stage]}


def test_1_is_always_measured_and_comes_first():
    assert SoftmaxScale(lengths=[64], scales=[2.0, 1.0, 2.0]).candidates == [1.0, 2.0]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_a_scale_is_a_positive_number(scale):
    with pytest.raises(ValueError, match=r"scales\.0"):
        SoftmaxScale(lengths=[64], scales=[scale])


def test_it_is_measured_on_the_final_weights(without_rope):
    rope = {"method": "none", "softmax_scale": {"lengths": [64]}}
    stages = [{**without_rope["stages"][0], "rope": rope}, without_rope["stages"][0]]
    with pytest.raises(
        RopewalkError, match=r"stages\.0\.rope\.softmax_scale is measured on the final weights"
    ):
        recipe_of({**without_rope, "stages": stages})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"adapter": {"rank": 2}}, r"stages\.0\.rope\.softmax_scale is not possible with an adapter"),
        (
            {"export": {"weights": "average", "average_of": 2}, "checkpoints": {"every": 1, "keep": 5}},
            "measured on the last weights, but export is",
        ),
    ],
)
def test_a_scale_that_would_miss_the_result_is_refused(without_rope, changed, sentence):
    rope = {"method": "none", "softmax_scale": {"lengths": [64]}}
    with pytest.raises(RopewalkError, match=sentence):
        recipe_of({**with_stage(without_rope, rope=rope), **changed})


@pytest.mark.parametrize("rope", [{"method": "theta"}, {"method": "none", "layers": [0]}])
def test_a_scale_needs_a_model_without_rope(without_rope, rope):
    rope = {**rope, "softmax_scale": {"lengths": [64]}}
    with pytest.raises(
        RopewalkError, match="'softmax_scale' applies only to a model without RoPE in any layer"
    ):
        recipe_of(with_stage(without_rope, rope=rope))
