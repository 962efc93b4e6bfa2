"""Ranks are played in processes of their own, which leave nothing behind in this one."""

import json
import multiprocessing

import pytest
import torch
import yaml

from ropewalk.models.config.read import read_config
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.time import model_flops
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.simulation.assumed_documents import Documents
from ropewalk.training.simulation.few_layers import LEAST_LAYERS
from ropewalk.training.simulation.rank_costs import flops_of, in_own_process, operators_of, play
from tests.dry_run.cases import model_folder, played, recipe_of, resolved_for
from tests.models import every_family


@pytest.mark.slow
def test_processes_end_and_play_what_one_does_and_this_one_has_no_new_device(aside, tmp_path):
    # Deep enough for two runs, which are played at the same time.
    model = model_folder(tmp_path / "model", num_hidden_layers=LEAST_LAYERS + 1)
    resolved = resolved_for(recipe_of(model, parallel={"ring": 2}), 2)
    others = set(multiprocessing.active_children())
    with in_own_process() as player:
        first, second = (player(resolved, 0, Documents("one per row"), rank) for rank in (0, 1))
    assert (first.rank, second.rank) == (0, 1)
    alone = aside(play, resolved, 0, Documents("one per row"), 0)
    assert (first.memory.peak, first.operators, first.transfers) == (
        alone.memory.peak,
        alone.operators,
        alone.transfers,
    )
    assert first.flops["dense"] == second.flops["dense"]
    assert first.transfers.ring[0] > 0
    assert set(multiprocessing.active_children()) <= others
    with pytest.raises(RuntimeError, match="simulated"):
        torch.device("simulated")


LENGTHS = (511, 800, *(30, 60, 20) * 40)
"""Two documents of a row and more, and 120 short ones."""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"ring": 2}], ids=str)
def test_operations_are_the_mean_over_the_rows_in_any_order_of_the_documents(aside, tmp_path, mesh):
    recipe = recipe_of(model_folder(tmp_path / "model"), parallel=mesh)
    ranks = 1 if mesh is None else 2
    resolved = resolved_for(recipe, ranks)
    for order in (LENGTHS, LENGTHS[::-1]):
        packed = Documents("", order).packed(recipe.stages[0])
        # The anchor of one token is part of the first document's run.
        pairs = [sum(n * (n + 1) // 2 for n in (1 + row[0], *row[1:])) for row in packed.lengths]
        assert max(pairs) > 10 * min(pairs)
        # 2 layers of 8 heads of 8 dimensions: two products forward, and five backward.
        expected = 2 * 8 * 7 * 2 * 8 * sum(pairs) / len(pairs)
        found = [aside(play, resolved, 0, Documents("", order), rank) for rank in range(ranks)]
        counted = sum(each.flops["attention"] for each in found)
        # The ranks of a ring compute the anchor for each piece of a document that they hold.
        assert counted == pytest.approx(expected, rel=1e-6 if mesh is None else 0.01)
        assert all(each.flops["dense"] == found[0].flops["dense"] for each in found)


def test_the_model_attends_with_the_engine_of_the_stage(aside, tmp_path):
    """As in training, where a measured engine may differ from what is taken without measuring."""
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern="full")
    resolved = resolved_for(recipe, capability=(9, 0)).with_engine(0, "varlen")
    found = aside(play, resolved, 0, Documents("one per row"), 0)
    assert {each.name for each in found.operators if each.kind == "attention"} == {"flash2"}


@pytest.mark.slow
def test_memory_is_that_of_the_rows_that_need_most(aside, tmp_path):
    resolved = resolved_for(recipe_of(model_folder(tmp_path / "model")))
    alone = [aside(play, resolved, 0, Documents("", each), 0).memory.peak for each in ((511,), (30,) * 17)]
    both = aside(play, resolved, 0, Documents("", (511, *(30,) * 17)), 0).memory.peak
    assert both == max(alone) > min(alone)


def adapted(recipe):
    """The recipe with an adapter on the attention's matrices."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    adapter = {"method": "lora", "rank": 4, "targets": ["attention"], "also_train": ["embeddings", "norms"]}
    return parse_recipe(yaml.safe_dump(values | {"adapter": adapter}), "recipe.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_weights_take_no_operations_for_gradients_of_their_own(aside, tmp_path, checkpointing):
    recipe = recipe_of(model_folder(tmp_path / "model"), gradient_checkpointing=checkpointing)
    whole, some = (flops_of(operators_of(aside(played, each))) for each in (recipe, adapted(recipe)))
    tokens, attention = 512, 3 * 2 * 8 * (512 * 513 // 2) * 2 * 2 * 8
    projections = 2 * (2 * 64 * 64 + 2 * 64 * 32)
    others = 2 * 3 * 64 * 160 + 512 * 64
    # Forward and the gradients of inputs and of weights, two operations of a product each.
    assert whole["model"] == tokens * 6 * (projections + others) + attention
    # Both matrices of the adapter of each projection are trained; what is frozen has no third product.
    pairs_of_matrices = 2 * 4 * (4 * 64 + 2 * 64 + 2 * 32)
    frozen = tokens * 4 * (projections + others)
    assert some["model"] == frozen + tokens * 6 * pairs_of_matrices + attention
    assert some["dense"] + some["attention"] > some["model"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_experts_are_played_under_autocast_and_their_operations_counted(aside, tmp_path, family):
    config = every_family.tiny_config(family)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    recipe = recipe_of(tmp_path)
    assert resolved_for(recipe).stages[0].precision == "bfloat16-autocast"
    step = aside(played, recipe)
    # The loss of so few tokens is computed at once, and recomputes no head.
    expected, _ = model_flops(ModelShape.from_config(read_config(tmp_path)), 512, 0)
    assert flops_of(operators_of(step))["dense"] == pytest.approx(expected, rel=1e-3)
    # In float32, CUDA multiplies expert by expert, and the host waits for the number of tokens of each.
    assert {moment for _, moment in step.recording.waits} == {"forward", "backward", "update"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "jetmoe"])
def test_other_mixtures_are_played(aside, tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps(every_family.tiny_config(family).to_dict()))
    assert flops_of(operators_of(aside(played, recipe_of(tmp_path))))["model"] > 0
