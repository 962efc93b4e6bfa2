"""One optimiser step: a function over model, rows and mesh."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.attention import EngineName
from ropewalk.attention import prepare as prepare_attention
from ropewalk.attention.layout import IGNORED, Row
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.errors import Echo, RopewalkError
from ropewalk.models.attention_hooks import positions_on
from ropewalk.models.losses import LossModel
from ropewalk.models.routing import Recorder, Routing, recorded_routing
from ropewalk.parallel import Mesh, ShardedLayouts
from ropewalk.parallel.ring import prepare as prepare_ring
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
        routing: what a mixture of experts did with the tokens; None of other models.
    """

    loss: float
    grad_norm: float
    trained_tokens: int
    tokens: int
    applied: bool
    padding: int = 0
    routing: Routing | None = None


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
        is_token: bool ``[batch, places]``: False where a place only fills its shard or its row up.
        padding: places without a token, on all ranks of the sequence group.
    """

    input_ids: Tensor
    labels: Tensor
    layouts: tuple[Any, ...] | ShardedLayouts
    is_token: Tensor
    padding: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row], mesh: Mesh | None) -> Batch:
        """Labels were shifted on the whole row, and positions laid on it: a shard is a plain selection of each."""
        layouts = tuple(row.layout for row in rows)
        ids, labels = [row.input_ids for row in rows], [row.labels for row in rows]
        ends = [row.layout.total_length - row.padding for row in rows]
        tokens = [torch.arange(len(each)) < end for each, end in zip(ids, ends, strict=True)]
        if mesh is None or mesh.shape.sequence_degree == 1:
            return cls(torch.stack(ids), torch.stack(labels), layouts, torch.stack(tokens))
        sharded = ShardedLayouts.of(layouts, mesh.groups)
        padding = sum(row.padding for row in sharded.rows)
        shards = sharded.take(ids, 0), sharded.take(labels, IGNORED)
        return cls(*shards, sharded, sharded.take(tokens, False), padding)

    @property
    def tokens(self) -> int:
        """Tokens of the whole rows, padding not counted."""
        layouts = self.layouts.layouts if isinstance(self.layouts, ShardedLayouts) else self.layouts
        return sum(layout.total_length for layout in layouts)

    @property
    def trained_tokens(self) -> int:
        """Positions of this rank that have a target."""
        return int((self.labels != IGNORED).sum())


def micro_batches(rows: Sequence[Row], rows_per_batch: int = 1, mesh: Mesh | None = None) -> list[Batch]:
    """A step's rows on this rank, as its forward passes take them."""
    return [
        Batch.of(rows[start : start + rows_per_batch], mesh) for start in range(0, len(rows), rows_per_batch)
    ]


def prepare(
    batches: Sequence[Batch],
    engine: EngineName,
    device: torch.device,
    localities: Collection[Locality] = (EVERYTHING,),
) -> list[Batch]:
    """Micro-batches whose attention plans and positions are on the device already, for which a step need not wait.

    Args:
        batches: that the step will be on; plans live as long as their layouts.
        engine: that attends, not ``auto``.
        device: the model's.
        localities: how far back the queries of its layers see, each once.

    Returns:
        The same batches; for a GPU in pinned memory, from where their copies wait for nothing.
    """
    for batch in batches:
        positions_on(batch.layouts, device)
        if not isinstance(batch.layouts, ShardedLayouts):
            prepare_attention(batch.layouts, engine, device, localities)
        elif batch.layouts.groups.ring == 1:
            prepare_attention(batch.layouts.layouts, engine, device, localities)
        else:
            prepare_ring(batch.layouts, engine, device, localities)
    if device.type != "cuda":
        return list(batches)
    return [
        replace(
            batch,
            input_ids=batch.input_ids.pin_memory(),
            labels=batch.labels.pin_memory(),
            is_token=batch.is_token.pin_memory(),
        )
        for batch in batches
    ]


def summed_loss(model: LossModel, batch: Batch) -> Tensor:
    """Sum of the token losses of a batch's places on this rank: a float32 scalar, in nats.

    A sum and not a mean: only the whole step knows how many tokens it trains, over ranks and micro-batches.
    """
    device = model.device
    ids, labels = (x.to(device, non_blocking=True) for x in (batch.input_ids, batch.labels))
    losses: Tensor = model(ids, labels, batch.layouts)
    return losses.sum()


@dataclass(frozen=True)
class ForwardPass:
    """How a step's forward passes compute.

    Attributes:
        precision: float32, bfloat16-autocast or bfloat16.
        offload: keep what the backward needs in CPU memory until then.
        router_aux_loss: factor of the load-balancing loss of a mixture of experts; 0 leaves it out.
    """

    precision: str = "float32"
    offload: bool = False
    router_aux_loss: float = 0.0

    @contextmanager
    def on(self, device: torch.device, sharded: bool) -> Iterator[None]:
        """The context of one forward pass.

        Args:
            device: the model's.
            sharded: whether its parameters are gathered from several ranks.
        """
        with ExitStack() as stack:
            stack.enter_context(autocast(device, self.precision, sharded))
            if self.offload:
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"))
            yield


FLOAT32 = ForwardPass()


def train_step(
    model: LossModel,
    batches: Sequence[Batch],
    optimizer: MasterAdamW,
    learning_rate: float,
    forward: ForwardPass = FLOAT32,
    mesh: Mesh | None = None,
) -> StepResult:
    """Forward and backward over a step's micro-batches, clip, update.

    The loss is the sum over all tokens of the step divided by their number, whatever the ranks and micro-batches. So is
    the load-balancing loss of a mixture of experts, which ``forward`` may add to what the gradient is of: a mean over
    rows, weighted with their tokens. A row is balanced by itself, because it is what one forward pass sees under any
    arrangement of ranks and micro-batches.

    On a device of its own the host waits for it once, for loss and gradient norm, which decide whether the weights
    are updated; over several ranks a second time, at the beginning, for the number of targets.

    Args:
        model: sharded over the mesh, where there is one.
        batches: of this rank, as :func:`micro_batches` makes them of its rows; ranks of one sequence group get the same
            rows, and every rank as many.
        optimizer: over the model's parameters.
        learning_rate: of this step.
        forward: how the forward passes compute.
        mesh: the ranks that take part; None for this process alone.

    Raises:
        RopewalkError: if no row of the step has a token to train on, or the load-balancing loss is asked for and the
            model has no routers that transformers records.
    """
    ranks = 1 if mesh is None else mesh.shape.world_size
    trained_tokens = _targets(batches, mesh, model.device)
    if trained_tokens == 0:
        message = "none of this step's rows has a token to train on: every document is one token"
        raise RopewalkError(message) if mesh is None or mesh.rank == 0 else Echo(message)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    aux_loss = torch.zeros_like(total)
    tokens = _real_tokens(batches, mesh, model.device) if forward.router_aux_loss else None
    optimizer.zero_grad()
    with recorded_routing(model.model, balancing=tokens is not None) as recorder:
        for batch in batches:
            if recorder.routers:
                recorder.begin(batch.is_token.to(model.device, non_blocking=True))
            with forward.on(model.device, mesh is not None):
                loss = summed_loss(model, batch)
            recorder.end()
            # Sharding wrappers average gradients over all ranks; the loss is a sum over them.
            objective = loss / trained_tokens * ranks
            if tokens is not None:
                part = recorder.balancing_loss(None if mesh is None else mesh.groups) / tokens
                objective = objective + part * (forward.router_aux_loss * ranks)
                aux_loss += part.detach()
            objective.backward()
            optimizer.collect_gradients()
            total += loss.detach()
    routed = _routed(recorder, aux_loss)
    if mesh is not None:
        dist.all_reduce(total)
        for each in routed:
            dist.all_reduce(each)
    norm = optimizer.clip()
    summed, grad_norm, *numbers = _read(
        total, norm.full_tensor() if isinstance(norm, DTensor) else norm, *routed
    )
    applied = math.isfinite(summed) and math.isfinite(grad_norm)
    if applied:
        optimizer.step(learning_rate)
    optimizer.zero_grad()
    data_ranks = 1 if mesh is None else mesh.shape.data_degree
    return StepResult(
        summed / trained_tokens,
        grad_norm,
        trained_tokens,
        sum(batch.tokens for batch in batches) * data_ranks,
        applied,
        sum(batch.padding for batch in batches) * data_ranks,
        _routing(recorder, numbers) if numbers else None,
    )


def _routed(recorder: Recorder, aux_loss: Tensor) -> list[Tensor]:
    """The load-balancing loss and the tokens of each router's experts, as one float64 vector of this rank.

    None where there are no routers. Counts stay exact below 2**53.
    """
    totals = [each.double() for each in recorder.totals()]
    return [torch.cat([aux_loss[None], *totals])] if totals else []


def _routing(recorder: Recorder, numbers: Sequence[float]) -> Routing:
    """What :func:`_routed` gave, summed over the ranks."""
    aux_loss, *counts = numbers
    tokens = iter(int(count) for count in counts)
    return Routing(
        tuple(tuple(islice(tokens, each.numel())) for each in recorder.totals()),
        aux_loss if recorder.balancing else None,
    )


def _real_tokens(batches: Sequence[Batch], mesh: Mesh | None, device: torch.device) -> Tensor:
    """Places that hold a token, on all ranks; it stays on the device, which nobody waits for."""
    count = torch.tensor(sum(int(batch.is_token.sum()) for batch in batches), device=device)
    if mesh is not None:
        dist.all_reduce(count)
    return count


def _targets(batches: Sequence[Batch], mesh: Mesh | None, device: torch.device) -> int:
    """Positions with a target, on all ranks."""
    count = sum(batch.trained_tokens for batch in batches)
    if mesh is None:
        return count
    sum_ = torch.tensor(count, device=device)
    dist.all_reduce(sum_)
    return int(_read(sum_)[0])


def _read(*numbers: Tensor) -> list[float]:
    """Numbers, or vectors of them, from their device, which the host waits for."""
    device = numbers[0].device
    found: list[float] = torch.cat([number.double().to(device).flatten() for number in numbers]).tolist()
    return found
