"""Losses and gradients of the model, in one process and on a mesh; in float64, which separates rounding from bugs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ropewalk.attention.layout import Row
from ropewalk.models.compute.float64 import KeepFloat64, compute_decays_again, run_experts_one_by_one
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.compute.pieces import fuse_pieces
from ropewalk.models.compute.tiled_mlp import tile_mlps
from ropewalk.models.load import cast_parameters, checkpoint_activations, load_model
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, World
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step
from ropewalk.verification.case import Case

T = TypeVar("T")
STRIDE = 0.1
"""Norm of the weight update between the two steps; large enough to change the gradients of the second step."""


def _widened(model: LossModel) -> AbstractContextManager[Any]:
    """Context in which a float64 model computes entirely in float64; no effect on other models."""
    wide = model.head.linear.weight.dtype == torch.float64
    return KeepFloat64() if wide else nullcontext()


def engine_for(case: Case, dtype: torch.dtype) -> str:
    """The recipe's engine if it supports the dtype, otherwise ``sdpa``: some engines support only 16-bit floats."""
    return (
        "sdpa"
        if dtype == torch.float64 and case.setup.engine in ("auto", "varlen", "flex")
        else case.setup.engine
    )


def load_whole(
    case: Case, dtype: torch.dtype, engine: str | None = None, stored: torch.dtype | None = None
) -> LossModel:
    """Load the whole model in this process, with the recipe's RoPE.

    Args:
        case: case whose model to load.
        dtype: dtype of computation.
        engine: attention engine; the recipe's if None.
        stored: dtype that the weights are rounded to first; ``dtype`` if None.
    """
    setup = replace(case.setup, engine=engine or engine_for(case, dtype))
    model = load_model(case.model, setup, stored or dtype, case.device)
    # cast_parameters, as in a run, rather than model.to(): inv_freq of transformers' rotary module keeps its dtype.
    cast_parameters(model, dtype)
    exact_in(model, dtype)
    return LossModel(model, OutputHead.unchecked(model)).train()


def load_on(
    case: Case, mesh: Mesh, world: World, dtype: torch.dtype, compute: torch.dtype | None = None
) -> LossModel:
    """Load the model sharded over a mesh, as a run does; every rank must call this function."""
    setup = replace(case.setup, engine=engine_for(case, compute or dtype))
    offload = case.offload_optimizer and dtype != torch.float64
    model = load_sharded(case.model, mesh, world, setup, dtype, compute, offload=offload).train()
    exact_in(model.model, dtype)
    return as_in_a_run(model, case)


def exact_in(model: Any, dtype: torch.dtype) -> None:
    """Compute what transformers leaves in float32, or cannot compute in float64, in float64 if that is the dtype."""
    if dtype == torch.float64:
        run_experts_one_by_one(model)
        compute_decays_again(model)


def as_in_a_run(model: LossModel, case: Case) -> LossModel:
    """Fuse pieces, checkpoint layers, keep attention, and tile MLPs if the recipe does, except in float64."""
    # KeepFloat64 is not active during the recomputation in the backward.
    if model.head.linear.weight.dtype == torch.float64:
        return model
    if case.gradient_checkpointing:
        checkpoint_activations(model.model, case.keeping)
    fuse_pieces(model.model, "inductor" if case.compiled else None)
    if case.tiled_mlp is not None:
        tile_mlps(model.model, case.tiled_mlp)
    return model


class Descent:
    """Stand-in for the optimizer: records the gradients of a step, then moves a fixed distance along their negative.

    AdamW would not do: it normalises gradients, so the rounding error of a vanishing gradient becomes a full step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients: list[dict[str, Tensor]] = []
        self._norm = 1.0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def collect_gradients(self) -> None:
        """Do nothing: gradients already have the dtype that is compared."""

    def clip(self) -> Tensor:
        """Return the gradient norm without clipping, and keep the whole gradients in CPU memory."""
        held = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.gradients.append({f"gradient of {name}": _whole(gradient) for name, gradient in held.items()})
        norm: Tensor = torch.stack([gradient.norm() for gradient in self.gradients[-1].values()]).norm()
        # step() divides by this norm; gradients of exactly 0 move nothing whatever the divisor.
        self._norm = float(norm) or 1.0
        return norm

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=learning_rate / self._norm)


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def trained_steps(
    model: LossModel,
    rows: Sequence[Row],
    mesh: Mesh | None = None,
    rows_per_batch: Sequence[int] = (1, 1),
    offload: bool = False,
) -> list[dict[str, Tensor]]:
    """Loss, gradient norm and gradients of each step, computed by the training step of a run.

    Args:
        model: whole model, or sharded over the mesh.
        rows: rows of each step, over all ranks; all steps use the same rows.
        mesh: mesh of the ranks; None for this process alone.
        rows_per_batch: for each step, the rows per forward pass.
        offload: keep activations for the backward in CPU memory.
    """
    mine = rows if mesh is None else rows[mesh.data_rank :: mesh.shape.data_degree]
    optimizer: Any = Descent(model)
    forward = ForwardPass(offload=offload)
    found = []
    for size in rows_per_batch:
        with _widened(model):
            result = train_step(model, micro_batches(mine, size, mesh), optimizer, STRIDE, forward, mesh)
        numbers = {"loss": result.loss, "gradient norm": result.grad_norm}
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        found.append({**values, **optimizer.gradients.pop()})
    return found


@dataclass(frozen=True, eq=False)
class RowResult:
    """Token losses and gradients of rows.

    Attributes:
        losses: float64 ``[rows, length]``, 0 where a token has no target.
        values: the loss, under ``loss``, and the gradients.
    """

    losses: Tensor
    values: Values


def row_losses(
    model: LossModel, rows: Sequence[Row], losses_of: Callable[[LossModel, Row], Tensor]
) -> RowResult:
    """Mean loss over all targets of the rows, its gradients, and each token's loss; row by row in one process.

    This is independent of the training step: one sum divided by one count, and plain autograd.

    Args:
        model: whole model.
        rows: any number of rows.
        losses_of: function that returns the token losses ``[length]`` of one row.
    """
    count = sum(int((row.labels >= 0).sum()) for row in rows)
    model.zero_grad(set_to_none=True)
    kept, total = [], 0.0
    for row in rows:
        with _widened(model):
            losses = losses_of(model, row)
        # A row without targets has constant losses and no graph.
        if losses.requires_grad:
            # Backward row by row: only one row's graph is in memory, and gradients add up to those of the mean.
            (losses.sum() / count).backward()
        kept.append(losses.detach().double().cpu())
        total += float(kept[-1].sum())
    gradients = {
        f"gradient of {name}": _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }
    # The gradients are copied; the model's own would only take memory.
    model.zero_grad(set_to_none=True)
    loss = torch.tensor(total / count, dtype=torch.float64)
    return RowResult(torch.stack(kept), {"loss": loss, **gradients})


def packed_losses(model: LossModel, row: Row) -> Tensor:
    """Token losses ``[length]`` of a packed row, as in a training run."""
    device = model.device
    losses: Tensor = model(row.input_ids[None].to(device), row.labels[None].to(device), (row.layout,))
    return losses[0]


@lru_cache(maxsize=1)
def _kept(key: str) -> dict[str, Any]:
    """Cache of single-process results that several checks compare with; it holds the latest case only."""
    return {}


def once(case: Case, name: str, compute: Callable[[], T]) -> T:
    """Cached result of ``compute`` for this case in this process; for computations without collectives."""
    kept = _kept(case.key)
    if name not in kept:
        kept[name] = compute()
    value: T = kept[name]
    return value


def once_together(case: Case, world: World, name: str, compute: Callable[[], T]) -> T:
    """Cached result of a collective computation: all ranks compute it again if any rank lacks the result."""
    kept = _kept(case.key)
    if not all(world.gather(name in kept)):
        kept[name] = compute()
    value: T = kept[name]
    return value


ALLOWANCE = 4.0
"""Factor on the measured rounding error: 2 because both sides round, times 2 because one sample only estimates it."""

Values = Mapping[str, Tensor]
"""Quantities by their name in messages, such as ``token losses`` or ``gradient of lm_head.weight``."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference between two sets of quantities.

    Attributes:
        error: norm of the difference divided by the norm of the expected values; infinite if a value is not finite.
        name: name of the quantity with that difference.
    """

    error: float
    name: str


def largest_difference(found: Values, expected: Values) -> Difference:
    """Largest relative difference over all quantities, computed in float64 on the CPU; infinite if names differ."""
    if found.keys() != expected.keys():
        strange = sorted(found.keys() ^ expected.keys())[0]
        return Difference(math.inf, strange)
    return max((Difference(_relative(found[n], e), n) for n, e in expected.items()), key=lambda d: d.error)


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    wide = expected.detach().double().cpu()
    difference = float((found.detach().double().cpu() - wide).norm())
    size = float(wide.norm())
    # NaN would compare as within any budget.
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    # Relative to the norm of the whole tensor: single elements near zero have no meaningful relative error.
    return difference / size if size else difference


def rounding_budget(narrow: Values, wide: Values, dtype: torch.dtype) -> float:
    """Largest difference that rounding in ``dtype`` explains, estimated from the rounding error of one process.

    Args:
        narrow: quantities computed in float32.
        wide: the same quantities computed in float64.
        dtype: dtype in which both sides of the comparison are computed, float32 or float64. The float32 error is
            scaled by the ratio of the two machine epsilons.
    """
    eps = torch.finfo(dtype).eps
    own = largest_difference(narrow, wide).error * eps / torch.finfo(torch.float32).eps
    # The measured error may be 0 by luck, so one rounding is always allowed.
    return ALLOWANCE * own + eps
