"""One optimizer step, as a function of model, rows and mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
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
from ropewalk.models.attention.hooks import positions_on
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.compute.offload import Offload
from ropewalk.models.compute.routing import Recorder, Routing, recorded_routing
from ropewalk.parallel import Mesh, ShardedLayouts
from ropewalk.parallel.ring import prepare as prepare_ring
from ropewalk.training.update.clock import Moment, StepClock
from ropewalk.training.update.optimizer import MasterAdamW


@dataclass(frozen=True)
class StepResult:
    """Result of one step, over all ranks.

    Attributes:
        loss: mean loss per trained token, nats.
        grad_norm: global gradient norm before clipping.
        trained_tokens: number of tokens with a target.
        tokens: number of tokens, without the padding of shards.
        applied: False if the loss or the gradient was not finite, in which case the weights are unchanged.
        padding: number of padding tokens in shards.
        routing: routing statistics of a mixture of experts; None for other models.
    """

    loss: float
    grad_norm: float
    trained_tokens: int
    tokens: int
    applied: bool
    padding: int = 0
    routing: Routing | None = None


def autocast(device: torch.device, precision: str, sharded: bool = False) -> AbstractContextManager[Any]:
    """Autocast context of a forward pass for a recipe's precision."""
    if precision == "bfloat16-autocast":
        # The autocast cache would keep a bfloat16 copy of every gathered parameter, hence the whole model on each rank.
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=not sharded)
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one length for one forward pass, either whole or as this rank's shards.

    Attributes:
        input_ids, labels: int64 ``[batch, length]`` on the CPU, labels already shifted.
        layouts: one layout per row, or the sharded layouts.
        is_token: bool ``[batch, length]``, False for padding of a shard or a row.
        padding: number of padding tokens, over all ranks of the sequence group.
    """

    input_ids: Tensor
    labels: Tensor
    layouts: tuple[Any, ...] | ShardedLayouts
    is_token: Tensor
    padding: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row], mesh: Mesh | None) -> Batch:
        """Build a batch. Labels are shifted and positions computed on whole rows, so a shard is a plain selection."""
        layouts = tuple(row.layout for row in rows)
        ids, labels = [row.input_ids for row in rows], [row.labels for row in rows]
        # Padding of a row stands at its end, and is no token for the routing statistics.
        ends = [row.layout.total_length - row.padding for row in rows]
        tokens = [torch.arange(len(each)) < end for each, end in zip(ids, ends, strict=True)]
        if mesh is None or mesh.shape.sequence_degree == 1:
            return cls(torch.stack(ids), torch.stack(labels), layouts, torch.stack(tokens))
        sharded = ShardedLayouts.of(layouts, mesh.groups)
        padding = sum(row.padding for row in sharded.rows)
        # Padding of shards gets token 0, which IGNORED keeps out of the loss.
        shards = sharded.take(ids, 0), sharded.take(labels, IGNORED)
        return cls(*shards, sharded, sharded.take(tokens, False), padding)

    @property
    def tokens(self) -> int:
        """Number of tokens in the whole rows, without padding."""
        layouts = self.layouts.layouts if isinstance(self.layouts, ShardedLayouts) else self.layouts
        return sum(layout.total_length for layout in layouts)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with a target on this rank."""
        return int((self.labels != IGNORED).sum())


def micro_batches(rows: Sequence[Row], rows_per_batch: int = 1, mesh: Mesh | None = None) -> list[Batch]:
    """Split this rank's rows of a step into batches, one per forward pass."""
    return [
        Batch.of(rows[start : start + rows_per_batch], mesh) for start in range(0, len(rows), rows_per_batch)
    ]


def prepare(
    batches: Sequence[Batch],
    engine: EngineName,
    device: torch.device,
    localities: Collection[Locality] = (EVERYTHING,),
) -> list[Batch]:
    """Compute attention plans and positions of micro-batches on the device, so that the step need not wait for them.

    Args:
        batches: micro-batches of the step; plans live as long as their layouts.
        engine: resolved attention engine, not ``auto``.
        device: device of the model.
        localities: the distinct windows and chunks of the model's layers.

    Returns:
        The same batches; for a GPU in pinned memory, so that copies to the device are asynchronous.
    """
    for batch in batches:
        positions_on(batch.layouts, device)
        if not isinstance(batch.layouts, ShardedLayouts):
            prepare_attention(batch.layouts, engine, device, localities)
        # With Ulysses alone, every rank attends over whole rows, for its share of the heads.
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
    """Sum of the token losses of a batch on this rank: a float32 scalar, in nats.

    It is a sum rather than a mean because the divisor is the number of targets of the whole step, over ranks and
    micro-batches.
    """
    device = model.device
    ids, labels = (x.to(device, non_blocking=True) for x in (batch.input_ids, batch.labels))
    losses: Tensor = model(ids, labels, batch.layouts)
    return losses.sum()


@dataclass(frozen=True)
class ForwardPass:
    """Options of a step's forward passes.

    Attributes:
        precision: float32, bfloat16-autocast or bfloat16.
        offload: keep saved activations in CPU memory until the backward.
        router_aux_loss: factor of the load-balancing loss of a mixture of experts; 0 disables it.
    """

    precision: str = "float32"
    offload: bool = False
    router_aux_loss: float = 0.0

    @contextmanager
    def on(self, device: torch.device, sharded: bool) -> Iterator[None]:
        """Context manager for one forward pass.

        Args:
            device: device of the model.
            sharded: whether parameters are gathered from several ranks.
        """
        with ExitStack() as stack:
            stack.enter_context(autocast(device, self.precision, sharded))
            if self.offload:
                stack.enter_context(Offload())
            yield


FLOAT32 = ForwardPass()


def train_step(
    model: LossModel,
    batches: Sequence[Batch],
    optimizer: MasterAdamW,
    learning_rate: float,
    forward: ForwardPass = FLOAT32,
    mesh: Mesh | None = None,
    clock: StepClock | None = None,
) -> StepResult:
    """Run forward and backward over the micro-batches of a step, clip the gradients, and update the weights.

    The loss is the sum over all targets of the step divided by their number, for any split into ranks and
    micro-batches. With ``forward.router_aux_loss``, the load-balancing loss of a mixture of experts is added to the
    objective: a mean over rows, weighted by their tokens. Each row is balanced on its own, because only rows are the
    same for every split into ranks and micro-batches.

    The host synchronises with a GPU once, for the loss and the gradient norm, which decide whether the weights are
    updated. With several ranks it also synchronises at the beginning, for the number of targets.

    Args:
        model: whole model, or sharded over the mesh.
        batches: this rank's micro-batches from :func:`micro_batches`. Ranks of one sequence group get the same rows,
            and all ranks get equally many.
        optimizer: optimizer of the model's parameters.
        learning_rate: learning rate of this step.
        forward: options of the forward passes.
        mesh: mesh of the ranks; None for this process alone.
        clock: clock to mark the step's parts on.

    Raises:
        RopewalkError: if no row of the step has a target, or if the load-balancing loss is requested and transformers
            does not record the model's routers.
    """
    mark: Callable[[Moment], None] = (lambda _: None) if clock is None else clock.mark
    mark("begun")
    ranks = 1 if mesh is None else mesh.shape.world_size
    # Known before the first backward, so that gradients accumulate with their final divisor.
    trained_tokens = _targets(batches, mesh, model.device)
    if trained_tokens == 0:
        message = (
            "no row of this step has a token to train on, because every document is either a single token or a chat "
            "that was cut before its first answer; check the documents"
        )
        # All ranks know the sum, so all raise; an Echo prints nothing, and the message appears once.
        raise RopewalkError(message) if mesh is None or mesh.rank == 0 else Echo(message)
    # Float64, because a step's loss may sum millions of tokens.
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
            # FSDP averages gradients over all ranks, but the loss is a sum over them; the factor undoes the average.
            objective = loss / trained_tokens * ranks
            if tokens is not None:
                part = recorder.balancing_loss(None if mesh is None else mesh.groups) / tokens
                objective = objective + part * (forward.router_aux_loss * ranks)
                aux_loss += part.detach()
            objective.backward()
            optimizer.collect_gradients()
            total += loss.detach()
    routed = _routed(recorder, aux_loss)
    # The sums decide below whether the weights are updated, and the ranks must not decide differently.
    if mesh is not None:
        dist.all_reduce(total)
        for each in routed:
            dist.all_reduce(each)
    norm = optimizer.clip()
    mark("computed")
    summed, grad_norm, *numbers = _read(
        total, norm.full_tensor() if isinstance(norm, DTensor) else norm, *routed
    )
    applied = math.isfinite(summed) and math.isfinite(grad_norm)
    if applied:
        mark("updating")
        optimizer.step(learning_rate)
        mark("updated")
    optimizer.zero_grad()
    # Ranks of one sequence group share their rows, so a group counts once.
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
    """This rank's load-balancing loss and tokens per expert of each router, as one float64 vector.

    The list is empty if the model has no routers. Float64 keeps counts below 2**53 exact.
    """
    totals = [each.double() for each in recorder.totals()]
    return [torch.cat([aux_loss[None], *totals])] if totals else []


def _routing(recorder: Recorder, numbers: Sequence[float]) -> Routing:
    """Routing statistics from the vector of :func:`_routed`, summed over the ranks."""
    aux_loss, *counts = numbers
    tokens = iter(int(count) for count in counts)
    return Routing(
        tuple(tuple(islice(tokens, each.numel())) for each in recorder.totals()),
        aux_loss if recorder.balancing else None,
    )


def _real_tokens(batches: Sequence[Batch], mesh: Mesh | None, device: torch.device) -> Tensor:
    """Number of tokens without padding, over all ranks; it stays on the device to avoid a synchronisation."""
    count = torch.tensor(sum(int(batch.is_token.sum()) for batch in batches), device=device)
    if mesh is not None:
        dist.all_reduce(count)
    return count


def _targets(batches: Sequence[Batch], mesh: Mesh | None, device: torch.device) -> int:
    """Number of tokens with a target, over all ranks."""
    count = sum(batch.trained_tokens for batch in batches)
    if mesh is None:
        return count
    sum_ = torch.tensor(count, device=device)
    dist.all_reduce(sum_)
    return int(_read(sum_)[0])


def _read(*numbers: Tensor) -> list[float]:
    """Copy scalars and vectors to the host as one list, with a single synchronisation."""
    device = numbers[0].device
    found: list[float] = torch.cat([number.double().to(device).flatten() for number in numbers]).tolist()
    return found
