"""One optimiser step: a function over model, rows and mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.errors import Echo, RopewalkError
from ropewalk.integrations.losses import LossModel
from ropewalk.packing import IGNORED, Row
from ropewalk.parallel import Mesh, ShardedLayouts
from ropewalk.training.optimizer import MasterAdamW


@dataclass(frozen=True)
class StepResult:
    """What one step did, on all ranks together.

    Attributes:
        loss: summed loss over token count, nats a token.
        grad_norm: global norm before clipping.
        trained_tokens: positions that had a target.
        tokens: positions in all, padding of shards not counted.
        applied: False where loss or gradient was not finite, and the weights were left alone.
        padding: places of shards that held no token.
    """

    loss: float
    grad_norm: float
    trained_tokens: int
    tokens: int
    applied: bool
    padding: int = 0


def autocast(device: torch.device, precision: str, sharded: bool = False) -> AbstractContextManager[Any]:
    """The context a forward pass runs in under a recipe's precision."""
    if precision == "bfloat16-autocast":
        # The cache would keep a copy of every gathered parameter until the pass ends: the whole model on every rank.
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=not sharded)
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one length as one forward pass takes them: whole, or this rank's shards of them.

    Attributes:
        input_ids, labels: int64 ``[batch, places]`` on the CPU, labels already shifted.
        layouts: one a row, or how the rows are cut.
        padding: places without a token, on all ranks of the sequence group.
    """

    input_ids: Tensor
    labels: Tensor
    layouts: tuple[Any, ...] | ShardedLayouts
    padding: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row], mesh: Mesh | None) -> Batch:
        """Labels were shifted on the whole row, and positions laid on it: a shard is a plain selection of each."""
        layouts = tuple(row.layout for row in rows)
        ids, labels = [row.input_ids for row in rows], [row.labels for row in rows]
        if mesh is None or mesh.shape.sequence_degree == 1:
            return cls(torch.stack(ids), torch.stack(labels), layouts)
        sharded = ShardedLayouts.of(layouts, mesh.groups)
        padding = sum(row.padding for row in sharded.rows)
        return cls(sharded.take(ids, 0), sharded.take(labels, IGNORED), sharded, padding)

    @property
    def trained_tokens(self) -> int:
        """Positions of this rank that have a target."""
        return int((self.labels != IGNORED).sum())


def summed_loss(model: LossModel, batch: Batch) -> Tensor:
    """Sum of the token losses of a batch's places on this rank: a float32 scalar, in nats.

    A sum and not a mean: only the whole step knows how many tokens it trains, over ranks and micro-batches.
    """
    device = model.device
    losses: Tensor = model(batch.input_ids.to(device), batch.labels.to(device), batch.layouts)
    return losses.sum()


def train_step(
    model: LossModel,
    rows: Sequence[Row],
    optimizer: MasterAdamW,
    learning_rate: float,
    rows_per_batch: int = 1,
    precision: str = "float32",
    mesh: Mesh | None = None,
    offload: bool = False,
) -> StepResult:
    """Forward and backward over all rows in micro-batches, clip, update.

    The loss is the sum over all tokens of the step divided by their number, whatever the ranks and micro-batches.

    Args:
        model: sharded over the mesh, where there is one.
        rows: this rank's rows; ranks of one sequence group get the same ones, and every rank as many.
        optimizer: over the model's parameters.
        learning_rate: of this step.
        rows_per_batch: rows of one forward pass.
        precision: float32, bfloat16-autocast or bfloat16.
        mesh: the ranks that take part; None for this process alone.
        offload: keep what the backward needs in CPU memory until then.

    Raises:
        RopewalkError: if no row of the step has a token to train on.
    """
    batches = [
        Batch.of(rows[start : start + rows_per_batch], mesh) for start in range(0, len(rows), rows_per_batch)
    ]
    ranks = 1 if mesh is None else mesh.shape.world_size
    trained_tokens = round(_over_ranks(sum(batch.trained_tokens for batch in batches), mesh, model.device))
    if trained_tokens == 0:
        message = "none of this step's rows has a token to train on: every document is one token"
        raise RopewalkError(message) if mesh is None or mesh.rank == 0 else Echo(message)
    total = 0.0
    optimizer.zero_grad()
    for batch in batches:
        with ExitStack() as stack:
            stack.enter_context(autocast(model.device, precision, mesh is not None))
            if offload:
                pinned = model.device.type == "cuda"
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pinned))
            loss = summed_loss(model, batch)
        # Sharding wrappers average gradients over all ranks; the loss is a sum over them.
        (loss / trained_tokens * ranks).backward()
        optimizer.collect_gradients()
        total += float(loss.detach().double())
    total = _over_ranks(total, mesh, model.device)
    grad_norm = _number(optimizer.clip())
    applied = math.isfinite(total) and math.isfinite(grad_norm)
    if applied:
        optimizer.step(learning_rate)
    optimizer.zero_grad()
    data_ranks = 1 if mesh is None else mesh.shape.data_degree
    return StepResult(
        total / trained_tokens,
        grad_norm,
        trained_tokens,
        sum(row.layout.total_length for row in rows) * data_ranks,
        applied,
        sum(batch.padding for batch in batches) * data_ranks,
    )


def _over_ranks(value: float, mesh: Mesh | None, device: torch.device) -> float:
    """The sum of every rank's value."""
    if mesh is None:
        return value
    sum_ = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(sum_)
    return float(sum_)


def _number(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
