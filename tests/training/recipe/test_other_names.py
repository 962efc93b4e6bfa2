"""Keys that people bring from other programs are answered with the recipe's own."""

import pytest

from ropewalk import RopewalkError
from ropewalk.io.settings import model_in
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.other_names import OTHER_NAMES
from ropewalk.training.recipe.recipe import Recipe


@pytest.mark.parametrize("key", sorted(set(OTHER_NAMES.values())))
def test_every_key_that_is_named_exists(key):
    model = Recipe
    for part in key.replace(".0.", ".").split("."):
        assert model is not None
        assert part in model.model_fields
        model = model_in(model.model_fields[part].annotation)


def test_no_key_of_a_recipe_is_called_otherwise_at_its_place():
    assert not OTHER_NAMES.keys() & Recipe.model_fields.keys()


def test_a_file_of_axolotl_is_answered_key_by_key():
    text = "base_model: m\nsequence_len: 8192\nmicro_batch_size: 1\nlora_r: 8\nlearning_rate: 1e-5\noutput_dir: out\n"
    with pytest.raises(RopewalkError) as refusal:
        parse_recipe(text, "r.yaml")
    assert str(refusal.value) == (
        "recipe r.yaml: unknown key base_model: use model; unknown key sequence_len: use stages.0.context; "
        "unknown key micro_batch_size: use stages.0.rows_per_batch; unknown key lora_r: use adapter.rank; "
        "unknown key learning_rate: use stages.0.learning_rate; unknown key output_dir: use output; data is missing"
    )


def test_keys_of_a_stage_are_answered_wherever_they_stand_together_with_all_else():
    text = (
        "model: m\noutput: o\ndata: {sources: [a]}\ncontext: 1k\nsteps: 5\nrope_theta: 1\nprecision: bf16\n"
    )
    with pytest.raises(RopewalkError) as refusal:
        parse_recipe(text, "r.yaml", ["pattern=full"])
    assert str(refusal.value) == (
        "recipe r.yaml: unknown key context: use stages.0.context; unknown key steps: use stages.0.steps; "
        "unknown key rope_theta: use stages.0.rope.rope_theta; unknown key pattern: use stages.0.pattern; "
        "unknown precision 'bf16'; did you mean bfloat16?"
    )
    with pytest.raises(RopewalkError, match=r"use stages\.0\.learning_rate; stages\.0\.context is missing"):
        parse_recipe("{model: m, output: o, data: {sources: [a]}, stages: [{lr: 1}]}", "r.yaml")
