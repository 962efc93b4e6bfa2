"""Backend for a model sharded over ranks: losses and most likely tokens of whole rows, equal on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ropewalk.attention.layout import IGNORED, PackedLayout, Row
from ropewalk.errors import Echo, EngineError, RunFailure
from ropewalk.evaluation.backends.in_memory import check_ids, refuse_unpinned, unless_out_of_memory
from ropewalk.evaluation.backends.likelihoods import RowLosses
from ropewalk.evaluation.backends.protocol import Answer, GenerationRequest, evaluating
from ropewalk.models.compute.losses import NO_NUMBER, LossModel
from ropewalk.models.rope.generation import generating
from ropewalk.parallel import Mesh, ShardedLayouts


@dataclass(frozen=True, eq=False)
class ShardedBackend:
    """Placeholder backend of a sharded model, which gives likelihoods but cannot generate."""

    description: dict[str, Any]

    @classmethod
    def of(cls, model: LossModel, mesh: Mesh) -> ShardedBackend:
        dtype = str(model.model.dtype).removeprefix("torch.")
        device = model.device.type
        return cls(
            {"kind": "sharded", "model": type(model.model).__name__, "dtype": dtype, "device": device}
            | {"parallel": str(mesh.shape)}
        )

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        """Raise, because a sharded model cannot generate.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "a model that is split over several processes cannot generate answers; run the model in one process, or "
            "on a server with --server"
        )


class ShardedLikelihoods:
    """Likelihoods of a model over a mesh.

    Calls are collective: every rank must make the same calls, consume the iterators to the end, and gets the same
    values.

    Args:
        model: a model from ``load_sharded``; its training mode and gradients are left unchanged.
        mesh: mesh of the model.

    Raises:
        RopewalkError: if the model's RoPE depends on the length and cannot be fixed.
    """

    def __init__(self, model: LossModel, mesh: Mesh) -> None:
        refuse_unpinned(model.model)
        self.model, self.mesh = model, mesh

    def check_ids(self, ids: Sequence[int]) -> None:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        check_ids(self.model.model, ids)

    def row_losses(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float64]]:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        return sharded_losses(self.model, rows, self.mesh)

    def matches(self, prompts: Sequence[tuple[Sequence[int], int]], length: int) -> Iterator[list[bool]]:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        targets = [(torch.tensor(ids), start) for ids, start in prompts]
        rows = [teacher_forced_row(ids, start) for ids, start in targets]
        # Fix a length-dependent RoPE at the whole length, as generation does, so that both give the same result.
        with generating(self.model.model, length):
            found = sharded_likeliest(self.model, rows, self.mesh)
            for (ids, start), likeliest in zip(targets, found, strict=True):
                yield (likeliest[start - 1 : -1] == ids[start:]).tolist()


def row_losses_of(model: LossModel, mesh: Mesh | None) -> RowLosses | None:
    """Return the function that computes row losses for ``probe``; None without a mesh, for an unsharded model."""
    return None if mesh is None else partial(sharded_losses, model, mesh=mesh)


def sharded_losses(model: LossModel, rows: Sequence[Row], mesh: Mesh) -> Iterator[NDArray[np.float64]]:
    """Compute the losses of rows, in order. Collective: every rank calls this, consumes all of it, and gets the same.

    Args:
        model: sharded over the mesh; its training mode and gradients are left unchanged.
        rows: rows of any lengths; each data-parallel group takes every n-th row and shards it over its ranks.
        mesh: mesh of the model.

    Returns:
        Losses ``[total_length]`` of each row in nats, 0 at positions without a target.

    Raises:
        RunFailure: on a rank that runs out of memory.
    """
    return (losses.double().numpy() for losses in _of_rows(model, rows, mesh, likeliest=False))


def sharded_likeliest(model: LossModel, rows: Sequence[Row], mesh: Mesh) -> Iterator[Tensor]:
    """Compute the most likely next tokens of rows, in order. Collective, like :func:`sharded_losses`.

    Args:
        model: sharded over the mesh.
        rows: rows of any lengths.
        mesh: mesh of the model.

    Returns:
        int64 ``[total_length]`` of each row on the CPU, ``IGNORED`` at positions without a label.

    Raises:
        RunFailure: if logits are NaN, or on a rank that runs out of memory.
    """
    for tokens in _of_rows(model, rows, mesh, likeliest=True):
        if bool((tokens == NO_NUMBER).any()):
            raise failure_of_all(
                mesh,
                "the model's logits are NaN, so its answers would be meaningless; run the model in bfloat16 or float32",
            )
        yield tokens


def teacher_forced_row(input_ids: Tensor, start: int) -> Row:
    """Build a causal row from int64 ``[tokens]`` in which the tokens from ``start`` (at least 1) on are targets."""
    labels = torch.full_like(input_ids, IGNORED)
    labels[start - 1 : -1] = input_ids[start:]
    return Row(input_ids, labels, PackedLayout.from_lengths([len(input_ids)], "full", anchor_length=0))


def failure_of_all(mesh: Mesh, message: str) -> RunFailure | Echo:
    """Return the exception for a failure that all ranks detect: only rank 0 reports it to the user."""
    return RunFailure(message) if mesh.rank == 0 else Echo(message, RunFailure.status)


def _of_rows(model: LossModel, rows: Sequence[Row], mesh: Mesh, likeliest: bool) -> Iterator[Tensor]:
    try:
        for start in range(0, len(rows), mesh.shape.data_degree):
            yield from _round(model, rows[start : start + mesh.shape.data_degree], mesh, likeliest)
    finally:
        # Without a backward pass, FSDP leaves the root's parameters gathered, where an optimizer cannot use them.
        if isinstance(model, FSDPModule):
            model.reshard()


def _round(model: LossModel, rows: Sequence[Row], mesh: Mesh, likeliest: bool) -> list[Tensor]:
    """Compute the values of up to one row per data-parallel group, on the CPU."""
    # A group without a row repeats the last one, because gathering the parameters of a layer needs every rank.
    taken = rows[min(mesh.data_rank, len(rows) - 1)]
    # Shard all rows together, so that all ranks have shards of equal length for the all_gather.
    cuts = ShardedLayouts.of([row.layout for row in rows], mesh.groups).rows
    own = cuts[min(mesh.data_rank, len(rows) - 1)]
    sharded = ShardedLayouts((taken.layout,), (own,), mesh.groups)
    ids, labels = sharded.take([taken.input_ids], 0), sharded.take([taken.labels], IGNORED)
    with evaluating(model):
        forward = partial(model, ids.to(model.device), labels.to(model.device), sharded, likeliest=likeliest)
        # Memory may run out on one rank only; that rank raises, and torchrun ends the others.
        values: Tensor | None = unless_out_of_memory(forward)
    if values is None:
        raise RunFailure(
            f"out of memory on {model.device} with {own.shard_length} of the {own.total_length} tokens of a row; use "
            "more processes, shorter lengths, or a dtype with fewer bits"
        )
    held = [torch.empty_like(values[0]) for _ in range(mesh.shape.world_size)]
    dist.all_gather(held, values[0].contiguous())
    degree = mesh.shape.sequence_degree
    # The ranks of a group are consecutive, in the order of their shards.
    return [cut.join(held[at * degree : (at + 1) * degree]).cpu() for at, cut in enumerate(cuts)]
