"""What ranks run in the tests of the training step on models whose attention is more than Llama's."""

import random

import torch

from ropewalk import PackedLayout, Row
from ropewalk.attention.layout import next_token_labels
from ropewalk.models.intercept import KeepFloat64, run_experts_one_by_one
from ropewalk.models.load import load_model
from ropewalk.models.losses import LossModel, OutputHead
from ropewalk.models.sharding import gathered_state, load_sharded
from ropewalk.parallel import MeshShape, World, joined, make_mesh
from ropewalk.training.optimizer import MasterAdamW
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.step import micro_batches, train_step
from tests.models.families import WINDOW, tiny_model

OPTIMIZER = Optimizer(epsilon=1e-3)
"""AdamW divides the rounding of a gradient that vanishes by its epsilon: one so large that weights compare."""
LEARNING_RATE = 1e-2


def save_family(folder, family):
    """A tiny random model whose windows are shorter than documents, and with sinks and gates that matter."""
    tiny_model(family, sharp=True).save_pretrained(folder)


def rows_with_anchor(count=2, length=61):
    """Rows of one odd length; one document of each lies on both halves of it and is longer than any window."""
    rng, rows = random.Random(0), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        first = rng.randint(WINDOW + 1, length // 3)
        layout = PackedLayout.from_lengths(
            [first, 2 * WINDOW + 9, length - first - 2 * WINDOW - 10], "anchor"
        )
        ids = torch.randint(3, 90, (length,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return rows


def two_steps(folder, rows, mesh=None, world=None):
    """Loss and gradient norm of two optimiser steps, and the weights after them, in float64 all the way."""
    if mesh is None:
        whole = load_model(folder, dtype=torch.float64)
        model, mine = LossModel(whole, OutputHead.unchecked(whole)), rows
    else:
        model = load_sharded(folder, mesh, world, dtype=torch.float64)
        mine = rows[mesh.data_rank :: mesh.shape.data_degree]
    run_experts_one_by_one(model.model)
    model.train()
    with KeepFloat64():
        optimizer = MasterAdamW(model.named_parameters(), OPTIMIZER)
        steps = [
            train_step(model, micro_batches(mine, 1, mesh), optimizer, LEARNING_RATE, mesh=mesh)
            for _ in range(2)
        ]
    weights = gathered_state(model.model, world or World())
    return [(step.loss, step.grad_norm) for step in steps], weights


def two_steps_on_ranks(shape, folder, rows):
    """The same on a mesh; weights on rank 0 only."""
    with joined("cpu") as world:
        return two_steps(folder, rows, make_mesh(MeshShape(**shape), "cpu"), world)
