"""One optimiser step: a function over model, rows and shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.integrations.losses import OutputHead, token_losses
from ropewalk.packing import IGNORED, Row
from ropewalk.parallel import Shard
from ropewalk.training.optimizer import MasterAdamW


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: summed loss over token count, nats a token.
        grad_norm: global norm before clipping.
        trained_tokens: positions that had a target.
        tokens: positions in all.
        applied: False where loss or gradient was not finite, and the weights were left alone.
    """

    loss: float
    grad_norm: float
    trained_tokens: int
    tokens: int
    applied: bool


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context a forward pass runs in under a recipe's precision."""
    if precision == "bfloat16-autocast":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def summed_loss(model: Any, head: OutputHead, rows: Sequence[Row], shard: Shard) -> Tensor:
    """Sum of the token losses of this shard of some rows of equal length: a float32 scalar, in nats.

    A sum and not a mean: only the whole step knows how many tokens it trains, over ranks and micro-batches.
    """
    device = model.device
    input_ids = shard.take(torch.stack([row.input_ids for row in rows])).to(device)
    labels = shard.take(torch.stack([row.labels for row in rows])).to(device)
    position_ids = shard.take(torch.stack([row.layout.position_ids for row in rows])).to(device)
    layouts = tuple(row.layout for row in rows)
    return token_losses(model, input_ids, labels, layouts, head, position_ids).sum()


def train_step(
    model: Any,
    head: OutputHead,
    rows: Sequence[Row],
    optimizer: MasterAdamW,
    learning_rate: float,
    rows_per_batch: int = 1,
    precision: str = "float32",
    shard: Shard | None = None,
) -> StepResult:
    """Forward and backward over all rows in micro-batches, clip, update.

    The loss is the sum over all tokens of the step divided by their number, whatever the micro-batches.
    """
    shard = shard or Shard()
    trained_tokens = sum(int((row.labels != IGNORED).sum()) for row in rows)
    if trained_tokens == 0:
        raise RopewalkError("none of this step's rows has a token to train on: every document is one token")
    total = 0.0
    optimizer.zero_grad()
    for start in range(0, len(rows), rows_per_batch):
        with autocast(model.device, precision):
            loss = summed_loss(model, head, rows[start : start + rows_per_batch], shard)
        (loss / trained_tokens).backward()
        optimizer.collect_gradients()
        total += float(loss.detach().double())
    grad_norm = float(optimizer.clip())
    applied = math.isfinite(total) and math.isfinite(grad_norm)
    if applied:
        optimizer.step(learning_rate)
    optimizer.zero_grad()
    tokens = sum(row.layout.total_length for row in rows)
    return StepResult(total / trained_tokens, grad_norm, trained_tokens, tokens, applied)
