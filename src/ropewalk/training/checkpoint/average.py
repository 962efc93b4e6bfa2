"""Average of the weights of several checkpoints, which are read one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.models.compute.losses import LossModel
from ropewalk.parallel import Mesh, World
from ropewalk.training.checkpoint.sharded import load_weights
from ropewalk.training.checkpoint.single import named_weights


@torch.no_grad()
def load_average(paths: Sequence[Path], trained: LossModel, world: World, mesh: Mesh | None = None) -> None:
    """Load the mean of the weights of checkpoints; every rank must call this function.

    The sum of each tensor is kept in float64, of a sharded model on each rank that of its shard. Beside the sums only
    one checkpoint is in memory. Tensors of whole numbers are those of the last checkpoint.

    Args:
        paths: folders of single-process or sharded checkpoints, the earliest first.
        trained: whole or sharded model.
        world: ranks that hold the model.
        mesh: mesh of this run; None for one process.
    """
    sums: dict[str, Tensor] = {}
    for path in paths:
        load_weights(path, trained, world, mesh)
        for name, tensor in _local_weights(trained).items():
            if name in sums:
                sums[name] += tensor
            else:
                # A copy even of float64 weights, because the next checkpoint is loaded into the same tensors.
                sums[name] = tensor.to(torch.float64, copy=True)
    for name, tensor in _local_weights(trained).items():
        tensor.copy_(sums[name] / len(paths))


def _local_weights(trained: LossModel) -> dict[str, Tensor]:
    """This rank's part of the weights with fractions, sharing their memory."""
    weights = named_weights(trained.model, None).items()
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in weights}
    return {name: tensor for name, tensor in local.items() if tensor.is_floating_point()}
