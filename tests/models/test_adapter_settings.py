"""Settings of an adapter: what a person may write, and one sentence for what they may not."""

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.training.recipe.file import parse_recipe

RECIPE = {
    "model": "somewhere",
    "output": "out",
    "data": {"sources": ["a.jsonl"]},
    "stages": [{"context": 64, "steps": 1}],
}


def adapter(**values):
    return parse_recipe(yaml.safe_dump({**RECIPE, "adapter": values}), "test").adapter


def test_the_defaults_are_those_of_longlora():
    settings = adapter()
    assert (settings.method, settings.rank, settings.alpha, settings.targets) == (
        "lora",
        16,
        32,
        ["attention"],
    )
    assert settings.also_train == ["embeddings", "norms"]
    assert parse_recipe(yaml.safe_dump(RECIPE), "test").adapter is None


def test_a_name_alone_is_the_method_or_the_only_entry():
    assert parse_recipe(yaml.safe_dump({**RECIPE, "adapter": "lora"}), "test").adapter == adapter()
    assert adapter(targets="q_proj", also_train="norms") == adapter(targets=["q_proj"], also_train=["norms"])
    with pytest.raises(RopewalkError, match=r"unknown adapter.method 'loha'"):
        parse_recipe(yaml.safe_dump({**RECIPE, "adapter": "loha"}), "test")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "lorra"}, r"unknown adapter.method 'lorra'; did you mean lora\?"),
        ({"rank": 0}, "adapter.rank must be 1 or more, got 0"),
        ({"rank": True}, "adapter.rank must be a whole number"),
        ({"alpha": -1}, "adapter.alpha must be more than 0, got -1"),
        ({"dropout": 1}, "adapter.dropout must be less than 1, got 1"),
        ({"targets": []}, "targets must be 'attention', 'all-linear' or a list of names of linear layers"),
        ({"targets": ["q_proj", "q_proj"]}, "'q_proj' is listed twice; list it once"),
        ({"also_train": ["norm"]}, r"'norm'; did you mean norms\?"),
        ({"also_train": ["norms", "norms"]}, "'norms' is listed twice"),
        ({"ranks": 4}, r"unknown key adapter.ranks; did you mean rank\?"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values, message):
    with pytest.raises(RopewalkError, match=message) as refusal:
        adapter(**values)
    assert "\n" not in str(refusal.value)
