"""Recipes: their defaults are the papers', and a stage chooses among what there is."""

from ropewalk.attention import ENGINES, PATTERNS, POSITIONS
from ropewalk.io.settings import choices_in
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe, Stage

MINIMAL = """
model: some/model
output: runs/x
data: {sources: [a.jsonl, {path: b, name: books}]}
stages: [{context: 8k, steps: 10}, {context: 32k, steps: 5, rope: {method: yarn}}]
"""


def test_a_minimal_recipe_has_the_papers_defaults():
    recipe = parse_recipe(MINIMAL, "x")
    assert [stage.context for stage in recipe.stages] == [8192, 32768]
    assert [source.path for source in recipe.data.sources] == ["a.jsonl", "b"]
    assert recipe.stages[0].pattern == "anchor"
    assert recipe.stages[0].rope.method == "theta"
    assert (recipe.optimizer.weight_decay, recipe.optimizer.beta2) == (0.1, 0.95)
    assert recipe.stages[0].learning_rate == 2e-5
    assert recipe.checkpoints.keep == 5


def test_a_stage_chooses_among_what_attention_knows():
    assert choices_in(Stage.model_fields["pattern"].annotation) == [*PATTERNS]
    assert choices_in(Stage.model_fields["positions"].annotation) == [*POSITIONS]
    assert choices_in(Recipe.model_fields["engine"].annotation) == ["auto", *ENGINES]


def test_a_mixture_may_have_more_tokens_than_a_row():
    assert parse_recipe(MINIMAL, "x", ["data.mixture={tokens: 100000000000}"]).data.mixture.tokens == 10**11
