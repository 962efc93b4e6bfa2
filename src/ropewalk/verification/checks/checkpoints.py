"""Check sharded checkpoints: loading restores the state in memory, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.models.compute.losses import LossModel
from ropewalk.models.sharding import gathered_state
from ropewalk.parallel import Mesh, World
from ropewalk.parallel.context import RunContext
from ropewalk.training.checkpoint.files import Position
from ropewalk.training.checkpoint.sharded import ShardedCheckpoints, load_checkpoint
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim, own_mesh
from ropewalk.verification.computing import load_on, load_whole, once_together
from ropewalk.verification.result import Outcome

LEARNING_RATE = 1e-3
STEPS = 2
"""Number of steps before the checkpoint, and again after it."""

State = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class BrokenRun:
    """A short run that saved a checkpoint in the middle.

    Attributes:
        path: folder of the checkpoint.
        saved: weights and optimizer state when the checkpoint was written; empty on ranks other than 0.
        ended: weights and optimizer state at the end of the run; empty on ranks other than 0.
        losses: losses of the steps after the checkpoint.
    """

    path: Path
    saved: State
    ended: State
    losses: tuple[float, ...]


def checkpoint_equals_memory(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Compare weights and optimizer state loaded from a sharded checkpoint, on the mesh and in one process, bitwise."""
    run = once_together(case, world, "broken run", lambda: _broken_run(case, mesh, world))
    model, optimizer = _fresh(case, mesh, world)
    load_checkpoint(run.path, model, optimizer, world, mesh)
    there = _state(model, optimizer, world)
    # The state is gathered on rank 0 alone.
    if not world.is_rank_0:
        return Outcome.not_run("")
    # One process reads the shards of all ranks: a checkpoint must not depend on the mesh that wrote it.
    alone = load_whole(case, torch.float32)
    own = MasterAdamW(alone.named_parameters(), case.optimizer)
    load_checkpoint(run.path, alone, own, World())
    sides = {f"on {mesh.shape}": there, "in one process": _state(alone, own, World())}
    worst, where = max((_largest(state, run.saved), side) for side, state in sides.items())
    return Outcome.within(
        worst[0],
        0.0,
        f"{len(run.saved)} tensors of weights and optimizer, read {' and '.join(sides)}",
        f"{worst[1]} {where} differs after loading the checkpoint from its value when the checkpoint was written; a "
        "resumed run would differ from an uninterrupted one",
    )


def resumed_equals_unbroken(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Compare two steps after a checkpoint, uninterrupted and after loading the checkpoint; bit for bit."""
    run = once_together(case, world, "broken run", lambda: _broken_run(case, mesh, world))
    model, optimizer = _fresh(case, mesh, world)
    load_checkpoint(run.path, model, optimizer, world, mesh)
    losses = _train(case, model, optimizer, mesh)
    ended = _state(model, optimizer, world)
    if not world.is_rank_0:
        return Outcome.not_run("")
    error, name = _largest(ended, run.ended)
    return Outcome.within(
        max(error, *(abs(a - b) for a, b in zip(losses, run.losses, strict=True))),
        # A budget of 0: the same steps on the same mesh repeat every bit, if the checkpoint holds all of the state.
        0.0,
        f"losses, weights and optimizer after {STEPS} + {STEPS} steps over {mesh.shape}",
        f"{name} differs after the resumed steps, whose losses are {losses} instead of {run.losses}: the checkpoint "
        "lacks something that training depends on",
    )


def _fresh(case: Case, mesh: Mesh, world: World) -> tuple[LossModel, MasterAdamW]:
    compute = torch.bfloat16 if case.precision == "bfloat16" else None
    model = load_on(case, mesh, world, torch.float32, compute)
    return model, MasterAdamW(model.named_parameters(), case.optimizer, offload=case.offload_optimizer)


def _broken_run(case: Case, mesh: Mesh, world: World) -> BrokenRun:
    model, optimizer = _fresh(case, mesh, world)
    _train(case, model, optimizer, mesh)
    folder = Path(case.scratch) / f"checkpoints-{case.key}"
    with ShardedCheckpoints(folder, model, optimizer, RunContext(world, mesh), keep=1) as checkpoints:
        path = checkpoints.save(Position(0, STEPS, 0))
    saved = _state(model, optimizer, world)
    # On from the state in memory, which never passed through a file: the run that a resumed one must equal.
    losses = _train(case, model, optimizer, mesh)
    return BrokenRun(path, saved, _state(model, optimizer, world), losses)


def _train(case: Case, model: LossModel, optimizer: MasterAdamW, mesh: Mesh) -> tuple[float, ...]:
    rows = case.rows[mesh.data_rank :: mesh.shape.data_degree]
    batches = micro_batches(rows, case.rows_per_batch, mesh)
    forward = ForwardPass(case.precision, case.offload_activations)
    steps = [train_step(model, batches, optimizer, LEARNING_RATE, forward, mesh) for _ in range(STEPS)]
    return tuple(step.loss for step in steps)


def _state(model: LossModel, optimizer: MasterAdamW, world: World) -> dict[str, Tensor]:
    """Weights and optimizer state, gathered on rank 0; empty on the other ranks."""
    state = {name: tensor.clone() for name, tensor in gathered_state(model.model, world).items()}
    for name, tensor in optimizer.state().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_rank_0:
            state[name] = whole.detach().cpu().clone()
    return state


def _largest(found: State, expected: State) -> tuple[float, str]:
    if found.keys() != expected.keys():
        return float("inf"), sorted(found.keys() ^ expected.keys())[0]
    return max((float((found[name].double() - e.double()).abs().max()), name) for name, e in expected.items())


CLAIMS = (
    Claim(
        "checkpoint",
        100,
        "sharded checkpoint = memory",
        "weights and optimizer state as loaded with those in memory",
        checkpoint_equals_memory,
        own_mesh,
    ),
    Claim(
        "resume",
        110,
        "resumed run = unbroken run",
        "two steps after loading a checkpoint with the same steps without interruption",
        resumed_equals_unbroken,
        own_mesh,
    ),
)
