"""Losses and gradients of the model, in one process and on a mesh, in float64 where that tells rounding from faults."""

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
from ropewalk.models.intercept import KeepFloat64, run_experts_one_by_one
from ropewalk.models.load import cast_parameters, checkpoint_activations, load_model
from ropewalk.models.losses import LossModel, OutputHead
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, World
from ropewalk.training.checkpoint.files import told_to_all
from ropewalk.training.step import ForwardPass, micro_batches, train_step
from ropewalk.verification.case import Case

T = TypeVar("T")
STRIDE = 0.1
"""Norm of the change of all weights between two steps: large enough to show in the second step's gradients."""


def _widened(model: LossModel) -> AbstractContextManager[Any]:
    """Float64 all the way, if the model is in float64."""
    wide = model.head.linear.weight.dtype == torch.float64
    return KeepFloat64() if wide else nullcontext()


def engine_for(case: Case, dtype: torch.dtype) -> str:
    """The recipe's engine where it computes in a dtype; some are for 16 bits only, and segments is for all."""
    return (
        "segments"
        if dtype == torch.float64 and case.setup.engine in ("auto", "varlen", "flex")
        else case.setup.engine
    )


def load_whole(
    case: Case, dtype: torch.dtype, engine: str | None = None, stored: torch.dtype | None = None
) -> LossModel:
    """The model in this process, with the recipe's RoPE.

    Args:
        case: whose model.
        dtype: to compute in.
        engine: attention engine; the recipe's if None.
        stored: dtype that weights are rounded to before; ``dtype`` if None.
    """
    setup = replace(case.setup, engine=engine or engine_for(case, dtype))
    model = load_model(case.model, setup, stored or dtype, case.device)
    # As in a run: the frequencies of transformers' own rotary module keep their dtype.
    cast_parameters(model, dtype)
    experts_for(model, dtype)
    return LossModel(model, OutputHead.unchecked(model)).train()


def load_on(
    case: Case, mesh: Mesh, world: World, dtype: torch.dtype, compute: torch.dtype | None = None
) -> LossModel:
    """The model sharded over a mesh, as a run loads it; every rank calls this."""
    setup = replace(case.setup, engine=engine_for(case, compute or dtype))
    model = load_sharded(case.model, mesh, world, setup, dtype, compute).train()
    experts_for(model.model, dtype)
    return as_in_a_run(model, case)


def experts_for(model: Any, dtype: torch.dtype) -> None:
    """Make the experts of a model, if it has any, compute in a dtype: in float64 one after the other."""
    if dtype == torch.float64:
        run_experts_one_by_one(model)


def as_in_a_run(model: LossModel, case: Case) -> LossModel:
    """The same model, whose layers are computed again in the backward if the recipe says so; not in float64."""
    # What keeps float64 wide does not hold in the backward.
    if case.gradient_checkpointing and model.head.linear.weight.dtype != torch.float64:
        checkpoint_activations(model.model)
    return model


class Descent:
    """Stands where the optimiser does: keeps the gradients of a step, then goes a fixed distance against them.

    Not AdamW, which makes a whole step of the rounding of a gradient that vanishes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients: list[dict[str, Tensor]] = []
        self._norm = 1.0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def collect_gradients(self) -> None:
        """Gradients are wide enough where they are."""

    def clip(self) -> Tensor:
        """The norm, unclipped; the gradients stay, whole, in CPU memory."""
        held = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.gradients.append({f"gradient of {name}": _whole(gradient) for name, gradient in held.items()})
        norm: Tensor = torch.stack([gradient.norm() for gradient in self.gradients[-1].values()]).norm()
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
    """What a run's own training step computes: for each step its loss, gradient norm and gradients.

    Args:
        model: whole, or sharded over the mesh.
        rows: of the step, over all ranks.
        mesh: None for this process alone.
        rows_per_batch: rows of one forward pass, a number a step; all steps are on the same rows.
        offload: keep what the backward needs in CPU memory, as a recipe may say.
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
        losses: float64 ``[rows, length]``, 0 where there is no target.
        values: ``loss`` and the gradients.
    """

    losses: Tensor
    values: Values


def row_losses(
    model: LossModel, rows: Sequence[Row], losses_of: Callable[[LossModel, Row], Tensor]
) -> RowResult:
    """Mean loss of all targets of rows, its gradients, and each token's loss; row by row, in one process.

    Independent of the training step: one sum, one count, nothing but autograd.

    Args:
        model: whole.
        rows: any number.
        losses_of: the token losses ``[length]`` of one row.
    """
    count = sum(int((row.labels >= 0).sum()) for row in rows)
    model.zero_grad(set_to_none=True)
    kept, total = [], 0.0
    for row in rows:
        with _widened(model):
            losses = losses_of(model, row)
        if losses.requires_grad:
            (losses.sum() / count).backward()
        kept.append(losses.detach().double().cpu())
        total += float(kept[-1].sum())
    gradients = {
        f"gradient of {name}": _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    loss = torch.tensor(total / count, dtype=torch.float64)
    return RowResult(torch.stack(kept), {"loss": loss, **gradients})


def packed_losses(model: LossModel, row: Row) -> Tensor:
    """Token losses ``[length]`` of a row as a run computes them."""
    device = model.device
    losses: Tensor = model(row.input_ids[None].to(device), row.labels[None].to(device), (row.layout,))
    return losses[0]


@lru_cache(maxsize=1)
def _kept(key: str) -> dict[str, Any]:
    """Results of one process that several checks compare with; of the latest case only."""
    return {}


def once(case: Case, name: str, compute: Callable[[], T]) -> T:
    """What ``compute`` gave for this case in this process, computed once; for what one process computes by itself."""
    kept = _kept(case.key)
    if name not in kept:
        kept[name] = compute()
    value: T = kept[name]
    return value


def once_together(case: Case, world: World, name: str, compute: Callable[[], T]) -> T:
    """The same for what all ranks compute together: all of them do as long as one has no result."""
    kept = _kept(case.key)
    if not all(told_to_all(world, name in kept)):
        kept[name] = compute()
    value: T = kept[name]
    return value


ALLOWANCE = 4.0
"""Twice the rounding error, because both sides have it; twice again, because one draw of it tells only its size."""

Values = Mapping[str, Tensor]
"""Quantities by what a user calls them: ``token losses``, ``gradient of lm_head.weight``."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of two sets of quantities.

    Attributes:
        error: norm of the difference over the norm of the expected values; infinite where a value is no number.
        name: of the quantity.
    """

    error: float
    name: str


def largest_difference(found: Values, expected: Values) -> Difference:
    """Over all quantities, in float64 on the CPU."""
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
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else difference


def rounding_budget(narrow: Values, wide: Values, dtype: torch.dtype) -> float:
    """What rounding explains in ``dtype``, from one process's own error.

    Args:
        narrow: quantities as computed in float32.
        wide: the same in float64.
        dtype: in which the two sides of the comparison are computed, float32 or float64; an error shrinks with the unit
            of the arithmetic.
    """
    eps = torch.finfo(dtype).eps
    own = largest_difference(narrow, wide).error * eps / torch.finfo(torch.float32).eps
    return ALLOWANCE * own + eps
