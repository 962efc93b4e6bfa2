"""What ranks run in the tests of the training step on models whose attention is more than Llama's."""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from ropewalk import PackedLayout, Row
from ropewalk.attention.layout import IGNORED, next_token_labels
from ropewalk.models.compute.float64 import (
    KeepFloat64,
    compute_decays_again,
    run_experts_one_by_one,
)
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.compute.pieces import fuse_pieces
from ropewalk.models.compute.routing import Recorder
from ropewalk.models.load import AS_IT_IS, cast_parameters, checkpoint_activations, load_model
from ropewalk.models.sharding import gathered_state, load_sharded
from ropewalk.parallel import MeshShape, World, joined, make_mesh
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import Batch, ForwardPass, micro_batches, train_step
from tests.models.families import WINDOW, tiny_model

OPTIMIZER = Optimizer(epsilon=1e-3)
"""AdamW divides the rounding of a gradient that vanishes by its epsilon: one so large that weights compare."""
LEARNING_RATE = 1e-2
BALANCING = 0.5
"""Factor of the load-balancing loss: large enough for its gradient to show."""


def save_family(folder, family):
    """A tiny random model whose windows are shorter than documents, and with sinks and gates that matter.

    It has one layer of each kind.
    """
    tiny_model(family, sharp=True, shallow=True).save_pretrained(folder)


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


def rows_with_padding():
    """Such rows, of which the first ends with padding: tokens of no document that experts compute like others."""
    first, *others = rows_with_anchor()
    labels = first.labels.clone()
    labels[-10:] = IGNORED
    return [replace(first, labels=labels, padding=9), *others]


def two_steps(
    folder,
    rows,
    mesh=None,
    world=None,
    balancing=0.0,
    wide=True,
    checkpointing=False,
    setup=AS_IT_IS,
    backend=None,
    adapter=None,
):
    """Loss, gradient norm and routing of two optimizer steps, and the weights after them.

    In float64 all the way, or in float32; with a backend, norms, MLPs or experts, and rotations are compiled; with an
    adapter, it alone is trained.
    """
    dtype = torch.float64 if wide else torch.float32
    if mesh is None:
        whole = load_model(folder, setup, dtype=dtype)
        if adapter is not None:
            adapter.add_to(whole)
        cast_parameters(whole, dtype)
        model, mine = LossModel(whole, OutputHead.unchecked(whole)), rows
    else:
        model = load_sharded(folder, mesh, world, setup, dtype=dtype, adapter=adapter)
        mine = rows[mesh.data_rank :: mesh.shape.data_degree]
    if wide:
        run_experts_one_by_one(model.model)
        compute_decays_again(model.model)
    model.train()
    if checkpointing:
        checkpoint_activations(model.model)
    if backend is not None:
        torch.compiler.reset()
        fuse_pieces(model.model, backend)
    forward = ForwardPass(router_aux_loss=balancing)
    with KeepFloat64() if wide else nullcontext():
        optimizer = MasterAdamW(model.named_parameters(), OPTIMIZER)
        steps = [
            train_step(model, micro_batches(mine, 1, mesh), optimizer, LEARNING_RATE, forward, mesh)
            for _ in range(2)
        ]
    weights = gathered_state(model.model, world or World())
    return [(step.loss, step.grad_norm, step.routing) for step in steps], weights


def two_steps_on_ranks(shape, folder, rows, options=None):
    """The same on a mesh; weights on rank 0 only."""
    with joined("cpu") as world:
        return two_steps(folder, rows, make_mesh(MeshShape(**shape), "cpu"), world, **options or {})


def two_steps_wrongly(fault, *args):
    """The same with a fault in what is balanced."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "each rank's own shares":
            sound = Recorder.balancing_loss
            patch.setattr(Recorder, "balancing_loss", lambda self, groups: sound(self, None))
        else:
            sound_batch = Batch.of.__func__

            def counting_padding(cls, rows, mesh):
                batch = sound_batch(cls, rows, mesh)
                return replace(batch, is_token=torch.ones_like(batch.is_token))

            patch.setattr(Batch, "of", classmethod(counting_padding))
        return two_steps_on_ranks(*args)
