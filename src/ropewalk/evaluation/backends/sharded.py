"""A model that many ranks hold together: losses and likeliest tokens of whole rows, the same on every rank."""

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
from ropewalk.evaluation.backends.in_memory import check_ids, pinned, refuse_unpinned, unless_out_of_memory
from ropewalk.evaluation.backends.likelihoods import RowLosses
from ropewalk.evaluation.backends.protocol import Answer, GenerationRequest, evaluating
from ropewalk.models.losses import NO_NUMBER, LossModel
from ropewalk.parallel import Mesh, ShardedLayouts


@dataclass(frozen=True, eq=False)
class ShardedBackend:
    """Stands where a backend is asked for; it answers nothing, since a sharded model does not generate."""

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
        """Refused.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "a model over several processes generates no answers; run it in one process, or against a server with "
            "--server"
        )


class ShardedLikelihoods:
    """What a model over a mesh gives; every rank asks for the same, reads it to its end, and gets the same.

    Args:
        model: from ``load_sharded``; its training mode and its gradients are left as they were.
        mesh: of the model.

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
        rows = [forced_row(ids, start) for ids, start in targets]
        # A RoPE that depends on the length is that of the whole length, as where an answer is generated.
        with pinned(self.model.model, length):
            found = sharded_likeliest(self.model, rows, self.mesh)
            for (ids, start), likeliest in zip(targets, found, strict=True):
                yield (likeliest[start - 1 : -1] == ids[start:]).tolist()


def row_losses_of(model: LossModel, mesh: Mesh | None) -> RowLosses | None:
    """What gives the losses of rows to ``probe``; None where there is no mesh, and the model is whole."""
    return None if mesh is None else partial(sharded_losses, model, mesh=mesh)


def sharded_losses(model: LossModel, rows: Sequence[Row], mesh: Mesh) -> Iterator[NDArray[np.float64]]:
    """The losses of rows in order; every rank calls this, reads it to its end, and gets the same.

    Args:
        model: sharded over the mesh; its training mode and its gradients are left as they were.
        rows: of any lengths; each group of data ranks takes every n-th of them, cut over its ranks.
        mesh: of the model.

    Returns:
        ``[total_length]`` of each row in nats, 0 where there is no target.

    Raises:
        RunFailure: on a rank whose memory gives out.
    """
    return (losses.double().numpy() for losses in _of_rows(model, rows, mesh, likeliest=False))


def sharded_likeliest(model: LossModel, rows: Sequence[Row], mesh: Mesh) -> Iterator[Tensor]:
    """The likeliest next tokens of rows in order; every rank calls this, reads it to its end, and gets the same.

    Args:
        model, rows, mesh: as for :func:`sharded_losses`.

    Returns:
        int64 ``[total_length]`` of each row on the CPU, ``IGNORED`` where it has no label.

    Raises:
        RunFailure: if the logits are no numbers, or on a rank whose memory gives out.
    """
    for tokens in _of_rows(model, rows, mesh, likeliest=True):
        if bool((tokens == NO_NUMBER).any()):
            raise failure_of_all(
                mesh,
                "the model's logits are no numbers: answers would mean nothing; run it in bfloat16 or float32",
            )
        yield tokens


def forced_row(input_ids: Tensor, start: int) -> Row:
    """One causal row, int64 ``[tokens]``, of which the tokens from ``start``, 1 or more, on are asked for."""
    labels = torch.full_like(input_ids, IGNORED)
    labels[start - 1 : -1] = input_ids[start:]
    return Row(input_ids, labels, PackedLayout.from_lengths([len(input_ids)], "full", anchor_length=0))


def failure_of_all(mesh: Mesh, message: str) -> RunFailure | Echo:
    """What each rank raises where all find the same: the first says it, the others end with it."""
    return RunFailure(message) if mesh.rank == 0 else Echo(message, failed=True)


def _of_rows(model: LossModel, rows: Sequence[Row], mesh: Mesh, likeliest: bool) -> Iterator[Tensor]:
    try:
        for start in range(0, len(rows), mesh.shape.data_degree):
            yield from _round(model, rows[start : start + mesh.shape.data_degree], mesh, likeliest)
    finally:
        # After a forward without a backward the root keeps its parameters gathered, and no optimiser would know them.
        if isinstance(model, FSDPModule):
            model.reshard()


def _round(model: LossModel, rows: Sequence[Row], mesh: Mesh, likeliest: bool) -> list[Tensor]:
    """Values of at most as many rows as there are groups of data ranks, on the CPU."""
    # A group without a row computes the last one again: parameters are gathered from all ranks at every layer.
    taken = rows[min(mesh.data_rank, len(rows) - 1)]
    # Cut together, so that all ranks have as many places to send.
    cuts = ShardedLayouts.of([row.layout for row in rows], mesh.groups).rows
    own = cuts[min(mesh.data_rank, len(rows) - 1)]
    sharded = ShardedLayouts((taken.layout,), (own,), mesh.groups)
    ids, labels = sharded.take([taken.input_ids], 0), sharded.take([taken.labels], IGNORED)
    with evaluating(model):
        forward = partial(model, ids.to(model.device), labels.to(model.device), sharded, likeliest=likeliest)
        values: Tensor | None = unless_out_of_memory(forward)
    if values is None:
        raise RunFailure(
            f"out of memory on {model.device} with {own.shard_length} of the {own.total_length} tokens of a row: cut "
            "rows over more processes, choose shorter lengths, or a dtype of fewer bits"
        )
    held = [torch.empty_like(values[0]) for _ in range(mesh.shape.world_size)]
    dist.all_gather(held, values[0].contiguous())
    degree = mesh.shape.sequence_degree
    # Ranks of a group follow one another in the order of their shards.
    return [cut.join(held[at * degree : (at + 1) * degree]).cpu() for at, cut in enumerate(cuts)]
